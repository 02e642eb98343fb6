"""What a forward does in Python besides computing: noticed, refused, and put back after a trace.

A program computes with the values of the one call that was traced. This module compares what that call
could change: attributes of the module, of its parts and of their classes, globals that their methods
name, and the global generators of Python and NumPy. Of other objects it compares their numbers, arrays and
generators (`values_held`). It knows torch; it does not know JAX.

Conventions
    place  name under which a change is reported: ``"its attribute 'calls'"``.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from envkit.errors import TranslationError
from envkit_bridges.policy.cache_key import (
    GENERATORS,
    is_own_object,
    own_classes,
    state_of,
    values_of_class,
)
from envkit_bridges.policy.errors import STEPWISE

_PYTHON, _NUMPY = "the generator of `random`", "the generator of `numpy.random`"
_OF_MODULES = frozenset(torch.nn.Module().__dict__)


def tensors_by_name(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """List buffers and parameters, each under all of its names."""
    named: dict[str, torch.Tensor] = dict(module.named_buffers(remove_duplicate=False))
    named.update(module.named_parameters(remove_duplicate=False))
    return named


@dataclass(frozen=True)
class _Names:
    """Names that a forward may give other values: attributes of an object or a class, globals of a module.

    Attributes:
        place: how a change of one is reported.
        values: reads them all.
        put, drop: set and delete one.
    """

    place: str
    values: Callable[[], dict[str, Any]]
    put: Callable[[str, Any], None]
    drop: Callable[[str], None]

    def states(
        self, named: Iterable[torch.Tensor] = (), kinds: Any = object
    ) -> dict[str, Hashable]:
        """Return what those of some ``kinds`` are now, each by its place; see `state_of`."""
        values = [pair for pair in self.values().items() if isinstance(pair[1], kinds)]
        return {self.place.format(name): state_of(value, named) for name, value in values}

    def restore(self, before: Mapping[str, Any]) -> None:
        """Set each name to the value that it had, and drop those that are new."""
        now = self.values()
        for name in now.keys() - before.keys():
            self.drop(name)
        for name, value in before.items():
            if now.get(name, self) is not value:
                self.put(name, value)


def _names_in(module: torch.nn.Module) -> Iterator[_Names]:
    """Yield what the parts of a module and their classes have, and what globals their functions name."""
    for name, part in module.named_modules():
        yield from _attributes_of(part, f"{name}." if name else "")
        of_classes = [value for cls in own_classes(part) for value in vars(cls).values()]
        for function in (*of_classes, *part.__dict__.values()):
            if isinstance(function, FunctionType) and _is_own_code(function):
                yield _globals_of(function)


def _attributes_of(owner: object, prefix: str = "") -> Iterator[_Names]:
    """Yield the attributes of an object, and those of each of its classes but for their functions.

    Modules of libraries keep things of theirs under private names, as flat weights.
    """
    held, is_own = getattr(owner, "__dict__", {}), is_own_object(owner)

    def attributes() -> dict[str, Any]:
        names = [name for name in held if name not in _OF_MODULES]
        return {name: held[name] for name in names if is_own or not name.startswith("_")}

    def of_class(cls: type) -> dict[str, Any]:
        values = values_of_class(cls).items()
        return {name: value for name, value in values if not isinstance(value, FunctionType)}

    yield _Names(f"its attribute '{prefix}{{}}'", attributes, held.__setitem__, held.__delitem__)
    for cls in own_classes(owner):
        change = partial(setattr, cls), partial(delattr, cls)
        yield _Names("its class attribute '{}'", partial(of_class, cls), *change)


def _globals_of(function: FunctionType) -> _Names:
    """Return the globals with their own value that a function names."""
    space = function.__globals__
    names = [name for name in function.__code__.co_names if _may_change(space.get(name))]

    def values() -> dict[str, Any]:
        return {name: space[name] for name in names if name in space}

    return _Names("the global '{}'", values, space.__setitem__, space.__delitem__)


def python_state(module: torch.nn.Module) -> dict[str, Hashable]:
    """Return what a forward can change besides tensors, each place by its name."""
    named, found = tensors_by_name(module).values(), generator_states()
    for names in _names_in(module):
        found |= names.states(named)
    return found


def generator_states() -> dict[str, Hashable]:
    """Return where the global generators of Python and NumPy are, by name."""
    return {_PYTHON: random.getstate(), _NUMPY: repr(np.random.get_state())}


def values_held(owner: object) -> dict[str, Hashable]:
    """Return the numbers, arrays and generators that an object and its classes have as attributes, each by its place."""
    kinds = (bool, int, float, np.ndarray, np.generic, GENERATORS)
    names = list(_attributes_of(owner))
    return {place: state for one in names for place, state in one.states(kinds=kinds).items()}


def changed_places(before: Mapping[str, Hashable], after: Mapping[str, Hashable]) -> list[str]:
    """List the places whose value has changed, those that are new and those that are gone."""
    changed = [name for name in after if name not in before or before[name] != after[name]]
    return changed + [name for name in before if name not in after]


def require_pure(
    module: torch.nn.Module, before: Mapping[str, Hashable], after: Mapping[str, Hashable]
) -> None:
    """Check that a forward changed nothing in Python, which a program would not repeat.

    Raises:
        TranslationError: it did.
    """
    changed = changed_places(before, after)
    if not changed:
        return
    fix = (
        "Draw with torch"
        if changed[0] in (_PYTHON, _NUMPY)
        else "Keep what it remembers in entries of the TensorDict or in buffers that only training changes"
    )
    raise TranslationError(
        f"the forward of {type(module).__name__} changes {changed[0]}. A program computes with the value of the first call and "
        f"would repeat it at every step. {fix}, or {STEPWISE}."
    )


@contextmanager
def python_kept(module: torch.nn.Module) -> Iterator[None]:
    """Undo what a forward changes in Python: it gets copies of containers, iterators and generators meanwhile."""
    copies: dict[int, Any] = {}
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        for names in _names_in(module):
            before = names.values()
            stack.callback(names.restore, before)
            for name, value in before.items():
                if type(value) is torch.Tensor and not value.is_inference():
                    stack.callback(_write_back, value, value.detach().clone(), value._version)
                elif isinstance(value, Iterator | deque | list | dict | set | GENERATORS):
                    if id(value) not in copies:
                        copies[id(value)] = _copied(value)
                    names.put(name, copies[id(value)])
                elif is_own_object(value):
                    attributes = next(_attributes_of(value))
                    stack.callback(attributes.restore, attributes.values())
        yield


def _copied(value: Any) -> Any:
    """Copy a container, or all of an iterator or generator of numbers."""
    try:
        return (
            copy.copy(value)
            if isinstance(value, deque | list | dict | set)
            else copy.deepcopy(value)
        )
    except TypeError:  # a generator function has no copy, and is not looked at
        return value


def _write_back(tensor: torch.Tensor, content: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        tensor.copy_(content)


def _is_own_code(function: FunctionType) -> bool:
    """Check whether a function is the author's: those of installed packages fill caches of theirs."""
    of_package = {"site-packages", "dist-packages"} & set(Path(function.__code__.co_filename).parts)
    return not of_package and function.__module__.partition(".")[0] not in (
        "envkit",
        "envkit_bridges",
    )


def _may_change(value: object) -> bool:
    """Check whether a global is a value of the author's; tensors are looked at where a translation is used."""
    if isinstance(value, bool | int | float | str | list | dict | set | deque | SimpleNamespace):
        return True
    is_standard = type(value).__module__.partition(".")[0] in sys.stdlib_module_names
    return is_own_object(value) and not is_standard and not isinstance(value, torch.nn.Module)
