"""Rows in parts, each with workers of its own, so that one part is acted on while the others step.

A part steps as the whole exchange does, only that its rows are fewer, and that others may be under way when it is
woken. What fails in a part is made good there, as in a whole step.

Conventions
    part  consecutive rows, all those of some workers.
    job   what one worker does, see `envkit.transport.jobs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

from tensordict import TensorDictBase

from envkit.batched.exchange.rows import BufferExchange
from envkit.batched.exchange.shared_rows import SharedRows
from envkit.batched.host import ADVANCE, STEP
from envkit.data.paths import Path
from envkit.errors import WorkerError
from envkit.transport.jobs import Job, JobPool
from envkit.transport.pool import spread_rows

__all__ = ["Part", "Parts"]

Chosen = dict[int, list[int] | None]
"""The workers that are woken, and which of their rows move; None: all."""


class Part(SharedRows):
    """The rows of some workers of an exchange.

    Args:
        whole: all rows.
        workers: which of its workers.
        parts: who knows the others.
    """

    def __init__(self, whole: BufferExchange, workers: range, parts: Parts):
        of_worker = whole.pool.rows_of
        rows = range(of_worker[workers.start].start, of_worker[workers[-1]].stop)
        super().__init__(
            whole.rings.of(rows),
            whole.slots[rows.start : rows.stop],
            whole.metadata[rows.start : rows.stop],
            first=rows.start,
        )
        self.newest_is_next = whole.newest_is_next[rows.start : rows.stop]
        self._jobs: list[Job] = []
        # Of the step under way: requests before it, its command, its slot, and the rows it moves.
        self._asked: tuple[int, int, int, Chosen] | None = None
        self._all: Chosen = dict.fromkeys(workers)
        self._whole, self._parts = whole, parts

    def fill(self, given: TensorDictBase | Mapping[Path, Any], mask: None, slot: int) -> None:
        """Check the inputs of a step and write them into a slot; see `BufferExchange.fill`."""
        self.write(given, slot)

    def wake(self, root: None, rows: None, *, advance: bool, slot: int) -> bool:
        """Have the rows stepped with the inputs as they lie in a slot, where the root lies too; gives ``advance``."""
        pool, command = cast(JobPool, self._whole.pool), ADVANCE if advance else STEP
        chosen = self._all
        if not self._whole.recovery.unstarted.isdisjoint(self.range):
            chosen = self._startable(slot)
        self._asked = pool.requests, command, slot, chosen
        self.slot = slot
        self.newest_is_next[:] = not advance
        for worker, moving in chosen.items():
            self._jobs.append(pool.begin(worker, command, moving))
        return advance

    def _startable(self, slot: int) -> Chosen:
        """Give the rows that a step in a slot can move; those that were built anew begin there, as in a whole step."""
        before = self.slot
        try:
            self.slot = slot
            ready = self._whole.startable(self.range)
        finally:
            self.slot = before
        of_worker = self._whole.pool.rows_of
        chosen = {
            worker: [row for row in ready if row in of_worker[worker]] for worker in self._all
        }
        return {worker: rows for worker, rows in chosen.items() if rows}

    def wait(self, advance: bool) -> None:
        """Wait for the step; see `BufferExchange.wait`."""
        self._parts.collect([self])
        if not self._whole.recovery.lost.isdisjoint(self.range):
            self._whole.tell_lost(self, list(self.range), None, advance=advance)

    def under_way(self) -> list[Job]:
        """Give the jobs of the step under way; those that Ctrl-C kept from being begun, or from being known, too."""
        if self._asked is None or len(self._jobs) == len(self._asked[-1]):
            return self._jobs
        pool, (requests, command, slot, chosen) = cast(JobPool, self._whole.pool), self._asked
        self.slot = slot
        self.newest_is_next[:] = command == STEP
        known = {job.worker for job in self._jobs}
        for worker, rows in chosen.items():
            if worker not in known:
                begun = pool.begun_since(worker, requests)
                self._jobs.append(begun or pool.begin(worker, command, rows))
        return self._jobs

    def forget(self) -> None:
        """Say that the step is over."""
        self._asked, self._jobs = None, []


class Parts:
    """All rows of an exchange in parts; on leaving, none of them is under way, and all are at the same moment.

    Args:
        whole: its pool gives jobs.
        count: how many; at most one for each worker.
    """

    def __init__(self, whole: BufferExchange, count: int):
        self._whole = whole
        workers = len(whole.pool.rows_of)
        self.all = [Part(whole, some, self) for some in spread_rows(workers, count)]

    def __enter__(self) -> Self:
        self._whole.is_in_parts = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self._whole.finish_parts, self._whole.is_in_parts = self.finish, False
        try:
            self.finish()
        except WorkerError as error:
            if raised is None:
                raise
            raised.add_note(f"Meanwhile other rows failed:\n{error}")

    def finish(self) -> None:
        """Wait for all rows and bring them to the same moment; where Ctrl-C comes, the next use of the rows does.

        Raises:
            WorkerError: some failed, and cannot be made good.
        """
        failed = None
        for wait in (self._wait_for_resets, partial(self.collect, self.all)):
            try:
                wait()
            except WorkerError as error:
                failed = error
        self._align()
        self._whole.finish_parts = None
        if failed is not None:
            raise failed

    def _wait_for_resets(self) -> None:
        """Wait for rows that were built anew and were about to begin when Ctrl-C came; see `collect`."""
        try:
            self._whole.pool.recv()
        except WorkerError as error:
            self._whole.recovery.repair(error)

    def collect(self, parts: Sequence[Part]) -> None:
        """Wait for the jobs of some parts, and make good what failed in them.

        Raises:
            WorkerError: it cannot be made good.
        """
        failed = None
        try:  # Ctrl-C leaves the jobs to the end of all parts
            cast(JobPool, self._whole.pool).collect(
                [job for part in parts for job in part.under_way()]
            )
        except WorkerError as error:
            failed = error
        for part in parts:
            part.forget()
        if failed is not None:
            self._whole.recovery.repair(failed)

    def _align(self) -> None:
        """Move the newest rows of parts that were interrupted to the moment of the first."""
        slot = self.all[0].slot
        for part in self.all[1:]:
            if part.slot == slot:
                continue
            for path, rows in part.nexts[part.slot].items():
                part.nexts[slot][path].copy_(rows)
            for path, rows in part.roots[part.slot + 1].items():
                part.roots[slot + 1][path].copy_(rows)
            part.slot = slot
