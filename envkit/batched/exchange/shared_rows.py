"""Rows in memory that sub-envs share with the batched env: their moments, and how inputs are written into them.

This module knows what lies where. Who steps the rows, and when, is decided by what derives from `SharedRows`.

Conventions
    slot  number of a moment, see `buffers`: the step of slot t reads ``inputs[t]`` and writes ``nexts[t]``; the root
          that follows is ``roots[t + 1]``.
    ring  an entry over all slots, shape (slots, rows, *leaf).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.batched.action_checks import ActionRows
from envkit.batched.metadata import EnvMetaData
from envkit.data.paths import Path, as_key, tensordict_of
from envkit.specs.inputs import ActionInput, require_input

__all__ = ["Rings", "SharedRows", "fill"]

Leaves = dict[Path, torch.Tensor]


class Rings(NamedTuple):
    """Inputs, roots and outcomes of some rows, by path."""

    inputs: Leaves
    roots: Leaves
    nexts: Leaves


class Input(NamedTuple):
    """Where an input of a step lies.

    Attributes:
        rows, memory: its rows, as a tensor and, if it has a rule, as an array.
        is_action: it is converted to what its spec says; all else must be that.
        rule: of an action, see `ActionRows.rule_of_all`.
    """

    path: Path
    rows: torch.Tensor
    memory: Any
    is_action: bool
    rule: ActionInput | None


class SharedRows:
    """Consecutive rows of a pool, all or a part.

    ``newest_is_next`` says, for each, whether what is known now lies in `next` rather than at the root.

    Args:
        rings: where their moments lie.
        slots: the moment that the next step of each row reads and writes; it is the same for all rows of a worker.
        metadata: of each row; they share one layout.
        first: number of the first row in the pool.
    """

    def __init__(
        self, rings: Rings, slots: np.ndarray, metadata: Sequence[EnvMetaData], *, first: int = 0
    ):
        model = metadata[0]
        self.range = range(first, first + len(metadata))
        self.batch_size = torch.Size((len(metadata), *model.batch_size))
        self.node_axes = model.node_axes()
        self.rings = rings
        self.num_slots = len(next(iter(rings.nexts.values())))
        self.inputs = _by_slot(rings.inputs, self.num_slots)
        self.roots = _by_slot(rings.roots, self.num_slots + 1)
        self.nexts = _by_slot(rings.nexts, self.num_slots)
        self.newest_is_next = np.zeros(len(metadata), bool)
        self.metadata = metadata
        self.slots = slots
        self._actions = ActionRows(metadata, first=first)
        self._filled = [
            [self._input(path, rows) for path, rows in inputs.items()] for inputs in self.inputs
        ]

    def _input(self, path: Path, rows: torch.Tensor) -> Input:
        rule = self._actions.rule_of_all(path)
        memory = None if rule is None else rows.numpy()
        return Input(path, rows, memory, path in self._actions.paths, rule)

    @property
    def slot(self) -> int:
        """The moment that the last step has read and written."""
        return int(self.slots[0])

    @slot.setter
    def slot(self, slot: int) -> None:
        self.slots.fill(slot)

    def looks_like(self, root: TensorDictBase) -> bool:
        """Say whether a root has all the entries of one, in the form of their rows."""
        found = ((root.get(as_key(path), None), rows) for path, rows in self.roots[0].items())
        return all(
            isinstance(value, torch.Tensor)
            and value.dtype == rows.dtype
            and value.shape == rows.shape
            for value, rows in found
        )

    def write(
        self,
        given: TensorDictBase | Mapping[Path, Any],
        slot: int,
        stepped: Sequence[int] | None = None,
    ) -> None:
        """Check the inputs of a step and write them into a slot.

        Args:
            given: tensors or arrays by path, of all these rows.
            slot: where.
            stepped: rows whose values matter; those of others may be anything. None: all.
        """
        for path, own, memory, is_action, rule in self._filled[slot]:
            value = given.get(path, None)
            found = None if rule is None else rule.values_of(value, own.shape)
            if found is not None:
                np.copyto(memory, found)
            elif is_action:
                self._actions.write(path, value, own, stepped)
            else:
                fill(own, value, path)

    def check_actions(self, rows: Mapping[Path, np.ndarray]) -> None:
        """Check actions that were written into the rows of a slot; see `write`."""
        for path, value in rows.items():
            self._actions.check(path, value)

    @torch.no_grad()
    def write_lost(self, lost: set[int], root: TensorDictBase | None) -> None:
        """Write `next` of rows that were lost, from the root of these rows; None where that lies in them too."""
        if root is None:
            root = tensordict_of(self.roots[self.slot], self.batch_size, None, self.node_axes)
        for row in (row - self.range.start for row in lost):
            outcome = self.metadata[0].lost_next(root[row])
            for path, tensor in self.nexts[self.slot].items():
                tensor[row].copy_(outcome.get(as_key(path)))


def _by_slot(region: Leaves, slots: int) -> list[Leaves]:
    """Turn leaves with a leading slot axis into one dict of leaves for each slot."""
    return [{path: tensor[slot] for path, tensor in region.items()} for slot in range(slots)]


def fill(rows: torch.Tensor, value: torch.Tensor | None, path: Path) -> None:
    """Write an input of the form of its rows, or say what is wrong with it."""
    require_input(as_key(path), value, rows.shape, rows.dtype)
    assert value is not None
    rows.copy_(value.detach() if value.requires_grad else value)
