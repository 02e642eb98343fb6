"""Where each array lies inside one shared block.

This module alone decides offsets. It knows names, shapes and dtypes; it does not know where the
memory comes from, what the arrays mean, or who writes them.

Conventions
    rows    axis of every array; row i belongs to sub-environment i.
    slots   axis in front of the rows, for arrays that hold several moments at once.
    moment  the slot that a request is about.
    traffic what of the arrays a request reads and writes: all that moves where a host has its own arrays.
    offset  bytes from the start of the block, a multiple of 64 (one cache line), so that arrays
            convert to torch and to XLA without a copy.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from typing import Any

import numpy as np

from envkit.errors import ArgumentError

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Field:
    """One array of shape ``(rows, *shape)``, or ``(slots, rows, *shape)`` where slots are given.

    ``dtype`` is a NumPy dtype name such as "float32". A request reads or writes the slot that lies
    ``ahead`` slots behind its moment.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    slots: int | None = None
    ahead: int = 0

    def full_shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the array over ``rows`` rows."""
        return (*(() if self.slots is None else (self.slots,)), rows, *self.shape)

    def size_bytes(self, rows: int) -> int:
        """Return the bytes of the array over ``rows`` rows."""
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
class Traffic:
    """Names of the fields that a host reads, and of those that it writes, while it serves a request."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The arrays of one block, one after the other, each aligned to 64 bytes.

    Args:
        fields: the arrays.
        rows: number of rows.
        traffic: of each command and method; one that is not named moves nothing. None: all of them read
            and write all fields.
        moment: the field, an integer for each row, all the same, that says which slot a request is about;
            None where requests are about all slots.

    Raises:
        ArgumentError: two fields carry the same name, ``rows`` is negative, or there is no field of a name
            that traffic or moment mention.
    """

    fields: tuple[Field, ...]
    rows: int
    traffic: Mapping[int | str, Traffic] | None = dataclass_field(default=None, hash=False)
    moment: str | None = None

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
        named = {name for one in (self.traffic or {}).values() for name in one.reads + one.writes}
        named |= set() if self.moment is None else {self.moment}
        if unknown := sorted(named.difference(names)):
            raise ArgumentError(
                f"traffic or moment mention fields {unknown}, but the layout has {sorted(names)}."
            )

    def moved_by(self, request: int | str) -> Traffic:
        """Return the traffic of a command or method."""
        if self.traffic is None:
            names = tuple(field.name for field in self.fields)
            return Traffic(names, names)
        return self.traffic.get(request, Traffic())

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

    def zeros(self) -> dict[str, np.ndarray]:
        """Allocate one array per field, as `arrays` does, in memory of this process alone."""
        memory = np.zeros(self.size_bytes + ALIGNMENT_BYTES, np.uint8)
        return self.arrays(memory[-memory.ctypes.data % ALIGNMENT_BYTES :])

    @cached_property
    def _placement(self) -> tuple[tuple[int, ...], int]:
        offsets: list[int] = []
        end = 0
        for field in self.fields:
            offsets.append(end)
            end += -(-field.size_bytes(self.rows) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return tuple(offsets), max(end, ALIGNMENT_BYTES)
