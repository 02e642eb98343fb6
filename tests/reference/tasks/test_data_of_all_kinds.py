"""Observations that are no dense tensors, sizes that change, resets that take options, states that are given."""

from __future__ import annotations

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from envkit import (
    Bounded,
    Categorical,
    Composite,
    EnvBase,
    GymEnv,
    NonTensor,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    Unbounded,
    check_env_specs,
    step_mdp,
    terminated_or_truncated,
)


class Chat(EnvBase):
    """The observation is a text that grows."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(history=NonTensor(shape=(), example_data="hello"))
        self.action_spec = Composite(answer=NonTensor(shape=(), example_data="yes"))
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict=None, **kwargs):
        self.text = "user: hi"
        return TensorDict({"history": NonTensorData(self.text)})

    def _step(self, tensordict):
        self.text += " | agent: " + tensordict["answer"]
        done = torch.tensor([self.text.count("|") >= 3])
        return TensorDict(
            {"history": NonTensorData(self.text), "reward": torch.ones(1), "done": done}
        )

    def _set_seed(self, seed):
        pass


def answering(td):
    return td.set("answer", NonTensorData(f"answer {td['history'].count('|')}"))


def test_a_conversation_is_data():
    env = Chat()

    rollout = env.rollout(10, answering)

    assert rollout.shape == (3,)
    assert rollout[-1]["next", "history"].endswith("agent: answer 2")
    assert [step["history"].count("|") for step in rollout.unbind(0)] == [0, 1, 2]


def test_conversations_are_batched():
    env = SerialEnv(2, Chat)

    def policy(td):
        return LazyStackedTensorDict.maybe_dense_stack([answering(row) for row in td.unbind(0)])

    td = env.reset()
    td = env.step(policy(td))

    assert td["next", "history"] == ["user: hi | agent: answer 0"] * 2


class Growing(EnvBase):
    """An observation whose last axis is as long as the episode so far."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(path=Unbounded(shape=(-1, 2)))
        self.action_spec = Bounded(-1, 1, shape=(2,))
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict=None, **kwargs):
        self.path = torch.zeros(1, 2)
        return TensorDict({"path": self.path.clone()})

    def _step(self, tensordict):
        self.path = torch.cat([self.path, tensordict["action"].unsqueeze(0)])
        return TensorDict(
            {
                "path": self.path.clone(),
                "reward": torch.ones(1),
                "done": torch.zeros(1, dtype=torch.bool),
            }
        )

    def _set_seed(self, seed):
        pass


def test_shapes_that_change_are_rolled_out_as_a_lazy_stack():
    env = Growing()
    check_env_specs(env, return_contiguous=False)

    rollout = env.rollout(4, return_contiguous=False)

    assert isinstance(rollout, LazyStackedTensorDict)
    assert [step["path"].shape[0] for step in rollout.unbind(0)] == [1, 2, 3, 4]


# -------------------------------------------------------------------------------- resets with options


class Maze(EnvBase):
    """A walk on a line; where it begins may be said."""

    batch_locked = False

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(cell=Unbounded(shape=(1,), dtype=torch.int64))
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Categorical(2)
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict=None, start=0, **kwargs):
        shape = () if tensordict is None else tensordict.shape
        return TensorDict({"cell": torch.full((*shape, 1), start)}, batch_size=shape)

    def _step(self, tensordict):
        cell = tensordict["cell"] + 2 * tensordict["action"].unsqueeze(-1) - 1
        done = cell.abs() >= 3
        return TensorDict(
            {"cell": cell, "reward": done.float(), "done": done}, batch_size=tensordict.shape
        )

    def _set_seed(self, seed):
        pass


def right(td):
    return td.set("action", torch.ones(td.shape, dtype=torch.int64))


def test_a_reset_takes_options():
    env = Maze()

    assert env.reset(start=2)["cell"].item() == 2
    assert env.rollout(5, right, tensordict=env.reset(start=-2), auto_reset=False).shape == (5,)


def test_an_env_without_a_state_of_its_own_steps_what_it_is_given():
    env = Maze()
    td = TensorDict(
        {"cell": torch.tensor([[0], [2]]), "action": torch.ones(2, dtype=torch.int64)}, [2]
    )

    out = env.step(td)

    assert out["next", "cell"].flatten().tolist() == [1, 3]
    assert out["next", "done"].flatten().tolist() == [False, True]


def test_a_loop_written_by_hand():
    env = TransformedEnv(Maze(), StepCounter())
    td = env.reset()
    steps = []
    for _ in range(7):
        td = right(td)
        td, td_next = env.step_and_maybe_reset(td)
        steps.append(td)
        td = td_next

    trajectory = torch.stack(steps, -1)

    assert trajectory["cell"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert trajectory["step_count"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_loop_that_resets_by_hand():
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    env.set_seed(0)
    td, ends = env.reset(), 0
    for _ in range(60):
        td = env.step(env.rand_action(td))
        td = step_mdp(td)
        if terminated_or_truncated(td, full_done_spec=env.full_done_spec, key="_reset"):
            ends += int(td["_reset"].sum())
            td = env.reset(td)
        assert "_reset" not in td.keys()

    assert ends > 1


def test_maybe_reset_begins_what_has_ended():
    env = Maze()
    td = right(env.reset(TensorDict(batch_size=[2])))
    td["cell"] = torch.tensor([[2], [0]])

    td = env.maybe_reset(step_mdp(env.step(td)))

    assert td["cell"].flatten().tolist() == [0, 1]


def test_several_rollouts_go_on_where_the_last_one_stopped():
    env = Maze()

    first = env.rollout(2, right)
    td = step_mdp(first[-1])
    second = env.rollout(1, right, auto_reset=False, tensordict=td)

    assert second["next", "cell"].item() == 3


def test_rows_of_a_rollout_that_end_at_other_times_wait():
    env = Maze()
    td = env.reset(TensorDict(batch_size=[3]))
    td["cell"] = torch.tensor([[0], [1], [2]])

    rollout = env.rollout(
        10,
        right,
        tensordict=td,
        auto_reset=False,
        break_when_all_done=True,
        break_when_any_done=False,
    )

    assert rollout.shape == (3, 3)
    assert rollout["next", "done"][:, -1].all()


@pytest.mark.parametrize("frozen", [True, False])
def test_only_some_rows_are_stepped(frozen):
    env = SerialEnv(2, Maze)
    td = right(env.reset())
    td["_step"] = torch.tensor([not frozen, True])

    out = step_mdp(env.step(td))

    assert out["cell"].flatten().tolist() == [0 if frozen else 1, 1]
