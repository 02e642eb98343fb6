"""What a pool of processes holds and must give back: workers, pipes, a selector, a block.

It is apart from the pool so that a finalizer can release it when the pool itself is gone. It
decides the order of giving back, and nothing about rounds. What was half done when Ctrl-C came may
be done again: watching, and ceasing to watch.
"""

import math
import os
import select
from contextlib import suppress

from envkit.transport.block import Block
from envkit.transport.handle import WorkerHandle, stop_all

__all__ = ["Resources"]


class Resources:
    """Workers and descriptors of one pool, made together and given back together."""

    def __init__(self) -> None:
        self.handles: list[WorkerHandle] = []
        self.pending: dict[int, WorkerHandle] = {}
        self.watched: dict[int, WorkerHandle] = {}
        self.block: Block | None = None
        self.lifeline_r, self._lifeline_w = os.pipe()
        self.owner_pid = os.getpid()
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._selector = self._epoll or select.poll()

    @property
    def fds(self) -> list[int]:
        """Descriptors that a fork of this process must not keep."""
        ours = [fd for handle in self.handles for fd in handle.fds]
        return [self._lifeline_w, *ours]

    def wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """Wait for descriptors to become readable."""
        if timeout_s == math.inf:
            return self._selector.poll()
        timeout_s = max(timeout_s, 0.0)
        if self._epoll is not None:
            return self._epoll.poll(timeout_s)
        return self._selector.poll(timeout_s * 1000)

    def add(self, handle: WorkerHandle) -> None:
        """Watch a new worker."""
        self.handles.append(handle)
        self._watch(handle)

    def _watch(self, handle: WorkerHandle) -> None:
        for fd in (handle.reply, handle.process.sentinel):
            self.watched[fd] = handle
            self._selector.register(fd, select.POLLIN)

    def unwatch(self, handle: WorkerHandle) -> None:
        """Stop watching a worker."""
        for fd in (handle.reply, handle.process.sentinel, handle.channel.fileno()):
            self._unwatch(fd)

    def watch_channel(self, handle: WorkerHandle, *, unsent: bool) -> None:
        """Watch for room for the rest of a message, as long as there is one."""
        fd = handle.channel.fileno()
        if not unsent:
            self._unwatch(fd)
        else:
            with suppress(FileExistsError):  # epoll's way to say that it is registered
                self._selector.register(fd, select.POLLOUT)
            self.watched[fd] = handle

    def _unwatch(self, fd: int) -> None:
        if fd in self.watched:
            with suppress(FileNotFoundError, KeyError):  # of epoll, of poll: it is not registered
                self._selector.unregister(fd)
            self.watched.pop(fd, None)

    def replace(self, successor: WorkerHandle) -> None:
        """Put a new worker in the place of that of the same index, which is ended."""
        handle = self.handles[successor.index]
        self.handles[successor.index] = successor
        try:
            self.unwatch(handle)
            self.pending.pop(handle.reply, None)
        finally:  # nobody else knows it any more
            stop_all([handle])
        self._watch(successor)

    def release(self) -> None:
        """End all workers and close everything."""
        if os.getpid() != self.owner_pid:  # a fork of the owner has no say over its workers
            return
        try:
            stop_all(self.handles, busy=list(self.pending.values()))
        finally:
            self.handles.clear()
            self.pending.clear()
            self.watched.clear()
            os.close(self.lifeline_r)
            os.close(self._lifeline_w)
            if self._epoll is not None:
                self._epoll.close()
            if self.block is not None:
                self.block.close()
