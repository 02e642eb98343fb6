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
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from envkit.errors import TranslationError
from envkit_bridges.policy.cache_key import is_own_object, own_classes, state_of, values_of_class
from envkit_bridges.policy.errors import STEPWISE

_PYTHON, _NUMPY = "the generator of `random`", "the generator of `numpy.random`"
_OF_MODULES = frozenset(torch.nn.Module().__dict__)


def tensors_by_name(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """List buffers and parameters, each under all of its names."""
    named: dict[str, torch.Tensor] = dict(module.named_buffers(remove_duplicate=False))
    named.update(module.named_parameters(remove_duplicate=False))
    return named


def python_state(module: torch.nn.Module) -> dict[str, Hashable]:
    """Return what a forward can change besides tensors, each place by its name."""
    named = tensors_by_name(module).values()
    found = generator_states()
    for name, part in module.named_modules():
        is_own = is_own_object(part)  # a library's modules keep things of theirs, as flat weights
        for attribute, value in part.__dict__.items():
            if attribute not in _OF_MODULES and (is_own or not attribute.startswith("_")):
                place = f"{name}.{attribute}".lstrip(".")
                found[f"its attribute {place!r}"] = state_of(value, named)
        for cls in own_classes(part):
            for attribute, value in values_of_class(cls).items():
                if not isinstance(value, FunctionType):
                    found[f"its class attribute {attribute!r}"] = state_of(value, named)
        for attribute, values in _globals_read(part):
            found[f"the global {attribute!r}"] = state_of(values[attribute], named)
    return found


def generator_states() -> dict[str, Hashable]:
    """Return where the global generators of Python and NumPy are, by name."""
    return {_PYTHON: random.getstate(), _NUMPY: repr(np.random.get_state())}


_COUNTED = (
    bool,
    int,
    float,
    np.ndarray,
    np.generic,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
)


def values_held(owner: object) -> dict[str, Hashable]:
    """Return the numbers, arrays and generators that an object and its classes have as attributes, each by its place."""
    own, classes = getattr(owner, "__dict__", {}), own_classes(owner)
    attributes = {f"its attribute {name!r}": value for name, value in own.items()}
    for cls in classes:
        attributes |= {f"its class attribute {n!r}": v for n, v in values_of_class(cls).items()}
    return {
        place: state_of(value, ())
        for place, value in attributes.items()
        if isinstance(value, _COUNTED)
    }


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
    """Put back what a forward does in Python.

    Export puts back attributes that a module has, lists and dicts among them. Attributes that a forward
    adds, classes, globals, generators and other objects are put back here.
    """
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        for part in module.modules():
            _keep_attributes(part, stack)
            for cls in own_classes(part):
                stack.callback(_put_back_names, cls, values_of_class(cls))
            for name, values in _globals_read(part):
                stack.callback(values.__setitem__, name, values[name])
                _keep_content(values[name], stack)
        yield


def _keep_attributes(part: torch.nn.Module, stack: ExitStack) -> None:
    own = dict(part.__dict__)
    if is_own_object(part):
        stack.callback(_drop_new, part.__dict__, own)
    for name, value in own.items():
        if name in _OF_MODULES:
            continue
        if isinstance(value, Iterator):  # the trace takes from a copy
            try:
                part.__dict__[name] = copy.deepcopy(value)
            except TypeError:  # a generator: it has no copy, and is not looked at
                continue
            stack.callback(part.__dict__.__setitem__, name, value)
        else:
            _keep_content(value, stack)


def _drop_new(attributes: dict[str, Any], known: Mapping[str, Any]) -> None:
    for name in [name for name in attributes if name not in known]:
        del attributes[name]


def _put_back_names(cls: type, values: Mapping[str, Any]) -> None:
    now = values_of_class(cls)
    for name in now:
        if name not in values:
            delattr(cls, name)
    for name, value in values.items():
        if now.get(name, cls) is not value:
            setattr(cls, name, value)


def _globals_read(part: torch.nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """List the globals with their own value that methods of a module, or functions it holds, name.

    Returns:
        The name of each, and the namespace that holds it.
    """
    functions = [value for cls in own_classes(part) for value in vars(cls).values()]
    functions += part.__dict__.values()
    found: dict[tuple[str, int], tuple[str, dict[str, Any]]] = {}
    for function in functions:
        if not isinstance(function, FunctionType) or not _is_own_code(function):
            continue
        values = function.__globals__
        for name in function.__code__.co_names:
            if name in values and _may_change(values[name]):
                found[name, id(values)] = name, values
    return list(found.values())


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


def _keep_content(value: object, stack: ExitStack) -> None:
    """Register what brings an object back to what it holds now."""
    if isinstance(value, random.Random):
        stack.callback(value.setstate, value.getstate())
    elif isinstance(value, np.random.Generator):
        stack.callback(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif isinstance(value, np.random.RandomState):
        stack.callback(value.set_state, value.get_state())
    elif type(value) is torch.Tensor and not value.is_inference():
        stack.callback(_write_back, value, value.detach().clone(), value._version)
    elif isinstance(value, list | deque):
        stack.callback(_refill, value, value.extend, list(value))
    elif isinstance(value, dict):
        stack.callback(_refill, value, value.update, dict(value))
    elif isinstance(value, set):
        stack.callback(_refill, value, value.update, set(value))
    elif is_own_object(value):
        own: Any = value.__dict__
        stack.callback(_refill, own, own.update, dict(own))


def _write_back(tensor: torch.Tensor, content: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        tensor.copy_(content)


def _refill(container: Any, fill: Callable[[Any], None], content: Any) -> None:
    if _identities(container) != _identities(content):  # others may be reading it meanwhile
        container.clear()
        fill(content)


def _identities(container: Any) -> Any:
    if isinstance(container, Mapping):
        return [(name, id(value)) for name, value in container.items()]
    return sorted(map(id, container)) if isinstance(container, set) else list(map(id, container))
