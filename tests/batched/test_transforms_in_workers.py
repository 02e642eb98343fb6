"""Transforms around the sub-envs of a pool: shown to stacked rows, with the data of each env by itself.

What is compared with is a `SerialEnv` of the same envs behind a transform more, which does nothing and
cannot be stacked: its sub-envs step one by one, with a TensorDict each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

import envkit
from envkit import (
    ClipTransform,
    Compose,
    GymWrapper,
    ObservationNorm,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    Unbounded,
    VecNorm,
    gSDENoise,
)
from envkit.batched.host_rows import row_core
from envkit.errors import WorkerError
from envkit.transforms.core.fusable import FusableTransform
from tests.bridges.compare import assert_same
from tests.transforms.chains import Opaque, episodes, frames, names, values

ROWS = 4
CHAINS = {
    "episodes": episodes,
    "values": partial(values, torch.float16),
    "entries": lambda: [*episodes(), *frames(), *names()],
    "primed": lambda: [
        TensorDictPrimer(memory=Unbounded((2,)), default_value=1.5),
        gSDENoise(),
        StepCounter(3),
    ],
    "none": list,
}
RARER = ("episodes", "values", "none")
WAYS = [SerialEnv, partial(ParallelEnv, num_processes=2)]
both = pytest.mark.parametrize("batched", WAYS, ids=["serial", "parallel"])


class Walk(gymnasium.Env):
    """Walk from a random place; ends by itself, or is cut, at times that the seed decides.

    ``fails_at``: the call, counted from 0 over steps and resets, that raises.
    """

    observation_space = spaces.Dict(
        place=spaces.Box(-9.0, 9.0, (2,)),
        sight=spaces.Dict(lamps=spaces.MultiBinary(3), level=spaces.Box(0, 255, (1,), np.uint8)),
    )
    action_space = spaces.Discrete(2)

    def __init__(self, fails_at: int | None = None):
        self.fails_at, self.calls = fails_at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count()
        self.place = self.np_random.normal(size=2)
        self.level = int(self.np_random.integers(256))
        return self._observe(), {}

    def step(self, action):
        self._count()
        self.place = self.place + (action - 0.5) * self.np_random.random(2)
        observation = self._observe()
        ends, cut = self.np_random.random(2) < (0.1, 0.15)
        return observation, float(self.place.sum()), bool(ends), bool(cut), {}

    def _count(self):
        self.calls += 1
        if self.calls - 1 == self.fails_at:
            raise RuntimeError(f"call {self.fails_at}")

    def _observe(self):
        lamps = (np.arange(3) < self.level % 4).astype(np.int8)
        sight = {"lamps": lamps, "level": np.array([self.level], np.uint8)}
        return {"place": self.place.astype(np.float32), "sight": sight}


def walk(chain: Callable[[], list], fails_at: int | None = None) -> TransformedEnv:
    return TransformedEnv(GymWrapper(Walk(fails_at)), Compose(*chain()))


def one_by_one(chain: Callable[[], list], fails_at: int | None = None) -> TransformedEnv:
    """The same env, which is not stepped on rows."""
    return walk(lambda: [*chain(), Opaque()], fails_at)


@pytest.fixture
def opened():
    """Hand out batched envs that are closed after the test."""
    with ExitStack() as stack:

        def keep(env):
            stack.callback(env.close, raise_if_closed=False)
            return env

        yield keep


def play(env, steps: int = 20) -> list[TensorDictBase]:
    """Run, step with and without masks, reset in part; gives all that was shown."""
    env.set_seed(3)
    choices = torch.rand(2 * steps, ROWS, generator=torch.Generator().manual_seed(1)) < 0.5
    turns = iter(torch.nn.functional.one_hot(choices.long(), 2))

    def act(td):
        return td.set("action", next(turns).clone())

    told = [env.rollout(steps, act, break_when_any_done=False), env.reset()]
    root = told[-1].clone()
    for turn in range(steps):
        if turn % 3 == 1:
            root["_step"] = torch.arange(ROWS) != turn % ROWS
        data, root = env.step_and_maybe_reset(act(root))
        told += [data.clone(), root.clone()]
        if turn % 5 == 4:
            root["_reset"] = torch.tensor([[False], [True], [False], [True]])
            root = env.reset(root)
            told.append(root.clone())
    return told


def assert_told_the_same(left: list[TensorDictBase], right: list[TensorDictBase]) -> None:
    for one, other in zip(left, right, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    ("batched", "chain"),
    [
        pytest.param(
            way, chain, marks=pytest.mark.slow if way is not SerialEnv and name in RARER else ()
        )
        for way in WAYS
        for name, chain in CHAINS.items()
    ],
)
def test_stacked_rows_show_what_each_env_shows_by_itself(opened, batched, chain):
    stacked = opened(batched(ROWS, partial(walk, chain)))
    apart = opened(SerialEnv(ROWS, partial(one_by_one, chain), use_buffers=False))
    assert row_core(walk(chain)) is not None
    assert row_core(one_by_one(chain)) is None

    told, expected = play(stacked), play(apart)

    assert_told_the_same(told, expected)


def test_every_transform_that_stacks_is_compared():
    compared = {type(leaf) for chain in CHAINS.values() for leaf in chain()}
    public = {vars(envkit).get(name, getattr(envkit, name)) for name in envkit.__all__}
    on_leaves = {
        one for one in public if isinstance(one, type) and issubclass(one, FusableTransform)
    }

    assert {one.__name__ for one in on_leaves - compared} <= {
        *("FusableTransform", "MomentTransform", "ArrayTransform"),  # bases
        *("VecNorm", "NormalizeReward"),  # have state
    }


def test_transforms_of_an_env_inside_another_stack(opened):
    def nested(*more):
        inner = TransformedEnv(
            GymWrapper(Walk()), Compose(StepCounter(4), ClipTransform(["place"], low=0.0))
        )
        return TransformedEnv(inner, Compose(RewardSum(), *more))

    stacked = opened(SerialEnv(ROWS, nested))
    apart = opened(SerialEnv(ROWS, lambda: nested(Opaque()), use_buffers=False))

    assert row_core(nested()) is not None
    assert_told_the_same(play(stacked), play(apart))


@pytest.mark.parametrize(
    "env",
    [
        lambda: walk(lambda: [VecNorm(["place"])]),
        lambda: walk(lambda: [StepCounter(), Opaque()]),
        lambda: walk(lambda: [learned()]),
        lambda: TransformedEnv(GymWrapper(Walk(), run_type_checks=True), StepCounter()),
        lambda: Overriding(GymWrapper(Walk()), StepCounter()),
    ],
    ids=["with state", "opaque", "learned", "checked", "overriding"],
)
def test_what_needs_each_env_by_itself_is_not_stacked(env):
    assert row_core(env()) is None


def learned() -> ObservationNorm:
    norm = ObservationNorm(torch.zeros(2), torch.ones(2), ["place"])
    norm.scale.requires_grad_()
    return norm


class Overriding(TransformedEnv):
    """Steps in a way of its own."""

    def step(self, tensordict):
        return super().step(tensordict)


@both
def test_rows_whose_transforms_are_set_differently_keep_their_own(opened, batched):
    limits = (2, 3, 4, 5)
    makers = [partial(walk, partial(limited, limit)) for limit in limits]
    references = [partial(one_by_one, partial(limited, limit)) for limit in limits]

    told, expected = play(opened(batched(ROWS, makers))), play(opened(SerialEnv(ROWS, references)))

    assert_told_the_same(told, expected)
    assert (told[0]["next", "step_count"].amax((1, 2)) <= torch.tensor(limits)).all()


def limited(limit: int) -> list:
    return [StepCounter(limit), RewardSum()]


def test_a_number_that_is_set_while_rows_run_counts_from_the_next_step(opened):
    envs: list[TransformedEnv] = []

    def make():
        envs.append(walk(lambda: [StepCounter(), ObservationNorm(0.0, torch.ones(2), ["place"])]))
        return envs[-1]

    env = opened(SerialEnv(ROWS, make))
    before = env.rollout(3, break_when_any_done=False)
    counter, norm = envs[1].transform
    counter.max_steps = 1
    norm.scale.mul_(0)
    after = env.rollout(3, break_when_any_done=False)

    assert before["place"].any(-1).all()
    assert after["next", "truncated"][1].all()
    assert after["place"].any(-1).all(-1).tolist() == [True, False, True, True]


WRITES = {
    "in place": lambda scale: scale.mul_(0),
    "by data": lambda scale: scale.data.fill_(0),
    "by NumPy": lambda scale: np.multiply(scale.numpy(), 0, out=scale.numpy()),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("row", [0, 2])
def test_however_the_numbers_of_a_row_are_written_the_next_step_uses_them(opened, way, row):
    norms = [ObservationNorm(0.0, torch.ones(2), ["place"]) for _ in range(ROWS)]
    env = opened(SerialEnv(ROWS, [partial(walk, lambda n=n: [n]) for n in norms]))
    env.rollout(2)  # numbers are equal, and found to be

    WRITES[way](norms[row].scale)

    seen = env.rollout(3, break_when_any_done=False)["place"].any(-1).any(-1)
    assert seen.tolist() == [index != row for index in range(ROWS)]


# -------------------------------------------------------------------------------------------- errors


@both
@pytest.mark.parametrize(
    "fails_at", [*(pytest.param(at, marks=pytest.mark.slow) for at in (2, 3, 4)), 7]
)
def test_rows_that_fail_are_told_and_the_others_go_on(opened, batched, fails_at):
    """Fails in a step or in the reset after it, of one row or of two."""
    ways = [None, fails_at, None, fails_at + 1]
    options = {"on_worker_failure": "restart", "max_restarts": 999}
    makers = [partial(walk, partial(limited, 2), way) for way in ways]
    references = [partial(one_by_one, partial(limited, 2), way) for way in ways]

    told = play(opened(batched(ROWS, makers, **options)))
    expected = play(opened(SerialEnv(ROWS, references, **options)))

    assert_told_the_same(told, expected)


class Refusing(FusableTransform):
    """Looks at values: refuses rows whose reward is above 1."""

    def step_leaves(self, root, following, constants):
        if bool((following[("reward",)] > 1.0).any()):
            raise ValueError(f"paid {following[('reward',)].max():.3f}")
        return {}

    def reset_leaves(self, fresh, constants):
        return {}


def refusing() -> list:
    return [Refusing()]


@both
def test_a_transform_that_raises_is_told_of_the_rows_it_raised_for(opened, batched):
    def failures(env) -> list[tuple[tuple[int, ...], str]]:
        env.set_seed(3)
        found = []
        for _ in range(6):
            try:
                env.step(env.rand_action(env.reset()))
            except WorkerError as error:
                found += [(one.rows, str(one.exception)) for one in error.failures]
        return found

    stacked = failures(opened(batched(ROWS, partial(walk, refusing))))
    apart = failures(opened(SerialEnv(ROWS, partial(one_by_one, refusing))))

    assert stacked == apart != []
