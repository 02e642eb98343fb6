"""What JAX compiles, on disk and announced: a folder for the next process, and a note when a first call takes long.

`cache_dir` is JAX's persistent compilation cache with one place and one switch; see
https://docs.jax.dev/en/latest/persistent_compilation_cache.html. It is off until it is called.

Conventions
    note   a line of the logger "envkit" at level WARNING, which Python shows on stderr unless
           configured otherwise: ``logging.getLogger("envkit").setLevel("ERROR")`` silences it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from envkit.data.arguments import as_file
from envkit.errors import ArgumentError
from envkit.installing import cache_folder

if TYPE_CHECKING:
    from envkit_bridges.libraries import Simulator

# All programs are worth a file: reading one takes some ms, and of small ones there are few. s.
_WORTH_S = 0.0


def cache_dir(path: str | os.PathLike[str] | None = None) -> Path:
    """Keep what is compiled from now on in a folder, and look there before compiling.

    Programs are found again by the same versions on the same kind of machine; whatever else is there
    is left alone. Worker processes that start later use the folder too. Delete it to free the space.

    Args:
        path: the folder, made if need be; by default ``envkit`` in the user's cache folder
            (``$XDG_CACHE_HOME``, else ``~/.cache``).

    Returns:
        The folder.

    Raises:
        ArgumentError: the folder cannot be made or written, or ``path`` is empty.
        ArgumentTypeError: ``path`` is no path.

    Example:
        >>> from envkit import cache_dir
        >>> cache_dir("compiled").name
        'compiled'
    """
    if path is None:
        path = cache_folder()
    folder = as_file("path", path).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ArgumentError(
            f"compiled programs cannot be kept in {str(folder)!r} ({error}). Pass a folder you may write to: "
            "cache_dir(path)."
        ) from error
    for name, value in (
        ("jax_compilation_cache_dir", str(folder)),
        ("jax_persistent_cache_min_compile_time_secs", _WORTH_S),
        ("jax_persistent_cache_min_entry_size_bytes", 0),
    ):
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    compilation_cache.reset_cache()  # JAX opens it once, at the first compilation
    return folder


NOTE_AFTER_S = 2.0
_LOGGER = logging.getLogger("envkit")


def simulator_name(env: Simulator) -> str:
    """Return the name of the class of the innermost env, which a note speaks of."""
    while hasattr(env, "env"):
        env = env.env
    return type(env).__name__


def jit_with_note(function: Callable[..., Any], what: str, **options: Any) -> Callable[..., Any]:
    """Jit ``function`` with the options of `jax.jit`; a compilation of over 2 s is announced as ``what``."""
    note = _Note(what)

    def traced(*args: object) -> Any:
        note.begin()
        return function(*args)

    compiled = jax.jit(traced, **options)

    def call(*args: object) -> Any:
        try:
            return compiled(*args)
        finally:
            if note.is_open:
                note.end()

    call.lower = compiled.lower  # type: ignore[attr-defined]
    return call


class _Note:
    """One compilation at a time, from its trace until the call returns."""

    def __init__(self, what: str):
        self.is_open = False
        self._what = what

    def begin(self) -> None:
        if self.is_open:  # traced again within the same call, as for a gradient
            return
        self.is_open, self._said, self._since = True, False, time.monotonic()
        self._before = _Loads.counts()
        self._timer = threading.Timer(NOTE_AFTER_S, self._say)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        self.is_open = False
        self._timer.cancel()
        if self._said:
            hits, misses = (
                now - was for now, was in zip(_Loads.counts(), self._before, strict=True)
            )
            done = (
                "loading %s from disk took %.1f s"
                if hits and not misses
                else "compiling %s took %.1f s"
            )
            _LOGGER.warning(done, self._what, time.monotonic() - self._since)

    def _say(self) -> None:
        self._said = True
        kept = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        if kept:
            _LOGGER.warning(
                "preparing %s ... (once for each batch size; compiled and kept on disk, or loaded from there)",
                self._what,
            )
        else:
            _LOGGER.warning(
                "compiling %s ... (once for each batch size; envkit.cache_dir() keeps it for the next process)",
                self._what,
            )


class _Loads(threading.local):
    """How many programs this thread has found in JAX's cache on disk, and how many not."""

    hits = misses = 0

    @staticmethod
    def counts() -> tuple[int, int]:
        return _loads.hits, _loads.misses

    def count(self, event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self.hits += 1
        elif event == "/jax/compilation_cache/cache_misses":
            self.misses += 1


_loads = _Loads()
jax.monitoring.register_event_listener(_loads.count)
