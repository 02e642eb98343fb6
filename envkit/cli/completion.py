"""What a shell is offered for the word under the cursor: ids of envs, worlds, works.

A shell asks anew at each press of Tab, so only the world that the word begins with is read: reading all of them takes
seconds. What cannot be read offers nothing, since a shell has no place for errors.
"""

from __future__ import annotations

import envkit
from envkit.errors import EnvkitError

__all__ = ["ids", "works", "worlds"]


def worlds(incomplete: str) -> list[str]:
    """Name the worlds that begin so."""
    return [name for name in envkit.world_names() if name.startswith(incomplete)]


def ids(incomplete: str) -> list[str]:
    """Give the ids that begin so, or, where several worlds begin so, these with a "/" behind them."""
    world, slash, _ = incomplete.partition("/")
    begun = [world] if slash else worlds(incomplete)
    if len(begun) > 1:
        return [f"{name}/" for name in begun]
    try:
        listed = [id for name in begun for id in envkit.list_envs(world=name)]
    except EnvkitError:
        return []
    return [id for id in listed if id.startswith(incomplete)]


def works(incomplete: str) -> list[str]:
    """Name the works of ``bench`` that begin so."""
    from envkit.cli.bench import WORKS

    return [name for name in WORKS if name.startswith(incomplete)]
