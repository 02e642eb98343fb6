"""Workers outside this process, for the sub-envs of a pool: what they take over from it, and how they start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from envkit.batched.caller_settings import caller_settings, chosen
from envkit.batched.env_host import BUILDING, COMMAND_NAMES, HostFactory, Maker
from envkit.batched.pool_owner import PoolOwner
from envkit.batched.settings import backend_options_of
from envkit.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from envkit.lazy_imports import PRELOADED, late
from envkit.transport import MakeHost, Pool, Processes
from envkit.transport.cores import usable_cores


def worker_processes(
    owner: PoolOwner,
    makers: list[Maker],
    described: frozenset[int],
    *,
    num_processes: int,
    **options: Any,
) -> Pool:
    """Make the processes that host the sub-envs of a pool; they are not started yet.

    Args:
        owner: whose sub-envs they are.
        makers: of each row.
        described: rows whose metadata is wanted.
        num_processes: how many.
        **options: of `Processes`.
    """
    options = {"close_timeout_s": owner.shutdown_timeout, **options}
    factory, limits = _factory(owner, makers, described), limits_of(owner)
    return processes_for(factory, owner.num_workers, num_processes, limits, **options)


def ray_workers(
    owner: PoolOwner,
    makers: list[Maker],
    described: frozenset[int],
    *,
    num_actors: int | None,
    options: Mapping[str, Any],
) -> Pool:
    """Make the Ray actors that host the sub-envs of a pool; they are not started yet.

    Args:
        owner, makers, described: see `worker_processes`.
        num_actors, options: see `actors_for`.
    """
    factory, limits = _factory(owner, makers, described), limits_of(owner)
    return actors_for(factory, owner.num_workers, num_actors, limits, options)


def _factory(owner: PoolOwner, makers: list[Maker], described: frozenset[int]) -> HostFactory:
    return HostFactory(
        makers,
        described,
        num_threads=owner.num_sub_threads,
        without_gradients=True,
        own_random_numbers=True,
        choices=owner._choices or chosen(),
    )


def limits_of(owner: PoolOwner) -> dict[str, Any]:
    """Return the keywords of a `Pool` of sub-envs: its limits of time, and what its commands are called."""
    return {
        "timeout_s": owner.timeout,
        "start_timeout_s": owner.start_timeout,
        "building": BUILDING,
        "commands": COMMAND_NAMES,
    }


def processes_for(
    make_host: MakeHost,
    num_rows: int,
    num_processes: int,
    limits: Mapping[str, Any],
    **options: Any,
) -> Pool:
    """Make processes that take over what this one is set up with; they are not started yet.

    Args:
        make_host, num_rows, num_processes: see `Processes`.
        limits: options of `Pool`.
        **options: of `Processes`.
    """
    taken_over = _taken_over()
    workers = Processes(
        make_host, num_rows, num_processes, preload=PRELOADED, **taken_over, **options
    )
    return Pool(workers, **limits)


def actors_for(
    make_host: MakeHost,
    num_rows: int,
    num_actors: int | None,
    limits: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Pool:
    """Make Ray actors that take over what this process is set up with; they are not started yet.

    Args:
        make_host, num_rows: see `RayActors`.
        num_actors: how many; None takes one for each CPU of the cluster, at most one for each row.
        limits: options of `Pool`.
        options: entries of `RayOptions`.
    """
    of_actors = {name: value for name, value in options.items() if name != "address"}
    workers = late("RayActors")(
        make_host,
        num_rows,
        num_actors,
        address=options.get("address"),
        actor_options=of_actors,
        **_taken_over(),
    )
    return Pool(workers, **limits)


def cores_of(
    affinity: Sequence[Sequence[int]] | Callable[[int], Sequence[int]] | None, count: int
) -> list[frozenset[int]]:
    """Return the cores that each of ``count`` processes may run on; none where that is left to the system.

    Raises:
        UnsupportedError: (a NotImplementedError) the system does not place processes.
        ArgumentTypeError: something is no sequence of ints.
        ArgumentError: there is not one set of cores a process, one is empty, or a core is not this process's.
    """
    if affinity is None:
        return []
    if not hasattr(os, "sched_setaffinity"):
        raise UnsupportedError(
            "worker_affinity was given, but this system does not place processes. Leave it out: it needs Linux."
        )
    entries = [affinity(index) for index in range(count)] if callable(affinity) else list(affinity)
    if len(entries) != count:
        raise ArgumentError(
            f"worker_affinity has {len(entries)} entries for {count} processes. Pass one sequence of cores for each."
        )
    return [_cores(index, cores) for index, cores in enumerate(entries)]


def _cores(index: int, entry: Any) -> frozenset[int]:
    name, usable = f"worker_affinity[{index}]", usable_cores()
    if isinstance(entry, (str, bytes)) or not isinstance(entry, Iterable):
        raise ArgumentTypeError(
            f"{name} is {entry!r}, but must be a sequence of numbers of cores. Pass [0, 1], for example."
        )
    cores = list(entry)
    for core in cores:
        if not isinstance(core, Integral) or isinstance(core, bool):
            raise ArgumentTypeError(
                f"{name} holds {core!r}, but must hold ints. Pass numbers of cores."
            )
    if not cores or not set(cores) <= set(usable):
        raise ArgumentError(
            f"{name} is {cores}, but must name some of the cores that this process may run on. Choose among {usable}."
        )
    return frozenset(map(int, cores))


def usable_options(backend: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of a backend, known and for a library that is there.

    Raises:
        OptionError: (a TypeError) see `backend_options_of`.
        MissingLibraryError: (an ImportError) Ray is asked for and not installed.
    """
    checked = backend_options_of(backend, options)
    if backend == "ray":
        late("RayActors")
    return checked


def _taken_over() -> dict[str, Any]:
    """Return the settings of this process that workers of any kind receive."""
    if os.environ.get("LAZY_LEGACY_OP") == "None":
        # tensordict leaves this behind when it has stacked unlike data, and fails at the next
        # import of itself that sees it: a worker's.
        os.environ.pop("LAZY_LEGACY_OP", None)
    return {
        "prepare": caller_settings(),
        "hide_warnings": getattr(sys.modules["envkit"], "filter_warnings_subprocess", True),
    }
