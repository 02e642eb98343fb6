"""Which entries and spaces an adapter shows, and how their values lie in the data of the env.

Where the rows are environments of Gymnasium, a space is the simulator's own: its object, with its generator and its
order of keys. Entries that a transform has written, and other envs, have spaces made from specs.

Conventions
    shown   observation entries that are neither private, nor infos of the env, nor moved to them.
    specs   of one row, by path. They say what the data holds.
    values  of all rows, as the space has them with the rows in front.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from envkit.data.paths import Key, Path, as_key, as_path, leaf_paths
from envkit.env.base import EnvBase
from envkit.errors import ArgumentTypeError, InputError, MissingKeyError
from envkit.specs import Categorical, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from envkit_bridges.gym.backend import GymSpace
from envkit_bridges.gym.codecs import Codec, Leaf, asked_space, shown_space

Read = Callable[[Path], Any]
Write = Callable[[Path, Any, GymSpace, Leaf | None], Any]
Part = Callable[[Any, str | int], Any]


def private_entries(env: EnvBase) -> frozenset[Path]:
    """Return the observations that no adapter shows: the state of a stateless env, and private memory of transforms."""
    state = {path for path in leaf_paths(env.full_state_spec) if path[0] == "state"}
    memory = {path for path in env._facts.bookkeeping if any(name.startswith("_") for name in path)}
    return frozenset(state | memory)


def shown_and_infos(
    paths: Collection[Path], infos_of_env: Set[Path], info_keys: Iterable[Key] | str | None
) -> tuple[list[Path], list[Path]]:
    """Divide observation entries into those that are shown and those that are infos, both sorted.

    Args:
        paths: the entries.
        infos_of_env: those that are infos of the env; others are passed over.
        info_keys: observation entries that are infos, too, or the name of one; that of a node takes along all that is
            below it.

    Raises:
        ArgumentTypeError: ``info_keys`` are no keys.
        MissingKeyError: there is no observation of that name.
    """
    moved = [as_path(key) for key in _listed(info_keys)]
    for path in moved:
        if not any(_is_below(entry, path) for entry in paths):
            raise MissingKeyError(
                f"info_keys names {as_key(path)!r}, but the observations of the env are "
                f"{[as_key(entry) for entry in paths]}. Name one of them, or a node above."
            )
    infos = sorted(
        path
        for path in paths
        if path in infos_of_env or any(_is_below(path, above) for above in moved)
    )
    return sorted(set(paths) - set(infos)), infos


def _listed(keys: Iterable[Key] | str | None) -> list[Key]:
    if keys is None:
        return []
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, Iterable):
        raise ArgumentTypeError(
            f"info_keys is {keys!r}, of type {type(keys).__name__}, but must be a list of keys. Pass "
            'the observations that are infos: info_keys=["step_count"].'
        )
    return list(keys)


def _is_below(path: Path, above: Path) -> bool:
    return path[: len(above)] == above


class Shown(ABC):
    """A space, and the entries of the data that its values are made of.

    Attributes:
        space: of one row.
        paths: the entries, in the order of the space.
    """

    space: GymSpace
    paths: list[Path]

    @abstractmethod
    def values(self, read: Read) -> Any:
        """Return the values; ``read`` returns an entry, as memory of the caller."""

    @abstractmethod
    def write(self, values: Any, write: Write, part: Part) -> None:
        """Call ``write`` with each entry, its values, their space and its leaf, None where the space is made from a spec.

        ``part`` takes the values of a member out of those of a Dict or a Tuple.
        """


class Entry(Shown):
    """One entry, whose space is made from its spec."""

    def __init__(self, path: Path, space: GymSpace):
        self.paths, self.space = [path], space

    def values(self, read: Read) -> Any:
        return read(self.paths[0])

    def write(self, values: Any, write: Write, part: Part) -> None:
        write(self.paths[0], values, self.space, None)


class Simulated(Shown):
    """The space of a simulator, or a member of it."""

    def __init__(self, codec: Codec):
        self.codec, self.space, self.paths = codec, codec.space, list(codec.leaves)

    def values(self, read: Read) -> Any:
        return self.codec.decode_arrays({path: read(path) for path in self.paths})

    def write(self, values: Any, write: Write, part: Part) -> None:
        _write(self.codec, values, write, part)


def _write(codec: Codec, values: Any, write: Write, part: Part) -> None:
    if codec.members is None:
        [(path, (leaf, _))] = codec.leaves.items()
        write(path, values, codec.space, leaf)
        return
    for name, member in codec.members.items():
        _write(member, part(values, name), write, part)


class Branch(Shown):
    """A Dict of several parts.

    Args:
        parts: by name, in the order of the Dict.
        spaces: module of spaces of the gym library.
    """

    def __init__(self, parts: Mapping[str, Shown], spaces: ModuleType):
        self.parts = parts
        self.space = spaces.Dict(OrderedDict((name, part.space) for name, part in parts.items()))
        self.paths = [path for part in parts.values() for path in part.paths]

    def values(self, read: Read) -> Any:
        return {name: part.values(read) for name, part in self.parts.items()}

    def write(self, values: Any, write: Write, part: Part) -> None:
        for name, shown in self.parts.items():
            shown.write(part(values, name), write, part)


def shown_as(
    codec: Codec | None,
    specs: Mapping[Path, TensorSpec],
    spaces: ModuleType,
    *,
    names: Mapping[Path, Path],
    root: Literal["observation", "action"],
) -> Shown:
    """Find how entries are shown.

    Args:
        codec: of the simulator's space; None where there is no simulator of Gymnasium.
        specs: of the entries that are shown.
        spaces: module of spaces of the gym library.
        names: of entries that are not the simulator's; () is the only one.
        root: what is shown; also the name of the simulator's space beside others, if it is no Dict.

    Returns:
        The simulator's own space if the data holds all of it as the simulator gave it, and nothing else. Otherwise a
        Dict, the members of the simulator's Dict first; or the only entry.
    """

    def entry(path: Path) -> Entry:
        make_space = shown_space if root == "observation" else asked_space
        return Entry(path, make_space(specs[path], spaces=spaces))

    def left_of(codec: Codec) -> Shown | None:
        """Return what the data holds of a space of the simulator; None if it holds nothing of it."""
        is_own = codec.has_rows and all(
            path in specs and specs[path] == leaf.spec.to(specs[path].device)
            for path, (leaf, _) in codec.leaves.items()
        )
        if is_own and codec.leaves:
            return Simulated(codec)
        if codec.members is None:
            [path] = codec.leaves
            return entry(path) if path in specs else None
        parts = members_of(codec)
        return closed(parts) if parts else None

    def members_of(codec: Codec) -> dict[str, Any]:
        parts = ((str(name), left_of(member)) for name, member in (codec.members or {}).items())
        return {name: part for name, part in parts if part is not None}

    def closed(tree: dict[str, Any]) -> Branch:
        parts = {
            name: closed(part) if isinstance(part, dict) else part for name, part in tree.items()
        }
        return Branch(parts, spaces)

    def opened(part: Any) -> dict[str, Any]:
        if isinstance(part, Simulated):
            return members_of(part.codec)
        return dict(part.parts) if isinstance(part, Branch) else part

    of_codec = None if codec is None else left_of(codec)
    others = sorted(set(specs) - set(() if of_codec is None else of_codec.paths))
    if of_codec is not None and not others:
        return of_codec
    if names[others[0]] == ():
        return entry(others[0])
    tree: dict[str, Any] = {}
    if codec is not None and of_codec is not None:
        is_dict = isinstance(of_codec.space, spaces.Dict)
        first = {path[0] for path in of_codec.paths}
        lies_below = first == {root} and root not in (codec.members or ())
        is_whole = not is_dict or (lies_below and names[others[0]] == others[0])
        tree = {root: of_codec} if is_whole else opened(of_codec)
    for path in others:
        *nodes, last = names[path]
        node = tree
        for name in nodes:
            node[name] = opened(node.get(name, {}))
            node = node[name]
        node[last] = entry(path)
    return closed(tree)


def part_of(action: Any, name: str | int) -> Any:
    """Return one of several actions from a dict or a tuple of them.

    Raises:
        InputError: (a ValueError) it is not there.
    """
    if isinstance(name, int):
        if not isinstance(action, tuple | list) or name >= len(action):
            raise InputError(
                f"the actions are {type(action).__name__}, but must be a tuple with a part {name}. Pass a tuple as "
                "action_space.sample() gives it."
            )
        return action[name]
    if not isinstance(action, Mapping) or name not in action:
        given = sorted(action) if isinstance(action, Mapping) else type(action).__name__
        raise InputError(
            f"the actions hold {given}, but must have {name!r}. Pass a dict as action_space.sample() gives it."
        )
    return action[name]


def require_whole(values: Any, key: Key, space: GymSpace) -> None:
    """Check that numbers of options are integers.

    Raises:
        InputError: (a ValueError) they are not.
    """
    if isinstance(values, tuple) or not np.issubdtype(space.dtype, np.integer):
        return
    values = values if isinstance(values, torch.Tensor) else torch.as_tensor(np.asarray(values))
    if values.is_floating_point() or values.is_complex():
        raise InputError(
            f"{key!r} has dtype {values.dtype}, but numbers options of {space}. Pass integers."
        )


def as_tensor(value: Any, key: Key, spec: TensorSpec) -> torch.Tensor:
    """Return an action of numbers, an array or a tensor as a tensor.

    Raises:
        ArgumentTypeError: it is none of these.
    """
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:  # no numbers, or rows of unlike lengths
        raise ArgumentTypeError(
            f"{key!r} is {value!r}, of type {type(value).__name__}, but its spec is {spec}. Pass "
            "numbers, an array or a tensor."
        ) from error


def spelled(value: torch.Tensor, key: Key, spec: TensorSpec) -> torch.Tensor:
    """Return an action as its spec spells it; of what has its shape, the env decides whether it is one.

    Args:
        value: of the shape of the spec, or what it encodes: e.g. an index for a one-hot action.
        key, spec: of the action.

    Raises:
        InputError: numbers of options are no integers.
    """
    is_whole = not (value.is_floating_point() or value.is_complex())
    if value.shape == spec.shape:
        takes_floats = spec.dtype is not None and spec.dtype.is_floating_point
        return value.to(spec.device, spec.dtype if is_whole and takes_floats else value.dtype)
    if not is_whole and isinstance(spec, Categorical | OneHot | MultiOneHot | MultiCategorical):
        raise InputError(
            f"{key!r} has dtype {value.dtype}, but numbers options of {spec}. Pass integers."
        )
    return spec.encode(value)
