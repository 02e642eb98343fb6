"""Rows of memory that envs are stepped on, and the moments that lie in them; of one env, or of all those of a pool.

Who steps the rows is decided by what derives from `RowMemory`: `one_row` and `rows`.

Conventions
    slot  number of a moment, see `buffers`: the step of slot t reads ``inputs[t]`` and writes ``nexts[t]``; the root
          that follows is ``roots[t + 1]``.
    ring  an entry over all slots, shape (slots, *batch, *leaf).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from envkit.batched.exchange.buffer_reuse import LentMemory
from envkit.data.paths import Axes, Path, node_of, shaped
from envkit.specs.membership import has_array

__all__ = ["Leaves", "Moment", "Rings", "RowMemory", "can_wait"]


Leaves = dict[Path, torch.Tensor]
_SMALL_BYTES = (
    2**18
)  # NumPy copies what is small in half of the time, torch what is large with several threads


class Moment(Leaves):
    """The entries of one moment, views of a ring."""

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


class RowMemory:
    """Rows of memory over a few moments.

    Attributes:
        has_begun: every row was reset once.
        newest_is_next: for each row, whether what is known now lies in `next` rather than at the root.
        memory: where results of many steps are recorded.

    Args:
        rings: where the moments lie.
        slots: the moment that the next step of each row reads and writes.
        batch_size: axes of every entry behind that of its slots.
        node_axes: of nested entries that have batch axes of their own.
    """

    has_begun = False

    def __init__(
        self,
        rings: Rings,
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

    def any_done(self, slot: int, flags: Sequence[Path]) -> bool:
        """Say whether one of some flags is set in the outcome of a step."""
        following = self.nexts[slot]
        return any(bool(following[path].any()) for path in flags)

    def follow(self, slot: int) -> None:
        """Have the root that follows a step in which nothing has ended show what that gave."""
        following = self.nexts[slot]
        for path, root in self.roots[slot + 1].items():
            root.copy_(following[path])

    def looks_like(self, root: Any) -> bool:
        """Say whether a root has all the entries of one, in the form of their rows."""
        found = ((root.get(path, None), rows) for path, rows in self.roots[0].items())
        return all(
            isinstance(value, torch.Tensor)
            and value.dtype == rows.dtype
            and value.shape == rows.shape
            for value, rows in found
        )

    def deliver(self, moment: Moment) -> TensorDict:
        """Copy rows of memory into a TensorDict of its own, where data is delivered."""
        device, owned = self._device, {}
        for path, tensor in moment.copies(device, later=self._non_blocking).items():
            node = owned if len(path) == 1 else node_of(owned, path)
            node[path[-1]] = tensor
        td = TensorDict._new_unsafe(owned, batch_size=self.batch_size, device=device)
        return shaped(td, self.node_axes) if self.node_axes else td

    def deliver_to(self, device: torch.device | None, *, non_blocking: bool) -> None:
        """Copy what comes out to ``device`` from now on."""
        self._device, self._non_blocking = device, can_wait(device, non_blocking)

    @contextmanager
    def recording(self, leave: Callable[[], None]) -> Iterator[None]:
        """Hold the slots for a run; ``leave`` saves what it has left there before anybody else writes into them."""
        self._leave = leave
        try:
            yield
        finally:
            self._leave = None

    def hand_over(self) -> None:
        """Have a run that holds the slots save what it has left there: its policy uses the env for something else."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


def _by_slot(region: Leaves, slots: int) -> list[Moment]:
    """Turn leaves with a leading slot axis into the moments of each slot."""
    return [
        Moment({path: tensor[slot] for path, tensor in region.items()}) for slot in range(slots)
    ]


def can_wait(device: torch.device | None, non_blocking: bool) -> bool:
    """Say whether a copy to ``device`` may end after the call: what reads it there is queued too."""
    return non_blocking and device is not None and device.type == "cuda"
