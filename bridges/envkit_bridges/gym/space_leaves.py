"""Which leaf each gymnasium space becomes: its spec, and how its values are spelled.

Conventions
    key    name of the entry, for messages.
    index  option number of a discrete space, counted from 0; gymnasium counts from ``start``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from envkit.errors import SpecError
from envkit.specs import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from envkit_bridges.gym.backend import library_of
from envkit_bridges.gym.leaves import (
    ArrayForm,
    CopyIn,
    RowLeaf,
    holds_numbers,
    misshapen,
    numpy_dtype,
    outside,
)

__all__ = ["leaf_of"]

IndicesOf = Callable[[Any], np.ndarray]


def leaf_of(space: Any, categorical: bool, key: Any) -> RowLeaf:
    """Build the leaf of a space that has no parts; its ``write`` raises `EncodingError` for others.

    Raises:
        SpecError: the space has no counterpart.
    """
    spaces = library_of(space).spaces
    if isinstance(space, spaces.Box):
        return _box(space, key)
    if isinstance(space, spaces.Discrete):
        return _discrete(space, categorical, key)
    if isinstance(space, spaces.MultiDiscrete):
        return _multi_discrete(space, categorical, key)
    if isinstance(space, spaces.MultiBinary):
        spec = Binary(space.shape[-1], shape=tuple(space.shape), dtype=torch.int8)
        return RowLeaf(spec, CopyIn(key), _rows, _copied(spec, space, key))
    raise SpecError(
        f"the gymnasium space {space} has no counterpart in specs. Flatten it first with a "
        "gymnasium observation or action wrapper."
    )


# ------------------------------------------------------------------------------------------- boxes


def _box(space: Any, key: Any) -> RowLeaf:
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
    return RowLeaf(spec, CopyIn(key), _scalars if scalar else _rows, _copied(spec, space, key))


def _copied(spec: TensorSpec, space: Any, key: Any) -> ArrayForm:
    """Take arrays as they are where they have the form of the rows."""
    assert spec.dtype is not None
    shape, dtype = tuple(spec.shape), numpy_dtype(spec.dtype)
    copy_in = CopyIn(key)

    def rows_of(values: np.ndarray) -> np.ndarray:
        if values.shape[1:] != space.shape:
            raise misshapen(key, values.shape[1:], tuple(space.shape))
        values = values.reshape(len(values), *shape)
        if values.dtype == dtype:
            return values
        copy_in(rows := np.empty(values.shape, dtype), values)
        return rows

    return ArrayForm(rows_of, lambda rows: rows.reshape(len(rows), *space.shape))


def _is_unbounded(space: Any) -> bool:
    if np.issubdtype(space.dtype, np.floating):
        lowest, highest = -np.inf, np.inf
    else:
        info = np.iinfo(space.dtype)
        lowest, highest = info.min, info.max
    return bool(np.all(space.low == lowest) and np.all(space.high == highest))


# ---------------------------------------------------------------------------------------- discrete


def _discrete(space: Any, categorical: bool, key: Any) -> RowLeaf:
    start, count = int(getattr(space, "start", 0)), int(space.n)

    def index_of(value: Any) -> int:
        index = value - start if type(value) is int else _whole(value, space, key).item() - start
        if not 0 <= index < count:
            raise outside(key, value, space)
        return index

    def indices_of(values: np.ndarray) -> np.ndarray:
        given = values.reshape(len(values))
        indices = _whole(given, space, key).astype(space.dtype) - start
        if (wrong := (indices < 0) | (indices >= count)).any():
            raise outside(key, given[wrong][0], space)
        return indices

    if categorical:
        spec: TensorSpec = Categorical(count, shape=(), dtype=_torch_dtype(space.dtype))

        def write_index(row: np.ndarray, value: Any) -> None:
            row[...] = index_of(value)

        form = ArrayForm(indices_of, lambda rows: rows + start)
        return RowLeaf(spec, write_index, lambda rows: (rows + start).tolist(), form)

    def write_one_hot(row: np.ndarray, value: Any) -> None:
        row[:] = 0
        row[index_of(value)] = 1

    spec = OneHot(count, dtype=torch.int64)

    def one_hot(values: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(values), count), np.int64)
        rows[np.arange(len(values)), indices_of(values)] = 1
        return rows

    form = ArrayForm(one_hot, lambda rows: rows.argmax(-1) + start)
    return RowLeaf(spec, write_one_hot, lambda rows: (rows.argmax(-1) + start).tolist(), form)


def _whole(value: Any, space: Any, key: Any) -> np.ndarray:
    """Give the integers that ``value`` spells: 1.0 is one, and 1.5, ``"1"`` and None are none."""
    found = np.asarray(value)
    if found.dtype.kind in "biu":
        return found.astype(np.int64)
    if not (holds_numbers(found, np.dtype(float)) and (found.astype(float) % 1 == 0).all()):
        raise outside(key, value, space)
    return found.astype(np.int64)


def _multi_discrete(space: Any, categorical: bool, key: Any) -> RowLeaf:
    """One choice for each entry of ``nvec``.

    Entries of equal size keep the shape of the space, whatever it is. Others are laid out on one
    axis, in C order.
    """
    sizes = np.asarray(space.nvec)
    start = np.asarray(getattr(space, "start", np.zeros_like(sizes)))
    equal = bool((sizes == sizes.flat[0]).all())

    def indices_of(value: Any) -> np.ndarray:
        found = _whole(value, space, key)
        if found.shape != sizes.shape:
            raise misshapen(key, found.shape, sizes.shape)
        indices = found - start
        if not ((indices >= 0) & (indices < sizes)).all():
            raise outside(key, value, space)
        return indices

    if categorical:
        return _choice_indices(space, sizes, start, equal, indices_of)
    return _choice_one_hot(space, sizes, start, equal, indices_of)


def _choice_indices(
    space: Any, sizes: np.ndarray, start: np.ndarray, equal: bool, indices_of: IndicesOf
) -> RowLeaf:
    dtype = _torch_dtype(space.dtype)
    if equal:
        spec: TensorSpec = Categorical(int(sizes.flat[0]), shape=sizes.shape, dtype=dtype)
    else:
        spec = MultiCategorical(sizes.flatten().tolist(), dtype=dtype)

    def write(row: np.ndarray, value: Any) -> None:
        row[...] = indices_of(value).reshape(row.shape)

    return RowLeaf(spec, write, lambda rows: list(rows.reshape(len(rows), *sizes.shape) + start))


def _choice_one_hot(
    space: Any, sizes: np.ndarray, start: np.ndarray, equal: bool, indices_of: IndicesOf
) -> RowLeaf:
    flat_sizes = sizes.flatten().tolist()
    ends = np.cumsum(flat_sizes)
    offsets = ends - flat_sizes
    if equal:
        options = flat_sizes[0]
        spec: TensorSpec = OneHot(options, shape=(*sizes.shape, options), dtype=torch.int64)
    else:
        spec = MultiOneHot(flat_sizes, dtype=torch.int64)

    def write(row: np.ndarray, value: Any) -> None:
        flat = row.reshape(-1)  # a view: rows are contiguous
        flat[:] = 0
        flat[offsets + indices_of(value).reshape(-1)] = 1

    def read(rows: np.ndarray) -> list[Any]:
        flat = rows.reshape(len(rows), -1)
        parts = [flat[:, low:high].argmax(-1) for low, high in zip(offsets, ends, strict=True)]
        indices = np.stack(parts, -1).astype(space.dtype)
        return list(indices.reshape(len(rows), *sizes.shape) + start)

    return RowLeaf(spec, write, read)


# ------------------------------------------------------------------------------------------ arrays


def _rows(rows: np.ndarray) -> list[Any]:
    return list(rows.copy())  # the simulator may keep its action; the rows will be refilled


def _scalars(rows: np.ndarray) -> list[Any]:
    return [row.reshape(()) for row in rows.copy()]


def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
