"""Threads of a collector: one uses it at a time, and a background thread may collect.

Two threads that collect would take each other's batches, or wait for each other's workers. A call of the thread that
uses it already (a hook, a policy) is let through. A turn is taken and ended by plain assignments, with no call next
to them: Ctrl-C cannot come in between, which would lose a batch that was counted as delivered. A collector that was
started in the background is held between two batches while a call of another thread takes its turn. None is used
after it was shut down.

Conventions
    background  a thread that fills a replay buffer while the caller trains.
    held        by another thread: the batch under way is finished, and none is begun until the last holder lets go.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from envkit.env.thread_lock import InUse
from envkit.errors import BusyError, ClosedEnvError, StartedError

_EXIT_S = 5.0
"""Seconds that the end of the program waits for the batch under way."""


class Background:
    """Call something again and again in its own thread.

    Args:
        collect: makes one batch; False says that it was the last one.
        name: of the thread.

    Attributes:
        error: what ended the thread, and was not raised anywhere yet.
    """

    def __init__(self, collect: Callable[[], bool], name: str):
        self.error: BaseException | None = None
        self._collect = collect
        self._changed = threading.Condition()
        self._holders = 0
        self._is_at_work = self._is_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._at_exit = weakref.finalize(self, _end_quietly, weakref.ref(self))

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._may_work():
                try:
                    goes_on = self._collect()
                finally:
                    self._set_at_work(False)
                if not goes_on:
                    return
        except BaseException as error:  # which the next call of the caller raises
            if not self._is_ended:
                self.error = error

    def _may_work(self) -> bool:
        with self._changed:
            while self._holders and not self._is_ended:
                self._changed.wait()
            self._is_at_work = not self._is_ended
            return self._is_at_work

    def _set_at_work(self, value: bool) -> None:
        with self._changed:
            self._is_at_work = value
            self._changed.notify_all()

    @property
    def is_alive(self) -> bool:
        """Whether it goes on, held or not."""
        return self._thread.is_alive()

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is this thread: a hook, an env or a policy."""
        return threading.current_thread() is self._thread

    @property
    def is_held(self) -> bool:
        """Whether it is paused."""
        return bool(self._holders)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Pause it between two batches.

        Raises:
            StartedError: (a RuntimeError) the thread itself would wait for itself.
        """
        if self.is_this_thread:
            raise StartedError(
                "pause() was called by the thread that collects, e.g. in a hook, and would wait for itself. Call it in "
                "another thread."
            )
        with self._changed:
            self._holders += 1
        try:
            with self._changed:
                while self._is_at_work and self.is_alive:
                    self._changed.wait(0.1)
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    def end(self, timeout_s: float | None = None) -> None:
        """End it after the batch under way.

        Raises:
            BusyError: (a RuntimeError) that batch is not done in time.
        """
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
        if self.is_this_thread:
            return
        self._thread.join(timeout_s)
        if self.is_alive:
            raise BusyError(
                f"the batch under way was not done within {timeout_s} s. Call async_shutdown() again, with a longer "
                "timeout= or None to wait for it."
            )
        self._at_exit.detach()

    def raise_error(self) -> None:
        """Raise what has ended the thread, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error


def _end_quietly(of: weakref.ref[Background]) -> None:
    """End a thread at the end of the program, which would stop it at whatever instruction."""
    background = of()
    if background is not None:
        with background._changed:
            background._is_ended = True
            background._changed.notify_all()
        background._thread.join(_EXIT_S)


P = ParamSpec("P")
R = TypeVar("R")


class Used(Protocol):
    """State of two users that take turns.

    Attributes:
        _user: ident of the thread that uses it; None where it is free.
        _background: collects in its own thread; None where nothing was started.
    """

    _user: int | None
    _is_shut_down: bool
    _background: Background | None


U = TypeVar("U", bound=Used)


def in_turn(method: Callable[Concatenate[U, P], R]) -> Callable[Concatenate[U, P], R]:
    """Wrap a method so that no other thread uses its collector while it runs.

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
    """Return the ident of this thread, which may take its turn."""
    require_open(used)
    me = threading.get_ident()
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
    shut = ClosedEnvError(f"this {type(used).__name__} was shut down. Build a new one.")
    if used._is_shut_down and str(error) != str(shut):
        raise shut from error
