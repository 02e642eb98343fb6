"""Rows of several pools side by side, so that a whole rollout of a `MixedEnv` of pools is recorded on rows.

Each pool steps its own rows. All are woken before any is waited for, and what they made is copied into memory that the
recorder reads. The data is that of stepping one by one (`tests/batched/test_mixed_rows.py`).

Conventions
    part  a pool: its exchange, and the rows that it has in the mixed env.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.batched.exchange.memory import Moment, RowMemory, rings_of
from envkit.batched.exchange.shared_memory import ActionRows, BufferExchange, Round
from envkit.batched.members import RowVersions
from envkit.batched.metadata import EnvLeaves
from envkit.data.paths import Path
from envkit.specs.inputs import has_array

Copies = Sequence[tuple[np.ndarray, np.ndarray]]  # to, from


class _Slot(NamedTuple):
    """What is copied between the memory of a part and that of all: before a step, after it, and for the root that follows."""

    inputs: Copies
    nexts: Copies
    roots: Copies


class MixedRows(RowMemory):
    """The rows of some exchanges, in separate memory; see `RowMemory`.

    Attributes:
        has_failed: a part could not be stepped, so that it is not known what all show.

    Args:
        env: the mixed env, whose data has no states but the versions of its rows.
        exchanges: of its members, in order.
        versions: counted with each step and reset.
        keep: called where a run is left: the members have other newest results.
    """

    def __init__(
        self,
        env: Any,
        exchanges: Sequence[BufferExchange],
        versions: RowVersions,
        keep: Callable[[MixedRows], None],
    ):
        env_leaves, num_rows = EnvLeaves(env), env.batch_size[0]
        slots = min(exchange.num_slots for exchange in exchanges)
        super().__init__(
            rings_of(env_leaves, slots, "action"),
            env_leaves.paths("action"),
            np.zeros(num_rows, np.int64),
            env.batch_size,
            {},
            None,
        )
        self.has_large_rows, self.has_failed = False, False
        self.exchanges, self._versions, self._keep = tuple(exchanges), versions, keep
        self._actions = ActionRows([one for part in exchanges for one in part.metadata])
        self._flags = [
            [moment[path].numpy() for path in env_leaves.paths("done")] for moment in self.nexts
        ]
        self._all = torch.ones(num_rows, dtype=torch.bool, device="cpu")
        self._parts: list[tuple[BufferExchange, list[_Slot]]] = []
        start = 0
        for exchange in exchanges:
            rows = slice(start, start := start + len(exchange.metadata))
            copies = [self._slot_of(exchange, rows, slot) for slot in range(slots)]
            self._parts.append((exchange, copies))

    @staticmethod
    def can_hold(exchange: BufferExchange) -> bool:
        """Check whether a part has actions as its only inputs, and small entries that NumPy knows."""
        entries = [leaf for ring in exchange.rings for leaf in ring.values()]
        is_plain = exchange.rings.inputs.keys() == exchange.actions and not exchange.node_axes
        return is_plain and not exchange.has_large_rows and all(map(has_array, entries))

    def _slot_of(self, exchange: BufferExchange, rows: slice, slot: int) -> _Slot:
        def paired(theirs: Moment, ours: Moment) -> list[tuple[np.ndarray, np.ndarray]]:
            return [(leaf.numpy(), ours[path][rows].numpy()) for path, leaf in theirs.items()]

        nexts = paired(exchange.nexts[slot], self.nexts[slot])
        roots = paired(exchange.roots[slot + 1], self.roots[slot + 1])
        return _Slot(
            paired(exchange.inputs[slot], self.inputs[slot]),
            [(ours, theirs) for theirs, ours in nexts],
            [(ours, theirs) for theirs, ours in roots],
        )

    def fill(self, inputs: TensorDictBase | Mapping[Path, Any], mask: None, slot: int) -> None:
        """Write the actions of a step into a slot; see `BufferExchange.fill`."""
        for path, rows in self.inputs[slot].items():
            self._actions.write(path, inputs.get(path, None), rows)

    def check_actions(self, rows: Mapping[Path, np.ndarray]) -> None:
        """Check actions that were written into the rows of a slot."""
        for path, value in rows.items():
            self._actions.check(path, value)

    def select_all(self) -> None:
        """Select all rows for the next steps; a run that is under way is ended."""
        self.has_failed = False
        for exchange in self.exchanges:
            exchange.select_all()

    @contextmanager
    def recording(self, leave: Callable[[], None]) -> Generator[None]:
        """Hold the slots of all parts for a run, which a policy that uses one of them meanwhile makes leave them."""

        def leave_all() -> None:
            leave()
            self._keep(self)

        with ExitStack() as held:
            for exchange in self.exchanges:
                held.enter_context(exchange.recording(leave_all))
            yield

    def wake(
        self, root: TensorDictBase | None, rows: None, *, advance: bool, slot: int
    ) -> tuple[list[Round], bool, int]:
        """Begin the step of a slot in all parts."""
        self._versions.count(self._all)
        sent: list[Round] = []
        self.has_failed = True  # until all have been waited for
        for exchange, slots in self._parts:
            for theirs, ours in slots[slot].inputs:
                np.copyto(theirs, ours)
            sent.append(exchange.wake(None, None, advance=advance, slot=slot))
        return sent, advance, slot

    def wait(self, sent: tuple[list[Round], bool, int]) -> None:
        """Wait for the step of all parts, also if one fails."""
        rounds, advance, slot = sent
        failed: Exception | None = None
        for (exchange, slots), begun in zip(self._parts, rounds, strict=True):
            try:
                exchange.wait(begun)
            except Exception as error:
                failed = failed or error
                continue
            for ours, theirs in slots[slot].nexts:
                np.copyto(ours, theirs)
            for ours, theirs in slots[slot].roots if advance else ():
                np.copyto(ours, theirs)
        if failed is not None:
            raise failed
        self.has_failed = False
        self._versions.write(self.nexts[slot])
        if advance:
            ended = np.logical_or.reduce([flags[:, 0] for flags in self._flags[slot]])
            if ended.any():
                self._versions.count(torch.from_numpy(ended))
            self._versions.write(self.roots[slot + 1])
