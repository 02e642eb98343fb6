"""Numbers of things: a bool, which Python takes for an int, is told wherever a number is asked for."""

import numpy as np
import pytest
import torch

import envkit
from envkit import AsyncEnvPool, Collector, GymEnv, JaxEnv, ParallelEnv, SerialEnv
from envkit.data.arguments import as_int
from envkit.errors import ArgumentTypeError, SpecError
from tests.zoo.envs import Count
from tests.zoo.walkers import Pendulum


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


WHOLE = {
    "steps of an episode": lambda count: envkit.StepCounter(count),
    "frames to skip": lambda count: envkit.FrameSkipTransform(count),
    "actions at the begin": lambda count: envkit.NoopResetEnv(count),
    "frames to join": lambda count: envkit.CatFrames(count, -1),
    "recorded frames to join": lambda count: envkit.cat_frames(torch.zeros(4, 1), count, -1),
    "frames to pool": lambda count: envkit.TimeMaxPool(T=count),
    "bins": lambda count: envkit.ActionDiscretizer(count),
    "bins of an element": lambda count: envkit.ActionDiscretizer([3, count]),
    "steps of a return": lambda count: envkit.MultiStep(0.9, count),
    "steps of a return in a buffer": lambda count: envkit.MultiStepTransform(count, 0.9),
    "longest horizon": lambda count: envkit.RandomTruncationTransform(1, count),
    "shortest horizon": lambda count: envkit.RandomTruncationTransform(count, 9),
    "rows of an image": lambda count: envkit.Resize(count),
    "columns of an image": lambda count: envkit.Resize(8, count),
    "rows to cut": lambda count: envkit.Crop(count),
    "rows of the middle": lambda count: envkit.CenterCrop(count),
    "steps of a stretch": lambda count: envkit.RandomCropTensorDict(count),
    "actions of a chunk": lambda count: envkit.ActionChunkTransform(count),
    "steps of a burn-in": lambda count: envkit.BurnInTransform([], count),
    "options of an env": lambda count: envkit.DiscreteActionProjection(count, 9),
    "options of a user": lambda count: envkit.DiscreteActionProjection(1, count),
    "limit of a stateless env": lambda count: envkit.TimeLimit(None, count),
    "repeats in a stateless env": lambda count: envkit.FrameSkip(None, count),
    "integers of a space": lambda count: envkit.Discrete(count),
    "limit of a JaxEnv": lambda count: JaxEnv(Pendulum(), episode_length=count),
    "beginnings of a JaxEnv": lambda count: JaxEnv(Pendulum(), pool_size=count),
    "repeats in a JaxEnv": lambda count: JaxEnv(Pendulum(), action_repeat=count),
}


@pytest.mark.parametrize("value", [True, 2.5, "5"])
@pytest.mark.parametrize("call", WHOLE.values(), ids=WHOLE)
def test_a_number_of_things_is_an_int(call, value):
    with pytest.raises(ArgumentTypeError, match=rf"is {value!r}.* must be an int of at least"):
        call(value)


@pytest.mark.parametrize("call", WHOLE.values(), ids=WHOLE)
def test_a_numpy_integer_is_one(call):
    call(np.int64(4))


@pytest.mark.parametrize("kind", [envkit.Categorical, envkit.OneHot])
def test_options_are_whole(kind):
    for value in (True, 2.5, "5", 0):
        with pytest.raises(SpecError, match=rf"has {value!r} options"):
            kind(value)
    assert all(kind(value).n == 3 for value in (3, 3.0, np.int64(3), torch.tensor(3)))


def test_bins_of_a_tensor():
    assert envkit.ActionDiscretizer(torch.tensor([3, 4])).num_intervals == [3, 4]
    assert envkit.ActionDiscretizer(torch.tensor(3)).num_intervals == 3


@pytest.mark.parametrize("value", [3, np.int8(3), torch.tensor(3), np.array(3)])
def test_what_stands_for_an_int_is_one(value):
    assert as_int("count", value, least=1, meaning="a number") == 3


@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(True), 3.0, "3", None])
def test_what_is_no_int_is_told(value):
    with pytest.raises(ArgumentTypeError, match=r"count is .*, but must be an int of at least 1"):
        as_int("count", value, least=1, meaning="a number")
