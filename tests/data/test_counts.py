"""Numbers of things: a bool, which Python takes for an int, is told wherever a number is asked for."""

import numpy as np
import pytest
import torch

import envkit
from envkit import AsyncEnvPool, Collector, GymEnv, ParallelEnv, SerialEnv
from envkit.data.arguments import as_int
from envkit.errors import ArgumentTypeError
from tests.zoo.envs import Count


def collector(**options):
    return Collector(Count(), None, **{"frames_per_batch": 4, "total_frames": 8, **options})


CALLS = {
    "workers of a SerialEnv": lambda count: SerialEnv(count, Count),
    "workers of a ParallelEnv": lambda count: ParallelEnv(count, Count),
    "processes": lambda count: ParallelEnv(2, Count, num_processes=count),
    "envs of a vector env": lambda count: GymEnv("CartPole-v1", num_envs=count),
    "steps of a rollout": lambda count: Count().rollout(count),
    "episodes to evaluate": lambda count: envkit.evaluate(Count(), None, episodes=count),
    "envs to make": lambda count: envkit.make("gym/CartPole-v1", count),
    "results to wait for": lambda count: AsyncEnvPool([Count] * 2, min_get=count),
    "batches ahead": lambda count: collector(prefetch=count),
    "frames of a batch": lambda count: collector(frames_per_batch=count),
    "frames in all": lambda count: collector(total_frames=count),
    "random frames": lambda count: collector(init_random_frames=count),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_bool_is_no_number(call):
    with pytest.raises(ArgumentTypeError, match=r"is True.* must be an int"):
        call(True)


@pytest.mark.parametrize("value", [3, np.int8(3), torch.tensor(3), np.array(3)])
def test_what_stands_for_an_int_is_one(value):
    assert as_int("count", value, least=1, meaning="a number") == 3


@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(True), 3.0, "3", None])
def test_what_is_no_int_is_told(value):
    with pytest.raises(ArgumentTypeError, match=r"count is .*, but must be an int of at least 1"):
        as_int("count", value, least=1, meaning="a number")
