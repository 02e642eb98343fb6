"""Wrappers and training loops of Gymnasium and SB3 see around an adapter the data that their own vector envs give."""

from __future__ import annotations

import copy
import hashlib
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers import vector as wrappers
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecCheckNan,
    VecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

from envkit import GymWrapper, ParallelEnv, SerialEnv, to_gym_vector, to_sb3
from tests.bridges.exports.test_simulators_shown import assert_identical, played
from tests.zoo.gym_envs import Sampler

POOLS = {"serial": SerialEnv, "parallel": partial(ParallelEnv, num_processes=1)}
PLACES = spaces.Dict(place=spaces.Box(-1, 1, (3,)), goal=spaces.Box(-1, 1, (3,)))
ONES = {
    "CartPole": partial(gymnasium.make, "CartPole-v1"),
    "Pendulum": partial(gymnasium.make, "Pendulum-v1", max_episode_steps=5),
    "Dict": lambda: Sampler(copy.deepcopy(PLACES)),
}

AROUND = {
    "RecordEpisodeStatistics": ("CartPole", wrappers.RecordEpisodeStatistics),
    "NormalizeObservation": ("Pendulum", wrappers.NormalizeObservation),
    "NormalizeReward": ("Pendulum", wrappers.NormalizeReward),
    "FlattenObservation": ("Dict", wrappers.FlattenObservation),
    "DtypeObservation": (
        "Pendulum",
        lambda env: wrappers.DtypeObservation(env, np.float64),
    ),
    "ClipReward": ("Pendulum", lambda env: wrappers.ClipReward(env, -1.0, 0.0)),
    "RescaleAction": ("Pendulum", lambda env: wrappers.RescaleAction(env, -1.0, 1.0)),
}


@pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision", "ignore:overflow encountered")
@pytest.mark.parametrize("name", list(AROUND))
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_wrapper_of_gymnasium_gives_the_same_around_an_adapter(mode, name):
    kind, wrapper = AROUND[name]
    one = ONES[kind]
    ours = to_gym_vector(SerialEnv(2, lambda: GymWrapper(one())), mode)
    theirs = SyncVectorEnv([one] * 2, autoreset_mode=gymnasium.vector.AutoresetMode[mode.upper()])
    try:
        expected = played(wrapper(theirs), steps=30)
    except (AssertionError, ValueError) as refused:  # it does not support the mode
        with pytest.raises(type(refused)):
            played(wrapper(ours), steps=30)
        return

    for got, other in zip(played(wrapper(ours), steps=30), expected, strict=True):
        got[-1].get("episode", {}).pop("t", None), other[-1].get("episode", {}).pop("t", None)
        assert_identical(got, other)


def in_sb3(env: VecEnv, acts) -> list:
    """Step with given actions; the seeds of the rows are those of their first reset."""
    shown: list = [env.reset()]
    for action in acts:
        observation, rewards, done, infos = env.step(action)
        for info in infos:
            info.get("episode", {}).pop("t", None)
        shown.append((observation, rewards, done, infos))
    return shown


class Fixed(Sampler):
    """Samples the same in each episode."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=0)


SB3 = {
    "VecNormalize": VecNormalize,
    "VecMonitor": VecMonitor,
    "VecCheckNan": partial(VecCheckNan, raise_exception=True),
    "VecFrameStack": partial(VecFrameStack, n_stack=2),
}


@pytest.mark.parametrize("space", ["array", "Dict"])
@pytest.mark.parametrize("name", list(SB3))
def test_a_wrapper_of_sb3_gives_the_same_around_an_adapter(name, space):
    def one():
        env = Fixed(copy.deepcopy(PLACES if space == "Dict" else PLACES["place"]))
        return env if name == "VecMonitor" else Monitor(env)

    acts = np.random.default_rng(0).integers(0, 2, (12, 2))
    ours = SB3[name](to_sb3(SerialEnv(2, lambda: GymWrapper(one()))))
    theirs = SB3[name](DummyVecEnv([one] * 2))

    for got, expected in zip(in_sb3(ours, acts), in_sb3(theirs, acts), strict=True):
        assert_identical(got, expected)


def test_sb3_finds_nan_in_an_adapter():
    class Broken(Sampler):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, float("nan"), *rest

    env = VecCheckNan(to_sb3(SerialEnv(1, lambda: GymWrapper(Broken()))), raise_exception=True)
    env.reset()

    with pytest.raises(ValueError, match="nan"):
        env.step(np.zeros(1, int))


# ------------------------------------------------------------------------- loops of one file an algorithm


def make_row(kind, seed, index):
    """Make a row as those scripts do: statistics inside, the action space seeded by the seed of the run."""
    env = RecordEpisodeStatistics(ONES[kind]())
    env.action_space.seed(seed + index)
    return env


def off_policy(envs, steps, seed, learning_starts=40) -> str:
    """Return a hash of what a replay buffer is given, and of the returns: random actions, then a policy's."""
    digest = hashlib.sha256()
    observation, _ = envs.reset(seed=seed)
    for step in range(steps):
        if step < learning_starts:
            acts = np.array([envs.single_action_space.sample() for _ in range(envs.num_envs)])
        elif isinstance(envs.single_action_space, spaces.Discrete):
            acts = (observation[:, 0] > 0).astype(np.int64)
        else:
            acts = np.clip(observation[:, :1], -1, 1).astype(np.float32)
        following, rewards, terminated, truncated, infos = envs.step(acts)
        stored = following.copy()
        for row in np.flatnonzero(truncated):
            if "final_obs" in infos:
                stored[row] = infos["final_obs"][row]
        final = infos.get("final_info", infos)
        if "episode" in final:
            digest.update(final["episode"]["r"][final["_episode"]].tobytes())
        for part in (observation, stored, acts, rewards, terminated, truncated):
            digest.update(str(part.dtype).encode() + part.tobytes())
        observation = following
    return digest.hexdigest()


@pytest.mark.parametrize("pool", list(POOLS))
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("kind", ["CartPole", "Pendulum"], ids=["DQN, C51", "SAC, TD3, DDPG"])
def test_an_off_policy_loop_stores_the_same_data_at_the_same_seed(kind, mode, pool):
    makers = [partial(make_row, kind, 1, row) for row in range(2)]
    theirs = SyncVectorEnv(makers, autoreset_mode=gymnasium.vector.AutoresetMode[mode.upper()])
    ours = to_gym_vector(
        POOLS[pool](2, [lambda make=make: GymWrapper(make()) for make in makers]), mode
    )

    assert off_policy(ours, 120, 1) == off_policy(theirs, 120, 1)
    ours.close()
