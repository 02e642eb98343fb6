"""A process that has imported the heavy libraries, and forks workers that need not import them.

This module decides how workers are forked and how their end is reported. It does not know what a
worker does. `main` runs in the server, `ForkServer` in the process that asks for workers.

Why not `multiprocessing.forkserver`: its preparation data fixes the caller's default start method,
imports the caller's `__main__`, and its preload list is one per process. Here `__main__` is never
named, so it cannot be imported.

Conventions
    request  one byte on a socket: PRELOAD, then a length and names in JSON; or FORK, with the
             status pipe and descriptors of the new worker, then a byte with the number of these.
    status   two numbers of 8 bytes that the server writes: the pid, and in the end the exit code;
             or one, below zero: the number of the error (errno) for which no process came to be.
"""

import contextlib
import errno
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence

from envkit.transport.interpreter import run_python
from envkit.transport.lifeline import end_groups, pidfd_of

STATUS = struct.Struct("<q")
_LENGTH = struct.Struct("<I")
_PRELOAD, _FORK = b"P", b"F"
_MAX_FDS = 16


class ForkServer:
    """Starts the server when first needed, and asks it for workers.

    The server ends with this process, however that ends, or with `close`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner_pid = 0
        self._preloaded: set[str] = set()
        self._socket: socket.socket | None = None
        self._close = _nothing

    def warm_up(self, preload: Iterable[str] = ()) -> None:
        """Start the server and let it import ``preload`` in the background; missing modules are skipped."""
        with self._lock:
            self._ask_to_preload(self._connect(), preload)

    def fork(self, fds: Sequence[int], status: int) -> None:
        """Fork a worker that owns duplicates of ``fds``; ``status`` is where news of it go."""
        with self._lock:
            request = _FORK + bytes([1 + len(fds)])
            socket.send_fds(self._connect(), [request], [status, *fds])

    def close(self) -> None:
        """End the server, and with it its workers."""
        self._close()

    def _ask_to_preload(self, server: socket.socket, preload: Iterable[str]) -> None:
        names = [name for name in preload if name not in self._preloaded]
        if names:
            message = json.dumps(names).encode()
            server.sendall(_PRELOAD + _LENGTH.pack(len(message)) + message)
            self._preloaded.update(names)

    def _connect(self) -> socket.socket:
        """Return the connection to a living server, starting one if need be."""
        if self._socket is not None and self._owner_pid == os.getpid():
            if not _hung_up(self._socket):
                return self._socket
            self._close()
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with there:
            arguments = [there.fileno(), os.getpid()]
            try:
                process = run_python("envkit.transport.forkserver", arguments, [there.fileno()])
            except BaseException:
                here.close()
                raise
        self._socket, self._owner_pid = here, os.getpid()
        wanted, self._preloaded = self._preloaded, set()
        self._close = weakref.finalize(self, _end, process, self._socket, self._owner_pid)
        self._ask_to_preload(self._socket, wanted)
        return self._socket


@functools.cache
def shared_fork_server() -> ForkServer:
    """Return the server of this process, which all pools share."""
    return ForkServer()


def _nothing() -> None:
    """Close nothing: no server runs."""


def _hung_up(server: socket.socket) -> bool:
    if server.fileno() < 0:
        return True
    poller = select.poll()
    poller.register(server, 0)  # hang-ups are reported without being asked for
    return bool(poller.poll(0))


def _end(process: subprocess.Popen[bytes], server: socket.socket, owner_pid: int) -> None:
    server.close()
    if os.getpid() != owner_pid:
        process.returncode = 0  # a fork of the owner: not our child to wait for
        return
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(requests_fd: int, parent_pid: int) -> None:
    """Serve until the asking process is gone; workers run in forks of this function.

    Forks of that process may hold its end of ``requests_fd`` open, hence ``parent_pid``.
    """
    parent = pidfd_of(parent_pid)
    if os.getppid() != parent_pid:
        return
    ended_r, ended_w = os.pipe()
    for fd in (ended_r, ended_w):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(ended_w, warn_on_full_buffer=False)
    # a handler, so that the byte is written
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    statuses: dict[int, int] = {}
    poller = select.poll()
    poller.register(ended_r, select.POLLIN)
    poller.register(requests_fd, select.POLLIN)
    private = [requests_fd, ended_r, ended_w]
    if parent is not None:
        poller.register(parent, select.POLLIN)
        private.append(parent)
    try:
        with socket.socket(fileno=requests_fd) as requests:
            while True:
                ready = {fd for fd, _ in poller.poll()}
                if ended_r in ready:
                    os.read(ended_r, 4096)
                    _report_ends(statuses)
                if parent in ready:
                    return
                if requests_fd not in ready:
                    continue
                request, fds, _, _ = socket.recv_fds(requests, 1, _MAX_FDS)
                if not request:
                    return
                if request == _PRELOAD:
                    _preload(requests)
                else:
                    count = requests.recv(1)[0]
                    _fork_worker(fds, statuses, complete=len(fds) == count, close=private)
    finally:
        end_groups(statuses)


def _preload(requests: socket.socket) -> None:
    size = _LENGTH.unpack(requests.recv(_LENGTH.size, socket.MSG_WAITALL))[0]
    names = json.loads(requests.recv(size, socket.MSG_WAITALL))
    with warnings.catch_warnings(action="ignore"):
        for name in names:
            with contextlib.suppress(Exception):  # the worker that needs it will say why it fails
                importlib.import_module(name)
    gc.freeze()  # workers share these pages: keep their collectors from writing to them


def _fork_worker(
    fds: list[int], statuses: dict[int, int], *, complete: bool, close: Sequence[int]
) -> None:
    """Fork, or tell why that is impossible; with too many open files some of ``fds`` are missing."""
    server_pid, error = os.getpid(), errno.EMFILE
    pid = -1
    if complete:
        try:
            pid = _fork()
        except OSError as refused:  # too many processes, too little memory
            error = refused.errno or errno.EAGAIN
    if pid == 0:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _leave_to_server()
            for fd in (*close, fds[0], *statuses.values()):
                os.close(fd)
            importlib.import_module("envkit.transport.worker").main(*fds[1:], server_pid)
        finally:
            os._exit(1)
    for fd in fds[1:]:
        os.close(fd)
    if not fds:
        return
    if pid > 0:
        statuses[pid] = fds[0]
        _write_status(fds[0], pid)
    else:
        _write_status(fds[0], -error)
        os.close(fds[0])


def _leave_to_server() -> None:
    """Skip all clean-up at the end of this fork: what the server has created stays.

    Libraries of torch's operators alone took a worker 25 ms of CPU time at its end.
    """
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False


def _fork() -> int:
    # of forking beside threads: those of BLAS survive it
    with warnings.catch_warnings(action="ignore"):
        return os.fork()


def _report_ends(statuses: dict[int, int]) -> None:
    """Wait for workers that have ended, end what they have left behind, and tell."""
    ended: dict[int, int] = {}
    while len(ended) < len(statuses):
        pid, wait_status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        if pid in statuses:
            ended[pid] = os.waitstatus_to_exitcode(wait_status)
    end_groups(ended)
    for pid, exitcode in ended.items():
        status = statuses.pop(pid)
        _write_status(status, exitcode)
        os.close(status)


def _write_status(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the reader is gone
        os.write(status, STATUS.pack(number))
