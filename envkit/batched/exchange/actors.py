"""What acts in a run over shared rows without a TensorDict: on the rows themselves, or on copies of some leaves.

Conventions
    slot    where the root lies that is acted on, and where the action goes, see `shared_rows`.
    others  root entries of the caller's that neither the sub-envs nor the policy account for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.batched.exchange.record import copied, stacked
from envkit.batched.exchange.rows import BufferExchange
from envkit.data.paths import Path
from envkit.env.on_leaves import ActsOnLeaves, LeavesPolicy
from envkit.env.policy import ActsOnRows, Policy, RowsPolicy

__all__ = ["Actor", "actor_for", "asks"]


def actor_for(
    exchange: BufferExchange,
    root: TensorDictBase,
    act: Policy,
    steps: int,
    *,
    others: set[Path],
    device: Any,
) -> Actor | None:
    """Make what acts in a run; None where the policy must see TensorDicts, or asks for more than rows can do.

    Such reads what only TensorDicts hold, or writes what is obeyed step by step only.
    """
    if isinstance(act, ActsOnLeaves):
        return OnLeaves.fitting(act.on_leaves(root), exchange, others, device)
    if isinstance(act, ActsOnRows):
        return OnRows.fitting(act.on_rows(root), exchange, steps)
    return None


class OnRows:
    """A policy that reads the rows themselves and writes its actions there; it keeps none of them."""

    def __init__(self, policy: RowsPolicy, exchange: BufferExchange, steps: int):
        self._policy, self._exchange = policy, exchange
        self._written = {
            path: np.empty((steps, *shape), dtype) for path, (shape, dtype) in policy.writes.items()
        }
        self._actions = {path: self._written.pop(path) for path in exchange.inputs[0]}
        count = min(steps, exchange.num_slots)
        self._roots = [
            {path: exchange.roots[slot][path].numpy() for path in policy.reads}
            for slot in range(count)
        ]
        self._inputs = [
            {path: rows.numpy() for path, rows in exchange.inputs[slot].items()}
            for slot in range(count)
        ]

    @classmethod
    def fitting(
        cls, policy: RowsPolicy | None, exchange: BufferExchange, steps: int
    ) -> OnRows | None:
        """Make one, unless it reads or writes more than lies in rows, or is recorded beside them."""
        if policy is None:
            return None
        roots, inputs, writes = exchange.roots[0].keys(), exchange.inputs[0], policy.writes
        is_action = [
            path in writes
            and writes[path][0] == rows.shape
            and torch.from_numpy(np.empty(0, writes[path][1])).dtype == rows.dtype
            for path, rows in inputs.items()
        ]
        fits = roots >= set(policy.reads) and roots.isdisjoint(writes) and all(is_action)
        return cls(policy, exchange, steps) if fits and not asks(writes) else None

    def act(self, step: int, slot: int) -> None:
        """Act on the root of a slot."""
        inputs = self._inputs[slot]
        out = inputs
        if self._written:
            out = {**inputs, **{path: rows[step] for path, rows in self._written.items()}}
        self._policy(self._roots[slot], out)
        self._exchange.check_actions(inputs)

    def take(self, start: int, slots: range) -> None:
        """Copy the actions of a window."""
        for path, actions in self._actions.items():
            ring = self._exchange.rings.inputs[path]
            actions[start : start + len(slots)] = ring[slots.start : slots.stop]

    def entries(self) -> dict[Path, list[torch.Tensor]]:
        """Nothing: rows are looked at when all is done."""
        return {}

    def written(self) -> dict[Path, torch.Tensor]:
        """Give all that was written, time in front."""
        entries = {**self._written, **self._actions}
        return {path: torch.from_numpy(values) for path, values in entries.items()}


class OnLeaves:
    """A policy that is called with tensors, which it may keep."""

    def __init__(self, policy: LeavesPolicy, exchange: BufferExchange, device: Any):
        self._act, self._reads, self._device = policy.act, policy.reads, device
        self._exchange = exchange
        self._seen: dict[Path, list[torch.Tensor]] = {path: [] for path in policy.reads}
        self._given: dict[Path, list[torch.Tensor]] = {}
        self._count = 0

    @classmethod
    def fitting(
        cls, policy: LeavesPolicy | None, exchange: BufferExchange, others: set[Path], device: Any
    ) -> OnLeaves | None:
        """Make one, unless it reads more than lies in rows, or writes no action, or more than may stand beside rows."""
        if policy is None:
            return None
        roots, writes = exchange.roots[0].keys(), policy.writes
        fits = roots >= set(policy.reads) and exchange.inputs[0].keys() <= set(writes)
        apart = not any(_overlap(path, known) for path in writes for known in roots)
        nested = any(path != known and _overlap(path, known) for path in writes for known in others)
        return (
            cls(policy, exchange, device)
            if fits and apart and not nested and not asks(writes)
            else None
        )

    def act(self, step: int, slot: int) -> None:
        """Act on a copy of the root of a slot."""
        rows = self._exchange.roots[slot]
        given = [copied(rows[path], self._device) for path in self._reads]
        written = self._act(given)
        if self._device is not None:
            written = {path: value.to(self._device) for path, value in written.items()}
        for path, value in zip(self._reads, given, strict=True):
            self._seen[path].append(value)
        for path, value in written.items():
            self._given.setdefault(path, []).append(value)
        self._count += 1
        self._exchange.fill(written, None, slot)

    def take(self, start: int, slots: range) -> None:
        """Nothing: what was seen and given is kept as it is."""

    def entries(self) -> dict[Path, list[torch.Tensor]]:
        """Give what was seen and given so far, a value for each step."""
        return {**self._seen, **self._given}

    def written(self) -> dict[Path, torch.Tensor]:
        """Give what was seen, maybe changed in place, and all that was written, time in front."""
        seen = {path: torch.stack(values).detach() for path, values in self._seen.items()}
        return seen | stacked(self._given, self._count)


Actor = OnRows | OnLeaves


def asks(entries: Iterable[Path]) -> bool:
    """Say whether what is obeyed step by step only is among entries of a root."""
    return any(path[0] == "next" or path[-1] in (rules.STEP, rules.RESET) for path in entries)


def _overlap(one: Path, other: Path) -> bool:
    """Say whether two entries are the same, or one stands below the other."""
    return all(a == b for a, b in zip(one, other, strict=False))
