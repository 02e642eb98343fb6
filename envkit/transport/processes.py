"""Worker processes of this machine that share one block of memory: the `Backend` behind most pools.

This module decides how a process is started, woken, heard, found dead and ended. Replies, deaths and deadlines are
waited for in one selector. It does not know what a command means, nor how long a worker may take.

Conventions
    reply pipe  of a worker, its key while it is pending: one byte a request, see `worker`.
    posted      a message that waits on our side until the worker makes room for it; the caller that waits pushes it on.
    unsettled   a worker whose reply announced a message, when Ctrl-C came before that was read.
    Ctrl-C may come behind any call, see `pool`. Half-done work may be done again: watching and ceasing to watch,
    sending and receiving a message, noting a death.
"""

import math
import os
import pickle
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from envkit.errors import OpenFilesError
from envkit.transport import by_value, wake
from envkit.transport.answers import read_answer
from envkit.transport.block import TOO_MANY_FILES, Block
from envkit.transport.channel import Channel
from envkit.transport.cores import usable_cores
from envkit.transport.failure import Failure
from envkit.transport.forkserver import shared_fork_server
from envkit.transport.host import MakeHost
from envkit.transport.interpreter import absolute_sys_path, worker_environ, working_directory
from envkit.transport.launch import (
    choose_start_method,
    launch,
    send_signal,
    wait_for,
)
from envkit.transport.layout import Field, Layout
from envkit.transport.pool import Backend, Request, Worker, spread_rows
from envkit.transport.worker import (
    ALL_ROWS,
    BIND,
    CHOSEN_ROWS,
    CONTROL,
    DONE,
    MESSAGE,
    SELECTED,
    STACK_SIGNAL,
    Setup,
)

_TO_ALL = [wake.encode(command | ALL_ROWS) for command in range(256)]
_TO_CHOSEN = [wake.encode(command | CHOSEN_ROWS) for command in range(256)]
_CONTROL, _BIND, _STOP = wake.encode(CONTROL), wake.encode(BIND), wake.encode(wake.STOP)
_NOTHING, _DONE, _MESSAGE = 0xFF, DONE[0], MESSAGE[0]
_ASK_S, _ASK_BUSY_S, _TERMINATE_S, _KILL_S, _STACKS_S = 3.0, 0.5, 0.5, 1.0, 0.5
_STACK_START = re.compile(r"Fatal Python error|(Current t|T)hread 0x")
_EACH, _BESIDE = 5, 16  # descriptors that a worker takes, and those of the pool and of a start


class Processes(Backend["WorkerProcess"]):
    """Rows spread over worker processes.

    Constructing it checks the arguments and, with the fork server, has that import ``preload`` in the background.

    Args:
        make_host: builds the host of a worker, called there with its rows. Travels by value, see `by_value`.
        num_rows: number of rows.
        num_processes: number of workers; at most one for each row is used.
        start_method: "forkserver" (default where it exists), "spawn" or "fork".
        preload: modules that workers will need, imported once by the fork server.
        map_files_in: directory of the file that backs the shared arrays; None for memory.
        hide_warnings: ignore Python warnings in workers, from before they import anything for
            ``make_host``.
        prepare: functions that every worker calls before it unpickles ``make_host``, in this order.
            They travel by value.
        core_each: give every worker its own core, if there are as many cores as workers. Workers
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
        start_method: str | None = None,
        preload: Iterable[str] = (),
        map_files_in: str | None = None,
        hide_warnings: bool = False,
        prepare: Iterable[Callable[[], None]] = (),
        core_each: bool = False,
        cores: Sequence[frozenset[int]] = (),
        close_timeout_s: float = _ASK_S,
    ) -> None:
        super().__init__(spread_rows(num_rows, num_processes))
        self._maker = by_value.dumps_maker(make_host)
        self._prepare = tuple(map(by_value.dumps, prepare))
        self._map_files_in = map_files_in
        self._hide_warnings = hide_warnings
        if core_each and hasattr(os, "sched_setaffinity"):
            cores = [frozenset((core,)) for core in usable_cores()]
        self._cores = cores if len(cores) == len(self.rows_of) else []
        self._close_timeout_s = close_timeout_s
        self._start_method = choose_start_method(start_method)
        self._block: Block | None = None
        self._selected: np.ndarray = np.zeros(num_rows, np.uint8)
        self._watched: dict[int, WorkerProcess] = {}
        self._lifeline: tuple[int, int] | None = None  # open from `open` to `close`
        self._epoll: select.epoll | None = None
        self._selector: select.epoll | select.poll = select.poll()
        self._inbox = bytearray(1)  # the last reply: what is in memory survives Ctrl-C
        self._buffers = [self._inbox]
        self._unsettled: WorkerProcess | None = None  # it announced a message, and is pending
        self._posting = False  # whether messages may have to be pushed
        if self._start_method == "forkserver":
            with _within_open_files(len(self.rows_of)):
                shared_fork_server().warm_up(preload)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that have started and were not lost."""
        living = [worker.process.pid for worker in self.workers if worker.lost is None]
        return [pid for pid in living if pid is not None]

    # -------------------------------------------------------------------------------------- workers

    def open(self) -> None:
        """Start all processes."""
        self.owner_pid = os.getpid()
        with _within_open_files(len(self.rows_of)):
            try:
                self._lifeline = os.pipe()
                self._epoll = select.epoll() if hasattr(select, "epoll") else None
                self._selector = self._epoll or select.poll()
                for index in range(len(self.rows_of)):
                    worker = self._launch(index)
                    self.workers.append(worker)
                    self._watch(worker)
            except BaseException:  # first: what is counted is open beside these
                self.close()
                raise

    def replace(self, index: int) -> "WorkerProcess":
        """Start another process in the place of one, which is ended."""
        with _within_open_files(len(self.rows_of)):
            successor = self._launch(index)
        worker, self.workers[index] = self.workers[index], successor
        try:
            self._unwatch(worker)
            self.pending.pop(worker.reply, None)
        finally:  # no other object knows it any more
            _stop_all([worker])
        self._watch(successor)
        return successor

    def _launch(self, index: int) -> "WorkerProcess":
        assert self._lifeline is not None
        lifeline_r, lifeline_w = self._lifeline
        ours = [fd for worker in self.workers for fd in worker.fds]
        return WorkerProcess(
            index,
            self.rows_of[index],
            start_method=self._start_method,
            lifeline=lifeline_r,
            close_in_fork=[lifeline_w, *ours],
        )

    def close(self) -> None:
        """End all workers, in bounded time, and close everything; twice does nothing."""
        self._selected = np.zeros(0, np.uint8)  # a view of the block would keep that alive
        if self._lifeline is None or os.getpid() != self.owner_pid:
            return  # a fork of the owner has no say over its workers
        lifeline, self._lifeline = self._lifeline, None
        try:
            busy = list(self.pending.values())
            _stop_all(self.workers, busy=busy, ask_s=self._close_timeout_s)
        finally:
            self.workers.clear()
            self.pending.clear()
            self._watched.clear()
            for fd in lifeline:
                os.close(fd)
            if self._epoll is not None:
                self._epoll.close()
            if self._block is not None:
                self._block.close()

    # ---------------------------------------------------------------------------------- what is asked

    def start(self, worker: "WorkerProcess", request: Request) -> None:
        """Send the first message, which a worker awaits and answers like a request."""
        setup = Setup(
            index=worker.index,
            rows=worker.rows,
            parent_pid=os.getpid(),
            environ=worker_environ(),
            sys_path=absolute_sys_path(),
            argv=list(sys.argv),
            cwd=working_directory(),
            hide_warnings=self._hide_warnings,
            cores=self._cores[worker.index] if self._cores else None,
            prepare=self._prepare,
            maker=self._maker,
        )
        worker.channel.post(pickle.dumps(setup))
        self._ask(worker, request, None)

    def allocate(self, layout: Layout) -> dict[str, np.ndarray]:
        """Reserve a shared block."""
        selected = Field(SELECTED, (), "uint8")
        with _within_open_files(len(self.rows_of)):
            block = Block.create(
                Layout((*layout.fields, selected), layout.rows), self._map_files_in
            )
        arrays = dict(block.arrays)
        self._selected = arrays.pop(SELECTED)
        previous, self._block = self._block, block
        if previous is not None:
            previous.close()
        return arrays

    def bind(self, worker: "WorkerProcess", request: Request) -> None:
        """Map the block in a worker."""
        assert self._block is not None
        worker.channel.post(pickle.dumps(self._block.layout), self._block.fd)
        self._ask(worker, request, _BIND)

    def packed(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Pickle the arguments, by value."""
        return by_value.dumps_arguments(method, (args, kwargs))

    def call(
        self, worker: "WorkerProcess", request: Request, method: str, arguments: bytes
    ) -> None:
        """Call a method of a worker's host."""
        worker.channel.post(pickle.dumps((method, arguments)))
        self._ask(worker, request, _CONTROL)

    def _ask(self, worker: "WorkerProcess", request: Request, code: Any) -> None:
        """Wake a worker to read what was posted for it; no code is needed where it awaits a message."""
        write, waker = wake.write, worker.waker
        self._posting = True
        worker.request = request
        self.pending[worker.reply] = worker
        if code is not None:
            try:  # with no call since it is pending: Ctrl-C in between would leave it asleep
                write(waker, code)
            except BrokenPipeError:
                return  # the caller that waits finds out how it ended
        self._push(worker)

    def run(
        self,
        workers: "Sequence[WorkerProcess]",
        request: Request,
        command: int,
        mask: np.ndarray | None,
    ) -> None:
        """Wake workers; one number each."""
        pending, write = self.pending, wake.write
        code = _TO_ALL[command]
        if mask is not None:
            code = _TO_CHOSEN[command]
            for worker in workers:  # other rows may be those of jobs
                self._selected[worker.row_slice] = mask[worker.row_slice]
        for worker in workers:
            if worker.lost is not None:
                request.miss(worker.lost)
                continue
            worker.request = request
            pending[worker.reply] = worker
            try:
                write(worker.waker, code)
            except BrokenPipeError:
                continue  # the caller that waits finds out how it ended

    # -------------------------------------------------------------------------------- what is heard

    def attend(self, until: float, left: int) -> bool:
        """Wait until something happens, or ``until``, and take what came."""
        pending, read_into = self.pending, os.readv
        reply, buffers = self._inbox, self._buffers
        worker = self._unsettled
        try:
            if worker is not None:
                if worker.reply in pending:
                    self._settle(worker, _MESSAGE)
                self._unsettled = None
                if len(pending) <= left:
                    return True
            if self._posting:
                for posted in list(pending.values()):
                    self._push(posted)
                self._posting = False
            if not pending:
                return False
            seconds = -1.0 if until == math.inf else max(until - time.monotonic(), 0.0)
            events = self._selector.poll(seconds if self._epoll else seconds * 1000)
            for fd, _ in events:
                reply[0] = _NOTHING
                worker = pending.get(fd)
                if worker is None:
                    self._examine(fd)
                    continue
                read_into(fd, buffers)
                if reply[0] == _DONE:
                    del pending[fd]
                else:
                    self._settle(worker, reply[0])
        except BaseException:  # Ctrl-C, which may have come right after a byte was read
            if worker is not None and worker.reply in pending:
                if reply[0] == _DONE:
                    del pending[worker.reply]
                elif reply[0] == _MESSAGE:
                    self._unsettled = worker
            raise
        return bool(events)

    def _push(self, worker: "WorkerProcess") -> None:
        """Send what there is room for of a message; the rest goes when there is more."""
        try:
            unsent = not worker.channel.push()
        except OSError:  # it died, and so will not reply: the caller that waits for that finds out
            unsent = False
        fd = worker.channel.fileno()
        if unsent:
            with suppress(FileExistsError):  # epoll's way to say that it is registered
                self._selector.register(fd, select.POLLOUT)
            self._watched[fd] = worker
        else:
            self._unwatch_one(fd)

    def _settle(self, worker: "WorkerProcess", reply: int) -> None:
        """Process a reply that is not plain success."""
        if reply != _MESSAGE:  # end of file
            self._note_end(worker)
            return
        request = worker.request
        left_s = None if request.deadline == math.inf else request.deadline - time.monotonic()
        try:
            message = worker.channel.recv(request=request.number, timeout_s=left_s)
        except EOFError:
            self._note_end(worker)
            return
        except TimeoutError:  # it stays pending, and expires
            return
        result, failures = read_answer(
            message, worker=worker.index, rows=worker.rows, command=request.name
        )
        request.settle(worker.index, result, failures)
        self._unsettled = None  # first: the next request of this worker has announced nothing yet
        del self.pending[worker.reply]
        worker.channel.forget()

    def _examine(self, fd: int) -> None:
        """Process a worker whose channel has room, or sentinel or unexpected reply is readable."""
        worker = self._watched.get(fd)
        if worker is None or (fd == worker.process.sentinel and not worker.process.ended()):
            return
        if fd == worker.channel.fileno():
            self._push(worker)
            return
        if worker.reply in self.pending and worker.has_reply():
            byte = os.read(worker.reply, 1)  # it finished this request before it died
            if byte == DONE:
                del self.pending[worker.reply]
            elif byte:
                self._settle(worker, byte[0])
        self._note_end(worker)

    # -------------------------------------------------------------------------------------- losses

    def _note_end(self, worker: "WorkerProcess") -> None:
        self.lose(worker, Failure(worker.index, tuple(worker.rows), worker.request.name, "died"))

    def lose(self, worker: "WorkerProcess", why: Failure, stack: str | None = None) -> None:
        """End a process if it still runs, and record why it is lost; without ``stack``, the stack it printed is used."""
        if worker.lost is None:
            worker.lost = worker.end(why, stack)
        super().lose(worker, why)
        self._unwatch(worker)

    def give_up(self, stuck: "Sequence[tuple[WorkerProcess, Failure]]") -> None:
        """Kill processes, and note where they were stuck."""
        for worker, _ in stuck:
            send_signal(worker.process, STACK_SIGNAL)
        end = time.monotonic() + _STACKS_S
        stacks = [worker.last_words(max(end - time.monotonic(), 1e-3)) for worker, _ in stuck]
        for worker, _ in stuck:
            send_signal(worker.process, signal.SIGKILL)
        for (worker, why), stack in zip(stuck, stacks, strict=True):
            self.lose(worker, why, stack)

    # ----------------------------------------------------------------------------- what is watched

    def _watch(self, worker: "WorkerProcess") -> None:
        for fd in (worker.reply, worker.process.sentinel):
            self._watched[fd] = worker
            self._selector.register(fd, select.POLLIN)

    def _unwatch(self, worker: "WorkerProcess") -> None:
        for fd in (worker.reply, worker.process.sentinel, worker.channel.fileno()):
            self._unwatch_one(fd)

    def _unwatch_one(self, fd: int) -> None:
        if fd in self._watched:
            with suppress(FileNotFoundError, KeyError):  # of epoll, of poll: it is not registered
                self._selector.unregister(fd)
            self._watched.pop(fd, None)


class WorkerProcess(Worker):
    """A worker's process, descriptors and channel. A dead worker is replaced by a new one.

    Messages are posted to ``channel``, and the caller that waits for the worker pushes them; ``waker`` is written to
    with `wake.write`; ``reply`` is the pipe of its replies.
    """

    def __init__(
        self,
        index: int,
        rows: range,
        *,
        start_method: str,
        lifeline: int,
        close_in_fork: Sequence[int],
    ) -> None:
        super().__init__(index, rows)
        self.row_slice = slice(rows.start, rows.stop)
        with ExitStack() as theirs, ExitStack() as ours:
            self.channel, there = Channel.pair()
            ours.callback(self.channel.close)
            theirs.callback(there.close)
            self.waker, ear = wake.open_pair()
            ours.callback(os.close, self.waker)
            theirs.callback(os.close, ear)
            self.reply, reply_w = os.pipe()
            ours.callback(os.close, self.reply)
            theirs.callback(os.close, reply_w)
            os.set_blocking(self.reply, False)  # it is read when it is known to be readable
            fds = (there.fileno(), ear, reply_w, lifeline)
            self.process = launch(start_method, fds, close=(*close_in_fork, *self.fds))
            self._close_ours = ours.pop_all().close

    @property
    def fds(self) -> tuple[int, int, int]:
        """Our ends of what leads to the worker."""
        return self.waker, self.reply, self.channel.fileno()

    def has_reply(self) -> bool:
        """Check, without waiting, whether something can be read from the reply pipe."""
        poller = select.poll()
        poller.register(self.reply, select.POLLIN)
        return any(event & select.POLLIN for _, event in poller.poll(0))

    def last_words(self, limit_s: float) -> str:
        """Read the stack that a crashing or a stuck worker wrote, "" if it wrote none."""
        text = self.channel.drain(quiet_s=0.05, limit_s=limit_s).decode(errors="replace")
        start = _STACK_START.search(text)
        return text[start.start() :] if start else ""

    def end(self, why: Failure, stack: str | None) -> Failure:
        """End the process if it still runs, and return how it ended; without ``stack``, the stack it printed is used."""
        if not wait_for(self.process, 1.0 if why.kind == "died" else 0.0):
            send_signal(self.process, signal.SIGKILL)
            wait_for(self.process, _KILL_S)
        if why.kind == "raised":
            return why
        return replace(
            why,
            message=why.message or self.process.problem,
            traceback=self.last_words(0.05) if stack is None else stack,
            exitcode=self.process.exitcode,
        )

    def close(self) -> None:
        """Close all descriptors; the process must be gone."""
        self._close_ours()
        self.process.close()


def _stop_all(
    handles: Sequence[WorkerProcess],
    *,
    busy: Sequence[WorkerProcess] = (),
    ask_s: float = _ASK_S,
) -> None:
    """End workers in bounded time: ask, wait, terminate, kill; then close their descriptors.

    Those that are not ``busy`` have ``ask_s`` seconds to do what they are asked.
    """
    try:
        for handle in handles:
            with suppress(OSError):  # gone already
                wake.write(handle.waker, _STOP)
                handle.channel.end()  # one that waits for its first message stops there
        living = _still_running([h for h in handles if h not in busy], ask_s)
        living += _still_running([h for h in handles if h in busy], _ASK_BUSY_S)
        _signal_all(living, signal.SIGTERM)
        living = _still_running(living, _TERMINATE_S)
    finally:  # Ctrl-C while waiting must not leave anyone behind either
        _signal_all(handles, signal.SIGKILL)
        _still_running(handles, _KILL_S)
        for handle in handles:
            handle.close()


def _signal_all(handles: Sequence[WorkerProcess], number: signal.Signals) -> None:
    for handle in handles:
        send_signal(handle.process, number)


def _still_running(handles: Sequence[WorkerProcess], timeout_s: float) -> list[WorkerProcess]:
    end = time.monotonic() + timeout_s
    return [h for h in handles if not wait_for(h.process, end - time.monotonic())]


@contextmanager
def _within_open_files(num_workers: int) -> Generator[None]:
    """Return which limit it was, where too many files are open for a pool of so many workers.

    Raises:
        OpenFilesError: the system refused a descriptor.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in TOO_MANY_FILES:
            raise
        limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = "none" if hard_limit == resource.RLIM_INFINITY else hard_limit
        now_open = len(os.listdir("/dev/fd")) - 1  # one is that of the list
        wanted = now_open + _EACH * num_workers + _BESIDE
        raise OpenFilesError(
            f"too many open files for {num_workers} worker processes: the limit of this process (ulimit "
            f"-n) is {limit}, {now_open} are open, and about {wanted} are needed. Raise the limit in "
            f"the shell before Python starts (ulimit -n {max(wanted, 4096)}; the hard limit is {most}), "
            "or use fewer workers (num_processes=)."
        ) from error
