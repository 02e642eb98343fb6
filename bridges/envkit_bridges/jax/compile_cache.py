"""Keep compiled programs on disk, so that the next process need not compile them.

This is JAX's persistent compilation cache with one place and one switch; see
https://docs.jax.dev/en/latest/persistent_compilation_cache.html. It is off until `cache_dir` is called.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from envkit.data.arguments import as_file
from envkit.errors import ArgumentError
from envkit.installing import cache_folder

__all__ = ["cache_dir"]

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
