"""The rows that sub-envs and their batched env share: which arrays there are, and views of them.

One row per sub-env in every array. Both sides build the same plan from the same metadata, so a
name means the same bytes on either side.

Conventions
    region  "in" (actions, states), "root" (what a reset made), "next" (what a step made),
            "mask" (which parts to step or reset, for sub-envs that have a batch of their own).
    field   region and path joined by "/", array of shape (rows, *leaf).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from envkit.batched.metadata import EnvMetaData
from envkit.rules import RESET, STEP
from envkit.transport import Field

__all__ = ["BufferPlan"]

Path = tuple[str, ...]


@dataclass(frozen=True)
class BufferPlan:
    """The fields of each region, for sub-envs that share one metadata."""

    regions: dict[str, dict[Path, Field]]

    @classmethod
    def of(cls, metadata: EnvMetaData) -> BufferPlan:
        """Plan the rows of sub-envs that look like ``metadata``."""
        kinds = {
            "in": ("action", "state"),
            "root": ("observation", "done"),
            "next": ("observation", "reward", "done"),
        }
        regions = {
            region: {
                path: _field(region, path, tuple(leaf.shape), leaf.dtype)
                for path, leaf in metadata.paths(*names).items()
            }
            for region, names in kinds.items()
        }
        masks = {(STEP,): _field("mask", (STEP,), tuple(metadata.batch_size), torch.bool)}
        for path, leaf in metadata.paths("done").items():
            mask = (*path[:-1], RESET)
            masks.setdefault(mask, _field("mask", mask, tuple(leaf.shape), torch.bool))
        return cls({**regions, "mask": masks})

    def fields(self) -> list[Field]:
        """List all fields, for `envkit.transport.Layout`."""
        return [field for region in self.regions.values() for field in region.values()]

    def arrays(self, arrays: Mapping[str, np.ndarray], region: str) -> dict[Path, np.ndarray]:
        """Pick the arrays of a region by path."""
        return {path: arrays[field.name] for path, field in self.regions[region].items()}

    def tensors(self, arrays: Mapping[str, np.ndarray], region: str) -> dict[Path, torch.Tensor]:
        """The same as torch views of the shared memory."""
        return {
            path: torch.from_numpy(array).view(_torch_dtype(self.regions[region][path]))
            for path, array in self.arrays(arrays, region).items()
        }


_BITS = {torch.bfloat16: torch.int16}  # dtypes NumPy lacks travel as the same number of bits


def _field(region: str, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Field:
    stored = torch.empty(0, dtype=_BITS.get(dtype, dtype)).numpy().dtype
    return _SpecField("/".join((region, *path)), shape, stored.str, torch_dtype=dtype)


@dataclass(frozen=True)
class _SpecField(Field):
    torch_dtype: torch.dtype = torch.float32


def _torch_dtype(field: Field) -> torch.dtype:
    assert isinstance(field, _SpecField)
    return field.torch_dtype
