"""Pools that are closed whatever the test does, and counts of what must not leak."""

import gc
import os
from contextlib import ExitStack

import psutil
import pytest

from envkit.transport import ProcessPool, shared_fork_server
from tests.transport.hosts import COMMANDS, Counter, layout

FOREIGN = ("sem.mp-", "torch_")  # in /dev/shm: multiprocessing and torch, in whatever program


@pytest.fixture
def new_pool():
    """Start a pool of `Counter` rows, bound to `layout`; closed after the test."""
    with ExitStack() as stack:

        def start(make_host=Counter, rows=4, processes=2, **options):
            options = {"commands": COMMANDS, "timeout_s": 20.0, **options}
            pool = ProcessPool(make_host, rows, processes, **options)
            stack.callback(pool.close)
            pool.start()
            return pool, pool.bind(layout(rows))

        yield start


@pytest.fixture
def holdings():
    """Count descriptors, child processes (the fork server aside) and files in /dev/shm."""
    shared_fork_server().warm_up()

    def count():
        gc.collect()  # errors of earlier tests hold pools in reference cycles
        children = [p.pid for p in psutil.Process().children(recursive=True)]
        shared = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
        shared = [name for name in shared if not name.startswith(FOREIGN)]
        return len(os.listdir("/proc/self/fd")), sorted(children), shared

    return count
