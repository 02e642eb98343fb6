"""Views address the single envs of a pool, as Gymnasium's and Stable-Baselines3's own vector envs do."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from envkit import (
    GymWrapper,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    RewardScaling,
    RewardSum,
    SerialEnv,
    TransformedEnv,
    to_gym_vector,
    to_sb3,
)
from envkit.errors import ArgumentError, UnsupportedError
from tests.zoo.walkers import Pendulum


class Level(gymnasium.Env):
    """Shows the sum of its level and of where the reset was told to start."""

    observation_space = spaces.Box(-99, 99, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.level, self.start = 1.0, 0.0

    def _shown(self):
        return np.array([self.level + self.start], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start = (options or {}).get("start", 0.0)
        return self._shown(), {}

    def step(self, action):
        return self._shown(), 0.0, False, False, {}

    def lift(self, height):
        self.level += height
        return self.level


def wrapped():
    return gymnasium.wrappers.TimeLimit(Level(), 50)


def transformed():
    return TransformedEnv(GymWrapper(wrapped()), RewardScaling(0.0, 1.0))


POOLS = {
    "serial": partial(SerialEnv, 3, lambda: GymWrapper(wrapped())),
    "parallel": partial(ParallelEnv, 3, transformed, num_processes=2),
    "behind transforms": lambda: TransformedEnv(SerialEnv(3, transformed), RewardScaling(0.0, 1.0)),
}
ZEROS = np.zeros(3, int)


@pytest.fixture(params=POOLS)
def pool(request, opened):
    return opened(POOLS[request.param]())


def test_sb3_calls_and_sets_rows_one_by_one(pool):
    ours, theirs = to_sb3(pool), DummyVecEnv([wrapped] * 3)

    for vec in (ours, theirs):
        vec.reset()
        assert vec.env_method("lift", 5.0, indices=[1]) == [6.0]
        assert vec.get_attr("level") == [1.0, 6.0, 1.0]
        assert vec.get_attr("level", indices=[2, 1]) == [1.0, 6.0]
    ours.set_attr("level", 3.0, indices=[0, 2])

    assert ours.get_attr("level") == [3.0, 6.0, 3.0]
    assert ours.step(np.eye(2, dtype=int)[ZEROS])[0].ravel().tolist() == [3.0, 6.0, 3.0]


def test_sb3_gives_options_to_the_next_reset_of_each_row(pool):
    vec = to_sb3(pool)

    vec.set_options([{"start": 10}, {}, {"start": 20}])

    assert vec.reset().ravel().tolist() == [11.0, 1.0, 21.0]
    assert vec.reset().ravel().tolist() == [1.0, 1.0, 1.0]


def test_gymnasiums_view_calls_sets_and_takes_options_as_its_own_vector_envs_do(pool):
    ours, theirs = to_gym_vector(pool), SyncVectorEnv([wrapped] * 3)

    for vec in (ours, theirs):
        assert vec.reset(options={"start": 5})[0].ravel().tolist() == [6.0] * 3
        assert vec.call("lift", 2.0) == (3.0,) * 3
        assert vec.get_attr("level") == (3.0,) * 3
    ours.set_attr("level", [7.0, 8.0, 9.0])

    assert ours.get_attr("level") == (7.0, 8.0, 9.0)
    with pytest.raises(AttributeError, match="no attribute 'depth'"):
        ours.get_attr("depth")
    with pytest.raises(ValueError, match="values has 2 entries, but there are 3 rows"):
        ours.set_attr("level", [1.0, 2.0])


class Noted(JaxEnv):
    note = "theirs"


@pytest.mark.parametrize("around", [lambda env: env, lambda env: TransformedEnv(env, RewardSum())])
def test_rows_that_are_one_object_are_asked_and_set_together(around):
    env = Noted(Pendulum(), batch_size=[3])
    vec = to_sb3(around(env))
    vec.reset()
    vec.set_attr("note", "ours")

    assert vec.get_attr("note", indices=[1]) == ["ours"]
    assert env.note == "ours"
    with pytest.raises(UnsupportedError, match=r"one object.*SerialEnv"):
        vec.set_attr("note", "other", indices=[0])
    with pytest.raises(UnsupportedError, match=r"one object.*SerialEnv"):
        vec.env_method("extra_repr", indices=[0])
    vec.set_options({"start": 1})
    with pytest.raises(ArgumentError, match="resets all its rows as one"):
        vec.reset()


@pytest.fixture
def mixed(opened):
    """Rows 0 and 1 in this process, row 2 in another, rows 3 and 4 one vector env."""
    pools = [
        SerialEnv(2, transformed),
        TransformedEnv(ParallelEnv(1, transformed), RewardScaling(0.0, 1.0)),
    ]
    return opened(MixedEnv([*pools, GymWrapper(SyncVectorEnv([wrapped] * 2))]))


def test_rows_of_a_mixed_env_are_those_of_its_members(mixed):
    vec = to_sb3(mixed)
    vec.reset()

    assert vec.env_method("lift", 5.0, indices=[2, 0]) == [6.0, 6.0]
    assert vec.get_attr("level", indices=[0, 1, 2]) == [6.0, 1.0, 6.0]
    vec.set_attr("level", 3.0, indices=[1, 2])

    assert vec.get_attr("level", indices=[2, 1, 0, 2]) == [3.0, 3.0, 6.0, 3.0]
    assert vec.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [True, True, True, False, False]
    assert to_gym_vector(mixed).reset()[0].ravel().tolist() == [6.0, 3.0, 3.0, 1.0, 1.0]


def test_rows_of_a_mixed_env_that_are_one_object_are_asked_together(mixed):
    vec = to_sb3(mixed)
    vec.reset()

    assert vec.env_method("close_extras", indices=[3, 4]) == [None, None]
    with pytest.raises(
        AttributeError, match=r"GymWrapper .*'level'.*would not reach the simulators"
    ):
        vec.set_attr("level", 8.0)
    with pytest.raises(UnsupportedError, match=r"rows 3 to 4 of this GymWrapper are one object"):
        vec.set_attr("level", 8.0, indices=[0, 3])
    with pytest.raises(UnsupportedError, match=r"rows 3 to 4 of this GymWrapper are one object"):
        vec.env_method("lift", 8.0, indices=[0, 3])

    assert vec.get_attr("level", indices=[0]) == [1.0]  # a refused call moves no row
    with pytest.raises(AttributeError, match="'level'"):
        vec.get_attr("level")


ONE_OBJECT = {
    "a vector env": lambda: GymWrapper(SyncVectorEnv([wrapped] * 2)),
    "behind transforms": lambda: TransformedEnv(JaxEnv(Pendulum(), batch_size=[2]), RewardSum()),
    "a mixed env": lambda: MixedEnv([GymWrapper(SyncVectorEnv([wrapped] * 2))]),
}


@pytest.mark.parametrize("kind", ONE_OBJECT)
@pytest.mark.parametrize("show", [to_sb3, to_gym_vector])
def test_a_parameter_that_would_not_reach_the_simulators_is_not_set(kind, show):
    env = ONE_OBJECT[kind]()

    with pytest.raises(AttributeError, match=r"has no attribute 'level'.*e\.g\. SerialEnv"):
        show(env).set_attr("level", 8.0)

    assert not hasattr(env, "level")


def test_a_pool_addresses_its_sub_envs_itself(opened):
    env = opened(SerialEnv(3, lambda: GymWrapper(wrapped())))

    env.set_attr("level", 4.0, indices=1)
    env.set_attr("label", "new")  # a name that nothing has yet belongs to the simulator

    assert env.get_attr("level") == [1.0, 4.0, 1.0]
    assert env.call("lift", 1.0, indices=[-1]) == [2.0]
    assert env.get_attr("label", indices=[0]) == ["new"]
    with pytest.raises(ArgumentError, match=r"indices has \[3\], but there are 3 sub-envs"):
        env.get_attr("level", indices=[3])
