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
    """Watches the constants of chains that have equal settings.

    Values of tensors are compared again only where a tensor is another one, or was written to.
    """

    def __init__(self, chains: Sequence[Sequence[FusableTransform]]):
        self._counterparts = [
            transforms
            for transforms in zip(*chains, strict=True)
            if type(transforms[0]).constants is not FusableTransform.constants
        ]
        self._found_equal: list[Any] = [None] * len(self._counterparts)

    def are_equal(self) -> bool:
        """Say whether all chains compute with the same constants now."""
        return all(map(self._is_equal, range(len(self._counterparts))))

    def _is_equal(self, number: int) -> bool:
        constants = [transform.constants() for transform in self._counterparts[number]]
        first = constants[0]
        if not any(isinstance(value, torch.Tensor) for value in first.values()):
            return all(own == first for own in constants)
        stamps = [_stamp(own) for own in constants]
        if stamps != self._found_equal[number]:
            self._found_equal[number] = None
            if all(alike(own, first) for own in constants):
                self._found_equal[number] = stamps
        return self._found_equal[number] is not None


def _stamp(constants: Mapping[str, Any]) -> list[Any]:
    """Tell constants apart without looking at the values of tensors, which are kept: none takes their place."""
    return [
        (name, _Kept(value), value._version) if isinstance(value, torch.Tensor) else (name, value)
        for name, value in constants.items()
    ]


class _Kept:
    """A tensor that equals itself alone."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and self._tensor is other._tensor

    __hash__ = None  # type: ignore[assignment]


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
