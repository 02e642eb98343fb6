"""The rows that sub-envs and their batched env share: which arrays there are, and views of them.

One row per sub-env in every array. Both sides build the same plan from the same metadata, so a
name means the same bytes on either side.

Conventions
    region  "in" (actions, states), "root" (what is known before a step), "next" (what a step
            made), "mask" (which parts to step or reset, for sub-envs with a batch of their own).
    slot    moment in time. The step of slot t reads ``in[t]`` and writes ``next[t]``; the root that
            follows it, or that a reset makes, is ``root[t + 1]``. So a whole run of steps can lie
            side by side, two at least. Stepping one by one stays at one slot.
    field   region and path joined by "/", array of shape (slots, rows, *leaf); masks and the
            current slot, which is the same in all rows, have no slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from envkit.batched.metadata import HasLeaves
from envkit.data.paths import Path, as_key
from envkit.errors import SpecError
from envkit.rules import RESET, STEP
from envkit.specs import TensorSpec
from envkit.transport import Field

__all__ = ["SLOT", "BufferPlan"]


SLOT = Field("slot", (), "int64")
_MOST_SLOTS, _RING_BYTES = 64, 4 * 2**20  # what stays in a processor's cache
_LEAST_SLOTS = 2  # what lies in one is copied while another is written


@dataclass(frozen=True)
class BufferPlan:
    """The fields of each region, for sub-envs that share one metadata."""

    regions: dict[str, dict[Path, Field]]
    num_slots: int

    @classmethod
    def of(
        cls,
        metadata: HasLeaves,
        num_rows: int,
        more_inputs: Mapping[Path, TensorSpec] | None = None,
    ) -> BufferPlan:
        """Plan the rows of ``num_rows`` sub-envs that look like ``metadata``.

        ``more_inputs`` are sent to the sub-envs too, though their specs do not know them; no part
        of such a path holds a slash.
        """
        kinds = {
            "in": ("action", "state"),
            "root": ("observation", "done"),
            "next": ("observation", "reward", "done"),
        }
        leaves = {region: metadata.paths(*names) for region, names in kinds.items()}
        leaves["in"].update(more_inputs or {})
        moment_bytes = num_rows * sum(
            leaf.shape.numel() * leaf.dtype.itemsize
            for region in leaves.values()
            for leaf in region.values()
        )
        slots = max(_LEAST_SLOTS, min(_MOST_SLOTS, _RING_BYTES // max(moment_bytes, 1)))
        regions = {
            region: {
                path: _field(region, path, leaf, slots + (region == "root"))
                for path, leaf in found.items()
            }
            for region, found in leaves.items()
        }
        masks = {(STEP,): Field("mask/_step", tuple(metadata.batch_size), "bool")}
        for path, leaf in metadata.paths("done").items():
            mask = (*path[:-1], RESET)
            masks.setdefault(mask, Field("/".join(("mask", *mask)), tuple(leaf.shape), "bool"))
        return cls({**regions, "mask": masks}, slots)

    @property
    def has_large_rows(self) -> bool:
        """Whether a moment takes so much memory that copying it takes longer than asking for another command."""
        return self.num_slots == _LEAST_SLOTS

    def names(self, *regions: str) -> tuple[str, ...]:
        """Give the names of the fields of some regions."""
        return tuple(field.name for region in regions for field in self.regions[region].values())

    def fields(self) -> list[Field]:
        """List all fields, for `envkit.transport.Layout`."""
        return [SLOT, *(field for region in self.regions.values() for field in region.values())]

    def tensors(self, arrays: Mapping[str, np.ndarray], region: str) -> dict[Path, torch.Tensor]:
        """Give the arrays of a region by path, as torch views of the shared memory."""
        return {
            path: torch.from_numpy(arrays[field.name]).view(_torch_dtype(field))
            for path, field in self.regions[region].items()
        }

    def fitted(self, arrays: Mapping[str, np.ndarray]) -> BufferPlan:
        """Check that ``arrays`` were laid out for sub-envs of this plan.

        Returns:
            This plan, and with it those inputs in ``arrays`` that it does not know.

        Raises:
            SpecError: an entry is missing, is there in vain, or has another shape or dtype.
        """
        wanted = {field.name: field for field in self.fields()}
        for name, field in wanted.items():
            array = arrays.get(name)
            if array is None:
                raise _misfit(name, "is not among its entries")
            event = array.shape[array.ndim - len(field.shape) :]
            if event != field.shape or array.dtype != np.dtype(field.dtype):
                raise _misfit(name, f"has shape {event} and dtype {array.dtype} there")
        more = {name: array for name, array in arrays.items() if name not in wanted}
        for name in more:
            if not name.startswith("in/"):
                raise _misfit(name, "is there, but this env does not have it")
        inputs = {
            tuple(name.split("/")[1:]): _field_of(array, name) for name, array in more.items()
        }
        return replace(self, regions={**self.regions, "in": {**self.regions["in"], **inputs}})


def _misfit(name: str, what: str) -> SpecError:
    key = as_key(name.split("/")[1:])
    return SpecError(
        f"this env does not look like the first of its kind, whose data the rows hold: {key!r} "
        f"{what}. One create function with equal keywords must always make envs of the same keys, "
        "shapes and dtypes. Pass a list of different functions for different envs."
    )


_BITS = {torch.bfloat16: torch.int16}  # dtypes NumPy lacks travel as the same number of bits


def _field(region: str, path: Path, leaf: object, slots: int) -> Field:
    shape, dtype = tuple(leaf.shape), leaf.dtype  # type: ignore[attr-defined]
    stored = torch.empty(0, dtype=_BITS.get(dtype, dtype), device="cpu").numpy().dtype
    name, ahead = "/".join((region, *path)), int(region == "root")
    return _SpecField(name, shape, stored.str, slots, ahead, torch_dtype=dtype)


def _field_of(array: np.ndarray, name: str) -> Field:
    slots, _, *shape = array.shape
    dtype = torch.from_numpy(array).dtype
    return _SpecField(name, tuple(shape), array.dtype.str, slots, torch_dtype=dtype)


@dataclass(frozen=True)
class _SpecField(Field):
    torch_dtype: torch.dtype = torch.float32


def _torch_dtype(field: Field) -> torch.dtype:
    return field.torch_dtype if isinstance(field, _SpecField) else torch.bool
