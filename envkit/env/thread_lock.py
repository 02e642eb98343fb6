"""One env does one thing at a time, in whichever thread.

Every public call of an env holds it until it returns. A call from another thread meanwhile raises at
once: two of them would mix their data, or wait for each other's workers. This module knows threads, and
the names of the calls; it does not know what they do.

Conventions
    held   by a thread, which may hold it again: overrides, callbacks and envs inside call each other.
    inner  what is held with it: an env inside another is used with that, and not beside it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from envkit.data.outcomes import Noted
from envkit.errors import BusyError


class InUse:
    """The lock that a thread holds while it uses an env; a copy is not held.

    Args:
        name: of the env, for messages.
        inner: what is held with it.

    Attributes:
        moves: how many calls so far may have moved the env; who goes on from data of before sees that it was used meanwhile.
        outcome: the tensors that the latest step gave, see `envkit.data.outcomes`.
        begun_beside: the ``next`` that was in the data when a reset began all episodes there; None: there was none.
    """

    outcome: Noted = (), None
    begun_beside: Any = None

    def __init__(self, name: str, inner: Sequence[InUse] = ()):
        self.name = name
        self.inner = tuple(inner)
        self.all: tuple[InUse, ...] = (self, *(use for held in self.inner for use in held.all))
        self.lock = threading.RLock()
        self.holder = 0
        self.moves = 0

    def __enter__(self) -> None:
        taken = 0
        try:
            for use in self.all:
                if not use.lock.acquire(blocking=False):
                    use.refuse()
                taken += 1
                use.holder = threading.get_ident()
        except BaseException:
            for use in self.all[:taken]:
                use.lock.release()
            raise

    def __exit__(self, *failure: object) -> None:
        for use in self.all:
            use.lock.release()

    def refuse(self) -> NoReturn:
        """Return which thread uses the env.

        Raises:
            BusyError: always.
        """
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        holder = names.get(self.holder, "another")
        raise BusyError(
            f"this {self.name} is in use by thread {holder!r}, and thread "
            f"{threading.current_thread().name!r} wants to use it at the same time. Give each thread its "
            "own env, or let one wait until the other is done: a threading.Lock around the calls."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return InUse, (self.name, self.inner)


def _alone(method: Callable[..., Any], *, moves: bool) -> Callable[..., Any]:
    """Hold the env while one of its methods runs."""
    step = int(moves)

    @functools.wraps(method)
    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        use = self._in_use
        if use.inner:
            with use:
                use.moves += step
                return method(self, *args, **kwargs)
        if not use.lock.acquire(blocking=False):
            use.refuse()
        use.holder = threading.get_ident()
        use.moves += step
        try:
            return method(self, *args, **kwargs)
        finally:
            use.lock.release()

    held.__dict__["holds_env"] = True  # and so does what wraps it
    return held


def hold_calls(cls: type) -> None:
    """Wrap the calls that a class defines so that they hold the env while they run."""
    for name in CALLS & vars(cls).keys():
        method = vars(cls)[name]
        if inspect.isfunction(method) and not hasattr(method, "holds_env"):
            setattr(cls, name, _alone(method, moves=name in _MOVES))


_MOVES = frozenset(
    [
        *("reset", "step", "step_and_maybe_reset", "maybe_reset", "rand_step"),
        *("rollout", "unroll", "load_state_dict"),
    ]
)

CALLS = _MOVES | {
    *("rand_action", "reseed", "set_seed", "state_dict", "record_for_resume"),
    *("start", "_start", "close"),
}
