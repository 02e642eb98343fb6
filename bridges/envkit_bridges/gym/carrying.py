"""Ids that the caller has registered in a gym library, on their way to worker processes.

A worker imports the library and finds what that registers by itself, and none of what a script, a
notebook or some imported package has added. Here all entries are read before workers start, and
written into a worker's registry before it builds its envs.

Conventions
    entry        an ``EnvSpec`` of the library's registry.
    entry point  what builds the env: a callable, or "module:name".
"""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

from envkit.errors import CopyError
from envkit.transport import by_value

__all__ = ["gym_registrations", "gymnasium_registrations"]

_POINTS = ("entry_point", "vector_entry_point")
_SCRIPT = ("__main__:", "__mp_main__:")


def gymnasium_registrations() -> Callable[[], None] | None:
    """Carry what is registered in Gymnasium."""
    return _registrations("gymnasium")


def gym_registrations() -> Callable[[], None] | None:
    """Carry what is registered in gym."""
    return _registrations("gym")


def _registrations(library: str) -> Callable[[], None] | None:
    registry = getattr(_registration(library), "registry", None)
    if not isinstance(registry, dict):  # gym before 0.26, which GymEnv does not take either
        return None
    return partial(_register, library, {id: _packed(id, entry) for id, entry in registry.items()})


def _register(library: str, packed: dict[str, bytes]) -> None:
    registration = _registration(library)
    for id, pickled in packed.items():
        entry = _unpacked(id, pickled)
        if isinstance(entry, _Missing):
            entry = registration.EnvSpec(id, entry_point=entry)
        registration.registry[id] = entry


def _registration(library: str) -> Any:
    return importlib.import_module(f"{library}.envs.registration")


def _packed(id: str, entry: Any) -> bytes:
    try:
        entry = copy.copy(entry)
        for name in _POINTS:
            setattr(entry, name, _sent(id, getattr(entry, name, None)))
        return by_value.dumps(entry)
    except Exception as error:
        return pickle.dumps(_Missing(id, f"{type(error).__name__}: {error}"))


def _unpacked(id: str, packed: bytes) -> Any:
    try:
        return pickle.loads(packed)
    except Exception as error:
        return _Missing(id, f"{type(error).__name__}: {error}")


def _sent(id: str, point: Any) -> Any:
    """Give an entry point the form in which it travels; a name outside the script stays as it is."""
    if isinstance(point, str) and point.startswith(_SCRIPT):
        point = pkgutil.resolve_name(point)
    return point if point is None or isinstance(point, str) else _Sent(id, by_value.dumps(point))


class _Sent:
    """An entry point that was sent to this process.

    It is unpickled when an env is made of it: that may import what no other env needs.
    """

    def __init__(self, id: str, pickled: bytes):
        self._id, self._pickled = id, pickled

    def __call__(self, **kwargs: Any) -> Any:
        return self._point(**kwargs)

    @property
    def metadata(self) -> Any:
        """What the library looks up on an env class before it makes one."""
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

    def __call__(self, **kwargs: Any) -> Any:
        raise _not_sent(self._id, self._reason)


def _not_sent(id: str, reason: str) -> CopyError:
    return CopyError(
        f"{id!r} is registered in the process that started this worker, but what it was registered "
        f"with cannot be sent here ({reason}). Register it inside the create function, or put the "
        "registration into a module and import that there."
    )
