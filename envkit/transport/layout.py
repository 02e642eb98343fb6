"""Where each array lies inside one shared block.

This module alone decides offsets. It knows names, shapes and dtypes; it does not know where the
memory comes from, what the arrays mean, or who writes them.

Conventions
    rows    axis of every array; row i belongs to sub-environment i.
    slots   axis in front of the rows, for arrays that hold several moments at once.
    offset  bytes from the start of the block, a multiple of 64 (one cache line), so that arrays
            convert to torch and to XLA without a copy.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from envkit.errors import ArgumentError

__all__ = ["ALIGNMENT_BYTES", "Field", "Layout"]

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Field:
    """One array of shape ``(rows, *shape)``, or ``(slots, rows, *shape)`` where slots are given.

    ``dtype`` is a NumPy dtype name such as "float32".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    slots: int | None = None

    def full_shape(self, rows: int) -> tuple[int, ...]:
        """Give the shape of the array over ``rows`` rows."""
        return (*(() if self.slots is None else (self.slots,)), rows, *self.shape)

    def size_bytes(self, rows: int) -> int:
        """Give the bytes of the array over ``rows`` rows."""
        return math.prod(self.full_shape(rows)) * np.dtype(self.dtype).itemsize

    def __post_init__(self) -> None:
        if np.dtype(self.dtype).hasobject:
            raise ArgumentError(
                f"field {self.name!r} has dtype {self.dtype!r}, but Python objects cannot lie in "
                "shared memory. Send them over the control channel (`call`) instead."
            )
        if any(size < 0 for size in self.full_shape(0)):
            raise ArgumentError(
                f"field {self.name!r} has shape {self.shape}, but every size must be fixed and at "
                "least 0. Values of varying size travel over the control channel (`call`)."
            )


@dataclass(frozen=True)
class Layout:
    """The arrays of one block, one after the other, each aligned to 64 bytes.

    Raises:
        ArgumentError: two fields carry the same name, or ``rows`` is negative.
    """

    fields: tuple[Field, ...]
    rows: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))
        names = [field.name for field in self.fields]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ArgumentError(
                f"fields {twice} appear more than once in a layout; give each array its own name."
            )
        if self.rows < 0:
            raise ArgumentError(f"a layout has {self.rows} rows, but needs 0 or more.")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each field in bytes, in the order of ``fields``."""
        return self._placement[0]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole block; at least 64, since an empty block cannot be mapped."""
        return self._placement[1]

    def arrays(self, buffer: Any) -> dict[str, np.ndarray]:
        """View ``buffer`` (``size_bytes`` or more, writable) as one array per field; no copies."""
        return {
            field.name: np.ndarray(field.full_shape(self.rows), field.dtype, buffer, offset)
            for field, offset in zip(self.fields, self.offsets, strict=True)
        }

    @cached_property
    def _placement(self) -> tuple[tuple[int, ...], int]:
        offsets, end = [], 0
        for field in self.fields:
            offsets.append(end)
            end += -(-field.size_bytes(self.rows) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return tuple(offsets), max(end, ALIGNMENT_BYTES)
