"""What becomes of rows whose env raised, or whose worker died or hung.

`Recovery` builds them anew, within a budget, and says which were lost. What a lost row looks like
in the data is the exchange's to write.

Conventions
    lost     the env of the row is another one than before: its episode cannot go on.
    restart  one env, or one worker with all its envs, built anew.
"""

from __future__ import annotations

from envkit.batched.metadata import EnvMetaData
from envkit.env_specs import as_path
from envkit.errors import ArgumentError, DoneError, WorkerError
from envkit.seeding import restart_seed
from envkit.transport import Failure, Pool

__all__ = ["Recovery", "allowed_restarts", "require_truncated"]


class Recovery:
    """Rebuilds what fails, up to ``max_restarts`` times; never if that is 0.

    ``seed`` is what the batched env was last seeded with, None if it was not.
    """

    def __init__(self, pool: Pool, max_restarts: int):
        self.seed: int | None = None
        self.restarts = 0
        self._pool = pool
        self._max_restarts = max_restarts
        self._restarts_of_row = [0] * sum(map(len, pool.rows_of))

    def repair(self, error: WorkerError) -> set[int]:
        """Rebuild all that ``error`` speaks of, and give the rows lost.

        Raises:
            WorkerError: ``error`` itself, if the budget does not allow it.
        """
        lost: set[int] = set()
        failures = list(error.failures)
        while failures:
            self.restarts += len(failures)
            if self.restarts > self._max_restarts:
                if self._max_restarts:
                    error.add_note(f"All {self._max_restarts} restarts (max_restarts) are used up.")
                raise error
            failed_again: list[Failure] = []
            for failure in failures:
                lost.update(failure.rows)
                try:
                    self._rebuild(failure)
                except WorkerError as second:
                    failed_again += second.failures
            failures = failed_again
        return lost

    def _rebuild(self, failure: Failure) -> None:
        seeds = {}
        for row in failure.rows:
            self._restarts_of_row[row] += 1
            if self.seed is not None:
                seeds[row] = restart_seed(self.seed, row, self._restarts_of_row[row])
        self._pool.seeds.update(seeds)
        if failure.kind == "raised":
            arguments = ({row: seeds.get(row) for row in failure.rows},)
            self._pool.call_each("rebuild", [(arguments, {})], [failure.worker])
        else:
            self._pool.restart_worker(failure.worker)
            if seeds:
                self._pool.call_each("set_seed", [((seeds,), {})], [failure.worker])


def allowed_restarts(on_worker_failure: str, max_restarts: int) -> int:
    """Give the restarts that are allowed.

    Raises:
        ArgumentError: the policy is none of "raise" and "restart", or the budget is negative.
    """
    if on_worker_failure not in ("raise", "restart"):
        raise ArgumentError(
            f"on_worker_failure is {on_worker_failure!r}, but must be 'raise' or 'restart'."
        )
    if max_restarts < 0:
        raise ArgumentError(f"max_restarts is {max_restarts}, but must be 0 or more.")
    return max_restarts if on_worker_failure == "restart" else 0


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
