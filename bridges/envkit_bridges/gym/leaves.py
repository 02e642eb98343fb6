"""What one entry of gymnasium data is: its spec, and how values become rows of arrays and back.

Which leaf a space becomes is decided in `space_leaves`, how entries are arranged in trees in `spaces`.

Nothing that differs from its space in shape, or does not fit its dtype, becomes an entry: NumPy
would broadcast the one and wrap the other around.

Conventions
    rows    array of shape (count, *leaf): values of several envs side by side.
    values  of several envs: a list, or one array of shape (count, *space), as simulators of many envs have them.
    key     name of the entry, for messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Real
from typing import Any

import numpy as np
import torch

from envkit.errors import EncodingError, SpecError
from envkit.specs import NonTensor, TensorSpec

__all__ = [
    "ArrayForm",
    "CopyIn",
    "Leaf",
    "ObjectLeaf",
    "RowLeaf",
    "holds_numbers",
    "misshapen",
    "numpy_dtype",
    "outside",
    "ragged_leaf",
    "stacked_leaf",
    "text_leaf",
]


@dataclass(frozen=True)
class ArrayForm:
    """How an array of values becomes rows, and back; what comes out may share memory with what went in.

    Args:
        rows_of: from an array of values to rows, in the dtype of the entry.
        values_of: from rows to an array of values, in any dtype.
    """

    rows_of: Callable[[np.ndarray], np.ndarray]
    values_of: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class RowLeaf:
    """An entry that has the form of an array of fixed shape.

    Args:
        spec: what describes it.
        write: writes a value into a row.
        read: turns rows into values; none of them shares memory with the rows.
        together: the same for arrays of values; None where they are spelled one by one.
    """

    spec: TensorSpec
    write: Callable[[np.ndarray, Any], None]
    read: Callable[[np.ndarray], list[Any]]
    together: ArrayForm | None = None

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

    def encode_array(self, values: np.ndarray) -> torch.Tensor:
        """Turn an array of values into a tensor of rows, which may share its memory.

        Raises:
            EncodingError: a value has another shape than the space says, or is not in it.
        """
        if self.together is not None:
            return torch.from_numpy(self.together.rows_of(values))
        shape, dtype = self._form
        rows = np.empty((len(values), *shape), dtype)
        for index, value in enumerate(values):
            self.write(rows[index, ...], value)
        return torch.from_numpy(rows)

    def decode_array(self, data: torch.Tensor) -> np.ndarray:
        """Turn a tensor of rows into an array of values, which may share its memory."""
        rows = data.numpy(force=True)
        return np.stack(self.read(rows)) if self.together is None else self.together.values_of(rows)


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

    def encode_array(self, values: np.ndarray) -> torch.Tensor:
        """Refused: there are no rows of it."""
        raise self._no_rows()

    def decode_array(self, data: torch.Tensor) -> np.ndarray:
        """Refused: there are no rows of it."""
        raise self._no_rows()

    def _no_rows(self) -> SpecError:
        return SpecError(
            f"values of {self.spec} have no array form of fixed shape. "
            "Ask `Codec.has_rows` first, or use encode and decode."
        )


Leaf = RowLeaf | ObjectLeaf


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
            except (OverflowError, TypeError, ValueError):
                self(row, value)

        return write

    def __call__(self, row: np.ndarray, value: Any) -> None:
        """Write ``value``.

        Raises:
            EncodingError: it has another shape, is no number, or the dtype of ``row`` cannot hold it.
        """
        found = np.asarray(value)
        if found.shape != row.shape:
            if found.size != 1 or row.size != 1:
                raise misshapen(self.key, found.shape, row.shape)
            found = found.reshape(row.shape)
        if found.dtype == row.dtype:
            row[...] = found
            return
        if not holds_numbers(found, row.dtype):
            raise _unholdable(self.key, found, row)
        try:
            with np.errstate(over="raise", invalid="raise"):
                row[...] = found
        except (FloatingPointError, OverflowError, TypeError, ValueError) as error:
            raise _unholdable(self.key, found, row) from error
        if row.dtype.kind != "f" and not np.array_equal(row, found):
            raise _unholdable(self.key, found, row)


def holds_numbers(found: np.ndarray, dtype: np.dtype) -> bool:
    """Say whether an array holds real numbers alone, of any library, that ``dtype`` may take.

    A cast of NumPy would make NaN of None, 1.5 of ``"1.5"``, and drop imaginary parts.
    """
    if found.dtype.kind == "O":
        return all(isinstance(item, (Real, np.bool_)) for item in found.flat)
    return found.dtype.kind in "biuf" or np.can_cast(found.dtype, dtype, "same_kind")


_CURE = "Correct the env or its space: gymnasium.utils.env_checker.check_env(env) compares the two."


def misshapen(key: Any, found: tuple[int, ...], wanted: tuple[int, ...]) -> EncodingError:
    """Say that a value has another shape than its space."""
    return EncodingError(
        f"cannot put {key!r} of shape {found} into shape {wanted}, which its space declares. {_CURE}"
    )


def _unholdable(key: Any, found: np.ndarray, row: np.ndarray) -> EncodingError:
    return EncodingError(
        f"cannot put {key!r} of dtype {found.dtype} into {row.dtype}, which its space declares: "
        f"{_shown(found)} does not fit. {_CURE}"
    )


def outside(key: Any, value: Any, space: Any) -> EncodingError:
    """Say that a value is not in its space."""
    return EncodingError(f"{key!r} is {_shown(value)}, which is not in its space {space}. {_CURE}")


def _shown(value: Any) -> str:
    return np.array2string(np.asarray(value), threshold=16, separator=", ").replace("\n", "")


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Give the NumPy dtype that is spelled like a torch dtype."""
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
