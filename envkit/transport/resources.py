"""What a pool of processes holds and must give back: workers, pipes, a selector, a block.

It is apart from the pool so that a finalizer can release it when the pool itself is gone. It
decides the order of giving back, and nothing about rounds. What was half done when Ctrl-C came may
be done again: watching, and ceasing to watch.
"""

import math
import os
import resource
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from envkit.errors import OpenFilesError
from envkit.transport.block import TOO_MANY_FILES, Block
from envkit.transport.handle import ASK_S, WorkerHandle, stop_all

__all__ = ["Resources", "within_open_files"]

_EACH, _BESIDE = 5, 16  # descriptors that a worker takes, and those of the pool and of a start


@contextmanager
def within_open_files(num_workers: int) -> Iterator[None]:
    """Tell which limit it was, where too many files are open for a pool of so many workers.

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


class Resources:
    """Workers and descriptors of one pool, made together and given back together."""

    def __init__(self, close_timeout_s: float = ASK_S) -> None:
        self.close_timeout_s = close_timeout_s
        self.handles: list[WorkerHandle] = []
        self.pending: dict[int, WorkerHandle] = {}
        self.watched: dict[int, WorkerHandle] = {}
        self.block: Block | None = None
        self.owner_pid = os.getpid()
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._selector = self._epoll or select.poll()
        self.lifeline_r, self._lifeline_w = os.pipe()  # the epoll closes itself if this fails

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
            busy = list(self.pending.values())
            stop_all(self.handles, busy=busy, ask_s=self.close_timeout_s)
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
