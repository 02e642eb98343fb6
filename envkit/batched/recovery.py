"""Rebuild sub-envs that raised, and workers that died or hung, within a budget of restarts.

`Recovery` keeps track of what is still to be done about the rows it rebuilt: report that their episode was
truncated, and reset the new env. The layout of a lost row in the data, and the way of a reset, are the
exchange's business.

Conventions
    lost       rows whose env was rebuilt but whose truncation has not been reported yet.
    unstarted  rows whose env was rebuilt and has not been reset yet; lost rows are among them.
    restart    one env, or one worker with all its envs, built again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from operator import methodcaller
from typing import Any

import torch

from envkit.batched.metadata import EnvMetaData
from envkit.data.paths import as_path
from envkit.env.own_state import LOADED
from envkit.env.seeding import restart_seed
from envkit.errors import DoneError, InputError, MissingKeyError, NotResetError, WorkerError
from envkit.transport import Failure, Pool
from envkit.transport.pool import call_by_row

_BEFORE_USE = ("start", "bind")  # commands after whose failure a worker serves no requests

_ADVICE = (
    "Its rows are gone: close() the env, and the next reset() builds all of them again. "
    "With on_worker_failure='restart' such rows are truncated, and the env goes on."
)

Reset = Callable[[set[int]], None]
Masks = Mapping[tuple[str, ...], torch.Tensor]


class Recovery:
    """Rebuilds what fails, up to ``max_restarts`` times; never if that is 0.

    ``advice`` is reported with the error of a worker that is lost for good.
    """

    def __init__(self, pool: Pool, max_restarts: int, *, advice: str = _ADVICE):
        self.lost: set[int] = set()
        self.unstarted: set[int] = set()
        self.given_up: set[int] = set()
        self.restarts = 0
        self._pool = pool
        self._max_restarts = max_restarts
        self._advice = advice
        self._records = False
        self.begin_seeds(None)

    def begin_seeds(self, seed: int | None) -> None:
        """Derive the seeds of rows that are rebuilt from ``seed`` and the restarts from now on."""
        self._seed = seed
        self._restarts_of_row = [0] * sum(map(len, self._pool.rows_of))

    # ------------------------------------------------------------------------------- building again

    def repair(self, error: WorkerError) -> set[int]:
        """Rebuild all that ``error`` speaks of, and give the rows rebuilt.

        Raises:
            WorkerError: ``error`` itself, if the budget does not allow it, or if an env refused
                what the caller passed: that is no failure of the env.
        """
        refused = [failure for failure in error.failures if _is_refusal(failure)]
        failures = [failure for failure in error.failures if failure not in refused]
        rebuilt: set[int] = set()
        reason: WorkerError | None = None
        while failures:
            self._spend(len(failures), error, reason)
            failed_again: list[Failure] = []
            for failure in failures:
                rows = self._rows_of(failure)
                rebuilt |= rows
                self.lost |= rows
                self.unstarted |= rows
                self.given_up -= rows
                try:
                    self._rebuild(failure, sorted(rows))
                except WorkerError as second:
                    reason = second
                    failed_again += second.failures
            failures = failed_again
        if refused:
            raise error
        return rebuilt

    def _spend(self, count: int, error: WorkerError, reason: WorkerError | None) -> None:
        """Subtract restarts from the budget."""
        self.restarts += count
        if self.restarts <= self._max_restarts:
            return
        if self._max_restarts:
            error.add_note(f"All {self._max_restarts} restarts (max_restarts) are used up.")
        elif any(map(_is_fatal, error.failures)):
            error.add_note(self._advice)
        if reason is not None:
            error.add_note(f"The last attempt to build it again failed:\n{reason}")
        raise error

    def _rows_of(self, failure: Failure) -> set[int]:
        return set(self._pool.rows_of[failure.worker] if _is_fatal(failure) else failure.rows)

    def _rebuild(self, failure: Failure, rows: list[int]) -> None:
        seeds: dict[int, int] = {}
        for row in rows:
            self._restarts_of_row[row] += 1
            if self._seed is not None:
                seeds[row] = restart_seed(self._seed, row, self._restarts_of_row[row])
        self._pool.seeds.update(seeds)
        if _is_fatal(failure):
            self._pool.restart_worker(failure.worker)
        else:
            self._pool.call("rebuild", rows, workers=[failure.worker])
        if self._records:
            self.record(True, rows)
        if seeds:
            self._pool.call_each("set_seed", [((seeds,), {})], [failure.worker])

    # ----------------------------------------------------------------------------------- resuming

    def record(self, mode: bool, rows: Iterable[int] | None = None) -> None:
        """Record the episodes of sub-envs, of all for None, and of those that are built again; see `EnvBase`."""
        self._records = mode
        every = range(sum(map(len, self._pool.rows_of)))
        record = methodcaller("record_for_resume", mode)
        call_by_row(self._pool, "change", dict.fromkeys(every if rows is None else rows, record))

    def give_up(self, rows: set[int]) -> None:
        """Count rows as lost whose episode could not be restored: none is built again for that."""
        self.lost |= rows
        self.unstarted |= rows
        self.given_up |= rows

    def require_reset(self, rows: Collection[int] | None) -> None:
        """Refuse to step rows that were given up, once that was reported, before a reset; None: of all rows.

        Raises:
            NotResetError: one of the rows is such a row.
        """
        waiting = self.given_up & (self.unstarted - self.lost)
        if waiting := waiting if rows is None else waiting.intersection(rows):
            raise NotResetError(
                f"the episodes of rows {sorted(waiting)} were not restored by {LOADED}, and an earlier step has reported "
                "them truncated. Call reset(), or maybe_reset() with the data of that step, and step from the result."
            )

    def state(self) -> dict[str, Any]:
        """Return what is still to be done, and where the seeds of rebuilt rows come from."""
        return {
            "lost": sorted(self.lost),
            "unstarted": sorted(self.unstarted),
            "given_up": sorted(self.given_up),
            "restarts": self.restarts,
            "seed": self._seed,
            "restarts_of_row": list(self._restarts_of_row),
        }

    def take(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        self.lost, self.unstarted = set(state["lost"]), set(state["unstarted"])
        self.given_up = set(state.get("given_up", ()))
        self.restarts, self._seed = state["restarts"], state["seed"]
        self._restarts_of_row = list(state["restarts_of_row"])

    # -------------------------------------------------------------------------- telling, beginning

    def tell(self, rows: Collection[int] | None) -> set[int]:
        """Return those of some rows (None for all) that are lost; from now on that is known."""
        told = self.lost if rows is None else self.lost.intersection(rows)
        self.lost = self.lost - told
        return told

    def begin(self, rows: set[int], reset: Reset) -> None:
        """Reset rows that were built again, and build those again that fail at that.

        Args:
            rows: their loss was reported to the caller.
            reset: resets rows with all their parts, or raises `WorkerError` after it has reset
                those that did not fail.
        """
        left = rows
        while left:
            left = left & self._attempt(reset, left)
        self._has_begun(rows)

    def reset(self, rows: set[int], masks: Masks, reset: Reset, reset_wholly: Reset) -> None:
        """Reset rows as the user asked, and build those again that fail at that.

        A row that is lost and reset as a whole has nothing left to tell.

        Args:
            rows: what to reset.
            masks: which parts of every row to reset, by level; none for all of them.
            reset: see `begin`; resets the parts asked for, and all of `unstarted` rows.
            reset_wholly: the same for all parts.
        """
        rebuilt = self._attempt(reset, rows)
        if not self.unstarted:
            return
        untold = self.lost & (rows - _wholly(masks, rows))
        self.begin(rebuilt & rows, reset_wholly)
        self._has_begun(rows)
        self.lost |= untold
        self.unstarted |= untold

    def _attempt(self, reset: Reset, rows: set[int]) -> set[int]:
        """Reset rows, and give the rows that were rebuilt because something failed."""
        try:
            reset(rows)
        except WorkerError as error:
            return self.repair(error)
        return set()

    def _has_begun(self, rows: set[int]) -> None:
        self.lost -= rows
        self.unstarted -= rows

    def ready(self, rows: Collection[int], reset: Reset) -> list[int]:
        """Return those of some rows that can be stepped, which lost ones cannot.

        The others were rebuilt, which the caller knows, and are not reset yet: they begin
        an episode now.
        """
        self.begin((self.unstarted - self.lost).intersection(rows), reset)
        return [row for row in rows if row not in self.lost]


def _wholly(masks: Masks, rows: set[int]) -> set[int]:
    """Return those of some rows that masks select with all their parts."""
    return {row for row in rows if all(bool(mask[row].all()) for mask in masks.values())}


def _is_fatal(failure: Failure) -> bool:
    """Check whether the worker can no longer be used."""
    return failure.kind != "raised" or failure.command in _BEFORE_USE


def _is_refusal(failure: Failure) -> bool:
    return isinstance(failure.exception, InputError | MissingKeyError)


def require_truncated(metadata: EnvMetaData) -> None:
    """Check that a lost row can say so.

    Raises:
        DoneError: a level of the done spec has no ``truncated``.
    """
    paths = [as_path(key) for key in metadata.full_spec("done").keys(True, True)]
    for level in {path[:-1] for path in paths}:
        if (*level, "truncated") not in paths:
            raise DoneError(
                "on_worker_failure='restart' ends the episode of a lost row with 'truncated', but "
                f"the sub-envs declare only {sorted('.'.join(path) for path in paths)}. Pass "
                "lambda: make_env().add_truncated_keys()."
            )
