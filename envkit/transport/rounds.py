"""Wait for the replies of worker processes, and for the end of processes, in one selector with a deadline.

This module decides when a round is over, and which workers failed in it. It does not know who was woken for
what, nor how workers are started.

Conventions
    pending   workers that were woken and have not replied, by the descriptor of their reply pipe.
    deadline  counts from the `send` (or other request) of the round; one for all its workers.
    limit     name of what sets it: "timeout", or "start_timeout" where hosts and envs are built.
    abandoned round  one that Ctrl-C interrupted. The next one finishes it first, and tells what
              failed in it beside its own failures.
    Ctrl-C may come behind any call. So a worker is pending before it is woken, with nothing called
    in between; and what is noted of a reply may be noted twice, until the worker is not pending.
"""

import math
import os
import pickle
import time
from typing import Any, Literal

from envkit.transport.failure import Failure, failure_of
from envkit.transport.handle import WorkerHandle
from envkit.transport.resources import Resources
from envkit.transport.worker import DONE, MESSAGE

__all__ = ["Limit", "Rounds"]

Limit = Literal["timeout", "start_timeout"]

_STACKS_S, _GRACE_S = 0.5, 1.0
_NOTHING, _DONE, _MESSAGE = 0xFF, DONE[0], MESSAGE[0]


class Rounds:
    """The part of a pool that knows the round under way: what it waits for, how long, and what came of it.

    Args:
        timeout_s: seconds that a round may take; None for no limit.
        start_timeout_s: the same for rounds in which hosts or envs are built.
    """

    def __init__(self, timeout_s: float | None, start_timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self._round = ""  # name of the command under way
        self._number = 0  # of the round
        self._limit: Limit = "timeout"
        self._limit_s = self._deadline = math.inf
        self._failures: dict[tuple[int, int], list[Failure]] = {}  # by round and worker
        self._answers: dict[int, Any] = {}
        self._inbox = bytearray(1)  # the last reply: what is in memory survives Ctrl-C
        self._unsettled: WorkerHandle | None = None  # it announced a message
        self._posting = False  # whether messages of this round may have to be pushed

    def _begin(self, name: str, limit: Limit = "timeout") -> None:
        self._round = name
        self._number += 1
        self._answers = {}
        limit_s = self.timeout_s if limit == "timeout" else self.start_timeout_s
        self._limit, self._limit_s = limit, math.inf if limit_s is None else limit_s
        self._deadline = time.monotonic() + self._limit_s

    def _finish_abandoned(self, resources: Resources) -> None:
        """Finish a round whose deadline may have passed while nobody waited for it."""
        grace_s = min(self._limit_s, _GRACE_S)
        self._deadline = max(self._deadline, time.monotonic() + grace_s)
        self._finish_round(resources)

    def _finish_round(self, resources: Resources) -> None:
        """Wait for every worker that was woken, and note what failed."""
        pending, read_into = resources.pending, os.readv
        reply, buffers = self._inbox, [self._inbox]
        handle = self._unsettled
        try:
            if handle is not None:
                if handle.reply in pending:
                    self._settle(resources, handle, _MESSAGE)
                self._unsettled = None
            if self._posting:
                for posted in list(pending.values()):
                    self._push(resources, posted)
                self._posting = False
            while pending:
                events = resources.wait(self._deadline - time.monotonic())
                if not events and time.monotonic() >= self._deadline:
                    self._expire(resources)
                for fd, _ in events:
                    reply[0] = _NOTHING
                    handle = pending.get(fd)
                    if handle is None:
                        self._examine(resources, fd)
                        continue
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
                    self._unsettled = handle
            raise

    def _push(self, resources: Resources, handle: WorkerHandle) -> None:
        """Send what there is room for of a message; the rest goes when there is more."""
        try:
            unsent = not handle.channel.push()
        except OSError:  # it died, and so will not reply: whoever waits for that finds out
            unsent = False
        resources.watch_channel(handle, unsent=unsent)

    def _note(self, lost: Failure) -> None:
        """Make it a failure of this round, once, that a worker can no longer be used."""
        self._failures[0, lost.worker] = [lost]

    def _settle(self, resources: Resources, handle: WorkerHandle, reply: int) -> None:
        """Take a reply that is not plain success."""
        if reply != _MESSAGE:  # end of file
            self._lose(resources, handle)
            return
        left_s = None if self._deadline == math.inf else self._deadline - time.monotonic()
        try:
            message = handle.channel.recv(request=self._number, timeout_s=left_s)
        except EOFError:
            self._lose(resources, handle)
            return
        except TimeoutError:  # it stays pending, and expires
            return
        failures = self._take(handle, message)
        if failures:
            self._failures[self._number, handle.index] = failures
        del resources.pending[handle.reply]
        handle.channel.forget()

    def _take(self, handle: WorkerHandle, message: memoryview) -> list[Failure]:
        """Keep the answer in a message, and return what failed instead or beside."""
        try:
            result, failures = pickle.loads(message)
        except Exception as error:  # of a class that only the worker can import, for example
            rows, command = tuple(handle.rows), self._round
            return [failure_of(error, worker=handle.index, rows=rows, command=command)]
        if not failures or result is not None:
            self._answers[handle.index] = result
        return [failure.unpacked(pickled) for failure, pickled in failures]

    def _examine(self, resources: Resources, fd: int) -> None:
        """Look after a worker whose channel has room, or sentinel or unexpected reply is readable."""
        handle = resources.watched.get(fd)
        if handle is None or (fd == handle.process.sentinel and not handle.process.ended()):
            return
        if fd == handle.channel.fileno():
            self._push(resources, handle)
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
        end = time.monotonic() + _STACKS_S
        stacks = [handle.last_words(limit_s=max(end - time.monotonic(), 1e-3)) for handle in stuck]
        for handle in stuck:
            handle.kill()
        for handle, stack in zip(stuck, stacks, strict=True):
            within = f"within {self._limit_s:g} s ({self._limit})"
            handle.lost = handle.end("timeout", self._round, message=within, stack=stack)
            self._lose(resources, handle)
