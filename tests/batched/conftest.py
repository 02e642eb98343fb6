"""What tests of batched envs share."""

from __future__ import annotations

import pytest

from envkit import ParallelEnv
from tests.zoo.envs import Chaos


@pytest.fixture(scope="module")
def warm_fork_server() -> None:
    """Start the fork server that all pools share, so that workers come quickly."""
    env = ParallelEnv(1, Chaos)
    env.start()
    env.close()
