"""Copy what requests read and write between arrays that are bound on two sides, which share no memory.

Both sides hold all arrays of one layout. This module decides which parts of them a request moves, see
`layout.Traffic`; it does not know the way they go.

Conventions
    request  a command or the name of a method.
    moment   the slot that a request is about, None where the layout has none.
    parts    arrays, one for each field that moves, in the order of the traffic: rows of one worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from envkit.transport.layout import Layout

Rows = Sequence[int] | None
"""Global numbers of some rows of a worker; None for all of them."""


class MovingRows:
    """One side's arrays, as far as they belong to one worker.

    Args:
        layout: of the arrays.
        arrays: all of them, with all rows of the pool.
        rows: those of the worker.
    """

    def __init__(self, layout: Layout, arrays: Mapping[str, np.ndarray], rows: range):
        self._layout, self._arrays = layout, arrays
        self._slice = slice(rows.start, rows.stop)
        self._fields = {field.name: field for field in layout.fields}

    @property
    def moment(self) -> int | None:
        """The slot that a request made now is about."""
        name = self._layout.moment
        return None if name is None else int(self._arrays[name][self._slice.start])

    def inputs(self, request: int | str, moment: int | None) -> list[np.ndarray]:
        """Return the parts that the host reads. They may be views: the caller copies them."""
        return self._parts(self._layout.moved_by(request).reads, moment, None)

    def take_inputs(
        self, request: int | str, moment: int | None, parts: Sequence[np.ndarray]
    ) -> None:
        """Copy the parts that the host is going to read into these arrays."""
        self._take(self._layout.moved_by(request).reads, moment, None, parts)

    def take_laid(self, laid: Mapping[str, np.ndarray]) -> None:
        """Copy one array for each of some fields into the worker's rows."""
        for name, array in laid.items():
            self._take((name,), None, None, (array,))

    def outputs(self, request: int | str, moment: int | None, rows: Rows) -> list[np.ndarray]:
        """Return the parts that the host has written in some rows. They may be views."""
        return self._parts(self._layout.moved_by(request).writes, moment, rows)

    def take_outputs(
        self, request: int | str, moment: int | None, rows: Rows, parts: Sequence[np.ndarray]
    ) -> None:
        """Copy the parts that the host has written into these arrays."""
        self._take(self._layout.moved_by(request).writes, moment, rows, parts)

    def everything(self) -> list[np.ndarray]:
        """Return all there is of the worker's rows."""
        return self._parts(tuple(self._fields), None, None)

    def take_everything(self, parts: Sequence[np.ndarray]) -> None:
        """Undo `everything`, on the other side."""
        self._take(tuple(self._fields), None, None, parts)

    def _parts(self, names: Sequence[str], moment: int | None, rows: Rows) -> list[np.ndarray]:
        chosen = self._slice if rows is None else rows
        return [np.ascontiguousarray(self._slots(name, moment)[chosen]) for name in names]

    def _take(
        self, names: Sequence[str], moment: int | None, rows: Rows, parts: Sequence[np.ndarray]
    ) -> None:
        chosen = self._slice if rows is None else rows
        for name, part in zip(names, parts, strict=True):
            self._slots(name, moment)[chosen] = part

    def _slots(self, name: str, moment: int | None) -> np.ndarray:
        """Return an array with its rows in front: of one slot, or with the axis of slots behind them."""
        field, array = self._fields[name], self._arrays[name]
        if field.slots is None:
            return array
        return array.swapaxes(0, 1) if moment is None else array[moment + field.ahead]
