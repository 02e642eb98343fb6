"""Compiled programs that equal envs share, so that a second env like the first compiles nothing.

This module keeps programs and decides who is traced for them. It does not know what programs compute.

Conventions
    key    hashable, as a static argument of `jax.jit`: equal keys, equal behaviour when traced. The content of an env
           is part of it (`content_of`), since an env that is a key may be changed.
    owner  who calls a program. Whatever a call traces is the owner's, and is counted there.

Decided here: programs live as long as an env that uses them; of runs, which take a program for each number of steps
and each policy, the last ones that were used.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Protocol
from weakref import WeakValueDictionary

import jax
import numpy as np

from envkit.functional.structure import PyTree


class Owner(Protocol):
    """Who calls programs, and is traced for them."""

    @property
    def shared(self) -> Shared:
        """Programs of the owner as it is now."""
        ...

    def jit(self, name: str, traced: Callable[..., Any]) -> Callable[..., Any]:
        """Jit a function, which traces the owner of the call, as a program of that name."""
        ...

    def static(self, name: str) -> int:
        """Return how many of the first arguments of a program are static."""
        ...

    def trace(self, name: str, *args: Any) -> PyTree:
        """Compute what the program of that name does."""


class Shared:
    """Jitted programs of equal envs, each made when it is first called.

    Attributes:
        name: what a copy of an env finds them by, in this process.
        advancing: numbers of rows that `Programs.advance` was traced for, or that someone expects it to be.
    """

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.advancing: set[int] = set()
        self._jitted: dict[str, Any] = {}
        self._runs: OrderedDict[Hashable, Any] = OrderedDict()
        self._calling = threading.local()
        _ALL[self.name] = self

    def call(
        self, name: str, owner: Owner, args: tuple[Any, ...], *, lowers: bool = False
    ) -> PyTree:
        """Call a program on behalf of its owner, or lower it, as `jax.jit` does."""
        fixed = args[: owner.static(name)]
        program: Any = self._run(name, owner, fixed) if fixed else self._jitted.get(name)
        if program is None:
            program = self._jitted[name] = owner.jit(name, partial(self._trace, name))
        calling, before = self._calling, getattr(self._calling, "owner", None)
        calling.owner = owner
        try:
            return program.lower(*args) if lowers else program(*args)
        finally:
            calling.owner = before

    def _run(self, name: str, owner: Owner, fixed: tuple[Any, ...]) -> Any:
        """Return the program of a run with these static arguments, and drop those that were not used for long."""
        runs, key = self._runs, (name, fixed)
        with _LOCK:
            program = runs.pop(key, None)
            runs[key] = program = program or owner.jit(name, partial(self._trace, name))
            while len(runs) > _kept_runs():
                runs.popitem(last=False)
        return program

    def _trace(self, name: str, *args: object) -> PyTree:
        return self._calling.owner.trace(name, *args)


def _kept_runs() -> int:
    """Return how many programs of runs are kept for equal envs."""
    return max(1, int(os.environ.get("ENVKIT_KEPT_RUNS", "32")))


_ALL: WeakValueDictionary[Hashable, Shared] = WeakValueDictionary()
_LOCK = threading.Lock()


def shared_by(key: Hashable) -> Shared:
    """Return the programs of all that have this key; new ones where it has no hash or cannot be compared."""
    try:
        with _LOCK:
            return _ALL.setdefault(key, Shared())
    except (TypeError, ValueError):  # as dicts, and arrays that are compared
        return Shared()


def copied_from(name: str | None) -> Shared | None:
    """Return the programs of that name; None where they are in another process, or gone."""
    return _ALL.get(name)


class UnlikeError(Exception):
    """The content of something cannot be compared, so it is like nothing else."""


def content_of(value: Any) -> Hashable:
    """Return what a value holds, as a key that stays the same where the value is changed later.

    Numbers are compared with their type and sign, functions and classes by identity, objects by their attributes, but for
    fields that a dataclass does not compare and properties that are cached.

    Raises:
        UnlikeError: it holds a large array, very much, or an object of which that cannot be said.
    """
    try:
        return _content(value, [_MOST_PARTS])
    except (TypeError, ValueError, RecursionError):  # as keys of JAX, and arrays that are traced
        raise UnlikeError from None


_MOST_PARTS, _LARGEST = 10_000, 2**16


def _content(value: Any, left: list[int]) -> Hashable:
    """Return the content of a part; ``left`` counts how many parts may be looked at."""
    kind: type = type(value)
    left[0] -= 1
    if left[0] < 0:
        raise UnlikeError

    def each(values: Iterable[Any]) -> tuple[Hashable, ...]:
        return tuple(_content(one, left) for one in values)

    match value:
        case (
            None
            | bool()
            | int()
            | str()
            | bytes()
            | Enum()
            | type()
            | FunctionType()
            | BuiltinFunctionType()
        ):
            return kind, value
        case float() | complex() | np.generic():
            return kind, repr(value)
        case np.ndarray() | jax.Array():
            if value.nbytes > _LARGEST or value.dtype == object:
                raise UnlikeError
            return kind, value.shape, str(value.dtype), np.asarray(value).tobytes()
        case tuple() | list():
            return kind, each(value)
        case Mapping():
            return kind, each(value.items())
        case MethodType():
            return kind, each((value.__func__, value.__self__))
        case partial():
            return kind, each((value.func, value.args, value.keywords))
    left_out = set[str]()
    if is_dataclass(value):
        left_out = {field.name for field in fields(value) if not field.compare}
    for one in kind.__mro__:
        members = vars(one).items()
        left_out |= {name for name, member in members if isinstance(member, cached_property)}
    if not hasattr(value, "__dict__"):
        if kind.__eq__ is object.__eq__:
            raise UnlikeError
        return kind, value  # of NumPy, JAX and the like, which say what they equal
    return kind, each(item for item in sorted(vars(value).items()) if item[0] not in left_out)


class Program:
    """One program of an owner; who equals it runs the same."""

    def __init__(self, name: str, owner: Owner):
        self._name, self._owner = name, owner

    def __call__(self, *args: object) -> PyTree:
        """Call it, as its owner is now."""
        return self._owner.shared.call(self._name, self._owner, args)

    def lower(self, *args: object) -> Any:
        """Lower the program as a function of `jax.jit` does."""
        return self._owner.shared.call(self._name, self._owner, args, lowers=True)
