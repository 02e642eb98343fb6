"""Arguments and specs that are unusual, and accepted."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from envkit import EnvBase, check_env_specs
from envkit.specs import Composite, OneHot, Unbounded
from envkit_bridges.exports.gym_registry import gym_env_of
from envkit_bridges.gym.like import GymLikeEnv
from tests.zoo.envs import Count
from tests.zoo.gym_envs import Informed


def faced(**options):
    """An env behind gym's protocol, reset."""
    env = gym_env_of(Count(), "gymnasium", **{"info_keys": None, "to_numpy": False, **options})
    env.reset()
    return env


class Halves(EnvBase):
    """Declares one half of its specs, and that the other is None."""

    def __init__(self, batch=()):
        super().__init__(batch_size=batch)
        action, seen = (Unbounded((*batch, 1)) for _ in range(2))
        self._input_spec = Composite(
            full_action_spec=Composite(action=action, shape=batch),
            full_state_spec=None,
            shape=batch,
        )
        self._output_spec = Composite(
            full_observation_spec=Composite(seen=seen, shape=batch),
            full_reward_spec=None,
            full_done_spec=None,
            shape=batch,
        )

    def _reset(self, td):
        return TensorDict({"seen": torch.zeros(*self.batch_size, 1)}, self.batch_size)

    def _step(self, td):
        return self._reset(td)

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_spec_that_is_none_is_not_declared(batch):
    env = Halves(batch)

    check_env_specs(env)
    assert env.state_spec.is_empty()
    assert env.reward_spec.shape == (*batch, 1)


def test_type_checks_look_at_resets():
    class Wrong(Halves):
        def _reset(self, td):
            return super()._reset(td).to(torch.int64)

    env = Wrong()
    env.run_type_checks = True

    with pytest.raises(TypeError, match=r"'seen' has dtype torch\.int64.*Cast it in _reset"):
        env.reset()


@pytest.mark.parametrize("action", [1, [1], torch.ones(1).numpy().astype("int64")])
def test_numbers_and_arrays_of_a_policy_become_tensors(action):
    data = Count(9).rollout(2, lambda count: action)

    assert data["action"].flatten().tolist() == [1, 1]


def test_a_type_of_number_that_can_index_counts_steps():
    assert Count(9).rollout(torch.tensor(2)).shape == (2,)


def test_one_name_of_an_info_is_a_list_of_one():
    observation, infos = faced(info_keys="count").reset()

    assert list(observation) == []
    assert infos["count"].tolist() == [0]


def test_specs_are_declared_in_make_specs():
    class Told(GymLikeEnv):
        def _make_specs(self, env):
            self.observation_spec = Composite(count=Unbounded(env.observation_space.shape))
            self.action_spec = OneHot(2)

    env = Told(Informed())

    check_env_specs(env)
    assert env.rollout(3)["next", "count"].flatten().tolist() == [1, 2, 3]
