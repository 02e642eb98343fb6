"""The contract for transforms that need an env of a certain kind, and for all inside worker processes.

`test_transform_contract` and `test_leaf_contract` hold the transforms that any env suits.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit import (
    ActionChunkTransform,
    ActionDiscretizer,
    ActionMask,
    ActionScaling,
    AutoResetEnv,
    BinarizeReward,
    CenterCrop,
    Compose,
    ConditionalPolicySwitch,
    ConditionalSkip,
    Crop,
    DeviceCastTransform,
    DiscreteActionProjection,
    DoubleToFloat,
    EndOfLifeTransform,
    ExpandAs,
    FiniteTensorDictCheck,
    FlattenAction,
    FrameSkipTransform,
    GrayScale,
    GymEnv,
    GymWrapper,
    InitTracker,
    MeanActionSelector,
    ModuleTransform,
    MultiAction,
    NoopResetEnv,
    ParallelEnv,
    PixelRenderTransform,
    RandomTruncationTransform,
    RemoveEmptySpecs,
    Resize,
    RewardSum,
    SerialEnv,
    Stack,
    StepCounter,
    SuccessReward,
    TargetReturn,
    TensorDictPrimer,
    TerminateTransform,
    ToTensorImage,
    TrajCounter,
    TransformedEnv,
    UnaryTransform,
    Unbounded,
    VecGymEnvTransform,
    VecNormV2,
    VideoRecorder,
    check_env_specs,
    gSDENoise,
)
from tests.bridges.compare import assert_close
from tests.transforms.test_images import Canvas
from tests.transforms.test_transform_contract import is_equal
from tests.transforms.test_values import Doubles
from tests.zoo.envs import Count
from tests.zoo.gym_envs import Lives
from tests.zoo.transform_envs import (
    Cards,
    Drawn,
    SelfResetting,
    SelfResettingRows,
    Twins,
    TwoTeams,
    counted,
)

count, pendulum = partial(Count, 5), partial(GymEnv, "Pendulum-v1")


def encoder() -> ModuleTransform:
    module = torch.nn.Linear(3, 2).requires_grad_(False)
    torch.nn.init.constant_(module.weight, 0.5)
    torch.nn.init.constant_(module.bias, 0.25)
    return ModuleTransform(module, in_keys="observation", out_keys="code", no_grad=True)


def opponent(td):
    return td.set("action", torch.zeros_like(td["count"]))


CASES = {  # the env, and the transform
    "ActionMask": (Cards, ActionMask),
    "DiscreteActionProjection": (count, partial(DiscreteActionProjection, 2, 4)),
    "ActionDiscretizer": (pendulum, partial(ActionDiscretizer, 3)),
    "BinarizeReward": (pendulum, BinarizeReward),
    "DoubleToFloat": (Doubles, DoubleToFloat),
    "ToTensorImage": (Canvas, ToTensorImage),
    "GrayScale": (Canvas, lambda: Compose(ToTensorImage(), GrayScale())),
    "Resize": (Canvas, partial(Resize, 3)),
    "Crop": (Canvas, partial(Crop, 2, 3)),
    "CenterCrop": (Canvas, partial(CenterCrop, 2)),
    "images": (Canvas, lambda: Compose(ToTensorImage(), GrayScale(), Resize(3), CenterCrop(2))),
    "PixelRenderTransform": (Drawn, PixelRenderTransform),
    "VideoRecorder": (Canvas, VideoRecorder),
    "ModuleTransform": (pendulum, encoder),
    "ActionScaling": (pendulum, ActionScaling),
    "FlattenAction": (pendulum, partial(FlattenAction, -1, -1)),
    "MeanActionSelector": (pendulum, MeanActionSelector),
    "MultiAction": (pendulum, MultiAction),
    "DeviceCastTransform": (count, partial(DeviceCastTransform, "cpu")),
    "RandomTruncationTransform": (
        partial(Count, 50),
        lambda: Compose(StepCounter(), RandomTruncationTransform(2, 4, 0.5)),
    ),
    "TerminateTransform": (
        count,
        partial(TerminateTransform, lambda td: td["count"][..., 0] >= 2),
    ),
    "EndOfLifeTransform": (lambda: GymWrapper(Lives()), EndOfLifeTransform),
    "Stack": (
        Twins,
        partial(Stack, ["a", "b"], "both", in_key_inv="both", out_keys_inv=["a", "b"]),
    ),
    "FiniteTensorDictCheck": (pendulum, FiniteTensorDictCheck),
    "ExpandAs": (Twins, partial(ExpandAs, ("a", "done"), ("a", "count"))),
    "UnaryTransform": (
        count,
        lambda: UnaryTransform(["count"], ["half"], fn=lambda value: value / 2),
    ),
    "ConditionalPolicySwitch": (
        partial(Count, 50),
        partial(ConditionalPolicySwitch, opponent, lambda td: td["count"][..., 0] % 3 == 1),
    ),
    "SuccessReward": (
        count,
        lambda: Compose(
            UnaryTransform(["count"], ["success"], fn=lambda value: value >= 3), SuccessReward()
        ),
    ),
    "ActionChunkTransform": (pendulum, partial(ActionChunkTransform, 2)),
    "gSDENoise": (count, partial(gSDENoise, 2, 3)),
    "VecNormV2": (count, partial(VecNormV2, ["count", "reward"], ["c", "r"], decay=0.9)),
    "VecNormV2 in the data": (
        count,
        partial(VecNormV2, ["count", "reward"], ["c", "r"], decay=0.9, stateful=False),
    ),
    "drawn primer": (
        count,
        lambda: TensorDictPrimer(mem=Unbounded((2,)), random=True, expand_specs=True),
    ),
}
DRAWING = {
    "DiscreteActionProjection",
    "RandomTruncationTransform",
    "drawn primer",
    "gSDENoise",
}  # one generator for a batch, or one each


@pytest.mark.parametrize("case", CASES)
def test_specs_follow_data_around_an_env_around_a_batch_and_inside(case):
    make, transform = CASES[case]

    check_env_specs(TransformedEnv(make(), transform()))
    check_env_specs(TransformedEnv(SerialEnv(2, make), transform()))
    check_env_specs(SerialEnv(2, lambda: TransformedEnv(make(), transform())))


@pytest.mark.rounding
@pytest.mark.parametrize("case", [case for case in CASES if case not in DRAWING])
def test_inside_the_sub_envs_is_as_outside_around_them(case):
    make, transform = CASES[case]
    inside = SerialEnv(2, lambda: TransformedEnv(make(), transform()))
    outside, data = TransformedEnv(SerialEnv(2, make), transform()), []

    for env in (inside, outside):
        env.set_seed(3)
        data.append(env.rollout(7, break_when_any_done=False))

    assert_close(*data)  # one batch of two and two of one are rounded apart


@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_neither_stepped_nor_reset_keep_all_they_had(case):
    make, transform = CASES[case]
    env = TransformedEnv(SerialEnv(2, make), transform())
    env.set_seed(0)
    root = env.step_mdp(env.rand_step(env.reset()))
    mask = torch.tensor([True, False])
    shown = [key for key in (*env.observation_keys, *env.done_keys) if key != "action"]
    asked = root.clone()
    for key, done in zip(env.reset_keys, env.done_keys_groups, strict=True):
        flags = root[done[0]]
        asked[key] = mask.reshape(2, *(1,) * (flags.ndim - 1)).expand_as(flags).clone()

    stepped = env.step(env.rand_action(root.clone()).set("_step", mask))["next"]
    reset = env.reset(asked)

    assert is_equal(stepped[1].select(*shown), root[1].select(*shown))
    assert is_equal(reset[1].select(*shown), root[1].select(*shown))
    first = env.reset()
    assert set(map(str, first.keys(True, True))) <= set(map(str, reset.keys(True, True)))


@pytest.mark.parametrize("case", CASES)
def test_a_clone_with_the_same_state_does_what_the_transform_does(case):
    make, transform = CASES[case]
    first = TransformedEnv(make(), transform())
    first.rollout(2)
    second, data = TransformedEnv(make(), first.transform.clone()), []

    second.transform.load_state_dict(first.transform.state_dict())
    for env in (first, second):
        env.set_seed(3)
        data.append(env.rollout(6, break_when_any_done=False))

    assert is_equal(*data)
    assert second.transform.container is second


def test_simulators_that_reset_themselves_obey_the_contract():
    check_env_specs(SelfResetting(3, auto_reset=True))
    check_env_specs(SerialEnv(2, lambda: AutoResetEnv(SelfResetting(3))))
    env = TransformedEnv(SelfResettingRows((2, 3)), VecGymEnvTransform())
    check_env_specs(env)

    again = TransformedEnv(SelfResettingRows((2, 3)), env.transform.clone())
    data = []
    for each in (env, again):
        each.set_seed(0)
        data.append(each.rollout(5, break_when_any_done=False))

    assert all(
        torch.equal(data[0][key].nan_to_num(7), data[1][key].nan_to_num(7))
        for key in data[0].keys(True, True)
    )


# ------------------------------------------------------------------------------- several levels

masks = st.lists(st.booleans(), min_size=2, max_size=2).map(torch.tensor)
AT_EACH_LEVEL = {
    "StepCounter": (StepCounter, "step_count"),
    "InitTracker": (InitTracker, "is_init"),
    "RewardSum": (RewardSum, "episode_reward"),
    "TensorDictPrimer": (
        lambda: TensorDictPrimer(
            {("a", "mem"): Unbounded((1,)), ("b", "mem"): Unbounded((1,))},
            default_value=3.0,
            reset_key=("a", "_reset"),
            expand_specs=True,
        ),
        "mem",
    ),
}


AT_ANY_LEVEL = {
    **{name: make for name, (make, _) in AT_EACH_LEVEL.items()},
    "TrajCounter": TrajCounter,
    "VecNormV2": lambda: VecNormV2(
        [("a", "count"), ("b", "count")], [("a", "c"), ("b", "c")], stateful=False
    ),
    "TargetReturn": lambda: TargetReturn(
        4.0, in_keys=[("a", "reward")], out_keys=["left"], reset_key=("a", "_reset")
    ),
    "NoopResetEnv": lambda: NoopResetEnv(1),
    "FrameSkipTransform": lambda: FrameSkipTransform(2),
    "ConditionalSkip": lambda: ConditionalSkip(lambda td: False),
    "RemoveEmptySpecs": RemoveEmptySpecs,
}


@pytest.mark.parametrize("name", AT_ANY_LEVEL)
def test_specs_follow_data_where_there_are_several_levels(name):
    make = AT_ANY_LEVEL[name]

    check_env_specs(TransformedEnv(TwoTeams((4, 6), batch_size=[2]), make()))
    check_env_specs(SerialEnv(2, lambda: TransformedEnv(TwoTeams((4, 6)), make())))


@pytest.mark.parametrize("name", AT_EACH_LEVEL)
@settings(max_examples=10)
@given(left=masks, right=masks)
def test_each_level_begins_anew_where_its_own_mask_says(name, left, right):
    make, entry = AT_EACH_LEVEL[name]
    env = TransformedEnv(TwoTeams((9, 9), batch_size=[2]), make())
    first = env.reset().clone()
    root = env.step_mdp(env.rand_step(env.step_mdp(env.rand_step(env.reset()))))
    root["a", entry] = (root["a", entry] + 1).to(root["a", entry].dtype)
    asked = root.clone()
    for level, mask in (("a", left), ("b", right)):
        asked[level, "_reset"] = mask[:, None]

    fresh = env.reset(asked)

    for level, mask in (("a", left), ("b", right)):
        assert fresh[level, "count"][mask].equal(first[level, "count"][mask])
        assert fresh[level, "count"][~mask].equal(root[level, "count"][~mask])
        assert fresh[level, entry][mask].equal(first[level, entry][mask])
        assert fresh[level, entry][~mask].equal(root[level, entry][~mask])


# ------------------------------------------------------------------------------- worker processes


@pytest.fixture(scope="module")
def inside():
    env = ParallelEnv(2, counted, num_processes=1)
    yield env
    env.close()


def test_inside_worker_processes_is_as_inside_this_one(inside):
    serial, data = SerialEnv(2, counted), []

    for env in (inside, serial):
        env.set_seed(3)
        data.append(env.rollout(9, break_when_any_done=False))

    assert is_equal(*data)
    assert data[0]["traj_count"].unique().numel() > 1


def test_inside_worker_processes_rows_obey_masks(inside):
    root = inside.step_mdp(inside.rand_step(inside.reset()))
    mask = torch.tensor([True, False])

    acting = root.clone().set("action", torch.zeros(2, 1, dtype=torch.int64))  # 1 is skipped
    stepped = inside.step(acting.set("_step", mask))["next"]
    reset = inside.reset(root.clone().set("_reset", mask[:, None]))

    shown = [*inside.observation_keys, "done"]
    assert is_equal(stepped[1].select(*shown), root[1].select(*shown))
    assert is_equal(reset[1].select(*shown), root[1].select(*shown))
    assert not stepped["count"][0].equal(root["count"][0])
