"""Tensors of fixed shapes in one stretch of bytes, so that several processes see the same ones.

Conventions
    plan    name, shape and dtype of each tensor, in order.
    memory  uint8 array; its last axis is the stretch, the axes before it are kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch

__all__ = ["Packing"]

_ALIGNMENT_BYTES = 64

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Packing(Generic[Name]):
    """Where each tensor lies.

    Attributes:
        plan: shape and dtype by name.
    """

    plan: Mapping[Name, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def of(cls, tensors: Mapping[Name, torch.Tensor]) -> Packing[Name]:
        """Plan for tensors like these."""
        return cls({name: (tuple(value.shape), value.dtype) for name, value in tensors.items()})

    @cached_property
    def _placement(self) -> tuple[dict[Name, int], int]:
        offsets, end = {}, 0
        for name, (shape, dtype) in self.plan.items():
            offsets[name] = end
            size = torch.Size(shape).numel() * dtype.itemsize
            end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return offsets, max(end, _ALIGNMENT_BYTES)

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them, each aligned to 64."""
        return self._placement[1]

    def views(self, memory: np.ndarray) -> dict[Name, torch.Tensor]:
        """View memory of shape ``(*lead, size_bytes or more)`` as the tensors, of shape ``(*lead, *shape)``."""
        lead, whole = memory.shape[:-1], torch.from_numpy(memory)
        found: dict[Name, torch.Tensor] = {}
        for name, (shape, dtype) in self.plan.items():
            start = self._placement[0][name]
            size = torch.Size(shape).numel() * dtype.itemsize
            flat = whole[..., start : start + size].view(dtype)
            strides = (*flat.stride()[:-1], *torch.empty(shape, device="meta").stride())
            found[name] = flat.as_strided((*lead, *shape), strides, flat.storage_offset())
        return found

    def fits(self, tensors: Mapping[Name, torch.Tensor]) -> bool:
        """Say whether tensors are those of the plan."""
        return self.plan.keys() == tensors.keys() and all(
            (tuple(value.shape), value.dtype) == self.plan[name] for name, value in tensors.items()
        )
