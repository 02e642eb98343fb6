"""Seeds and devices through every view: what its library means by them; what is none is told and changes nothing."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from envkit import BraxEnv, GymEnv, SerialEnv, to_gym_vector, to_sb3, to_torchrl
from envkit.errors import ArgumentError, DeviceNameError


def poles() -> SerialEnv:
    return SerialEnv(2, lambda: GymEnv("CartPole-v1"))


def fast() -> BraxEnv:
    return BraxEnv("fast", batch_size=[2], device="cpu")


def seeded_sb3(env, seed):
    view = to_sb3(env)
    view.seed(seed)
    return view.reset()


def seeded_torchrl(env, seed):
    view = to_torchrl(env)
    view.set_seed(seed)
    return view.reset()["observation"].numpy()


VIEWS = {
    "gym vector": lambda env, seed: to_gym_vector(env).reset(seed=seed)[0],
    "sb3": seeded_sb3,
    "torchrl": seeded_torchrl,
}


def rows_of_the_library(seed: int) -> np.ndarray:
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2).reset(seed=seed)[0]


def rows_of_the_env(seed: int) -> np.ndarray:
    env = poles()
    env.set_seed(seed)
    return env.reset()["observation"].numpy()


@pytest.mark.parametrize("seed", [7, np.int64(7), torch.tensor(7)])
@pytest.mark.parametrize(
    ("view", "expected"),
    [
        ("gym vector", rows_of_the_library),
        ("sb3", rows_of_the_library),
        ("torchrl", rows_of_the_env),
    ],
)
def test_a_seed_means_what_it_means_in_the_views_library(view, expected, seed):
    assert np.array_equal(VIEWS[view](poles(), seed), expected(7))


@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("seed", [-1, "a", 1.5, 2**64, [1, 2]])
@pytest.mark.parametrize("make", [poles, fast])
def test_what_is_no_seed_is_told(view, seed, make):
    if (view, seed, make) == ("gym vector", [1, 2], poles):
        pytest.skip("rows of a pool take a seed each")

    with pytest.raises(ArgumentError, match=r"^seed is .*, but "):
        VIEWS[view](make(), seed)


def test_a_refused_seed_does_not_wait_for_the_next_reset():
    view, other = to_sb3(poles()), to_sb3(poles())
    view.seed(3)
    other.seed(3)

    with pytest.raises(ArgumentError):
        view.seed(-1)

    assert np.array_equal(view.reset(), other.reset())


def test_the_seeds_of_rows_are_counted_up_from_one_that_may_be_drawn():
    view = to_sb3(poles())

    assert view.seed(3) == [3, 4]
    first, second = view.reset()

    assert not np.array_equal(first, second)
    seed, next_seed = view.seed()
    assert next_seed == seed + 1
    drawn = view.reset()
    assert np.array_equal(seeded_sb3(poles(), seed), drawn)


def test_no_seed_at_all_is_drawn_by_numpy():
    np.random.seed(0)
    first = seeded_sb3(poles(), None)
    np.random.seed(0)

    assert np.array_equal(seeded_sb3(poles(), None), first)


@pytest.mark.parametrize("make", [poles, fast])
def test_a_device_that_torch_does_not_know_is_told_and_the_view_stays(make):
    view = to_torchrl(make())

    with pytest.raises(
        DeviceNameError, match=r"^device is 'gpu', .* Pass 'cpu', 'cuda', or"
    ) as told:
        view.to("gpu")

    assert isinstance(told.value, RuntimeError) and isinstance(told.value, ValueError)
    assert view.device == view.env.device and view.rollout(2)["next", "reward"].shape == (2, 2, 1)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:-3"])
def test_a_device_that_torch_does_not_know_is_told_by_every_env(device):
    with pytest.raises(DeviceNameError, match="is no device that torch knows"):
        GymEnv("CartPole-v1", device=device)


def test_tensors_of_a_view_are_where_the_env_is():
    view = to_gym_vector(poles().to("cpu"), to_numpy=False)

    shown, _ = view.reset(seed=0)
    shown, rewards, *flags, _ = view.step(torch.zeros(2, dtype=torch.int64))

    assert {one.device.type for one in (shown, rewards, *flags)} == {"cpu"}
