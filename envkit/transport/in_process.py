"""Workers inside this process: the caller's own thread, or threads, each with the host of its rows.

Threads suit hosts that wait (for a simulator elsewhere, for a network, in native code that lets others run).
A thread cannot be ended from outside: one that does not answer in time is left to itself and its rows are
lost until `Pool.restart_worker` gives them a new thread and host.

Conventions
    task  what is to be done with the host of a worker. The host of a thread is made, used and closed there alone.
    Hosts are made one after the other: simulators import their parts then, and Python lets two threads that import in
    a circle see half a module.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from envkit.transport.failure import Failure, failure_of, failures_of
from envkit.transport.host import Host, MakeHost, RowCursor, RowsFailedError, run_rest
from envkit.transport.layout import Layout
from envkit.transport.pool import Backend, Request, Worker, spread_rows

_CLOSE_S = 3.0

Answer = tuple[Any, list[Failure]]
Task = Callable[[], Answer]


class HostWorker(Worker):
    """A worker whose host is an object of this process."""

    def __init__(self, index: int, rows: range) -> None:
        super().__init__(index, rows)
        self.all_rows = RowCursor(rows)
        self.host: Host | None = None

    @property
    def the_host(self) -> Host:
        """Its host, which was made."""
        assert self.host is not None
        return self.host


H = TypeVar("H", bound=HostWorker)


class _InProcess(Backend[H]):
    """State that workers inside this process share.

    Args:
        make_host: builds the host of a worker, called where that is used, with its rows.
        num_rows: number of rows.
        num_workers: number of workers; at most one for each row is used.
    """

    ends_with_pool = False
    _while_making: AbstractContextManager[Any] = nullcontext()

    def __init__(self, make_host: MakeHost, num_rows: int, num_workers: int) -> None:
        super().__init__(spread_rows(num_rows, num_workers))
        self._make_host = make_host
        self._arrays: dict[str, np.ndarray] = {}

    @property
    def pids(self) -> list[int]:
        """This process, while open."""
        return [os.getpid()] if self.workers else []

    def open(self) -> None:
        """Make all workers."""
        self.owner_pid = os.getpid()
        self.workers = [self._make(index) for index in range(len(self.rows_of))]

    @abstractmethod
    def _make(self, index: int) -> H:
        """Make a worker without a host."""

    @abstractmethod
    def _have(self, worker: H, request: Request, task: Task) -> None:
        """Run a task of a worker, and store its answer in the request."""

    def start(self, worker: H, request: Request) -> None:
        """Build the host of a worker."""

        def build() -> object:
            with self._while_making:
                host = worker.host = self._make_host(worker.rows)
            return host.describe()

        self._have(worker, request, partial(_answer_of, worker, request, build))

    def allocate(self, layout: Layout) -> dict[str, np.ndarray]:
        """Allocate ordinary memory."""
        self._arrays = layout.zeros()
        return dict(self._arrays)

    def bind(self, worker: H, request: Request) -> None:
        """Bind the arrays to the host of a worker."""
        arrays = self._arrays

        def bind() -> None:
            worker.the_host.bind(dict(arrays), worker.rows)

        self._have(worker, request, partial(_answer_of, worker, request, bind))

    def call(self, worker: H, request: Request, method: str, arguments: Any) -> None:
        """Call a method of a worker's host."""
        args, kwargs = arguments
        guard = self._while_making if request.limit == "start_timeout" else nullcontext()

        def call() -> object:
            with guard:
                return worker.the_host.call(method, *args, **kwargs)

        self._have(worker, request, partial(_answer_of, worker, request, call))

    def run(
        self, workers: Sequence[H], request: Request, command: int, mask: np.ndarray | None
    ) -> None:
        """Run a command in workers."""
        for worker in workers:
            if worker.lost is not None:
                request.miss(worker.lost)
                continue
            self._have(worker, request, partial(_ran, worker, command, mask, request))


def _answer_of(worker: HostWorker, request: Request, work: Callable[[], object]) -> Answer:
    """Call ``work`` and return its result and the failures that it raised."""
    try:
        return work(), []
    except Exception as error:
        result = error.result if isinstance(error, RowsFailedError) else None
        rows = tuple(worker.rows)
        return result, failures_of(error, worker=worker.index, rows=rows, command=request.name)


def _ran(worker: HostWorker, command: int, mask: np.ndarray | None, request: Request) -> Answer:
    """Carry out a command, and give what rows have raised."""
    host, rows = worker.the_host, worker.all_rows
    if mask is not None:
        own = mask[worker.rows.start : worker.rows.stop]
        rows = RowCursor((np.flatnonzero(own) + worker.rows.start).tolist())
    try:
        host.run(command, rows)
    except Exception as error:
        return None, [
            failure_of(raised, worker=worker.index, rows=blamed, command=request.name)
            for blamed, raised in run_rest(host, command, rows, error, catch=Exception)
        ]
    return None, []


class ThisThread(_InProcess[HostWorker]):
    """One worker, which is the caller: what it is asked is done at once, and has no deadline."""

    is_this_thread = True

    def __init__(self, make_host: MakeHost, num_rows: int) -> None:
        super().__init__(make_host, num_rows, 1)

    def _make(self, index: int) -> HostWorker:
        return HostWorker(index, self.rows_of[index])

    def replace(self, index: int) -> HostWorker:
        """Close the host, for another one."""
        _close_host(self.workers[index])
        self.workers[index] = worker = self._make(index)
        return worker

    def _have(self, worker: HostWorker, request: Request, task: Task) -> None:
        request.settle(worker.index, *task())

    def run(
        self,
        workers: Sequence[HostWorker],
        request: Request,
        command: int,
        mask: np.ndarray | None,
    ) -> None:
        """Carry out a command."""
        for worker in workers:
            _, failures = _ran(worker, command, mask, request)
            if failures:
                request.settle(worker.index, None, failures)

    def attend(self, until: float, left: int) -> bool:
        """Do nothing: all has been answered."""
        return False

    def give_up(self, stuck: Sequence[tuple[HostWorker, Failure]]) -> None:
        """Do nothing: no worker is ever pending."""

    def require_alive(self) -> None:
        """Accept forks of this process: the host lives on in them."""

    def close(self) -> None:
        """Close the host."""
        workers, self.workers, self._arrays = self.workers, [], {}
        for worker in workers:
            _close_host(worker)


def _close_host(worker: HostWorker) -> None:
    host, worker.host = worker.host, None
    if host is not None:
        host.close()


class Arrivals(threading.Condition):
    """Answers that threads give while another one waits for some of them, and is woken once for all of these.

    Its lock is held to answer, and from a look at what there is to the wait for more.
    """

    _wanted = 0

    def __exit__(self, *raised: Any) -> None:
        """Release the lock, which a wait that Ctrl-C interrupted twice has not taken back."""
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

    def wait_for_some(self, wanted: int, seconds: float) -> bool:
        """Wait until so many more have come, from any worker, but no longer than ``seconds``; say whether they have."""
        self._wanted = wanted
        return wanted <= 0 or self.wait(None if seconds == math.inf else seconds)

    def attend(self, pending: dict[Any, Any], until: float, left: int) -> bool:
        """Wait until at most ``left`` of some workers are pending; see `Backend.attend`."""
        with self:  # no answer comes between a look and the wait for what changes
            if not pending:
                return False
            return self.wait_for_some(len(pending) - left, max(until - time.monotonic(), 0.0))


class Threads(_InProcess["ThreadWorker"]):
    """Rows spread over threads."""

    _while_making = threading.Lock()  # of all pools, as the modules that simulators import

    def __init__(self, make_host: MakeHost, num_rows: int, num_threads: int) -> None:
        super().__init__(make_host, num_rows, num_threads)
        self._answers = Arrivals()

    def _make(self, index: int) -> ThreadWorker:
        return ThreadWorker(index, self.rows_of[index], self._answer)

    def replace(self, index: int) -> ThreadWorker:
        """Start a new thread; the old one closes its host and ends when it is done with what it does."""
        self.workers[index].tasks.put(None)
        self.pending.pop(index, None)
        self.workers[index] = worker = self._make(index)
        return worker

    def is_stuck(self, worker: ThreadWorker) -> bool:
        """Check whether a thread still works, and would write beside its successor."""
        return worker.is_busy

    def _have(self, worker: ThreadWorker, request: Request, task: Task) -> None:
        put, given = worker.tasks.put, (request, task)
        worker.request, worker.is_busy = request, True
        self.pending[worker.reply] = worker
        put(given)  # with no call since it is pending: Ctrl-C in between would leave it without

    def _answer(self, worker: ThreadWorker, request: Request, answer: Answer) -> None:
        """Store the answer of a thread in its request; called in that thread."""
        with self._answers:
            worker.is_busy = False
            if self.pending.get(worker.reply) is not worker:  # it was given up meanwhile
                return
            request.settle(worker.index, *answer)
            del self.pending[worker.reply]
            self._answers.came()

    def attend(self, until: float, left: int) -> bool:
        """Wait for answers."""
        return self._answers.attend(self.pending, until, left)

    def give_up(self, stuck: Sequence[tuple[ThreadWorker, Failure]]) -> None:
        """Abandon threads, and record where they were stuck."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        for worker, why in stuck:
            frame = frames.get(worker.thread.ident or 0)
            stack = "" if frame is None else "".join(traceback.format_stack(frame))
            ending = "was given up (a thread cannot be ended)"
            with self._answers:
                if self.pending.get(worker.reply) is worker:
                    self.lose(worker, replace(why, traceback=stack, ending=ending))

    def close(self) -> None:
        """Close all hosts, in bounded time."""
        workers, self.workers, self._arrays = self.workers, [], {}
        for worker in workers:
            worker.tasks.put(None)
        until = time.monotonic() + _CLOSE_S
        for worker in workers:
            worker.thread.join(max(until - time.monotonic(), 0.0))


class ThreadWorker(HostWorker):
    """A thread and its host; ``is_busy`` also with a task that was given up."""

    def __init__(
        self, index: int, rows: range, answer: Callable[[ThreadWorker, Request, Answer], None]
    ) -> None:
        super().__init__(index, rows)
        self.is_busy = False
        self.tasks: SimpleQueue[tuple[Request, Task] | None] = SimpleQueue()
        self._answer = answer
        self.thread = threading.Thread(target=self._serve, name=f"env {index}", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            while (given := self.tasks.get()) is not None:
                request, task = given
                self._answer(self, request, task())
        finally:
            _close_host(self)
