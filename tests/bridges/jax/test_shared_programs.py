"""Envs that are equal run the same compiled programs, others never do."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envkit import StepCounter, TransformedEnv
from envkit.functional import Box, Timestep
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.shared_programs import account_of
from envkit_bridges.worlds.brax import BraxEnv
from tests.bridges.compare import assert_same

UNLIKE = iter(range(10**6))  # marks that no two tests share


@dataclass
class Fall:
    """Falls faster and faster."""

    gravity: Any = 1.0
    mark: int = 0

    action_space = Box(-1.0, 1.0, (1,))

    def reset(self, key):
        return jnp.zeros(()), Timestep(jnp.zeros(1))

    def step(self, state, action):
        pull = self.gravity() if callable(self.gravity) else jnp.sum(jnp.asarray(self.gravity))
        return state + pull, Timestep((state + pull)[None])


@pytest.fixture
def mark():
    return next(UNLIKE)


def made(gravity, mark, rows=2, **options):
    env = JaxEnv(Fall(gravity, mark), batch_size=[rows], device="cpu", **options)
    env.set_seed(0)
    return env


def core_of(env: Any) -> Any:
    """Give the object that was handed to the env."""
    return env._engine.programs.env.env.env.env.env


def fallen(env):
    """Give the speed after one step."""
    return float(env.rand_step(env.reset())["next", "observation"].flatten()[0])


TRACED = {"restart": 1, "step": 1}


def test_an_env_that_equals_another_traces_nothing(mark):
    first, second = (made(np.array([1.0, 2.0]), mark, episode_length=5) for _ in range(2))

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
        (1, {}),
        pytest.param(2.0, {}, marks=pytest.mark.slow),
        pytest.param(np.array([2.0]), {}, marks=pytest.mark.slow),
        pytest.param(np.float32(2.0), {}, marks=pytest.mark.slow),
        pytest.param(jnp.array([2.0, 3.0]), {}, marks=pytest.mark.slow),
        (lambda: 4.0, {}),
    ],
)
def test_an_env_that_differs_is_traced_for_itself(mark, gravity, options):
    first = made(1.0, mark)
    fallen(first)
    second = made(gravity, mark, **options)

    assert fallen(second) == float(np.sum(gravity() if callable(gravity) else gravity))
    assert second.traces == TRACED


def test_closures_over_unlike_values_are_not_shared(mark):
    first, second = (made(lambda pull=pull: pull, mark) for pull in (1.0, 2.0))

    assert [fallen(first), fallen(second)] == [1.0, 2.0]


def test_what_is_changed_before_its_first_use_counts(mark):
    first, second = made(1.0, mark), made(1.0, mark)
    fallen(first)
    core_of(second).gravity = 3.0

    assert fallen(second) == 3.0
    assert fallen(made(1.0, mark)) == 1.0


def test_what_is_traced_after_a_change_is_shared_with_no_equal_of_before(mark):
    first, second = made(1.0, mark), made(1.0, mark, rows=4)
    core = core_of(first)
    root = first.reset()
    fallen(first)
    core.gravity = 5.0

    four = first.rand_step(first.reset(root.expand(2, 2).clone().select()))

    assert (four["next", "observation"] == 5.0).all()
    assert fallen(second) == 1.0


def test_a_method_that_is_replaced_counts(mark, monkeypatch):
    fallen(made(1.0, mark))
    monkeypatch.setattr(
        Fall, "step", lambda self, state, action: (state, Timestep(state[None] + 7))
    )

    assert fallen(made(1.0, mark)) == 7.0


def test_copies_share_what_is_compiled(mark):
    env = made(1.0, mark)
    pickled = pickle.loads(pickle.dumps(env))
    fallen(env)

    for copied in (copy.deepcopy(env), pickled):
        assert fallen(copied) == 1.0
        assert copied.traces == {}


def test_programs_go_with_the_last_env_that_uses_them(mark):
    first, second = made(1.0, mark), made(1.0, mark)
    assert fallen(first) == fallen(second)
    programs = weakref.ref(first._engine.programs.step.run.shared)
    assert programs() is second._engine.programs.step.run.shared

    del first
    gc.collect()
    assert programs() is not None
    del second
    gc.collect()

    assert programs() is None


def test_envs_that_programs_see_through_unlike_transforms_share_none(mark):
    first, second = (TransformedEnv(made(1.0, mark), StepCounter()) for _ in range(2))

    assert fallen(first) == fallen(second) == 1.0
    assert second.traces == TRACED
    assert second.base_env.traces == {}


def test_devices_and_backends_tell_envs_apart(mark):
    def account(backend="spring", **options):
        env = BraxEnv("inverted_pendulum", backend=backend, device="cpu", **options)
        return env._engine.programs.account()

    assert account() == account()
    assert account() != account("positional")
    spread = JaxEnv(Fall(), batch_size=[2], devices=jax.devices()[:1])
    assert spread._engine.programs.account() != made(1.0, 0)._engine.programs.account()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ((1, 2), [1, 2]),
        (np.zeros(2), np.zeros((2, 1))),
        (np.zeros(2, np.float32), jnp.zeros(2)),
        (jnp.zeros(2, np.int32), jnp.zeros(2)),
        (jax.random.key(0), jax.random.key(1)),
        ({"a": 1}, {"b": 1}),
        (object(), object()),
    ],
)
def test_values_that_differ_have_unlike_accounts(left, right):
    assert account_of(left) != account_of(right)
    assert account_of(left) == account_of(left)


def test_an_object_that_holds_itself_has_an_account():
    one, other = Fall(), Fall()
    one.gravity, other.gravity = one, other

    assert account_of(one) == account_of(other) != account_of(Fall())


def test_what_is_made_of_too_many_objects_counts_by_identity():
    def nested(deep):
        return [nested(deep - 1)] if deep else []

    def doubled(deep):
        below = doubled(deep - 1) if deep else [0]
        return [below, below]

    for value, other in ((nested(100), nested(100)), (doubled(30), doubled(30))):
        assert account_of(value) == account_of(value) != account_of(other)


@dataclass
class Caching(Fall):
    """Keeps something at each trace."""

    shapes: list = field(default_factory=list)

    def step(self, state, action):
        self.shapes.append(action.shape)
        return super().step(state, action)


def test_what_a_trace_itself_changes_makes_no_program_anew(mark):
    env = JaxEnv(Caching(1.0, mark), batch_size=[2], device="cpu")
    env.set_seed(0)
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
    assert len(env._engine.programs.unroll.shared._runs) == 2


PULL = 1.0


class Settings:
    pull = 1.0


def pull():
    return PULL * Settings.pull


class Pulled(Fall):
    """Reads what it computes with from its module, a function there and a class."""

    def step(self, state, action):
        return state + pull(), Timestep((state + pull())[None])


@pytest.mark.parametrize(
    ("place", "name"),
    [(sys.modules[__name__], "PULL"), (Settings, "pull")],
    ids=["global", "class"],
)
def test_an_env_made_after_a_global_was_changed_computes_with_the_new_value(
    mark, monkeypatch, place, name
):
    first = JaxEnv(Pulled(1.0, mark), batch_size=[2], device="cpu")
    first.set_seed(0)
    before = fallen(first)
    monkeypatch.setattr(place, name, 5.0)

    second = JaxEnv(Pulled(1.0, mark), batch_size=[2], device="cpu")
    second.set_seed(0)

    assert (before, fallen(second)) == (1.0, 5.0)
