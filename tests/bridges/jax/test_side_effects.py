"""A reset or step that changes values of Python is refused: programs would repeat what it did while it was traced."""

from __future__ import annotations

import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envkit import Box, JaxEnv, Timestep, check_env_specs
from envkit.errors import OutOfSpecError, StateStructureError


class Walk:
    """One coordinate."""

    action_space = Box(-1.0, 1.0, (1,))

    def reset(self, key):
        place = jax.random.uniform(key, (1,))
        return place, Timestep(place)

    def step(self, state, action):
        place = state + action
        return place, Timestep(place, reward=-jnp.abs(place).sum())


class Counts(Walk):
    """Ends by a count that a reset begins again."""

    t = 0

    def reset(self, key):
        self.t = 0
        return super().reset(key)

    def step(self, state, action):
        self.t += 1
        place, timestep = super().step(state, action)
        return place, Timestep(place, timestep.reward, terminated=self.t > 5)


class CountsInItsClass(Walk):
    steps = 0

    def step(self, state, action):
        type(self).steps += 1
        return super().step(state, action)


class CountsInAnArray(Walk):
    def __init__(self):
        self.visits = np.zeros(3)

    def step(self, state, action):
        self.visits[0] += 1
        return super().step(state, action)


class Wraps(Walk):
    def __init__(self):
        self.env = Counts()

    def step(self, state, action):
        return self.env.step(state, action)


class Remembers(Walk):
    last: Any = None

    def step(self, state, action):
        change = 0 if self.last is None else self.last
        self.last = action
        return super().step(state, action + change)


class DrawsByNumPy(Walk):
    def step(self, state, action):
        return super().step(state, action + np.random.normal())


class DrawsByItsGenerator(Walk):
    def __init__(self):
        self.numbers = np.random.default_rng(0)

    def step(self, state, action):
        return super().step(state, action + self.numbers.normal())


class BeginsByPython(Walk):
    def reset(self, key):
        return super().reset(jax.random.fold_in(key, random.randrange(10**6)))


REFUSED = {
    Counts: "step of Counts changes its attribute 't'",
    CountsInItsClass: "step of CountsInItsClass changes its class attribute 'steps'",
    CountsInAnArray: "step of CountsInAnArray changes its attribute 'visits'",
    Wraps: "step of Counts changes its attribute 't'",
    Remembers: "step of Remembers writes its attribute 'last'",
    DrawsByNumPy: "step of DrawsByNumPy draws from the generator of `numpy.random`",
    DrawsByItsGenerator: "step of DrawsByItsGenerator changes its attribute 'numbers'",
    BeginsByPython: "reset of BeginsByPython draws from the generator of `random`",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_env_that_keeps_or_draws_values_in_python_is_refused_when_it_is_traced(kind):
    with pytest.raises(StateStructureError, match=REFUSED[kind]) as told:
        JaxEnv(kind(), batch_size=[2]).rollout(3)

    assert "Keep what changes in the state" in str(told.value)


class ReadsAClock(Walk):
    def step(self, state, action):
        return super().step(state, action + time.perf_counter() % 1)  # which float32 tells apart


NUMBERS = iter(range(1000))


class ReadsAGlobal(Walk):
    def reset(self, key):
        place, timestep = super().reset(key)
        return place + next(NUMBERS), timestep


@pytest.mark.parametrize("kind", [ReadsAClock, ReadsAGlobal])
def test_an_env_that_computes_something_else_at_each_trace_is_found_by_a_check(kind):
    with pytest.raises(OutOfSpecError, match=rf"of {kind.__name__} computes something else each"):
        check_env_specs(JaxEnv(kind(), batch_size=[2]))


class Caches(Walk):
    """Keeps what it has computed once, and draws in its constructor."""

    def __init__(self):
        self.offset = np.random.normal()
        self.seen: dict[str, int] = {}

    def step(self, state, action):
        if not hasattr(self, "scale"):
            self.scale = 2.0
        self.seen["rows"] = 1
        return super().step(jax.nn.relu(state), action * self.scale + self.offset)


def test_an_env_that_keeps_what_never_changes_is_taken():
    env = JaxEnv(Caches(), batch_size=[2])

    check_env_specs(env)

    assert env.rollout(3)["next", "reward"].shape == (2, 3, 1)


def test_draws_of_other_code_during_a_trace_are_no_draws_of_the_env():
    class Beside(Walk):
        def step(self, state, action):
            np.random.random()  # as another thread would
            return super().step(state, action)

    assert JaxEnv(Beside(), batch_size=[2]).rollout(3).shape == (2, 3)
