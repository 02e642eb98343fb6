"""Completions that a shell offers for the word under the cursor: ids of envs, libraries, works.

A shell asks again at each press of Tab, and to import the library of a world takes seconds. So only the world that the
word begins with is read, and what it lists is kept in a file until something is installed. A library that cannot be
read offers nothing, since a shell has no place for errors.
"""

from __future__ import annotations

import json
import sysconfig
from contextlib import suppress
from pathlib import Path

import envkit
from envkit.errors import EnvkitError
from envkit.installing import cache_folder

__all__ = ["ids", "works", "worlds"]


def worlds(incomplete: str) -> list[str]:
    """Name the libraries that begin so."""
    return [name for name in envkit.world_names() if name.startswith(incomplete)]


def ids(incomplete: str) -> list[str]:
    """Give the ids that begin so, or, where several libraries begin so, these with a "/" behind them."""
    world, slash, _ = incomplete.partition("/")
    begun = [world] if slash else worlds(incomplete)
    if len(begun) > 1:
        return [f"{name}/" for name in begun]
    try:
        listed = [id for name in begun for id in _ids_of(name)]
    except EnvkitError:
        return []
    return [id for id in listed if id.startswith(incomplete)]


def _ids_of(world: str) -> list[str]:
    """List the ids of a library, as they are kept if nothing was installed since."""
    file = cache_folder() / "ids" / f"{world}.json"
    installed = Path(sysconfig.get_path("purelib")).stat().st_mtime_ns
    of = [envkit.__version__, installed]
    with suppress(OSError, ValueError, LookupError, TypeError):  # there is none, or it is damaged
        kept = json.loads(file.read_text())
        if kept["of"] == of:
            return kept["ids"]
    ids = [str(id) for id in envkit.list_envs(world=world)]
    with suppress(OSError):  # a folder that cannot be written: the next call lists them again
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_suffix(".new")
        whole.write_text(json.dumps({"of": of, "ids": ids}))
        whole.replace(file)
    return ids


def works(incomplete: str) -> list[str]:
    """Name the works of ``bench`` that begin so."""
    from envkit.cli.bench import WORKS

    return [name for name in WORKS if name.startswith(incomplete)]
