"""Workers that are Ray actors, on this machine or on others of a cluster.

`RayActors` places actors, sends them requests, waits for their answers and ends them. `RowActor` serves one pool, one request
after the other. They share no memory: both sides hold their own arrays, and what a request reads and writes of them
(`Layout.traffic`) goes through Ray's store as NumPy arrays. `RaySession` is Ray in this process: begun where it is not
running yet, and then ended after the last pool that uses it.

Conventions
    An actor is lost when Ray says so of it or of its node, or when a deadline has passed; then it is killed.
    Nothing is ever sent to it again: its rows go to a new actor, see `Pool.restart_worker`.
    parts    rows of bound arrays, see `moving`. They arrive read-only, and are copied once into the actor's arrays.
    laid     of a field: one array for several actors, which goes through the store once, see `RayActors.lay`.
    reply    a message, see `answers` (None where a command went well, which is all there is to tell), and the
             parts that were written.
    session  from the first pool that found no Ray to the end of the last pool that began meanwhile. Ray that
             somebody else began is used and left alone.
"""

from __future__ import annotations

import math
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from envkit.errors import ArgumentError, ClosedEnvError, WorkerError
from envkit.transport import by_value
from envkit.transport.answers import Answers, build_host, call_host, read_answer
from envkit.transport.copy_fields import MovingRows
from envkit.transport.failure import Failure
from envkit.transport.host import Host, MakeHost, RowCursor
from envkit.transport.interpreter import worker_environ
from envkit.transport.layout import Layout
from envkit.transport.pool import Backend, Request, Worker, spread_rows
from envkit_bridges.libraries import require

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
        """Leave the session, once; the last pool ends Ray, if a pool began it."""
        if not self.is_alive:
            return
        RaySession._users -= 1
        if RaySession._begun == self._connection and RaySession._users == 0:
            ray.shutdown()


def _connection() -> tuple[str, str]:
    """Return a name for this process's connection to Ray: jobs of a cluster have their own names, clusters their nodes."""
    context = ray.get_runtime_context()
    return context.get_job_id(), context.get_node_id()


Parts = Sequence[np.ndarray]
Reply = tuple[bytes | None, Parts]


@dataclass(frozen=True)
class Setup:
    """First message to an actor: who it is, and what its maker expects of the process."""

    index: int
    rows: range
    environ: dict[str, str]
    hide_warnings: bool
    prepare: tuple[bytes, ...]  # called next

    def apply(self, maker: bytes) -> int:
        """Set up this process, and give its number; what else it finds around it is Ray's to decide."""
        if self.hide_warnings:
            warnings.simplefilter("ignore")
        os.environ.update(self.environ)
        for pickled in self.prepare:
            pickle.loads(pickled)()
        pickle.loads(maker)  # last, since its imports may need all of the above
        return os.getpid()


class RowActor:
    """Serves one pool; `RayActors` calls its methods from afar."""

    _host: Host | None = None
    _moving: MovingRows | None = None

    def arrive(self, setup: Setup, maker: bytes) -> Reply:
        """Prepare this process, and import what the maker needs; answers the number of the process."""
        self._setup, self._maker = setup, maker
        self._answers = Answers(setup.index, setup.rows)
        return self._answers.of(lambda: (None, setup.apply(maker)))[1], []

    def start(self) -> Reply:
        """Build the host; answers what it says of itself."""
        self._host, message = self._answers.of(lambda: build_host(self._maker, self._setup.rows))
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

        return self._answers.of(work)[1], []

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

    def call(
        self,
        method: str,
        arguments: bytes,
        moment: int | None,
        parts: Parts,
        **laid: np.ndarray,
    ) -> Reply:
        """Call a method of the host, which finds in its fields what was ``laid`` there for all workers."""
        host, moving = self._require_host(), self._moving
        if moving is not None:
            moving.take_laid(laid)
            moving.take_inputs(method, moment, parts)
        _, message = self._answers.of(lambda: (None, call_host(host, method, arguments)))
        return message, [] if moving is None else moving.outputs(method, moment, None)

    def close(self) -> None:
        """Close the host, if there is one."""
        host, self._host = self._host, None
        if host is not None:
            host.close()

    def _require_host(self) -> Host:
        if self._host is None:
            raise WorkerError(
                "Ray has started this actor again (backend_options['max_restarts']), and what it held is gone."
            )
        return self._host


_CLOSE_S, _CLOSE_BUSY_S = 3.0, 0.5
_ARRIVAL_S = 300.0
"""Seconds that Ray has at least to find a place for actors and to start their processes."""


class RayActors(Backend["Actor"]):
    """Rows spread over actors. They take part in a `RaySession` until they are closed.

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
    ) -> None:
        options = dict(actor_options or {})
        maker, prepared = by_value.dumps_maker(make_host), tuple(map(by_value.dumps, prepare))
        self._new_actor, self._actor_options = _actor_class(options).remote, options
        self._session = RaySession(address)
        try:
            super().__init__(spread_rows(num_rows, num_actors or _room(options)))
        except BaseException:
            self._session.end()
            raise
        self._setup = Setup(0, range(0), _environ(options), hide_warnings, prepared)
        self._maker = maker
        self._layout: Layout | None = None
        self._arrays: dict[str, np.ndarray] = {}
        self._stored: tuple[Any, Any] | None = None  # what was put last, and its reference
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the living actors, each on the machine that it is on."""
        return [worker.pid for worker in self.workers if worker.lost is None and worker.pid]

    def open(self) -> None:
        """Ask Ray for places for all actors."""
        for index in range(len(self.rows_of)):
            self.workers.append(self._make(index))

    def replace(self, index: int) -> Actor:
        """Kill an actor, and have Ray place another one, whose arrays begin as ours are then."""
        old = self.workers[index]
        old.kill()
        self.pending.pop(old.reply, None)
        worker = self.workers[index] = self._make(index)
        worker.is_late = True
        return worker

    def _make(self, index: int) -> Actor:
        return Actor(index, self.rows_of[index], self._new_actor())

    def require_alive(self) -> None:
        """Check that Ray runs as it did, and that this process is the one that asked it."""
        if not self._session.is_alive:
            raise ClosedEnvError(
                "this pool of workers belongs to another process, or Ray was shut down under it, and its "
                "actors are gone. Close it, and start a new one."
            )

    def close(self) -> None:
        """Close the hosts of actors, kill the actors, and leave the session."""
        if self._is_closed:
            return
        self._is_closed, self._arrays, self._stored = True, {}, None
        living, busy = [], []
        for worker in self.workers:
            if worker.lost is None:
                (busy if worker.reply in self.pending else living).append(worker)
        try:
            if self._session.is_alive:
                closing = [worker.actor.close.remote() for worker in (*living, *busy)]
                _ready(closing[: len(living)], len(living), _CLOSE_S)
                _ready(closing[len(living) :], len(busy), _CLOSE_BUSY_S)
        finally:
            if self._session.is_alive:
                for worker in self.workers:
                    worker.kill()
            self.workers.clear()
            self.pending.clear()
            self._session.end()

    # ---------------------------------------------------------------------------------- what is asked

    def arrival_s(self, count: int) -> float | None:
        """Return what Ray may need to start processes where there is room: that is no matter of what is built there."""
        return _ARRIVAL_S if _has_room(self._actor_options, count) else 0.0

    def arrive(self, worker: Actor, request: Request) -> None:
        """Prepare the process of an actor."""
        setup = replace(self._setup, index=worker.index, rows=worker.rows)
        self._ask(worker, request, worker.actor.arrive, setup, self._reference(self._maker))

    def start(self, worker: Actor, request: Request) -> None:
        """Build the host of an actor."""
        self._ask(worker, request, worker.actor.start)

    def allocate(self, layout: Layout) -> dict[str, np.ndarray]:
        """Allocate memory here."""
        self._layout, self._arrays = layout, layout.zeros()
        for worker in self.workers:
            worker.is_late = False
        return dict(self._arrays)

    def bind(self, worker: Actor, request: Request) -> None:
        """Allocate and bind the arrays of an actor, which hold zeros if ours are new."""
        assert self._layout is not None
        moving = worker.moving = MovingRows(self._layout, self._arrays, worker.rows)
        held = moving.everything() if worker.is_late else []
        self._ask(worker, request, worker.actor.bind, self._layout, held)

    def lay(self, worker: Actor, name: str, place: np.ndarray, array: np.ndarray) -> None:
        """Put an array into Ray's store, once for all actors, and send a reference with the next call of this one."""
        worker.laid[name] = self._reference(array)

    def _reference(self, thing: Any) -> Any:
        """Return a reference to something in the store, where it is put unless it was the last thing put there."""
        if self._stored is None or self._stored[0] is not thing:
            self._stored = thing, ray.put(thing)
        return self._stored[1]

    def packed(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Pickle the arguments, by value."""
        return by_value.dumps_arguments(method, (args, kwargs))

    def call(self, worker: Actor, request: Request, method: str, arguments: bytes) -> None:
        """Call a method of an actor's host; the layout says what moves with it."""
        moment, inputs = worker.inputs(method, None)
        laid, worker.laid = worker.laid, {}
        self._ask(worker, request, worker.actor.call, method, arguments, moment, inputs, **laid)

    def run(
        self, workers: Sequence[Actor], request: Request, command: int, mask: np.ndarray | None
    ) -> None:
        """Run a command in actors."""
        for worker in workers:
            if worker.lost is not None:
                request.miss(worker.lost)
                continue
            own, rows = worker.rows, None
            if mask is not None:
                rows = (np.flatnonzero(mask[own.start : own.stop]) + own.start).tolist()
            moment, inputs = worker.inputs(command, rows)
            self._ask(worker, request, worker.actor.run, command, rows, moment, inputs)

    def _ask(
        self, worker: Actor, request: Request, method: Any, *arguments: Any, **laid: Any
    ) -> None:
        """Send a request to an actor."""
        self.require_alive()
        worker.request = request
        try:
            reply = method.remote(*arguments, **laid)
            worker.reply = reply
            self.pending[reply] = worker
        except ray.exceptions.RayError as error:
            request.miss(self._lost(worker, error))
        except BaseException:  # Ctrl-C: it may have been sent, and its reply would not be read
            why = worker.failure("interrupted")
            self.lose(worker, why)
            request.miss(why)
            raise

    # -------------------------------------------------------------------------------- what is heard

    def attend(self, until: float, left: int) -> bool:
        """Receive the replies there are, and wait for others."""
        if not self.pending:
            return False
        self.require_alive()
        waiting = list(self.pending)
        seconds = max(until - time.monotonic(), 0.0)
        done = _ready(waiting, max(len(waiting) - left, 1), seconds)
        if len(done) < len(waiting):
            done = _ready(waiting, len(waiting), 0.0)
        for reply in done:
            self._take(self.pending[reply])
        return bool(done)

    def _take(self, worker: Actor) -> None:
        """Receive a reply that is there, or record why none will come."""
        try:
            message, written = ray.get(worker.reply)
        except ray.exceptions.RayError as error:
            self._lost(worker, error)
            return
        worker.take(written)
        request, index = worker.request, worker.index
        if message is None:
            request.settle(index, None, [])
        else:
            result, failures = read_answer(
                message, worker=index, rows=worker.rows, command=request.name
            )
            if not worker.pid and not failures:  # it has arrived
                worker.pid = result
            request.settle(index, result, failures)
        del self.pending[worker.reply]
        worker.reply = None  # while there is a reply, Ray's store keeps what it holds

    # -------------------------------------------------------------------------------------- losses

    def _lost(self, worker: Actor, error: Exception) -> Failure:
        """Record that Ray has no actor any more that would answer."""
        why = worker.failure("died", " ".join(str(error).split()))
        self.lose(worker, why)
        return why

    def lose(self, worker: Actor, why: Failure) -> None:
        """Kill an actor, and note why."""
        super().lose(worker, why)
        worker.reply = None
        worker.kill()

    def give_up(self, stuck: Sequence[tuple[Actor, Failure]]) -> None:
        """Kill actors; where one has not arrived, say what Ray has places for."""
        for worker, why in stuck:
            self.lose(worker, why if worker.pid else self._without_place(why))

    def _without_place(self, why: Failure) -> Failure:
        free = {
            name: amount for name, amount in ray.available_resources().items() if ":" not in name
        }
        return replace(
            why,
            advice=f"Its process had not begun to build anything. If Ray has found no place for it: each actor asks for "
            f"{self._actor_options or 'what Ray gives by default'}, and {free} are free. Raise that limit if nodes or "
            "a runtime_env take this long.",
        )


class Actor(Worker):
    """An actor, as its pool sees it; ``is_late`` if it was made when there were arrays already."""

    def __init__(self, index: int, rows: range, actor: Any):
        super().__init__(index, rows)
        self.actor = actor
        self.pid = 0
        self.is_late = False
        self.moving: MovingRows | None = None
        self.laid: dict[str, Any] = {}  # references to arrays, by field, for its next call
        self._asked: tuple[int | str, int | None, list[int] | None] | None = None

    def inputs(
        self, request: int | str, rows: list[int] | None
    ) -> tuple[int | None, list[np.ndarray]]:
        """Return the moment of a request, and what its host reads; `take` takes what it writes."""
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

    def failure(self, kind: Literal["died", "interrupted"], advice: str = "") -> Failure:
        """Describe why it is lost, in Ray's words where there are any."""
        return Failure(self.index, tuple(self.rows), self.request.name, kind, advice=advice)

    def kill(self) -> None:
        """End the actor, whatever it does, without waiting for its end."""
        ray.kill(self.actor, no_restart=True)


def _actor_class(options: Mapping[str, Any]) -> Any:
    """Return the class of actors with some options of ``ray.remote``.

    Raises:
        ArgumentError: Ray refuses them.
    """
    try:
        return ray.remote(RowActor).options(**options)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"Ray refuses the backend_options {dict(options)}: {error}") from error


def _room(options: Mapping[str, Any]) -> int:
    """Return the number of actors that the cluster has CPUs for, at least 1."""
    cpus = ray.cluster_resources().get("CPU", 1.0)
    return max(int(cpus / (options.get("num_cpus") or 1)), 1)


def _has_room(options: Mapping[str, Any], count: int) -> bool:
    """Check whether the nodes there are, were they free, could hold so many actors."""
    wanted = {"GPU": options.get("num_gpus") or 0.0, **(options.get("resources") or {})}
    wanted["CPU"] = options.get("num_cpus") or 0.0
    there = ray.cluster_resources()
    return all(count * amount <= there.get(name, 0.0) for name, amount in wanted.items())


def _environ(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that an actor sets: JAX keeps to the CPU where no GPU was asked for."""
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
