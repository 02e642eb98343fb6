"""Private memory of transforms and the state of a stateless env are observations of no adapter and no dataset."""

from __future__ import annotations

from collections import OrderedDict

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from envkit import (
    CatFrames,
    GymEnv,
    GymnaxEnv,
    GymWrapper,
    TransformedEnv,
    from_minari,
    to_minari,
)
from tests.zoo.gym_envs import Sampler, Telling


@pytest.fixture
def id():
    name = "Private/Entries-v0"
    yield name
    gymnasium.registry.pop(name, None)


def test_a_registered_jax_env_shows_neither_its_state_nor_its_key(id):
    GymnaxEnv.register_gym(id, env_name="CartPole-v1", to_numpy=True)
    env = gymnasium.make(id)

    assert list(env.observation_space) == ["observation"]
    assert env.observation_space.contains(env.reset(seed=0)[0])
    assert env.observation_space.contains(env.step(0)[0])


def test_a_registered_env_shows_no_memory_of_its_transforms(id):
    frames = CatFrames(3, -1, in_keys=["observation"])
    GymEnv.register_gym(id, env_name="CartPole-v1", transform=frames, to_numpy=True)
    env = gymnasium.make(id)

    first, _ = env.reset(seed=0)
    after, *_ = env.step(0)

    assert list(env.observation_space) == list(first) == ["observation"]
    assert np.array_equal(after["observation"][:8], first["observation"][4:])


@pytest.mark.parametrize("to_numpy", [False, True])
def test_a_registered_simulator_has_its_own_spaces_in_their_order_and_its_infos(id, to_numpy):
    space = spaces.Dict(
        OrderedDict(speed=spaces.Box(-1, 1, (3,)), angle=spaces.Discrete(3, start=1))
    )
    GymWrapper.register_gym(
        id,
        entry_point=lambda: GymWrapper(Sampler(space, space)),
        to_numpy=to_numpy,
        disable_env_checker=True,
    )
    env = gymnasium.make(id)
    env.action_space.seed(0)

    shown, _ = env.reset(seed=0)
    stepped, *_ = env.step(action := env.action_space.sample())

    assert env.action_space is space and list(env.observation_space) == ["speed", "angle"]
    assert list(shown) == ["speed", "angle"] and 1 <= int(shown["angle"]) <= 3
    assert not to_numpy or env.observation_space.contains(stepped)
    inner = env.unwrapped.envkit_env
    assert np.array_equal(inner.taken[0]["speed"], action["speed"])
    assert inner.taken[0]["angle"] == action["angle"]


def test_a_registered_simulator_returns_its_rewards_and_infos(id):
    class Paid(Telling):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, 0.1, *rest

    GymWrapper.register_gym(id, entry_point=lambda: GymWrapper(Paid(2)), to_numpy=True)
    env = gymnasium.make(id)

    _, begun = env.reset(seed=3)
    _, reward, *_, first = env.step(0)
    *_, last = env.step(1)

    assert begun["kind"] == "new" and reward == 0.1
    assert first == {"count": 1, "arm": {"angle": 1 / 3}}
    assert last["is_success"] and last["why"] == "goal"


@pytest.mark.parametrize("passes_env", [True, False])
def test_a_dataset_has_no_memory_of_transforms_among_its_observations(
    passes_env, tmp_path, monkeypatch
):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = TransformedEnv(GymEnv("CartPole-v1"), CatFrames(3, -1, in_keys=["observation"]))
    data = env.rollout(5)

    dataset = to_minari(data, "frames-v0", env=env if passes_env else None)

    assert dataset.observation_space.shape == dataset[0].observations.shape[1:] == (12,)
    assert torch.equal(from_minari("frames-v0")["observation"], data["observation"])


def test_a_flag_without_axes_is_in_the_space_of_its_dataset(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    flags = torch.tensor([False, True, True, False])
    after = TensorDict(
        {
            "lit": flags[1:],
            "reward": torch.ones(3, 1),
            "done": torch.tensor([[False], [False], [True]]),
        },
        batch_size=[3],
    )
    data = TensorDict(
        {"lit": flags[:3], "action": torch.zeros(3, 1), "next": after}, [3], names=["time"]
    )

    dataset = to_minari(data, "flags-v0")

    shown = dataset[0].observations
    assert all(np.asarray(value) in dataset.observation_space for value in shown)
    assert from_minari("flags-v0")["lit"].tolist() == flags[:3].tolist()
