"""What a pool of rows can do, wherever the rows are.

This module holds the interface. `LocalPool` and `ProcessPool` keep it, and so may others.

Conventions
    A round is one `send` and one `recv`. The caller writes inputs into the bound arrays before
    `send`, and reads outputs after `recv`; in between the rows belong to the workers.
    A round that was sent and never received (Ctrl-C came in between) is finished first by
    whatever comes next.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from envkit.errors import ArgumentError
from envkit.transport.layout import Layout

__all__ = ["Pool", "Selection", "call_by_row", "mask_of", "spread_rows"]

Selection = Sequence[int] | np.ndarray | None
"""Which rows a command is for: None for all, row numbers, or a bool mask of shape ``(rows,)``."""


class Pool(Protocol):
    """Rows ``0 .. num_rows - 1``, spread over one or more workers."""

    def start(self) -> list[object]:
        """Build all hosts at the same time, and return what each `Host.describe` said.

        Raises:
            WorkerError: a host could not be built; the pool is then closed.
        """
        ...

    def bind(self, layout: Layout) -> dict[str, np.ndarray]:
        """Allocate the arrays of ``layout``, have every host bind them, and return ours.

        They stay valid until `close`, and longer for whoever keeps a view of them.
        """
        ...

    def send(self, command: int, rows: Selection = None) -> None:
        """Start a round: wake the workers that own one of ``rows``, and return at once."""
        ...

    def recv(self) -> None:
        """Wait until every worker that was woken has finished its rows.

        Raises:
            WorkerError: rows raised, or workers died; all others have finished their rows.
            WorkerTimeoutError: a worker did not answer within the deadline, and was killed.
        """
        ...

    def call(
        self, method: str, *args: Any, workers: Sequence[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``method`` of the hosts of ``workers`` (all), concurrently; one result each."""
        ...

    def call_each(
        self,
        method: str,
        arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        workers: Sequence[int] | None = None,
    ) -> list[Any]:
        """Like `call`, with ``(args, kwargs)`` of its own for each of ``workers`` (all)."""
        ...

    def close(self) -> None:
        """End all workers and free the memory, in bounded time; closing twice does nothing."""
        ...

    seeds: dict[int, int]
    """The seeds that rows were last given, by row; they stand in the messages of errors."""

    timeout_s: float | None
    """Seconds that a round or a call may take from now on, where that can be enforced."""

    start_timeout_s: float | None
    """Seconds that a start, also of a single worker, may take from now on, where that can be enforced."""

    def restart_worker(self, index: int) -> object:
        """Replace worker ``index`` by a fresh one for the same rows, bound to the same arrays.

        Returns what its host says of itself. The old one, if it lives, is ended first.
        """
        ...

    @property
    def rows_of(self) -> tuple[range, ...]:
        """The rows of each worker."""
        ...

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        ...

    @property
    def pids(self) -> list[int]:
        """Process ids of the living workers; this process for a local pool."""
        ...


def spread_rows(num_rows: int, num_workers: int) -> tuple[range, ...]:
    """Spread rows evenly over at most ``num_workers`` workers; the first get one more.

    Raises:
        ArgumentError: there is nothing to spread, or nowhere to spread it to.
    """
    if num_rows < 1 or num_workers < 1:
        raise ArgumentError(
            f"a pool of {num_rows} rows over {num_workers} workers is impossible; "
            "both must be at least 1."
        )
    num_workers = min(num_rows, num_workers)
    bounds = [-(-num_rows * index // num_workers) for index in range(num_workers + 1)]
    return tuple(range(low, high) for low, high in pairwise(bounds))


def mask_of(rows: Sequence[int] | np.ndarray, num_rows: int) -> np.ndarray:
    """Turn a selection of rows into a bool mask of shape ``(num_rows,)``.

    Raises:
        ArgumentError: a mask of another shape, or a row number out of range.
    """
    given = np.asarray(rows)
    if given.dtype == bool:
        if given.shape != (num_rows,):
            raise ArgumentError(
                f"row mask has shape {given.shape}, but the pool has {num_rows} rows. "
                f"Pass a mask of shape ({num_rows},)."
            )
        return given
    mask = np.zeros(num_rows, bool)
    if given.size == 0:
        return mask
    if given.dtype.kind not in "iu" or given.min() < 0 or given.max() >= num_rows:
        raise ArgumentError(
            f"rows {given.tolist()} are not row numbers of this pool; use integers from 0 to "
            f"{num_rows - 1}, or a bool mask."
        )
    mask[given] = True
    return mask


def call_by_row(pool: Pool, method: str, values: dict[int, Any], *leading: Any) -> list[Any]:
    """Call ``method(*leading, {row: value})`` of every worker that owns one of the rows."""
    arguments, workers = [], []
    for worker, owned in enumerate(pool.rows_of):
        own = {row: values[row] for row in owned if row in values}
        if own:
            arguments.append(((*leading, own), {}))
            workers.append(worker)
    return pool.call_each(method, arguments, workers)
