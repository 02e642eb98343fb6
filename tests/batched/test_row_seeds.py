"""Each row of a batch has a seed of its own, however envs are nested."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from envkit import (
    AsyncEnvPool,
    GymEnv,
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from envkit.env.seeding import seed_chain
from envkit.errors import ArgumentError

cartpole = partial(GymEnv, "CartPole-v1")
pair = partial(SerialEnv, 2, cartpole)

FOUR = {
    "serial": partial(SerialEnv, 4, cartpole),
    "parallel": partial(ParallelEnv, 4, cartpole, num_processes=1),
    "asynchronous": partial(AsyncEnvPool, [cartpole] * 4, backend="threading"),
    "transformed": lambda: TransformedEnv(SerialEnv(4, cartpole), StepCounter()),
    "a part of a pool": lambda: SerialEnv(6, cartpole)[1:5],
    "pools in a pool": partial(SerialEnv, 2, pair),
    "transformed pools in a pool": partial(
        ParallelEnv, 2, lambda: TransformedEnv(pair(), StepCounter()), num_processes=1
    ),
    "vectorised": partial(GymEnv, "CartPole-v1", num_envs=4),
    "vectorised in a pool": partial(SerialEnv, 2, partial(GymEnv, "CartPole-v1", num_envs=2)),
    "mixed": lambda: MixedEnv([pair(), GymEnv("CartPole-v1", num_envs=2)]),
}


@pytest.fixture(scope="module", params=FOUR)
def four(request):
    env = FOUR[request.param]()
    yield env
    env.close()


def first_observations(seeds, **how):
    """Give what single envs show that are reset, or seeded, one by one."""
    env = cartpole()
    shown = []
    for seed in seeds:
        if not how:
            shown.append(env.reset(seed=seed)["observation"])
        else:
            env.set_seed(seed)
            shown.append(env.reset()["observation"])
    return torch.stack(shown)


def test_a_seed_of_a_reset_gives_row_i_that_seed_and_i(four):
    shown = four.reset(seed=3)["observation"].reshape(4, 4)

    assert torch.equal(shown, first_observations(range(3, 7)))


def test_no_two_rows_take_the_same_seed_of_the_chain(four):
    seeds, following = seed_chain(3, 4)

    assert four.set_seed(3) == following
    shown = four.reset()["observation"].reshape(4, 4)

    assert torch.equal(shown, first_observations(seeds, seeded=True))


def test_rows_that_are_not_reset_take_no_seed():
    env = SerialEnv(3, cartpole)
    root = env.reset()
    before = root["observation"].clone()
    mask = torch.tensor([[False], [True], [False]])

    shown = env.reset(root.set("_reset", mask), seed=3)["observation"]

    assert torch.equal(shown[1:2], first_observations([4]))
    assert torch.equal(shown[::2], before[::2])


def test_keywords_of_one_row_come_before_the_seed_of_all():
    env = SerialEnv(2, cartpole)

    shown = env.reset(seed=3, list_of_kwargs=[{}, {"seed": 9}])["observation"]

    assert torch.equal(shown, first_observations([3, 9]))


def test_pools_in_a_pool_that_starts_again_get_the_seeds_they_had():
    env = SerialEnv(2, pair)
    env.set_seed(3)
    env.close()

    shown = env.reset()["observation"].reshape(4, 4)

    assert torch.equal(shown, first_observations(seed_chain(3, 4)[0], seeded=True))


@pytest.mark.parametrize("seed", ["3", 1.5, [1, 2]])
def test_a_seed_of_a_reset_is_an_integer(seed):
    with pytest.raises(ArgumentError, match=r"seed is .*must be an integer"):
        SerialEnv(2, cartpole).reset(seed=seed)
