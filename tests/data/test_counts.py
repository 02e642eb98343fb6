"""Numbers of things: a bool, which Python takes for an int, is told wherever a number is asked for."""

import numpy as np
import pytest
import torch

import envkit
from envkit import AsyncEnvPool, Collector, GymEnv, JaxEnv, ParallelEnv, SerialEnv
from envkit.arrays.integers import as_int
from envkit.errors import ArgumentTypeError, SpecError
from envkit.functional import BatchedEnv, Episodic
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
    "integers of an entry": lambda count: envkit.MultiDiscrete((3, count)),
    "beginnings of an episode": lambda count: Episodic(None, "pool", count),
    "beginnings of rows": lambda count: BatchedEnv(None, pool_size=count),
    "frames to drop": lambda count: envkit.VideoRecorder(skip=count),
    "frames to keep": lambda count: envkit.VideoRecorder(max_frames=count),
    "axis of actions": lambda count: envkit.MultiAction(dim=count),
    "limit of a JaxEnv": lambda count: JaxEnv(Pendulum(), episode_length=count),
    "beginnings of a JaxEnv": lambda count: JaxEnv(Pendulum(), pool_size=count),
    "repeats in a JaxEnv": lambda count: JaxEnv(Pendulum(), action_repeat=count),
}


@pytest.mark.parametrize("value", [True, 2.5, "5"])
@pytest.mark.parametrize("call", WHOLE.values(), ids=WHOLE)
def test_a_number_of_things_is_an_int(call, value):
    with pytest.raises(ArgumentTypeError, match=rf"is {value!r}.* must be an int of at least"):
        call(value)


SIGNED = {
    "first row": lambda number: envkit.Crop(8, top=number),
    "first column": lambda number: envkit.Crop(8, left=number),
    "axis": lambda number: envkit.FlattenObservation(number, -1, ["pixels"]),
    "axis of frames": lambda number: envkit.CatFrames(2, number),
    "axis of time": lambda number: envkit.ActionChunkTransform(2, time_dim=number),
    "axis of a stretch": lambda number: envkit.RandomCropTensorDict(2, number),
    "integer that fills": lambda number: envkit.AutoResetTransform(fill_int=number),
}


@pytest.mark.parametrize("value", [True, -2.5, "5"])
@pytest.mark.parametrize("call", SIGNED.values(), ids=SIGNED)
def test_a_number_that_may_be_negative_is_an_int(call, value):
    with pytest.raises(ArgumentTypeError, match=rf"is {value!r}, but must be an int\. Pass"):
        call(value)
    call(np.int64(-2))


FLAGS = {
    "random": lambda flag: envkit.NoopResetEnv(random=flag),
    "update_done": lambda flag: envkit.StepCounter(update_done=flag),
    "as_inverse": lambda flag: envkit.CatFrames(2, -1, as_inverse=flag),
    "sort": lambda flag: envkit.CatTensors(["a", "b"], sort=flag),
    "allow_positive_dim": lambda flag: envkit.UnsqueezeTransform(
        -1, allow_positive_dim=flag, in_keys=["a"]
    ),
    "standard_normal": lambda flag: envkit.ObservationNorm(0, 1, ["a"], standard_normal=flag),
    "stateful": lambda flag: envkit.VecNormV2(["a"], stateful=flag),
    "expand_specs": lambda flag: envkit.TensorDictPrimer(expand_specs=flag),
    "from_int": lambda flag: envkit.ToTensorImage(from_int=flag),
    "keep_rewards": lambda flag: envkit.SelectTransform("a", keep_rewards=flag),
}


@pytest.mark.parametrize("value", ["no", 2, 0.0])
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_of_a_transform_is_a_bool(name, value):
    with pytest.raises(ArgumentTypeError, match=rf"{name} is {value!r}, but must be a bool"):
        FLAGS[name](value)
    for flag in (True, 0, 1, np.bool_(0), np.int64(1)):
        FLAGS[name](flag)


MADE_WITH = {
    "a Gymnasium env": lambda flag: GymEnv(
        "CartPole-v1", from_pixels=0, pixels_only=flag, info=flag, convert_actions_to_numpy=flag
    ),
    "an encoding": lambda flag: GymEnv("CartPole-v1", categorical_action_encoding=flag),
    "an env": lambda flag: Count(run_type_checks=flag, allow_done_after_reset=flag),
    "a pool": lambda flag: SerialEnv(2, Count, use_buffers=flag, non_blocking=flag, memmap=0),
    "a JaxEnv": lambda flag: JaxEnv(Pendulum(), categorical_action_encoding=flag, metrics=0),
    "a TransformedEnv": lambda flag: envkit.TransformedEnv(Count(), cache_specs=flag),
    "a collector": lambda flag: collector(
        reset_at_each_iter=flag, split_trajs=flag, reset_when_done=flag, compile_policy=0
    ),
}


@pytest.mark.parametrize("make", MADE_WITH.values(), ids=MADE_WITH)
def test_0_and_1_stand_for_a_bool(make):
    for flag in (0, 1, np.bool_(1)):
        made, wanted = make(flag), make(bool(flag))
        assert repr(made) == repr(wanted)
        for one in (made, wanted):
            one.shutdown() if isinstance(one, Collector) else one.close(raise_if_closed=False)


@pytest.mark.parametrize("rule", ["break_when_any_done", "break_when_all_done"])
@pytest.mark.parametrize("flag", [0, 1])
def test_0_and_1_stand_for_a_stop_rule(rule, flag):
    wanted, counted = (
        SerialEnv(2, Count).rollout(
            9, lambda td: td.set("action", torch.zeros(2, 1).long()), **{rule: value}
        )
        for value in (bool(flag), flag)
    )

    assert counted.shape == wanted.shape and torch.equal(counted["count"], wanted["count"])


@pytest.mark.parametrize("name", ["auto_reset", "set_truncated", "trust_policy", "set_state"])
def test_a_flag_of_a_rollout_is_a_bool(name):
    with pytest.raises(
        ArgumentTypeError, match=f"{name} is 'no', but must be (a bool|True, False or None)"
    ):
        Count().rollout(2, **{name: "no"})


@pytest.mark.parametrize("call", WHOLE.values(), ids=WHOLE)
def test_a_numpy_integer_is_one(call):
    call(np.int64(4))


@pytest.mark.parametrize("kind", [envkit.Categorical, envkit.OneHot])
def test_options_are_whole(kind):
    for value in (True, 2.5, "5", 0):
        with pytest.raises(SpecError, match=rf"has {value!r} options"):
            kind(value)
    assert all(kind(value).n == 3 for value in (3, 3.0, np.int64(3), torch.tensor(3)))


@pytest.mark.parametrize("kind", [envkit.MultiCategorical, envkit.MultiOneHot])
def test_options_of_each_choice_are_whole(kind):
    for value in (True, 2.5, "5", 0):
        with pytest.raises(SpecError, match=rf"has {value!r} options"):
            kind([3, value])
    for kept in (torch.tensor, np.array):
        with pytest.raises(SpecError, match=r"has 2.5 options"):
            kind(kept([3, 2.5]))
        assert list(kind(kept([3, 4])).nvec) == list(kind([3, 4.0]).nvec) == [3, 4]


def test_bins_of_a_tensor():
    assert envkit.ActionDiscretizer(torch.tensor([3, 4])).num_intervals == [3, 4]
    assert envkit.ActionDiscretizer(torch.tensor(3)).num_intervals == 3


@pytest.mark.parametrize("value", [3, np.int8(3), torch.tensor(3), np.array(3), 3.0, np.float64(3)])
def test_what_stands_for_an_int_is_one(value):
    assert as_int("count", value, least=1, meaning="a number") == 3


@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(True), 3.5, "3", None])
def test_what_is_no_int_is_told(value):
    with pytest.raises(ArgumentTypeError, match=r"count is .*, but must be an int of at least 1"):
        as_int("count", value, least=1, meaning="a number")
