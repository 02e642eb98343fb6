"""The roots and outcomes of a rollout over shared rows: memory for all steps, filled window by window.

Conventions
    window  steps that lie side by side in one half of the slots; ``slots`` says where.
    time    leading axis in memory; the result shows it last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from envkit.batched.exchange.rows import BufferExchange
from envkit.batched.exchange.shared_rows import SharedRows
from envkit.data.paths import Path, as_key, tensordict_of
from envkit.errors import RolloutError

__all__ = ["Record", "Stacks", "copied", "stacked"]

Leaves = Mapping[Path, torch.Tensor]


def copied(rows: torch.Tensor, device: Any) -> torch.Tensor:
    """Copy rows to where data is delivered."""
    is_here = device is None or device.type == "cpu"
    return rows.clone() if is_here else rows.to(device, copy=True)


def stacked(written: Mapping[Path, list[torch.Tensor]], steps: int) -> dict[Path, torch.Tensor]:
    """Stack what was written in steps, time in front.

    Raises:
        RolloutError: an entry was not written in all of them.
    """
    for path, values in written.items():
        if len(values) != steps:
            raise RolloutError(
                f"the policy wrote {as_key(path)!r} in {len(values)} of {steps} steps, so they "
                "cannot be stacked. Write it in every step, or pass return_contiguous=False."
            )
    return {path: torch.stack(values) for path, values in written.items()}


class Stacks(NamedTuple):
    """Memory for the roots and outcomes of all steps, by path: shape (steps, rows, *leaf)."""

    roots: Leaves
    nexts: Leaves

    @classmethod
    def empty(cls, exchange: BufferExchange, steps: int, device: Any) -> Stacks:
        """Allocate them."""
        exchange.memory.begin()
        regions = (
            {
                path: exchange.memory.empty((steps, *rows.shape), rows.dtype, device)
                for path, rows in region.items()
            }
            for region in (exchange.roots[0], exchange.nexts[0])
        )
        return cls(*regions)

    def first(self, count: int) -> Stacks:
        """View the first steps."""
        return Stacks(*({path: stack[:count] for path, stack in part.items()} for part in self))

    def result(self, others: Leaves, rows: SharedRows, steps: int, device: Any) -> TensorDict:
        """Show everything, and what was written beside it, with time as the last batch axis."""
        following = {("next", *path): stack for path, stack in self.nexts.items()}
        stacks = {**self.roots, **others, **following}
        batch = rows.batch_size
        last = {path: stack.movedim(0, len(batch)) for path, stack in stacks.items()}
        return tensordict_of(last, torch.Size((*batch, steps)), device, rows.node_axes)


class Record:
    """The roots and outcomes of a rollout, time-major, filled window by window.

    Args:
        exchange: rows shared with the sub-envs.
        root: where the rollout starts.
        stacks: where it is recorded.
        has_root_rows: every root lies in its slot. Otherwise, where a window is one step, only the roots of episodes
            that begin anew do.
    """

    def __init__(
        self,
        exchange: SharedRows,
        root: TensorDictBase,
        stacks: Stacks,
        device: Any,
        *,
        has_root_rows: bool = True,
    ):
        self._stacks = stacks
        self.roots, self._nexts = stacks
        self.steps = len(next(iter(stacks.nexts.values())))
        self._exchange = exchange
        self._device = device
        self._seen: dict[Path, list[torch.Tensor]] = {path: [] for path in self.roots}
        self._left: tuple[int, range] | None = (
            None  # a window whose outcomes are still in the slots
        )
        self._begun: torch.Tensor | None = None  # rows that began anew after it
        self._has_root_rows = has_root_rows
        for path, stack in self.roots.items():
            stack[0].copy_(root.get(as_key(path)).detach())  # rows would keep a graph for good
            if has_root_rows:
                exchange.roots[0][path].copy_(stack[0])

    def windows(self) -> Iterator[tuple[int, range]]:
        """Give first step and slots of each window, one half of all slots after the other; the first root is in place."""
        exchange, half = self._exchange, self._exchange.num_slots // 2
        for start in range(0, self.steps, half):
            first = start % (2 * half)
            if self._has_root_rows and start and not first:
                for path, rows in exchange.roots[0].items():
                    rows.copy_(exchange.roots[2 * half][path])
            yield start, range(first, first + min(half, self.steps - start))

    def take_root(self, slot: int) -> dict[Path, torch.Tensor]:
        """Copy the root of a step out of its slot, so that whoever sees it may keep it."""
        seen = {path: copied(row, self._device) for path, row in self._exchange.roots[slot].items()}
        for path, value in seen.items():
            self._seen[path].append(value)
        return seen

    @torch.no_grad()
    def keep_seen(self, start: int, count: int) -> None:
        """Record the roots of a window as they were seen, and maybe changed in place."""
        for path, values in self._seen.items():
            torch.stack(values, out=self.roots[path][start : start + count])
            values.clear()

    def root_at(self, step: int) -> TensorDict:
        """Show the root of a step, which `catch_up` may have to write yet."""
        shown = {path: stack[step] for path, stack in self.roots.items()}
        exchange = self._exchange
        return tensordict_of(shown, exchange.batch_size, self._device, exchange.node_axes)

    def put_off(self, start: int, slots: range) -> None:
        """Leave what came out of a window that nobody has seen to `catch_up`, before the window after the next."""
        self._left = start, slots
        if not self._has_root_rows:
            self._begun = torch.from_numpy(~self._exchange.newest_is_next)

    def catch_up(self) -> None:
        """Copy what was put off: outcomes, and the roots that followed. A step of the next window may be under way."""
        if self._left is None:
            return
        (start, slots), self._left = self._left, None
        self.take_nexts(start, slots)
        following = slice(start + 1, start + 1 + len(slots))
        for path, stack in self.roots.items():
            kept = stack[following]  # one less at the end: nothing follows the last step
            rows = slice(slots.start + 1, slots.start + 1 + len(kept))
            if self._begun is None:
                kept.copy_(self._exchange.rings.roots[path][rows])
            elif len(kept):
                kept[0].copy_(self._exchange.rings.nexts[path][slots.start])
                fresh = self._exchange.rings.roots[path][rows.start, self._begun]
                kept[0, self._begun] = fresh.to(self._device)

    def take_nexts(self, start: int, slots: range) -> None:
        """Copy the outcomes of a window."""
        for path, stack in self._nexts.items():
            ring = self._exchange.rings.nexts[path]
            stack[start : start + len(slots)].copy_(ring[slots.start : slots.stop])

    def first(self, count: int, written: Mapping[Path, list[torch.Tensor]]) -> TensorDict | None:
        """Show the first ``count`` steps, None if that is 0, with what was written in them."""
        if not count:
            return None
        kept = {path: values[:count] for path, values in written.items()}
        others = stacked({path: values for path, values in kept.items() if values}, count)
        stacks = self._stacks.first(count)
        return stacks.result(others, self._exchange, count, self._device)

    def result(self, others: Leaves) -> TensorDict:
        """Show everything with time as the last batch axis."""
        return self._stacks.result(others, self._exchange, self.steps, self._device)
