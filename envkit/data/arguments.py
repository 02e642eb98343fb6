"""Whether an argument is of the kind that a call can use: an int, a number, a bool, a batch size, a path, a TensorDict.

Each function gives the argument back or says what it is, what was expected and what to pass. It knows
no env: the caller says what a number means.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types, and what is given is not known)
from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.arrays.integers import as_int
from envkit.errors import ArgumentError, ArgumentTypeError, DataTypeError

__all__ = [
    "as_batch_size",
    "as_bool",
    "as_file",
    "as_int",
    "as_number",
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
            f"{name} is {text!r}, but must name something: a path is not empty and holds no null character. Name a file."
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
            f"{name} is of type {type(value).__name__}, but must be a TensorDict. Pass {fix}."
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
