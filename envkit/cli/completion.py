"""What a shell is offered for the word under the cursor: ids of envs, worlds, works.

A shell asks anew at each press of Tab, so only the world that the word begins with is read: reading all of them takes
seconds. What cannot be read offers nothing, since a shell has no place for errors.
"""

from __future__ import annotations

from envkit.errors import EnvkitError

__all__ = ["ids", "works", "worlds"]


def worlds(incomplete: str) -> list[str]:
    """Name the worlds that begin so."""
    from bridges.catalogue.ids import world_names

    return [name for name in world_names() if name.startswith(incomplete)]


def ids(incomplete: str) -> list[str]:
    """Give the ids that begin so, or, where several worlds begin so, these with a "/" behind them."""
    from bridges.catalogue.ids import list_envs

    world, slash, _ = incomplete.partition("/")
    begun = [world] if slash else worlds(incomplete)
    if len(begun) > 1:
        return [f"{name}/" for name in begun]
    try:
        return [id for name in begun for id in list_envs(world=name) if id.startswith(incomplete)]
    except EnvkitError:
        return []


def works(incomplete: str) -> list[str]:
    """Name the works of ``bench`` that begin so."""
    from envkit.cli.bench import WORKS

    return [name for name in WORKS if name.startswith(incomplete)]
