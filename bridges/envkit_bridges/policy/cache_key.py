"""A hashable key of all that the forward of a module can see besides tensors looked up by name.

A translation has it built in: attributes such as the ``p`` of a dropout layer, which submodules there
are, what functions close over. Two keys are equal only if all of that is the same. Globals of the code
and attributes of classes are not looked at.

Conventions
    value   number, string and the like: compared by type and value.
    opaque  an object that cannot be looked into, or belongs to a library: compared by identity.
"""

from __future__ import annotations

import logging
import pickle
import random
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from envkit.env.base import EnvBase
from envkit.process_wide import no_warnings

_VALUES = (
    type(None),
    bool,
    int,
    str,
    bytes,
    complex,
    Enum,
    type,
    slice,
    range,
    torch.dtype,
    torch.device,
)
GENERATORS = random.Random | np.random.Generator | np.random.RandomState
_FEW = 1024
"""Values of a tensor that are compared; larger ones are compared by identity and by what torch counts of writes."""

_PLAIN = frozenset({type(None), bool, int, str})
_EMPTY = frozenset({dict, OrderedDict, list, tuple})
_LIBRARIES = {
    "torch",
    "tensordict",
    "torchrl",
    "numpy",
    "jax",
    "envkit",
    "envkit_bridges",
    "builtins",
}


def key_of(module: torch.nn.Module, named: Iterable[torch.Tensor]) -> Hashable:
    """Return the key of a module; one walk over its attributes, no tensor is read.

    Args:
        module: the module.
        named: its parameters and buffers, which are looked up by name.
    """
    return _Walk({id(tensor) for tensor in named}).key(module)


def state_of(value: object, named: Iterable[torch.Tensor]) -> Hashable:
    """Return the key of one attribute of a module, generators of random numbers by where they are."""
    return _Walk({id(tensor) for tensor in named}, in_trace=True).key(value)


class _Same:
    """Equal to itself and to nothing else, without keeping ``value`` alive where that can be avoided."""

    def __init__(self, value: object):
        self._id = id(value)
        try:
            self._refer: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._refer = lambda: value

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self._id != other._id:
            return False
        value = self._refer()
        return value is not None and value is other._refer()


class _Walk:
    """One walk. An object that is met again counts by its identity; so is a container in itself."""

    def __init__(self, named: set[int], *, in_trace: bool = False):
        self._named = named
        self._in_trace = in_trace  # where tensors have no values, and generators are looked at
        self._met: dict[int, Any] = {}  # holds them, so that no other object gets their ids
        self._around: list[int] = []

    def key(self, value: object) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in _EMPTY and not value:  # most of what a module holds: hooks that are not set
            return kind, ()
        if isinstance(value, float):
            return float, value.hex()  # equal for NaN, not for the two zeros
        if isinstance(value, _VALUES):
            return type(value), value
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, Mapping | list | tuple | set | frozenset | deque):
            return type(value), self._of_container(value)
        if id(value) in self._met:
            return _Same(value)
        self._met[id(value)] = value
        return _Same(value), *self._within(value)

    def _of_container(self, value: Any) -> Hashable:
        """Identify a container by what is in it: a copy is as good, and torch.export leaves copies behind."""
        if id(value) in self._around:
            return self._around.index(id(value))
        self._around.append(id(value))
        if isinstance(value, Mapping):  # names are half of what a module holds, and mostly text
            names = [name if type(name) is str else self.key(name) for name in value]
            keys = [*names, *map(self.key, value.values())]
        else:
            keys = [self.key(part) for part in value]
        self._around.pop()
        return frozenset(keys) if isinstance(value, set | frozenset) else tuple(keys)

    def _of_tensor(self, tensor: torch.Tensor) -> Hashable:
        if id(tensor) in self._named:
            return "named"
        writes = None if tensor.is_inference() else tensor._version
        return _Same(tensor), writes, None if self._in_trace else few_values(tensor)

    def _within(self, value: object) -> tuple[Hashable, ...]:
        """Return the keys of what is inside an object of which more than its identity matters."""
        if isinstance(value, FunctionType):
            cells = [_held(cell) for cell in value.__closure__ or ()]
            return tuple(map(self.key, (cells, value.__defaults__, value.__kwdefaults__)))
        if isinstance(value, MethodType):
            return self.key(value.__func__), self.key(value.__self__)
        if isinstance(value, partial):
            return self.key(value.func), self.key(value.args), self.key(value.keywords)
        if self._in_trace and isinstance(value, GENERATORS):
            return (pickle.dumps(value),)
        if self._in_trace and isinstance(value, logging.Logger):
            return ()  # it notes which levels it was asked for
        if self._in_trace and isinstance(value, Iterator):
            return (self.key(_place_of(value)),)
        is_policy = isinstance(value, torch.nn.Module) and not isinstance(value, EnvBase)
        if is_policy or is_own_object(value):
            of_classes = [values_of_class(cls) for cls in own_classes(value)]
            return self.key(getattr(value, "__dict__", None)), *map(self.key, of_classes)
        return ()


def few_values(value: object) -> bytes | None:
    """Return the values of a tensor or an array of the CPU that is small, as bytes; None for all else."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided or value.numel() > _FEW:
            return None
        value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray) and value.size <= _FEW * 8 and value.dtype != object:
        return value.tobytes()
    return None


def own_classes(value: object) -> list[type]:
    """Return the class of a value and those above it that belong to no library."""
    classes = type(value).__mro__
    return [cls for cls in classes if cls.__module__.partition(".")[0] not in _LIBRARIES]


def values_of_class(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that are values; methods are compared by identity."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not (name.startswith("__") and name.endswith("__"))
        and not isinstance(value, classmethod | staticmethod | property)
    }


def is_own_object(value: object) -> bool:
    """Check whether a value is an object of the author's, with attributes that a forward may change."""
    is_library = type(value).__module__.partition(".")[0] in _LIBRARIES
    return not is_library and not isinstance(value, type) and hasattr(value, "__dict__")


def _held(cell: Any) -> Any:
    """Return what a function closes over; None if that is not there yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _place_of(iterator: Iterator[Any]) -> Any:
    """Return what is left of an iterator, without taking from it; None for a generator, which does not say."""
    try:
        # copies of those of itertools are deprecated
        with no_warnings():
            return iterator.__reduce__()
    except TypeError:
        return None
