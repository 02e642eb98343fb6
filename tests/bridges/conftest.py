"""Compiled environments, built once a session: compiling is what such tests cost.

A test that uses one of them calls `set_seed` first, since only the env's key outlives a call.
"""

from __future__ import annotations

import pytest

from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.worlds.brax import BraxEnv
from tests.zoo.walkers import Walker

ROWS = 4


@pytest.fixture(scope="session")
def walker():
    return JaxEnv(Walker(), batch_size=[ROWS], device="cpu", episode_length=6)


@pytest.fixture(scope="session")
def nested_walker():
    return JaxEnv(
        Walker(), batch_size=[ROWS], device="cpu", episode_length=6, state_layout="nested"
    )


@pytest.fixture(scope="session")
def single_walker():
    return JaxEnv(Walker(), device="cpu", episode_length=6)


@pytest.fixture(scope="session")
def fast():
    """Brax's env without physics; its reward and observation count steps."""
    return BraxEnv("fast", batch_size=[ROWS], device="cpu", episode_length=4)


@pytest.fixture(scope="session")
def nested_fast():
    return BraxEnv("fast", batch_size=[ROWS], device="cpu", state_layout="nested")


@pytest.fixture(scope="session")
def pendulum():
    """A real physics engine, the cheapest to compile."""
    return BraxEnv(
        "inverted_pendulum", backend="spring", batch_size=[8], device="cpu", episode_length=20
    )
