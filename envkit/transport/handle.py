"""One worker, as its parent sees it.

This module decides how a worker is started, addressed, found dead and ended. It does not wait for
many workers, nor decide how long to wait: `processes` and `rounds` do.
"""

import math
import os
import pickle
import re
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Literal

from envkit.errors import ArgumentError
from envkit.transport import by_value, wake
from envkit.transport.block import Block
from envkit.transport.channel import Channel
from envkit.transport.failure import Failure
from envkit.transport.host import MakeHost
from envkit.transport.interpreter import absolute_sys_path, worker_environ, working_directory
from envkit.transport.launch import launch, send_signal, wait_for
from envkit.transport.worker import STACK_SIGNAL, Setup

__all__ = [
    "ASK_S",
    "Limit",
    "Request",
    "WorkerHandle",
    "pickle_arguments",
    "pickle_maker",
    "stop_all",
]

Limit = Literal["timeout", "start_timeout"]

_STOP = wake.encode(wake.STOP)
_STACK_START = re.compile(r"Fatal Python error|(Current t|T)hread 0x")
ASK_S, _ASK_BUSY_S, _TERMINATE_S, _KILL_S = 3.0, 0.5, 0.5, 1.0


class Request:
    """What was asked of some workers at once, until when they may answer, and what came of it.

    Attributes:
        name: of the command or method, for messages.
        number: counts the requests of a pool.
        limit, limit_s: what sets the deadline, and to how many seconds.
        deadline: as `time.monotonic` counts.
        answers: what calls returned, by worker.
        failures: what failed, by number of the request (0 for a worker that is gone) and worker.
    """

    __slots__ = ("answers", "deadline", "failures", "limit", "limit_s", "name", "number")

    def __init__(
        self,
        name: str,
        number: int,
        limit: Limit,
        limit_s: float,
        failures: dict[tuple[int, int], list[Failure]] | None = None,
    ) -> None:
        self.name, self.number = name, number
        self.limit, self.limit_s = limit, limit_s
        self.deadline = time.monotonic() + limit_s
        self.answers: dict[int, Any] = {}
        self.failures = {} if failures is None else failures

    def settle(self, worker: int, result: Any, failures: list[Failure]) -> None:
        """Note what a worker has returned, and what failed instead or beside."""
        if failures:
            self.failures[self.number, worker] = failures
        if not failures or result is not None:
            self.answers[worker] = result


class WorkerHandle:
    """A worker's process, descriptors and channel. A dead worker is replaced by a new handle.

    ``lost`` tells why it can no longer be used, None while it can; ``request`` is the last it was asked. Messages are posted to
    ``channel``, and whoever waits for the worker pushes them; ``waker`` is written to with
    `wake.write`.
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
        self.request = Request("start", 0, "start_timeout", math.inf)
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

    def post_setup(
        self,
        commands: Mapping[int | str, str],
        maker: bytes,
        *,
        prepare: tuple[bytes, ...],
        hide_warnings: bool,
        cores: frozenset[int] | None,
    ) -> None:
        """Post the first message, which the worker awaits and answers like a request."""
        setup = Setup(
            index=self.index,
            rows=self.rows,
            commands=dict(commands),
            parent_pid=os.getpid(),
            environ=worker_environ(),
            sys_path=absolute_sys_path(),
            argv=list(sys.argv),
            cwd=working_directory(),
            hide_warnings=hide_warnings,
            cores=cores,
            prepare=prepare,
            maker=maker,
        )
        self.channel.post(pickle.dumps(setup))

    def post_bind(self, block: Block) -> None:
        """Post what goes with BIND, that the worker map ``block``."""
        self.channel.post(pickle.dumps(block.layout), block.fd)

    def post_call(self, method: str, arguments: bytes) -> None:
        """Post what goes with CONTROL, for ``host.call(method, *args, **kwargs)``, pickled."""
        self.channel.post(pickle.dumps((method, arguments)))

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
        stack: str | None = None,
    ) -> Failure:
        """Make sure the process is gone, and tell why; its last words are the stack, if not given."""
        if not wait_for(self.process, 1.0 if kind == "died" else 0.0):
            self.kill()
            wait_for(self.process, _KILL_S)
        return Failure(
            worker=self.index,
            rows=tuple(self.rows),
            command=command,
            kind=kind,
            message=message or self.process.problem,
            traceback=self.last_words(limit_s=0.05) if stack is None else stack,
            exitcode=self.process.exitcode,
        )

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        send_signal(self.process, signal.SIGKILL)

    def close(self) -> None:
        """Close all descriptors; the process must be gone."""
        self._close_ours()
        self.process.close()


def pickle_maker(make_host: MakeHost) -> bytes:
    """Pickle a maker, by value where the workers could not import it.

    Raises:
        ArgumentError: something the maker refers to cannot be pickled.
    """
    try:
        return by_value.dumps(make_host)
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
        return by_value.dumps(arguments)
    except Exception as error:
        raise ArgumentError(
            f"what {method!r} is called with cannot be sent to workers ({error}). Pass tensors, "
            "arrays, numbers, strings or containers of them."
        ) from error


def stop_all(
    handles: Sequence[WorkerHandle],
    *,
    busy: Sequence[WorkerHandle] = (),
    ask_s: float = ASK_S,
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


def _signal_all(handles: Sequence[WorkerHandle], number: signal.Signals) -> None:
    for handle in handles:
        send_signal(handle.process, number)


def _still_running(handles: Sequence[WorkerHandle], timeout_s: float) -> list[WorkerHandle]:
    end = time.monotonic() + timeout_s
    return [h for h in handles if not wait_for(h.process, end - time.monotonic())]
