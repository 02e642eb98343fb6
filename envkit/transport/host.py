"""The requests of a pool to the holder of the rows, and how a row that raises is identified.

This module knows the `Host` protocol and nothing of processes, memory or environments.

Conventions
    row      global row number, 0 .. num_rows - 1; a host owns a consecutive range of them.
    command  small integer whose meaning the layer above defines.
"""

from collections.abc import Callable
from operator import length_hint
from typing import Any, Protocol

import numpy as np


class Host(Protocol):
    """Holds some rows, and works on them in place."""

    def describe(self) -> object:
        """Picklable facts about this host, asked for once after construction."""

    def bind(self, arrays: dict[str, np.ndarray], rows: range) -> None:
        """Store ``arrays``, which cover all rows of the pool; this host owns ``rows`` of them."""

    def run(self, command: int, rows: "list[int]") -> None:
        """Carry out ``command`` for ``rows``, reading and writing the bound arrays in place.

        Take the rows by iterating over ``rows`` once, in order. If one raises, let it raise: the
        pool sees how far the iteration came, blames that row, and calls again with the rows after
        it. An error before or after the iteration is blamed on all rows given.
        """

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> object:
        """Answer a request of the control channel; the result must be picklable.

        Raise `RowsFailedError` where some rows failed and others have an answer. In a dict by row,
        as in what `describe` gives, a value that cannot be pickled is blamed on its row alone.
        """

    def close(self) -> None:
        """Release what the host holds. Called once, also after errors."""


MakeHost = Callable[[range], Host]
"""Build a host for the rows given. Travels by value, see `by_value`."""


class RowsFailedError(Exception):
    """Some rows of a `Host.call` failed; ``result`` is what the others gave."""

    def __init__(self, errors: dict[int, Exception], result: object) -> None:
        super().__init__(f"rows {sorted(errors)} failed")
        self.errors = errors
        self.result = result


class RowCursor(list[int]):
    """Row numbers that remember how far the last iteration over them came."""

    _cursor = None

    def __iter__(self):
        cursor = self._cursor = super().__iter__()
        return cursor

    def split(self) -> "tuple[RowCursor, RowCursor]":
        """Rows to blame for an error during the last iteration, and the rows not yet begun."""
        cursor, self._cursor = self._cursor, None
        taken = 0 if cursor is None else len(self) - length_hint(cursor)
        finished = cursor is not None and len(cursor.__reduce__()) == 2  # pickles as an empty one
        if taken == 0 or finished:
            return self, RowCursor()
        return RowCursor(self[taken - 1 : taken]), RowCursor(self[taken:])


def run_rest(
    host: Host,
    command: int,
    rows: RowCursor,
    error: BaseException,
    *,
    catch: type[BaseException],
) -> list[tuple[tuple[int, ...], BaseException]]:
    """Run a command on the rows behind the one that raised ``error``, and behind each that raises ``catch``.

    Returns:
        The rows to blame, with what they raised, in order.
    """
    raised: list[tuple[tuple[int, ...], BaseException]] = []
    while True:
        blamed, rows = rows.split()
        raised.append((tuple(blamed), error))
        if not rows:
            return raised
        try:
            host.run(command, rows)
            return raised
        except catch as another:
            error = another
