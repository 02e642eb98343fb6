"""Gymnasium builds the env that a Minari dataset came from, where that can be said."""

from __future__ import annotations

from functools import partial

import gymnasium
import minari
import numpy as np
import pytest

import envkit
from envkit import GymEnv, SerialEnv, StepCounter, TransformedEnv, from_minari, to_minari
from tests.bridges.exports.test_dataset_files import assert_equal
from tests.bridges.exports.test_minari import cartpole, one_by_one, played


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Set the folder of Minari's datasets to one of the test."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))


@pytest.mark.parametrize("make", [cartpole, partial(SerialEnv, 2, cartpole)], ids=["one", "pool"])
def test_an_env_of_gymnasium_is_recovered(opened, make):
    env = opened(make())

    dataset = to_minari(env.rollout(5), "cart-v0", env=env)

    assert dataset.recover_environment().spec.id == "CartPole-v1"


def test_an_env_that_make_made_is_recovered_with_its_keywords():
    env = envkit.make("envkit/Pendulum", 3, max_episode_steps=7)
    data = env.rollout(9, break_when_any_done=False)

    dataset = to_minari(data, "swing-v0", env=env)

    recovered = minari.load_dataset("swing-v0").recover_environment()
    assert recovered.observation_space == dataset.observation_space
    assert recovered.action_space == dataset.action_space
    recovered.reset(seed=0)
    ends = [recovered.step(recovered.action_space.sample())[3] for _ in range(7)]
    assert ends == [False] * 6 + [True]
    assert_equal(from_minari("swing-v0").exclude("collector"), one_by_one(data))


class Single(gymnasium.Env):
    """One of it can be there at a time, as of a simulator that listens at a port."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3, start=-1)
    is_taken = False

    def __init__(self):
        if Single.is_taken:
            raise OSError("the port is taken")
        Single.is_taken = True

    def close(self):
        Single.is_taken = False

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.full(2, action, np.float32), float(action), False, False, {"twice": 2 * action}


class Halved(gymnasium.ActionWrapper):
    """Keeps no arguments for Gymnasium to make it again."""

    def action(self, action):
        return action


@pytest.fixture
def single(monkeypatch):
    entry_point = f"{Single.__module__}:{Single.__qualname__}"
    gymnasium.register("Single-v0", entry_point=entry_point)
    yield
    del gymnasium.registry["Single-v0"]
    Single.is_taken = False


def test_no_second_env_is_made_to_say_how_it_is_made(single):
    env = GymEnv("Single-v0", info=True)

    dataset = to_minari(played(env, 9), "single-v0", env=env)

    env.close()
    recovered = dataset.recover_environment()
    assert recovered.observation_space == dataset.observation_space == Single.observation_space
    assert recovered.action_space == dataset.action_space == Single.action_space
    assert set(dataset[0].infos) >= {"twice"}


@pytest.mark.parametrize(
    "wrap",
    [
        Halved,
        gymnasium.wrappers.AddRenderObservation,
        lambda env: gymnasium.wrappers.TransformReward(env, lambda reward: reward),
    ],
    ids=["no arguments kept", "other arguments kept", "a function"],
)
def test_wrappers_that_gymnasium_cannot_make_again_are_not_recovered(wrap):
    env = envkit.GymWrapper(wrap(gymnasium.make("CartPole-v1", render_mode="rgb_array")))
    data = env.rollout(3)

    dataset = to_minari(data, "wrapped-v0", env=env)

    assert dataset.env_spec is None and dataset.total_steps == len(data)


def test_wrappers_with_plain_arguments_are_recovered():
    made = gymnasium.make("CartPole-v1", max_episode_steps=7)
    env = envkit.GymWrapper(gymnasium.wrappers.FrameStackObservation(made, 3))

    dataset = to_minari(env.rollout(3), "stacked-v0", env=env)

    assert dataset.recover_environment().observation_space.shape == (3, 4)


def test_an_env_behind_transforms_or_none_is_not_recovered():
    env = TransformedEnv(cartpole(), StepCounter())

    with_env = to_minari(env.rollout(5), "a-v0", env=env)
    without_env = to_minari(env.rollout(5), "b-v0")

    assert with_env.env_spec is None and without_env.env_spec is None
    assert set(with_env.observation_space.spaces) == {"observation", "step_count"}
