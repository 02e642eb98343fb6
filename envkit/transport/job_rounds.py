"""Rounds made of jobs: a pool that can ask its workers one by one asks them all by giving each a job.

`JobRounds` keeps what is under way, who is lost and how long it may take. How a worker is given a job, and how
its answer comes back, is decided by who derives from it.
"""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from envkit.errors import BusyEnvError, ClosedEnvError
from envkit.transport.failure import Failure, worker_error
from envkit.transport.handle import Limit, Request
from envkit.transport.jobs import Job
from envkit.transport.pool import Selection, mask_of, spread_rows

__all__ = ["Arrivals", "JobRounds", "JobWorker"]


class JobWorker(Protocol):
    """A worker, as its pool sees it: what it does now, what it was given last, and why it can no longer be used."""

    index: int
    job: Job | None
    latest: Job | None
    lost: Failure | None


class Arrivals(threading.Condition):
    """Answers that threads give while another one waits for some of them, and is woken once for all of these.

    Its lock is held to answer, and from a look at what there is to the wait for more.
    """

    _wanted = 0

    def __exit__(self, *raised: Any) -> None:
        """Let go of the lock, which a wait that Ctrl-C interrupted twice has not taken back."""
        try:
            super().__exit__(*raised)
        except RuntimeError:
            if raised[0] is None:
                raise

    def came(self) -> None:
        """Count an answer, and wake who waits if it was the last one wanted."""
        self._wanted -= 1
        if self._wanted <= 0:
            self.notify_all()

    def wait_for_some(self, wanted: int, seconds: float) -> None:
        """Wait until so many more have come, whoever gave them, but no longer than ``seconds``."""
        self._wanted = wanted
        if wanted > 0:
            self.wait(None if seconds == math.inf else seconds)


W = TypeVar("W", bound=JobWorker)


class JobRounds(Generic[W]):
    """Rows spread over workers that have one job each at most; see `Pool` and `JobPool`.

    Args:
        num_rows: number of rows.
        num_workers: number of workers; at most one for each row is used.
        commands: names of commands, and of methods that are to be called otherwise, for messages.
        timeout_s: seconds that a round or a call may take; None for no limit.
        start_timeout_s: the same for what builds hosts or envs.
        building: methods of the host that build anew what `start` has built.
    """

    def __init__(
        self,
        num_rows: int,
        num_workers: int,
        *,
        commands: Mapping[int | str, str] | None = None,
        timeout_s: float | None = 60.0,
        start_timeout_s: float | None = 60.0,
        building: Collection[str] = (),
    ) -> None:
        self.rows_of = spread_rows(num_rows, num_workers)
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self.seeds: dict[int, int] = {}
        self.closed = False
        self._commands = dict(commands or {})
        self._building = building
        self._num_rows = num_rows
        self._requests = 0
        self._workers: list[W] = []
        self._round: list[Job] = []

    # ------------------------------------------------------------------- what workers of a kind do

    @abstractmethod
    def _begin_command(self, worker: W, command: int, rows: list[int] | None) -> Job:
        """Have a worker carry out a command on some of its rows; None: all."""

    @abstractmethod
    def begin_call(self, worker: int, method: str, *args: Any, **kwargs: Any) -> Job:
        """Call a method of the host of a worker that is free."""

    @abstractmethod
    def _await_answers(self, jobs: Sequence[Job], wanted: int, seconds: float) -> None:
        """Take the answers that there are to some jobs, and wait until there are ``wanted``, or something changed.

        Waits ``seconds`` at most, and not at all if none are wanted.
        """

    def _give_up(self, worker: W, lost: Failure) -> Failure:
        """End a worker that has not answered in time, where that can be done, and say more of why it has not."""
        return lost

    # -------------------------------------------------------------------------------------- rounds

    def send(self, command: int, rows: Selection = None) -> None:
        """Start a round; see `Pool.send`."""
        self._require_open()
        self._round = self._abandoned()
        mask = None if rows is None else mask_of(rows, self._num_rows)
        for worker, own in zip(self._workers, self.rows_of, strict=True):
            chosen = None
            if mask is not None:
                chosen = (np.flatnonzero(mask[own.start : own.stop]) + own.start).tolist()
            if chosen != []:
                self._round.append(self._begin_command(worker, command, chosen))

    def recv(self) -> None:
        """Wait for every worker that was woken, and raise what they met."""
        self._require_open()
        jobs = self._round
        self.wait(jobs, len(jobs), None)  # Ctrl-C here leaves the round to whatever comes next
        self._round = []
        self._raise_failures(jobs)

    def call(
        self, method: str, *args: Any, workers: Sequence[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``method`` of the hosts of ``workers`` (all) with the same arguments."""
        count = len(self.rows_of) if workers is None else len(workers)
        return self.call_each(method, [(args, kwargs)] * count, workers)

    def call_each(
        self,
        method: str,
        arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        workers: Sequence[int] | None = None,
    ) -> list[Any]:
        """Call ``method`` with arguments of its own for each of ``workers`` (all)."""
        self._require_open()
        chosen = range(len(self.rows_of)) if workers is None else workers
        return self._together(
            self.begin_call(index, method, *args, **kwargs)
            for index, (args, kwargs) in zip(chosen, arguments, strict=True)
        )

    def _together(self, jobs: Iterable[Job]) -> list[Any]:
        """Wait for jobs, which begin one by one as they are drawn, and give what each has returned."""
        self._round, begun = self._abandoned(), []
        for job in jobs:
            self._round.append(job)
            begun.append(job)
        self.recv()
        return [job.request.answers[job.worker] for job in begun]

    def _abandoned(self) -> list[Job]:
        """Finish a round that was never received, and give the jobs of it that failed."""
        self.wait(self._round, len(self._round), None)
        left, self._round = self._round, []
        return [job for job in left if job.request.failures]

    def _raise_failures(self, jobs: Sequence[Job]) -> None:
        failures = [
            failure
            for job in jobs
            for of_worker in job.request.failures.values()
            for failure in of_worker
        ]
        if failures:
            answers = {w: answer for job in jobs for w, answer in job.request.answers.items()}
            raise worker_error(failures, len(self.rows_of), self.seeds, answers)

    # ---------------------------------------------------------------------------------------- jobs

    def begin(self, worker: int, command: int, rows: list[int] | None = None) -> Job:
        """Have a worker that is free carry out a command on some of its rows; None: all."""
        self._require_open()
        return self._begin_command(self._workers[worker], command, rows)

    @property
    def requests(self) -> int:
        """How many requests there were so far."""
        return self._requests

    def begun_since(self, worker: int, requests: int) -> Job | None:
        """Give the job that a worker was given since there were so many requests; see `JobPool.begun_since`."""
        latest = self._workers[worker].latest
        is_new = latest is not None and latest.request.number > requests
        return latest if is_new and latest not in self._round else None

    def _new_job(
        self, worker: W, request: int | str, *, is_start: bool = False, least_s: float = 0.0
    ) -> Job:
        """Make a job for a worker that is free, which has failed already if that is lost.

        Args:
            worker: who gets it.
            request: command or method.
            is_start: it builds the host, or prepares that.
            least_s: seconds that it may take in any case.

        Raises:
            BusyEnvError: it has one.
        """
        if worker.job in self._round:  # one that was never received
            self.wait(self._round, len(self._round), None)
        if worker.job is not None:  # it may be done, and nobody has looked
            self._await_answers([worker.job], 0, 0.0)
        if worker.job is not None:
            raise BusyEnvError(
                f"workers {[worker.index]} are still processing a job. Receive it first."
            )
        self._requests += 1
        limit: Limit = "timeout"
        if is_start or request in self._building:
            limit = "start_timeout"
        limit_s = self.timeout_s if limit == "timeout" else self.start_timeout_s
        name = self._commands.get(request, str(request))
        allowed_s = math.inf if limit_s is None else max(limit_s, least_s)
        made = Request(name, self._requests, limit, allowed_s)
        if worker.lost is not None:
            made.failures[0, worker.index] = [worker.lost]
        return Job(worker.index, made)

    def wait(self, jobs: Sequence[Job], count: int, timeout_s: float | None) -> list[Job]:
        """Wait until ``count`` of some jobs are done, and give all that are; see `JobPool.wait`."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        pending = list(filter(self._is_pending, jobs))
        while True:
            nearest = min([until, *(job.request.deadline for job in pending)])
            wanted = max(count - (len(jobs) - len(pending)), 0)
            self._await_answers(pending, wanted, max(nearest - time.monotonic(), 0.0))
            self._expire(pending)
            pending = list(filter(self._is_pending, pending))
            if not pending or len(jobs) - len(pending) >= count or time.monotonic() >= until:
                return [job for job in jobs if job not in pending]

    def _is_pending(self, job: Job) -> bool:
        return self._workers[job.worker].job is job

    def _expire(self, jobs: Sequence[Job]) -> None:
        """Give up workers that have not answered in time."""
        for job in jobs:
            worker, request = self._workers[job.worker], job.request
            if worker.job is job and request.deadline <= time.monotonic():
                within = f"within {request.limit_s:g} s ({request.limit})"
                rows = tuple(self.rows_of[job.worker])
                lost = Failure(job.worker, rows, request.name, "timeout", message=within)
                worker.lost = self._give_up(worker, lost)
                request.failures[0, job.worker] = [worker.lost]
                worker.job = None

    def outcome(self, job: Job) -> Any:
        """Give what a job that is done has returned; see `JobPool.outcome`."""
        self.wait([job], 1, None)
        self._raise_failures([job])
        return job.request.answers.get(job.worker)

    def _require_open(self) -> None:
        if self.closed or not self._workers:
            state = "is closed" if self.closed else "was never started"
            raise ClosedEnvError(f"this pool of workers {state}; start a new one.")
