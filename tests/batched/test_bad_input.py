"""A table of what callers get wrong: each is an error that names the key and the cure.

Nothing is half done after it: the same env, reset and stepped, gives the data it gives without the
mistake, and seeded anew those it gives at first.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envkit import BraxEnv, Discrete, GymEnv, JaxEnv, ParallelEnv, SerialEnv
from envkit.env.base import EnvBase
from envkit.errors import (
    ArgumentCountError,
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    ClosedEnvError,
    CopyError,
    DataTypeError,
    InputError,
    MissingKeyError,
    NotResetError,
    ResetMaskError,
    StepMaskError,
    WorkerError,
)
from envkit.specs import Bounded, Categorical, Composite, Unbounded
from envkit_bridges.gym.gym_wrapper import GymWrapper
from tests.zoo.envs import Count
from tests.zoo.walkers import Chooser

F, T = False, True


class Panel(gymnasium.Env):
    """Takes an action of several kinds."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Dict(
        dials=spaces.MultiDiscrete([2, 3]),
        flags=spaces.MultiBinary(3),
        force=spaces.Box(-np.inf, np.inf, (2,), np.float32),
        gear=spaces.Discrete(3),
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 1).astype(np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.reset()[0], 0.0, False, False, {}


class Reach(EnvBase):
    """Move along ``axes`` axes, up to ``most`` a step."""

    def __init__(self, axes: int, most: float = 1.0):
        super().__init__()
        self.observation_spec = Composite(place=Unbounded((axes,)))
        self.action_spec = Bounded(-most, most, (axes,))
        self.place = torch.zeros(axes)

    def _reset(self, td, **kwargs):
        self.place = torch.zeros_like(self.place)
        return TensorDict({"place": self.place})

    def _step(self, td):
        self.place = self.place + td["action"]
        return TensorDict({"place": self.place, "reward": -self.place.norm()})

    def _set_seed(self, seed):
        pass


def make_panel(categorical: bool) -> GymWrapper:
    return GymWrapper(Panel(), categorical)


pole = partial(GymEnv, "CartPole-v1")
pole_index = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
pendulum = partial(GymEnv, "Pendulum-v1")
parallel = partial(ParallelEnv, 2, num_processes=2)
serial = partial(SerialEnv, 2)

KINDS: dict[str, Callable[[], EnvBase]] = {
    "pole": pole,
    "pole index": pole_index,
    "pendulum": pendulum,
    "panel": partial(make_panel, False),
    "panel index": partial(make_panel, True),
    "vector pole": partial(GymEnv, "CartPole-v1", num_envs=2),
    "serial pole": partial(serial, pole),
    "serial pole, tds": partial(serial, pole, use_buffers=False),
    "serial pole index": partial(serial, pole_index),
    "serial pendulum": partial(serial, pendulum),
    "serial panel": partial(serial, partial(make_panel, False)),
    "serial count": partial(serial, Count),
    "serial count, rows": partial(serial, Count, use_buffers=True),
    "parallel pole": partial(parallel, pole),
    "parallel pole, tds": partial(parallel, pole, use_buffers=False),
    "parallel pendulum": partial(parallel, pendulum),
    "parallel panel": partial(parallel, partial(make_panel, True)),
    "parallel count": partial(parallel, Count),
    "parallel count, tds": partial(parallel, Count, use_buffers=False),
    "serial unlike": partial(SerialEnv, 2, [partial(Reach, 1), partial(Reach, 2)]),
    "serial bounds": partial(SerialEnv, 2, [partial(Reach, 1), partial(Reach, 1, 3.0)]),
    "serial bounds, rows": partial(
        SerialEnv, 2, [partial(Reach, 1), partial(Reach, 1, 3.0)], use_buffers=True
    ),
    "brax": partial(BraxEnv, "fast", batch_size=[2], device="cpu"),
    "choice": partial(JaxEnv, Chooser(Discrete(2)), batch_size=[2]),
    "index": partial(
        JaxEnv, Chooser(Discrete(2)), batch_size=[2], categorical_action_encoding=True
    ),
}
JAX = ("brax", "choice", "index")
PLAIN = ["serial pole", "serial count", "parallel count"]
POLES = [kind for kind in KINDS if kind.endswith(("pole", "pole, tds"))]
PENDULUMS = [kind for kind in KINDS if kind.endswith("pendulum")]
COUNTS = [kind for kind in KINDS if "count" in kind]
INDICES = [kind for kind in KINDS if kind.endswith("pole index")]
PANELS = [kind for kind in KINDS if "panel" in kind]
GYM = [*POLES, *PENDULUMS, *INDICES]
POOLS = [kind for kind in KINDS if kind.startswith(("serial", "parallel"))]
LOCKED = [kind for kind in KINDS if kind not in JAX]
BATCHED = [*POOLS, "vector pole"]
SOME = ["pole", "serial pole", "parallel pole", "parallel pole, tds", "brax"]


@dataclass
class Case:
    """A mistake: ``call(env, td)``, where ``td`` is a root with a good action."""

    name: str
    kinds: list[str]
    call: Callable[[EnvBase, TensorDictBase], Any]
    error: Any
    message: str
    cause: Any = field(default=())
    """What the error of a worker then stems from."""
    steps: bool = False
    """Right steps come before the mistake, so the simulators have moved on."""


def step_with(**entries: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """Step with some entries of the root changed."""

    def call(env: EnvBase, td: TensorDictBase) -> Any:
        td = TensorDict(dict(td.items()), td.batch_size)  # without a device, which would cast
        for key, change in entries.items():
            td.set(key, change(td.get(key)))
        return env.step(td)

    return call


def masked(call: str, key: str, make: Callable[[tuple[int, ...]], torch.Tensor]) -> Callable:
    """Step or reset with a mask."""

    def work(env: EnvBase, td: TensorDictBase) -> Any:
        return getattr(env, call)(td.set(key, make(tuple(env.batch_size))))

    return work


def last_row(change: Callable[[torch.Tensor], Any]) -> Callable:
    """Change one row alone: the last one of a batch."""

    def work(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        row = value if value.ndim < 2 else value[-1]
        row[...] = torch.as_tensor(change(row), dtype=value.dtype)
        return value

    return work


def last_row_as_float(change: Callable[[torch.Tensor], Any]) -> Callable:
    """The same, of values that are made floats."""
    return lambda value: last_row(change)(value.float())


CASES = [
    # what an action looks like
    Case(
        "shape of an action",
        [*GYM, *POOLS[:2], "serial count", "parallel count", "brax"],
        step_with(action=lambda a: torch.stack([a, a], -1)),
        InputError,
        r"'action' has shape .*, but the env takes \(",
    ),
    Case(
        "shape of an action, told as it was given",
        ["serial count", "serial count, rows", "parallel count"],
        step_with(action=lambda a: torch.cat([a, a], -1)),
        InputError,
        r"'action' has shape \(2, 2\), but the env takes \(2, 1\)",
    ),
    Case(
        "a float between two choices",
        [*INDICES, "index", *COUNTS],
        step_with(action=last_row_as_float(lambda row: row.fill_(0.7))),
        (InputError, WorkerError),
        r"'action'.* is .*0\.7.*, but the env takes torch.int\d+, to which a cast would change it",
        InputError,
    ),
    Case(
        "an integer between two forces",
        [*PENDULUMS, "brax", "serial bounds", "serial bounds, rows"],
        step_with(action=lambda a: torch.full_like(a, 2**24 + 1, dtype=torch.int64)),
        (InputError, WorkerError),
        r"'action'.* is .*16777217.*, but the env takes torch.float32, to which a cast .*Pass floats",
        InputError,
    ),
    Case(
        "action without data",
        [*GYM, "serial count", "parallel count"],
        step_with(action=lambda a: a.to("meta")),
        InputError,
        r"'action' is on the meta device.*Build it on the CPU",
    ),
    Case(
        "no action",
        [kind for kind in KINDS if "panel" not in kind],
        lambda env, td: env.step(td.exclude("action")),
        MissingKeyError,
        r"no 'action'.*env.rand_action\(td\)",
    ),
    Case(
        "no part of an action",
        PANELS,
        lambda env, td: env.step(td.exclude("gear")),
        MissingKeyError,
        r"no 'gear'.*env.rand_action\(td\)",
    ),
    # what an action says
    Case(
        "two choices at once",
        [*POLES, "choice"],
        step_with(action=last_row(lambda row: [1, 1])),
        (InputError, WorkerError),
        r"'action'.* is \[1, 1\], but must be one-hot.*Bring it there",
        InputError,
    ),
    Case(
        "no choice",
        [*POLES, "choice"],
        step_with(action=last_row(lambda row: [0, 0])),
        (InputError, WorkerError),
        r"'action'.* is \[0, 0\], but must be one-hot.*Bring it there",
        InputError,
    ),
    Case(
        "a choice that counts double",
        [*POLES, "choice"],
        step_with(action=last_row(lambda row: [2, 0])),
        (InputError, WorkerError),
        r"'action'.* is \[2, 0\], but must be one-hot.*Bring it there",
        InputError,
    ),
    Case(
        "floats that choose nothing",
        [*POLES, "choice"],
        step_with(action=last_row_as_float(lambda row: [0.5, 0.5])),
        (InputError, WorkerError),
        r"'action'.* is \[0\.5, 0\.5\], but must be one-hot.*OneHotCategorical",
        InputError,
    ),
    Case(
        "index too large",
        [*INDICES, "index"],
        step_with(action=lambda a: torch.full_like(a, 2)),
        InputError,
        r"'action'.* is 2, but must be an integer from 0 to 1\. .*project",
    ),
    Case(
        "negative index",
        [*INDICES, "index"],
        step_with(action=lambda a: torch.full_like(a, -1)),
        InputError,
        r"'action'.* is -1, but must be an integer from 0 to 1",
    ),
    Case(
        "an infinite force",
        [*PENDULUMS, "brax"],
        step_with(action=last_row(lambda row: [-np.inf])),
        InputError,
        r"'action'.* is \[-inf\], but must hold finite numbers.*NaN and infinity come from the policy",
    ),
    Case(
        "a force that is no number",
        [*PENDULUMS, "brax"],
        step_with(action=last_row(lambda row: [np.nan])),
        InputError,
        r"'action'.* is \[nan\], but must hold finite numbers.*NaN and infinity come from the policy",
    ),
    Case(
        "a force too large for its dtype",
        [*PENDULUMS, "brax"],
        step_with(action=lambda a: a.double() * 0 + 1e300),
        InputError,
        r"'action'.* is \[1\.e\+300\], but must hold finite numbers of torch.float32",
    ),
    Case(
        "one of several forces",
        PANELS,
        step_with(force=last_row(lambda row: [0.0, np.nan])),
        InputError,
        r"'force'.* is \[ *0., *nan\], but must hold finite numbers.*NaN and infinity come from",
    ),
    Case(
        "one of several one-hot choices",
        ["panel", "serial panel"],
        step_with(dials=last_row(lambda row: [1, 0, 1, 1, 0])),
        InputError,
        r"'dials'.*must be one-hot in each of its parts, of \[2, 3\] entries",
    ),
    Case(
        "one of several indices",
        ["panel index", "parallel panel"],
        step_with(dials=last_row(lambda row: [1, 3])),
        InputError,
        r"'dials'.* is \[1, 3\], but must be integers below \[2, 3\]",
    ),
    Case(
        "flag that is no bit",
        PANELS,
        step_with(flags=last_row(lambda row: [0, 1, -1])),
        InputError,
        r"'flags'.* is \[ *0, *1, -1\], but must hold 0 and 1 only",
    ),
    Case(
        "index too large for a torch env",
        COUNTS,
        step_with(action=last_row(lambda row: [77])),
        InputError,
        r"'action' of row 1 is \[77\], but must be an integer from 0 to 1\. .*project",
    ),
    Case(
        "negative index for a torch env",
        COUNTS,
        step_with(action=last_row(lambda row: [-1])),
        InputError,
        r"'action' of row 1 is \[-1\], but must be an integer from 0 to 1",
    ),
    Case(
        "NaN for a torch env",
        ["serial bounds", "serial bounds, rows"],
        step_with(action=last_row(lambda row: [np.nan])),
        InputError,
        r"'action' of row 1 is \[nan\], but must hold finite numbers.*NaN and infinity come from",
    ),
    Case(
        "NaN for one of unlike rows",
        ["serial unlike"],
        lambda env, td: (td[1].set("action", torch.tensor([0.5, np.nan])), env.step(td)),
        InputError,
        r"'action' of row 1 is \[0\.5, +nan\], but must hold finite numbers",
    ),
    Case(
        "bad action of a row that is stepped, beside one that is not",
        ["serial pole", "serial pole, tds", "parallel pole", "parallel pole, tds", *COUNTS],
        lambda env, td: env.step(
            td.set("action", td["action"] * 0 - 1).set("_step", torch.tensor([F, T]))
        ),
        InputError,
        r"'action' of row 1 is \[-1.*, but must be",
    ),
    Case(
        "no action for the rows that are stepped",
        [kind for kind in KINDS if kind.startswith(("serial", "parallel")) and "panel" not in kind],
        lambda env, td: env.step(td.exclude("action").set("_step", torch.tensor([F, T]))),
        MissingKeyError,
        r"no 'action'.*env.rand_action\(td\)",
    ),
    # which rows
    Case(
        "another batch size",
        LOCKED,
        lambda env, td: env.step(torch.stack([td] * 3)),
        BatchSizeError,
        r"batch size \(3.*batch size",
    ),
    Case(
        "another batch size for a reset",
        LOCKED,
        lambda env, td: env.reset(torch.stack([td] * 3)),
        BatchSizeError,
        r"batch size \(3.*batch size",
    ),
    Case(
        "another batch size for random actions",
        LOCKED,
        lambda env, td: env.rand_action(torch.stack([td] * 3)),
        BatchSizeError,
        r"batch size \(3.*batch size",
    ),
    Case(
        "shape of a step mask",
        list(KINDS),
        masked("step", "_step", lambda batch: torch.ones((*batch, 3), dtype=torch.bool)),
        StepMaskError,
        r"'_step' mask has shape .*Pass a boolean mask of shape",
    ),
    Case(
        "dtype of a step mask",
        BATCHED,
        masked("step", "_step", lambda batch: torch.ones(batch)),
        StepMaskError,
        r"'_step' mask has dtype torch.float32.*mask.bool\(\)",
    ),
    Case(
        "shape of a reset mask",
        list(KINDS),
        masked("reset", "_reset", lambda batch: torch.ones((*batch, 3), dtype=torch.bool)),
        ResetMaskError,
        r"'_reset' mask has shape .*Pass a boolean mask of shape",
    ),
    Case(
        "dtype of a reset mask",
        BATCHED,
        masked("reset", "_reset", lambda batch: torch.ones((*batch, 1), dtype=torch.int64)),
        ResetMaskError,
        r"'_reset' mask has dtype torch.int64.*mask.bool\(\)",
    ),
    # arguments of calls
    Case(
        "keywords for another number of envs",
        POOLS,
        lambda env, td: env.reset(list_of_kwargs=[{}] * 3),
        ArgumentCountError,
        r"list_of_kwargs has 3 entries for 2.*one dict for each",
    ),
    Case(
        "keywords that are numbers",
        PLAIN,
        lambda env, td: env.reset(list_of_kwargs=[1, 2]),
        ArgumentTypeError,
        r"list_of_kwargs holds 1, of type int.*Pass a list of one dict for each",
    ),
    Case(
        "keywords that are no list",
        PLAIN,
        lambda env, td: env.reset(list_of_kwargs={"x": 1}),
        ArgumentTypeError,
        r"list_of_kwargs is \{'x': 1\}, of type dict.*Pass a list of one dict for each",
    ),
    Case(
        "new keywords for the sub-envs that are a number",
        PLAIN,
        lambda env, td: env.update_kwargs(3),
        ArgumentTypeError,
        r"kwargs is 3, of type int.*one dict for all of them, or a list",
    ),
    Case(
        "a state that is None",
        PLAIN,
        lambda env, td: env.load_state_dict(None),
        TypeError,
        r"state dict is of type NoneType, but must be a dict. Pass what state_dict\(\) gave",
    ),
    Case(
        "a limit of time that is a text",
        PLAIN,
        lambda env, td: setattr(env, "timeout", "x"),
        TypeError,
        r"timeout is 'x'.*positive number of seconds, or None",
    ),
    # data that is none
    *(
        Case(
            f"{call} of a {type(data).__name__}",
            [*SOME, "serial unlike", "vector pole"],
            lambda env, td, call=call, data=data: getattr(env, call)(data),
            DataTypeError,
            rf"{call}\(\) was given is of type {type(data).__name__}, but must be a TensorDict.*reset\(\)",
        )
        for call, data in [
            ("step", {"action": 1}),
            ("step", None),
            ("step", torch.zeros(2)),
            ("step_and_maybe_reset", {"action": 1}),
            ("rand_action", {"action": 1}),
            ("reset", {"action": 1}),
            ("reset", 3),
        ]
    ),
    Case(
        "keywords that the simulator does not know",
        [*POLES, "serial pendulum", "parallel pendulum"],
        lambda env, td: env.reset(colour="red"),
        (TypeError, WorkerError),
        r"unexpected keyword argument 'colour'",
        TypeError,
    ),
    Case(
        "negative seed",
        ["serial pole", "parallel pole", "parallel count", "brax", "vector pole"],
        lambda env, td: env.set_seed(-1),
        ArgumentError,
        r"seed is -1, but must be an integer of 0 or more",
    ),
    Case(
        "seed that is no number",
        ["serial pole", "parallel pole", "parallel count", "brax", "vector pole"],
        lambda env, td: env.set_seed("seven"),
        ArgumentError,
        r"seed is 'seven', but must be an integer",
    ),
    Case(
        "rollout of no steps",
        SOME,
        lambda env, td: env.rollout(0),
        ValueError,
        r"max_steps is 0, but must be an int of at least 1",
    ),
    Case(
        "rollout of a text",
        SOME,
        lambda env, td: env.rollout("3"),
        TypeError,
        r"max_steps is '3', but must be an int.*Pass the most steps",
    ),
    Case(
        "rollout from nothing",
        SOME,
        lambda env, td: env.rollout(2, auto_reset=False),
        RuntimeError,
        r"auto_reset=False.*Pass tensordict=",
    ),
    Case(
        "rollout that stops in two ways",
        SOME,
        lambda env, td: env.rollout(2, break_when_any_done=True, break_when_all_done=True),
        TypeError,
        r"break_when_any_done and break_when_all_done are both True",
    ),
    Case(
        "policy that writes a bad action in the middle of a rollout",
        ["pendulum", "serial pendulum", "parallel pendulum"],
        lambda env, td: env.rollout(9, _BadAtFive(), break_when_any_done=False),
        InputError,
        r"'action'.* is \[nan\]",
        steps=True,
    ),
    Case(
        "method that the sub-envs do not have",
        POOLS,
        lambda env, td: env.fly(),
        AttributeError,
        r"'fly'",
    ),
    Case(
        "start of what runs",
        POOLS,
        lambda env, td: (env.close(), env.start(), env.start()),
        RuntimeError,
        r"started already. Call close\(\) first",
        steps=True,
    ),
]


class _BadAtFive:
    def __init__(self):
        self.calls = 0

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        force = torch.nan if self.calls == 5 else 1.0
        return tensordict.set("action", torch.full((*tensordict.batch_size, 1), force))


@pytest.fixture(scope="module")
def envs():
    """Open each kind once; with it goes what it gives without a mistake."""
    opened_envs: dict[str, Opened] = {}

    def env_of(kind: str) -> Opened:
        if kind not in opened_envs:
            opened_envs[kind] = opened(KINDS[kind]())
        return opened_envs[kind]

    yield env_of
    for one in opened_envs.values():
        one.env.close(raise_if_closed=False)


@dataclass
class Opened:
    """An env, and what it gives when it is seeded with 0: at once, and after one reset more."""

    env: EnvBase
    seeded: TensorDictBase
    resumed: TensorDictBase


def opened(env: EnvBase) -> Opened:
    env.set_seed(0)
    env.rand_action(env.reset())
    resumed = run(env)
    return Opened(env, played(env), resumed)


def run(env: EnvBase) -> TensorDictBase:
    return env.rollout(3, break_when_any_done=False)


def played(env: EnvBase) -> TensorDictBase:
    env.set_seed(0)
    return run(env)


def assert_equal(left: TensorDictBase, right: TensorDictBase) -> None:
    if isinstance(left, LazyStackedTensorDict):
        for one, other in zip(left.unbind(0), right.unbind(0), strict=True):
            assert_equal(one, other)
        return
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    assert all(torch.equal(left[key], right[key]) for key in left.keys(True, True))


def ends_marked(kinds: list[str]) -> list[tuple[str, bool]]:
    """Tell of each kind whether it is the first or the last one: these run by default."""
    return [(kind, place in (0, len(kinds) - 1)) for place, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(case, kind, id=f"{case.name}-{kind}", marks=() if is_end else pytest.mark.slow)
        for case in CASES
        for kind, is_end in ends_marked(list(dict.fromkeys(case.kinds)))
    ],
)
def test_a_mistake_is_told_with_its_cure_and_spoils_nothing(envs, case, kind):
    right = envs(kind)
    env = right.env
    env.set_seed(0)
    td = env.rand_action(env.reset())

    with pytest.raises(case.error, match=f"(?s){case.message}") as caught:
        case.call(env, td.clone())

    if isinstance(caught.value, WorkerError):
        assert isinstance(caught.value.__cause__, case.cause)
    if not case.steps:
        assert_equal(run(env), right.resumed)
    assert_equal(played(env), right.seeded)


# ------------------------------------------------------------------------- what needs another setting


@pytest.mark.parametrize(
    "kind",
    ["serial pendulum", "parallel pendulum", "parallel pole", "parallel pole, tds", "serial count"],
)
def test_a_refused_action_has_stepped_nobody(envs, kind):
    env = envs(kind).env
    env.set_seed(0)
    good = env.rand_action(env.reset())
    env.set_seed(0)
    root = env.reset()

    with pytest.raises((InputError, MissingKeyError)):
        env.step(root.clone())
    stepped = env.step(root.update(good.select("action")))

    env.set_seed(0)
    env.reset()
    assert (env.step(good)["next"] == stepped["next"]).all()


@pytest.mark.parametrize("kind", ["serial pendulum", "parallel pendulum"])
def test_actions_of_rows_that_are_not_stepped_are_not_looked_at(envs, kind):
    env = envs(kind).env
    td = env.reset().set("action", torch.tensor([[torch.nan], [0.5]]))

    out = env.step(td.set("_step", torch.tensor([F, T])))

    assert torch.equal(out["next", "observation"][0], out["observation"][0])
    with pytest.raises(InputError, match="of row 0"):
        env.step(td.set("_step", torch.tensor([T, F])))


@pytest.mark.parametrize("kind", [*INDICES, "index", *COUNTS, *PENDULUMS, "brax", "serial bounds"])
def test_whole_numbers_mean_the_same_as_integers_and_as_floats(envs, kind):
    env = envs(kind).env
    outcomes = []

    for dtype in (torch.int64, torch.float64):
        env.set_seed(0)
        root = env.reset()
        ones = torch.ones_like(env.rand_action(root.clone())["action"], dtype=dtype)
        root = TensorDict(dict(root.items()), root.batch_size)  # without a device, which would cast
        outcomes.append(env.step(root.set("action", ones))["next"])

    assert_equal(*outcomes)


@pytest.mark.parametrize("kind", BATCHED)
def test_a_mask_of_all_false_steps_and_resets_nothing(envs, kind):
    env = envs(kind).env
    td = env.step_mdp(env.step(env.rand_action(env.reset())))
    before = td.clone()

    reset = env.reset(td.clone().set("_reset", torch.zeros(2, 1, dtype=torch.bool)))
    td = env.step(env.rand_action(td).set("_step", torch.zeros(2, dtype=torch.bool)))

    stepped = td["next"].exclude("reward")
    assert (stepped == before.select(*stepped.keys(True, True))).all()
    assert not td["next", "reward"].any()
    assert (reset.select(*before.keys(True, True)) == before).all()


def test_one_gymnasium_env_needs_a_reset_before_its_first_step():
    env = pole()

    with pytest.raises(gymnasium.error.ResetNeeded, match=r"before calling env.reset"):
        env.step(TensorDict({"action": torch.tensor([0, 1])}))

    assert env.rollout(2).shape == (2,)


@pytest.mark.parametrize(
    ("batched", "make", "action"),
    [
        (serial, pole, [[0, 1], [1, 0]]),
        (parallel, pole, [[0, 1], [1, 0]]),
        (serial, Count, [[0], [1]]),
        (partial(serial, use_buffers=True), Count, [[0], [1]]),
    ],
)
def test_sub_envs_need_a_reset_before_their_first_step(batched, make, action):
    env = batched(make)
    td = TensorDict({"action": torch.tensor(action)}, [2])

    with pytest.raises(NotResetError, match=r"before its first reset.*Call reset\(\) first"):
        env.step(td)
    assert not env.is_closed
    env.set_seed(0)
    with pytest.raises(NotResetError, match=r"before its first reset.*Call reset\(\) first"):
        env.step(td)
    with pytest.raises(NotResetError, match=r"before its first reset"):
        env.rollout(
            2, auto_reset=False, break_when_any_done=False, tensordict=env.fake_tensordict()
        )

    assert env.rollout(2).shape == (2, 2)
    assert env.step(td)["next"].shape == (2,)
    env.close()


def test_an_env_whose_workers_run_is_neither_copied_nor_pickled(envs):
    right = envs("parallel count")

    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CopyError, match=r"while its workers run.*or build another one\.$"):
            copied(right.env)

    assert_equal(played(right.env), right.seeded)


@pytest.mark.parametrize("was_used", [False, True])
def test_an_env_without_workers_is_copied(was_used):
    env = parallel(Count)
    if was_used:
        env.reset()
        env.close()

    twin = pickle.loads(pickle.dumps(copy.deepcopy(env)))

    assert twin.rollout(2).shape == (2, 2)
    twin.close()


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("batched", [SerialEnv, ParallelEnv])
def test_a_partial_reset_needs_a_full_one_before_it(batched, use_buffers):
    env = batched(2, Count, use_buffers=use_buffers)
    mask = TensorDict({"_reset": torch.tensor([[T], [F]])}, [2])

    with pytest.raises(ResetMaskError, match=r"before the first full one.*Call reset\(\) once"):
        env.reset(mask)

    assert env.reset()["count"].flatten().tolist() == [0, 0]
    assert env.reset(mask)["count"].flatten().tolist() == [0, 0]
    env.close()


@pytest.mark.parametrize("kind", ["pole", "pendulum", "serial pole", "parallel pole", "brax"])
def test_a_step_after_close_says_what_to_do(kind):
    env = KINDS[kind]()
    td = env.rand_action(env.reset())
    env.close()

    with pytest.raises(ClosedEnvError, match=r"Build a new one|Call reset\(\) first"):
        env.step(td)

    env.close(raise_if_closed=False)


@pytest.mark.parametrize("kind", ["serial pendulum", "parallel pendulum", "pendulum"])
def test_data_of_another_env_is_refused(envs, kind):
    right, other = envs(kind), envs("pole" if kind == "pendulum" else "serial pole").env
    env = right.env
    td = other.rand_action(other.reset())

    with pytest.raises(InputError, match=r"'action' has shape .*2,?\), but the env takes .*1,?\)"):
        env.step(td)

    assert_equal(played(env), right.seeded)


class Turning(Count):
    """Allows one option at a time, and says in its spec which."""

    def __init__(self):
        super().__init__(9)
        self.action_spec = Categorical(2, shape=())
        self._allow()

    def _allow(self):
        self.action_spec.update_mask(torch.arange(2) == self.c % 2)

    def _step(self, td):
        out = super()._step(td)
        self._allow()
        return out


@pytest.mark.parametrize("use_buffers", [True, False])
def test_options_that_change_are_left_to_the_sub_envs(use_buffers):
    env = SerialEnv(2, Turning, use_buffers=use_buffers)
    td = env.reset()

    for option in (0, 1, 0):
        td = env.step_mdp(env.step(td.set("action", torch.full((2,), option))))

    assert td["count"].tolist() == [[3], [3]]
    with pytest.raises(InputError, match="of row 0 is 2"):
        env.step(td.set("action", torch.full((2,), 2)))
