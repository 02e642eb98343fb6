"""How many threads torch computes with while a policy acts.

Threads of torch wait for each other, spinning. As soon as another process needs a core, each call of a small network takes
milliseconds, and the workers of a pool are such processes. So a policy acts with one thread, unless its work is at
least `WORTH_THREADS`: then it keeps the threads that there are. This depends on sizes alone, not on time or on other
processes: threads may change how sums of floats are rounded, and the same seed gives the same data.

torch keeps the number for each thread of Python, and one that has none yet copies the number that was set last. The
number that a user has set is there again when the policy returns, also by an error or by Ctrl-C. A thread that first uses
torch while the policy of another one acts copies its 1, and keeps that until it sets a number.

Conventions
    work   parameters of a policy times rows that it acts on, about the multiply-adds of a call.
    limit  a number that a user asks for, with ``num_threads=``. It holds for all that the process computes, policies too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

WORTH_THREADS = 30_000_000
"""Work from which a second thread pays where no other process needs its core.

Two layers of tanh on two cores: 1.3 to 1.6 times as fast at 10 to 14 million, 1.8 to 1.9 from 39 million on.
"""

_USES_OF_CONVOLUTION = 100
"""Places at which a parameter of a convolution counts: the mean of the network for Atari of Mnih et al. (2015)."""

_UNSEEN = 100_000
"""Parameters of a policy that shows none, such as a function: two layers of 256 have about as many."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_counted: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def work_of_row(policy: Any) -> int:
    """Return the work of a policy for one row: of a module, or of the module that a method belongs to.

    A module is counted once.
    """
    owner = getattr(policy, "__self__", policy)
    if not isinstance(owner, nn.Module):
        return _UNSEEN
    work = _counted.get(owner)
    if work is None:
        parameters = list(owner.parameters())
        if any(map(is_lazy, parameters)):
            return _UNSEEN
        further = sum(
            weight.numel()
            for part in owner.modules()
            if isinstance(part, _CONVOLUTIONS)
            for weight in part.parameters(recurse=False)
        )
        work = sum(weight.numel() for weight in parameters)
        work = _counted[owner] = work + (_USES_OF_CONVOLUTION - 1) * further or _UNSEEN
    return work


_LOCK = threading.Lock()
_BEFORE: dict[
    int, int
] = {}  # the number of each thread, by its ident, while its policy acts with one
_THREAD = threading.local()


def act_with_fitting_threads(work: int, act: Callable[..., Any], *inputs: Any) -> Any:
    """Call a policy, with one thread of torch where its work is small and no limit holds."""
    if work >= WORTH_THREADS or ThreadLimit.holds() or (before := _own_number()) == 1:
        return act(*inputs)
    me = threading.get_ident()
    try:
        with _LOCK:
            _BEFORE[me] = before
            torch.set_num_threads(1)
        return act(*inputs)
    finally:
        torch.set_num_threads(before)  # first: Ctrl-C may come in any call
        with _LOCK:
            _BEFORE.pop(me, None)
        torch.set_num_threads(ThreadLimit.number(before))  # the policy may have begun a limit


def _own_number() -> int:
    """Return the number of this thread. A new one may have copied the 1 of another whose policy acts: that is undone."""
    if hasattr(_THREAD, "is_known"):
        return torch.get_num_threads()
    with _LOCK:
        if torch.get_num_threads() == 1 and _BEFORE:
            torch.set_num_threads(next(iter(_BEFORE.values())))
        _THREAD.is_known = True
        return torch.get_num_threads()


class ThreadLimit:
    """A limit that holds from now on until `end`.

    Envs begin and end in any order. The limit of the newest one that runs holds, and after the last one the number before
    the first.
    """

    _lock = threading.RLock()  # an env may be collected, and end its limit, at any moment
    _running: list[ThreadLimit] = []  # noqa: RUF012  (of this process, as the number itself)
    _before = 0

    def __init__(self, num_threads: int):
        self.num_threads = num_threads
        with self._lock:
            if not self._running:
                # if this is called by a policy, or from a thread begun by one, the number now is 1
                ThreadLimit._before = _BEFORE.get(threading.get_ident()) or _own_number()
            self._running.append(self)
            torch.set_num_threads(num_threads)

    @classmethod
    def holds(cls) -> bool:
        """Check whether there is a limit now."""
        return bool(cls._running)

    @classmethod
    def number(cls, without: int) -> int:
        """Return the limit of the newest env that runs, or the number ``without`` one."""
        newest = cls._running[-1:]  # once: an env may end its limit at any moment
        return newest[0].num_threads if newest else without

    def end(self) -> None:
        """Let the limit of the newest env that still runs hold, or the number before all of them."""
        with self._lock:
            self._running.remove(self)
            torch.set_num_threads(self.number(ThreadLimit._before))
