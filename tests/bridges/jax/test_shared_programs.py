"""Envs that are equal run the same compiled programs, others never do."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envkit import StepCounter, TransformedEnv
from envkit.functional import Box, Timestep
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.simulator import SimulatorCore
from envkit_bridges.worlds.brax import BraxEnv
from tests.bridges.compare import assert_same

UNLIKE = iter(range(10**6))  # marks that no two tests share


class Changing:
    """Falls faster and faster. A plain object: equal to itself alone, and free to change."""

    action_space = Box(-1.0, 1.0, (1,))
    gravity: Any = 1.0

    def reset(self, key):
        return jnp.zeros(()), Timestep(jnp.zeros(1))

    def step(self, state, action):
        held = self.gravity["pull"] if isinstance(self.gravity, dict) else self.gravity
        pull = held() if callable(held) else jnp.sum(jnp.asarray(held))
        return state + pull, Timestep((state + pull)[None])


@dataclass(frozen=True)
class Fall(Changing):
    """Declares which others it equals."""

    gravity: Any = 1.0
    mark: int = 0


@pytest.fixture
def mark():
    return next(UNLIKE)


def falling(gravity, mark, rows=2, **options):
    return env_of(Fall(gravity, mark), rows, **options)


def env_of(core, rows=2, **options):
    env = JaxEnv(core, batch_size=[rows], device="cpu", **options)
    env.set_seed(0)
    return env


def fallen(env):
    """Give the speed after one step."""
    return float(env.rand_step(env.reset())["next", "observation"].flatten()[0])


TRACED = {"restart": 1, "step": 1}


def test_an_env_that_equals_another_traces_nothing(mark):
    first, second = (falling((1.0, 2.0), mark, episode_length=5) for _ in range(2))

    data = first.rollout(3, break_when_any_done=True, policy=lambda seen: seen)

    assert first.traces == TRACED
    assert_same(second.rollout(3, break_when_any_done=True, policy=lambda seen: seen), data)
    assert second.traces == {}


@pytest.mark.parametrize(
    ("gravity", "options"),
    [
        (1.0, {"episode_length": 6}),
        (1.0, {"reset_mode": "cached"}),
        (1.0, {"reset_mode": "pool", "pool_size": 3}),
        (1.0, {"state_layout": "nested"}),
        (2, {}),
        pytest.param(np.array([2.0]), {}, marks=pytest.mark.slow),
        pytest.param(jnp.array([2.0, 3.0]), {}, marks=pytest.mark.slow),
        (lambda: 4.0, {}),
    ],
)
def test_an_env_that_differs_is_traced_for_itself(mark, gravity, options):
    first = falling(1.0, mark)
    fallen(first)
    second = falling(gravity, mark, **options)

    assert fallen(second) == float(np.sum(gravity() if callable(gravity) else gravity))
    assert second.traces == TRACED


def test_closures_over_unlike_values_are_not_shared(mark):
    first, second = (falling(lambda pull=pull: pull, mark) for pull in (1.0, 2.0))

    assert [fallen(first), fallen(second)] == [1.0, 2.0]


def test_an_env_that_declares_no_equality_is_compiled_for_itself(mark):
    for core, like in ((Changing(), Changing()), (made_of_array(mark), made_of_array(mark))):
        first, second = env_of(core), env_of(like)

        assert fallen(first) == fallen(second)
        assert second.traces == TRACED


def made_of_array(mark):
    return Fall(np.array([1.0, 2.0]), mark)


def test_an_attribute_that_is_changed_counts_at_once_and_for_this_env_alone():
    core = Changing()
    first, copied = env_of(core), copy.deepcopy(env_of(core))
    before = fallen(first), fallen(copied)

    core.gravity = 3.0
    second = env_of(core)

    assert before == (1.0, 1.0)
    assert (fallen(first), fallen(second), fallen(copied)) == (3.0, 3.0, 1.0)


def test_what_is_changed_before_its_first_use_counts():
    core = Changing()
    env = env_of(core)
    core.step = lambda state, action: (state, Timestep(state[None] + 7))

    assert fallen(env) == 7.0


@dataclass(frozen=True)
class Simulated(SimulatorCore):
    """An env object of a library that falls."""

    action_space: ClassVar = Changing.action_space

    def reset(self, key):
        return self.env.reset(key)

    def step(self, state, action):
        return self.env.step(state, action)


def test_env_objects_are_equal_where_they_are_made_alike_until_one_is_changed():
    class Gravity(Changing):
        def __init__(self, gravity=1.0):
            self.gravity = gravity

    makers = (partial(Gravity), partial(Gravity), partial(Gravity, gravity=2.0))
    envs = [env_of(Simulated(make(), make)) for make in makers]
    before = [fallen(env) for env in envs]
    traced = [env.traces for env in envs]

    simulator_of(envs[1]).gravity = 3.0

    assert (before, traced) == ([1.0, 1.0, 2.0], [TRACED, {}, TRACED])
    assert [fallen(env) for env in envs] == [1.0, 3.0, 2.0]
    assert envs[0].traces == TRACED


def simulator_of(env):
    core = env._engine.programs.env.env
    while not isinstance(core, Simulated):
        core = core.env
    return core.env


def test_what_an_env_computes_once_itself_is_no_change():
    class Computing(Changing):
        @cached_property
        def name(self):
            return "late"

    core = Computing()
    env = env_of(core)
    fallen(env)

    assert core.name == "late"
    fallen(env)
    assert env.traces == TRACED


@pytest.mark.parametrize("core", [Fall(1.0, next(UNLIKE)), Changing()], ids=["equal", "plain"])
def test_copies_share_what_is_compiled(core):
    env = env_of(core)
    pickled = pickle.loads(pickle.dumps(env))
    fallen(env)

    for copied in (copy.deepcopy(env), pickled):
        assert fallen(copied) == 1.0
        assert copied.traces == {}


def test_programs_go_with_the_last_env_that_uses_them(mark):
    first, second = falling(1.0, mark), falling(1.0, mark)
    assert fallen(first) == fallen(second)
    programs = weakref.ref(first._engine.programs.shared)
    assert programs() is second._engine.programs.shared

    del first
    gc.collect()
    assert programs() is not None
    del second
    gc.collect()

    assert programs() is None


def test_envs_that_programs_see_through_unlike_transforms_share_none(mark):
    first, second = (TransformedEnv(falling(1.0, mark), StepCounter()) for _ in range(2))

    assert fallen(first) == fallen(second) == 1.0
    assert second.traces == TRACED
    assert second.base_env.traces == {}


def test_devices_and_backends_tell_envs_apart(mark):
    def key(backend="spring", **options):
        env = BraxEnv("inverted_pendulum", backend=backend, device="cpu", **options)
        return env._engine.programs.key()

    assert key() == key()
    assert key() != key("positional")
    spread = JaxEnv(Fall(), batch_size=[2], devices=jax.devices()[:1])
    assert spread._engine.programs.key() != falling(1.0, 0)._engine.programs.key()


@dataclass
class Caching(Changing):
    """Keeps something at each trace."""

    shapes: list = field(default_factory=list)

    def step(self, state, action):
        self.shapes.append(action.shape)
        self.newest = action.shape
        return super().step(state, action)


def test_what_a_trace_itself_changes_makes_no_program_anew():
    env = env_of(Caching())
    root = env.reset()
    env.unroll(root, 3)
    env.unroll(root, 4)
    traced = dict(env.traces)

    env.unroll(root, 3)

    assert traced["unroll"] == 2
    assert env.traces == traced


def test_of_runs_of_many_lengths_the_programs_that_were_used_last_are_kept(mark, monkeypatch):
    monkeypatch.setenv("ENVKIT_KEPT_RUNS", "2")
    env = JaxEnv(Fall(1.0, mark), batch_size=[2], device="cpu")
    root, traced = env.reset(), []

    for steps in (3, 4, 3, 5, 3, 4):
        data, _ = env.unroll(root, steps)
        assert data.shape == (2, steps)
        traced.append(env.traces["unroll"])

    assert traced == [1, 2, 2, 3, 3, 4]
    assert len(env._engine.programs.shared._runs) == 2


class Pull:
    """A plain object inside of an env: callable, and free to change."""

    def __init__(self, strength):
        self.strength = strength

    def __call__(self):
        return jnp.float32(self.strength)


@dataclass(unsafe_hash=True)
class Loose(Changing):
    """Declares its equality, and may be changed all the same."""

    mark: int = 0
    gravity: Any = field(default=1.0, hash=False)


def changed_object(held):
    held.strength = 2.0


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1.0], lambda held: held.append(1.0)),
        (lambda: Pull(1.0), changed_object),
        (lambda: {"pull": 1.0}, lambda held: held.update(pull=2.0)),
    ],
)
def test_an_env_built_after_what_it_holds_was_changed_does_not_run_what_was_before(
    mark, make, change
):
    held = make()
    first = env_of(Loose(mark, held))
    assert fallen(first) == 1.0

    change(held)

    assert fallen(env_of(Loose(mark, held))) == 2.0


def test_an_env_that_is_changed_is_no_longer_what_others_are_compared_with(mark):
    core = Loose(mark, 1.0)
    first, second = env_of(core), env_of(Loose(mark, 1.0))
    assert fallen(first) == fallen(second) == 1.0

    core.gravity = 5.0

    assert fallen(env_of(Loose(mark, 5.0))) == 5.0


@pytest.mark.parametrize(
    ("one", "other"), [(2, 2.0), (True, 1), (0.0, -0.0), ((1,), (True,)), ((1,), [1])]
)
def test_numbers_that_are_equal_but_unlike_are_traced_apart(mark, one, other):
    envs = [falling(value, mark) for value in (one, other)]
    for env in envs:
        fallen(env)

    assert all(env.traces for env in envs)


def test_a_name_that_is_registered_again_is_another_env(monkeypatch):
    envs = pytest.importorskip("brax.envs")

    class Mine(envs.fast.Fast):
        def __init__(self, scale=1.0, **kwargs):
            super().__init__(**kwargs)
            self.scale = scale

        def step(self, state, action):
            return state.replace(reward=jnp.float32(self.scale))

    paid = []
    for scale in (1.0, 2.0):
        monkeypatch.setitem(envs._envs, "mine", partial(Mine, scale=scale))
        env = BraxEnv("mine", batch_size=[2], device="cpu", episode_length=5)
        paid.append(float(env.rand_step(env.reset())["next", "reward"][0]))

    assert paid == [1.0, 2.0]


class Knot:
    """Leads back to itself in many ways."""

    def __init__(self):
        self.left = self.middle = self.right = self

    def __call__(self):
        return jnp.float32(1.0)


@pytest.mark.parametrize("held", [Knot(), jax.random.key(0), np.array([1.0, None], object)])
def test_what_cannot_be_compared_is_compiled_by_itself(mark, held):
    core = Loose(mark, 1.0)
    core.more = held

    assert fallen(env_of(core)) == 1.0
