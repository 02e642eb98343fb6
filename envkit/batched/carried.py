"""What the caller has set up in libraries, and workers take over before they build envs.

Environment variables, the import path and the working directory reach workers with their start, see
`envkit.transport.worker.Setup`; choices that hold in a context, see `choices`, hold wherever envs are
built. This module knows who reads the rest, which belongs to a whole process and to one library.

Conventions
    carrier  function without arguments that looks at a library in this process and gives a function
             that sets it up alike in another one: picklable, without arguments. None where there is
             nothing to do. Carriers are known by name: the library may be in use, and set up, though
             nothing that stands on it has been imported.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from functools import partial

import torch

__all__ = ["carried"]

_CARRIERS = {
    "torch": "envkit.batched.carried:default_dtype",
    "gymnasium": "envkit_bridges.gym.backend:gymnasium_registrations",
    "gym": "envkit_bridges.gym.backend:gym_registrations",
}


def carried() -> list[Callable[[], None]]:
    """Give functions that set up a worker as this process is set up now."""
    used = [carrier for library, carrier in _CARRIERS.items() if library in sys.modules]
    found = [pkgutil.resolve_name(carrier)() for carrier in used]
    return [set_up for set_up in found if set_up is not None]


def default_dtype() -> Callable[[], None]:
    """Carry the dtype that torch gives to floats."""
    return partial(torch.set_default_dtype, torch.get_default_dtype())
