"""Settings of the caller, carried to where sub-envs are built: context settings, and settings of libraries.

A context setting, here a choice, is made in a context (`contextvars`), by a ``with`` for instance; the sub-envs of a
batched env are built later, and maybe in another process. This module collects the choices that hold in the
caller and makes them hold there; the meaning of a choice is known to the code that made it. Settings of libraries
belong to a whole process: workers take them over before they build envs. Environment variables, the import path and
the working directory reach workers with their start, see `envkit.transport.worker.Setup`. Importing this module does not
import torch.

Conventions
    choices  values by name, picklable; a mapping is never changed, only replaced by another.
    carrier  function without arguments that looks at a library in this process and gives a function
             that sets it up alike in another one: picklable, without arguments. None where there is
             nothing to do. Carriers are known by name: the library may be in use, and set up, though
             nothing that depends on it has been imported.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

_choices: ContextVar[Mapping[str, Any] | None] = ContextVar("choices", default=None)


def chosen() -> Mapping[str, Any]:
    """Return all choices that hold now."""
    return _choices.get() or {}


def set_choice(name: str, value: Any) -> Token:
    """Make a choice from now on; `forget` takes the token."""
    return _choices.set({**chosen(), name: value})


def forget(token: Token) -> None:
    """Return to what held before a choice, and all choices since."""
    _choices.reset(token)


@contextmanager
def holding(choices: Mapping[str, Any]) -> Iterator[None]:
    """Apply choices for a while, over those made here."""
    token = _choices.set({**chosen(), **choices})
    try:
        yield
    finally:
        _choices.reset(token)


_CARRIERS = {
    "torch": "envkit.batched.caller_settings:default_dtype",
    "gymnasium": "envkit_bridges.gym.backend:gymnasium_registrations",
    "gym": "envkit_bridges.gym.backend:gym_registrations",
}


def caller_settings() -> list[Callable[[], None]]:
    """Return functions that set up a worker as this process is set up now."""
    used = [carrier for library, carrier in _CARRIERS.items() if library in sys.modules]
    found = [pkgutil.resolve_name(carrier)() for carrier in used]
    return [set_up for set_up in found if set_up is not None]


def default_dtype() -> Callable[[], None]:
    """Carry the dtype that torch gives to floats."""
    torch = sys.modules["torch"]
    return partial(torch.set_default_dtype, torch.get_default_dtype())
