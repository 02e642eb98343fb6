"""Changes for a while of what belongs to the whole process: signals, streams, warning filters, environment variables.

Several threads may make environments at the same time, and end in any order. Output and warnings are left out for the
thread that asks, and stay for all others. Variables and filters are put back when the last thread leaves. Settings for
which there is no such way are changed by one thread at a time. All contexts may be nested.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Literal, cast

_LOCK = threading.RLock()  # held for a moment, to enter or to leave
_ALONE = threading.RLock()


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other thread is in here, for what one thread at a time can change."""
    with _ALONE:
        yield


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Let Ctrl-C wait for the end of a block that must not be done in part.

    Only the main thread is interrupted by it, so in others this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


# ----------------------------------------------------------------------------------------- streams


class _Silent:
    """A stream that drops what some threads write, and hands on what others do."""

    def __init__(self, stream: Any):
        self.stream = stream
        self.threads: list[int] = []

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() in self.threads else self.stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_ORIGINALS: list[tuple[Any, Any]] = []  # one while a thread is silent


@contextmanager
def no_output(name: Literal["stdout", "stderr"] = "stdout") -> Iterator[None]:
    """Drop what this thread writes to a stream of ``sys``.

    Some libraries assign ``sys.__stdout__`` and ``sys.__stderr__`` to ``sys.stdout`` and ``sys.stderr`` when they are
    imported. Meanwhile these are the same as those, so the assignment changes nothing.
    """
    thread = threading.get_ident()
    with _LOCK:
        silent: Any = getattr(sys, name)
        if not isinstance(silent, _Silent):
            silent = _Silent(silent)
            setattr(sys, name, silent)
        silent.threads.append(thread)
        _ORIGINALS.append((sys.__stdout__, sys.__stderr__))
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    try:
        yield
    finally:
        with _LOCK:
            silent.threads.remove(thread)
            # else another thread has redirected it meanwhile, and puts back one that hands on all
            if not silent.threads and getattr(sys, name) is silent:
                setattr(sys, name, silent.stream)
            sys.__stdout__, sys.__stderr__ = _ORIGINALS[0]  # type: ignore[misc]
            _ORIGINALS.pop()
            if _ORIGINALS:
                sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]


# ---------------------------------------------------------------------------------------- warnings


class _InThread:
    """A pattern of messages, which are those of this thread alone."""

    def __init__(self, message: str):
        self._thread = threading.get_ident()
        self._pattern = re.compile(message, re.IGNORECASE)

    def match(self, text: str) -> bool:
        return threading.get_ident() == self._thread and bool(self._pattern.match(text))


@contextmanager
def no_warnings(message: str = "", category: type[Warning] = Warning) -> Iterator[None]:
    """Suppress warnings of this thread: those whose text begins with a pattern, and which are of a category."""
    filters = _filters()
    entry = ("ignore", _InThread(message), category, None, 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        with suppress(ValueError):  # somebody has reset them
            filters.remove(entry)


_KEPT_FILTERS: list[tuple[list[Any], list[Any]]] = []  # one while a thread is in there


@contextmanager
def filters_kept() -> Iterator[None]:
    """Undo what a library does to the warning filters when it is imported."""
    with _LOCK:
        _KEPT_FILTERS.append((_filters(), [*_filters()]))
    try:
        yield
    finally:
        with _LOCK:
            filters, before = _KEPT_FILTERS[0]
            _KEPT_FILTERS.pop()
            if not _KEPT_FILTERS:
                others = [one for one in filters if isinstance(one[1], _InThread)]
                filters[:] = [*others, *(one for one in before if one not in others)]


def _filters() -> list[Any]:
    return cast(list[Any], warnings.filters)


# --------------------------------------------------------------------------------------- variables

_KEPT_VARIABLES: dict[str, list[str | None]] = {}  # by name: what it was when each thread came


@contextmanager
def variables_kept(*names: str) -> Iterator[None]:
    """Put environment variables back when the last thread leaves, whatever becomes of them meanwhile."""
    with _LOCK:
        for name in names:
            _KEPT_VARIABLES.setdefault(name, []).append(os.environ.get(name))
    try:
        yield
    finally:
        with _LOCK:
            for name in names:
                before = _KEPT_VARIABLES[name]
                if len(before) > 1:
                    before.pop()
                    continue
                os.environ.pop(name, None)
                if (value := _KEPT_VARIABLES.pop(name)[0]) is not None:
                    os.environ[name] = value


# ---------------------------------------------------------------------------------------- warnings

_INSIDE = ("envkit", "envkit_bridges", "torch", "tensordict", "contextlib")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's program that called into envkit, through however many calls."""
    frame, stacklevel = sys._getframe(1), 2
    while frame.f_back is not None and _is_inside(frame):
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(message, category, stacklevel=stacklevel)


def _is_inside(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE
