"""A pool of rows over workers: who is asked when, until when they may answer, and what becomes of who does not.

`Pool` knows requests, deadlines and losses, once for workers of every kind. The differences between kinds are behind
`Backend`: how a worker comes to be, how it is asked, how its answer arrives, and how it is ended. This module does not
know what a command means.

Conventions
    request   what some workers are asked at once, with one deadline.
    round     request of all workers, or of those that own some rows: one `send` and one `recv`. The caller writes
              inputs into the bound arrays before `send`, and reads outputs after `recv`; in between the rows belong
              to the workers. A call of several workers is a round too.
    job       request of one worker, while others do other things. A worker has at most one.
    pending   asked, and not answered yet.
    abandoned round  one that was sent and never received, since Ctrl-C came in between. The next request finishes
              it, and its failures are raised with those of the next round.
    Ctrl-C may come behind any call. So a worker is pending before it is woken, with no call in between; and what is
    noted of an answer may be noted twice, until the worker is not pending.
"""

import math
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from envkit.errors import ArgumentError, BusyEnvError, ClosedEnvError, WorkerError
from envkit.transport.failure import Failure, worker_error
from envkit.transport.layout import Layout

Selection = Sequence[int] | np.ndarray | None
"""Which rows a command is for: None for all, row numbers, or a bool mask of shape ``(rows,)``."""
Limit = Literal["timeout", "start_timeout"]
_GRACE_S = 1.0


class Request:
    """A request to some workers at once: its deadline and its answers.

    Attributes:
        name: of the command or method, for messages.
        number: counts the requests of a pool.
        limit, limit_s: what sets the deadline, and to how many seconds; "start_timeout" where hosts or envs are built.
        deadline: as `time.monotonic` counts.
        answers: what calls returned, by worker.
        failures: what failed, by number of the request (0 for a worker that is lost) and worker.
    """

    __slots__ = ("answers", "deadline", "failures", "limit", "limit_s", "name", "number")

    def __init__(
        self,
        name: str,
        number: int,
        limit: Limit,
        limit_s: float | None,
        failures: dict[tuple[int, int], list[Failure]] | None = None,
    ) -> None:
        self.name, self.number, self.limit = name, number, limit
        self.limit_s = math.inf if limit_s is None else limit_s
        self.deadline = time.monotonic() + self.limit_s
        self.answers: dict[int, Any] = {}
        self.failures = {} if failures is None else failures

    def settle(self, worker: int, result: Any, failures: list[Failure]) -> None:
        """Record what a worker has returned, and what failed instead or beside."""
        if failures:
            self.failures[self.number, worker] = failures
        if not failures or result is not None:
            self.answers[worker] = result

    def miss(self, lost: Failure) -> None:
        """Record, once, that a worker can no longer be used."""
        self.failures[0, lost.worker] = [lost]


@dataclass(frozen=True, eq=False)
class Job:
    """Something that one worker does, while others do other things."""

    worker: int
    request: Request


class Worker:
    """A worker, as its pool sees it.

    Attributes:
        index: its number.
        rows: what it holds.
        reply: what its answer comes on; its key while it is pending.
        request: the last that it was asked.
        lost: why it can no longer be used; None while it can.
    """

    def __init__(self, index: int, rows: range) -> None:
        self.index, self.rows = index, rows
        self.reply: Any = index
        self.request = Request("start", 0, "start_timeout", None)
        self.lost: Failure | None = None


W = TypeVar("W", bound=Worker)


class Backend(ABC, Generic[W]):
    """Workers of one kind. It does what a `Pool` says, and decides neither who is asked nor how long that may take.

    Methods that take a request ask a worker that is free and not lost: it is pending from then on, until its answer was
    settled in the request.

    Attributes:
        rows_of: the rows of each worker.
        workers: one for each of these, in that order, from `open` to `close`.
        pending: workers that were asked and have not answered, by `Worker.reply`.
        owner_pid: process in which they were made.
        is_this_thread: whether the only worker is the caller's own thread.
        ends_with_pool: whether workers are to be ended when their pool is collected, or the interpreter exits.
    """

    is_this_thread = False
    ends_with_pool = True

    def __init__(self, rows_of: tuple[range, ...]) -> None:
        self.rows_of = rows_of
        self.workers: list[W] = []
        self.pending: dict[Any, W] = {}
        self.owner_pid = os.getpid()

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Process ids of the workers that have started and were not lost."""

    @abstractmethod
    def open(self) -> None:
        """Make all workers, which begin to start at the same time."""

    @abstractmethod
    def replace(self, index: int) -> W:
        """Put a new worker in the place of one, which is ended first if it lives."""

    def arrive(self, worker: W, request: Request) -> None:
        """Ask a new worker whether its process is there; only where `arrival_s` is not None."""

    def arrival_s(self, count: int) -> float | None:
        """Return the seconds that so many workers may take in any case until they are there; None where none is waited for."""
        return None

    @abstractmethod
    def start(self, worker: W, request: Request) -> None:
        """Build the host of a new worker; its answer is how the host describes itself."""

    @abstractmethod
    def allocate(self, layout: Layout) -> dict[str, np.ndarray]:
        """Make the arrays of ``layout`` that `bind` is about, and give ours."""

    @abstractmethod
    def bind(self, worker: W, request: Request) -> None:
        """Bind the arrays that were allocated, as they are now, to the host of a worker."""

    def lay(self, worker: W, name: str, place: np.ndarray, array: np.ndarray) -> None:
        """Write an array to its ``place``, the rows of a worker in the field ``name``, for its next call."""
        place[...] = array

    def packed(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Convert arguments of a call into the form in which `call` takes them.

        Raises:
            ArgumentError: something among them cannot be sent.
        """
        return args, kwargs

    @abstractmethod
    def call(self, worker: W, request: Request, method: str, arguments: Any) -> None:
        """Call a method of a worker's host, with `packed` arguments."""

    @abstractmethod
    def run(
        self, workers: Sequence[W], request: Request, command: int, mask: np.ndarray | None
    ) -> None:
        """Run a command in workers: on the rows of a mask over all rows, None for all.

        Each of them owns such rows. One that is lost misses the request.
        """

    @abstractmethod
    def attend(self, until: float, left: int) -> bool:
        """Take the answers that have come, and wait until at most ``left`` workers are pending.

        It may return before that whenever something has changed, and does at ``until`` (`time.monotonic`).

        Returns:
            Whether something has changed.
        """

    @abstractmethod
    def give_up(self, stuck: Sequence[tuple[W, Failure]]) -> None:
        """End workers that have not answered in time, see `lose`; backends may add to why that is."""

    def lose(self, worker: W, why: Failure) -> None:
        """End a worker, if that can be done, and note that it can no longer be used, unless that is known."""
        if worker.lost is None:
            worker.lost = why
        if worker.reply in self.pending:
            worker.request.miss(worker.lost)
            self.pending.pop(worker.reply, None)

    def is_stuck(self, worker: W) -> bool:
        """Check whether a lost worker still works on the bound arrays, and so can have no successor."""
        return False

    def require_alive(self) -> None:
        """Check that the workers can be asked from here.

        Raises:
            ClosedEnvError: they cannot, since this process is a fork of the one that made them.
        """
        if os.getpid() != self.owner_pid:
            raise ClosedEnvError(
                f"this pool of workers belongs to process {self.owner_pid}, and this is process {os.getpid()}, a "
                "fork of it. Make the environment again in the process that uses it."
            )

    @abstractmethod
    def close(self) -> None:
        """End all workers and free the arrays, in bounded time; closing twice does nothing."""


class Pool:
    """Rows ``0 .. num_rows - 1``, spread over workers. Use it from one thread, in the process that started it.

    Args:
        backend: the workers, not open yet.
        commands: names of commands (0 to 255), and of methods that are to be called otherwise, for messages.
        timeout_s: seconds that a round, a call or a job may take from now on; None for no limit.
        start_timeout_s: seconds that `start`, `bind` and the methods in ``building`` may take each, and so the start
            of a single worker; None for no limit. A cold start imports what envs need.
        building: methods of the host that build again what `start` has built.

    Attributes:
        seeds: the seeds that rows were last given, by row; they are in the messages of errors.
        requests: how many there were so far.
        closed: whether `close` was called.
    """

    def __init__(
        self,
        backend: Backend[Any],
        *,
        commands: Mapping[int | str, str] | None = None,
        timeout_s: float | None = 60.0,
        start_timeout_s: float | None = 60.0,
        building: Collection[str] = (),
    ) -> None:
        self.backend = backend
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self.seeds: dict[int, int] = {}
        self.requests = 0
        self.closed = False
        self._names = dict(commands or {})
        self._building = building
        self._num_rows = sum(map(len, backend.rows_of))
        self._first_rows = np.array([rows.start for rows in backend.rows_of])
        self._arrays: dict[str, np.ndarray] = {}
        self._is_bound = False
        self._round = Request("", 0, "timeout", None)
        self._end: Callable[[], object] = backend.close
        if backend.ends_with_pool:
            self._end = weakref.finalize(self, backend.close)

    @property
    def rows_of(self) -> tuple[range, ...]:
        """The rows of each worker."""
        return self.backend.rows_of

    @property
    def pids(self) -> list[int]:
        """Process ids of the living workers; this process for those that are in it."""
        return self.backend.pids

    # ------------------------------------------------------------------------------- start and end

    def start(self) -> list[object]:
        """Build all hosts at the same time, and return what each `Host.describe` said.

        Raises:
            WorkerError: a host could not be built; the pool is then closed.
        """
        if self.closed or self.backend.workers:
            raise ClosedEnvError("this pool was started before; make a new one.")
        try:
            self.backend.open()
            return self._start_up(self.backend.workers)
        except BaseException:
            self.close()
            raise

    def bind(self, layout: Layout) -> dict[str, np.ndarray]:
        """Allocate the arrays of ``layout``, have every host bind them, and return ours.

        They stay valid until `close`, and longer if you keep a view of them.
        """
        self._require_open()
        self._arrays = arrays = self.backend.allocate(layout)
        self._is_bound = True
        self._ask(self.backend.workers, "bind", self.backend.bind, limit="start_timeout")
        return arrays

    def restart_worker(self, index: int) -> object:
        """Replace worker ``index`` by a fresh one for the same rows, bound to the same arrays.

        Returns what its host says of itself. The old one, if it lives, is ended first.

        Raises:
            WorkerError: the new one failed; or the old one still works, and would write beside it.
        """
        self._require_open()
        backend, old = self.backend, self.backend.workers[index]
        if old.lost is not None and self._is_bound and backend.is_stuck(old):
            raise self._error([old.lost])
        try:
            worker = backend.replace(index)
            described = self._start_up([worker])[0]
            if self._is_bound:
                self._ask([worker], "bind", backend.bind, limit="start_timeout")
        except BaseException as error:
            if (worker := backend.workers[index]) is not old:
                why = Failure(index, tuple(worker.rows), "start", "interrupted")
                if isinstance(error, WorkerError):
                    why = replace(error.failures[0], rows=why.rows)
                backend.lose(worker, why)
            raise
        return described

    def close(self) -> None:
        """End all workers and free the memory, in bounded time; closing twice does nothing."""
        self.closed, self._arrays = True, {}
        self._end()

    def _start_up(self, workers: Sequence[Worker]) -> list[object]:
        backend = self.backend
        if (least_s := backend.arrival_s(len(workers))) is not None:
            self._ask(workers, "start", backend.arrive, limit="start_timeout", least_s=least_s)
        return self._ask(workers, "start", backend.start, limit="start_timeout")

    def _require_open(self) -> None:
        if self.closed or not self.backend.workers:
            state = "is closed" if self.closed else "was never started"
            raise ClosedEnvError(f"this pool of workers {state}; start a new one.")
        self.backend.require_alive()

    # -------------------------------------------------------------------------------------- rounds

    def send(self, command: int, rows: Selection = None) -> None:
        """Start a round: wake the workers that own one of ``rows``, and return at once."""
        backend, mask = self.backend, None
        workers = backend.workers
        if self.closed or not workers or os.getpid() != backend.owner_pid:
            self._require_open()
        if rows is not None:
            mask = mask_of(rows, self._num_rows)
            workers = list(compress(workers, np.logical_or.reduceat(mask, self._first_rows)))
        if backend.pending:
            self._make_room(workers)
        self.requests = number = self.requests + 1
        name = self._names.get(command) or str(command)
        begun = Request(name, number, "timeout", self.timeout_s, self._round.failures)
        self._round = begun
        backend.run(workers, begun, command, mask)

    def recv(self) -> None:
        """Wait until every worker that was woken has finished its rows.

        Raises:
            WorkerError: rows raised, or workers died; all others have finished their rows.
            WorkerTimeoutError: a worker did not answer within the deadline, and was given up.
        """
        backend, begun = self.backend, self._round
        if self.closed or not backend.workers or os.getpid() != backend.owner_pid:
            self._require_open()
        if backend.pending:
            self._finish(begun)
        if begun.failures:
            failures, begun.failures = begun.failures, {}
            raise self._error_of(failures, begun.answers)

    def call(
        self, method: str, *args: Any, workers: Sequence[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``method`` of the hosts of ``workers`` (all), concurrently; one result each."""
        count = len(self.rows_of) if workers is None else len(workers)
        return self.call_each(method, [(args, kwargs)] * count, workers)

    def call_each(
        self,
        method: str,
        arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        workers: Sequence[int] | None = None,
    ) -> list[Any]:
        """Like `call`, with separate ``(args, kwargs)`` for each of ``workers`` (all)."""
        self._require_open()
        backend = self.backend
        chosen = backend.workers if workers is None else [backend.workers[n] for n in workers]
        of_worker = {
            worker.index: backend.packed(method, *pair)
            for worker, pair in zip(chosen, arguments, strict=True)
        }

        def call(worker: Worker, request: Request) -> None:
            backend.call(worker, request, method, of_worker[worker.index])

        name = self._names.get(method, method)
        return self._ask(chosen, name, call, limit=self._limit_of(method))

    def _ask(
        self,
        workers: Sequence[Worker],
        name: str,
        ask: Callable[[Any, Request], None],
        *,
        limit: Limit,
        least_s: float = 0.0,
    ) -> list[Any]:
        """Ask something of each of some workers, and return their answers in that order."""
        self._make_room(workers)
        begun = self._request(name, limit, self._round.failures, least_s)
        self._round = begun
        for worker in workers:
            if worker.lost is None:
                ask(worker, begun)
            else:
                begun.miss(worker.lost)
        self.recv()
        return [begun.answers[worker.index] for worker in workers]

    # ---------------------------------------------------------------------------------------- jobs

    def begin(self, worker: int, command: int, rows: Sequence[int] | None = None) -> Job:
        """Start a command in a free worker on some of its rows; None: all.

        Raises:
            BusyEnvError: it has a job.
        """
        asked, request = self._free(worker, self._names.get(command) or str(command), "timeout")
        mask = None if rows is None else mask_of(rows, self._num_rows)
        self.backend.run([asked], request, command, mask)
        return Job(worker, request)

    def begin_call(self, worker: int, method: str, *args: Any, **kwargs: Any) -> Job:
        """Call a method of the host of a worker that is free.

        Raises:
            BusyEnvError: it has a job.
        """
        packed = self.backend.packed(method, args, kwargs)
        name = self._names.get(method, method)
        asked, request = self._free(worker, name, self._limit_of(method))
        if asked.lost is None:
            self.backend.call(asked, request, method, packed)
        else:
            request.miss(asked.lost)
        return Job(worker, request)

    def lay(self, worker: int, name: str, array: np.ndarray) -> None:
        """Write an array into the field ``name`` in each row of a free worker, where its next call finds it.

        Workers that share no memory get one copy of an array that is laid for several of them, so it must not change
        afterwards. The field needs no entry in ``Traffic.reads``.
        """
        self._require_open()
        laid_for = self.backend.workers[worker]
        rows = slice(laid_for.rows.start, laid_for.rows.stop)
        self.backend.lay(laid_for, name, self._arrays[name][rows], array)

    def done_job(self, worker: int) -> Job:
        """Return a job in which a worker is asked nothing, and which is done."""
        return Job(worker, Request("", 0, "timeout", None))

    def begun_since(self, worker: int, requests: int) -> Job | None:
        """Return the job that a worker was given since there were so many requests; None where there is none.

        After Ctrl-C in `begin` it is known here alone.
        """
        request = self.backend.workers[worker].request
        is_new = request.number > requests and request is not self._round
        return Job(worker, request) if is_new else None

    def wait(self, jobs: Sequence[Job], count: int, timeout_s: float | None) -> list[Job]:
        """Wait until ``count`` of some jobs are done, and give all that are: answered or failed.

        After ``timeout_s`` seconds (None: no limit) it gives those that are done by then. Without any jobs to wait for,
        it waits once for whatever comes.
        """
        self._require_open()
        backend = self.backend
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        backend.attend(0.0, 0)
        while True:
            pending = list(backend.pending.values())
            done = [job for job in jobs if not self._is_pending(job)]
            if len(done) >= count or time.monotonic() >= until:
                return done
            nearest = min([until, *(worker.request.deadline for worker in pending)])
            if not backend.attend(nearest, len(pending) - count + len(done)):
                self._expire()
            if len(done) == len(jobs):
                return done

    def outcome(self, job: Job) -> Any:
        """Return what a job has returned, once it is done; None for a command.

        Raises:
            WorkerError: it failed.
        """
        if self._is_pending(job):
            self.wait([job], 1, None)
        request = job.request
        if request.failures:
            raise self._error_of(request.failures, request.answers)
        return request.answers.get(job.worker)

    def _free(self, worker: int, name: str, limit: Limit) -> tuple[Worker, Request]:
        """Return a worker that is free, and what it is asked from now on."""
        self._require_open()
        asked = self.backend.workers[worker]
        self._make_room([asked])
        return asked, self._request(name, limit)

    def _is_pending(self, job: Job) -> bool:
        workers = self.backend.workers
        worker = workers[job.worker] if workers else None
        return (
            worker is not None
            and worker.request is job.request
            and worker.reply in self.backend.pending
        )

    # ----------------------------------------------------------------------------------- under way

    def _limit_of(self, method: str) -> Limit:
        return "start_timeout" if method in self._building else "timeout"

    def _request(
        self,
        name: str,
        limit: Limit,
        failures: dict[tuple[int, int], list[Failure]] | None = None,
        least_s: float = 0.0,
    ) -> Request:
        """Ask for something from now on; ``failures`` of an abandoned round are reported with its own."""
        self.requests = number = self.requests + 1
        limit_s = self.timeout_s if limit == "timeout" else self.start_timeout_s
        limit_s = None if limit_s is None else max(limit_s, least_s)
        return Request(name, number, limit, limit_s, failures)

    def _make_room(self, asked: Sequence[Worker]) -> None:
        """Free all workers: finish a round that was never received.

        Raises:
            BusyEnvError: some have jobs.
        """
        if not self.backend.pending:
            return
        if self._busy(asked):
            self.backend.attend(0.0, 0)  # an abandoned one, after Ctrl-C, may be done
            if busy := self._busy(asked):
                raise BusyEnvError(f"workers {busy} are still processing a job. Receive it first.")
        left = self._round  # its deadline may have passed while no caller waited for it
        left.deadline = max(left.deadline, time.monotonic() + min(left.limit_s, _GRACE_S))
        self._finish(left)

    def _busy(self, asked: Sequence[Worker]) -> list[int]:
        pending = self.backend.pending
        jobs = [w for w in asked if w.reply in pending and w.request is not self._round]
        return [worker.index for worker in jobs]

    def _finish(self, begun: Request) -> None:
        """Wait for every worker that a round has asked, and note what failed; others may have jobs."""
        pending, attend = self.backend.pending, self.backend.attend
        while pending:
            under_way, others = list(pending.values()), 0
            for worker in under_way:
                others += worker.request is not begun
            if others == len(under_way):
                return
            if not attend(begun.deadline, others):
                self._expire()

    def _expire(self) -> None:
        """Abandon every worker that did not answer in time."""
        now, stuck = time.monotonic(), list[tuple[Any, Failure]]()
        for worker in list(self.backend.pending.values()):
            request = worker.request
            if request.deadline <= now:
                within = f"within {request.limit_s:g} s ({request.limit})"
                rows = tuple(worker.rows)
                why = Failure(worker.index, rows, request.name, "timeout", message=within)
                stuck.append((worker, why))
        if stuck:
            self.backend.give_up(stuck)

    def _error_of(
        self, failures_of: Mapping[tuple[int, int], list[Failure]], answers: Mapping[int, Any]
    ) -> WorkerError:
        failures = [failure for of_worker in failures_of.values() for failure in of_worker]
        failures.sort(key=lambda failure: failure.worker)
        return self._error(failures, answers)

    def _error(
        self, failures: Sequence[Failure], answers: Mapping[int, Any] | None = None
    ) -> WorkerError:
        count = None if self.backend.is_this_thread else len(self.rows_of)
        return worker_error(failures, count, self.seeds, answers)


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
    chosen = np.asarray(rows)
    if chosen.dtype == bool:
        if chosen.shape != (num_rows,):
            raise ArgumentError(
                f"row mask has shape {chosen.shape}, but the pool has {num_rows} rows. "
                f"Pass a mask of shape ({num_rows},)."
            )
        return chosen
    mask = np.zeros(num_rows, bool)
    if chosen.size == 0:
        return mask
    if chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() >= num_rows:
        raise ArgumentError(
            f"rows {chosen.tolist()} are not row numbers of this pool; use integers from 0 to "
            f"{num_rows - 1}, or a bool mask."
        )
    mask[chosen] = True
    return mask


def call_by_row(pool: Pool, method: str, values: dict[int, Any], *leading: Any) -> dict[int, Any]:
    """Call ``method(*leading, {row: value})`` of every worker that owns one of the rows, and give what it says of each."""
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    workers: list[int] = []
    for worker, owned in enumerate(pool.rows_of):
        own = {row: values[row] for row in owned if row in values}
        if own:
            arguments.append(((*leading, own), {}))
            workers.append(worker)
    return merged(pool.call_each(method, arguments, workers))


def merged(replies: Iterable[dict[int, Any] | None]) -> dict[int, Any]:
    """Join what several workers say of their rows; one that says nothing gives None."""
    return {row: said for reply in replies for row, said in (reply or {}).items()}
