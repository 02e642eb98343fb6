"""How values of one gymnasium space become one entry, and back.

This module decides, space by space, which spec describes an entry and how its values are spelled.
How entries are arranged in trees is decided in `spaces`.

Nothing that differs from its space in shape, or does not fit its dtype, becomes an entry: NumPy
would broadcast the one and wrap the other around.

Conventions
    rows   array of shape (count, *leaf): values of several envs side by side.
    key    name of the entry, for messages.
    index  option number of a discrete space, counted from 0; gymnasium counts from ``start``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from bridges.gym.backend import library_of
from envkit.errors import EncodingError, SpecError
from envkit.specs import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TensorSpec,
    Unbounded,
)

__all__ = [
    "CopyIn",
    "Leaf",
    "ObjectLeaf",
    "RowLeaf",
    "leaf_of",
    "numpy_dtype",
    "ragged_leaf",
    "stacked_leaf",
    "text_leaf",
]


@dataclass(frozen=True)
class RowLeaf:
    """An entry that has the form of an array of fixed shape.

    Args:
        spec: what describes it.
        write: writes a value into a row.
        read: turns rows into values; none of them shares memory with the rows.
    """

    spec: TensorSpec
    write: Callable[[np.ndarray, Any], None]
    read: Callable[[np.ndarray], list[Any]]

    @cached_property
    def _form(self) -> tuple[tuple[int, ...], np.dtype]:
        assert self.spec.dtype is not None
        return tuple(self.spec.shape), numpy_dtype(self.spec.dtype)

    def writer(self, row: np.ndarray) -> Callable[[Any], None]:
        """Give the function that writes a value into ``row``, always the same one."""
        write = self.write
        return write.into(row) if isinstance(write, CopyIn) else partial(write, row)

    def encode(self, value: Any) -> torch.Tensor:
        """Turn a value into a new tensor."""
        row = np.empty(*self._form)
        self.write(row, value)
        return torch.from_numpy(row)

    def decode(self, data: torch.Tensor) -> Any:
        """Turn a tensor into a value."""
        return self.read(data.detach().cpu().numpy()[None])[0]


@dataclass(frozen=True)
class ObjectLeaf:
    """An entry whose size or kind only the value tells; it travels in TensorDicts alone."""

    spec: Any
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]

    def write(self, row: np.ndarray, value: Any) -> None:
        """Refused: there are no rows for it."""
        raise self._no_rows()

    def writer(self, row: np.ndarray) -> Callable[[Any], None]:
        """Refused: there are no rows for it."""
        raise self._no_rows()

    def read(self, rows: np.ndarray) -> list[Any]:
        """Refused: there are no rows of it."""
        raise self._no_rows()

    def _no_rows(self) -> SpecError:
        return SpecError(
            f"values of {self.spec} have no array form of fixed shape. "
            "Ask `Codec.has_rows` first, or use encode and decode."
        )


Leaf = RowLeaf | ObjectLeaf
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
        shape = tuple(space.shape)
        return RowLeaf(Binary(shape[-1], shape=shape, dtype=torch.int8), CopyIn(key), _rows)
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
    return RowLeaf(spec, CopyIn(key), _scalars if scalar else _rows)


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

    def index_of(value: Any) -> Any:
        index = value - start
        if not 0 <= index < count:
            raise _outside(key, value, space)
        return index

    if categorical:
        spec: TensorSpec = Categorical(count, shape=(), dtype=_torch_dtype(space.dtype))

        def write_index(row: np.ndarray, value: Any) -> None:
            row[...] = index_of(value)

        return RowLeaf(spec, write_index, lambda rows: (rows + start).tolist())

    def write_one_hot(row: np.ndarray, value: Any) -> None:
        row[:] = 0
        row[index_of(value)] = 1

    spec = OneHot(count, dtype=torch.int64)
    return RowLeaf(spec, write_one_hot, lambda rows: (rows.argmax(-1) + start).tolist())


def _multi_discrete(space: Any, categorical: bool, key: Any) -> RowLeaf:
    """One choice for each entry of ``nvec``.

    Entries of equal size keep the shape of the space, whatever it is. Others are laid out on one
    axis, in C order.
    """
    sizes = np.asarray(space.nvec)
    start = np.asarray(getattr(space, "start", np.zeros_like(sizes)))
    equal = bool((sizes == sizes.flat[0]).all())

    def indices_of(value: Any) -> np.ndarray:
        found = np.asarray(value)
        if found.shape != sizes.shape:
            raise _misshapen(key, found.shape, sizes.shape)
        indices = found - start
        if not ((indices >= 0) & (indices < sizes)).all():
            raise _outside(key, value, space)
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


# ------------------------------------------------------------------------- several values, no array


def stacked_leaf(spec: TensorSpec, members: Sequence[RowLeaf]) -> RowLeaf:
    """Build the leaf of tuples whose members share one shape: they lie on the first axis."""

    def write(row: np.ndarray, value: Any) -> None:
        for index, (member, part) in enumerate(zip(members, value, strict=True)):
            member.write(row[index, ...], part)  # the dots keep a 0-d slot an array

    def read(rows: np.ndarray) -> list[Any]:
        parts = [member.read(rows[:, index]) for index, member in enumerate(members)]
        return list(zip(*parts, strict=True))

    return RowLeaf(spec, write, read)


def ragged_leaf(spec: TensorSpec, members: Sequence[RowLeaf]) -> ObjectLeaf:
    """Build the leaf of tuples whose members differ in shape: values are nested tensors."""

    def encode(value: Any) -> Any:
        return spec.encode(
            [member.encode(part) for member, part in zip(members, value, strict=True)]
        )

    shapes = [member.spec.shape for member in members]

    def decode(data: Any) -> tuple[Any, ...]:
        parts = data.unbind(0)
        if [part.shape for part in parts] != shapes:
            raise SpecError(
                f"got parts of shapes {[tuple(part.shape) for part in parts]}, but the members of "
                f"the Tuple have {[tuple(shape) for shape in shapes]}. Tuples of unlike shapes "
                "cannot be batched: turn the space into a Dict with a gymnasium wrapper."
            )
        return tuple(member.decode(part) for member, part in zip(members, parts, strict=True))

    return ObjectLeaf(spec, encode, decode)


def text_leaf(space: Any) -> ObjectLeaf:
    """Build the leaf of text: Python strings, carried as non-tensor data."""
    shortest = sorted(space.character_set)[0] * space.min_length
    spec = NonTensor(shape=(), example_data=shortest)
    return ObjectLeaf(spec, spec.encode, spec.to_numpy)


# ------------------------------------------------------------------------------------------ arrays


@dataclass(frozen=True)
class CopyIn:
    """Write an array or a number into a row as it is.

    A number may stand for an array of one element, and the other way round.
    """

    key: Any

    def into(self, row: np.ndarray) -> Callable[[Any], None]:
        """Give the function that writes into ``row``, which must be contiguous."""
        if row.ndim != 1:
            return partial(self, row)
        view = memoryview(row)

        def write(value: Any) -> None:
            try:
                view[:] = value  # the fastest way, which takes equal shapes and dtypes only
            except (TypeError, ValueError):
                self(row, value)

        return write

    def __call__(self, row: np.ndarray, value: Any) -> None:
        """Write ``value``.

        Raises:
            EncodingError: it has another shape than ``row``, or the dtype of ``row`` cannot hold it.
        """
        found = np.asarray(value)
        if found.shape != row.shape:
            if found.size != 1 or row.size != 1:
                raise _misshapen(self.key, found.shape, row.shape)
            found = found.reshape(row.shape)
        if found.dtype == row.dtype:
            row[...] = found
            return
        try:
            with np.errstate(over="raise", invalid="raise"):
                row[...] = found
        except (FloatingPointError, TypeError, ValueError) as error:
            raise _unholdable(self.key, found, row) from error
        if row.dtype.kind != "f" and not np.array_equal(row, found):
            raise _unholdable(self.key, found, row)


_CURE = "Correct the env or its space: gymnasium.utils.env_checker.check_env(env) compares the two."


def _misshapen(key: Any, found: tuple[int, ...], wanted: tuple[int, ...]) -> EncodingError:
    return EncodingError(
        f"cannot put {key!r} of shape {found} into shape {wanted}, which its space declares. {_CURE}"
    )


def _unholdable(key: Any, found: np.ndarray, row: np.ndarray) -> EncodingError:
    return EncodingError(
        f"cannot put {key!r} of dtype {found.dtype} into {row.dtype}, which its space declares: "
        f"{_shown(found)} does not fit. {_CURE}"
    )


def _outside(key: Any, value: Any, space: Any) -> EncodingError:
    return EncodingError(f"{key!r} is {_shown(value)}, which is not in its space {space}. {_CURE}")


def _shown(value: Any) -> str:
    return np.array2string(np.asarray(value), threshold=16, separator=", ").replace("\n", "")


def _rows(rows: np.ndarray) -> list[Any]:
    return list(rows.copy())  # the simulator may keep its action; the rows will be refilled


def _scalars(rows: np.ndarray) -> list[Any]:
    return [row.reshape(()) for row in rows.copy()]


def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Give the NumPy dtype that is spelled like a torch dtype."""
    return torch.empty(0, dtype=dtype).numpy().dtype
