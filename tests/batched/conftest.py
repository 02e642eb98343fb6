"""What tests of batched envs share: envs that end with their test, and counts of what must not leak."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest

from envkit import ParallelEnv
from envkit.transport import shared_fork_server
from tests.envs import Chaos

FOREIGN = ("sem.mp-", "torch_")  # in /dev/shm: multiprocessing and torch, in whatever program


@pytest.fixture
def closing() -> Iterator[Callable]:
    """Hand out envs that are closed after the test, whatever it does."""
    with ExitStack() as stack:

        def keep(env):
            stack.callback(env.close, raise_if_closed=False)
            return env

        yield keep


@pytest.fixture(scope="module")
def warm_fork_server() -> None:
    """Start the fork server that all pools share, so that workers come quickly."""
    env = ParallelEnv(1, Chaos)
    env.start()
    env.close()


@pytest.fixture
def holdings(warm_fork_server) -> Callable:
    """Count descriptors, child processes (the fork server aside) and files in /dev/shm."""
    shared_fork_server().warm_up()

    def count() -> tuple[int, list[int], list[str]]:
        gc.collect()  # errors of earlier tests hold pools in reference cycles
        children = sorted(child.pid for child in psutil.Process().children(recursive=True))
        shared = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
        shared = [name for name in shared if not name.startswith(FOREIGN)]
        return len(os.listdir("/proc/self/fd")), children, shared

    return count
