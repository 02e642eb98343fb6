"""A pool of worker processes that share one block of memory.

This module decides which workers there are, who is woken, and what they are told; `rounds` waits for their
replies. It does not know what a command means.
"""

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from envkit.errors import ClosedEnvError, WorkerError
from envkit.transport import by_value, wake
from envkit.transport.block import Block
from envkit.transport.failure import Failure, worker_error
from envkit.transport.forkserver import shared_fork_server
from envkit.transport.handle import ASK_S, Limit, WorkerHandle, pickle_arguments, pickle_maker
from envkit.transport.host import MakeHost
from envkit.transport.launch import choose_start_method, usable_cores
from envkit.transport.layout import Field, Layout
from envkit.transport.pool import Selection, mask_of, spread_rows
from envkit.transport.resources import Resources, within_open_files
from envkit.transport.rounds import Rounds
from envkit.transport.worker import (
    ALL_ROWS,
    BIND,
    CHOSEN_ROWS,
    CONTROL,
    SELECTED,
)

__all__ = ["CONTROL_CODE", "TO_ALL", "TO_CHOSEN", "ProcessPool"]

TO_ALL = [wake.encode(command | ALL_ROWS) for command in range(256)]
TO_CHOSEN = [wake.encode(command | CHOSEN_ROWS) for command in range(256)]
CONTROL_CODE, _BIND = wake.encode(CONTROL), wake.encode(BIND)


class ProcessPool(Rounds):
    """Rows spread over worker processes; see `Pool` for what each method promises.

    Constructing it checks the arguments and, with the fork server, has that import ``preload`` in
    the background. Workers start with `start`. Use it from one thread, in the process that started
    it: a fork of that has no part in its workers.

    Args:
        make_host: builds the host of a worker, called there with its rows. Travels by value, see `by_value`.
        num_rows: number of rows.
        num_processes: number of workers; at most one for each row is used.
        commands: names of commands (0 to 255), and of methods that are to be called otherwise, for
            messages.
        start_method: "forkserver" (default where it exists), "spawn" or "fork".
        timeout_s: seconds that a round or a call may take; None for no limit.
        start_timeout_s: seconds that `start`, `bind` and the methods in ``building`` may take each, and
            so the start of a single worker; None for no limit. A cold start imports what envs need.
        building: methods of the host that build anew what `start` has built.
        preload: modules that workers will need, imported once by the fork server.
        map_files_in: directory of the file that backs the shared arrays; None for memory.
        hide_warnings: ignore Python warnings in workers, from before they import anything for
            ``make_host``.
        prepare: functions that every worker calls before it unpickles ``make_host``, in this order.
            They travel by value.
        core_each: give every worker a core of its own, if there are as many cores as workers. Workers
            that are woken together by a parent which then sleeps otherwise often end up on one core, one
            behind the other: Linux leaves them there, since the other core is not idle for long.
        cores: numbers of the cores that each worker may run on, instead; one set a worker.
        close_timeout_s: seconds that workers may take to close their hosts before they are terminated.
    """

    def __init__(
        self,
        make_host: MakeHost,
        num_rows: int,
        num_processes: int,
        *,
        commands: Mapping[int | str, str] | None = None,
        start_method: str | None = None,
        timeout_s: float | None = 60.0,
        start_timeout_s: float | None = 60.0,
        building: Collection[str] = (),
        preload: Iterable[str] = (),
        map_files_in: str | None = None,
        hide_warnings: bool = False,
        prepare: Iterable[Callable[[], None]] = (),
        core_each: bool = False,
        cores: Sequence[frozenset[int]] = (),
        close_timeout_s: float = ASK_S,
    ) -> None:
        super().__init__(timeout_s, start_timeout_s)
        self.rows_of = spread_rows(num_rows, num_processes)
        self._building = building
        self.seeds: dict[int, int] = {}
        self._num_rows = num_rows
        self._commands = dict(commands or {})
        self._maker = pickle_maker(make_host)
        self._prepare = tuple(map(by_value.dumps, prepare))
        self._map_files_in = map_files_in
        self._hide_warnings = hide_warnings
        if core_each and hasattr(os, "sched_setaffinity"):
            cores = [frozenset((core,)) for core in usable_cores()]
        self._cores = cores if len(cores) == len(self.rows_of) else []
        self._close_timeout_s = close_timeout_s
        self._start_method = choose_start_method(start_method)
        self._resources: Resources | None = None
        self._closed = False
        self._first_rows = np.array([rows.start for rows in self.rows_of])
        self._selected: np.ndarray = np.zeros(num_rows, np.uint8)
        if self._start_method == "forkserver":
            with within_open_files(len(self.rows_of)):
                shared_fork_server().warm_up(preload)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that have started and were not lost."""
        handles = [] if self._resources is None else self._resources.handles
        return [h.process.pid for h in handles if h.lost is None and h.process.pid is not None]

    def start(self) -> list[object]:
        """Start all workers at the same time, and return what each host says of itself."""
        if self._closed or self._resources is not None:
            raise ClosedEnvError("this pool was started before; make a new one.")
        with within_open_files(len(self.rows_of)):
            try:
                resources = self._resources = Resources(self._close_timeout_s)
                self._finalizer = weakref.finalize(self, resources.release)
                for index in range(len(self.rows_of)):
                    resources.add(self._launch(resources, index))
                return self._start_up(resources.handles)
            except BaseException:
                self.close()
                raise

    def bind(self, layout: Layout) -> dict[str, np.ndarray]:
        """Allocate a shared block for ``layout`` and have every worker map it."""
        resources = self._require_open()
        selected = Field(SELECTED, (), "uint8")
        layout = Layout((*layout.fields, selected), self._num_rows)
        with within_open_files(len(self.rows_of)):
            block = Block.create(layout, self._map_files_in)
        arrays = dict(block.arrays)
        self._selected = arrays.pop(SELECTED)
        previous, resources.block = resources.block, block
        if previous is not None:
            previous.close()
        self._bind(resources.handles)
        return arrays

    def send(self, command: int, rows: Selection = None) -> None:
        """Wake the workers that own one of ``rows``; one number each."""
        resources = self._resources
        if resources is None or self._closed or os.getpid() != resources.owner_pid:
            resources = self._require_open()
        if resources.pending:
            self._make_room(resources, rows)
        if rows is None:
            handles, code = resources.handles, TO_ALL[command]
        else:
            handles, code = self._select(resources, rows), TO_CHOSEN[command]
        name = self._commands.get(command) or str(command)
        begun = self._round = self._request(name, failures=self._round.failures)
        pending, write = resources.pending, wake.write
        for handle in handles:
            if handle.lost is not None:
                self._note(handle.lost)
                continue
            handle.request = begun
            pending[handle.reply] = handle
            try:
                write(handle.waker, code)
            except BrokenPipeError:
                continue  # `recv` finds out how it ended

    def _make_room(self, resources: Resources, rows: Selection) -> None:
        """See to it that a round of some rows can begin while workers have not answered yet."""
        self._finish_abandoned(resources)

    def recv(self) -> None:
        """Wait for every worker that was woken."""
        resources = self._resources
        if resources is None or self._closed or os.getpid() != resources.owner_pid:
            resources = self._require_open()
        self._finish_round(resources)
        if self._round.failures:
            failures, self._round.failures = self._round.failures, {}
            raise self._error(failures, self._round.answers)

    def _error(
        self, told: Mapping[tuple[int, int], list[Failure]], answers: Mapping[int, Any]
    ) -> WorkerError:
        failures = [failure for of_worker in told.values() for failure in of_worker]
        failures.sort(key=lambda failure: failure.worker)
        return worker_error(failures, len(self.rows_of), self.seeds, answers)

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
        handles = self._require_open().handles
        chosen = handles if workers is None else [handles[index] for index in workers]
        of_worker = {
            handle.index: pickle_arguments(method, pair)
            for handle, pair in zip(chosen, arguments, strict=True)
        }

        def post(handle: WorkerHandle) -> None:
            handle.post_call(method, of_worker[handle.index])

        name = self._commands.get(method, method)
        limit: Limit = "start_timeout" if method in self._building else "timeout"
        return self._exchange(name, chosen, post, CONTROL_CODE, limit=limit)

    def restart_worker(self, index: int) -> object:
        """Replace worker ``index`` by a fresh process for the same rows, bound to the same block.

        Returns what its host says of itself. The old process, if it lives, is ended first.
        """
        resources = self._require_open()
        with within_open_files(len(self.rows_of)):
            successor = self._launch(resources, index)
        try:
            resources.replace(successor)
            description = self._start_up([successor])[0]
            if resources.block is not None:
                self._bind([successor])
        except BaseException as error:
            lost = successor.end("interrupted", "start")
            if isinstance(error, WorkerError):
                lost = replace(error.failures[0], rows=tuple(successor.rows))
            successor.lost = lost
            self._lose(resources, successor)
            raise
        return description

    def close(self) -> None:
        """End all workers, in bounded time; closing twice does nothing."""
        self._closed = True
        self._selected = np.zeros(0, np.uint8)  # a view of the block would keep that alive
        if self._resources is not None:
            self._finalizer()

    def _require_open(self) -> Resources:
        if self._resources is None or self._closed:
            state = "is closed" if self._closed else "was never started"
            raise ClosedEnvError(f"this pool of workers {state}; start a new one.")
        if os.getpid() != self._resources.owner_pid:
            raise ClosedEnvError(
                f"this pool of workers belongs to process {self._resources.owner_pid}, and this is "
                f"process {os.getpid()}, a fork of it. Make the environment anew in the process "
                "that uses it."
            )
        return self._resources

    def _launch(self, resources: Resources, index: int) -> WorkerHandle:
        return WorkerHandle(
            index,
            self.rows_of[index],
            start_method=self._start_method,
            lifeline=resources.lifeline_r,
            close_in_fork=resources.fds,
        )

    def _start_up(self, handles: Sequence[WorkerHandle]) -> list[object]:
        return self._exchange("start", handles, self._post_setup, limit="start_timeout")

    def _bind(self, handles: Sequence[WorkerHandle]) -> None:
        self._exchange("bind", handles, self._post_bind, _BIND, limit="start_timeout")

    def _post_setup(self, handle: WorkerHandle) -> None:
        cores = self._cores[handle.index] if self._cores else None
        handle.post_setup(
            self._commands,
            self._maker,
            prepare=self._prepare,
            hide_warnings=self._hide_warnings,
            cores=cores,
        )

    def _post_bind(self, handle: WorkerHandle) -> None:
        block = self._require_open().block
        assert block is not None
        handle.post_bind(block)

    def _select(self, resources: Resources, rows: Selection) -> list[WorkerHandle]:
        """Write the mask of ``rows`` into the block, and return the workers that own any."""
        assert rows is not None
        mask = mask_of(rows, self._num_rows)
        self._selected[:] = mask
        woken = np.logical_or.reduceat(mask, self._first_rows).tolist()
        return [handle for handle, wake in zip(resources.handles, woken, strict=True) if wake]

    def _exchange(
        self,
        name: str,
        handles: Sequence[WorkerHandle],
        post: Callable[[WorkerHandle], None],
        code: Any = None,
        *,
        limit: Limit = "timeout",
    ) -> list[Any]:
        """Send a message to each of ``handles``, and return their answers in that order.

        ``code`` tells a worker to read it, unless it is waiting for a message already.
        """
        resources = self._require_open()
        if resources.pending:
            self._finish_abandoned(resources)
        begun = self._round = self._request(name, limit, self._round.failures)
        self._posting = True
        pending, write = resources.pending, wake.write
        for handle in handles:
            if handle.lost is not None:
                self._note(handle.lost)
                continue
            post(handle)
            handle.request = begun
            pending[handle.reply] = handle
            if code is not None:
                try:
                    write(handle.waker, code)
                except BrokenPipeError:
                    continue  # `recv` finds out how it ended
            self._push(resources, handle)
        self.recv()
        return [begun.answers[handle.index] for handle in handles]
