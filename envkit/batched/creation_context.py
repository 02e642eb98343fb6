"""Carry the caller's context settings (gym backend, default dtype) to where sub-envs are built.

A setting, here a choice, is made in a context (`contextvars`), by a ``with`` for instance; the sub-envs of a
batched env are built later, and maybe in another process. This module collects the choices that hold in the
caller and makes them hold there; what a choice means is known to who made it.

Conventions
    choices  values by name, picklable; a mapping is never changed, only replaced by another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

__all__ = ["chosen", "forget", "holding", "set_choice"]

_choices: ContextVar[Mapping[str, Any] | None] = ContextVar("choices", default=None)


def chosen() -> Mapping[str, Any]:
    """Give all choices that hold now."""
    return _choices.get() or {}


def set_choice(name: str, value: Any) -> Token:
    """Make a choice from now on; `forget` takes the token."""
    return _choices.set({**chosen(), name: value})


def forget(token: Token) -> None:
    """Return to what held before a choice, and all choices since."""
    _choices.reset(token)


@contextmanager
def holding(choices: Mapping[str, Any]) -> Iterator[None]:
    """Let choices hold meanwhile, over those made here."""
    token = _choices.set({**chosen(), **choices})
    try:
        yield
    finally:
        _choices.reset(token)
