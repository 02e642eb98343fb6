"""Worker processes for the sub-envs of a pool: what they take over from this process, and how they start."""

from __future__ import annotations

import os
import sys
from typing import Any, TypeVar

from envkit.batched.carried import carried
from envkit.batched.creation_context import chosen
from envkit.batched.host import BUILDING, COMMAND_NAMES, HostFactory, Maker
from envkit.batched.pool_owner import PoolOwner
from envkit.late import PRELOADED
from envkit.transport import MakeHost, ProcessPool

__all__ = ["processes_for", "worker_processes"]

_Workers = TypeVar("_Workers", bound=ProcessPool)


def worker_processes(
    kind: type[_Workers],
    owner: PoolOwner,
    makers: list[Maker],
    described: frozenset[int],
    *,
    num_processes: int,
    **options: Any,
) -> _Workers:
    """Make the processes that host the sub-envs of a pool; they are not started yet.

    Args:
        kind: class of the pool of processes.
        owner: whose sub-envs they are.
        makers: of each row.
        described: rows whose metadata is wanted.
        num_processes: how many.
        **options: of ``kind``.
    """
    factory = HostFactory(
        makers,
        described,
        num_threads=owner.num_sub_threads,
        without_gradients=True,
        own_random_numbers=True,
        choices=owner._choices or chosen(),
    )
    return processes_for(
        kind,
        factory,
        owner.num_workers,
        num_processes,
        timeout_s=owner.timeout,
        start_timeout_s=owner.start_timeout,
        building=BUILDING,
        commands=COMMAND_NAMES,
        **options,
    )


def processes_for(
    kind: type[_Workers], make_host: MakeHost, num_rows: int, num_processes: int, **options: Any
) -> _Workers:
    """Make processes that take over what this one is set up with; they are not started yet.

    Args:
        kind: class of the pool of processes.
        make_host, num_rows, num_processes: see `ProcessPool`.
        **options: of ``kind``.
    """
    if os.environ.get("LAZY_LEGACY_OP") == "None":
        # tensordict leaves this behind when it has stacked unlike data, and fails at the next
        # import of itself that sees it: a worker's.
        del os.environ["LAZY_LEGACY_OP"]
    return kind(
        make_host,
        num_rows,
        num_processes,
        preload=PRELOADED,
        prepare=carried(),
        hide_warnings=getattr(sys.modules["envkit"], "filter_warnings_subprocess", True),
        **options,
    )
