"""Wait for the replies of worker processes, and for the end of processes, in one selector with a deadline.

This module decides when a round is over, and which workers failed in it. It does not know who was woken for
what, nor how workers are started.

Conventions
    pending   workers that were woken and have not replied, by the descriptor of their reply pipe.
    request   what was asked of some workers at once: of all in a round, of one alone in a job, see `jobs`.
    deadline  counts from the `send` (or other request); one for all its workers.
    limit     name of what sets it: "timeout", or "start_timeout" where hosts and envs are built.
    abandoned round  one that Ctrl-C interrupted. The next one finishes it first, and tells what
              failed in it beside its own failures.
    Ctrl-C may come behind any call. So a worker is pending before it is woken, with nothing called
    in between; and what is noted of a reply may be noted twice, until the worker is not pending.
"""

import math
import os
import time

from envkit.transport.answers import read_answer
from envkit.transport.failure import Failure
from envkit.transport.handle import Limit, Request, WorkerHandle
from envkit.transport.resources import Resources
from envkit.transport.worker import DONE, MESSAGE

__all__ = ["Limit", "Rounds"]

_STACKS_S, _GRACE_S = 0.5, 1.0
_NOTHING, _DONE, _MESSAGE = 0xFF, DONE[0], MESSAGE[0]


class Rounds:
    """The part of a pool that knows what is under way: what it waits for, how long, and what came of it.

    Args:
        timeout_s: seconds that a request may take; None for no limit.
        start_timeout_s: the same for requests in which hosts or envs are built.
    """

    def __init__(self, timeout_s: float | None, start_timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self._requests = 0  # so far
        self._round = Request("", 0, "timeout", math.inf)
        self._inbox = bytearray(1)  # the last reply: what is in memory survives Ctrl-C
        self._unsettled: WorkerHandle | None = None  # it announced a message, and is pending
        self._posting = False  # whether messages of this round may have to be pushed

    def _request(
        self,
        name: str,
        limit: Limit = "timeout",
        failures: dict[tuple[int, int], list[Failure]] | None = None,
    ) -> Request:
        """Ask for something from now on; ``failures`` of an abandoned round are told with its own."""
        self._requests += 1
        limit_s = self.timeout_s if limit == "timeout" else self.start_timeout_s
        limit_s = math.inf if limit_s is None else limit_s
        return Request(name, self._requests, limit, limit_s, failures)

    def _finish_abandoned(self, resources: Resources) -> None:
        """Finish a round whose deadline may have passed while nobody waited for it."""
        left = self._round
        left.deadline = max(left.deadline, time.monotonic() + min(left.limit_s, _GRACE_S))
        self._finish_round(resources)

    def _finish_round(self, resources: Resources) -> None:
        """Wait for every worker that was woken, and note what failed."""
        while resources.pending:
            self._attend(resources, self._round.deadline)

    def _attend(self, resources: Resources, until: float) -> None:
        """Wait until something happens, or ``until`` (`time.monotonic`), and take what came."""
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
            if not pending:
                return
            events = resources.wait(until - time.monotonic())
            if not events:
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
        self._round.failures[0, lost.worker] = [lost]

    def _settle(self, resources: Resources, handle: WorkerHandle, reply: int) -> None:
        """Take a reply that is not plain success."""
        if reply != _MESSAGE:  # end of file
            self._lose(resources, handle)
            return
        request = handle.request
        left_s = None if request.deadline == math.inf else request.deadline - time.monotonic()
        try:
            message = handle.channel.recv(request=request.number, timeout_s=left_s)
        except EOFError:
            self._lose(resources, handle)
            return
        except TimeoutError:  # it stays pending, and expires
            return
        rows, name = handle.rows, request.name
        request.settle(
            handle.index, *read_answer(message, worker=handle.index, rows=rows, command=name)
        )
        self._unsettled = None  # first: the next request of this worker has announced nothing yet
        del resources.pending[handle.reply]
        handle.channel.forget()

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
        is_asked = handle.reply in resources.pending
        request = handle.request if is_asked else self._round
        if handle.lost is None:
            handle.lost = handle.end("died", request.name)
        if is_asked:
            request.failures[0, handle.index] = [handle.lost]
            resources.pending.pop(handle.reply, None)
        resources.unwatch(handle)

    def _expire(self, resources: Resources) -> None:
        """Kill every worker that did not answer in time, and note where it was stuck."""
        now = time.monotonic()
        stuck = [h for h in resources.pending.values() if h.request.deadline <= now]
        if not stuck:
            return
        for handle in stuck:
            handle.ask_for_stack()
        end = time.monotonic() + _STACKS_S
        stacks = [handle.last_words(limit_s=max(end - time.monotonic(), 1e-3)) for handle in stuck]
        for handle in stuck:
            handle.kill()
        for handle, stack in zip(stuck, stacks, strict=True):
            request = handle.request
            within = f"within {request.limit_s:g} s ({request.limit})"
            handle.lost = handle.end("timeout", request.name, message=within, stack=stack)
            self._lose(resources, handle)
