"""How a process ends with the one it serves, however that ends, and how what it has started ends.

This module decides what is watched, and by whom. It does not know what the process does.

Three ways, since none of them covers all:
    `end_with_parent`  the kernel kills this process when its parent ends: also while the main thread
                       holds the interpreter in native code. Linux only. It watches the *thread*
                       that started this process, so it is for threads that last.
    a pidfd            becomes readable when the process that is served is gone. Linux only.
    a lifeline         a pipe without writes, which ends with the last process that could. It works
                       everywhere, but forks of the process that is served may hold it open.

A worker leads its own session, and so its own process group. Processes that it starts belong to that group,
unless it goes out of its way to leave, and ends with it: the caller that waits for the worker, its fork server
or its parent, calls `end_groups`. This call is missing where the parent of a worker that no fork
server has started is killed.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1  # Source: prctl(2), linux/prctl.h
_TERMINATE_S, _LOOK_S = 0.3, 0.005


def end_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it is gone.

    Args:
        parent_pid: the process that started this one; if it is gone already, this one ends.
    """
    if sys.platform != "linux":
        return
    # Where the kernel refuses (a sandbox), what else is watched must do.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def pidfd_of(pid: int) -> int | None:
    """Open a descriptor that becomes readable when a process is gone; None where there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def start_watching(lifeline: int, served_pid: int) -> None:
    """End this process, from a thread, when the one it serves is gone."""
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    pidfd = pidfd_of(served_pid)
    if pidfd is not None:
        poller.register(pidfd, select.POLLIN)

    def watch() -> None:
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_groups(leader_pids: Iterable[int]) -> None:
    """End what is left of the groups of some workers, in bounded time: ask, wait, kill.

    Args:
        leader_pids: workers that run, or were waited for right before. The number of one that is gone
            is taken as long as its group has members, and may be another's afterwards.
    """
    left = [pid for pid in leader_pids if _signal_group(pid, signal.SIGTERM)]
    end = time.monotonic() + _TERMINATE_S
    while left and time.monotonic() < end:
        time.sleep(_LOOK_S)  # nothing tells of the end of a group
        left = [pid for pid in left if _signal_group(pid, 0)]
    for pid in left:
        _signal_group(pid, signal.SIGKILL)


def _signal_group(leader_pid: int, number: int) -> bool:
    """Send a signal to a group, and say whether it has members."""
    try:
        os.killpg(leader_pid, number)
    except ProcessLookupError:
        return False
    return True
