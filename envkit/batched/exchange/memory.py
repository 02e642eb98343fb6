"""Rows of memory that envs are stepped on: which arrays there are, and the moments that lie in them; of one env, or of a pool.

One row per sub-env in every array. A pool and its workers build the same plan from the same metadata, so a
name means the same bytes on either side. Who steps the rows is decided by what derives from `RowMemory`: `one_env`
and `shared_memory`.

Conventions
    region  "in" (actions, states), "root" (what is known before a step), "next" (what a step
            made), "mask" (which parts to step or reset, for sub-envs with their own batch).
    slot    number of a moment in time. The step of slot t reads ``in[t]`` and writes ``next[t]``; the root that
            follows it, or that a reset makes, is ``root[t + 1]``. So a whole run of steps can lie
            side by side, two at least. Stepping one by one stays at one slot.
    field   region and path joined by "/", array of shape (slots, rows, *leaf); masks and the
            current slot, which is the same in all rows, have no slots.
    ring    an entry over all slots, shape (slots, *batch, *leaf).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types)
from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.batched.metadata import HasLeaves
from envkit.data.paths import Axes, Path, as_key, node_of, shaped
from envkit.errors import SpecError
from envkit.rules import RESET, STEP
from envkit.specs import TensorSpec
from envkit.specs.inputs import has_array
from envkit.transport import Field

SLOT = Field("slot", (), "int64")
_MOST_SLOTS, _RING_BYTES = 64, 4 * 2**20  # what stays in a processor's cache
_LEAST_SLOTS = 2  # what lies in one is copied while another is written
# glibc maps blocks from here on again each time (mallopt(3), M_MMAP_THRESHOLD)
_LARGE_BYTES = 32 * 2**20


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
        masks: dict[Path, Field] = {
            (STEP,): Field("mask/_step", tuple(metadata.batch_size), "bool")
        }
        for path, leaf in metadata.paths("done").items():
            mask = (*path[:-1], RESET)
            masks.setdefault(mask, Field("/".join(("mask", *mask)), tuple(leaf.shape), "bool"))
        return cls({**regions, "mask": masks}, slots)

    @property
    def has_large_rows(self) -> bool:
        """Whether a moment takes so much memory that copying it takes longer than asking for another command."""
        return self.num_slots == _LEAST_SLOTS

    def names(self, *regions: str) -> tuple[str, ...]:
        """Return the names of the fields of some regions."""
        return tuple(field.name for region in regions for field in self.regions[region].values())

    def fields(self) -> list[Field]:
        """List all fields, for `envkit.transport.Layout`."""
        return [SLOT, *(field for region in self.regions.values() for field in region.values())]

    def tensors(self, arrays: Mapping[str, np.ndarray], region: str) -> dict[Path, torch.Tensor]:
        """Return the arrays of a region by path, as torch views of the shared memory."""
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


Leaves = dict[Path, torch.Tensor]
# NumPy copies what is small in half of the time, torch what is large with several threads
_SMALL_BYTES = 2**18


class Moment(Leaves):
    """The entries of one moment, as memory of a ring."""

    def __init__(self, leaves: Leaves):
        super().__init__(leaves)
        is_small = sum(leaf.nbytes for leaf in leaves.values()) <= _SMALL_BYTES
        has_arrays = is_small and all(map(has_array, leaves.values()))
        self._arrays = {p: leaf.numpy() for p, leaf in leaves.items()} if has_arrays else None

    def copies(self, device: torch.device | None, *, later: bool = False) -> Leaves:
        """Copy them to a device; ``later``: they need not be there when this returns."""
        if self._arrays is not None and (device is None or device.type == "cpu"):
            return {path: torch.from_numpy(array.copy()) for path, array in self._arrays.items()}
        return {p: leaf.to(device, copy=True, non_blocking=later) for p, leaf in self.items()}


class Rings(NamedTuple):
    """Inputs, roots and outcomes of some rows, by path."""

    inputs: Leaves
    roots: Leaves
    nexts: Leaves


def rings_of(leaves: HasLeaves, slots: int, *inputs: str) -> Rings:
    """Make rows of memory for the entries of an env, some kinds of inputs among them."""

    def rings(moments: int, *kinds: str) -> Leaves:
        return {
            path: torch.zeros((moments, *leaf.shape), dtype=leaf.dtype, device="cpu")
            for path, leaf in leaves.paths(*kinds).items()
        }

    return Rings(
        rings(slots, *inputs),
        rings(slots + 1, "observation", "done"),
        rings(slots, "observation", "reward", "done"),
    )


class RowMemory(ABC):
    """Rows of memory over a few moments.

    Attributes:
        has_begun: every row was reset once.
        carried: for each slot, inputs that repeat the root, and their paths there: what transforms remember.
        carries_all: all inputs are actions or such.
        newest_is_next: for each row, whether what is known now lies in `next` rather than at the root.
        has_large_rows: to copy a moment takes as long as a step.
        memory: where results of many steps are recorded.

    Args:
        rings: where the moments lie.
        actions: which of the inputs are.
        slots: the moment that the next step of each row reads and writes.
        batch_size: axes of every entry behind that of its slots.
        node_axes: of nested entries that have their own batch axes.
    """

    has_begun = False
    has_large_rows: bool

    def __init__(
        self,
        rings: Rings,
        actions: Collection[Path],
        slots: np.ndarray,
        batch_size: torch.Size,
        node_axes: dict[Path, Axes],
        device: torch.device | None,
    ):
        self.rings, self.slots = rings, slots
        self.batch_size, self.node_axes = batch_size, node_axes
        self.num_slots = len(next(iter(rings.nexts.values())))
        self.inputs = _by_slot(rings.inputs, self.num_slots)
        self.roots = _by_slot(rings.roots, self.num_slots + 1)
        self.nexts = _by_slot(rings.nexts, self.num_slots)
        self.actions = frozenset(actions)
        others = self.inputs[0].keys() - self.actions
        self.carries_all = others <= self.roots[0].keys()
        self.carried = [
            [(given[path], root[path]) for path in others if path in root]
            for given, root in zip(self.inputs, self.roots[:-1], strict=True)
        ]
        self.newest_is_next = np.zeros(len(slots), bool)
        self.memory = LentMemory()
        self._device, self._non_blocking = device, False
        self._leave: Callable[[], None] | None = None  # of a run, see `recording`

    @property
    def slot(self) -> int:
        """The moment that the last step has read and written."""
        return int(self.slots[0])

    @slot.setter
    def slot(self, slot: int) -> None:
        self.slots.fill(slot)

    @abstractmethod
    def fill(
        self, inputs: TensorDictBase | Mapping[Path, Any], mask: None, slot: int
    ) -> list[int] | None:
        """Write the inputs of a step of all rows into a slot, actions converted or refused as their specs say."""

    @abstractmethod
    def check_actions(self, rows: Mapping[Path, np.ndarray]) -> None:
        """Check, and convert, actions that were written into a slot, with an axis of rows."""

    @abstractmethod
    def select_all(self) -> None:
        """Select all rows for the next steps; a run that is under way leaves the slots."""

    @abstractmethod
    def wake(self, root: TensorDictBase | None, rows: None, *, advance: bool, slot: int) -> Any:
        """Begin the step of a slot, with ``advance`` with resets of what ends, and give what `wait` takes."""

    @abstractmethod
    def wait(self, sent: Any) -> Any:
        """Wait for a step that was begun."""

    def any_done(self, slot: int, flags: Sequence[Path]) -> bool:
        """Check whether one of some flags is set in the outcome of a step."""
        following = self.nexts[slot]
        return any(bool(following[path].any()) for path in flags)

    def follow(self, slot: int) -> None:
        """Copy what a step gave in which nothing has ended into the root that follows it."""
        following = self.nexts[slot]
        for path, root in self.roots[slot + 1].items():
            root.copy_(following[path])

    def looks_like(self, root: Mapping[Path, Any]) -> bool:
        """Check whether a root, by path, has all the entries of one, in the form of their rows."""
        pairs = ((root.get(path, None), rows) for path, rows in self.roots[0].items())
        return all(
            isinstance(value, torch.Tensor)
            and value.dtype == rows.dtype
            and value.shape == rows.shape
            for value, rows in pairs
        )

    def deliver(self, moment: Moment) -> TensorDict:
        """Copy rows of memory into its own TensorDict, where data is delivered."""
        device, owned = self._device, {}
        for path, tensor in moment.copies(device, later=self._non_blocking).items():
            node = owned if len(path) == 1 else node_of(owned, path)
            node[path[-1]] = tensor
        td = TensorDict._new_unsafe(  # pyright: ignore[reportPrivateUsage] # checks nothing
            owned, batch_size=self.batch_size, device=device
        )
        return shaped(td, self.node_axes) if self.node_axes else td

    def deliver_to(self, device: torch.device | None, *, non_blocking: bool) -> None:
        """Copy what comes out to ``device`` from now on."""
        self._device, self._non_blocking = device, can_wait(device, non_blocking)

    @contextmanager
    def recording(self, leave: Callable[[], None]) -> Generator[None]:
        """Hold the slots for a run; ``leave`` saves what it has left there before anybody else writes into them."""
        self._leave = leave
        try:
            yield
        finally:
            self._leave = None

    def hand_over(self) -> None:
        """Make a run that holds the slots save what it has left there: its policy uses the env for something else."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


def _by_slot(region: Leaves, slots: int) -> list[Moment]:
    """Turn leaves with a leading slot axis into the moments of each slot."""
    return [
        Moment({path: tensor[slot] for path, tensor in region.items()}) for slot in range(slots)
    ]


def can_wait(device: torch.device | None, non_blocking: bool) -> bool:
    """Check whether a copy to ``device`` may end after the call: what reads it there is queued too."""
    return non_blocking and device is not None and device.type == "cuda"


class LentMemory:
    """Allocate tensors, the large ones on memory of earlier ones that are gone.

    The system takes large blocks back when they are freed, and clears each page of a new one when it is first written:
    that took as long as the copies of a rollout of pictures. Small blocks are kept by the allocator anyway. A block is
    the bytes of one tensor, lent from `empty` until the last tensor on it is gone.
    No more is kept than was lent since `begin`, and that until this object and all it has lent are gone.

    Args:
        large_bytes: smaller tensors are left to torch, as are those elsewhere than on the CPU.
    """

    def __init__(self, large_bytes: int = _LARGE_BYTES):
        self._large_bytes = large_bytes
        self._idle: list[torch.Tensor] = []
        self._lent_bytes = 0

    def begin(self) -> None:
        """Begin another result, which decides how much is kept."""
        self._lent_bytes = 0

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None
    ) -> torch.Tensor:
        """Return a tensor of any values, which belongs to who holds it; None is the CPU, whatever torch's default is."""
        size_bytes = math.prod(shape) * dtype.itemsize
        device = torch.device("cpu") if device is None else device
        if size_bytes < self._large_bytes or device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        self._lent_bytes += size_bytes
        block = self._idle_of(size_bytes)
        if block is None:
            block = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        lent: np.ndarray = block.numpy()[:]
        weakref.finalize(lent, self._take_back, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _idle_of(self, size_bytes: int) -> torch.Tensor | None:
        """Return an idle block of a size, which is idle no more."""
        for index, block in enumerate(self._idle):
            if len(block) == size_bytes:
                return self._idle.pop(index)
        return None

    def _take_back(self, block: torch.Tensor) -> None:
        """Store a block for later, unless enough are kept; other threads may call this at any time."""
        if sum(map(len, self._idle)) + len(block) <= self._lent_bytes:
            self._idle.append(block)
