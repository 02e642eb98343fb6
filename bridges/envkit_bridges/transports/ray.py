"""A pool whose workers are Ray actors, on this machine or on others of a cluster.

`RayPool` places actors, sends them requests, waits for their answers and ends them. `RowActor` serves one pool, one request
after the other. They share no memory: both sides hold arrays of their own, and what a request reads and writes of them
(`Layout.traffic`) goes through Ray's store as NumPy arrays. `RaySession` is Ray in this process: begun where it is not
running yet, and then ended after the last pool that uses it.

Conventions
    An actor is lost when Ray says so of it or of its node, or when a deadline has passed; then it is killed.
    Nothing is ever sent to it again: its rows go to a new actor, see `restart_worker`.
    Errors are those of `ProcessPool`, so that the layer above treats all pools alike.
    parts    rows of bound arrays, see `moving`. They arrive read-only, and are copied once into the actor's arrays.
    reply    a message, see `answers` (None where a command went well, which is all there is to tell), and the
             parts that were written.
    session  from the first pool that found no Ray to the end of the last pool that began meanwhile. Ray that
             somebody else began is used and left alone.
"""

from __future__ import annotations

import math
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from envkit.errors import ArgumentError, ClosedEnvError, WorkerError
from envkit.transport import by_value
from envkit.transport.answers import Answers, build_host, call_host, read_answer
from envkit.transport.failure import Failure
from envkit.transport.handle import pickle_arguments, pickle_maker
from envkit.transport.host import Host, MakeHost, RowCursor
from envkit.transport.interpreter import worker_environ
from envkit.transport.job_rounds import JobRounds
from envkit.transport.jobs import Job
from envkit.transport.layout import Layout
from envkit.transport.moving import MovingRows
from envkit_bridges.libraries import require

__all__ = ["RayPool"]

ray = require("ray")


class RaySession:
    """One pool's part in the session, from now on until `end`.

    Args:
        address: of the cluster, as ``ray.init`` takes it; None takes what that finds, or begins one here.

    Raises:
        ArgumentError: this process is connected to another cluster.
    """

    _users = 0  # of this process, as Ray itself
    _begun: tuple[str, str] | None = None  # the connection that a pool began

    def __init__(self, address: str | None):
        if not ray.is_initialized():
            ray.init(address=address, include_dashboard=False)
            RaySession._users, RaySession._begun = 0, _connection()
        elif address not in (None, "auto", known := ray.get_runtime_context().gcs_address):
            raise ArgumentError(
                f"backend_options['address'] is {address!r}, but this process is connected to Ray at "
                f"{known!r} already, and can be to one cluster only. Leave the address out, or call "
                "ray.shutdown() first."
            )
        RaySession._users += 1
        self._connection, self.owner_pid = _connection(), os.getpid()

    @property
    def is_alive(self) -> bool:
        """Whether this process is the one that began it, and Ray was not shut down since."""
        return (
            os.getpid() == self.owner_pid
            and ray.is_initialized()
            and _connection() == self._connection
        )

    def end(self) -> None:
        """Have no part in it any more, called once; the last pool ends Ray, if a pool began it."""
        if not self.is_alive:
            return
        RaySession._users -= 1
        if RaySession._begun == self._connection and RaySession._users == 0:
            ray.shutdown()


def _connection() -> tuple[str, str]:
    """Name this process's connection to Ray: jobs of a cluster have names of their own, clusters their nodes."""
    context = ray.get_runtime_context()
    return context.get_job_id(), context.get_node_id()


Parts = Sequence[np.ndarray]
Reply = tuple[bytes | None, Parts]


@dataclass(frozen=True)
class Setup:
    """First message to an actor: who it is, and what its maker expects of the process."""

    index: int
    rows: range
    commands: dict[int | str, str]
    environ: dict[str, str]
    hide_warnings: bool
    prepare: tuple[bytes, ...]  # called next
    maker: bytes  # unpickled last, since its imports may need all of the above

    def apply(self) -> int:
        """Set up this process, and give its number; what else it finds around it is Ray's to decide."""
        if self.hide_warnings:
            warnings.simplefilter("ignore")
        os.environ.update(self.environ)
        for pickled in self.prepare:
            pickle.loads(pickled)()
        pickle.loads(self.maker)
        return os.getpid()


class RowActor:
    """Serves one pool; `RayPool` calls its methods from afar."""

    _host: Host | None = None
    _moving: MovingRows | None = None

    def arrive(self, setup: Setup) -> Reply:
        """Prepare this process, and import what the maker needs; answers the number of the process."""
        self._setup = setup
        self._answers = Answers(setup.index, setup.rows, setup.commands)
        return self._answers.of("start", lambda: (None, setup.apply()))[1], []

    def start(self) -> Reply:
        """Build the host; answers what it says of itself."""
        self._host, message = self._answers.of(
            "start", lambda: build_host(self._setup.maker, self._setup.rows)
        )
        return message, []

    def bind(self, layout: Layout, parts: Parts) -> Reply:
        """Bind arrays of this process, with all that the pool's hold of these rows; no parts if that is zeros."""
        host, rows = self._require_host(), self._setup.rows

        def work() -> tuple[None, None]:
            arrays = layout.zeros()
            self._moving = MovingRows(layout, arrays, rows)
            if parts:
                self._moving.take_everything(parts)
            host.bind(arrays, rows)
            return None, None

        return self._answers.of("bind", work)[1], []

    def run(self, command: int, rows: list[int] | None, moment: int | None, parts: Parts) -> Reply:
        """Carry out a command on some rows (None: all)."""
        host, moving, message = self._require_host(), self._moving, None
        chosen = RowCursor(self._setup.rows if rows is None else rows)
        if moving is not None:
            moving.take_inputs(command, moment, parts)
        try:
            host.run(command, chosen)
        except BaseException as error:
            message = self._answers.of_rest(host, command, chosen, error)
        return message, [] if moving is None else moving.outputs(command, moment, rows)

    def call(self, method: str, arguments: bytes, moment: int | None, parts: Parts) -> Reply:
        """Call a method of the host."""
        host, moving = self._require_host(), self._moving
        if moving is not None:
            moving.take_inputs(method, moment, parts)
        _, message = self._answers.of(method, lambda: (None, call_host(host, method, arguments)))
        return message, [] if moving is None else moving.outputs(method, moment, None)

    def close(self) -> None:
        """Close the host, if there is one."""
        host, self._host = self._host, None
        if host is not None:
            host.close()

    def _require_host(self) -> Host:
        if self._host is None:
            raise WorkerError(
                "Ray has started this actor anew (backend_options['max_restarts']), and what it held is gone."
            )
        return self._host


_CLOSE_S, _CLOSE_BUSY_S = 3.0, 0.5
_ARRIVAL_S = 300.0
"""Seconds that Ray has at least to find a place for actors and to start their processes."""


class RayPool(JobRounds["_Worker"]):
    """Rows spread over actors; see `Pool` and `JobPool` for what each method promises.

    Use it from one thread, in the process that made it. It takes part in a `RaySession` until it is closed.

    Args:
        make_host: builds the host of a worker, called there with its rows. Travels by value, see `by_value`.
        num_rows: number of rows.
        num_actors: number of workers, at most one for each row; None takes as many as the cluster has CPUs for.
        address: of the cluster, see `RaySession`.
        actor_options: of ``ray.remote`` for each actor: "num_cpus", "num_gpus", "resources", "max_restarts",
            "runtime_env". An actor that Ray restarts has lost its host, and so is lost.
        hide_warnings: ignore Python warnings in workers, from before they import anything for ``make_host``.
        prepare: functions that every worker calls before it unpickles ``make_host``, in this order.
            They travel by value.
        **options: see `JobRounds`.

    Raises:
        ArgumentError: Ray refuses an option, or is connected to another cluster.
    """

    def __init__(
        self,
        make_host: MakeHost,
        num_rows: int,
        num_actors: int | None = None,
        *,
        address: str | None = None,
        actor_options: Mapping[str, Any] | None = None,
        hide_warnings: bool = False,
        prepare: Iterable[Callable[[], None]] = (),
        **options: Any,
    ) -> None:
        given = dict(actor_options or {})
        maker, prepared = pickle_maker(make_host), tuple(map(by_value.dumps, prepare))
        self._new_actor, self._actor_options = _actor_class(given).remote, given
        self._session = RaySession(address)
        try:
            super().__init__(num_rows, num_actors or _room(given), **options)
        except BaseException:
            self._session.end()
            raise
        self._setup = Setup(
            0, range(0), self._commands, _environ(given), hide_warnings, prepared, maker
        )
        self._layout: Layout | None = None
        self._arrays: dict[str, np.ndarray] = {}
        self._finalizer = weakref.finalize(self, _end, self._workers, self._session)

    @property
    def pids(self) -> list[int]:
        """Process ids of the living actors, each on the machine that it is on."""
        return [worker.pid for worker in self._workers if worker.lost is None and worker.pid]

    def start(self) -> list[object]:
        """Start all actors at the same time, and return what each host says of itself."""
        if self.closed or self._workers:
            raise ClosedEnvError("this pool was started before; make a new one.")
        try:
            for index, rows in enumerate(self.rows_of):
                self._workers.append(_Worker(index, rows, self._new_actor()))
            return self._start_up(self._workers)
        except BaseException:
            self.close()
            raise

    def bind(self, layout: Layout) -> dict[str, np.ndarray]:
        """Allocate memory for ``layout`` here, and have every actor do so there."""
        self._require_open()
        self._layout, self._arrays = layout, layout.zeros()
        self._together(self._binds(self._workers, anew=True))
        return dict(self._arrays)

    def restart_worker(self, index: int) -> object:
        """Give the rows of a worker a new actor, whose arrays begin as ours are now."""
        self._require_open()
        self._workers[index].kill()
        worker = self._workers[index] = _Worker(index, self.rows_of[index], self._new_actor())
        try:
            described = self._start_up([worker])[0]
            if self._layout is not None:
                self._together(self._binds([worker], anew=False))
        except BaseException as error:
            lost = worker.failure("interrupted", "start")
            if isinstance(error, WorkerError):
                lost = replace(error.failures[0], rows=tuple(worker.rows))
            worker.lost = worker.lost or lost
            worker.kill()
            raise
        return described

    def close(self) -> None:
        """End all actors, in bounded time; closing twice does nothing."""
        self.closed, self._arrays = True, {}
        self._finalizer()

    # ---------------------------------------------------------------------------------------- jobs

    def _start_up(self, workers: Sequence[_Worker]) -> list[object]:
        pids = self._together(self._arrivals(workers))
        for worker, pid in zip(workers, pids, strict=True):
            worker.pid = pid
        return self._together(self._starts(workers))

    def _arrivals(self, workers: Sequence[_Worker]) -> Iterator[Job]:
        """Have actors prepare their processes: how long Ray takes to start those is no matter of what is built there."""
        least_s = _ARRIVAL_S if _has_room(self._actor_options, len(workers)) else 0.0
        for worker in workers:
            setup = replace(self._setup, index=worker.index, rows=worker.rows)
            job = self._new_job(worker, "start", is_start=True, least_s=least_s)
            yield self._ask(worker, job, worker.actor.arrive, setup)

    def _starts(self, workers: Sequence[_Worker]) -> Iterator[Job]:
        for worker in workers:
            job = self._new_job(worker, "start", is_start=True)
            yield self._ask(worker, job, worker.actor.start)

    def _binds(self, workers: Sequence[_Worker], *, anew: bool) -> Iterator[Job]:
        """Have workers bind arrays, which hold zeros if ours are new."""
        assert self._layout is not None
        for worker in workers:
            moving = worker.moving = MovingRows(self._layout, self._arrays, worker.rows)
            job = self._new_job(worker, "bind", is_start=True)
            held = [] if anew else moving.everything()
            yield self._ask(worker, job, worker.actor.bind, self._layout, held)

    def _begin_command(self, worker: _Worker, command: int, rows: list[int] | None) -> Job:
        job = self._new_job(worker, command)
        moment, inputs = worker.inputs(command, rows)
        return self._ask(worker, job, worker.actor.run, command, rows, moment, inputs)

    def begin_call(self, worker: int, method: str, *args: Any, **kwargs: Any) -> Job:
        """Call a method of the host of a worker that is free; the layout says what moves with it."""
        arguments = pickle_arguments(method, (args, kwargs))
        self._require_open()
        asked = self._workers[worker]
        job = self._new_job(asked, method)
        moment, inputs = asked.inputs(method, None)
        return self._ask(asked, job, asked.actor.call, method, arguments, moment, inputs)

    def _ask(self, worker: _Worker, job: Job, method: Any, *arguments: Any) -> Job:
        """Send a request to an actor, unless that is lost."""
        if worker.lost is not None:
            return job
        try:
            worker.reply, worker.job, worker.latest = method.remote(*arguments), job, job
        except ray.exceptions.RayError as error:
            self._lose(worker, job, error)
        except BaseException:  # Ctrl-C: it may have been sent, and nobody would take the reply
            worker.lost = worker.failure("interrupted", job.request.name)
            worker.kill()
            raise
        return job

    def _await_answers(self, jobs: Sequence[Job], wanted: int, seconds: float) -> None:
        pending = {self._workers[job.worker].reply: job for job in jobs}
        done = _ready(pending, wanted, seconds)
        if len(done) < len(pending):
            done = _ready(pending, len(pending), 0.0)
        for reply in done:
            self._take(self._workers[pending[reply].worker], pending[reply])

    def _take(self, worker: _Worker, job: Job) -> None:
        """Take a reply that is there, or note why none will come."""
        try:
            message, written = ray.get(worker.reply)
        except ray.exceptions.RayError as error:
            self._lose(worker, job, error)
            return
        worker.take(written)
        result, failures = None, []
        if message is not None:
            result, failures = read_answer(
                message, worker=worker.index, rows=worker.rows, command=job.request.name
            )
        job.request.settle(worker.index, result, failures)
        worker.job = worker.reply = None  # while there is a reply, Ray's store keeps what it holds

    def _lose(self, worker: _Worker, job: Job, error: Exception) -> None:
        """Note that Ray has no actor any more that would answer."""
        worker.lost = worker.failure("died", job.request.name, " ".join(str(error).split()))
        job.request.failures[0, worker.index] = [worker.lost]
        worker.job = None
        worker.kill()

    def _give_up(self, worker: _Worker, lost: Failure) -> Failure:
        worker.kill()
        if worker.pid:
            return lost
        free = {
            name: amount for name, amount in ray.available_resources().items() if ":" not in name
        }
        return replace(
            lost,
            advice=f"Its process had not begun to build anything. If Ray has found no place for it: each actor asks for "
            f"{self._actor_options or 'what Ray gives by default'}, and {free} are free. Raise that limit if nodes or "
            "a runtime_env take this long.",
        )

    def _require_open(self) -> None:
        super()._require_open()
        if not self._session.is_alive:
            raise ClosedEnvError(
                "this pool of workers belongs to another process, or Ray was shut down under it, and its "
                "actors are gone. Close it, and start a new one."
            )


class _Worker:
    """An actor, as its pool sees it; ``lost`` tells why it can no longer be used, None while it can."""

    def __init__(self, index: int, rows: range, actor: Any):
        self.index, self.rows, self.actor = index, rows, actor
        self.pid = 0
        self.job: Job | None = None
        self.latest: Job | None = None
        self.lost: Failure | None = None
        self.reply: Any = None
        self.moving: MovingRows | None = None
        self._asked: tuple[int | str, int | None, list[int] | None] | None = None

    def inputs(
        self, request: int | str, rows: list[int] | None
    ) -> tuple[int | None, list[np.ndarray]]:
        """Give the moment of a request, and what its host reads; `take` takes what it writes."""
        if self.moving is None:
            return None, []
        moment = self.moving.moment
        self._asked = request, moment, rows
        return moment, self.moving.inputs(request, moment)

    def take(self, written: Sequence[np.ndarray]) -> None:
        """Copy what the host has written for the last request."""
        if self._asked is not None and self.moving is not None:
            request, moment, rows = self._asked
            self.moving.take_outputs(request, moment, rows, written)
        self._asked = None

    def failure(
        self, kind: Literal["died", "interrupted"], command: str, told: str = ""
    ) -> Failure:
        """Describe why it is lost, in Ray's words where there are any."""
        return Failure(self.index, tuple(self.rows), command, kind, advice=told)

    def kill(self) -> None:
        """End the actor, whatever it does, without waiting for its end."""
        ray.kill(self.actor, no_restart=True)


def _actor_class(options: Mapping[str, Any]) -> Any:
    """Give the class of actors with some options of ``ray.remote``.

    Raises:
        ArgumentError: Ray refuses them.
    """
    try:
        return ray.remote(RowActor).options(**options)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"Ray refuses the backend_options {dict(options)}: {error}") from error


def _room(options: Mapping[str, Any]) -> int:
    """Give the number of actors that the cluster has CPUs for, at least 1."""
    cpus = ray.cluster_resources().get("CPU", 1.0)
    return max(int(cpus / (options.get("num_cpus") or 1)), 1)


def _has_room(options: Mapping[str, Any], count: int) -> bool:
    """Say whether the nodes there are, were they free, could hold so many actors."""
    wanted = {"GPU": options.get("num_gpus") or 0.0, **(options.get("resources") or {})}
    wanted["CPU"] = options.get("num_cpus") or 0.0
    there = ray.cluster_resources()
    return all(count * amount <= there.get(name, 0.0) for name, amount in wanted.items())


def _environ(options: Mapping[str, Any]) -> dict[str, str]:
    """Give the environment variables that an actor sets: JAX keeps to the CPU where no GPU was asked for."""
    if options.get("num_gpus"):
        return {}
    return {"JAX_PLATFORMS": worker_environ()["JAX_PLATFORMS"]}


def _ready(replies: Iterable[Any], wanted: int, seconds: float) -> list[Any]:
    """Wait for some of the replies, and give at most so many that are there."""
    waiting = list(replies)
    count = min(wanted, len(waiting))
    if not count:
        return []
    limit = None if seconds == math.inf else seconds
    return ray.wait(waiting, num_returns=count, timeout=limit)[0]


def _end(workers: list[_Worker], session: RaySession) -> None:
    """Have actors close their hosts, kill them, and end the session's part: what a pool must give back."""
    living, busy = [], []
    for worker in workers:
        if worker.lost is None:
            (busy if worker.job else living).append(worker)
    try:
        if session.is_alive:
            closing = [worker.actor.close.remote() for worker in (*living, *busy)]
            _ready(closing[: len(living)], len(living), _CLOSE_S)
            _ready(closing[len(living) :], len(busy), _CLOSE_BUSY_S)
    finally:
        if session.is_alive:
            for worker in workers:
                worker.kill()
        workers.clear()
        session.end()
