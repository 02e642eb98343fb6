"""What is kept of the info dictionaries of gym-style simulators.

A reader is any callable ``reader(info, td)`` that writes into ``td``, called after each reset and
step. This module holds the standard one; it does not know simulators.

Conventions
    info       dict of a simulator's own making; nothing about it is promised.
    info_spec  Composite of what a reader writes, shape of the env's batch size.
    private    names that begin with an underscore. Vector envs keep masks under such names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.data.paths import Path, as_path
from envkit.errors import ArgumentError, EncodingError
from envkit.specs import Composite, TensorSpec, Unbounded

__all__ = ["default_info_dict_reader"]

_SCALARS: dict[str, tuple[type, ...]] = {
    "bool": (bool, np.bool_),
    "float32": (np.float32,),
    "float64": (float, np.float64),
    "int64": (int, np.int64),
}
"""Classes of numbers that an array of a dtype holds as they are."""


class default_info_dict_reader:
    """Copy entries of the info dictionary into the TensorDict.

    Args:
        keys: names to copy; None takes all that the info of a first step holds.
        spec: what describes them: a Composite, a dict, or one spec for each of ``keys``. Given keys
            without one are described by ``Unbounded(())``, or by what an env shows in a first step where
            that is no single number; found ones by what was found.
        ignore_private: leave out names that begin with an underscore, given ones included.

    Entries that an info lacks, most often that of a reset, are written as zeros. Of the infos that
    are found, nested dicts become nested entries; what is neither number nor array is left out.

    Raises:
        ArgumentError: the specs do not belong to the keys.
    """

    def __init__(
        self,
        keys: Iterable[str] | None = None,
        spec: Composite | Mapping[str, TensorSpec] | Sequence[TensorSpec] | None = None,
        ignore_private: bool = True,
    ):
        self.ignore_private = ignore_private
        names = None if keys is None else [keys] if isinstance(keys, str) else list(keys)
        known = _given_specs(names, spec)
        public = [name for name in names or () if self._is_public(name)]
        self._assumed = {name for name in public if name not in known.keys()}
        self._spec: Composite | None = known if spec is not None else None
        if names is not None:
            number = Unbounded(tuple(known.shape))
            found = {name: number if name in self._assumed else known[name] for name in public}
            self._spec = Composite(found, shape=known.shape)

    def _is_public(self, name: str) -> bool:
        return not (self.ignore_private and name.startswith("_"))

    @property
    def info_spec(self) -> Composite:
        """What describes the entries; empty until they are known."""
        return Composite() if self._spec is None else self._spec

    @property
    def is_complete(self) -> bool:
        """Whether it is known what will be copied."""
        return self._spec is not None and not self._assumed

    def complete(self, info: Mapping[str, Any], batch_size: Sequence[int] = ()) -> None:
        """Find out from the info of one step, if need be, what to copy.

        Args:
            info: of a step of the env that is read.
            batch_size: of that env; specs that were given for one env are expanded to it.
        """
        batch = torch.Size(batch_size)
        found = self._described(info, batch)
        if self._spec is None:
            self._spec = found
            return
        if self._spec.shape != batch:
            self._spec = self._spec.expand(batch)
        for name in self._assumed & set(found.keys()):
            if found[name].shape != batch:
                self._spec[name] = found[name]
        self._assumed = set()

    def _described(self, info: Mapping[str, Any], batch: torch.Size) -> Composite:
        found = Composite(shape=batch)
        for name, value in info.items():
            if not isinstance(name, str) or not self._is_public(name):
                continue
            if isinstance(value, Mapping):
                below = self._described(value, batch)
                if len(below):
                    found[name] = below
            elif (array := _as_array(value)) is not None and array.shape[: len(batch)] == batch:
                found[name] = Unbounded(array.shape, dtype=torch.from_numpy(array).dtype)
        return found

    def __call__(self, info: Mapping[str, Any], tensordict: TensorDictBase) -> TensorDictBase:
        """Write the entries of ``info`` into ``tensordict``, which is returned.

        A reader that was not told what to copy finds it out at the first info that holds anything.

        Raises:
            EncodingError: a value does not fit its spec.
        """
        if self._spec is None:
            if not info:
                return tensordict
            self.complete(info, tensordict.batch_size)
        return tensordict.update(_read(info, self.info_spec, ()))

    def writer(self, rows: Mapping[Path, np.ndarray]) -> Callable[[Mapping[str, Any]], None]:
        """Give the function that writes the entries of an info into the rows of one env.

        It writes what a call of the reader gives, and raises what that raises. The reader is complete.
        """
        puts = [
            (as_path(key), _put_into(rows[as_path(key)], leaf, as_path(key)))
            for key, leaf in self.info_spec.items(True, True)
        ]

        def write(info: Mapping[str, Any]) -> None:
            for path, put in puts:
                value: Any = info
                for name in path:
                    value = value.get(name) if isinstance(value, Mapping) else None
                put(value)

        return write


def _put_into(row: np.ndarray, leaf: TensorSpec, path: Path) -> Callable[[Any], None]:
    """Give the function that writes one value; None is written as zeros."""
    zero = leaf.zero().numpy()
    is_any = isinstance(leaf, Unbounded)
    numbers = _SCALARS.get(row.dtype.name, ()) if is_any and not row.shape else ()

    def put(value: Any) -> None:
        if value is None:
            row[...] = zero
            return
        if value.__class__ in numbers:
            try:
                row[...] = value
                return
            except OverflowError:  # an int of more than 64 bits, which is told below
                row[...] = zero
        row[...] = _encoded(value, leaf, path).numpy()

    return put


def _read(info: Mapping[str, Any], spec: Composite, path: tuple[str, ...]) -> dict[str, Any]:
    entries = {}
    for name, leaf in spec.items():
        value = info.get(name)
        if isinstance(leaf, Composite):
            below = value if isinstance(value, Mapping) else {}
            entries[name] = _read(below, leaf, (*path, name))
        elif value is None:
            entries[name] = leaf.zero()
        else:
            entries[name] = _encoded(value, leaf, (*path, name))
    return entries


def _encoded(value: Any, leaf: TensorSpec, path: tuple[str, ...]) -> Any:
    try:
        return leaf.encode(value)
    except (EncodingError, TypeError, ValueError) as error:
        raise EncodingError(
            f"the info {'.'.join(path)!r} is {value!r}, which does not fit its spec {leaf}: {error} "
            "Name only keys whose values keep their shape, or declare another spec."
        ) from error


def _as_array(value: Any) -> np.ndarray | None:
    """Give numbers, arrays and tensors as an array that torch can hold; None for the rest."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, bool | int | float | np.generic) or hasattr(value, "__array__"):
        array = np.asarray(value)
        return array.copy() if array.dtype.kind in "biufc" else None
    return None


def _given_specs(names: list[str] | None, spec: Any) -> Composite:
    """Give the specs that were passed, by name.

    Raises:
        ArgumentError: they do not belong to the names.
    """
    if spec is None:
        known = Composite()
    elif isinstance(spec, Composite):
        known = spec
    elif isinstance(spec, Mapping):
        known = Composite(dict(spec))
    else:
        specs = list(spec)
        if names is None or len(names) != len(specs):
            raise ArgumentError(
                f"{len(specs)} info specs were given for the keys {names}. Pass one for each key, "
                "or a dict of specs by key."
            )
        known = Composite(dict(zip(names, specs, strict=True)))
    if names is not None and len(known) and not set(names) & set(known.keys()):
        raise ArgumentError(
            f"the info specs are for {sorted(known.keys())}, but the keys are {names}. Give specs of these "
            "keys, or leave them out."
        )
    return known
