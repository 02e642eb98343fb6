"""Which kinds of collectors there are, and which keywords go with which.

What they mean, and which values are refused, stands in `settings`.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def kind_for(backend: str | None, sync: bool) -> Any:
    """Give the class of collectors with a backend.

    Raises:
        ArgumentError: (a ValueError) there is no such backend.
    """
    if backend not in _KINDS:
        raise ArgumentError(
            f"backend is {backend!r}, but must be one of {[name for name in _KINDS if name]}."
        )
    return late(_KINDS[backend][not sync])


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
