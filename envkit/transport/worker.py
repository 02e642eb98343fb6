"""The process that holds some rows: it answers one number with one byte, and knows nothing else.

No reset rule, deadline or batching lives here, and `answers` says what a reply tells.

Conventions
    ear          one number in, see `wake`: a command (0 to 255) plus ALL_ROWS, or plus CHOSEN_ROWS
                 where the mask counts. Else CONTROL, for a message on the channel; BIND, for a descriptor and a
                 message there; or STOP.
    reply pipe   one byte out: DONE, or MESSAGE, for details on the channel.
    channel      pickled messages: construction, attributes, errors. The stack of a crash, or of a
                 worker that was asked for it (STACK_SIGNAL), is written there as plain text.
    lifeline     a pipe without writes, see `lifeline`.
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

from envkit.transport import wake
from envkit.transport.answers import Answers, build_host, call_host
from envkit.transport.block import Block
from envkit.transport.channel import Channel
from envkit.transport.host import Host, RowCursor
from envkit.transport.layout import Layout
from envkit.transport.lifeline import end_with_parent, start_watching

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
    parent_pid: int
    environ: dict[str, str]
    sys_path: list[str]
    argv: list[str]
    cwd: str | None
    hide_warnings: bool
    cores: frozenset[int] | None  # the only ones to run on
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
        if self.cores is not None:
            # they were taken from us meanwhile, which costs only speed
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.cores)
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
    """Run a worker until it gets the stop command or the parent is gone; does not return.

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
    except (EOFError, ConnectionError):  # the parent is gone
        pass
    except Exception:  # of `Host.close`: no caller waits for a reply any more
        traceback.print_exc()
    if run_exit_handlers:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the reader of our output may be gone
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
        self._answers = Answers(setup.index, setup.rows)
        self._selected: memoryview | bytes = b""
        self._block: Block | None = None

    def serve(self) -> None:
        """Build the host, then answer requests; returns on stop and when the parent is gone."""
        host = self._answer(self._start)
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
                self._send(self._answers.of_rest(host, code & _COMMAND, chosen, error))
            else:
                os.write(reply, DONE)

    def _start(self) -> tuple[Host, object]:
        self._setup.apply()
        return build_host(self._setup.maker, self._setup.rows)

    def _control(self, host: Host, code: int) -> None:
        if code == BIND:
            fd, layout = self._channel.recv_fd(), self._channel.recv()
            self._answer(lambda: (None, self._bind(host, fd, pickle.loads(layout))))
        else:
            method, arguments = pickle.loads(self._channel.recv())
            self._answer(lambda: (None, call_host(host, method, arguments)))

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

    def _answer(self, work: Callable[[], tuple[Any, object]]) -> Any:
        """Call ``work``, send its result and what it raised, and return what is to be kept of it."""
        kept, message = self._answers.of(work)
        self._send(message)
        return kept

    def _send(self, message: bytes) -> None:
        os.write(self._reply, MESSAGE)  # first, so that the parent reads while we send
        self._channel.send(message)
