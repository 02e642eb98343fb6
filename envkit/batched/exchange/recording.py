"""A whole non-stop rollout over shared rows, each step in a slot of its own.

The sub-envs write the roots and outcomes of up to `BufferExchange.num_slots` steps side by side;
what they wrote is copied out once for all of them. No TensorDict is built for a step but the one
the policy sees, and none of what the policy sees is ever overwritten. A policy that acts on rows sees
no TensorDict, but the rows themselves, and keeps none of them.

Conventions
    window  steps that lie in the slots at the same time.
    time    leading axis in memory; the result shows it last.
    others  root entries that neither env nor action keys account for: what the policy writes beside
            its action, or what the caller put there. They are carried as `step_mdp` would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.batched.exchange.rows import BufferExchange
from envkit.data.paths import Path, as_key, tensordict_of
from envkit.data.transition import leaves
from envkit.env.policy import ActsOnRows, Policy, RowsPolicy
from envkit.errors import RolloutError

__all__ = ["record_on_rows", "record_random", "record_rollout"]

Leaves = Mapping[Path, torch.Tensor]


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
    record = _Record(exchange, root, steps, device)
    written: dict[Path, list[torch.Tensor]] = {}
    others = {path: value for path, value in leaves(root) if path not in record.roots}
    for start, count in record.windows():
        for slot in range(count):
            seen = record.take_root(start + slot, slot)
            td = act(tensordict_of({**seen, **others}, exchange.batch_size, device))
            others = {}
            for path, value in leaves(td):
                known = seen.get(path)
                if known is None:
                    if path[0] == "next" or path[-1] == rules.STEP:
                        record.take_nexts(start, slot)
                        return record.first(start + slot, written), td
                    written.setdefault(path, []).append(value)
                    if path not in action_paths and path[-1] != rules.RESET:
                        others[path] = value
                elif value is not known:
                    known.copy_(value)  # the policy has put another value in its place
            exchange.slot = slot
            exchange.fill(td, None)
            exchange.wait(exchange.wake(td, advance=start + slot < steps - 1))
        record.take_nexts(start, count)
    return record.result(_stacked(written, steps)), None


def record_on_rows(
    exchange: BufferExchange,
    root: TensorDictBase,
    act: Policy,
    steps: int,
    *,
    action_paths: frozenset[Path],
    device: Any,
) -> TensorDict | None:
    """Do what `record_rollout` does, with a policy that acts on rows: no TensorDict is made for a step.

    Returns:
        None, with nothing done, where the policy must see TensorDicts, reads what only they hold, or
        writes what is obeyed step by step only.
    """
    policy = act.on_rows(root) if isinstance(act, ActsOnRows) else None
    if policy is None or not _fits_rows(policy, exchange, action_paths):
        return None
    others = {path: value for path, value in leaves(root) if path not in exchange.roots[0]}
    if not all(_is_carried(path, value) for path, value in others.items()):
        return None
    record = _Record(exchange, root, steps, device)
    written = {path: np.empty((steps, *form), kind) for path, (form, kind) in policy.writes.items()}
    moments = [
        dict(zip(written, rows, strict=True)) for rows in zip(*written.values(), strict=True)
    ]
    roots = [
        {path: rows[path].numpy() for path in policy.reads}
        for rows in exchange.roots[: exchange.num_slots]
    ]
    for start, count in record.windows():
        for slot in range(count):
            out = moments[start + slot]
            policy(roots[slot], out)
            exchange.slot = slot
            exchange.fill_actions({path: out[path] for path in action_paths})
            exchange.wait(exchange.wake(advance=start + slot < steps - 1))
        record.take_roots(start, count)
        record.take_nexts(start, count)
    kept = {
        path: value.expand(steps, *value.shape).clone()
        for path, value in others.items()
        if path not in written
    }
    return record.result(
        {**kept, **{path: torch.from_numpy(all_) for path, all_ in written.items()}}
    )


def _fits_rows(policy: RowsPolicy, exchange: BufferExchange, action_paths: frozenset[Path]) -> bool:
    """Say whether a policy reads and writes no more than what lies in rows, or is recorded beside them."""
    roots, writes = exchange.roots[0], policy.writes.keys()
    return (
        roots.keys() >= set(policy.reads)
        and writes >= action_paths == exchange.inputs[0].keys()
        and roots.keys().isdisjoint(writes)
        and all(path[0] != "next" and path[-1] not in (rules.STEP, rules.RESET) for path in writes)
    )


def _is_carried(path: Path, value: Any) -> bool:
    """Say whether a root entry of the caller's does no more than stay as it is."""
    is_plain = isinstance(value, torch.Tensor) and not value.requires_grad
    return is_plain and path[0] != "next" and path[-1] not in (rules.STEP, rules.RESET)


def record_random(
    exchange: BufferExchange, root: TensorDictBase, actions: TensorDictBase, *, device: Any
) -> TensorDict:
    """Step with actions drawn beforehand; see `record_rollout`.

    Args:
        actions: batch size (steps, *batch), all that the sub-envs take as input.
    """
    steps = len(actions)
    record = _Record(exchange, root, steps, device)
    drawn = dict(leaves(actions))
    for start, count in record.windows():
        for path, ring in exchange.input_ring.items():
            ring[:count].copy_(drawn[path][start : start + count])
        for slot in range(count):
            exchange.slot = slot
            exchange.wait(exchange.wake(advance=start + slot < steps - 1))
        record.take_roots(start, count)
        record.take_nexts(start, count)
    others = {
        path: value.expand(steps, *value.shape).clone()
        for path, value in leaves(root)
        if path not in record.roots
    }
    return record.result({**others, **drawn})


def _stacked(written: Mapping[Path, list[torch.Tensor]], steps: int) -> dict[Path, torch.Tensor]:
    for path, values in written.items():
        if len(values) != steps:
            raise RolloutError(
                f"the policy wrote {as_key(path)!r} in {len(values)} of {steps} steps, so they "
                "cannot be stacked. Write it in every step, or pass return_contiguous=False."
            )
    return {path: torch.stack(values) for path, values in written.items()}


class _Record:
    """The roots and outcomes of a rollout, time-major, filled window by window."""

    def __init__(self, exchange: BufferExchange, root: TensorDictBase, steps: int, device: Any):
        self.roots, self._nexts = (
            {
                path: torch.empty(steps, *rows.shape, dtype=rows.dtype, device=device)
                for path, rows in region.items()
            }
            for region in (exchange.roots[0], exchange.nexts[0])
        )
        self._steps = steps
        self._exchange = exchange
        self._device = device
        self._moments = [stack.unbind(0) for stack in self.roots.values()]
        for path, rows in exchange.roots[0].items():
            rows.copy_(root.get(as_key(path)))

    def windows(self) -> Iterator[tuple[int, int]]:
        """Give first step and length of each window; the roots of its slot 0 are in place."""
        exchange, size = self._exchange, self._exchange.num_slots
        for start in range(0, self._steps, size):
            if start:
                for path, rows in exchange.roots[0].items():
                    rows.copy_(exchange.roots[size][path])
            yield start, min(size, self._steps - start)

    def take_root(self, step: int, slot: int) -> dict[Path, torch.Tensor]:
        """Copy the root of a step out of its slot, so that whoever sees it may keep it."""
        rows = self._exchange.roots[slot]
        return {
            path: moments[step].copy_(row)
            for (path, row), moments in zip(rows.items(), self._moments, strict=True)
        }

    def take_roots(self, start: int, count: int) -> None:
        """Copy the roots of a window that nobody has seen."""
        for path, stack in self.roots.items():
            stack[start : start + count].copy_(self._exchange.root_ring[path][:count])

    def take_nexts(self, start: int, count: int) -> None:
        """Copy the outcomes of a window."""
        for path, stack in self._nexts.items():
            stack[start : start + count].copy_(self._exchange.next_ring[path][:count])

    def first(self, count: int, written: Mapping[Path, list[torch.Tensor]]) -> TensorDict | None:
        """Show the first ``count`` steps, None if that is 0, with what was written in them."""
        if not count:
            return None
        kept = {path: values[:count] for path, values in written.items()}
        others = _stacked({path: values for path, values in kept.items() if values}, count)
        self.roots, self._nexts = (
            {path: stack[:count] for path, stack in region.items()}
            for region in (self.roots, self._nexts)
        )
        self._steps = count
        return self.result(others)

    def result(self, others: Leaves) -> TensorDict:
        """Show everything with time as the last batch axis."""
        batch = self._exchange.batch_size
        following = {("next", *path): stack for path, stack in self._nexts.items()}
        stacks = {**self.roots, **others, **following}
        last = {path: stack.movedim(0, len(batch)) for path, stack in stacks.items()}
        return tensordict_of(last, torch.Size((*batch, self._steps)), self._device)
