"""Whether a value is an integer that a call can use, where a number of things is asked for.

The caller says what it means. It knows bools of every library by the name of their dtype, and no library.
"""

from __future__ import annotations

import operator
from typing import Any

from envkit.errors import ArgumentError, ArgumentTypeError


def as_int(name: str, value: Any, *, least: int | None, meaning: str) -> int:
    """Return an integer argument as an int.

    Args:
        name: of the argument.
        value: an int, or what can stand for one: a NumPy integer, a tensor of one integer, a whole float as 1e6.
        least: smallest value that is accepted; None accepts all.
        meaning: what it is, for messages: "the most steps to take".

    Raises:
        ArgumentTypeError: it is no integer, or a bool, which Python takes for one.
        ArgumentError: it is below ``least``.
    """
    wanted = "an int" if least is None else f"an int of at least {least}"
    try:
        if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
            raise TypeError("a bool is no number")
        number = int(value) if _is_whole(value) else operator.index(value)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{name} is {value!r}, but must be {wanted}. Pass {meaning}."
        ) from error
    if least is not None and number < least:
        raise ArgumentError(f"{name} is {number}, but must be {wanted}. Pass {meaning}.")
    return number


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()
