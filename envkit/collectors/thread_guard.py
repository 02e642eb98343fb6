"""A collector is used by one thread at a time, and not after it was shut down.

Two threads that collect would take each other's batches, or wait for each other's workers. A call of the thread that
uses it already (a hook, a policy) is let through. A turn is taken and ended by plain assignments, with no call next
to them: Ctrl-C cannot come in between, which would lose a batch that was counted as delivered. A collector that was
started in the background is held between two batches while a call of another thread takes its turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from envkit.collectors.background import Background
from envkit.env.thread_lock import InUse
from envkit.errors import BusyError, ClosedEnvError

__all__ = ["Used", "asked_for", "in_turn", "require_open", "require_own"]

P = ParamSpec("P")
R = TypeVar("R")


class Used(Protocol):
    """What takes turns.

    Attributes:
        _user: ident of the thread that uses it; None where nobody does.
        _background: collects in a thread of its own; None where nothing was started.
    """

    _user: int | None
    _is_shut_down: bool
    _background: Background | None


U = TypeVar("U", bound=Used)


def in_turn(method: Callable[Concatenate[U, P], R]) -> Callable[Concatenate[U, P], R]:
    """Have a method use its collector alone while it runs.

    Raises:
        BusyError: another thread uses it.
        ClosedEnvError: it was shut down, before or meanwhile.
    """

    @functools.wraps(method)
    def alone(self: U, *args: P.args, **kwargs: P.kwargs) -> R:
        background = self._background
        if background is not None and background.is_alive and not background.is_this_thread:
            with background.held():
                return taking_turn(self, *args, **kwargs)
        return taking_turn(self, *args, **kwargs)

    def taking_turn(self: U, *args: P.args, **kwargs: P.kwargs) -> R:
        me = asked_for(self)
        before, self._user = self._user, me
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            require_open(self, error)
            raise
        finally:
            self._user = before

    return alone


def asked_for(used: Used) -> int:
    """Give the ident of this thread, which may take its turn."""
    require_open(used)
    me = get_ident()
    if used._user is not None and used._user != me:
        held = InUse(type(used).__name__)
        held.holder = used._user
        held.refuse()
    return me


def require_own(background: Background, used: Used) -> None:
    """Check that batches are asked for by the thread in the background, or while it is held.

    Raises:
        BusyError: (a RuntimeError) they are not, and would be taken from it.
    """
    if not (background.is_this_thread or background.is_held):
        raise BusyError(
            f"this {type(used).__name__} collects in the background since start(), into its replay buffer. Sample from "
            "that, or call next() within pause()."
        )


def require_open(used: Used, error: Exception | None = None) -> None:
    """Check that a collector was not shut down, which is what an error came of then."""
    if used._is_shut_down and not isinstance(error, ClosedEnvError):
        raise ClosedEnvError(
            f"this {type(used).__name__} was shut down. Build a new one."
        ) from error
