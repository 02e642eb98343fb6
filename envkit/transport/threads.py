"""A pool whose workers are threads of this process, each with the host of its rows.

Threads suit hosts that wait (for a simulator elsewhere, for a network, in native code that lets others run).
A thread cannot be ended from outside: one that does not answer in time is left to itself and its rows are
lost until `restart_worker` gives them a new thread and host.

Conventions
    The host of a worker is made, used and closed in its thread alone. Hosts are made one after the other:
    simulators import their parts then, and Python lets two threads that import in a circle see half a module.
    Errors are those of `ProcessPool`, so that the layer above treats all pools alike.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from envkit.errors import BusyEnvError, ClosedEnvError
from envkit.transport.failure import Failure, failure_of, failures_of, worker_error
from envkit.transport.handle import Limit, Request
from envkit.transport.host import Host, MakeHost, RowCursor, RowsFailedError, run_rows
from envkit.transport.jobs import Job
from envkit.transport.layout import ALIGNMENT_BYTES, Layout
from envkit.transport.pool import Selection, mask_of, spread_rows

__all__ = ["ThreadPool"]

_CLOSE_S = 3.0
_MAKING = threading.Lock()

Work = Callable[[], tuple[Any, list[Failure]]]


class ThreadPool:
    """Rows spread over threads; see `Pool` and `JobPool` for what each method promises.

    Args:
        make_host: builds the host of a worker, called in its thread with its rows.
        num_rows: number of rows.
        num_threads: number of workers; at most one for each row is used.
        commands: names of commands, and of methods that are to be called otherwise, for messages.
        timeout_s: seconds that a round or a call may take; None for no limit.
        start_timeout_s: the same for what builds hosts or envs.
        building: methods of the host that build anew what `start` has built.
    """

    def __init__(
        self,
        make_host: MakeHost,
        num_rows: int,
        num_threads: int,
        *,
        commands: Mapping[int | str, str] | None = None,
        timeout_s: float | None = 60.0,
        start_timeout_s: float | None = 60.0,
        building: Collection[str] = (),
    ) -> None:
        self.rows_of = spread_rows(num_rows, num_threads)
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self.seeds: dict[int, int] = {}
        self.closed = False
        self._make_host = make_host
        self._commands = dict(commands or {})
        self._building = building
        self._num_rows = num_rows
        self._changed = threading.Condition()
        self._requests = 0
        self._workers: list[_Worker] = []
        self._round: list[Job] = []
        self._arrays: dict[str, np.ndarray] | None = None

    @property
    def pids(self) -> list[int]:
        """This process, while open."""
        return [os.getpid()] if self._workers and not self.closed else []

    def start(self) -> list[object]:
        """Build all hosts at the same time, and return what each says of itself."""
        if self.closed or self._workers:
            raise ClosedEnvError("this pool was started before; make a new one.")
        self._workers = [_Worker(index, self._changed) for index in range(len(self.rows_of))]
        try:
            return self._together("start", self._workers, self._build, limit="start_timeout")
        except BaseException:
            self.close()
            raise

    def _build(self, worker: _Worker) -> object:
        with _MAKING:
            host = worker.host = self._make_host(self.rows_of[worker.index])
        return host.describe()

    def bind(self, layout: Layout) -> dict[str, np.ndarray]:
        """Allocate memory for ``layout`` and give it to every host."""
        self._require_open()
        memory = np.zeros(layout.size_bytes + ALIGNMENT_BYTES, np.uint8)
        self._arrays = layout.arrays(memory[-memory.ctypes.data % ALIGNMENT_BYTES :])
        self._together("bind", self._workers, self._bind, limit="start_timeout")
        return self._arrays

    def _bind(self, worker: _Worker) -> None:
        assert worker.host is not None and self._arrays is not None
        worker.host.bind(dict(self._arrays), self.rows_of[worker.index])

    def restart_worker(self, index: int) -> object:
        """Give the rows of a worker a new thread and host, bound to the same memory.

        Raises:
            WorkerError: the old thread still works, and would write into that memory beside the new one.
        """
        self._require_open()
        old = self._workers[index]
        if old.lost is not None and self._arrays is not None and old.is_busy:
            raise worker_error([old.lost], len(self.rows_of), self.seeds)
        old.end()
        worker = self._workers[index] = _Worker(index, self._changed)
        described = self._together("start", [worker], self._build, limit="start_timeout")[0]
        if self._arrays is not None:
            self._together("bind", [worker], self._bind, limit="start_timeout")
        return described

    # -------------------------------------------------------------------------------------- rounds

    def send(self, command: int, rows: Selection = None) -> None:
        """Start a round; see `Pool.send`."""
        self._require_open()
        left = self._abandoned()
        mask = np.ones(self._num_rows, bool) if rows is None else mask_of(rows, self._num_rows)
        self._round = left
        for worker, own in zip(self._workers, self.rows_of, strict=True):
            chosen = [row for row in own if mask[row]]
            if chosen:
                self._round.append(self._command(worker.index, command, chosen))

    def recv(self) -> None:
        """Wait for every worker that was woken, and raise what they met."""
        self._require_open()
        jobs, self._round = self._round, []
        self._finish(jobs)

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
        left = self._abandoned()
        chosen = range(len(self.rows_of)) if workers is None else workers
        jobs = [
            self.begin_call(index, method, *args, **kwargs)
            for index, (args, kwargs) in zip(chosen, arguments, strict=True)
        ]
        self._finish([*left, *jobs])
        return [job.request.answers[job.worker] for job in jobs]

    def _abandoned(self) -> list[Job]:
        """Finish a round that was never received, and give the jobs of it that failed."""
        left, self._round = self._round, []
        self.wait(left, len(left), None)
        return [job for job in left if job.request.failures]

    def _together(
        self,
        name: str,
        workers: Sequence[_Worker],
        work: Callable[[_Worker], Any],
        *,
        limit: Limit,
    ) -> list[Any]:
        jobs = [
            self._begin(w, name, limit, self._told(w.index, name, partial(work, w)))
            for w in workers
        ]
        self._finish(jobs)
        return [job.request.answers[job.worker] for job in jobs]

    def _finish(self, jobs: Sequence[Job]) -> None:
        """Wait for jobs, and raise what failed in them."""
        self.wait(jobs, len(jobs), None)
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

    def begin(self, worker: int, command: int) -> Job:
        """Have a worker that is free carry out a command on all its rows."""
        self._require_open()
        return self._command(worker, command, list(self.rows_of[worker]))

    def _command(self, index: int, command: int, rows: list[int]) -> Job:
        worker, name = self._workers[index], self._commands.get(command, str(command))

        def run() -> tuple[None, list[Failure]]:
            failures: list[Failure] = []
            assert worker.host is not None

            def failed(blamed: tuple[int, ...], error: BaseException) -> None:
                failures.append(failure_of(error, worker=index, rows=blamed, command=name))

            run_rows(worker.host, command, RowCursor(rows), catch=Exception, failed=failed)
            return None, failures

        return self._begin(worker, name, "timeout", run)

    def begin_call(self, worker: int, method: str, *args: Any, **kwargs: Any) -> Job:
        """Call a method of the host of a worker that is free."""
        self._require_open()
        limit: Limit = "start_timeout" if method in self._building else "timeout"
        name = self._commands.get(method, method)
        chosen = self._workers[worker]

        def call() -> Any:
            assert chosen.host is not None
            with _MAKING if method in self._building else nullcontext():
                return chosen.host.call(method, *args, **kwargs)

        return self._begin(chosen, name, limit, self._told(worker, name, call))

    def _told(self, worker: int, name: str, work: Callable[[], Any]) -> Work:
        """Have work tell what it raises."""
        rows = tuple(self.rows_of[worker])

        def told() -> tuple[Any, list[Failure]]:
            try:
                return work(), []
            except Exception as error:
                result = error.result if isinstance(error, RowsFailedError) else None
                return result, failures_of(error, worker=worker, rows=rows, command=name)

        return told

    def _begin(self, worker: _Worker, name: str, limit: Limit, work: Work) -> Job:
        if worker.job is not None:
            raise BusyEnvError(
                f"workers {[worker.index]} are still processing a job. Receive it first."
            )
        self._requests += 1
        limit_s = self.timeout_s if limit == "timeout" else self.start_timeout_s
        request = Request(name, self._requests, limit, math.inf if limit_s is None else limit_s)
        job = Job(worker.index, request)
        if worker.lost is not None:
            request.failures[0, worker.index] = [worker.lost]
        else:
            worker.begin(job, work)
        return job

    def wait(self, jobs: Sequence[Job], count: int, timeout_s: float | None) -> list[Job]:
        """Wait until ``count`` of some jobs are done, and give all that are; see `JobPool.wait`."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._expire(jobs)
                done = [job for job in jobs if self._workers[job.worker].job is not job]
                now = time.monotonic()
                if len(done) >= count or now >= until:
                    return done
                nearest = min(until, *(job.request.deadline for job in jobs if job not in done))
                self._changed.wait(None if nearest == math.inf else max(nearest - now, 0.0))

    def _expire(self, jobs: Sequence[Job]) -> None:
        """Give up workers that have not answered in time."""
        for job in jobs:
            worker, request = self._workers[job.worker], job.request
            if worker.job is job and request.deadline <= time.monotonic():
                within = f"within {request.limit_s:g} s ({request.limit})"
                rows = tuple(self.rows_of[job.worker])
                worker.lost = Failure(job.worker, rows, request.name, "timeout", message=within)
                request.failures[0, job.worker] = [worker.lost]
                worker.job = None

    def outcome(self, job: Job) -> Any:
        """Give what a job that is done has returned; see `JobPool.outcome`."""
        self._finish([job])
        return job.request.answers.get(job.worker)

    # --------------------------------------------------------------------------------------- close

    def close(self) -> None:
        """Close all hosts, in bounded time; closing twice does nothing."""
        self.closed = True
        workers, self._workers, self._arrays = self._workers, [], None
        for worker in workers:
            worker.end()
        until = time.monotonic() + _CLOSE_S
        for worker in workers:
            worker.thread.join(max(until - time.monotonic(), 0.0))

    def _require_open(self) -> None:
        if self.closed or not self._workers:
            state = "is closed" if self.closed else "was never started"
            raise ClosedEnvError(f"this pool of threads {state}; start a new one.")


class _Worker:
    """A thread, its host and what it does; ``lost`` tells why it can no longer be used."""

    def __init__(self, index: int, changed: threading.Condition) -> None:
        self.index = index
        self.host: Host | None = None
        self.job: Job | None = None
        self.lost: Failure | None = None
        self.is_busy = False  # also with a job that was given up
        self._changed = changed
        self._tasks: SimpleQueue[tuple[Job, Work] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=f"env {index}", daemon=True)
        self.thread.start()

    def begin(self, job: Job, work: Work) -> None:
        """Have the thread work; `job` is None again when it has."""
        self.job, self.is_busy = job, True
        self._tasks.put((job, work))

    def end(self) -> None:
        """Have the thread close its host and end, when it is done with what it does."""
        self._tasks.put(None)

    def _serve(self) -> None:
        try:
            while (task := self._tasks.get()) is not None:
                self._answer(*task)
        finally:
            if self.host is not None:
                self.host.close()

    def _answer(self, job: Job, work: Work) -> None:
        result, failures = work()
        with self._changed:
            self.is_busy = False
            if self.job is not job:  # it was given up meanwhile
                return
            if failures:
                job.request.failures[job.request.number, self.index] = failures
            if not failures or result is not None:
                job.request.answers[self.index] = result
            self.job = None
            self._changed.notify_all()
