"""EnvPool's envs as a world: their names, and a pool of one of them."""

from __future__ import annotations

from typing import Any

from envkit.data.arguments import known_to
from envkit_bridges.worlds.envpool.env import MultiThreadedEnv
from envkit_bridges.worlds.envpool.library import import_envpool, require_name

__all__ = ["build", "env_names", "fetching_names"]


def env_names() -> list[str]:
    """List what the library has registered; the machine may lack what a few of them need."""
    return sorted(import_envpool().list_all_envs())


def fetching_names() -> frozenset[str]:
    """None: what its envs need comes with the package."""
    return frozenset()


def build(name: str, *, num_workers: int, **kwargs: Any) -> MultiThreadedEnv:
    """Make a pool of ``num_workers`` of them.

    Args:
        name: id of the library.
        num_workers: number of envs.
        **kwargs: what `MultiThreadedEnv` takes; what it does not know is among its ``create_env_kwargs``.

    Raises:
        ArgumentError: (a ValueError) the library has no env of this name.
        OptionError: (a TypeError) it does not know a keyword.
    """
    require_name(name)
    own = {name: kwargs.pop(name) for name in known_to(MultiThreadedEnv) or () if name in kwargs}
    of_env = {**(own.pop("create_env_kwargs", None) or {}), **kwargs}
    return MultiThreadedEnv(num_workers, name, create_env_kwargs=of_env, **own)
