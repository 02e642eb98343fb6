"""Simulators that begin the next episode in the step that ends one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from envkit import (
    AutoResetEnv,
    AutoResetTransform,
    Compose,
    EnvBase,
    GymEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecGymEnvTransform,
    check_env_specs,
)
from envkit.errors import ResetMaskError
from envkit.specs import Composite, Unbounded
from tests.zoo.resumed import as_read_again
from tests.zoo.transform_envs import SelfResetting, SelfResettingRows

NONSTOP = {"break_when_any_done": False}


def values(td, *key) -> list:
    return td[key].squeeze(-1).tolist()


def test_both_observations_of_a_last_step_survive():
    env = SelfResetting(3, auto_reset=True)

    data = env.rollout(7, **NONSTOP)

    assert isinstance(env, AutoResetEnv)
    assert values(data, "count") == [0, 1, 2, 0, 1, 2, 0]
    assert values(data, "next", "count") == [1, 2, -1, 1, 2, -1, 1]
    assert data["next", "level"].isnan().flatten().tolist() == [False, False, True] * 2 + [False]
    assert values(data, "next", "lamp") == [True, True, False, True, True, False, True]
    assert values(data, "next", "done") == [False, False, True] * 2 + [False]
    assert env.base_env.resets == 1


def test_the_fill_values_lie_in_the_specs():
    env = SelfResetting(2, auto_reset=True)

    check_env_specs(env, break_when_any_done=False)
    assert env.base_env.observation_spec["face"].n == 6


def test_fill_values_can_be_chosen_or_left_out():
    chosen = AutoResetTransform(fill_float=9.0, fill_int=8, fill_bool=True)
    last = AutoResetEnv(SelfResetting(2), chosen).rollout(5)[-1]["next"]
    assert (last["level"], last["count"], last["lamp"]) == (9.0, 8, True)

    left = AutoResetEnv(SelfResetting(2), AutoResetTransform(replace=False)).rollout(5)[-1]["next"]
    assert left["count"] == 0


def test_a_reset_of_everything_is_one_of_the_simulator():
    env = SelfResetting(2, auto_reset=True)
    env.rollout(2)

    env.reset()

    assert env.base_env.resets == 2
    assert values(env.rollout(2), "count") == [0, 1]


def test_an_episode_cut_short_by_a_transform_is_reset_by_the_simulator():
    env = SelfResetting(3, auto_reset=True).append_transform(StepCounter(2))

    data = env.rollout(4, **NONSTOP)

    assert values(data, "count") == [0, 1, 0, 1]
    assert env.base_env.resets == 2


def test_rows_that_began_by_themselves_and_rows_that_did_not_are_told_apart():
    env = TransformedEnv(
        SelfResettingRows((2, 9), final=False), Compose(AutoResetTransform(), RewardSum())
    )
    env.reset()
    env.base_env.resets.clear()
    data = env.rollout(2, **NONSTOP)
    root = env.step_mdp(data[:, -1])

    root["_reset"] = torch.tensor([True, True])
    fresh = env.reset(root)

    assert values(fresh, "count") == [0, 0] and values(fresh, "episode_reward") == [0, 0]
    assert env.base_env.resets == [[True, True], [False, True]]


def test_a_row_that_was_stepped_past_its_end_is_reset_by_the_simulator():
    env = TransformedEnv(SelfResettingRows((2, 2, 9)), AutoResetTransform())
    data = env.rollout(2, **NONSTOP)
    root = env.step_mdp(data[:, -1])
    stepped = torch.tensor([True, False, True])
    root = env.step_mdp(env.step(env.rand_action(root).set("_step", stepped)))
    env.base_env.resets.clear()

    fresh = env.reset(root.set("_reset", torch.tensor([True, True, False])))

    assert env.base_env.resets == [[True, False, False]]
    assert values(fresh, "count") == env.base_env.count.flatten().tolist() == [0, 0, 3]


def test_sub_envs_may_reset_themselves():
    env = SerialEnv(2, partial(SelfResetting, 3, auto_reset=True))

    data = env.rollout(5, **NONSTOP)

    assert values(data, "count") == [[0, 1, 2, 0, 1]] * 2
    assert values(data, "next", "count") == [[1, 2, -1, 1, 2]] * 2


@pytest.mark.parametrize("make", [AutoResetTransform, VecGymEnvTransform])
def test_what_undoes_a_simulator_stands_next_to_it(make):
    env = TransformedEnv(SelfResettingRows(), Compose(StepCounter(), make()))

    with pytest.raises(ValueError, match="must be the first"):
        _ = env.observation_spec


# -------------------------------------------------------------------------------- VecGymEnvTransform


def test_the_true_last_observation_takes_its_place():
    env = TransformedEnv(SelfResettingRows((2, 3)), VecGymEnvTransform())

    data = env.rollout(5, **NONSTOP)

    assert values(data, "count") == [[0, 1, 0, 1, 0], [0, 1, 2, 0, 1]]
    assert values(data, "next", "count") == [[1, 2, 1, 2, 1], [1, 2, 3, 1, 2]]
    assert "final" not in data.keys() and "final" not in data["next"].keys()
    assert env.base_env.resets == [[True, True]]
    check_env_specs(env, break_when_any_done=False)


def test_a_last_observation_that_is_missing_is_marked():
    env = TransformedEnv(
        SelfResettingRows((2, 3), final=False), VecGymEnvTransform(missing_obs_value=-7)
    )

    data = env.rollout(3, **NONSTOP)

    assert values(data, "next", "count") == [[1, -7, 1], [1, 2, -7]]


def test_only_the_rows_that_are_done_can_be_reset():
    env = TransformedEnv(SelfResettingRows((2, 3)), VecGymEnvTransform())
    td = env.rollout(2, **NONSTOP)
    root = env.step_mdp(td[:, -1])

    with pytest.raises(RuntimeError, match=r"rows \[1\].*here \[0\]"):
        env.reset(root.clone().set("_reset", torch.tensor([False, True])))
    assert values(env.reset(root.set("_reset", torch.tensor([True, False]))), "count") == [0, 2]
    assert values(
        env.reset(TensorDict({"_reset": torch.ones(2, dtype=torch.bool)}, [2])), "count"
    ) == [0, 0]


def test_a_row_that_a_vector_env_has_led_on_cannot_be_reset_alone():
    env = TransformedEnv(SelfResettingRows((2, 3)), VecGymEnvTransform())
    data = env.rollout(2, **NONSTOP)
    root = env.step_mdp(env.rand_step(env.step_mdp(data[:, -1])))

    with pytest.raises(ResetMaskError, match=r"rows \[0\].*here \[1\]"):
        env.reset(root.set("_reset", torch.tensor([True, False])))


class Pair(EnvBase):
    """Two agents that see vectors of unlike lengths; it resets itself."""

    def __init__(self, length: int, **options):
        super().__init__(**options)
        self.length, self.now = length, 0
        seen = [Composite(seen=Unbounded((size,))) for size in (2, 3)]
        self.observation_spec = Composite(agents=torch.stack(seen))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _shown(self):
        return lazy_stack(
            [TensorDict({"seen": torch.full((size,), float(self.now))}) for size in (2, 3)]
        )

    def _reset(self, tensordict=None):
        self.now = 0
        return TensorDict({"agents": self._shown()})

    def _step(self, tensordict):
        self.now += 1
        ends = self.now == self.length
        self.now = 0 if ends else self.now
        return TensorDict(
            {"agents": self._shown(), "reward": torch.ones(1), "done": torch.tensor([ends])}
        )

    def _set_seed(self, seed):
        pass


def agents_saw(data, agent):
    return [step["agents"][..., agent]["seen"][..., 0].tolist() for step in data.unbind(-1)]


def test_steps_of_unlike_agents_are_taken_apart():
    env = Pair(2, auto_reset=True)

    check_env_specs(env)
    data = env.rollout(4, break_when_any_done=False)

    for agent in (0, 1):
        assert agents_saw(data, agent) == [0, 1, 0, 1]
        assert str(agents_saw(data["next"], agent)) == "[1.0, nan, 1.0, nan]"


def test_rows_of_unlike_agents_begin_on_their_own():
    env = SerialEnv(2, [lambda: Pair(2, auto_reset=True), lambda: Pair(3, auto_reset=True)])

    data = env.rollout(4, break_when_any_done=False)

    assert agents_saw(data, 1) == [[0, 0], [1, 1], [0, 2], [1, 0]]


def test_simulators_that_reset_themselves_obey_the_contract():
    check_env_specs(SelfResetting(3, auto_reset=True))
    check_env_specs(SerialEnv(2, lambda: AutoResetEnv(SelfResetting(3))))
    env = TransformedEnv(SelfResettingRows((2, 3)), VecGymEnvTransform())
    check_env_specs(env)

    again = TransformedEnv(SelfResettingRows((2, 3)), env.transform.clone())
    data = []
    for each in (env, again):
        each.set_seed(0)
        data.append(each.rollout(5, break_when_any_done=False))

    assert all(
        torch.equal(data[0][key].nan_to_num(7), data[1][key].nan_to_num(7))
        for key in data[0].keys(True, True)
    )


def test_rows_that_began_by_themselves_are_kept():
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), VecGymEnvTransform())
    held = env.transform
    held._rows, held._first = torch.tensor([True, False]), TensorDict({"a": torch.ones(2)}, [2])
    other = VecGymEnvTransform()

    other.load_state_dict(as_read_again(held.state_dict()))

    assert other._rows.equal(held._rows) and (other._first == held._first).all()
