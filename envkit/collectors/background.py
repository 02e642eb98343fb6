"""A thread that collects while the caller trains: it fills a replay buffer, and stands still while it is held.

Conventions
    held  by another thread: the batch under way is finished, and none is begun until the last holder lets go.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from envkit.errors import BusyError, StartedError

__all__ = ["Background"]

_EXIT_S = 5.0
"""Seconds that the end of the program waits for the batch under way."""


class Background:
    """Call something again and again in a thread of its own.

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
        """Whether it stands still."""
        return bool(self._holders)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have it stand still between two batches.

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
