"""Partial steps and resets, example by example, and the contract around them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from envkit import Compose, InitTracker, RewardSum, SerialEnv, StepCounter, TransformedEnv
from envkit.env.base import EnvBase
from envkit.specs import Categorical, Composite, Unbounded
from tests.zoo.envs import Count, StatelessCount

F, T = False, True


def td_of(batch=(), **leaves):
    return TensorDict({name: torch.tensor(value) for name, value in leaves.items()}, batch)


class Zeros(EnvBase):
    """Returns zeros on reset; done leaves of shape (2,) in the nodes given, no batch."""

    def __init__(self, *nodes: str, root: bool = False, **kwargs):
        super().__init__(**kwargs)
        flag = Categorical(2, shape=(2,), dtype=torch.bool)
        val = Unbounded((2,), dtype=torch.int64)
        self.observation_spec = (
            Composite({node: Composite(val=val.clone()) for node in nodes})
            if nodes
            else Composite(val=val)
        )
        done = {node: Composite(done=flag.clone()) for node in nodes}
        if root or not nodes:
            done["done"] = flag
        self.done_spec = Composite(done)
        self.nodes = nodes
        self.action_spec = Unbounded((1,))

    def _reset(self, td, **kwargs):
        out = TensorDict({}, [])
        for node in self.nodes or [None]:
            key = "val" if node is None else (node, "val")
            out.set(key, torch.zeros(2, dtype=torch.int64))
        return out

    def _step(self, td):
        return self._reset(td)

    def _set_seed(self, seed):
        pass


def groups(mask0=None, mask1=None, root=None):
    td = TensorDict(
        {
            "agent0": {"val": torch.tensor([1, 1])},
            "agent1": {"val": torch.tensor([2, 2])},
        },
        [],
    )
    for key, mask in {
        ("agent0", "_reset"): mask0,
        ("agent1", "_reset"): mask1,
        "_reset": root,
    }.items():
        if mask is not None:
            td[key] = torch.tensor(mask)
    return td


def has_private(td) -> bool:
    return any("_reset" in key or "_step" in key for key in td.keys(True, True))


# ------------------------------------------------------------------------------------------ resets


def test_e1_a_mask_selects_along_the_shape():
    td = td_of(val=[1, 1], _reset=[F, T])

    out = Zeros().reset(td)

    assert out is td
    assert out["val"].tolist() == [1, 0]
    assert not has_private(out)


@pytest.mark.parametrize(
    ("masks", "root_done", "agent0", "agent1"),
    [
        (([F, T], [T, F], None), False, [1, 0], [0, 2]),  # E2
        (([F, T], [T, F], [T, T]), True, [0, 0], [0, 0]),  # E3
        (([F, T], [T, F], [T, F]), True, [0, 1], [0, 2]),  # E4
        (([F, T], None, None), False, [1, 0], [0, 0]),  # E5
    ],
    ids=["E2", "E3", "E4", "E5"],
)
def test_nested_masks_obey_their_level_and_the_root_rules_all(masks, root_done, agent0, agent1):
    make = partial(Zeros, "agent0", "agent1", root=root_done)

    for env in (make(), SerialEnv(2, make), SerialEnv(2, make, use_buffers=True)):
        if env.batch_size:
            env.reset()
        out = env.reset(groups(*masks).expand(env.batch_size).clone())

        rows = out if env.batch_size else out.unsqueeze(0)
        for row in rows.unbind(0):
            assert row["agent0", "val"].tolist() == agent0
            assert row["agent1", "val"].tolist() == agent1
        assert not has_private(out)
        env.close()


@pytest.mark.parametrize("mask", [[F, T], [[F], [T]]])
def test_a_batch_mask_may_carry_the_trailing_singleton(mask):
    class Batch(Zeros):
        def __init__(self):
            EnvBase.__init__(self, batch_size=[2])
            self.observation_spec = Composite(val=Unbounded((2,), dtype=torch.int64), shape=[2])
            self.action_spec = Unbounded((2, 1))
            self.nodes = ()

        def _reset(self, td, **kwargs):
            return TensorDict({"val": torch.zeros(2, dtype=torch.int64)}, [2])

    out = Batch().reset(td_of([2], val=[1, 1], _reset=mask))

    assert out["val"].tolist() == [1, 0]
    assert out["done"].tolist() == [[F], [F]]
    assert not has_private(out)


class Sevens(StatelessCount):
    """Begins at 7, so that a new episode differs from nothing at all."""

    def _reset(self, td, **kwargs):
        out = super()._reset(td)
        return out.set("count", out["count"] + 7)


def test_what_the_data_lacks_is_zero_where_nothing_was_reset():
    out = Sevens(99).reset(td_of([2], _reset=[[T], [F]]))

    assert out["count"].tolist() == [[7], [0]]
    assert out["done"].tolist() == out["terminated"].tolist() == [[F], [F]]


class Team(EnvBase):
    """Agents with flags of their own, and an entry of their node that all share."""

    def __init__(self, batch: list[int], agents: int):
        super().__init__(batch_size=batch)
        self.agents = agents
        flag = Categorical(2, shape=(*batch, agents), dtype=torch.bool)
        self.observation_spec = Composite(
            team=Composite(
                own=Unbounded((*batch, agents)), shared=Unbounded((*batch, 1)), shape=batch
            ),
            shape=batch,
        )
        self.done_spec = Composite(team=Composite(done=flag, shape=batch), shape=batch)
        self.action_spec = Unbounded((*batch, 1))

    def _reset(self, td, **kwargs):
        own, shared = (torch.zeros(*self.batch_size, size) for size in (self.agents, 1))
        return TensorDict({"team": {"own": own, "shared": shared}}, self.batch_size)

    def _step(self, td):
        return self._reset(td)

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize(
    ("batch", "mask", "of_agents", "shared"),
    [
        ([], [F, T], [1, 0], [0]),
        ([], [F, F], [1, 1], [1]),
        ([], [T, T], [0, 0], [0]),
        ([2], [[F, T, F], [F, F, F]], [[1, 0, 1], [1, 1, 1]], [[0], [1]]),
        ([2], [[F, F, F], [T, T, T]], [[1, 1, 1], [0, 0, 0]], [[1], [0]]),
    ],
)
def test_what_all_agents_share_is_reset_with_any_of_them(batch, mask, of_agents, shared):
    mask = torch.tensor(mask)
    node = {"own": torch.ones(mask.shape), "shared": torch.ones(*batch, 1), "_reset": mask}

    out = Team(batch, mask.shape[-1]).reset(TensorDict({"team": node}, batch))

    assert out["team", "own"].tolist() == of_agents
    assert out["team", "shared"].tolist() == shared
    assert not has_private(out)


def transformed_count() -> TransformedEnv:
    return TransformedEnv(Count(9), Compose(StepCounter(), RewardSum(), InitTracker()))


@pytest.mark.parametrize("make", [partial(Count, 9), transformed_count])
@pytest.mark.parametrize("mask", [[F], F])
def test_a_mask_that_selects_nothing_leaves_one_simulator_alone(make, mask):
    env = make()
    td = env.rand_action(env.step_mdp(env.rand_step(env.step_mdp(env.rand_step(env.reset())))))
    before = td.clone()

    out = env.reset(td.set("_reset", torch.tensor(mask)))

    assert out is td
    assert (out == before).all() and out.keys() == before.keys()
    assert env.c == 2
    assert env.step(td)["next", "count"].item() == 3


@pytest.mark.parametrize("make", [partial(Count, 9), transformed_count])
def test_a_mask_alone_gives_zeros_and_leaves_the_simulator_alone(make):
    env = make()
    env.rollout(2)

    out = env.reset(td_of(_reset=[F]))

    assert env.c == 2
    assert set(out.keys()) == {*env.observation_keys, *env.done_keys}
    assert not any(value.any() for value in out.values())


def test_a_level_that_no_mask_decides_for_resets_the_simulator():
    calls = []

    class Counted(Zeros):
        def _reset(self, td, **kwargs):
            calls.append(td)
            return super()._reset(td)

    env = Counted("agent0", "agent1")
    env.reset(groups([F, F], None))
    env.reset(groups([F, F], [F, F]))
    with_root = Counted("agent0", "agent1", root=True)
    with_root.reset(groups([T, T], None, root=[F, F]))

    assert len(calls) == 1


def test_hidden_changes_of_unselected_parts_are_lost():
    class Vandal(Zeros):
        def _reset(self, td, **kwargs):
            return TensorDict({"val": torch.full((2,), 99)}, [])

    assert Vandal().reset(td_of(val=[1, 1], _reset=[F, T]))["val"].tolist() == [1, 99]


def test_a_mask_beside_no_done_leaf_is_ignored():
    td = TensorDict({"val": torch.tensor([1, 1]), "nested": {"_reset": torch.tensor([F, F])}}, [])

    out = Zeros().reset(td)

    assert out["val"].tolist() == [0, 0]
    assert not has_private(out)


def test_maybe_reset_touches_only_what_is_done():
    env = Count(10)
    running, ended = td_of(count=[9], done=[F]), td_of(count=[9], done=[T])

    assert env.maybe_reset(running) is running
    assert running["count"].item() == 9
    assert env.maybe_reset(ended)["count"].item() == 0
    assert not ended["done"].item()


# ------------------------------------------------------------------------------------------- steps


def stateless_input(**extra):
    return td_of(
        [3], count=[[10], [20], [30]], done=[[F], [F], [F]], action=[[0], [0], [0]], **extra
    )


def test_example_a_a_mask_steps_only_its_rows():
    out = StatelessCount(99).step(stateless_input(_step=[T, F, T]))

    assert out["count"].tolist() == [[10], [20], [30]]
    assert out["next", "count"].tolist() == [[11], [20], [31]]
    assert out["next", "reward"].tolist() == [[1.0], [0.0], [1.0]]
    assert out["next", "done"].tolist() == [[F], [F], [F]]
    assert not has_private(out)


@pytest.mark.parametrize("rows", [[T, F, T], [F, F, F]])
def test_a_step_of_some_rows_writes_into_what_it_is_given_and_takes_the_mask_out(rows):
    td = stateless_input(_step=rows)

    assert StatelessCount(99).step(td) is td
    assert "_step" not in td.keys()


def test_a_mask_without_any_row_calls_nothing():
    env = StatelessCount(99)

    out = env.step(stateless_input(_step=[F, F, F]))

    assert env.calls == 0
    assert out["next", "count"].tolist() == [[10], [20], [30]]


def test_example_c_a_single_env_is_skipped():
    env = Count(99)
    env.reset()
    td = td_of(count=[42], action=[0], _step=False)

    out = env.step(td)

    assert out["next", "count"].item() == 42
    assert not out["next", "done"].item()
    assert out["next", "reward"].item() == 0
    assert env.steps == 0


def test_skipped_values_are_zero_where_the_input_lacks_the_key():
    env = Count(99)
    env.reset()

    out = env.step(td_of(action=[0], _step=[False]))

    assert out["next", "count"].item() == 0


@pytest.mark.parametrize("count", [[1, 2], [[1]], 1])
def test_a_root_value_of_another_shape_does_not_stand_in_for_one_that_was_not_made(count):
    env = Count(99)
    env.reset()

    out = env.step(td_of(count=count, action=[0], _step=False))

    assert out["next", "count"].tolist() == [0]


def test_a_custom_batched_env_gets_the_mask_and_is_trusted():
    class Batch(EnvBase):
        def __init__(self):
            super().__init__(batch_size=[3])
            self.observation_spec = Composite(x=Unbounded((3, 1)), shape=[3])
            self.action_spec = Unbounded((3, 1))

        def _reset(self, td):
            return TensorDict({"x": torch.zeros(3, 1)}, [3])

        def _step(self, td):
            self.seen = td["_step"]
            return TensorDict({"x": torch.ones(3, 1)}, [3])

        def _set_seed(self, seed):
            pass

    env = Batch()
    td = env.rand_action(env.reset())

    out = env.step(td.set("_step", torch.tensor([T, F, T])))

    assert env.seen.tolist() == [T, F, T]
    assert out["next", "x"].tolist() == [[1.0], [1.0], [1.0]]


class ByMask(EnvBase):
    """Two rows that use the `_reset` mask as it is promised: in the shape of the done flags beside it."""

    def __init__(self):
        super().__init__(batch_size=[2])
        self.observation_spec = Composite(at=Unbounded((2, 1)), shape=(2,))
        self.action_spec = Unbounded((2, 1))
        self.reward_spec = Unbounded((2, 1))
        self.at = torch.zeros(2, 1)

    def _reset(self, td, **kwargs):
        mask = td.get("_reset", None) if td is not None else None
        self.at = torch.zeros(2, 1) if mask is None else torch.where(mask, 0.0, self.at)
        return TensorDict({"at": self.at.clone()}, [2])

    def _step(self, td):
        self.at = self.at + 1
        ended = self.at >= torch.tensor([[2.0], [5.0]])
        step = {"at": self.at.clone(), "reward": self.at.clone(), "done": ended}
        return TensorDict({**step, "terminated": ended.clone()}, [2])

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("use_buffers", [None, True, False])
def test_reset_is_shown_masks_in_the_shape_of_the_done_flags(use_buffers, bare):
    env = ByMask() if use_buffers is None else SerialEnv(2, ByMask, use_buffers=use_buffers)
    td = env.reset()
    for _ in range(3):
        td = env.step_mdp(env.step(env.rand_action(td)))
    mask = torch.tensor([True, False]).expand(env.batch_size)
    td.set("_reset", mask.clone() if bare else mask[..., None].clone())
    td.update({key: torch.zeros_like(td[key]) for key in env.done_keys})

    again = env.reset(td)

    assert torch.equal(again["at"], torch.tensor([[0.0], [3.0]]).expand(*env.batch_size, 1))
    assert env.rollout(6, break_when_any_done=False)["at"][..., 2, :].max() == 2
