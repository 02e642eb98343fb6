"""Registration of these specs with TorchRL, whose own code takes them then, whichever of the two is imported first.

TorchRL asks whether a spec is an instance of its classes, which are abstract base classes, and looks the class of an
action spec up in a table. Once TorchRL is imported, by whomever, the first spec that is made, loaded or read from an
env registers each class as a virtual subclass of its namesake there, and in that table. This module does not import
TorchRL, and importing it changes nothing there.
"""

from __future__ import annotations

import sys
from abc import ABCMeta

_classes: list[type] = []  # those that TorchRL does not know yet


def offer_to_torchrl(*classes: type) -> None:
    """Add classes to those that the next `register_in_torchrl`."""
    _classes.extend(classes)


def register_in_torchrl() -> None:
    """Register what was offered and is not registered yet, where TorchRL is imported."""
    if not _classes:
        return
    theirs, utils = (
        sys.modules.get("torchrl.data.tensor_specs"),
        sys.modules.get("torchrl.data.utils"),
    )
    spaces = getattr(utils, "ACTION_SPACE_MAP", None)
    if spaces is None:
        return
    for ours in _classes:
        namesake = getattr(theirs, ours.__name__, None)
        if isinstance(namesake, ABCMeta):
            namesake.register(ours)
            if namesake in spaces:
                spaces[ours] = spaces[namesake]
    _classes.clear()
