"""The process that holds some rows: it answers one number with one byte, and knows nothing else.

No reset rule, deadline or batching lives here. Every request gets one reply, also construction
and also failure, so that the parent never has to guess.

Conventions
    ear          one number in, see `wake`: a command (0 to 255) plus ALL_ROWS, or plus CHOSEN_ROWS
                 where the mask is to be looked at; or CONTROL, for a message on the channel; or
                 BIND, for a descriptor and a message there; or STOP.
    reply pipe   one byte out: DONE, or MESSAGE, for details on the channel.
    channel      pickled messages: construction, attributes, errors. The stack of a crash, or of a
                 worker that was asked for it (STACK_SIGNAL), is written there as plain text.
    lifeline     a pipe nobody writes to, see `lifeline`.
"""

import atexit
import contextlib
import faulthandler
import os
import pickle
import random
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np

from envkit.errors import WorkerError
from envkit.transport import by_value, wake
from envkit.transport.block import Block
from envkit.transport.channel import Channel
from envkit.transport.failure import Failure, failures_of
from envkit.transport.host import Host, RowCursor, RowsFailedError, run_rows
from envkit.transport.layout import Layout
from envkit.transport.lifeline import end_with_parent, start_watching

__all__ = [
    "ALL_ROWS",
    "BIND",
    "CHOSEN_ROWS",
    "CONTROL",
    "DONE",
    "MESSAGE",
    "SELECTED",
    "STACK_SIGNAL",
    "Setup",
    "main",
]

ALL_ROWS, CHOSEN_ROWS, CONTROL, BIND = 0x100, 0x200, 0x400, 0x800
_COMMAND = 0xFF
DONE = b"\0"
MESSAGE = b"\1"
STACK_SIGNAL = signal.SIGUSR1
SELECTED = "__selected__"
"""Name of the uint8 array, one entry a row, that says which rows a command is for."""


@dataclass(frozen=True)
class Setup:
    """First message to a worker: who it is, and the surroundings its maker expects."""

    index: int
    rows: range
    commands: dict[int | str, str]
    parent_pid: int
    environ: dict[str, str]
    sys_path: list[str]
    argv: list[str]
    cwd: str | None
    hide_warnings: bool
    core: int | None  # the only one to run on
    prepare: tuple[bytes, ...]  # called next
    maker: bytes  # unpickled last, since its imports may need all of the above

    def apply(self) -> None:
        """Take over what the parent has set up, its surroundings first."""
        if self.hide_warnings:  # here, since imports that the maker needs may warn already
            warnings.simplefilter("ignore")
        os.environ.clear()
        os.environ.update(self.environ)
        sys.path[:] = self.sys_path
        sys.argv[:] = self.argv
        if self.cwd is not None:
            os.chdir(self.cwd)
        if self.core is not None:
            with contextlib.suppress(
                OSError
            ):  # it was taken from us meanwhile, which costs only speed
                os.sched_setaffinity(0, {self.core})
        for pickled in self.prepare:
            pickle.loads(pickled)()


def main(
    channel_fd: int,
    ear: int,
    reply: int,
    lifeline: int,
    starter_pid: int,
    run_exit_handlers: bool = True,
) -> None:
    """Be a worker until told to stop or until the parent is gone; does not return.

    Args:
        channel_fd: socket for messages.
        ear: where commands come.
        reply: pipe for replies.
        lifeline: pipe that ends with the parent.
        starter_pid: process that started this one, with which this one ends at once; 0 if it was
            started by a thread that may end before.
        run_exit_handlers: whether functions that were registered with `atexit` are run.
    """
    if starter_pid:
        end_with_parent(starter_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(file=channel_fd)
    faulthandler.register(STACK_SIGNAL, file=channel_fd, all_threads=True, chain=False)
    random.seed()
    np.random.seed()  # forks of one server would otherwise all draw the same numbers
    channel = Channel(socket.socket(fileno=channel_fd))
    try:
        setup: Setup = pickle.loads(channel.recv())
        start_watching(lifeline, setup.parent_pid)
        _Worker(setup, channel, ear, reply).serve()
    except (EOFError, ConnectionError):  # the parent is gone: nobody left to tell
        pass
    except Exception:  # of `Host.close`: nobody waits for a reply any more
        traceback.print_exc()
    if run_exit_handlers:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # whoever read our output may be gone
            stream.flush()
    os._exit(0)


class _Worker:
    """Serves one parent."""

    def __init__(self, setup: Setup, channel: Channel, ear: int, reply: int) -> None:
        self._setup = setup
        self._channel = channel
        self._ear = ear
        self._reply = reply
        self._rows = RowCursor(setup.rows)
        self._selected: memoryview | bytes = b""
        self._block: Block | None = None

    def serve(self) -> None:
        """Build the host, then answer requests; returns on stop and when the parent is gone."""
        host = self._answer("start", self._start)
        if host is None:
            return
        with contextlib.closing(host):
            self._serve(host)

    def _serve(self, host: Host) -> None:
        ear, reply, rows, run, read = self._ear, self._reply, self._rows, host.run, wake.read
        while True:
            try:
                code = read(ear)
            except InterruptedError:  # a signal handler that the host installed has run
                continue
            if code >= wake.STOP:
                return
            if code & ALL_ROWS:
                chosen = rows
            elif code & CHOSEN_ROWS:
                chosen = RowCursor(compress(rows, self._selected))
            else:
                self._control(host, code)
                continue
            try:
                run(code & _COMMAND, chosen)
            except BaseException as error:
                self._run_rest(host, code & _COMMAND, chosen, error)
            else:
                os.write(reply, DONE)

    def _run_rest(self, host: Host, command: int, rows: RowCursor, error: BaseException) -> None:
        """Go on behind the row that raised, then tell the parent of all that did."""
        name = self._setup.commands.get(command, str(command))
        failures: list[Failure] = []

        def failed(blamed: tuple[int, ...], error: BaseException) -> None:
            failures.extend(self._failures(error, name, blamed))

        blamed, rest = rows.split()
        failed(tuple(blamed), error)
        run_rows(host, command, rest, catch=BaseException, failed=failed)
        self._send(_dumps((None, [failure.packed() for failure in failures])))

    def _start(self) -> tuple[Host, object]:
        self._setup.apply()
        make_host = pickle.loads(self._setup.maker)
        host: Host = make_host(self._setup.rows)
        try:
            return host, host.describe()
        except BaseException:
            host.close()
            raise

    def _control(self, host: Host, code: int) -> None:
        if code == BIND:
            fd, layout = self._channel.recv_fd(), self._channel.recv()
            self._answer("bind", lambda: (None, self._bind(host, fd, pickle.loads(layout))))
        else:
            method, pickled = pickle.loads(self._channel.recv())
            name = self._setup.commands.get(method, method)
            self._answer(name, lambda: (None, _call(host, method, pickled)))

    def _bind(self, host: Host, fd: int, layout: Layout) -> None:
        block = Block.attach(fd, layout)
        arrays, rows = dict(block.arrays), self._setup.rows
        selected = arrays.pop(SELECTED)
        host.bind(arrays, rows)
        del arrays
        self._selected = memoryview(selected.data)[rows.start : rows.stop]
        if self._block is not None:
            self._block.close()
        self._block = block

    def _answer(self, command: str, work: Callable[[], tuple[Any, object]]) -> Any:
        """Do ``work``, send its result and what it raised, and return what is to be kept of it."""
        kept, result, failures = None, None, []
        try:
            kept, result = work()
        except BaseException as error:
            result = error.result if isinstance(error, RowsFailedError) else None
            failures = self._failures(error, command, tuple(self._rows))
        packed = [failure.packed() for failure in failures]
        try:
            message = _dumps((result, packed))
        except WorkerError as error:
            kept = None
            result, stuck = _without_stuck(result, error)
            failures = self._failures(stuck, command, tuple(self._rows))
            message = _dumps((result, [*packed, *(failure.packed() for failure in failures)]))
        self._send(message)
        return kept

    def _failures(self, error: BaseException, command: str, rows: tuple[int, ...]) -> list[Failure]:
        return failures_of(error, worker=self._setup.index, rows=rows, command=command)

    def _send(self, message: bytes) -> None:
        os.write(self._reply, MESSAGE)  # first, so that the parent reads while we send
        self._channel.send(message)


def _call(host: Host, method: str, pickled: bytes) -> object:
    args, kwargs = pickle.loads(pickled)
    return host.call(method, *args, **kwargs)


def _dumps(message: tuple[object, list[Any]]) -> bytes:
    """Pickle a reply; classes that only this process can import travel by value."""
    try:
        return by_value.dumps_by_name(message)
    except Exception:
        try:
            return by_value.dumps(message)
        except Exception as error:
            raise WorkerError(
                f"the result, of type {type(message[0]).__qualname__}, cannot be pickled and so "
                f"cannot leave the worker ({error}). Return arrays, numbers, strings or containers "
                "of them."
            ) from error


def _without_stuck(result: object, error: Exception) -> tuple[object, Exception]:
    """Part a result that cannot be pickled: what can be after all, and an error for the rest.

    Of a dict by row the rows are looked at one by one, see `Host.call`.
    """
    if not isinstance(result, dict):
        return None, error
    stuck: dict[int, Exception] = {}
    for row, value in result.items():
        try:
            _dumps((value, []))
        except WorkerError as own:
            stuck[row] = own
    return {row: value for row, value in result.items() if row not in stuck}, RowsFailedError(
        stuck, None
    )
