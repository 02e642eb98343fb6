"""One contract for the transforms that change entries, over every kind of env."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from envkit import (
    BraxEnv,
    CatFrames,
    CatTensors,
    ClipTransform,
    Compose,
    DTypeCastTransform,
    ExcludeTransform,
    FlattenObservation,
    GymEnv,
    LineariseRewards,
    NormalizeReward,
    ObservationNorm,
    ParallelEnv,
    PermuteTransform,
    RenameTransform,
    RewardClipping,
    RewardScaling,
    SelectTransform,
    SerialEnv,
    SignTransform,
    SqueezeTransform,
    TimeMaxPool,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    check_env_specs,
)
from envkit.errors import SpecError
from tests.transforms.test_transform_contract import actions_of, is_equal, play
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.frozen import stays_frozen

make_count = partial(Count, 5)

ENVS = {  # create function, and an observation
    "count": (make_count, "count"),
    "stateless": (partial(StatelessCount, 5, batch_size=[3]), "count"),
    "cartpole": (partial(GymEnv, "CartPole-v1"), "observation"),
    "pendulum": (partial(GymEnv, "Pendulum-v1"), "observation"),
    "serial": (partial(SerialEnv, 3, make_count), "count"),
    "parallel": (partial(ParallelEnv, 3, make_count, num_processes=2), "count"),
    "brax": (
        partial(BraxEnv, "fast", device="cpu", batch_size=[3], episode_length=5),
        "observation",
    ),
}

ROW_BY_ROW: dict[str, Callable] = {
    "CatTensors": lambda key: CatTensors([key], "out", del_keys=False),
    "RenameTransform": lambda key: RenameTransform(
        [key, "reward"], ["out", ("deep", "reward")], create_copy=True
    ),
    "SelectTransform": lambda key: SelectTransform(key),
    "ExcludeTransform": lambda key: ExcludeTransform("reward"),
    "shapes": lambda key: Compose(
        UnsqueezeTransform(-1, in_keys=[key], out_keys=["out"]),
        PermuteTransform((-1, -2), in_keys=["out"]),
        FlattenObservation(-2, -1, in_keys=["out"]),
        SqueezeTransform(-1, in_keys=["reward"]),
    ),
    "DTypeCastTransform": lambda key: Compose(
        DTypeCastTransform(torch.float32, torch.float64),
        DTypeCastTransform(torch.int64, torch.int32),
    ),
    "ClipTransform": lambda key: ClipTransform([key], ["out"], low=-0.5, high=0.5),
    "RewardClipping": lambda key: RewardClipping(-0.5, 0.5),
    "SignTransform": lambda key: SignTransform([key, "reward"], ["out", "r"]),
    "LineariseRewards": lambda key: LineariseRewards(["reward"], weights=[-2.0]),
    "ObservationNorm": lambda key: ObservationNorm(0.5, 2.0, [key], ["out"]),
    "RewardScaling": lambda key: RewardScaling(1.0, -2.0),
    "CatFrames": lambda key: CatFrames(3, -1, [key], ["out"], padding="constant"),
    "TimeMaxPool": lambda key: TimeMaxPool([key], ["out"], 3),
    "frames, normalised": lambda key: Compose(
        CatFrames(2, -1, [key], ["out"]), ObservationNorm(0.5, 2.0, ["out"])
    ),
}
TRANSFORMS = {
    **ROW_BY_ROW,
    "VecNorm": lambda key: VecNorm([key, "reward"], ["out", "r"]),
    "NormalizeReward": lambda key: NormalizeReward(out_keys=["r"], clip=5.0),
}


COMPILED = (
    "frames, normalised"  # into the programs of Brax; each alone: around them, and in test_fused
)
STATES = {
    "LineariseRewards": {"weights"},
    "VecNorm": {"weight", "mean", "squares", "skipped_rows"},
    "NormalizeReward": {"weight", "mean", "squares", "skipped_rows"},
    "ObservationNorm": {"loc", "scale"},
    "RewardScaling": {"loc", "scale"},
    "frames, normalised": {"loc", "scale"},
}


@pytest.fixture(scope="module", params=ENVS)
def base(request):
    make, key = ENVS[request.param]
    env = make()
    yield env, key
    env.close(raise_if_closed=False)


@pytest.fixture(scope="module")
def behind(base):
    """The base env behind a transform, built once; specs that may change keep it out of programs."""
    env, key = base

    def build(name: str) -> TransformedEnv:
        stays = name == COMPILED or not isinstance(env, BraxEnv)
        return TransformedEnv(env, TRANSFORMS[name](key), spec_locked=stays)

    return cache(build)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_specs_follow_data(behind, name):
    check_env_specs(behind(name), break_when_any_done=False)


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_every_way_to_step_gives_the_same(behind, name):
    env = behind(name)
    actions, runs = actions_of(env, 8), []

    for together in (True, False):
        env.set_seed(3)
        td, seen = env.reset(), []
        for step in range(8):
            td = td.set("action", actions.select(env.batch_dims, step).clone())
            data = env.step_and_maybe_reset(td) if together else (env.step(td), None)
            td = data[1] if together else env.maybe_reset(env.step_mdp(data[0]))
            shown = [key for key in env.observation_keys if "state" not in key]
            seen += [data[0]["next"].select("done", *shown).clone(), td.select(*shown).clone()]
        runs.append(seen)

    assert all(map(is_equal, *runs))


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_finished_rows_are_frozen(behind, name):
    env = behind(name)

    data = env.rollout(30, break_when_all_done=True)

    assert stays_frozen(data, env.reward_keys, is_equal)


# ------------------------------------------------------------------------------- inside and outside

STOPS = ({"break_when_any_done": False}, {"break_when_all_done": True})


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_inside_the_sub_envs_is_as_outside_around_them(name):
    makers = [partial(Count, n) for n in (2, 4, 9)]
    make = partial(ROW_BY_ROW[name], "count")
    inside = SerialEnv(3, [lambda m=m: TransformedEnv(m(), make()) for m in makers])
    outside = TransformedEnv(SerialEnv(3, makers), make())
    actions = actions_of(outside, 9)

    for stop in STOPS:
        assert is_equal(*(play(env, actions, **stop) for env in (inside, outside)))


def test_inside_worker_processes_is_as_outside_around_them():
    def make():
        return Compose(
            CatFrames(3, -1, ["count"], ["out"]),
            TimeMaxPool(["count"], ["max"], 2),
            SignTransform(["count"], ["sign"]),
            ObservationNorm(0.5, 2.0, ["count"], ["scaled"]),
            ClipTransform(["scaled"], ["clipped"], low=-0.5, high=0.5),
            RewardScaling(1.0, -2.0),
            CatTensors(["scaled", "clipped"], "joined"),
            UnsqueezeTransform(-1, in_keys=["joined"]),
            RenameTransform(["reward"], [("deep", "reward")]),
        )

    inside = ParallelEnv(3, lambda: TransformedEnv(make_count(), make()), num_processes=2)
    outside = TransformedEnv(SerialEnv(3, make_count), make())
    actions = actions_of(outside, 9)

    data = [play(env, actions, break_when_any_done=False) for env in (inside, outside)]

    assert is_equal(*data)
    inside.close()


def wide(size: int) -> TransformedEnv:
    """A count of another size in each env, beside one of the same size."""
    repeated = CatFrames(size, -1, ["count"], ["wide"])
    return TransformedEnv(make_count(), Compose(repeated, SelectTransform("count", "wide")))


def test_entries_of_unlike_shapes_are_changed_inside_their_envs():
    makers = [partial(wide, 2), partial(wide, 3)]
    scaled = TransformedEnv(SerialEnv(2, makers), ObservationNorm(0.0, 2.0, ["count"]))
    check_env_specs(scaled, return_contiguous=False)

    for name in ("CatFrames", "ClipTransform", "ObservationNorm", "shapes", "VecNorm"):
        env = TransformedEnv(SerialEnv(2, makers), TRANSFORMS[name]("wide"))
        with pytest.raises(SpecError, match=r"'wide', whose shape differs.*into each of them"):
            _ = env.observation_spec
    joined = CatTensors(["wide", "count"], "out")
    with pytest.raises(SpecError, match="'wide', whose shape differs"):
        _ = TransformedEnv(SerialEnv(2, makers), joined).observation_spec


# ------------------------------------------------------------------------------------------- masks

masks = st.lists(st.booleans(), min_size=4, max_size=4).map(torch.tensor)
MASKED = {
    "stateful": partial(SerialEnv, 4, partial(Count, 50)),
    "stateless": partial(StatelessCount, 50, batch_size=[4]),
}
REMEMBERING = ("CatFrames", "TimeMaxPool", "frames, normalised")


def advanced(env):
    """A root in which every row has taken two steps."""
    return env.step_mdp(env.rand_step(env.step_mdp(env.rand_step(env.reset()))))


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("name", REMEMBERING)
@settings(max_examples=10)
@given(mask=masks)
def test_a_partial_reset_begins_anew_exactly_the_masked_rows(kind, name, mask):
    env = TransformedEnv(MASKED[kind](), ROW_BY_ROW[name]("count"))
    first, root = env.reset().clone(), advanced(env)

    fresh = env.reset(root.clone().set("_reset", mask[:, None]))

    assert is_equal(fresh[~mask], root[~mask])
    assert is_equal(fresh[mask], first[mask])


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("name", REMEMBERING)
@settings(max_examples=10)
@given(mask=masks)
def test_a_partial_step_touches_exactly_the_masked_rows(kind, name, mask):
    env = TransformedEnv(MASKED[kind](), ROW_BY_ROW[name]("count"))
    root = env.rand_action(advanced(env))
    keys = [*env.observation_keys, "done"]

    stepped = env.step(root.clone().set("_step", mask))

    whole = TransformedEnv(StatelessCount(50, batch_size=[4]), ROW_BY_ROW[name]("count"))
    expected = whole.step(root.clone())
    assert is_equal(stepped["next"][~mask].select(*keys), root[~mask].select(*keys))
    assert is_equal(stepped["next"][mask].select(*keys), expected["next"][mask].select(*keys))


# ---------------------------------------------------------------------------- copies, states, devices


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_a_clone_does_what_the_transform_does(name):
    first = TransformedEnv(StatelessCount(5, batch_size=[2]), ROW_BY_ROW[name]("count"))
    second = TransformedEnv(StatelessCount(5, batch_size=[2]), first.transform.clone())
    actions = actions_of(first, 6)

    data = [play(env, actions, break_when_any_done=False) for env in (first, second)]

    assert is_equal(*data)
    assert second.transform.container is second


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_state_dict_can_be_loaded(name):
    trained, fresh = (TransformedEnv(make_count(), TRANSFORMS[name]("count")) for _ in range(2))
    trained.rollout(7, break_when_any_done=False)

    fresh.load_state_dict(trained.state_dict())

    held = {key.rsplit(".", 1)[-1] for key in trained.state_dict()}
    assert held == STATES.get(name, set())
    assert is_equal(TensorDict(trained.state_dict()), TensorDict(fresh.state_dict()))
    actions = actions_of(trained, 7)
    assert is_equal(*(play(env, actions, break_when_any_done=False) for env in (trained, fresh)))


BOUNDING = {"ClipTransform", "RewardClipping", "SignTransform"}  # meta has no bounds to compare


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name not in BOUNDING])
def test_a_transform_moves_with_its_env(name):
    env = StatelessCount(5, batch_size=[2], device="cpu")
    env = TransformedEnv(env, TRANSFORMS[name]("count"))
    assert {value.device.type for value in env.rollout(3).values(True, True)} == {"cpu"}

    env.to("meta")

    held = [*env.specs.values(True, True), *env.transform.buffers()]
    assert {found.device.type for found in held} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", ["brax", "serial"])
def test_transforms_run_on_the_device_of_the_env(name, kind):
    make, key = ENVS[kind]
    make = partial(make.func, *make.args, **{**make.keywords, "device": "cuda"})
    env = TransformedEnv(make(), TRANSFORMS[name](key))

    check_env_specs(env, seed=0, break_when_any_done=False)
    data = env.rollout(7, break_when_any_done=False)

    assert {value.device.type for value in data.values(True, True)} == {"cuda"}
