"""The worlds that envkit knows: one line each, and what their modules offer.

To add a library of envs, write its module in ``bridges/envkit_bridges/worlds`` and a line in `WORLDS`. Somebody else's package adds
a world through an entry point, see `registered`.

Conventions
    world  a library of envs behind one name: the part of an id before its first "/".
    kind   "stateless": one env steps any batch, so many envs are one env with a batch size. "stateful": one env is
           one simulator, so many envs are a pool. "batched": the library itself steps many.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import metadata, util
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from envkit.errors import BrokenLibraryError, EnvkitError
from envkit.installing import DISTRIBUTION
from envkit_bridges.libraries import LIBRARIES, explained

if TYPE_CHECKING:  # torch would be the longest part of naming the worlds
    from envkit.env.base import EnvBase

__all__ = ["WORLDS", "Kind", "World", "WorldModule"]

Kind = Literal["stateless", "stateful", "batched"]


class WorldModule(Protocol):
    """What a world is made of: a module, or any object, with these functions.

    One whose envs are made many as pools, which build them only when they start, may also have
    ``require_env(name)``, which raises an ArgumentError, with the closest names, where there is no such env, and
    ``require_keywords(name, given)``, which raises an OptionError where ``build`` would refuse a keyword.
    """

    def env_names(self) -> Collection[str]:
        """Name the envs that can be made here. Downloads and builds nothing."""
        ...

    def fetching_names(self) -> Collection[str]:
        """Name those of them that need the network when they are built."""
        ...

    def build(self, name: str, **kwargs: Any) -> EnvBase:
        """Make one env; a "batched" world takes ``num_workers``, a "stateless" one ``batch_size``."""
        ...


@dataclass(frozen=True)
class World:
    """A library of envs.

    Attributes:
        name: of the world, in ids.
        kind: see above.
        load: gives its `WorldModule`; the library is imported no sooner than that is asked for names or envs.
        library: what is imported, None where envkit or another package brings the envs itself.
        distribution: what is installed.
        limit: keyword of its envs that truncates episodes after so many steps; None: they have none.
    """

    name: str
    kind: Kind
    load: Callable[[], WorldModule]
    library: str | None = None
    distribution: str = DISTRIBUTION
    limit: str | None = None

    @property
    def extra(self) -> str | None:
        """The extra of envkit that brings the library."""
        return None if self.library is None else LIBRARIES[self.library]

    @property
    def version(self) -> str | None:
        """The version of the library; None where it is not installed."""
        if self.library is not None and util.find_spec(self.library) is None:
            return None
        return metadata.version(self.distribution)

    @cached_property
    def module(self) -> WorldModule:
        """What names and builds its envs.

        Raises:
            MissingLibraryError, BrokenLibraryError: (an ImportError) what it stands on is not installed, or fails.
        """
        try:
            return self.load()
        except EnvkitError:
            raise
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and explained(error) is not error:
                raise explained(error) from error
            raise BrokenLibraryError(
                f"world {self.name!r}, of {self.distribution}, fails when it is loaded: "
                f"{type(error).__name__}: {error}. Mend or uninstall that package.",
                name=self.distribution,
            ) from error


def _ours(
    name: str,
    kind: Kind,
    home: str,
    library: str | None = None,
    distribution: str | None = None,
    *,
    limit: str | None = None,
) -> World:
    """Describe a world that is a module in ``bridges/envkit_bridges/worlds``."""
    load = partial(importlib.import_module, f"envkit_bridges.worlds.{home}")
    return World(name, kind, load, library, distribution or library or DISTRIBUTION, limit)


WORLDS: Mapping[str, World] = MappingProxyType(
    {
        world.name: world
        for world in (
            _ours("brax", "stateless", "brax", "brax", limit="episode_length"),
            _ours("gymnax", "stateless", "gymnax", "gymnax", limit="episode_length"),
            _ours("jumanji", "stateless", "jumanji", "jumanji", limit="episode_length"),
            _ours("envkit", "stateless", "native"),
            _ours("dm_control", "stateful", "dm_control", "dm_control", "dm-control"),
            _ours("gym", "stateful", "gymnasium", "gymnasium", limit="max_episode_steps"),
            _ours(
                "playground",
                "stateless",
                "playground",
                "mujoco_playground",
                "playground",
                limit="episode_length",
            ),
            _ours("pettingzoo", "stateful", "pettingzoo.env", "pettingzoo"),
            _ours("envpool", "batched", "envpool.by_name", "envpool", limit="max_episode_steps"),
        )
    }
)
