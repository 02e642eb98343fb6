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

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from envkit.errors import ClosedEnvError
from envkit.transport.failure import Failure, failure_of, failures_of, worker_error
from envkit.transport.host import Host, MakeHost, RowCursor, RowsFailedError, run_rest
from envkit.transport.job_rounds import Arrivals, JobRounds
from envkit.transport.jobs import Job
from envkit.transport.layout import Layout

__all__ = ["ThreadPool"]

_CLOSE_S = 3.0
_MAKING = threading.Lock()

Work = Callable[[], tuple[Any, list[Failure]]]


class ThreadPool(JobRounds["_Worker"]):
    """Rows spread over threads; see `Pool` and `JobPool` for what each method promises.

    Args:
        make_host: builds the host of a worker, called in its thread with its rows.
        num_rows: number of rows.
        num_threads: number of workers; at most one for each row is used.
        **options: see `JobRounds`.
    """

    def __init__(
        self, make_host: MakeHost, num_rows: int, num_threads: int, **options: Any
    ) -> None:
        super().__init__(num_rows, num_threads, **options)
        self._make_host = make_host
        self._answers = Arrivals()
        self._arrays: dict[str, np.ndarray] | None = None

    @property
    def pids(self) -> list[int]:
        """This process, while open."""
        return [os.getpid()] if self._workers and not self.closed else []

    def start(self) -> list[object]:
        """Build all hosts at the same time, and return what each says of itself."""
        if self.closed or self._workers:
            raise ClosedEnvError("this pool was started before; make a new one.")
        self._workers = [_Worker(index, self._answers) for index in range(len(self.rows_of))]
        try:
            return self._together(self._starts(self._workers))
        except BaseException:
            self.close()
            raise

    def _starts(self, workers: Sequence[_Worker]) -> Iterator[Job]:
        for worker in workers:
            job = self._new_job(worker, "start", is_start=True)
            yield self._begin(worker, job, partial(self._build, worker))

    def _build(self, worker: _Worker) -> object:
        with _MAKING:
            host = worker.host = self._make_host(self.rows_of[worker.index])
        return host.describe()

    def bind(self, layout: Layout) -> dict[str, np.ndarray]:
        """Allocate memory for ``layout`` and give it to every host."""
        self._require_open()
        self._arrays = layout.zeros()
        self._together(self._binds(self._workers))
        return self._arrays

    def _binds(self, workers: Sequence[_Worker]) -> Iterator[Job]:
        for worker in workers:
            job = self._new_job(worker, "bind", is_start=True)
            yield self._begin(worker, job, partial(self._bind, worker))

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
        worker = self._workers[index] = _Worker(index, self._answers)
        described = self._together(self._starts([worker]))[0]
        if self._arrays is not None:
            self._together(self._binds([worker]))
        return described

    # ---------------------------------------------------------------------------------------- jobs

    def _begin_command(self, worker: _Worker, command: int, rows: list[int] | None) -> Job:
        job = self._new_job(worker, command)
        chosen = RowCursor(self.rows_of[worker.index] if rows is None else rows)

        def run() -> tuple[None, list[Failure]]:
            host = worker.host
            assert host is not None
            try:
                host.run(command, chosen)
            except Exception as error:
                index, name = worker.index, job.request.name
                return None, [
                    failure_of(raised, worker=index, rows=blamed, command=name)
                    for blamed, raised in run_rest(host, command, chosen, error, catch=Exception)
                ]
            return None, []

        return worker.begin(job, run)

    def begin_call(self, worker: int, method: str, *args: Any, **kwargs: Any) -> Job:
        """Call a method of the host of a worker that is free."""
        self._require_open()
        chosen = self._workers[worker]

        def call() -> Any:
            assert chosen.host is not None
            with _MAKING if method in self._building else nullcontext():
                return chosen.host.call(method, *args, **kwargs)

        return self._begin(chosen, self._new_job(chosen, method), call)

    def _begin(self, worker: _Worker, job: Job, work: Callable[[], Any]) -> Job:
        """Have a worker do something, and tell what it raises."""
        rows, name = tuple(self.rows_of[worker.index]), job.request.name

        def told() -> tuple[Any, list[Failure]]:
            try:
                return work(), []
            except Exception as error:
                result = error.result if isinstance(error, RowsFailedError) else None
                return result, failures_of(error, worker=worker.index, rows=rows, command=name)

        return worker.begin(job, told)

    def wait(self, jobs: Sequence[Job], count: int, timeout_s: float | None) -> list[Job]:
        """Wait until ``count`` of some jobs are done, and give all that are; see `JobPool.wait`."""
        with self._answers:  # nobody answers between a look and the wait for what changes
            return super().wait(jobs, count, timeout_s)

    def _await_answers(self, jobs: Sequence[Job], wanted: int, seconds: float) -> None:
        self._answers.wait_for_some(wanted, seconds)

    def _give_up(self, worker: _Worker, lost: Failure) -> Failure:
        frame = sys._current_frames().get(worker.thread.ident or 0)
        stack = "" if frame is None else "".join(traceback.format_stack(frame))
        return replace(lost, traceback=stack, ending="was given up (a thread cannot be ended)")

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


class _Worker:
    """A thread, its host and what it does; ``lost`` tells why it can no longer be used."""

    def __init__(self, index: int, answers: Arrivals) -> None:
        self.index = index
        self.host: Host | None = None
        self.job: Job | None = None
        self.latest: Job | None = None
        self.lost: Failure | None = None
        self.is_busy = False  # also with a job that was given up
        self._answers = answers
        self._tasks: SimpleQueue[tuple[Job, Work] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=f"env {index}", daemon=True)
        self.thread.start()

    def begin(self, job: Job, work: Work) -> Job:
        """Have the thread work, unless it is lost; `job` is None again when it has."""
        if self.lost is None:
            self.job, self.latest, self.is_busy = job, job, True
            self._tasks.put((job, work))
        return job

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
        with self._answers:
            self.is_busy = False
            if self.job is not job:  # it was given up meanwhile
                return
            job.request.settle(self.index, result, failures)
            self.job = None
            self._answers.came()
