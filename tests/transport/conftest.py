"""Pools that are closed whatever the test does."""

from contextlib import ExitStack

import pytest

from tests.transport.hosts import COMMANDS, Counter, layout, process_pool


@pytest.fixture
def new_pool():
    """Start a pool of `Counter` rows, bound to `layout`; closed after the test."""
    with ExitStack() as stack:

        def start(make_host=Counter, rows=4, processes=2, **options):
            options = {"commands": COMMANDS, "timeout_s": 20.0, **options}
            pool = process_pool(make_host, rows, processes, **options)
            stack.callback(pool.close)
            pool.start()
            return pool, pool.bind(layout(rows))

        yield start
