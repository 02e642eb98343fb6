"""One worker, as its parent sees it.

This module decides how a worker is started, addressed, found dead and ended. It does not wait for
many workers, nor decide how long to wait: `processes` does.
"""

import os
import pickle
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import cloudpickle

from envkit.errors import ArgumentError
from envkit.transport.block import Block
from envkit.transport.channel import Channel
from envkit.transport.failure import Failure
from envkit.transport.host import MakeHost
from envkit.transport.interpreter import absolute_sys_path, worker_environ
from envkit.transport.launch import launch, send_signal, wait_for
from envkit.transport.worker import CONTROL, STACK_SIGNAL, STOP, Setup

__all__ = ["WorkerHandle", "pickle_arguments", "pickle_maker", "stop_all"]

_STACK_START = re.compile(r"Fatal Python error|(Current t|T)hread 0x")
_ASK_S, _ASK_BUSY_S, _TERMINATE_S, _KILL_S = 3.0, 0.5, 0.5, 1.0


class WorkerHandle:
    """A worker's process, pipes and channel. A dead worker is replaced by a new handle.

    ``lost`` tells why it can no longer be used, None while it can.
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
        self.index = index
        self.rows = rows
        self.lost: Failure | None = None
        self.channel, there = Channel.pair()
        wake_r, self.wake = os.pipe()
        self.reply, reply_w = os.pipe()
        os.set_blocking(self.reply, False)  # it is read when it is known to be readable
        fds = (there.fileno(), wake_r, reply_w, lifeline)
        mine = (*close_in_fork, *self.fds)
        try:
            self.process = launch(start_method, fds, mine)
        except BaseException:
            self._close_pipes()
            raise
        finally:
            there.close()
            os.close(wake_r)
            os.close(reply_w)

    @property
    def fds(self) -> tuple[int, int, int]:
        """Our ends of the pipes and the channel."""
        return self.wake, self.reply, self.channel.fileno()

    def send_setup(
        self, commands: Mapping[int, str], maker: bytes, *, timeout_s: float | None
    ) -> None:
        """Send the first message, which is answered like a request."""
        setup = Setup(
            index=self.index,
            rows=self.rows,
            commands=dict(commands),
            parent_pid=os.getpid(),
            environ=worker_environ(),
            sys_path=absolute_sys_path(),
            argv=list(sys.argv),
            cwd=_working_directory(),
            maker=maker,
        )
        self._deliver(lambda: self.channel.send(pickle.dumps(setup), timeout_s=timeout_s))

    def send_bind(self, block: Block, *, timeout_s: float | None) -> None:
        """Ask the worker to map ``block``."""
        self._request(("bind", pickle.dumps(block.layout)), timeout_s)
        self._deliver(lambda: self.channel.send_fd(block.fd))

    def send_call(self, method: str, arguments: bytes, *, timeout_s: float | None) -> None:
        """Ask the worker for ``host.call(method, *args, **kwargs)``; ``arguments`` are pickled."""
        self._request(("call", method, arguments), timeout_s)

    def has_reply(self) -> bool:
        """Look, without waiting, whether something can be read from the reply pipe."""
        poller = select.poll()
        poller.register(self.reply, select.POLLIN)
        return any(event & select.POLLIN for _, event in poller.poll(0))

    def ask_for_stack(self) -> None:
        """Have the worker write its stack to the channel; `last_words` reads it."""
        send_signal(self.process, STACK_SIGNAL)

    def last_words(self, *, limit_s: float) -> str:
        """Read the stack that a crashing or a stuck worker wrote, "" if it wrote none."""
        text = self.channel.drain(quiet_s=0.05, limit_s=limit_s).decode(errors="replace")
        start = _STACK_START.search(text)
        return text[start.start() :] if start else ""

    def end(
        self,
        kind: Literal["died", "timeout", "interrupted"],
        command: str,
        *,
        message: str = "",
        stack: str = "",
    ) -> Failure:
        """Make sure the process is gone, and tell why."""
        if not wait_for(self.process, 1.0 if kind == "died" else 0.0):
            self.kill()
            wait_for(self.process, _KILL_S)
        return Failure(
            worker=self.index,
            rows=tuple(self.rows),
            command=command,
            kind=kind,
            message=message,
            traceback=stack or self.last_words(limit_s=0.05),
            exitcode=self.process.exitcode,
        )

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        send_signal(self.process, signal.SIGKILL)

    def close(self) -> None:
        """Close all descriptors; the process must be gone."""
        self._close_pipes()
        self.process.close()

    def _close_pipes(self) -> None:
        os.close(self.wake)
        os.close(self.reply)
        self.channel.close()

    def _request(self, message: tuple[Any, ...], timeout_s: float | None) -> None:
        self._deliver(lambda: self._send_request(pickle.dumps(message), timeout_s))

    def _send_request(self, message: bytes, timeout_s: float | None) -> None:
        os.write(self.wake, bytes([CONTROL]))  # first, so that the worker reads while we send
        self.channel.send(message, timeout_s=timeout_s)

    def _deliver(self, send: Callable[[], None]) -> None:
        """Send; a worker that cannot be reached is found out by whoever waits for its reply."""
        with suppress(OSError):  # it died, or takes nothing: either way, it will not reply
            send()


def pickle_maker(make_host: MakeHost) -> bytes:
    """Pickle a maker, by value where it was defined in `__main__` or a notebook.

    Raises:
        ArgumentError: something the maker refers to cannot be pickled.
    """
    try:
        return cloudpickle.dumps(make_host)
    except Exception as error:
        raise ArgumentError(
            f"the function that builds the environments cannot be sent to workers ({error}). "
            "Build everything inside it instead of capturing objects, for example pass "
            "`lambda: env_cls(...)` and not an instance."
        ) from error


def pickle_arguments(method: str, arguments: tuple[tuple, dict[str, Any]]) -> bytes:
    """Pickle ``(args, kwargs)`` of a call.

    Raises:
        ArgumentError: something among them cannot be pickled.
    """
    try:
        return cloudpickle.dumps(arguments)
    except Exception as error:
        raise ArgumentError(
            f"what {method!r} is called with cannot be sent to workers ({error}). Pass tensors, "
            "arrays, numbers, strings or containers of them."
        ) from error


def stop_all(handles: Sequence[WorkerHandle], *, busy: Sequence[WorkerHandle] = ()) -> None:
    """End workers in bounded time: ask, wait, terminate, kill; then close their descriptors."""
    try:
        for handle in handles:
            with suppress(OSError):  # gone already
                os.write(handle.wake, bytes([STOP]))
        living = _still_running([h for h in handles if h not in busy], _ASK_S)
        living += _still_running([h for h in handles if h in busy], _ASK_BUSY_S)
        _signal_all(living, signal.SIGTERM)
        living = _still_running(living, _TERMINATE_S)
    finally:  # Ctrl-C while waiting must not leave anyone behind either
        _signal_all(handles, signal.SIGKILL)
        _still_running(handles, _KILL_S)
        for handle in handles:
            handle.close()


def _signal_all(handles: Sequence[WorkerHandle], number: signal.Signals) -> None:
    for handle in handles:
        send_signal(handle.process, number)


def _still_running(handles: Sequence[WorkerHandle], timeout_s: float) -> list[WorkerHandle]:
    end = time.monotonic() + timeout_s
    return [h for h in handles if not wait_for(h.process, end - time.monotonic())]


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted under us; workers then stay where they are
        return None
