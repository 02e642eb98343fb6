"""Whether the transforms of several envs compute the same: equal settings, and equal constants from step to step.

Conventions
    settings   all attributes of a transform, but for its owner.
    constants  what `FusableTransform.constants` gives: numbers and tensors that may be set to others.
    chain      the transforms of one env, first to last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from envkit.transforms.core.base import OWNERSHIP
from envkit.transforms.core.fusable import FusableTransform

__all__ = ["SharedConstants", "alike"]


class SharedConstants:
    """Watches the constants of chains that have equal settings."""

    def __init__(self, chains: Sequence[Sequence[FusableTransform]]):
        self._counterparts = [
            transforms
            for transforms in zip(*chains, strict=True)
            if type(transforms[0]).constants is not FusableTransform.constants
        ]

    def are_equal(self) -> bool:
        """Say whether all chains compute with the same constants now.

        Values of tensors are compared each time: what NumPy or ``tensor.data`` writes leaves no other trace.
        """
        for transforms in self._counterparts:
            first, *others = (transform.constants() for transform in transforms)
            if not all(alike(own, first) for own in others):
                return False
        return True


def alike(one: Any, other: Any) -> bool:
    """Say whether two values are equal, transforms by their settings and tensors element by element."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, nn.Module):
        return alike(_settings(one), _settings(other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def _settings(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OWNERSHIP}
