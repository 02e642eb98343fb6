"""Pickle objects for a process that did not run the caller's script.

An object that another process can import travels as a name, by plain pickle's rule. One that it cannot import
travels by value: lambdas, local classes, and all that the script itself defines.

Conventions
    script  the module `__main__`. In a process that `multiprocessing` started by "spawn" or
            "forkserver", the script was imported under the name `__mp_main__`, which is missing in
            other processes just as well; cloudpickle takes that name for an ordinary module.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# (cloudpickle has no annotations)

import io
import pickle
import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import cloudpickle

from envkit.errors import ArgumentError

_SCRIPT = "__mp_main__"
_registering = threading.RLock()  # cloudpickle's register is one for all threads


def dumps(thing: Any) -> bytes:
    """Pickle ``thing``; `pickle.loads` undoes it, in any process that has cloudpickle."""
    file = io.BytesIO()
    with _script_by_value():
        _Pickler(file).dump(thing)
    return file.getvalue()


def dumps_maker(make_host: Callable[..., Any]) -> bytes:
    """Pickle the maker of a host.

    Raises:
        ArgumentError: something the maker refers to cannot be pickled.
    """
    try:
        return dumps(make_host)
    except Exception as error:
        raise ArgumentError(
            f"the function that builds the environments cannot be sent to workers ({error}). "
            "Build everything inside it instead of capturing objects, for example pass "
            "`lambda: env_cls(...)` and not an instance."
        ) from error


def dumps_arguments(method: str, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> bytes:
    """Pickle ``(args, kwargs)`` of a call.

    Raises:
        ArgumentError: something among them cannot be pickled.
    """
    try:
        return dumps(arguments)
    except Exception as error:
        raise ArgumentError(
            f"what {method!r} is called with cannot be sent to workers ({error}). Pass tensors, "
            "arrays, numbers, strings or containers of them."
        ) from error


def dumps_parts(parts: Any, whole: Any) -> bytes:
    """Pickle what ``whole`` consists of, which may refer to it; `loads_parts` undoes it."""
    file = io.BytesIO()
    with _script_by_value():
        _PartsPickler(file, whole).dump(parts)
    return file.getvalue()


def loads_parts(pickled: bytes, whole: Any) -> Any:
    """Undo `dumps_parts`; the parts refer to another ``whole``, which may still be empty."""
    unpickler = pickle.Unpickler(io.BytesIO(pickled))
    unpickler.persistent_load = lambda _: whole  # type: ignore[method-assign]
    return unpickler.load()


def dumps_by_name(thing: Any) -> bytes:
    """Pickle ``thing``, quicker, where all it refers to can be imported elsewhere; else this fails."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _reducers
    pickler.dump(thing)
    return file.getvalue()


def pickle_with(kind: type, reduce: Callable[[Any], Any]) -> None:
    """Pickle objects of just this class as ``reduce`` says: `copyreg.pickle` for messages alone."""
    _reducers[kind] = reduce


_Reducers = ChainMap[type, Callable[[Any], Any]]
_reducers: _Reducers = ChainMap({}, cast(_Reducers, cloudpickle.Pickler.dispatch_table))


class _Pickler(cloudpickle.Pickler):
    dispatch_table = _reducers


class _PartsPickler(_Pickler):
    def __init__(self, file: io.BytesIO, whole: Any):
        super().__init__(file)
        self._whole = whole

    def persistent_id(self, obj: Any) -> str | None:
        return "whole" if obj is self._whole else None


@contextmanager
def _script_by_value() -> Generator[None]:
    """Register the script with cloudpickle for a while, so that what it defines is pickled by value."""
    script = sys.modules.get(_SCRIPT)
    with _registering:
        # Where the process was not started by multiprocessing, the name is one more for `__main__`.
        is_new = (
            script is not None
            and script.__name__ == _SCRIPT
            and _SCRIPT not in cloudpickle.list_registry_pickle_by_value()
        )
        if not is_new:
            yield
            return
        cloudpickle.register_pickle_by_value(script)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(script)
