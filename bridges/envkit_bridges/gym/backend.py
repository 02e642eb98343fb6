"""Which gym library a name refers to, and which ids it knows: Gymnasium, its predecessor gym, or a module of the user's.

This module decides what "the gym library" is, for names and for objects. It imports none of them until asked. A worker
imports the library and finds what that registers by itself, and none of what a script, a notebook or some imported package
has added: so all entries of the registry are read before workers start, and written into a worker's before it builds its envs.

Conventions
    backend      a module with ``make`` and ``spaces`` whose envs follow Gymnasium's API: ``reset`` gives
                 two values and ``step`` five (gym does from its version 0.26 on).
    scope        the choice holds in the current context (`contextvars`): this thread, and the code under
                 a ``with``. SerialEnv and ParallelEnv build their sub-envs with what is chosen where they
                 are made themselves, or else where they are started.
    entry        an ``EnvSpec`` of the library's registry.
    entry point  what builds the env: a callable, or "module:name".
"""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import pkgutil
from collections.abc import Callable
from contextvars import Token
from functools import partial
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from envkit.batched.caller_settings import chosen, forget, set_choice
from envkit.errors import ArgumentError, ArgumentTypeError, CopyError
from envkit.transport import by_value
from envkit_bridges.gym.space_conversions import carried_conversions
from envkit_bridges.libraries import Simulator, require

GymSpace = Any
"""A space object of Gymnasium or gym, which need not be installed; both have the same attributes."""

SpaceValue = Any
"""A value in a `GymSpace`: a number, an array, a string, or a tuple or dict of values."""

P = ParamSpec("P")
R = TypeVar("R")

_NAMES = ("gymnasium", "gym")
_CHOICE = "gym_backend"


def gym_backend(submodule: str | None = None) -> ModuleType:
    """Return the gym library that names refer to now, or one of its submodules.

    Args:
        submodule: name of a submodule, e.g. "spaces" or "vector"; None gives the library itself.

    Raises:
        ImportError: it is not installed.

    Example:
        >>> from envkit import gym_backend
        >>> gym_backend().__name__
        'gymnasium'
        >>> gym_backend("spaces").Discrete(3)
        Discrete(3)
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

    Example:
        >>> from envkit import GymEnv, gym_backend, set_gym_backend
        >>> with set_gym_backend("gymnasium"):
        ...     env = GymEnv("CartPole-v1")
        ...     gym_backend().__name__
        'gymnasium'
        >>> env.close()
    """

    def __init__(self, backend: str | ModuleType):
        if isinstance(backend, str) and backend not in _NAMES:
            raise ArgumentError(
                f"there is no gym backend called {backend!r}. Pass one of {', '.join(_NAMES)}, or "
                "the module itself."
            )
        if not isinstance(backend, str) and not hasattr(backend, "make"):
            raise ArgumentTypeError(
                f"backend is {backend!r}, of type {type(backend).__name__}, but must make envs. Pass "
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


def gym_library(backend: str | ModuleType | None) -> ModuleType:
    """Return the gym library asked for, the current one by default."""
    if backend is None:
        return gym_backend()
    with set_gym_backend(backend):
        return gym_backend()


def library_of(thing: object) -> ModuleType:
    """Return the gym library that an env or a space is an object of; if of none, the current one."""
    for base in type(thing).__mro__:
        name = base.__module__.partition(".")[0]
        if name in _NAMES:
            return require(name)
    return gym_backend()


_POINTS = ("entry_point", "vector_entry_point")
_SCRIPT = ("__main__:", "__mp_main__:")


def gymnasium_registrations() -> Callable[[], None] | None:
    """Carry what is registered in Gymnasium, and for its spaces."""
    return _registrations("gymnasium")


def gym_registrations() -> Callable[[], None] | None:
    """Carry what is registered in gym, and for its spaces."""
    return _registrations("gym")


def _registrations(library: str) -> Callable[[], None] | None:
    registry = getattr(_registration(library), "registry", None)
    conversions = carried_conversions()
    if not isinstance(registry, dict):  # gym before 0.26, which GymEnv does not take either
        return conversions
    packed = {id: _packed(id, entry) for id, entry in registry.items()}
    return partial(_register, library, packed, conversions)


def _register(
    library: str, packed: dict[str, bytes], conversions: Callable[[], None] | None
) -> None:
    if conversions is not None:
        conversions()
    registration = _registration(library)
    for id, pickled in packed.items():
        entry = _unpacked(id, pickled)
        if isinstance(entry, _Missing):
            entry = registration.EnvSpec(id, entry_point=entry)
        registration.registry[id] = entry


def _registration(library: str) -> ModuleType:
    return importlib.import_module(f"{library}.envs.registration")


def _packed(id: str, entry: object) -> bytes:
    try:
        entry = copy.copy(entry)
        for name in _POINTS:
            setattr(entry, name, _sent(id, getattr(entry, name, None)))
        return by_value.dumps(entry)
    except Exception as error:
        return pickle.dumps(_Missing(id, f"{type(error).__name__}: {error}"))


def _unpacked(id: str, packed: bytes) -> object:
    try:
        return pickle.loads(packed)
    except Exception as error:
        return _Missing(id, f"{type(error).__name__}: {error}")


def _sent(id: str, point: object) -> object:
    """Convert an entry point into the form in which it travels; a name outside the script stays as it is."""
    if isinstance(point, str) and point.startswith(_SCRIPT):
        point = pkgutil.resolve_name(point)
    return point if point is None or isinstance(point, str) else _Sent(id, by_value.dumps(point))


class _Sent:
    """An entry point that was sent to this process.

    It is unpickled when an env is made of it: that may import what no other env needs.
    """

    def __init__(self, id: str, pickled: bytes):
        self._id, self._pickled = id, pickled

    def __call__(self, **kwargs: Any) -> Simulator:
        return self._point(**kwargs)

    @property
    def metadata(self) -> Any:
        """Attributes that the library looks up on an env class before it makes one."""
        return self._point.metadata

    @property
    def _point(self) -> Any:
        try:
            return pickle.loads(self._pickled)
        except Exception as error:
            raise _not_sent(self._id, f"{type(error).__name__}: {error}") from error


class _Missing:
    """The entry point of an id that could not be sent."""

    def __init__(self, id: str, reason: str):
        self._id, self._reason = id, reason

    def __call__(self, **kwargs: Any) -> Simulator:
        raise _not_sent(self._id, self._reason)


def _not_sent(id: str, reason: str) -> CopyError:
    return CopyError(
        f"{id!r} is registered in the process that started this worker, but what it was registered "
        f"with cannot be sent here ({reason}). Register it inside the create function, or put the "
        "registration into a module and import that there."
    )
