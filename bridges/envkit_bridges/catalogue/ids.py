"""What an id means: which library, which env in it, and what to say of an id that means nothing.

envkit's own worlds are those of the table `envkit.installing.LIBRARIES`. Somebody else's package adds one through an
entry point, see `register`.

Conventions
    world  a library of envs behind one name: the part of an id before its first "/".
    kind   "stateless": one env steps any batch, so many envs are one env with a batch size. "stateful": one env is
           one simulator, so many envs are a pool. "batched": the library itself steps many.
    id     "library/name"; the name may have more "/". The library may be left out where one that is installed
           alone has the env.
    name   what a library calls an env.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache, partial
from importlib import import_module, metadata, util
from typing import TYPE_CHECKING, Any, Protocol

from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BrokenLibraryError,
    EnvkitError,
    MissingLibraryError,
)
from envkit.installing import DISTRIBUTION, LIBRARIES, Kind, install_hint
from envkit_bridges.libraries import explained, quietly, require

if TYPE_CHECKING:
    from envkit.env.base import EnvBase


class WorldModule(Protocol):
    """What a world is made of: a module, or any object, with these functions.

    ``fetching_names()``, where there is one, lists those of its envs that need the network when they are built.

    A module whose envs are built in pools, when the pool starts, may have two checks.
    ``require_env(name)`` raises an ArgumentError, with the closest names, where there is no such env.
    ``require_keywords(name, given)`` raises an OptionError where ``build`` would refuse a keyword.

    One that ends episodes by a limit of steps, and has no keyword for it that `World.limit` could name, may have
    ``lasting(name, steps, given)``: the keywords by which no episode is cut before ``steps``, or with None at all.
    """

    def env_names(self) -> Collection[str]:
        """List the envs that can be made here. Downloads and builds nothing."""
        ...

    def build(self, name: str, **kwargs: Any) -> EnvBase:
        """Build one env; a "batched" world takes ``num_workers``, a "stateless" one ``batch_size``.

        A module of envkit without this function has the class `World.env`, which takes the same arguments.
        """
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
        env: class of the module that builds an env by name, where there is no function for it.
    """

    name: str
    kind: Kind
    load: Callable[[], Any]
    library: str | None = None
    distribution: str = DISTRIBUTION
    limit: str | None = None
    env: str = ""

    @property
    def extra(self) -> str | None:
        """The extra of envkit that brings the library."""
        return None if self.library is None else LIBRARIES[self.library].extra

    @property
    def version(self) -> str | None:
        """The version of the library; None where it is not installed."""
        if self.library is not None and util.find_spec(self.library) is None:
            return None
        return metadata.version(self.distribution)

    @cached_property
    def module(self) -> WorldModule:
        """Module that names and builds its envs.

        Raises:
            MissingLibraryError, BrokenLibraryError: (an ImportError) the library that it depends on is not installed,
                or fails.
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


@lru_cache(maxsize=1)
def own_worlds() -> Mapping[str, World]:
    """Return envkit's own worlds by name: its own envs, and the libraries of the table."""
    worlds = [World("envkit", "stateless", partial(import_module, f"{_ADAPTERS}.native"))]
    for library in LIBRARIES.values():
        if library.world is not None:
            load = partial(import_module, f"{_ADAPTERS}.{library.adapter}")
            world = World(
                library.world,
                library.kind,
                load,
                library=library.module,
                distribution=library.distribution,
                limit=library.limit,
                env=library.env,
            )
            worlds.append(world)
    return {world.name: world for world in worlds}


_ADAPTERS = "envkit_bridges.worlds"


Factory = Callable[..., "EnvBase"]


class EnvId(str):
    """An id of `list_envs`: a string that also says what it takes.

    Attributes:
        needs_network: building the env fetches something.
    """

    needs_network: bool

    def __new__(cls, text: str, *, needs_network: bool = False) -> EnvId:
        id = super().__new__(cls, text)
        id.needs_network = needs_network
        return id


@dataclass(frozen=True)
class WorldInfo:
    """One world, as it is here.

    Attributes:
        name: in front of its ids.
        kind: "stateless", "stateful" or "batched", see `make`.
        library: what brings its envs.
        version: of the library; None where it is not installed.
        extra: ``pip install -e '.[extra]'`` installs it, run in a clone of envkit; None where nothing has to be.
        num_envs: how many can be made here; None where the library cannot be read.
        problem: why it cannot.
    """

    name: str
    kind: Kind
    library: str
    version: str | None
    extra: str | None
    num_envs: int | None
    problem: str | None = None


def _require_id(id: object) -> None:
    if not isinstance(id, str):
        raise ArgumentTypeError(
            f"id is {id!r}, of type {type(id).__name__}, but must be a string. Pass 'brax/ant', for example."
        )


@dataclass(frozen=True)
class EnvEntry:
    """The environment that an id names.

    Attributes:
        build: makes one env by keywords.
        kind: see `table`.
        limit: keyword that truncates its episodes, if it has one.
        world, name: the parts of the id; None for one that was registered by itself.
        require_keywords: checks the keywords of ``build`` without making an env; None where the world cannot.
        lasting: gives the keywords by which the library cuts no episode sooner; None where it never does.
    """

    build: Factory
    kind: Kind
    limit: str | None = None
    world: str | None = None
    name: str | None = None
    require_keywords: Callable[[Mapping[str, Any]], None] | None = None
    lasting: Callable[[int | None, Mapping[str, Any]], dict[str, Any]] | None = None


# ------------------------------------------------------------------------------------- registered ids


_REGISTERED: dict[str, EnvEntry] = {}


def register(id: str, factory: Factory, *, kind: Kind = "stateful") -> None:
    """Register an env of one's own under an id, by which `make` builds it and `list_envs` lists it.

    Args:
        id: "library/name", with a library name that no other package has.
        factory: makes one env; takes the keywords that `make` is given. A "stateless" one takes ``batch_size`` too.
        kind: "stateful" (many envs are a pool of the factory's) or "stateless" (one env that steps any batch).

    Registered in this process: pools get the factory itself, by value, not the id. A package whose ids are to be
    known without a call has an entry point in the group ``envkit.worlds``: a callable that gives an object with
    ``env_names()`` and ``build(name, **kwargs)``, and where needed ``fetching_names()`` and ``kind``.

    Raises:
        ArgumentTypeError: (a TypeError) the factory cannot be called.
        ArgumentError: (a ValueError) the id names no library, or one that envkit has already, it is taken, or ``kind`` is
            another.

    Example:
        >>> from envkit import GymEnv, make, register
        >>> def short(**kwargs):
        ...     return GymEnv("CartPole-v1", max_episode_steps=5, **kwargs)
        >>> register("lab/short", short)
        >>> env = make("lab/short")
        >>> env.rollout(10)["next", "truncated"].flatten()
        tensor([False, False, False, False,  True])
        >>> env.close()
    """
    _require_id(id)
    if not callable(factory):
        raise ArgumentTypeError(
            f"the factory of {id!r} is {factory!r}, of type {type(factory).__name__}, but must be callable. Pass a "
            "function that makes an env, or its class."
        )
    world, _, name = id.partition("/")
    if not (world and name):
        raise ArgumentError(
            f"id is {id!r}, but must have the form 'library/name'. Pass 'lab/Arm-v0', for example."
        )
    if world in own_worlds():
        raise ArgumentError(
            f"id is {id!r}, but {world!r} is a library that envkit has already. Choose another name in front of the '/'."
        )
    if id in _REGISTERED:
        raise ArgumentError(f"{id!r} is registered already. Choose another id.")
    if kind not in ("stateful", "stateless"):
        raise ArgumentError(
            f"kind is {kind!r}, but must be 'stateful' or 'stateless'. Pass one of these."
        )
    _REGISTERED[id] = EnvEntry(factory, kind)


@lru_cache(maxsize=1)
def _all_worlds() -> Mapping[str, World]:
    """Return envkit's worlds and those of installed packages, whose entry points are imported when they are needed."""
    worlds = dict(own_worlds())
    for point in metadata.entry_points(group="envkit.worlds"):
        owner = point.dist.name if point.dist else point.module
        worlds.setdefault(
            point.name,
            World(point.name, "stateful", lambda point=point: point.load()(), distribution=owner),
        )
    return worlds


# ---------------------------------------------------------------------------------------- finding


def find(id: str) -> EnvEntry:
    """Return what an id means.

    Raises:
        ArgumentTypeError: (a TypeError) it is no string.
        ArgumentError: (a ValueError) nothing, or something in several libraries.
        MissingLibraryError, BrokenLibraryError: (an ImportError) of the library that it names.
    """
    _require_id(id)
    if id in _REGISTERED:
        return _REGISTERED[id]
    first, _, name = id.partition("/")
    if name and first in _all_worlds():
        return _in_world(_all_worlds()[first], name)
    return _anywhere(id)


def _in_world(world: World, name: str) -> EnvEntry:
    if world.library is not None:
        with quietly():
            require(world.library)
    module = world.module
    if (require_env := getattr(module, "require_env", None)) is not None:
        require_env(name)  # a pool would say so when it starts
    kind: Kind = getattr(module, "kind", world.kind)
    require_keywords = getattr(module, "require_keywords", None)
    check = None if require_keywords is None else partial(require_keywords, name)
    lasting = getattr(module, "lasting", None)
    lasts = None if lasting is None else partial(lasting, name)
    build = getattr(module, "build", None) or getattr(module, world.env)
    return EnvEntry(partial(build, name), kind, world.limit, world.name, name, check, lasts)


def _anywhere(name: str) -> EnvEntry:
    """Find a name without a library in every library that is installed."""
    readable = {world.name: names for world in _all_worlds().values() if (names := _names(world))}
    holders = [world for world, names in readable.items() if name in names]
    registered = [id for id in _REGISTERED if id.partition("/")[2] == name]
    candidates = [*(f"{world}/{name}" for world in holders), *registered]
    if len(candidates) > 1:
        raise ArgumentError(
            f"{name!r} is in several libraries. Say which one: {', '.join(map(repr, candidates))}."
        )
    if holders:
        return _in_world(_all_worlds()[holders[0]], name)
    if registered:
        return _REGISTERED[registered[0]]
    raise ArgumentError(_unknown(name, readable))


def _names(world: World) -> frozenset[str]:
    """List the envs of a world; none where its library is missing or broken."""
    try:
        return frozenset(world.module.env_names()) if world.version else frozenset()
    except (BrokenLibraryError, MissingLibraryError):
        return frozenset()


def _unknown(id: str, readable: Mapping[str, frozenset[str]]) -> str:
    listed = sorted(f"{world}/{name}" for world, names in readable.items() for name in names)
    asked, library = _without_version(id).rpartition("/")[2], id.partition("/")[0]
    one_version = {_without_version(one): one for one in listed}
    same = [one for name, one in one_version.items() if name.rpartition("/")[2] == asked]
    same.sort(key=lambda one: (_all_worlds()[one.partition("/")[0]].library != library, len(one)))
    short = {one.rpartition("/")[2].lower(): one for one in reversed(listed)}
    near = dict.fromkeys(same + get_close_matches(id, listed, 3))
    near |= dict.fromkeys(short[one] for one in get_close_matches(asked, short, 3))
    sentences = [f"there is no env {id!r} here."]
    if near:
        sentences.append(f"Did you mean {' or '.join(map(repr, list(near)[:3]))}?")
    sentences.append("envkit.list_envs() lists what can be made.")
    missing = [world.extra for world in _all_worlds().values() if world.name not in readable]
    if not same and (extras := [extra for extra in missing if extra]):
        sentences.append(f"Libraries that are not installed may have it. {install_hint(*extras)}")
    return " ".join(sentences)


def _without_version(id: str) -> str:
    return re.sub(r"-v\d+$", "", id.lower())


# ---------------------------------------------------------------------------------------- listing


def list_envs(pattern: str | None = None, world: str | None = None) -> list[EnvId]:
    """List the ids that `make` takes here, sorted.

    Args:
        pattern: part of an id, in any case, or with ``*``, ``?`` or ``[]`` a shell pattern for the whole of it.
        world: of this library only, by its name in ids.

    Returns:
        Strings; ``needs_network`` of each says whether building it fetches something. No file is fetched now.
        Libraries that are not installed are left out (`worlds` names them).

    Raises:
        ArgumentTypeError: (a TypeError) an argument is no string.
        ArgumentError: (a ValueError) there is no such library.
        MissingLibraryError, BrokenLibraryError: (an ImportError) of ``world``.

    Example:
        >>> from envkit import list_envs
        >>> list_envs("gym/CartPole*", world="gym")
        ['gym/CartPole-v0', 'gym/CartPole-v1']
    """
    _require_text("pattern", pattern, "a part of ids, as 'cartpole'")
    _require_text("world", world, "the name of one, as 'gym'")
    names = world_names()
    if world is not None and world not in names:
        near = get_close_matches(world, names, 1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(f"there is no library {world!r}.{guess} There are: {', '.join(names)}.")
    if world is None:
        listed = [id for one in _all_worlds().values() for id in _ids(one, strict=False)]
    else:
        listed = list(_ids(_all_worlds()[world], strict=True)) if world in _all_worlds() else []
    listed += [EnvId(id) for id in _REGISTERED if world in (None, id.partition("/")[0])]
    return sorted(id for id in listed if pattern is None or _matches(id, pattern))


def _require_text(name: str, value: object, meant: str) -> None:
    if value is not None and not isinstance(value, str):
        raise ArgumentTypeError(
            f"{name} is {value!r}, of type {type(value).__name__}, but must be a string or None. Pass {meant}, or leave "
            "it out for all."
        )


def _ids(world: World, *, strict: bool) -> Iterator[EnvId]:
    """Yield the ids of one world; unless ``strict``, none where its library is missing or broken."""
    names = _names(world)
    if strict and not names:
        if world.library is not None:
            require(world.library)
        names = frozenset(world.module.env_names())
    fetching = getattr(world.module, "fetching_names", frozenset)() if names else ()
    for name in names:
        yield EnvId(f"{world.name}/{name}", needs_network=name in fetching)


def _matches(id: str, pattern: str) -> bool:
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatch(id, pattern)
    return pattern.lower() in id.lower()


def world_names() -> list[str]:
    """List all libraries as ids name them, installed or not, sorted; nothing is imported for it.

    Example:
        >>> from envkit import world_names
        >>> {"brax", "gym", "pgx"} <= set(world_names())
        True
    """
    return sorted({*_all_worlds(), *(id.partition("/")[0] for id in _REGISTERED)})


def worlds() -> list[WorldInfo]:
    """Return for every library whether it is installed, and how many envs it has here.

    Example:
        >>> from envkit import worlds
        >>> gym = next(world for world in worlds() if world.name == "gym")
        >>> gym.kind, gym.library, gym.extra
        ('stateful', 'gymnasium', 'gym')
    """
    return [_described(world) for world in _all_worlds().values()]


def _described(world: World) -> WorldInfo:
    count, problem = None, None
    try:
        if world.version is not None:
            count = len(world.module.env_names())
    except ImportError as error:
        problem = str(error)
    kind: Kind = getattr(world.module, "kind", world.kind) if count is not None else world.kind
    library = world.library or world.distribution
    return WorldInfo(world.name, kind, library, world.version, world.extra, count, problem)
