"""Which kinds of collectors there are, and which keywords go with which.

What they mean, and which values are refused, stands in `settings`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from envkit.data.keywords import known_to, refuse_unknown
from envkit.errors import ArgumentError, OptionError
from envkit.late import late

__all__ = ["kind_for", "require_known"]

_KINDS: dict[str | None, tuple[str, str]] = {
    None: ("SyncDataCollector", "SyncDataCollector"),
    "direct": ("SyncDataCollector", "SyncDataCollector"),
    "process": ("MultiSyncDataCollector", "MultiaSyncDataCollector"),
    "ray": ("MultiSyncDataCollector", "MultiaSyncDataCollector"),
}


def kind_for(
    backend: str | None, sync: bool, asked: type | None = None, *, has_workers: bool = False
) -> Any:
    """Give the class of collectors with a backend.

    Args:
        backend: see `Collector`.
        sync: see `Collector`.
        asked: the class that was called; one with workers alone has no kind that collects here. A subclass of the
            user's that does not say how it collects gets a class of its own below it, which does.
        has_workers: a number of workers was passed: without a backend they are processes.

    Raises:
        ArgumentError: (a ValueError) there is no such backend.
    """
    if backend not in _KINDS:
        raise ArgumentError(
            f"backend is {backend!r}, but must be one of {[name for name in _KINDS if name]}."
        )
    has_workers = has_workers or getattr(asked, "_has_workers", False)
    if backend is None and has_workers:
        backend = "process"
    kind = late(_KINDS[backend][not sync])
    if asked is None or issubclass(kind, asked):
        return kind
    return _completed(asked, kind)


@cache
def _completed(asked: type, kind: type) -> type:
    """Make a class of the user's, e.g. ``class Mine(Collector)``, one that collects as ``kind`` does."""
    told = {"__module__": asked.__module__, "__doc__": asked.__doc__}
    return type(asked)(asked.__name__, (asked, kind), told)


def require_known(kind: Any, given: Iterable[str], every: type) -> None:
    """Check the names of keywords that a kind of collector is given.

    Args:
        kind: its class.
        given: the names.
        every: the class that takes those of all kinds.

    Raises:
        OptionError: (a TypeError) one goes with collectors that have workers, or is unknown.
    """
    if (known := known_to(kind)) is None:
        return
    taken = known_to(every) or []
    for name in given:
        if name not in known and name in taken:
            raise OptionError(
                f"{name!r} is a keyword of collectors with workers, and a {kind.__name__} collects {kind._kind}. "
                "Use Collector(..., backend='process'), or leave it out."
            )
    refuse_unknown(kind.__name__, given, known)
