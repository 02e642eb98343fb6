"""Which names `dir` of an env lists, and so completion offers: what is used of an env, not all that a torch module has.

An env is a `torch.nn.Module`, since modules inside of it (transforms, policies) must move, be saved and be
listed with it. Its hooks, casts and registers are there, and are not shown.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

__all__ = ["MODULE_NAMES_USED", "shown"]

MODULE_NAMES_USED = frozenset(
    [
        *("to", "cpu", "cuda", "train", "eval", "training", "requires_grad_", "zero_grad"),
        *("state_dict", "load_state_dict", "apply", "register_buffer", "add_module"),
        *("parameters", "buffers", "children", "modules"),
        *("named_parameters", "named_buffers", "named_children", "named_modules"),
    ]
)
"""What of a module's own names is used of an env."""

_HIDDEN = {*dir(nn.Module), *vars(nn.Module())} - {*dir(object), *MODULE_NAMES_USED}

_OURS = ("torch", "envkit", "envkit_bridges")


def shown(cls: type, names: Iterable[str]) -> list[str]:
    """Leave out of the names that an env of this class has what only modules need.

    A name that a user's class defines stays, whatever torch means by it.
    """
    users = (kind for kind in cls.__mro__ if kind.__module__.partition(".")[0] not in _OURS)
    own = {name for kind in users if kind is not object for name in vars(kind)}
    return sorted(name for name in {*names} if name not in _HIDDEN or name in own)
