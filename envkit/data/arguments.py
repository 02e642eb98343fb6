"""Whether an argument is of the kind that a call can use: an int, a number, a bool, a batch size, a path, a TensorDict, a keyword that is known.

Each function gives the argument back or says what it is, what was expected and what to pass. It knows
no env: what a number means is told by who asks.

Keywords that several classes take alike are written down once, as a `TypedDict`. Type checkers read name and type of
each from ``**options: Unpack[Table]``. This module reads the defaults, which stand beside the types, and shows the
keywords one by one where Python asks for a signature. It does not know what they mean.

Conventions
    table   a `TypedDict`, ``total=False``; each entry is ``Annotated[type, Default(value)]``.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Unpack, get_args, get_origin, get_type_hints

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.arrays.integers import as_int
from envkit.errors import ArgumentError, ArgumentTypeError, DataTypeError, OptionError

__all__ = [
    "ChecksKeywords",
    "Default",
    "ShownKeywords",
    "as_batch_size",
    "as_bool",
    "as_file",
    "as_int",
    "as_number",
    "completed",
    "keywords_of",
    "known_to",
    "refuse_unknown",
    "require_state_dict",
    "require_tensordict",
]


def as_number(name: str, value: Any, *, meaning: str) -> float:
    """Give an argument that is one finite number as a float.

    Args:
        name: of the argument.
        value: a number, or what can stand for one: a NumPy number, an array or tensor without axes.
        meaning: what it is, for messages: "metres per second".

    Raises:
        ArgumentTypeError: it is no number, or a bool, which Python takes for one.
        ArgumentError: it is infinite or NaN.
    """
    told = f"{name} is {value!r}, but must be a finite number. Pass {meaning}."
    is_number = not isinstance(value, str | bytes) and getattr(value, "shape", ()) == ()
    if getattr(value, "dtype", type(value)) in (bool, np.bool_, torch.bool) or not is_number:
        raise ArgumentTypeError(told)
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(told) from error
    if not math.isfinite(number):
        raise ArgumentError(told)
    return number


def as_bool(name: str, value: Any) -> bool:
    """Give an argument that is True or False.

    Raises:
        ArgumentTypeError: it is something else, None and strings included.
    """
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} is {value!r}, but must be a bool. Pass True or False.")
    return value


def as_batch_size(value: Any) -> torch.Size:
    """Give a batch size as `torch.Size`; None is that of one environment, ``()``.

    Raises:
        ArgumentTypeError: it is no sequence of ints.
        ArgumentError: one of them is negative.
    """
    try:
        size = torch.Size(() if value is None else value)
    except TypeError as error:
        fix = f"[{value}]" if isinstance(value, int) else "[4], say, or [] for one environment"
        raise ArgumentTypeError(
            f"batch_size is {value!r}, but must be a sequence of ints, one for each batch axis. "
            f"Pass batch_size={fix}."
        ) from error
    if any(length < 0 for length in size):
        raise ArgumentError(
            f"batch_size is {list(size)}, but no axis has a negative length. Pass the number of "
            "environments along each axis, or leave it out for one environment."
        )
    return size


def as_file(name: str, value: Any) -> Path:
    """Give an argument that names a file or a folder as a path; nothing is looked up.

    Raises:
        ArgumentTypeError: it is neither text nor an ``os.PathLike`` of text.
        ArgumentError: it is empty, or holds a null character.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ArgumentTypeError(
            f"{name} is {value!r}, of type {type(value).__name__}, but must be a path: text or a pathlib.Path. "
            f"Pass {name}='runs/first', say."
        )
    if not text or "\0" in text:
        raise ArgumentError(
            f"{name} is {text!r}, but must name something: a path is not empty and holds no null character."
        )
    return Path(text)


def require_tensordict(name: str, value: Any, fix: str = "") -> None:
    """See to it that an argument is a TensorDict.

    Args:
        name: of the argument.
        value: what was given.
        fix: what to pass, for messages; "" for the data of an env.

    Raises:
        DataTypeError: it is something else.
    """
    if not isinstance(value, TensorDictBase):
        fix = fix or "what env.reset() gives, or TensorDict({...}, batch_size=env.batch_size)"
        raise DataTypeError(
            f"{name} is a {type(value).__name__}, but must be a TensorDict. Pass {fix}."
        )


def require_state_dict(value: Any) -> None:
    """See to it that what is loaded is a dict.

    Raises:
        ArgumentTypeError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(
            f"the state dict is of type {type(value).__name__}, but must be a dict. Pass what state_dict() gave."
        )


@dataclass(frozen=True)
class Default:
    """What a keyword is that was not given."""

    value: Any


class ShownKeywords:
    """Class attribute ``__signature__``: what Python, editors and notebooks show of the constructor, one by one."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:  # which is called with what its __call__ takes
            raise AttributeError(f"{owner.__name__} object has no attribute '__signature__'")
        return inspect.Signature(keywords_of(owner.__init__)[1:])


class ChecksKeywords:
    """Refuse what the ``__init__`` of a subclass does not take, with the nearest name that it does.

    Python itself guesses none before 3.13. A subclass whose ``__init__`` takes any keyword is left to itself.
    """

    __signature__ = ShownKeywords()  # or Python would show that of __new__

    if not TYPE_CHECKING:  # which would look for the keywords here

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if kwargs and (known := known_to(cls)) is not None:
                refuse_unknown(cls.__name__, kwargs, known)
            return super().__new__(cls)


def completed(table: type, given: Mapping[str, Any]) -> Any:
    """Give the keywords of a table as attributes, those that were not ``given`` at their defaults."""
    return SimpleNamespace(**{**{one.name: one.default for one in _listed(table)}, **given})


def keywords_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """List the parameters of a function or method, the entries of a table one by one."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        table = _table_of(function, parameter)
        shown += [parameter] if table is None else _listed(table)
    return shown


def known_to(cls: type) -> list[str] | None:
    """List what the constructor of a class takes; None where it takes any keyword."""
    parameters = keywords_of(cls.__init__)[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def refuse_unknown(
    owner: str,
    given: Iterable[str],
    known: Sequence[str],
    hint: str = "",
    meant: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that each keyword that was given is known.

    Args:
        owner: who takes keywords, for the message.
        given: names.
        known: names.
        hint: a sentence on where else a keyword might go.
        meant: what keywords of other libraries are called here.

    Raises:
        OptionError: (a TypeError) one is not; the message names the nearest that is.
    """
    for name in given:
        if name in known:
            continue
        near = [meant[name]] if name in meant else get_close_matches(name, known, 1)
        guess = f"Did you mean {near[0]!r}?" if near else "Leave it out."
        told = " ".join(part for part in (guess, hint) if part)
        raise OptionError(
            f"{owner} takes no keyword {name!r}. {told} It takes {', '.join(known) or 'none'}."
        )


def _table_of(function: Callable[..., Any], parameter: inspect.Parameter) -> type | None:
    """Give the table that ``**options: Unpack[Table]`` names; None of any other parameter."""
    written = parameter.annotation
    if isinstance(written, str) and not written.startswith("Unpack["):
        return None  # it may be made of names that only type checkers know
    holder = SimpleNamespace(__annotations__={"hint": written})
    hint = get_type_hints(holder, inspect.unwrap(function).__globals__)["hint"]
    return get_args(hint)[0] if get_origin(hint) is Unpack else None


def _listed(table: type) -> list[inspect.Parameter]:
    """List the entries of a table as parameters, in its order."""
    listed = []
    for name, hint in get_type_hints(table, include_extras=True).items():
        annotation, default = get_args(hint)
        parameter = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default.value, annotation=annotation
        )
        listed.append(parameter)
    return listed
