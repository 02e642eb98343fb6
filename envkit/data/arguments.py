"""Whether an argument is of the kind that a call can use: a number, an option, a function, a path, a TensorDict, ...

Each function returns the argument or raises: what it is, what was expected and what to pass. It knows
no env: the caller says what a number means.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types, and what is given is not known)
from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    DataTypeError,
    EnvkitError,
)


def as_number(
    name: str,
    value: Any,
    *,
    meaning: str,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> float:
    """Return an argument that is one finite number as a float.

    Args:
        name: of the argument.
        value: a number, or what can stand for one: a NumPy number, an array or tensor without axes.
        meaning: what it is, for messages: "metres per second".
        least, most: smallest and largest number that are accepted; None accepts all.
        above: a number below all that are accepted, instead of ``least``.

    Raises:
        ArgumentTypeError: it is no number, or a bool, which Python takes for one.
        ArgumentError: it is infinite, NaN or out of range.
    """
    limits = {"at least": least, "above": above, "at most": most}
    limited = " and ".join(
        f"{word} {limit:g}" for word, limit in limits.items() if limit is not None
    )
    message = f"{name} is {value!r}, but must be a finite number{limited and ', '}{limited}. Pass {meaning}."
    is_number = not isinstance(value, str | bytes) and getattr(value, "shape", ()) == ()
    if getattr(value, "dtype", type(value)) in (bool, np.bool_, torch.bool) or not is_number:
        raise ArgumentTypeError(message)
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(message) from error
    is_below = (least is not None and number < least) or (above is not None and number <= above)
    if not math.isfinite(number) or is_below or (most is not None and number > most):
        raise ArgumentError(message)
    return number


def require_option(
    name: str,
    value: Any,
    options: Iterable[Any],
    *,
    fix: str = "",
    error: type[EnvkitError] = ArgumentError,
) -> None:
    """Check that an argument is one of a few words.

    Args:
        name: of the argument.
        value: what was given.
        options: the words, and None where it may be left out.
        fix: what to pass, for messages; "" for the nearest word.
        error: what is raised.

    Raises:
        ArgumentError: it is something else.
    """
    allowed = list(options)
    if any(isinstance(value, type(one)) and value == one for one in allowed):
        return
    *others, last = map(repr, allowed)
    words = [one for one in allowed if isinstance(one, str)]
    near = get_close_matches(value, words, 1) if isinstance(value, str) else []
    fix = fix or (f"Did you mean {near[0]!r}?" if near else "Pass one of these.")
    raise error(f"{name} is {value!r}, but must be {', '.join(others)} or {last}. {fix}")


def require_callable(name: str, value: Any, *, is_optional: bool = False) -> None:
    """Check that an argument is a function, or something else that can be called.

    Args:
        name: of the argument.
        value: what was given.
        is_optional: None is accepted too.

    Raises:
        ArgumentTypeError: it is something else.
    """
    if callable(value) or (is_optional and value is None):
        return
    wanted = "callable, or None" if is_optional else "callable"
    raise ArgumentTypeError(
        f"{name} is {value!r}, of type {type(value).__name__}, but must be {wanted}. Pass a function."
    )


def as_bool(name: str, value: Any) -> bool:
    """Return an argument that is True or False as a bool; the integers 0 and 1, and bools of NumPy, are accepted too.

    Raises:
        ArgumentTypeError: it is something else, None and strings included.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int | np.integer | np.bool_) and value in (0, 1):
        return bool(value)
    raise ArgumentTypeError(f"{name} is {value!r}, but must be a bool. Pass True or False.")


def as_bool_or_none(name: str, value: Any) -> bool | None:
    """Return an argument that is True, False or None, which leaves the choice open; see `as_bool`."""
    try:
        return None if value is None else as_bool(name, value)
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"{name} is {value!r}, but must be True, False or None. Pass one of these, or leave it out."
        ) from None


def as_batch_size(value: Any) -> torch.Size:
    """Return a batch size as `torch.Size`; None is that of one environment, ``()``.

    Raises:
        ArgumentTypeError: it is no sequence of ints.
        ArgumentError: one of them is negative.
    """
    try:
        size = torch.Size(() if value is None else value)
    except TypeError as error:
        fix = (
            f"[{value}]"
            if isinstance(value, int)
            else "[4], for example, or [] for one environment"
        )
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


def as_keywords(name: str, value: Any, example: str) -> dict[str, Any]:
    """Return an argument that maps keywords to values as a dict; None is an empty one.

    Args:
        name: of the argument.
        value: a dict or another mapping.
        example: what to pass, as code, for messages.

    Raises:
        ArgumentTypeError: (a TypeError) it is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(
            f"{name} is {value!r}, of type {type(value).__name__}, but must be a dict of keywords. Pass "
            f"{name}={example}, for example."
        )
    return dict(value)


def as_file(name: str, value: Any) -> Path:
    """Return an argument that names a file or a folder as a path; nothing is looked up.

    Raises:
        ArgumentTypeError: it is neither text nor an ``os.PathLike`` of text.
        ArgumentError: it is empty, or holds a null character.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ArgumentTypeError(
            f"{name} is {value!r}, of type {type(value).__name__}, but must be a path: text or a pathlib.Path. "
            f"Pass {name}='runs/first', for example."
        )
    if not text or "\0" in text:
        raise ArgumentError(
            f"{name} is {text!r}, but must name something: a path is not empty and holds no null character. Name a file."
        )
    return Path(text)


def require_tensordict(name: str, value: Any, fix: str = "") -> None:
    """Check that an argument is a TensorDict.

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
            f"{name} is of type {type(value).__name__}, but must be a TensorDict. Pass {fix}."
        )


def require_state_dict(value: Any) -> None:
    """Check that what is loaded is a dict.

    Raises:
        ArgumentTypeError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(
            f"the state dict is of type {type(value).__name__}, but must be a dict. Pass what state_dict() gave."
        )


Check = Callable[[str, Any], Any]
"""Takes the name of a keyword and a value; returns the value in the form in which it is used, or raises."""


def checked(table: type, options: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Check keywords one by one, and return them in the form in which they are used.

    A keyword has its own check, or its type in the table says what it must be: a bool, one of the words of a `Literal`,
    or a function. None passes where that type allows it.

    Args:
        table: of all keywords.
        options: values by name.
        checks: of keywords whose type does not say enough, by name.

    Raises:
        ArgumentTypeError: (a TypeError) a value is of another type.
        ArgumentError: (a ValueError) it is none of the words, or refused by its own check.
    """
    types = get_type_hints(table)
    return {
        name: _checked(name, value, types[name], checks.get(name))
        for name, value in options.items()
    }


def _checked(name: str, value: Any, hint: Any, check: Check | None) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    is_optional = NoneType in kinds
    if value is None and is_optional:
        return None
    if check is not None:
        return check(name, value)
    if kinds[0] is bool:
        return as_bool_or_none(name, value) if is_optional else as_bool(name, value)
    if get_origin(kinds[0]) is Literal:
        require_option(name, value, get_args(kinds[0]))
    if get_origin(kinds[0]) is Callable:
        require_callable(name, value, is_optional=is_optional)
    return value


def require_rows_of_policies(whose: str, batch: Sequence[int], policies: int) -> None:
    """Check that each of several policies has as many rows of a batch as the others.

    Raises:
        BatchSizeError: (a RuntimeError) they do not.
    """
    rows = batch[0] if len(batch) else 1
    if not rows or rows % policies:
        raise BatchSizeError(
            f"{whose} has {policies} policies, but the batch size is {tuple(batch)}; expected a multiple of {policies} along the "
            f"first axis, the first rows for the first policy. Pass an env of batch_size=[{policies}, n], or a pool of "
            f"{policies} * n envs."
        )
