"""Compiled programs that equal envs share, so that a second env like the first compiles nothing.

This module decides which envs are equal, and which of them is traced. It knows values and functions; it
does not know what programs compute.

Conventions
    account  hashable description of a value: equal accounts, equal behaviour when traced. Numbers, strings,
             arrays and what is made of them count by value. Plain objects count by their class (with its attributes)
             and their own attributes. Functions count by identity (those of libraries, by code) and by what they read
             from their closure and module. All else, as tensors and open files, counts by identity.
    owner    who calls a program. Whatever a call traces is the owner's, and is counted there.

Decided here: an env is described when it first calls a program, and again whenever it traces one. So what was
changed before is seen, and what is traced after a change goes to its own programs. A value that a trace itself
changes, by keeping or counting something, is no such change. Programs live as long as an env that uses them; of
runs, which take a program for each number of steps and each policy, the last ones that were used.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import numpy as np
from jax.core import Tracer

from envkit.functional.structure import PyTree, is_typed_key

_ATOMS = (type(None), bool, int, str, bytes)
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | frozenset(
    (
        "envkit",
        "envkit_bridges",
        "jax",
        "jaxlib",
        "numpy",
        "torch",
        "matplotlib",
        "mujoco",
        "flax",
        "chex",
    )
)
_LIBRARIES |= {"brax", "gymnax", "jumanji", "ml_collections", "mujoco_playground"}
_LIBRARIES |= {"craftax", "jaxmarl", "navix", "pgx", "xminigrid"}
"""Their functions read nothing that anybody changes."""
_MOST, _DEEPEST = 100_000, 60  # objects that are looked at, and how far inside each other


class Same:
    """Stands for one object, which it keeps: equal to itself alone."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def account_of(value: object) -> Hashable:
    """Describe a value; see the module.

    One that is made of very many objects, or has a function whose closure is not filled yet, counts by identity.
    """
    try:
        return _Accounting().of(value)
    except (_TooManyError, ValueError):
        return Same(value)


class _TooManyError(Exception):
    """A value is made of more objects than are looked at."""


class _Accounting:
    """One walk through the objects that a value is made of."""

    def __init__(self) -> None:
        self._within: dict[int, int] = {}  # objects that lead to the one that is looked at
        self._left = _MOST

    def of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _ATOMS or isinstance(value, ModuleType):
            return kind, value
        if isinstance(value, type) and is_of_library(value):
            return kind, value
        if kind is float:
            return kind, value.hex()
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return _array_account(value)
        if isinstance(value, BuiltinFunctionType):
            return Same(value)
        if id(value) in self._within:
            return "within", self._within[id(value)]
        self._left -= 1
        if not self._left or len(self._within) > _DEEPEST:
            raise _TooManyError
        self._within[id(value)] = len(self._within)
        account = self._of_compound(value)
        del self._within[id(value)]
        return account

    def _of_compound(self, value: Any) -> Hashable:
        kind = type(value)
        if kind is FunctionType:
            return self._of_function(value)
        if isinstance(value, type):
            return Same(value), tuple(map(self._of_class, value.__mro__[:-1]))
        if kind in (staticmethod, classmethod):
            return kind, self.of(value.__func__)
        if kind is property:
            return kind, tuple(map(self.of, (value.fget, value.fset)))
        if kind is MethodType:
            return kind, self.of(value.__func__), self.of(value.__self__)
        if kind is partial:
            return kind, self.of(value.func), self.of(value.args), self.of(value.keywords)
        if kind is dict:
            return kind, tuple((self.of(key), self.of(item)) for key, item in value.items())
        if kind in (tuple, list):
            return kind, tuple(map(self.of, value))
        if hasattr(value, "__dict__") and _is_plain(kind):
            own = tuple((name, self.of(item)) for name, item in vars(value).items())
            return kind, own, tuple(map(self._of_class, kind.__mro__[:-1]))
        # its models hold all they are when pickled
        if kind.__module__.partition(".")[0] == "mujoco":
            return kind, _digest(pickle.dumps(value))
        return Same(value)

    def _of_function(self, function: FunctionType) -> Hashable:
        """Describe a function; those that a library makes again, inside another one, by code and closure."""
        if not (is_of_library(function) and function.__closure__):
            return Same(function), *self._read_by(function)
        cells = inspect.getclosurevars(function).nonlocals
        defaults = function.__defaults__, function.__kwdefaults__
        return function.__code__, self.of(defaults), self.of(dict(sorted(cells.items())))

    def _of_class(self, kind: type) -> Hashable:
        """Describe the attributes of a class, which somebody may change: methods, and values by value."""
        return tuple(
            (name, self.of(item) if isinstance(item, _LOOKED_INTO) else Same(item))
            for name, item in vars(kind).items()
            if not (name.startswith("__") or name == "_abc_impl")
        )

    def _read_by(self, function: FunctionType) -> tuple[Hashable, ...]:
        """Describe what a function reads besides its arguments: defaults, closure and globals of its module.

        Functions in installed libraries are not read: their globals do not change.
        """
        if is_of_library(function):
            return ()
        cells = list(inspect.getclosurevars(function).nonlocals.values())
        defaults = (function.__defaults__, function.__kwdefaults__)
        names = _names_in(function.__code__)
        known = [
            (name, function.__globals__[name]) for name in names if name in function.__globals__
        ]
        read = [(name, self._of_global(value, names)) for name, value in known]
        return self.of(defaults), tuple(map(self.of, cells)), tuple(read)

    def _of_global(self, value: object, names: Sequence[str]) -> Hashable:
        """Describe a global; of a module of the user's own, what ``names`` may read there."""
        if not isinstance(value, ModuleType) or value.__name__.partition(".")[0] in _LIBRARIES:
            return self.of(value)
        found = [(name, vars(value)[name]) for name in names if name in vars(value)]
        return value, tuple(
            (name, Same(item) if isinstance(item, ModuleType) else self.of(item))
            for name, item in found
        )


def _names_in(code: CodeType) -> list[str]:
    """List the names that code, and functions within it, may look up."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return sorted({*code.co_names, *(name for part in inner for name in _names_in(part))})


def is_of_library(value: object) -> bool:
    """Return whether a class or function belongs to an installed library that is known here."""
    return str(value.__module__).partition(".")[0] in _LIBRARIES


def _array_account(value: Any) -> Hashable:
    if isinstance(value, Tracer) or value.dtype == object:
        return Same(value)
    dtype, weak = str(value.dtype), getattr(value, "weak_type", None)
    array = np.asarray(jax.random.key_data(value) if is_typed_key(value.dtype) else value)
    return type(value), dtype, weak, array.shape, _digest(np.ascontiguousarray(array).tobytes())


def _is_plain(kind: type) -> bool:
    """Check whether all that objects of a class hold is in their ``__dict__``: no class in C is below it."""
    made_in_python = all(base.__flags__ & _HEAP_TYPE for base in kind.__mro__[:-1])
    return made_in_python and kind.__basicsize__ <= _Plain.__basicsize__


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class _Plain:
    """As large as an object without slots is."""


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE, see https://docs.python.org/3/c-api/typeobj.html


_VALUES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    tuple,
    list,
    dict,
    np.ndarray,
    np.generic,
    jax.Array,
)
_LOOKED_INTO = (*_VALUES, FunctionType, staticmethod, classmethod, property)


# ------------------------------------------------------------------------------------------ programs


class Owner(Protocol):
    """Who calls programs, and is traced for them."""

    def account(self) -> Hashable:
        """Describe all that traces depend on but for the arguments."""

    def jit(self, name: str, traced: Callable[..., Any]) -> Callable[..., Any]:
        """Jit a function, which traces the owner of the call, as a program of that name."""
        ...

    def static(self, name: str) -> int:
        """Return how many of the first arguments of a program are static."""
        ...

    def trace(self, name: str, *args: Any) -> PyTree:
        """Compute what the program of that name does."""


class _ChangedError(Exception):
    """An env that is being traced is not any more what its programs are for."""


class Shared:
    """Jitted programs of equal envs, each made when it is first called.

    Attributes:
        advancing: numbers of rows that `Programs.advance` was traced for, or that someone expects it to be.
    """

    def __init__(self, account: Hashable):
        self.account = account
        self.advancing: set[int] = set()
        self._jitted: dict[str, Any] = {}
        self._runs: OrderedDict[Hashable, Any] = OrderedDict()
        self._calling = threading.local()

    def call(
        self, name: str, owner: Owner, args: tuple[Any, ...], *, lowers: bool = False
    ) -> PyTree:
        """Call a program on behalf of its owner, or lower it, as `jax.jit` does.

        Raises:
            _ChangedError: the owner is to be traced and has changed.
        """
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
        owner = self._calling.owner
        account = owner.account()
        if account != self.account and _TRACED.get(owner) != (account, self):
            raise _ChangedError
        try:
            return owner.trace(name, *args)
        finally:
            _TRACED[owner] = owner.account(), self


def _kept_runs() -> int:
    """Return how many programs of runs are kept for equal envs."""
    return max(1, int(os.environ.get("ENVKIT_KEPT_RUNS", "32")))


_ALL: WeakValueDictionary[Hashable, Shared] = WeakValueDictionary()
_TRACED: WeakKeyDictionary[Owner, tuple[Hashable, Shared]] = WeakKeyDictionary()
"""Owners as they were after their newest trace, and for which programs it was."""
_LOCK = threading.Lock()


def shared_by(account: Hashable) -> Shared:
    """Return the programs of all that have this account."""
    with _LOCK:
        return _ALL.setdefault(account, Shared(account))


class Program:
    """One program of an owner; who equals it runs the same."""

    def __init__(self, name: str, owner: Owner):
        self._name, self._owner = name, owner
        self._shared: Shared | None = None

    def __call__(self, *args: object) -> PyTree:
        """Call it; an owner that has changed since gets its own programs."""
        try:
            return (self._shared or self.shared).call(self._name, self._owner, args)
        except _ChangedError:
            self._shared = None
        return self.shared.call(self._name, self._owner, args)

    def lower(self, *args: object) -> Any:
        """Do what `jax.jit` does under that name."""
        return self.shared.call(self._name, self._owner, args, lowers=True)

    @property
    def shared(self) -> Shared:
        """All programs of those that were equal when this one was first called."""
        if self._shared is None:
            account = self._owner.account()
            after, programs = _TRACED.get(self._owner, (None, None))
            self._shared = shared_by(account) if programs is None or account != after else programs
        return self._shared
