"""A pool of worker processes that share one block of memory.

This module decides who is woken, and waits for replies and for the end of processes in one
selector, with a deadline. It does not know what a command means.

Conventions
    pending   workers that were woken and have not replied, by the descriptor of their reply pipe.
    deadline  counts from the `send` (or other request) of the round.
    abandoned round  one that Ctrl-C interrupted. The next one finishes it first, and tells what
              failed in it beside its own failures.
"""

import math
import os
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from envkit.errors import ClosedEnvError, WorkerError
from envkit.transport.block import Block
from envkit.transport.failure import Failure, failure_of, worker_error
from envkit.transport.forkserver import shared_fork_server
from envkit.transport.handle import WorkerHandle, pickle_arguments, pickle_maker
from envkit.transport.host import MakeHost
from envkit.transport.launch import choose_start_method
from envkit.transport.layout import Field, Layout
from envkit.transport.pool import Selection, mask_of, spread_rows
from envkit.transport.resources import Resources
from envkit.transport.worker import ALL_ROWS, DONE, MESSAGE, SELECTED

__all__ = ["ProcessPool"]

_BYTE = [bytes([code]) for code in range(256)]
_NOTHING, _DONE, _MESSAGE = 0xFF, DONE[0], MESSAGE[0]


class ProcessPool:
    """Rows spread over worker processes; see `Pool` for what each method promises.

    Constructing it checks the arguments and, with the fork server, has that import ``preload`` in
    the background. Workers start with `start`. Use it from one thread.

    Args:
        make_host: builds the host of a worker, called there with its rows. Sent by cloudpickle.
        num_rows: number of rows.
        num_processes: number of workers; at most one for each row is used.
        commands: names of commands (0 to 125), for messages.
        start_method: "forkserver" (default where it exists), "spawn" or "fork".
        timeout_s: seconds that a round, `start` or a call may take; None for no limit.
        preload: modules that workers will need, imported once by the fork server.
        map_files_in: directory of the file that backs the shared arrays; None for memory.
    """

    def __init__(
        self,
        make_host: MakeHost,
        num_rows: int,
        num_processes: int,
        *,
        commands: Mapping[int, str] | None = None,
        start_method: str | None = None,
        timeout_s: float | None = 60.0,
        preload: Iterable[str] = (),
        map_files_in: str | None = None,
    ) -> None:
        self.rows_of = spread_rows(num_rows, num_processes)
        self.timeout_s = timeout_s
        self.seeds: dict[int, int] = {}
        self._num_rows = num_rows
        self._commands = dict(commands or {})
        self._maker = pickle_maker(make_host)
        self._map_files_in = map_files_in
        self._start_method = choose_start_method(start_method)
        self._resources: Resources | None = None
        self._closed = False
        self._first_rows = np.array([rows.start for rows in self.rows_of])
        self._selected: np.ndarray = np.zeros(num_rows, np.uint8)
        self._round = ""  # name of the command under way
        self._limit_s = self._deadline = math.inf
        self._failures: list[Failure] = []
        self._answers: dict[int, Any] = {}
        self._inbox = bytearray(1)  # the last reply: what is in memory survives Ctrl-C
        self._interrupted: WorkerHandle | None = None
        if self._start_method == "forkserver":
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
        resources = self._resources = Resources()
        self._finalizer = weakref.finalize(self, resources.release)
        try:
            for index in range(len(self.rows_of)):
                resources.add(self._launch(resources, index))
            return self._exchange("start", resources.handles, self._send_setup)
        except BaseException:
            self.close()
            raise

    def bind(self, layout: Layout) -> dict[str, np.ndarray]:
        """Allocate a shared block for ``layout`` and have every worker map it."""
        resources = self._require_open()
        selected = Field(SELECTED, (), "uint8")
        layout = Layout((*layout.fields, selected), self._num_rows)
        block = Block.create(layout, self._map_files_in)
        arrays = dict(block.arrays)
        self._selected = arrays.pop(SELECTED)
        previous, resources.block = resources.block, block
        if previous is not None:
            previous.close()
        self._exchange("bind", resources.handles, self._send_bind)
        return arrays

    def send(self, command: int, rows: Selection = None) -> None:
        """Wake the workers that own one of ``rows``; one byte each."""
        resources = self._resources
        if resources is None or self._closed:
            resources = self._require_open()
        if resources.pending:
            self._finish_round(resources)
        if rows is None:
            handles, byte = resources.handles, _BYTE[command | ALL_ROWS]
        else:
            handles, byte = self._select(resources, rows), _BYTE[command]
        self._begin(self._commands.get(command) or str(command))
        pending, write = resources.pending, os.write
        for handle in handles:
            if handle.lost is not None:
                self._note(handle.lost)
                continue
            pending[handle.reply] = handle
            try:
                write(handle.wake, byte)
            except BrokenPipeError:
                continue  # `recv` finds out how it ended

    def recv(self) -> None:
        """Wait for every worker that was woken."""
        resources = self._resources
        if resources is None or self._closed:
            resources = self._require_open()
        self._finish_round(resources)
        if self._failures:
            failures, self._failures = self._failures, []
            raise worker_error(
                sorted(failures, key=lambda f: f.worker),
                len(self.rows_of),
                self.seeds,
                self._answers,
            )

    def _finish_round(self, resources: Resources) -> None:
        """Wait for every worker that was woken, and note what failed."""
        pending, read_into = resources.pending, os.readv
        reply, buffers = self._inbox, [self._inbox]
        handle, self._interrupted = self._interrupted, None
        try:
            if handle is not None:
                self._settle(resources, handle, _MESSAGE)
            while pending:
                events = resources.wait(self._deadline - time.monotonic())
                if not events and time.monotonic() >= self._deadline:
                    self._expire(resources)
                for fd, _ in events:
                    handle = pending.get(fd)
                    if handle is None:
                        self._examine(resources, fd)
                        continue
                    reply[0] = _NOTHING
                    read_into(fd, buffers)
                    if reply[0] == _DONE:
                        del pending[fd]
                    else:
                        self._settle(resources, handle, reply[0])
        except BaseException:  # Ctrl-C, which may have come right after a byte was read
            if handle is not None and handle.reply in pending:
                if reply[0] == _DONE:
                    del pending[handle.reply]
                elif reply[0] == _MESSAGE:
                    self._interrupted = handle
            raise

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

        def send(handle: WorkerHandle) -> None:
            handle.send_call(method, of_worker[handle.index], timeout_s=self.timeout_s)

        return self._exchange(method, chosen, send)

    def restart_worker(self, index: int) -> object:
        """Replace worker ``index`` by a fresh process for the same rows, bound to the same block.

        Returns what its host says of itself. The old process, if it lives, is ended first.
        """
        resources = self._require_open()
        successor = self._launch(resources, index)
        try:
            resources.replace(successor)
            description = self._exchange("start", [successor], self._send_setup)[0]
            if resources.block is not None:
                self._exchange("bind", [successor], self._send_bind)
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
        return self._resources

    def _launch(self, resources: Resources, index: int) -> WorkerHandle:
        return WorkerHandle(
            index,
            self.rows_of[index],
            start_method=self._start_method,
            lifeline=resources.lifeline_r,
            close_in_fork=resources.fds,
        )

    def _send_setup(self, handle: WorkerHandle) -> None:
        handle.send_setup(self._commands, self._maker, timeout_s=self.timeout_s)

    def _send_bind(self, handle: WorkerHandle) -> None:
        block = self._require_open().block
        assert block is not None
        handle.send_bind(block, timeout_s=self.timeout_s)

    def _select(self, resources: Resources, rows: Selection) -> list[WorkerHandle]:
        """Write the mask of ``rows`` into the block, and return the workers that own any."""
        assert rows is not None
        mask = mask_of(rows, self._num_rows)
        self._selected[:] = mask
        woken = np.logical_or.reduceat(mask, self._first_rows).tolist()
        return [handle for handle, wake in zip(resources.handles, woken, strict=True) if wake]

    def _begin(self, name: str) -> None:
        self._round = name
        self._answers = {}
        self._limit_s = math.inf if self.timeout_s is None else self.timeout_s
        self._deadline = time.monotonic() + self._limit_s

    def _exchange(
        self, name: str, handles: Sequence[WorkerHandle], send: Callable[[WorkerHandle], None]
    ) -> list[Any]:
        """Send a message to each of ``handles``, and return their answers in that order."""
        resources = self._require_open()
        if resources.pending:
            self._finish_round(resources)
        self._begin(name)
        for handle in handles:
            if handle.lost is not None:
                self._note(handle.lost)
                continue
            resources.pending[handle.reply] = handle
            try:
                send(handle)
            except BaseException:  # Ctrl-C in the middle of a message: its end will never be sent
                handle.lost = handle.end("interrupted", name)
                self._lose(resources, handle)
                raise
        self.recv()
        return [self._answers[handle.index] for handle in handles]

    def _note(self, failure: Failure) -> None:
        """Make a failure one of this round, unless an abandoned round has done so already."""
        if failure not in self._failures:
            self._failures.append(failure)

    def _settle(self, resources: Resources, handle: WorkerHandle, reply: int) -> None:
        """Take a reply that is not plain success."""
        if reply != _MESSAGE:  # end of file
            self._lose(resources, handle)
            return
        left_s = None if self._deadline == math.inf else self._deadline - time.monotonic()
        try:
            message = handle.channel.recv(timeout_s=left_s)
        except EOFError:
            self._lose(resources, handle)
            return
        except TimeoutError:  # it stays pending, and expires
            return
        del resources.pending[handle.reply]
        try:
            result, failures = pickle.loads(message)
        except Exception as error:  # of a class that only the worker can import, for example
            rows, command = tuple(handle.rows), self._round
            failed = failure_of(error, worker=handle.index, rows=rows, command=command)
            self._failures.append(failed)
            return
        self._failures += [failure.unpacked(pickled) for failure, pickled in failures]
        if not failures or result is not None:
            self._answers[handle.index] = result

    def _examine(self, resources: Resources, fd: int) -> None:
        """Look after a worker whose sentinel, or unexpected reply, became readable."""
        handle = resources.watched.get(fd)
        if handle is None or (fd == handle.process.sentinel and not handle.process.ended()):
            return
        if handle.reply in resources.pending and handle.has_reply():
            byte = os.read(handle.reply, 1)  # it finished this round before it died
            if byte == DONE:
                del resources.pending[handle.reply]
            elif byte:
                self._settle(resources, handle, byte[0])
        self._lose(resources, handle)

    def _lose(self, resources: Resources, handle: WorkerHandle) -> None:
        """Note a death; it is an error of this round if the round still needed the worker."""
        if handle.lost is None:
            handle.lost = handle.end("died", self._round)
        if resources.pending.pop(handle.reply, None) is not None:
            self._note(handle.lost)
        resources.unwatch(handle)

    def _expire(self, resources: Resources) -> None:
        """Kill every worker that did not answer in time, and note where it was stuck."""
        stuck = list(resources.pending.values())
        for handle in stuck:
            handle.ask_for_stack()
        stacks = [handle.last_words(limit_s=0.5) for handle in stuck]
        for handle, stack in zip(stuck, stacks, strict=True):
            within = f"within {self._limit_s:g} s"
            handle.lost = handle.end("timeout", self._round, message=within, stack=stack)
            self._lose(resources, handle)
