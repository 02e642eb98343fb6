"""What tests of transports share: one small Ray cluster, and pools that are closed whatever the test does."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from envkit.transport import Pool
from tests.transport.hosts import COMMANDS, LIMITS, Counter, layout
from tests.zoo.ray_cluster import begin_ray


@pytest.fixture
def new_pool():
    """Start a pool of `Counter` rows in two actors, bound to `layout`; closed after the test."""
    begin_ray()
    from envkit_bridges.transports.ray import RayActors

    with ExitStack() as stack:

        def start(make_host=Counter, rows=4, actors=2, bound=None, **options):
            options = {"commands": COMMANDS, "timeout_s": 20.0, **options}
            limits = {name: options.pop(name) for name in LIMITS if name in options}
            pool = Pool(RayActors(make_host, rows, actors, **options), **limits)
            stack.callback(pool.close)
            pool.start()
            return pool, pool.bind(layout(rows) if bound is None else bound)

        yield start
