"""Settings of transforms that are changed once their env has been used: the next step follows them, or is refused.

What is compared with is the same env behind a transform more, which does nothing and keeps all of them from programs
and rows, with the same setting changed at the same time.

Conventions
    setting  kind of a transform, and one of its public attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium import spaces

import envkit
from envkit import (
    BinarizeReward,
    CatFrames,
    CatTensors,
    ClipTransform,
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    EnvBase,
    ExcludeTransform,
    FlattenObservation,
    GymEnv,
    GymWrapper,
    InitTracker,
    LineariseRewards,
    NormalizeReward,
    ObservationNorm,
    ParallelEnv,
    PermuteTransform,
    RenameTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SerialEnv,
    SignTransform,
    SqueezeTransform,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TimeMaxPool,
    Transform,
    TransformedEnv,
    Unbounded,
    UnsqueezeTransform,
    VecNorm,
    default_info_dict_reader,
    gSDENoise,
)
from envkit.errors import ArgumentTypeError, WorkerError
from envkit.specs import Composite
from envkit.transforms.core.fusable import FusableTransform
from envkit_bridges.jax.jax_env import JaxEnv
from tests.bridges.compare import assert_same
from tests.zoo.transforms import Opaque, Walk
from tests.zoo.walkers import Walker

CHAINS: list[Callable[[], list[Any]]] = [  # the last one is set
    lambda: [StepCounter(3)],
    lambda: [RewardSum()],
    lambda: [InitTracker()],
    lambda: [TargetReturn(3.0)],
    lambda: [RewardScaling(0.5, 2.0)],
    lambda: [RewardClipping(-1.0, 0.5)],
    lambda: [BinarizeReward(["reward"], ["is_good"])],
    lambda: [LineariseRewards(["reward"], ["sum"], weights=[-1.5])],
    lambda: [SignTransform(["place"], ["side"])],
    lambda: [ClipTransform(["place"], ["near"], low=-0.25)],
    lambda: [ObservationNorm(0.1, 2.0, ["place"])],
    lambda: [DTypeCastTransform(torch.float32, torch.float16, ["place"])],
    lambda: [DoubleToFloat()],
    lambda: [CatFrames(2, -1, ["place"], ["frames"], padding="constant", padding_value=7.0)],
    lambda: [TimeMaxPool(["place"], ["most"], 2)],
    lambda: [UnsqueezeTransform(-1, in_keys=["place"])],
    lambda: [SqueezeTransform(-1, in_keys=["reward"])],
    lambda: [UnsqueezeTransform(-1, in_keys=["place"]), PermuteTransform((-1, -2), ["place"])],
    lambda: [UnsqueezeTransform(-1, in_keys=["place"]), FlattenObservation(-2, -1, ["place"])],
    lambda: [CatTensors(["place", ("sight", "lamps")], "seen", del_keys=False)],
    lambda: [RenameTransform(["place"], ["body"])],
    lambda: [ExcludeTransform(("sight", "lamps"))],
    lambda: [SelectTransform("place")],
    lambda: [TensorDictPrimer(mem=Unbounded((1,)), default_value=2.0)],
    lambda: [gSDENoise(shape=())],
    lambda: [VecNorm(["place"])],
    lambda: [NormalizeReward()],
]
OTHERS: dict[str, Any] = {
    "in_keys_inv": ["action"],
    "out_keys_inv": ["action"],
    "excluded_keys": ["place"],
    "selected_keys": [("sight", "lamps")],
    "high": 0.5,
    "reset_key": "_reset",
    "reset_keys": ["_reset"],
    "dims": (-2, -1),
    "dtype_in": torch.uint8,
    "dtype_out": torch.float64,
    "primers": Composite(mem=Unbounded((2,))),
    "padding": "same",
    "mode": "constant",
    "mask_key": "mask",
    "frozen": True,
}
UNREAD = {"training", "shared_lock", "shapes", "as_inverse"}
"""Attributes that say nothing of what an env shows: locks, what a replay buffer does, and what was learnt."""
OF_ALL = {"in_keys_inv", "out_keys_inv", "missing_tolerance"}
"""Settings of the base class, which are tried with a few kinds."""


def other(name: str, value: Any) -> Any:
    """Give another value for a setting."""
    if name == "in_keys":
        return ["place"] if value == ["reward"] else ["reward"]
    if name == "out_keys":
        return ["elsewhere"] * max(1, len(value))
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(value, bool | None):
        return not value
    if isinstance(value, int | float):
        return value + 1
    assert isinstance(value, str), (name, value)
    return f"{value}_2"


SETTINGS = [
    pytest.param(make, name, id=f"{type(make()[-1]).__name__}.{name}")
    for number, make in enumerate(CHAINS)
    for name in (*vars(make()[-1]), *make()[-1]._buffers, "N", "T")
    if hasattr(make()[-1], name)
    if not (name.startswith("_") or name in UNREAD or (number % 8 and name in OF_ALL))
]


def walk(*chain: Transform) -> Any:
    return TransformedEnv(GymWrapper(Walk()), Compose(*chain))


def alone(kind: Callable[..., Transform], *args: Any, **kwargs: Any) -> Any:
    return TransformedEnv(GymWrapper(Walk()), kind(*args, **kwargs))


def walker(*chain: Transform) -> Any:
    env = JaxEnv(Walker(), batch_size=[2], device="cpu", episode_length=6)
    return TransformedEnv(env, Compose(*chain))


def data_of(env: EnvBase) -> Any:
    """Give what an env shows in a run and in single steps, or the error."""
    env.set_seed(3)
    taking = env.base_env if isinstance(env, TransformedEnv) else env
    spec, generator = taking.full_action_spec["action"], torch.Generator().manual_seed(0)

    def act(td):
        return td.set("action", spec.rand((), generator))

    try:
        data = env.rollout(7, act, break_when_any_done=False)
        return data, env.step(act(env.reset()))
    except Exception as error:
        return error


def set_after_use(env: EnvBase, transforms: list[Transform], name: str) -> None:
    """Use an env, and then change a setting of the transforms."""
    env.set_seed(0)
    torch.manual_seed(0)
    env.rollout(5, break_when_any_done=False)
    for transform in transforms:
        value = getattr(transform, name)
        setattr(transform, name, value + 0.5 if torch.is_tensor(value) else other(name, value))


def assert_followed_or_refused(shown: Any, expected: Any) -> None:
    if isinstance(expected, Exception):
        assert isinstance(shown, Exception), "data was shown that single steps refuse"
    elif not isinstance(shown, Exception):
        for here, there in zip(shown, expected, strict=True):
            assert_same(here, there)


@pytest.mark.parametrize(("make", "name"), SETTINGS)
def test_a_setting_that_is_changed_after_use_counts_on_a_row(make, name):
    env, single = walk(*make()), walk(*make(), Opaque())
    for each in (env, single):
        set_after_use(each, [each.transform[len(make()) - 1]], name)

    found, expected = data_of(env), data_of(single)

    assert_followed_or_refused(found, expected)
    assert isinstance(found, Exception) == isinstance(expected, Exception)


OF_ROWS = [
    pytest.param(
        *s.values, which, id=f"{s.id} of {rows}", marks=() if is_quick else pytest.mark.sweep
    )
    for s in SETTINGS
    for rows, which in {"all rows": [0, 1], "one row": [1]}.items()
    if "VecNorm" not in str(s.id)
    for is_quick in [rows == "one row" and str(s.id).startswith(("StepCounter", "CatFrames"))]
]


@pytest.mark.parametrize(("make", "name", "which"), OF_ROWS)
def test_a_setting_of_rows_of_a_pool_is_followed_or_refused(make, name, which):
    outcomes = []
    for more, has_rows in ([], True), ([Opaque], False):
        envs = [walk(*make(), *(kind() for kind in more)) for _ in range(2)]
        pool = SerialEnv(2, [lambda env=env: env for env in envs], use_buffers=has_rows)
        chains = [envs[row].transform[len(make()) - 1] for row in which]
        set_after_use(pool, chains, name)
        outcomes.append(data_of(pool))

    assert_followed_or_refused(*outcomes)


@pytest.mark.parametrize(("make", "name"), SETTINGS)
def test_no_program_stays_that_was_made_for_other_settings(make, name):
    env = walker(*make())
    transform = env.transform[len(make()) - 1]
    before, stepper = getattr(transform, name), env._route.stepper
    key = stepper._engine.programs.key()

    setattr(transform, name, before + 0.5 if torch.is_tensor(before) else other(name, before))

    given = {*transform.constants(), *transform._buffers, "frozen"}
    assert name in given or env._declared.sides == {}
    assert name in given or stepper._engine.programs.key() != key


@pytest.mark.parametrize(
    ("make", "name"),
    [
        pytest.param(make, name, marks=pytest.mark.slow if number else (), id=name)
        for number, (name, make) in enumerate(
            {
                "update_done": lambda: [StepCounter(3), RewardSum()],
                "padding": lambda: [CatFrames(2, -1, ["place"], ["f"], padding="constant")],
                "mode": lambda: [TargetReturn(3.0)],
                "standard_normal": lambda: [ObservationNorm(0.1, 2.0, ["place"])],
                "in_keys": lambda: [RewardScaling(0.5, 2.0), SignTransform(["place"], ["side"])],
                "T": lambda: [TimeMaxPool(["place"], ["most"], 2)],
            }.items()
        )
    ],
)
def test_a_setting_that_is_changed_after_use_counts_in_programs(make, name):
    env, single = walker(*make()), walker(Opaque(), *make())
    for each, first in ((env, 0), (single, 1)):
        chain = [one for one in list(each.transform)[first:] if hasattr(one, name)]
        set_after_use(each, chain[-1:], name)

    found, expected = data_of(env), data_of(single)

    assert_followed_or_refused(found, expected)
    assert not isinstance(found, Exception)


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_a_setting_is_set_in_all_workers_by_the_name_of_the_transform(kind):
    pool = kind(2, partial(alone, ClipTransform, ["place"], ["near"], low=0.0))
    pool.rollout(3)

    pool.transform.low = 5.0

    assert (pool.rollout(3)["near"] == 5.0).all()
    with pytest.raises(AttributeError, match=r"'transform\.lowest'"):
        pool.transform.lowest = 5.0
    pool.close()


def test_rows_of_a_pool_that_cannot_show_a_setting_say_where_to_set_it():
    pool: Any = SerialEnv(2, partial(alone, StepCounter, 3))
    pool.rollout(3)

    pool.transform.step_count_key = "n"

    with pytest.raises(WorkerError, match="Set it where the env is made"):
        pool.rollout(3)


def test_every_transform_on_leaves_is_tried():
    public = {getattr(envkit, name) for name in envkit.__all__}
    on_leaves = {
        kind.__name__
        for kind in public
        if isinstance(kind, type) and issubclass(kind, FusableTransform)
    }

    tried = {type(make()[-1]).__name__ for make in CHAINS}
    # averages of single rows are no state of programs
    assert on_leaves - tried == {"FusableTransform", "MomentTransform", "VecNormV2"}


# ------------------------------------------------------------------------------- other transforms


def scaled(factor: float) -> RewardScaling:
    return RewardScaling(0.0, factor)


EDITS = {
    "item": lambda compose: compose.transforms.__setitem__(0, scaled(7.0)),
    "last item": lambda compose: compose.transforms.__setitem__(-1, scaled(7.0)),
    "all": lambda compose: setattr(compose, "transforms", [scaled(7.0)]),
    "append": lambda compose: compose.transforms.append(scaled(3.5)),
    "insert": lambda compose: compose.transforms.insert(0, scaled(3.5)),
    "extend": lambda compose: compose.transforms.extend([scaled(7.0), scaled(0.5)]),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("depth", [0, 1])
def test_transforms_that_are_edited_in_their_list_count_from_the_next_step(edit, depth):
    inner: Any = TransformedEnv(GymEnv("CartPole-v1"), Compose(scaled(2.0)))
    env = TransformedEnv(inner, Compose(StepCounter())) if depth else inner
    env.rollout(3)

    EDITS[edit](inner.transform)

    assert (env.rollout(3)["next", "reward"] == 7.0).all()
    assert env.step(env.rand_action(env.reset()))["next", "reward"] == 7.0


def test_a_transform_that_is_deleted_from_its_list_has_no_env():
    env: Any = TransformedEnv(GymEnv("CartPole-v1"), Compose(scaled(2.0), RewardSum()))
    env.rollout(3)
    first = env.transform[0]

    del env.transform.transforms[0]

    assert (env.rollout(3)["next", "reward"] == 1.0).all()
    assert first.container is None and len(env.transform) == 1


def test_a_chain_inside_that_is_changed_shows_in_specs_outside():
    inner = TransformedEnv(GymEnv("CartPole-v1"), RewardSum())
    env = TransformedEnv(inner, StepCounter())
    env.rollout(3)

    inner.append_transform(CatTensors(["observation"], "copy", del_keys=False))

    assert "copy" in env.observation_spec.keys()
    assert "copy" in env.rollout(3).keys()


@pytest.mark.slow
def test_a_chain_inside_that_is_changed_shows_in_programs_of_the_env_outside():
    inner = walker(RewardSum())
    env = TransformedEnv(inner, StepCounter())
    before = env.rollout(3, break_when_any_done=False)["next", "reward"]

    inner.insert_transform(0, scaled(0.0))

    assert before.any()
    assert not env.rollout(3, break_when_any_done=False)["next", "reward"].any()


# ------------------------------------------------------------------------------- readers of infos


class Informed(gymnasium.Env):
    """Tells two numbers in its infos."""

    observation_space: Any = spaces.Box(-1.0, 1.0, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.low, {"x": 1.0, "y": 2.0}

    def step(self, action):
        return self.observation_space.low, 0.0, False, False, {"x": 1.0, "y": 2.0}


def informed() -> Any:
    return GymWrapper(Informed()).set_info_dict_reader(default_info_dict_reader(["x"]))


def read_y(info, td):
    return td.set("x", torch.tensor(info["y"], dtype=torch.float64))


class ReadsY(default_info_dict_reader):
    """Writes another number under the same name."""

    def __call__(self, info, td):
        return read_y(info, td)


@pytest.mark.parametrize("around", [lambda env: env, lambda env: TransformedEnv(env, RewardSum())])
def test_another_reader_of_infos_reads_from_the_next_step_on(around):
    inner = informed()
    env = around(inner)
    assert (env.rollout(3)["next", "x"] == 1.0).all()

    inner.info_dict_reader = [read_y]

    assert (env.rollout(3)["next", "x"] == 2.0).all()
    assert env.step(env.rand_action(env.reset()))["next", "x"] == 2.0


def test_readers_of_infos_are_assigned_together():
    with pytest.raises(ArgumentTypeError, match=r"env\.info_dict_reader = "):
        informed().info_dict_reader[0] = read_y


def test_a_reader_that_rows_of_a_pool_cannot_use_is_refused():
    envs = [informed(), informed()]
    pool = SerialEnv(2, [lambda env=env: env for env in envs])
    pool.rollout(3)

    envs[1].info_dict_reader = [ReadsY(["x"])]

    with pytest.raises(WorkerError, match="create function of the pool"):
        pool.rollout(3)
