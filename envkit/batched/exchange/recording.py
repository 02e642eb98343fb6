"""A whole non-stop rollout over shared rows, each step in a slot of its own.

The sub-envs write the roots and outcomes of steps side by side, in two halves of the slots that the exchange has: what
they wrote into one is copied out at once, while they write into the other. No TensorDict is built for a step but the one
the policy sees, and none of what the policy sees is ever overwritten. One that acts on rows sees no
TensorDict, but the rows themselves, and keeps none of them; one that acts on leaves sees copies of those it reads.

Conventions
    run     the steps of all rows, one after the other.
    window  steps that lie side by side in one half of the slots; ``slots`` says where.
    time    leading axis in memory; the result shows it last.
    others  root entries that neither env nor action keys account for: what the policy writes beside
            its action, or what the caller put there. They are carried as `step_mdp` would.
    asked   an acted root that is to be stepped next, where a run goes on step by step: the policy has written
            under ``next`` or masked the step, or has used the env itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.batched.exchange.actors import Actor, actor_for
from envkit.batched.exchange.record import Record, Stacks, stacked
from envkit.batched.exchange.rows import BufferExchange
from envkit.data.paths import Path, as_key, tensordict_of
from envkit.data.transition import leaves
from envkit.env.policy import Policy

__all__ = ["record_plain", "record_random", "record_rollout"]


class _TensorDictRun:
    """Steps of a policy that sees TensorDicts; they end where one is ``asked``, see the module."""

    def __init__(
        self,
        exchange: BufferExchange,
        root: TensorDictBase,
        act: Policy,
        stacks: Stacks,
        action_paths: frozenset[Path],
        device: Any,
    ):
        self.record = Record(exchange, root, stacks, device)
        self.asked: TensorDictBase | None = None
        self._exchange, self._act, self._device = exchange, act, device
        self._action_paths = action_paths
        self._written: dict[Path, list[torch.Tensor]] = {}
        self._others = {p: value for p, value in leaves(root) if p not in self.record.roots}
        self._count = 0
        self._at = 0, range(0)  # first step of the window, and its slots before the one acted in
        self._is_left = False

    def make(self) -> None:
        """Act and step."""
        exchange, record = self._exchange, self.record
        size, axes = exchange.batch_size, exchange.node_axes
        for start, slots in record.windows():
            for step, slot in enumerate(slots, start):
                seen = record.take_root(slot)
                self._at = start, range(slots.start, slot)
                td = self._act(tensordict_of({**seen, **self._others}, size, self._device, axes))
                if not self._take(td, seen) or self._is_left:
                    self.asked = td
                    record.keep_seen(start, step + 1 - start)
                    if not self._is_left:
                        self.leave()
                    return
                exchange.fill(td, None, slot)
                exchange.wait(exchange.wake(td, None, advance=step < record.steps - 1, slot=slot))
                self._count += 1
            record.keep_seen(start, len(slots))
            record.take_nexts(start, slots)

    def leave(self) -> None:
        """Take what steps have left in the slots; see `BufferExchange.recording`."""
        self.record.take_nexts(*self._at)
        self._is_left = True

    def _take(self, td: TensorDictBase, seen: dict[Path, torch.Tensor]) -> bool:
        """Keep what the policy has written, or say that it asks for what is obeyed step by step only."""
        self._others = {}
        for path, value in leaves(td):
            known = seen.get(path)
            if known is None:
                if path[0] == "next" or path[-1] == rules.STEP:
                    return False
                self._written.setdefault(path, []).append(value)
                if path not in self._action_paths and path[-1] != rules.RESET:
                    self._others[path] = value
            elif value is not known:
                self._put(path, value, known)
        return True

    def _put(self, path: Path, value: Any, known: torch.Tensor) -> None:
        """Keep what the policy has put in the place of what it saw: there if it has that form, else beside it."""
        is_alike = isinstance(value, torch.Tensor) and value.dtype == known.dtype
        if is_alike and value.shape == known.shape:
            known.copy_(value)
        else:
            self._written.setdefault(path, []).append(value)

    def written(self) -> dict[Path, torch.Tensor]:
        """Give what the policy has written beside what it saw, or in another form, time in front."""
        return stacked(self._written, self._count)

    def so_far(self) -> TensorDict | None:
        """Show the steps before the one that was ``asked``, None if that is the first."""
        return self.record.first(self._count, self._written)


class _PlainRun:
    """Steps of a policy that needs no TensorDict: none is made for a step. They end where one is ``asked``."""

    def __init__(
        self,
        exchange: BufferExchange,
        root: TensorDictBase,
        actor: Actor,
        stacks: Stacks,
        others: dict[Path, torch.Tensor],
        device: Any,
    ):
        self.record = Record(exchange, root, stacks, device)
        self.asked: TensorDictBase | None = None
        self._exchange, self._actor, self._others = exchange, actor, others
        self._at = 0, range(0)  # first step of the window, and its slots before the one acted in
        self._is_left = False

    def make(self) -> None:
        """Act and step."""
        exchange, actor, record = self._exchange, self._actor, self.record
        for start, slots in record.windows():
            for step, slot in enumerate(slots, start):
                self._at = start, range(slots.start, slot)
                actor.act(step, slot)
                if self._is_left:
                    self.asked = self._acted(step)
                    return
                sent = exchange.wake(None, None, advance=step < record.steps - 1, slot=slot)
                record.catch_up()
                exchange.wait(sent)
            record.put_off(start, slots)
            actor.take(start, slots)
        record.catch_up()

    def leave(self) -> None:
        """Take what steps have left in the slots; see `BufferExchange.recording`."""
        self.record.catch_up()
        self.record.put_off(*self._at)
        self.record.catch_up()
        self._is_left = True

    def _acted(self, step: int) -> TensorDictBase:
        """Give the root of a step as a policy on leaves, which alone can have used the env, has seen and acted on it."""
        td = self.record.root_at(step)
        latest = {path: values[-1] for path, values in self._actor.entries().items()}
        for path, value in {**self._others, **latest}.items():
            td.set(as_key(path), value)
        return td

    def so_far(self) -> TensorDict | None:
        """Show the steps before the one that was ``asked``, None if that is the first."""
        start, slots = self._at
        count, entries = start + len(slots), self._actor.entries()
        kept = {path: [value] * count for path, value in self._others.items()}
        return self.record.first(count, {**kept, **entries})

    def written(self) -> dict[Path, torch.Tensor]:
        """Give what the policy has written, and what the caller put beside the root, time in front."""
        written, steps = self._actor.written(), self.record.steps
        kept = {
            path: value.expand(steps, *value.shape).clone()
            for path, value in self._others.items()
            if path not in written
        }
        return {**kept, **written}


def _plain_actor(
    exchange: BufferExchange,
    root: TensorDictBase,
    act: Policy,
    steps: int,
    action_paths: frozenset[Path],
    device: Any,
) -> tuple[Actor | None, dict[Path, torch.Tensor]]:
    """Give what acts in a `_PlainRun`, None where the policy asks for another; and what the caller put beside the root."""
    others = {path: value for path, value in leaves(root) if path not in exchange.roots[0]}
    is_plain = all(_is_carried(path, value) for path, value in others.items())
    if not is_plain or action_paths != exchange.inputs[0].keys():
        return None, others
    return actor_for(exchange, root, act, steps, others={*others}, device=device), others


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
        Transitions of batch size (*batch, steps), and None. Where one is ``asked``, see the module, recording
        ends: the transitions before it (None if there are none), and the acted root that is to be stepped next.
    """
    exchange.select_all()
    stacks = Stacks.empty(exchange, steps, device)
    return _recorded(exchange, _TensorDictRun(exchange, root, act, stacks, action_paths, device))


def _recorded(
    exchange: BufferExchange, run: _TensorDictRun | _PlainRun
) -> tuple[TensorDict | None, TensorDictBase | None]:
    """Make the steps of a run, and give what `record_rollout` does."""
    with exchange.recording(run.leave):
        run.make()
    if run.asked is not None:
        return run.so_far(), run.asked
    return run.record.result(run.written()), None


def record_plain(
    exchange: BufferExchange,
    root: TensorDictBase,
    act: Policy,
    steps: int,
    *,
    action_paths: frozenset[Path],
    device: Any,
) -> tuple[TensorDict | None, TensorDictBase | None] | None:
    """Do what `record_rollout` does, where the policy needs no TensorDict: none is made for a step.

    Such is one that acts on rows, or on leaves, as a plain function and a plain TensorDictModule do.

    Returns:
        None, with nothing done, where the policy must see TensorDicts, reads what only they hold, or
        writes what is obeyed step by step only.
    """
    actor, others = _plain_actor(exchange, root, act, steps, action_paths, device)
    if actor is None:
        return None
    exchange.select_all()
    stacks = Stacks.empty(exchange, steps, device)
    return _recorded(exchange, _PlainRun(exchange, root, actor, stacks, others, device))


def _is_carried(path: Path, value: Any) -> bool:
    """Say whether a root entry of the caller's does no more than stay as it is."""
    is_plain = isinstance(value, torch.Tensor) and not value.requires_grad
    return is_plain and path[0] != "next" and path[-1] not in (rules.STEP, rules.RESET)


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
    exchange.select_all()
    stacks = Stacks.empty(exchange, steps, device)
    record = Record(exchange, root, stacks, device, has_root_rows=not apart)
    drawn = dict(leaves(actions))
    for start, slots in record.windows():
        for path, ring in exchange.rings.inputs.items():
            ring[slots.start : slots.stop].copy_(drawn[path][start : start + len(slots)])
        for step, slot in enumerate(slots, start):
            known = record.root_at(step) if apart else None
            sent = exchange.wake(known, None, advance=not apart and step < steps - 1, slot=slot)
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
