"""How a worker process comes to be, is watched, and is ended.

This module decides the start method and hides what differs between them behind `WorkerProcess`.
It does not know what a worker does or says.

Conventions
    sentinel  descriptor that becomes readable when there is news of the process; ask `ended`.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from envkit.errors import ArgumentError
from envkit.transport import worker
from envkit.transport.forkserver import STATUS, shared_fork_server
from envkit.transport.interpreter import run_python
from envkit.transport.lifeline import end_groups


class WorkerProcess(Protocol):
    """A process that was asked for; it may not have a pid yet."""

    pid: int | None
    sentinel: int
    problem: str  # why there never was a process; "" if there was, or may be

    def ended(self) -> bool:
        """Check, without waiting, whether the process is gone."""
        ...

    @property
    def exitcode(self) -> int | None:
        """Exit code once `ended`; None if it cannot be known."""
        ...

    def close(self) -> None:
        """Close the descriptors that watch the process."""
        ...


def choose_start_method(start_method: str | None) -> str:
    """Check a start method, or choose: a fork server where it can work, else fresh interpreters.

    Raises:
        ArgumentError: it is unknown, or "fork" where JAX has been imported.
    """
    if start_method is None:
        return "forkserver" if hasattr(os, "fork") else "spawn"
    if start_method not in ("forkserver", "spawn", "fork"):
        raise ArgumentError(
            f"start method {start_method!r} is unknown; use 'forkserver', 'spawn', 'fork' or None."
        )
    if start_method == "fork" and "jax" in sys.modules:
        raise ArgumentError(
            "start method 'fork' was asked for, but JAX has been imported in this process: its "
            "threads do not survive a fork and the workers would hang. Use 'forkserver' (default)."
        )
    return start_method


def launch(start_method: str, fds: Sequence[int], close: Sequence[int]) -> WorkerProcess:
    """Start a process that runs `worker.main(*fds)`; the caller keeps its own copy of ``fds``.

    Args:
        start_method: what `choose_start_method` returned.
        fds: descriptors for the worker.
        close: descriptors of the caller that a plain fork must not keep open.
    """
    if start_method == "forkserver":
        return _ForkServerProcess(fds)
    if start_method == "spawn":
        return _SpawnedProcess(fds)
    return _ForkedProcess(fds, close)


def send_signal(process: WorkerProcess, number: int) -> None:
    """Send a signal if the process has started and not ended."""
    if process.pid is not None and not process.ended():
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def wait_for(process: WorkerProcess, timeout_s: float) -> bool:
    """Wait until the process is gone, at most ``timeout_s``; say whether it is."""
    end = time.monotonic() + timeout_s
    poller = select.poll()
    poller.register(process.sentinel, select.POLLIN)
    while not process.ended():
        left_s = end - time.monotonic()
        if left_s <= 0:
            return False
        poller.poll(left_s * 1000)
    return True


class _ForkServerProcess:
    """The server, its real parent, writes its pid and exit code into a pipe."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.problem = ""
        self._ended = False
        self.sentinel, status = os.pipe()
        os.set_blocking(self.sentinel, False)
        try:
            shared_fork_server().fork(fds, status)
        except BaseException:
            os.close(self.sentinel)
            raise
        finally:
            os.close(status)

    def ended(self) -> bool:
        while not self._ended:
            try:
                news = os.read(self.sentinel, STATUS.size)
            except BlockingIOError:
                return False
            if not news:  # the server is gone, and the exit code stays unknown
                self._abandon()
            elif self.pid is not None:
                self.exitcode = STATUS.unpack(news)[0]
                self._ended = True
            elif (number := STATUS.unpack(news)[0]) > 0:
                self.pid = number
            else:
                self.problem = os.strerror(-number)
                self._ended = True
        return True

    def close(self) -> None:
        os.close(self.sentinel)

    def _abandon(self) -> None:
        self._ended = True
        if self.pid is None:
            self.problem = "the fork server has ended, or has too many open files"
        else:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            end_groups([self.pid])


class _ChildProcess:
    """A child of this process, which must be waited for."""

    def __init__(self, start: Callable[[int], int]) -> None:
        # The child holds `alive` open and never uses it. It serves where pidfd is missing; pidfd
        # is better, since children of the child may inherit `alive`.
        self.exitcode: int | None = None
        self.problem = ""
        ended, alive = os.pipe()
        try:
            self.pid: int | None = start(alive)
        except BaseException:
            os.close(ended)
            raise
        finally:
            os.close(alive)
        self.sentinel = ended
        with suppress(AttributeError, OSError):
            self.sentinel = os.pidfd_open(self.pid)
            os.close(ended)

    def ended(self) -> bool:
        if self.exitcode is None and self.pid is not None:
            with suppress(ChildProcessError):  # someone else waited for all children
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid == 0:
                    return False
                self.exitcode = os.waitstatus_to_exitcode(status)
                end_groups([pid])
        return True

    def close(self) -> None:
        os.close(self.sentinel)


class _SpawnedProcess(_ChildProcess):
    """A fresh interpreter."""

    def __init__(self, fds: Sequence[int]) -> None:
        super().__init__(lambda alive: self._run(fds, alive).pid)

    def _run(self, fds: Sequence[int], alive: int) -> subprocess.Popen[bytes]:
        arguments = [*fds, _starter_pid()]
        self._popen = run_python("envkit.transport.worker", arguments, [*fds, alive])
        return self._popen

    def ended(self) -> bool:
        ended = super().ended()
        if ended:
            self._popen.returncode = self.exitcode or 0  # it need not wait for the process again
        return ended


class _ForkedProcess(_ChildProcess):
    """A fork of this very process, for callers who asked for it."""

    def __init__(self, fds: Sequence[int], close: Sequence[int]) -> None:
        super().__init__(lambda alive: _fork(fds, close))


def _fork(fds: Sequence[int], close: Sequence[int]) -> int:
    starter_pid = _starter_pid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for fd in close:
                os.close(fd)
            own = [os.dup(fd) for fd in fds]
            worker.main(*own, starter_pid=starter_pid, run_exit_handlers=False)
        finally:
            os._exit(1)
    return pid


def _starter_pid() -> int:
    """Return this process as the one to end with, or 0: threads other than the main one may end."""
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0
