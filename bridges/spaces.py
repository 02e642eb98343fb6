"""Gymnasium spaces as envkit specs, and values as rows of NumPy arrays.

A `Codec` decides once, from a space, which leaves it has, how a value is written into
preallocated rows, and how rows become values the simulator takes. Wrappers and worker processes
use the same codec, so no value is converted in two ways.

Conventions
    leaf    one array of a (possibly nested) space, named by its path.
    row     what one environment owns of a leaf: array of the leaf's shape; a 0-d leaf has shape ().
    encoding of discrete spaces: one-hot int64, or 0-based integers when ``categorical``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bridges.libraries import require
from envkit.errors import SpecError
from envkit.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TensorSpec,
    Unbounded,
)
from envkit.specs.stacked import stack

__all__ = ["Codec", "Leaf", "codec_of", "space_of"]

Path = tuple[str, ...]
Rows = Mapping[Path, np.ndarray]


@dataclass(frozen=True)
class Leaf:
    """One array of a space: its spec, how a value enters a row and how rows leave as values."""

    spec: TensorSpec
    write: Callable[[np.ndarray, Any], None]
    read: Callable[[np.ndarray], list[Any]]


@dataclass(frozen=True)
class Codec:
    """Leaves of a space, and the way from their values to a value of the space."""

    space: Any
    leaves: dict[Path, tuple[Leaf, Callable[[Any], Any]]]
    assemble: Callable[[dict[Path, list[Any]]], list[Any]]

    def spec(self, device: Any = None) -> Composite:
        """Give the leaves' specs as one Composite."""
        tree = Composite(device=device)
        for path, (leaf, _) in self.leaves.items():
            tree[path] = leaf.spec.to(device) if device is not None else leaf.spec
        return tree

    def writer(self, rows: Rows) -> Callable[[Any], None]:
        """Give the function that writes a value of the space into one environment's rows."""
        if len(self.leaves) == 1:
            (path, (leaf, pick)), *_ = self.leaves.items()
            if pick is _itself:
                if leaf.write is _copy_in:
                    return partial(rows[path].__setitem__, Ellipsis)  # the fastest way to say it
                return partial(leaf.write, rows[path])
        puts = [(leaf.write, rows[path], pick) for path, (leaf, pick) in self.leaves.items()]

        def write(value: Any) -> None:
            for put, row, pick in puts:
                put(row, pick(value))

        return write

    def read(self, rows: Rows) -> list[Any]:
        """Turn leaves with one leading axis into that many values of the space."""
        return self.assemble(
            {path: leaf.read(rows[path]) for path, (leaf, _) in self.leaves.items()}
        )


# ------------------------------------------------------------------------------- space -> codec


def codec_of(space: Any, *, categorical: bool, key: str) -> Codec:
    """Build the codec of a gymnasium space.

    Args:
        space: any gymnasium space.
        categorical: encode discrete spaces as integers instead of one-hot.
        key: name of the leaf when the space is not a Dict.

    Raises:
        SpecError: the space has no array form (Graph, OneOf, ragged Sequence).
    """
    spaces = require("gymnasium").spaces
    if isinstance(space, spaces.Dict):
        return _dict_codec(space, categorical)
    leaf = _leaf(space, categorical)
    path = (key,)
    return Codec(space, {path: (leaf, _itself)}, lambda values: values[path])


def _dict_codec(space: Any, categorical: bool) -> Codec:
    renames = "observation" not in space.spaces

    def shown(name: str) -> str:
        return "observation" if renames and name == "state" else name

    members = {
        name: codec_of(member, categorical=categorical, key=shown(name))
        for name, member in space.spaces.items()
    }
    leaves: dict[Path, tuple[Leaf, Callable]] = {}
    for name, codec in members.items():
        nested = isinstance(space.spaces[name], require("gymnasium").spaces.Dict)
        for path, (leaf, pick) in codec.leaves.items():
            full = (shown(name), *path) if nested else path
            leaves[full] = (leaf, _then(name, pick))

    def assemble(values: dict[Path, list[Any]]) -> list[Any]:
        parts = {}
        for name, codec in members.items():
            nested = isinstance(space.spaces[name], require("gymnasium").spaces.Dict)
            parts[name] = codec.assemble(
                {path: values[(shown(name), *path) if nested else path] for path in codec.leaves}
            )
        return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]

    return Codec(space, leaves, assemble)


def _itself(value: Any) -> Any:
    return value


def _then(name: str, pick: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return (lambda value: value[name]) if pick is _itself else (lambda value: pick(value[name]))


def _leaf(space: Any, categorical: bool) -> Leaf:
    spaces = require("gymnasium").spaces
    if isinstance(space, spaces.Box):
        return _box(space)
    if isinstance(space, spaces.Discrete):
        return _discrete(space, categorical)
    if isinstance(space, spaces.MultiDiscrete):
        return _multi_discrete(space, categorical)
    if isinstance(space, spaces.MultiBinary):
        shape = tuple(space.shape)
        return Leaf(Binary(shape[-1], shape=shape, dtype=torch.int8), _copy_in, _rows)
    if isinstance(space, spaces.Text):
        return Leaf(NonTensor(shape=()), _refuse, _rows)
    if isinstance(space, spaces.Tuple):
        return _tuple(space, categorical)
    raise SpecError(
        f"the gymnasium space {space} has no array form. Flatten it first with a gymnasium "
        "observation or action wrapper."
    )


def _box(space: Any) -> Leaf:
    dtype = _torch_dtype(space.dtype)
    scalar = space.shape == ()
    shape = (1,) if scalar else tuple(space.shape)
    if dtype == torch.bool:
        spec: TensorSpec = Categorical(2, shape=shape, dtype=dtype)
    elif _is_unbounded(space):
        spec = Unbounded(shape, dtype=dtype)
    else:
        low, high = (np.asarray(bound).reshape(shape) for bound in (space.low, space.high))
        spec = Bounded(
            torch.from_numpy(low.copy()), torch.from_numpy(high.copy()), shape, dtype=dtype
        )
    return Leaf(spec, _copy_in, _scalars if scalar else _rows)


def _is_unbounded(space: Any) -> bool:
    if np.issubdtype(space.dtype, np.floating):
        lowest, highest = -np.inf, np.inf
    else:
        info = np.iinfo(space.dtype)
        lowest, highest = info.min, info.max
    return bool(np.all(space.low == lowest) and np.all(space.high == highest))


def _discrete(space: Any, categorical: bool) -> Leaf:
    start, count = int(space.start), int(space.n)
    if categorical:
        spec: TensorSpec = Categorical(count, shape=(), dtype=_torch_dtype(space.dtype))

        def write_index(row: np.ndarray, value: Any) -> None:
            row[...] = value - start

        return Leaf(spec, write_index, lambda rows: (rows + start).tolist())

    def write_one_hot(row: np.ndarray, value: Any) -> None:
        row[:] = 0
        row[value - start] = 1

    spec = OneHot(count, dtype=torch.int64)
    return Leaf(spec, write_one_hot, lambda rows: (rows.argmax(-1) + start).tolist())


def _multi_discrete(space: Any, categorical: bool) -> Leaf:
    sizes = np.asarray(space.nvec)
    if sizes.ndim != 1:
        raise SpecError(
            f"MultiDiscrete of shape {sizes.shape} is not supported. "
            "Flatten it to one axis with a gymnasium wrapper."
        )
    start = np.asarray(space.start)
    equal = bool((sizes == sizes[0]).all())
    width, dtype = len(sizes), _torch_dtype(space.dtype)
    if categorical:
        if equal:
            spec: TensorSpec = Categorical(int(sizes[0]), shape=(width,), dtype=dtype)
        else:
            spec = MultiCategorical(sizes.tolist(), dtype=dtype)

        def write_indices(row: np.ndarray, value: Any) -> None:
            row[...] = value - start

        return Leaf(spec, write_indices, lambda rows: list(rows + start))
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    if equal:
        spec = OneHot(int(sizes[0]), shape=(width, int(sizes[0])), dtype=torch.int64)
    else:
        spec = MultiOneHot(sizes.tolist(), dtype=torch.int64)

    def write_hot(row: np.ndarray, value: Any) -> None:
        flat = row.reshape(-1)  # a view: rows are contiguous
        flat[:] = 0
        flat[offsets + (value - start)] = 1

    def read_hot(rows: np.ndarray) -> list[Any]:
        flat = rows.reshape(len(rows), -1)
        parts = [
            flat[:, low : low + size].argmax(-1) for low, size in zip(offsets, sizes, strict=True)
        ]
        return list(np.stack(parts, -1).astype(space.dtype) + start)

    return Leaf(spec, write_hot, read_hot)


def _tuple(space: Any, categorical: bool) -> Leaf:
    members = [_leaf(member, categorical) for member in space.spaces]
    likeness = {(member.spec.shape, member.spec.dtype) for member in members}
    if len(likeness) > 1:
        raise SpecError(
            f"the members of {space} have different shapes or dtypes and cannot share one array. "
            "Turn the Tuple space into a Dict with a gymnasium wrapper."
        )
    spec = stack([member.spec for member in members], 0)

    def write_members(row: np.ndarray, value: Any) -> None:
        for index, (member, part) in enumerate(zip(members, value, strict=True)):
            member.write(row[index, ...], part)  # the dots keep a 0-d slot an array

    def read_members(rows: np.ndarray) -> list[Any]:
        parts = [member.read(rows[:, index]) for index, member in enumerate(members)]
        return list(zip(*parts, strict=True))

    return Leaf(spec, write_members, read_members)


def _copy_in(row: np.ndarray, value: Any) -> None:
    row[...] = value


def _rows(rows: np.ndarray) -> list[Any]:
    return list(rows.copy())  # the simulator may keep its action; the rows will be refilled


def _scalars(rows: np.ndarray) -> list[Any]:
    return [row.reshape(()) for row in rows.copy()]


def _refuse(row: np.ndarray, value: Any) -> None:
    raise SpecError("text has no array form and cannot be written into a row.")


def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


# -------------------------------------------------------------------------------- spec -> space


def space_of(spec: TensorSpec) -> Any:
    """Give the gymnasium space of a spec; the inverse of `codec_of` up to the encoding.

    Raises:
        SpecError: the spec has no gymnasium counterpart.
    """
    spaces = require("gymnasium").spaces
    if isinstance(spec, Composite):
        return spaces.Dict({name: space_of(member) for name, member in spec.items()})
    shape = tuple(spec.shape)
    if isinstance(spec, NonTensor):
        return spaces.Text(max_length=4096)
    dtype = np.dtype(str(spec.dtype).removeprefix("torch."))
    if isinstance(spec, MultiCategorical):
        return spaces.MultiDiscrete(list(spec.nvec))
    if isinstance(spec, OneHot | MultiOneHot | Binary):
        return spaces.Box(0, 1, shape, dtype=np.int8 if dtype == bool else dtype)
    if isinstance(spec, Categorical):
        if shape in ((), (1,)):
            return spaces.Discrete(spec.n)
        return spaces.MultiDiscrete(np.full(shape, spec.n))
    if isinstance(spec, Bounded):
        return spaces.Box(spec.low.cpu().numpy(), spec.high.cpu().numpy(), shape, dtype)
    if isinstance(spec, Unbounded):
        if np.issubdtype(dtype, np.floating):
            return spaces.Box(-np.inf, np.inf, shape, dtype)
        info = np.iinfo(dtype)
        return spaces.Box(info.min, info.max, shape, dtype)
    raise SpecError(f"{type(spec).__name__} has no gymnasium space. Use a leaf of specs.md.")
