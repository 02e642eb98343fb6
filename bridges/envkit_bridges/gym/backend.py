"""Which gym library a name refers to: Gymnasium, its predecessor gym, or a module of the user's.

This module decides what "the gym library" is, for names and for objects. It imports none of them
until asked.

Conventions
    backend  a module with ``make`` and ``spaces`` whose envs follow Gymnasium's API: ``reset`` gives
             two values and ``step`` five (gym does from its version 0.26 on).
    scope    the choice holds in the current context (`contextvars`): this thread, and the code under
             a ``with``. SerialEnv and ParallelEnv build their sub-envs with what is chosen where they
             are made themselves, or else where they are started.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import Token
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from envkit.batched.creation_context import chosen, forget, set_choice
from envkit.errors import ArgumentError, ArgumentTypeError
from envkit_bridges.libraries import require

__all__ = ["gym_backend", "library_of", "set_gym_backend"]

P = ParamSpec("P")
R = TypeVar("R")

_NAMES = ("gymnasium", "gym")
_CHOICE = "gym_backend"


def gym_backend(submodule: str | None = None) -> ModuleType:
    """Give the gym library that names refer to now, or one of its submodules.

    Raises:
        ImportError: it is not installed.
    """
    active = chosen().get(_CHOICE, "gymnasium")
    library = require(active) if isinstance(active, str) else active
    return library if submodule is None else getattr(library, submodule)


class set_gym_backend:
    """Choose the gym library: as a context manager, as a decorator, or for good with `set`.

    Args:
        backend: "gymnasium", "gym", or a module with the same interface.

    Raises:
        ArgumentError: another name.
        ArgumentTypeError: neither a name nor a module that makes envs.
    """

    def __init__(self, backend: str | ModuleType):
        if isinstance(backend, str) and backend not in _NAMES:
            raise ArgumentError(
                f"there is no gym backend called {backend!r}. Pass one of {', '.join(_NAMES)}, or "
                "the module itself."
            )
        if not isinstance(backend, str) and not hasattr(backend, "make"):
            raise ArgumentTypeError(
                f"backend is {backend!r}, of type {type(backend).__name__}, which makes no envs. Pass "
                f"one of {', '.join(_NAMES)}, or a module with `make` and `spaces`."
            )
        self.backend = backend
        self._tokens: list[Token] = []

    def set(self) -> None:
        """Choose it until something else is chosen."""
        set_choice(_CHOICE, self.backend)

    def __enter__(self) -> set_gym_backend:
        self._tokens.append(set_choice(_CHOICE, self.backend))
        return self

    def __exit__(self, *exception: object) -> None:
        forget(self._tokens.pop())

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Make a function that runs with this backend."""

        @functools.wraps(function)
        def with_backend(*args: P.args, **kwargs: P.kwargs) -> R:
            with set_gym_backend(self.backend):
                return function(*args, **kwargs)

        return with_backend


def library_of(thing: Any) -> ModuleType:
    """Give the gym library that an env or a space is an object of; if of none, the current one."""
    for base in type(thing).__mro__:
        name = base.__module__.partition(".")[0]
        if name in _NAMES:
            return require(name)
    return gym_backend()
