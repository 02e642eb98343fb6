"""A whole non-stop rollout over shared rows, each step in a slot of its own.

The sub-envs write the roots and outcomes of steps side by side, in two halves of the slots that the exchange has: what
they wrote into one is copied out at once, while they write into the other. No TensorDict is built for a step but the one
the policy sees, and none of what the policy sees is ever overwritten. One that acts on rows sees no
TensorDict, but the rows themselves, and keeps none of them; one that acts on leaves sees copies of those it reads.

Conventions
    window  steps that lie side by side in one half of the slots; ``slots`` says where.
    time    leading axis in memory; the result shows it last.
    others  root entries that neither env nor action keys account for: what the policy writes beside
            its action, or what the caller put there. They are carried as `step_mdp` would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.batched.exchange.record import Record, copied, stacked
from envkit.batched.exchange.rows import BufferExchange
from envkit.data.paths import Path, tensordict_of
from envkit.data.transition import leaves
from envkit.env.on_leaves import ActsOnLeaves, LeavesPolicy
from envkit.env.policy import ActsOnRows, Policy, RowsPolicy

__all__ = ["record_plain", "record_random", "record_rollout"]


def record_rollout(
    exchange: BufferExchange,
    root: TensorDictBase,
    act: Policy,
    steps: int,
    *,
    action_paths: frozenset[Path],
    device: Any,
) -> tuple[TensorDict | None, TensorDictBase | None]:
    """Act and step ``steps`` times, resetting what is done but after the last step.

    Args:
        exchange: rows shared with the sub-envs.
        root: where to start, nothing in it done; it is not changed.
        act: the policy.
        steps: length of the rollout.
        action_paths: entries that are not carried from one step to the next.
        device: where the result is.

    Returns:
        Transitions of batch size (*batch, steps), and None. Where the policy writes under ``next``
        or masks a step, which is obeyed step by step only, recording ends: the transitions before it
        (None if there are none), and the acted root that is to be stepped next.
    """
    record = Record(exchange, root, steps, device)
    size, axes = exchange.batch_size, exchange.node_axes
    written: dict[Path, list[torch.Tensor]] = {}
    others = {path: value for path, value in leaves(root) if path not in record.roots}
    for start, slots in record.windows():
        for step, slot in enumerate(slots, start):
            seen = record.take_root(slot)
            td = act(tensordict_of({**seen, **others}, size, device, axes))
            others = {}
            for path, value in leaves(td):
                known = seen.get(path)
                if known is None:
                    if path[0] == "next" or path[-1] == rules.STEP:
                        record.keep_seen(start, step + 1 - start)
                        record.take_nexts(start, range(slots.start, slot))
                        return record.first(step, written), td
                    written.setdefault(path, []).append(value)
                    if path not in action_paths and path[-1] != rules.RESET:
                        others[path] = value
                elif value is not known:
                    known.copy_(value)  # the policy has put another value in its place
            exchange.slot = slot
            exchange.wait(exchange.wake(td, exchange.fill(td, None), advance=step < steps - 1))
        record.keep_seen(start, len(slots))
        record.take_nexts(start, slots)
    return record.result(stacked(written, steps)), None


def record_plain(
    exchange: BufferExchange,
    root: TensorDictBase,
    act: Policy,
    steps: int,
    *,
    action_paths: frozenset[Path],
    device: Any,
) -> TensorDict | None:
    """Do what `record_rollout` does, where the policy needs no TensorDict: none is made for a step.

    Such is one that acts on rows, or on leaves, as a plain function and a plain TensorDictModule do.

    Returns:
        None, with nothing done, where the policy must see TensorDicts, reads what only they hold, or
        writes what is obeyed step by step only.
    """
    others = {path: value for path, value in leaves(root) if path not in exchange.roots[0]}
    is_plain = all(_is_carried(path, value) for path, value in others.items())
    if not is_plain or action_paths != exchange.inputs[0].keys():
        return None
    actor: _OnRows | _OnLeaves | None = None
    if isinstance(act, ActsOnLeaves):
        actor = _OnLeaves.fitting(act.on_leaves(root), exchange, {*others}, device)
    elif isinstance(act, ActsOnRows):
        actor = _OnRows.fitting(act.on_rows(root), exchange, steps)
    if actor is None:
        return None
    record = Record(exchange, root, steps, device)
    for start, slots in record.windows():
        for step, slot in enumerate(slots, start):
            exchange.slot = slot
            actor.act(step, slot)
            sent = exchange.wake(None, None, advance=step < steps - 1)
            record.catch_up()
            exchange.wait(sent)
        record.put_off(start, slots)
        actor.take(start, slots)
    record.catch_up()
    written = actor.written()
    kept = {
        path: value.expand(steps, *value.shape).clone()
        for path, value in others.items()
        if path not in written
    }
    return record.result({**kept, **written})


def _is_carried(path: Path, value: Any) -> bool:
    """Say whether a root entry of the caller's does no more than stay as it is."""
    is_plain = isinstance(value, torch.Tensor) and not value.requires_grad
    return is_plain and path[0] != "next" and path[-1] not in (rules.STEP, rules.RESET)


class _OnRows:
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
    ) -> _OnRows | None:
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
        return cls(policy, exchange, steps) if fits and not _asks(writes) else None

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
            ring = self._exchange.input_ring[path]
            actions[start : start + len(slots)] = ring[slots.start : slots.stop]

    def written(self) -> dict[Path, torch.Tensor]:
        """Give all that was written, time in front."""
        entries = {**self._written, **self._actions}
        return {path: torch.from_numpy(values) for path, values in entries.items()}


class _OnLeaves:
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
    ) -> _OnLeaves | None:
        """Make one, unless it reads more than lies in rows, or writes no action, or more than may stand beside rows."""
        if policy is None:
            return None
        roots, writes = exchange.roots[0].keys(), policy.writes
        fits = roots >= set(policy.reads) and exchange.inputs[0].keys() <= set(writes)
        apart = not any(_overlap(path, known) for path in writes for known in roots)
        nested = any(path != known and _overlap(path, known) for path in writes for known in others)
        return (
            cls(policy, exchange, device)
            if fits and apart and not nested and not _asks(writes)
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
        self._exchange.fill(written, None)

    def take(self, start: int, slots: range) -> None:
        """Nothing: what was seen and given is kept as it is."""

    def written(self) -> dict[Path, torch.Tensor]:
        """Give what was seen, maybe changed in place, and all that was written, time in front."""
        seen = {path: torch.stack(values).detach() for path, values in self._seen.items()}
        return seen | stacked(self._given, self._count)


def _asks(writes: Iterable[Path]) -> bool:
    """Say whether a policy writes what is obeyed step by step only."""
    return any(path[0] == "next" or path[-1] in (rules.STEP, rules.RESET) for path in writes)


def _overlap(one: Path, other: Path) -> bool:
    """Say whether two entries are the same, or one stands below the other."""
    return all(a == b for a, b in zip(one, other, strict=False))


def record_random(
    exchange: BufferExchange,
    root: TensorDictBase,
    actions: TensorDictBase,
    *,
    ended: Callable[[TensorDictBase], dict[Path, torch.Tensor]],
    device: Any,
) -> TensorDict:
    """Step with actions drawn beforehand; see `record_rollout`.

    Nobody looks at a root, so large ones do not pass through the rows: those that only repeat what a step made are
    copied out of its outcome.

    Args:
        actions: batch size (steps, *batch), all that the sub-envs take as input.
        ended: gives, by level, what of an outcome is to begin anew; no masks if nothing is.
    """
    steps, apart = len(actions), exchange.has_large_rows
    record = Record(exchange, root, steps, device, has_root_rows=not apart)
    drawn = dict(leaves(actions))
    for start, slots in record.windows():
        for path, ring in exchange.input_ring.items():
            ring[slots.start : slots.stop].copy_(drawn[path][start : start + len(slots)])
        for step, slot in enumerate(slots, start):
            exchange.slot = slot
            known = record.root_at(step) if apart else None
            sent = exchange.wake(known, None, advance=not apart and step < steps - 1)
            record.catch_up()
            exchange.wait(sent)
            if apart and step < steps - 1:
                size, axes = exchange.batch_size, exchange.node_axes
                made = tensordict_of(exchange.nexts[slot], size, None, axes)
                if masks := ended(made):
                    exchange.begin_episodes(None, masks)
                    exchange.select_all()
        record.put_off(start, slots)
    record.catch_up()
    others = {
        path: value.expand(steps, *value.shape).clone()
        for path, value in leaves(root)
        if path not in record.roots
    }
    return record.result({**others, **drawn})
