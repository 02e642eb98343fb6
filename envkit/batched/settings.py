"""Whether what a batched env is told about itself can be used, before any sub-env is built.

This module decides what counts as a choice, a time limit and a known keyword, and how a mistake is told.
It does not know what the keywords mean.
"""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from typing import Any

from envkit.errors import ArgumentError, ArgumentTypeError, OptionError

__all__ = ["refuse_unknown", "require_choice", "require_seconds"]


def require_choice(name: str, value: Any) -> None:
    """Check a choice between yes, no and None, which leaves it to the env.

    Raises:
        ArgumentTypeError: it is something else.
    """
    if value is not None and not isinstance(value, bool):
        raise ArgumentTypeError(
            f"{name} is {value!r}, of type {type(value).__name__}, but must be True, False or None. "
            "Leave it out to let the env choose."
        )


def require_seconds(name: str, value: Any) -> None:
    """Check a time limit; None sets none.

    Raises:
        ArgumentTypeError: it is no number.
        ArgumentError: it is not above 0.
    """
    if value is None:
        return
    try:
        is_positive = bool(value > 0)
    except TypeError:
        raise ArgumentTypeError(
            f"{name} is {value!r}, of type {type(value).__name__}, but must be a positive number of "
            "seconds, or None for no limit."
        ) from None
    if not is_positive:
        raise ArgumentError(
            f"{name} is {value}, but must be a positive number of seconds, or None for no limit."
        )


def refuse_unknown(cls: type, given: dict[str, Any]) -> None:
    """Check that a class takes the keywords that are given to it.

    Raises:
        OptionError: (a TypeError) it does not take one of them.
    """
    parameters = inspect.signature(cls.__init__).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters][1:]
    for name in given:
        if name in known:
            continue
        close = get_close_matches(name, known, 1)
        guess = f"Did you mean {close[0]!r}?" if close else "Leave it out."
        raise OptionError(
            f"{cls.__name__} takes no keyword {name!r}. {guess} What is meant for the sub-envs goes into "
            f"create_env_kwargs={{...}}; {cls.__name__} itself takes {', '.join(known)}."
        )
