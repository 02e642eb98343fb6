"""A whole rollout over rows of memory, each step in its own slot.

Rows are written side by side, in two halves of the slots that there are: what lies in one is copied out at once, while
the other is written. No TensorDict is built for a step but the one that a policy sees, and none of what a policy sees
is ever overwritten. One that acts on rows sees no TensorDict, but the rows themselves, and keeps none of them; one that
acts on leaves sees copies of those it reads; random actions are drawn beforehand.

Conventions
    window  steps that lie side by side in one half of the slots; ``slots`` says where.
    time    leading axis of what is written to; in memory it lies behind the batch, where the result shows it.
    others  root entries that neither env nor action keys account for: what the policy writes beside
            its action, or what the caller put there. They are carried as `step_mdp` would.
    asked   an acted root that is to be stepped next, where a run goes on step by step. Then the policy has
            written under ``next`` or masked the step, has left other entries than before, or has used the env itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.batched.exchange.memory import Moment, RowMemory
from envkit.batched.exchange.shared_memory import BufferExchange
from envkit.data.paths import Path, as_key, tensordict_of
from envkit.data.transition import leaves
from envkit.env.bound_policy import LeavesPolicy, RowsPolicy
from envkit.env.policy import Policy
from envkit.env.rollout import LOOPS
from envkit.env.runs import Run
from envkit.specs import TensorSpec, draws_in_order

Leaves = Mapping[Path, torch.Tensor]

_FIRST_STEPS = 64  # of a run that may stop early, for which memory is made and actions are drawn


def recorded(
    env: Any,
    rows: RowMemory,
    run: Run,
    *,
    ended: Callable[[TensorDictBase], dict[Path, torch.Tensor]],
) -> TensorDictBase | list[TensorDictBase] | None:
    """Make a rollout as `Runs.record` promises; None where rows cannot hold it.

    Args:
        env: whose rows they are.
        rows: stepped; every row is in an episode.
        run: stops never, or where any row is done.
        ended: gives, by level, what of an outcome is to begin again; no masks if nothing is.
    """
    root = dict(leaves(run.root))
    if not _can_hold(rows, run, root):
        return None
    rows.select_all()
    others = {path: value for path, value in root.items() if path not in rows.roots[0]}
    actor = _actor_for(env, rows, run, others)
    recording = _Recording(rows, run, root, actor, env.device, ended=ended, flags=_flags(env))
    if isinstance(actor, Drawn):  # no caller uses the env meanwhile
        recording.make()
    else:
        with rows.recording(recording.leave):
            recording.make()
    if recording.asked is None:
        return recording.result()
    done = recording.result()
    before = [] if done is None else list(done.unbind(len(rows.batch_size)))
    left = run.steps - recording.count
    return [*before, *LOOPS[run.stop](env, recording.asked, run.act, left, None, acted=True)]


def _can_hold(rows: RowMemory, run: Run, root: Mapping[Path, Any]) -> bool:
    """Check whether a run that begins at ``root`` can lie in rows."""
    if run.stop == "all" or not rows.looks_like(root):
        return False
    if isinstance(rows, BufferExchange):
        # to copy large rows from one moment to the next takes as long as a step by itself
        return run.stop == "never" or not rows.has_large_rows
    # rows keep no graph, which the env itself would
    return not any(getattr(value, "requires_grad", False) for value in root.values())


def _actor_for(env: Any, rows: RowMemory, run: Run, others: Mapping[Path, Any]) -> Actor:
    """Build the actor of a run: without a TensorDict, unless the policy must see one or asks for more than rows do.

    ``others`` are those of the first root; see the module.
    """
    table = env._table
    lie_in_rows = rows.carries_all and table.actions == rows.actions
    actor: Actor | None = None
    if lie_in_rows and _stay(others) and others.keys().isdisjoint(table.rewards):
        actor = _actor_on_memory(env, rows, run, others)
    if actor is None:
        return OnTensorDicts(rows, run.act, others, table.actions | table.rewards, env.device)
    actor.others = others
    return actor


def _stay(others: Mapping[Path, Any]) -> bool:
    """Check whether entries beside the rows are the same at every root."""
    return all(isinstance(value, torch.Tensor) for value in others.values()) and not asks(others)


def _actor_on_memory(env: Any, rows: RowMemory, run: Run, others: Leaves) -> Actor | None:
    """Make what acts on the rows themselves or on tensors; None where there is nothing that can."""
    if run.policy is None and not env._facts.action_masks:
        drawn = env.full_action_spec
        if len(rows.actions) == 1 and draws_in_order(drawn[as_key(*rows.actions)]):
            return Drawn(rows, drawn, env._action_generator, run)
    if any(value.requires_grad for value in others.values()):
        return None
    policy = run.act.for_run(run.root)
    if isinstance(policy, LeavesPolicy):
        return OnLeaves.fitting(policy, rows, {*others}, env.device)
    return None if policy is None else OnRows.fitting(policy, rows, run.steps)


def _flags(env: Any) -> list[Path]:
    """List the flags that say that a row has ended: those of the root where it has some."""
    levels = env.done_levels
    return [
        (*level, name) for level in ([()] if () in levels else levels) for name in levels[level]
    ]


def asks(entries: Iterable[Path]) -> bool:
    """Check whether what is obeyed step by step only is among entries of a root."""
    return any(path[0] == "next" or path[-1] in (rules.STEP, rules.RESET) for path in entries)


# ------------------------------------------------------------------------------------------ memory


class _Stacks(NamedTuple):
    """Memory for the roots and outcomes of steps, by path: shape (steps, *batch, *leaf), time behind the batch in memory."""

    roots: Leaves
    nexts: Leaves

    @classmethod
    def empty(cls, rows: RowMemory, steps: int, device: torch.device | None) -> _Stacks:
        rows.memory.begin()
        dims = len(rows.batch_size)

        def empty(leaf: torch.Tensor) -> torch.Tensor:
            shape = *leaf.shape[:dims], steps, *leaf.shape[dims:]
            stack = rows.memory.empty(shape, leaf.dtype, device)
            return stack.movedim(dims, 0) if dims else stack

        regions = (
            {path: empty(leaf) for path, leaf in region.items()}
            for region in (rows.roots[0], rows.nexts[0])
        )
        return cls(*regions)

    def __len__(self) -> int:
        return len(next(iter(self.nexts.values())))

    def grown(self, rows: RowMemory, steps: int, device: torch.device | None) -> _Stacks:
        """Return room for more steps, with what is there."""
        larger = _Stacks.empty(rows, steps, device)
        for mine, more in zip(self, larger, strict=True):
            for path, stack in mine.items():
                more[path][: len(stack)] = stack
        return larger


class _Recording:
    """Roots and outcomes of a rollout, filled window by window.

    Attributes:
        count: steps that were made.
        asked: see the module.

    Args:
        rows, run, ended: see `recorded`.
        root: the first one, by path.
        actor: acts on roots.
        flags: of an outcome, which say that a row has ended.
    """

    def __init__(
        self,
        rows: RowMemory,
        run: Run,
        root: Leaves,
        actor: Actor,
        device: torch.device | None,
        *,
        ended: Callable[[TensorDictBase], dict[Path, torch.Tensor]],
        flags: list[Path],
    ):
        self.count, self.asked = 0, None
        self._rows, self._actor, self._device = rows, actor, device
        self._steps, self._stops, self._apart = run.steps, run.stop == "any", actor.apart
        self._ended, self._flags = ended, flags
        room = min(_FIRST_STEPS, run.steps) if self._stops else run.steps
        self._stacks = _Stacks.empty(rows, room, device)
        self._window = 0, range(0)  # its first step, and its slots
        self._left: tuple[int, range] | None = None  # a window that is still in the slots
        self._begun: torch.Tensor | None = None  # rows that began again after it
        self._is_left = False
        for path, stack in self._stacks.roots.items():
            stack[0].copy_(root[path].detach())  # rows would keep a graph for good
            if not self._apart:
                rows.roots[0][path].copy_(stack[0])

    def make(self) -> None:
        """Act and step until the end."""
        rows, actor, last = self._rows, self._actor, self._steps - 1
        advances = not (self._stops or self._apart)
        carries = actor.roots_from_rows  # else all inputs are among what it has acted on
        for start, slots in self._windows():
            self._window = start, slots
            actor.open(start, slots)
            for step, slot in enumerate(slots, start):
                root = self.root_at(step) if self._apart else None
                for into, value in rows.carried[slot] if carries else ():
                    into.copy_(value)
                acted = actor.act(step, slot)
                if self._is_left or actor.asks:
                    self.asked = acted if acted is not None else self._acted(step)
                    self.leave()
                    return
                inputs = root if acted is None else acted
                sent: Any = rows.wake(inputs, None, advance=advances and step < last, slot=slot)
                self._catch_up()
                rows.wait(sent)
                self.count += 1
                if not advances and step < last and self._ends(slot):
                    self._finish()
                    return
            self._put_off(start, slots)
            actor.close(start, slots)
        self._catch_up()

    def _ends(self, slot: int) -> bool:
        """Check whether a run is over; if not, prepare the root that follows."""
        rows = self._rows
        if self._stops:
            if rows.any_done(slot, self._flags):
                return True
            rows.follow(slot)
            return False
        made = tensordict_of(rows.nexts[slot], rows.batch_size, None, rows.node_axes)
        if masks := self._ended(made):
            assert isinstance(rows, BufferExchange)
            rows.begin_episodes(None, masks)
            rows.select_all()
        return False

    def _finish(self) -> None:
        """Copy the steps of a window that ends early out of its slots."""
        start, slots = self._window
        slots = slots[: self.count - start]
        self._catch_up()
        self._put_off(start, slots)
        self._actor.close(start, slots)
        self._catch_up()

    def leave(self) -> None:
        """Copy what steps have left in the slots; see `RowMemory.recording`."""
        if not self._is_left:
            self._is_left = True
            self._finish()

    def _windows(self) -> Iterator[tuple[int, range]]:
        """Yield first step and slots of each window, one half of all slots after the other; the first root is in place."""
        rows, half = self._rows, self._rows.num_slots // 2
        for start in range(0, self._steps, half):
            first = start % (2 * half)
            if not self._apart and start and not first:
                for path, root in rows.roots[0].items():
                    root.copy_(rows.roots[2 * half][path])
            # with room for the root that follows
            if start + half >= len(self._stacks) < self._steps:
                self._catch_up()
                room = min(2 * len(self._stacks), self._steps)
                self._stacks = self._stacks.grown(rows, room, self._device)
            yield start, range(first, first + min(half, self._steps - start))

    def root_at(self, step: int) -> TensorDict:
        """Show the root of a step, which `_catch_up` may have to write yet."""
        rows = self._rows
        shown = {path: stack[step] for path, stack in self._stacks.roots.items()}
        return tensordict_of(shown, rows.batch_size, self._device, rows.node_axes)

    def _acted(self, step: int) -> TensorDictBase:
        """Return the root of a step as a policy that sees no TensorDict has seen and acted on it."""
        self.leave()
        td = self.root_at(step)
        for path, value in {**self._actor.others, **self._actor.latest()}.items():
            td.set(as_key(path), value)
        return td

    def _put_off(self, start: int, slots: range) -> None:
        """Defer copying a window to `_catch_up`, before the window after the next."""
        self._left = start, slots
        if self._apart:
            self._begun = torch.from_numpy(~self._rows.newest_is_next)

    def _catch_up(self) -> None:
        """Copy what was put off: outcomes, and the roots that followed. A step of the next window may be under way."""
        if self._left is None:
            return
        (start, slots), self._left = self._left, None
        rings, stop = self._rows.rings, start + len(slots)
        for path, stack in self._stacks.nexts.items():
            stack[start:stop].copy_(rings.nexts[path][slots.start : slots.stop])
        if not self._actor.roots_from_rows:
            return
        for path, stack in self._stacks.roots.items():
            kept = stack[start + 1 : stop + 1]  # one less at the end: nothing follows the last step
            at = slice(slots.start + 1, slots.start + 1 + len(kept))
            if self._begun is None:
                kept.copy_(rings.roots[path][at])
            elif len(kept):
                kept[0].copy_(rings.nexts[path][slots.start])
                fresh = rings.roots[path][at.start, self._begun]
                kept[0, self._begun] = fresh.to(self._device)

    def result(self) -> TensorDict | None:
        """Show the steps that were made with time as the last batch axis; None if there are none."""
        count, rows = self.count, self._rows
        if not count:
            return None
        dims = len(rows.batch_size)
        written = self._actor.written(count)
        kept = {
            path: _time_behind(value.expand(count, *value.shape), dims, copy=True)
            for path, value in self._actor.others.items()
            if path not in written
        }
        is_cut = count < len(self._stacks)
        roots, nexts = (
            {path: _time_behind(stack[:count], dims, copy=is_cut) for path, stack in part.items()}
            for part in self._stacks
        )
        following = {("next", *path): stack for path, stack in nexts.items()}
        shape = torch.Size((*rows.batch_size, count))
        stacks = {**roots, **kept, **written, **following}
        return tensordict_of(stacks, shape, self._device, rows.node_axes)


def _time_behind(stack: torch.Tensor, dims: int, *, copy: bool) -> torch.Tensor:
    """Return a stack with time behind ``dims`` batch axes; with ``copy`` a contiguous copy."""
    shown = stack.movedim(0, dims) if dims else stack
    return shown.clone(memory_format=torch.contiguous_format) if copy else shown


# -------------------------------------------------------------------------------------- what acts


class Actor:
    """Acts on the roots of a run.

    Attributes:
        asks: what it has left last is to be stepped one by one.
        roots_from_rows: roots are recorded as they lie in the rows; else they are among what it has `written`.
        apart: roots do not pass through the rows, as no caller reads one: those that only repeat what a step made are
            copied out of its outcome.
        others: what stays as it is at every root.
    """

    asks = False
    roots_from_rows = True
    apart = False
    others: Leaves = MappingProxyType({})

    def open(self, start: int, slots: range) -> None:
        """Begin a window."""

    def act(self, step: int, slot: int) -> TensorDictBase | None:
        """Act on the root in a slot; gives the acted root, if it has made one."""
        raise NotImplementedError

    def close(self, start: int, slots: range) -> None:
        """End a window, whose slots are written again after the next one."""

    def latest(self) -> dict[Path, torch.Tensor]:
        """Return what was seen and written in the last step."""
        return {}

    def written(self, count: int) -> dict[Path, torch.Tensor]:
        """Return what was written in the first ``count`` steps, time behind the batch."""
        raise NotImplementedError


class Drawn(Actor):
    """Random actions, drawn many at a time: the same that drawing one by one gives."""

    def __init__(
        self,
        rows: RowMemory,
        spec: TensorSpec,
        generator: torch.Generator | None,
        run: Run,
    ):
        self._rows, self._spec, self._generator = rows, spec, generator
        self._steps = run.steps
        self._next = run.steps if run.stop == "never" else min(_FIRST_STEPS, run.steps)
        is_pool = isinstance(rows, BufferExchange)
        self.apart = is_pool and rows.has_large_rows and not rows.carried[0]
        self._drawn = 0
        # where the generator was, by actions drawn then
        self._before: list[tuple[int, torch.Tensor]] = []
        self._parts: list[dict[Path, torch.Tensor]] = []

    def open(self, start: int, slots: range) -> None:
        while self._drawn < start + len(slots):
            self._draw()
        actions = self._all()
        for path, values in actions.items():
            ring = self._rows.rings.inputs[path]
            ring[slots.start : slots.stop].copy_(values[start : start + len(slots)])

    def _draw(self) -> None:
        count = min(self._next, self._steps - self._drawn)
        self._before.append((self._drawn, self._source.get_state()))
        self._parts.append(dict(leaves(self._spec.rand((count,), self._generator))))
        self._drawn += count
        self._next = 2 * count

    @property
    def _source(self) -> torch.Generator:
        return torch.default_generator if self._generator is None else self._generator

    def _all(self) -> dict[Path, torch.Tensor]:
        if len(self._parts) > 1:
            joined = {
                path: torch.cat([part[path] for part in self._parts]) for path in self._parts[0]
            }
            self._parts = [joined]
        return self._parts[0]

    def act(self, step: int, slot: int) -> None:
        """Do nothing: the actions of a window lie in its slots."""

    def written(self, count: int) -> dict[Path, torch.Tensor]:
        if count < self._drawn:
            self._rewind(count)
        dims = len(self._rows.batch_size)
        return {
            path: _time_behind(actions[:count], dims, copy=True)
            for path, actions in self._all().items()
        }

    def _rewind(self, count: int) -> None:
        """Set the generator to where it is after ``count`` actions."""
        drawn, state = next(entry for entry in reversed(self._before) if entry[0] <= count)
        self._source.set_state(state)
        self._spec.rand((count - drawn,), self._generator)


class OnRows(Actor):
    """A policy that reads the rows themselves and writes its actions there; it keeps none of them."""

    def __init__(self, policy: RowsPolicy, rows: RowMemory, steps: int):
        self._act, self._rows = policy.act, rows
        dims = len(rows.batch_size) or 1  # one env is a row here
        self._written = {
            path: np.moveaxis(np.empty((*shape[:dims], steps, *shape[dims:]), dtype), dims, 0)
            for path, (shape, dtype) in policy.writes.items()
        }
        self._actions = {path: self._written.pop(path) for path in rows.actions}
        slots = range(min(steps, rows.num_slots))
        self._roots = [
            {path: _as_rows(rows.roots[slot][path], rows) for path in policy.reads}
            for slot in slots
        ]
        self._inputs = [
            {path: _as_rows(rows.inputs[slot][path], rows) for path in rows.actions}
            for slot in slots
        ]

    @classmethod
    def fitting(cls, policy: RowsPolicy, rows: RowMemory, steps: int) -> OnRows | None:
        """Make one, unless it reads or writes more than lies in rows, or is recorded beside them."""
        roots, writes = rows.roots[0].keys(), policy.writes
        is_action = [
            path in writes
            and writes[path][0] == _as_rows(leaf, rows).shape
            and torch.from_numpy(np.empty(0, writes[path][1])).dtype == leaf.dtype
            for path, leaf in ((path, rows.inputs[0][path]) for path in rows.actions)
        ]
        fits = roots >= set(policy.reads) and roots.isdisjoint(writes) and all(is_action)
        return cls(policy, rows, steps) if fits and not asks(writes) else None

    def act(self, step: int, slot: int) -> None:
        inputs = self._inputs[slot]
        out = inputs
        if self._written:
            out = {**inputs, **{path: values[step] for path, values in self._written.items()}}
        self._act(self._roots[slot], out)
        self._rows.check_actions(inputs)

    def close(self, start: int, slots: range) -> None:
        for path, actions in self._actions.items():
            ring = self._rows.rings.inputs[path][slots.start : slots.stop]
            actions[start : start + len(slots)] = ring.numpy().reshape(
                len(slots), *actions.shape[1:]
            )

    def written(self, count: int) -> dict[Path, torch.Tensor]:
        dims = len(self._rows.batch_size)
        stacks = {}
        for path, values in {**self._written, **self._actions}.items():
            kept = torch.from_numpy(values[:count])
            kept = kept if dims else kept.squeeze(1)
            stacks[path] = _time_behind(kept, dims, copy=len(values) > count)
        return stacks


def _as_rows(leaf: torch.Tensor, rows: RowMemory) -> np.ndarray:
    """Show an entry of a moment as an array with an axis of rows, also that of one env."""
    return (leaf if rows.batch_size else leaf.unsqueeze(0)).numpy()


class OnLeaves(Actor):
    """A policy that is called with tensors, which it may keep."""

    def __init__(self, policy: LeavesPolicy, rows: RowMemory, device: torch.device | None):
        self._act, self._reads, self._device, self._rows = policy.act, policy.reads, device, rows
        self._shown: dict[int, Moment] = {}
        self._seen: dict[Path, list[torch.Tensor]] = {path: [] for path in policy.reads}
        self._returned: dict[Path, list[torch.Tensor]] = {}

    @classmethod
    def fitting(
        cls, policy: LeavesPolicy, rows: RowMemory, others: set[Path], device: Any
    ) -> OnLeaves | None:
        """Make one, unless it reads more than lies in rows, or writes no action, or more than may be beside rows."""
        roots, writes = rows.roots[0].keys(), policy.writes
        fits = roots >= set(policy.reads) and rows.actions <= set(writes)
        apart = not any(_overlap(path, known) for path in writes for known in roots)
        nested = any(path != known and _overlap(path, known) for path in writes for known in others)
        is_fit = fits and apart and not nested and not asks(writes)
        return cls(policy, rows, device) if is_fit else None

    def act(self, step: int, slot: int) -> None:
        seen = list(self._moment(slot).copies(self._device).values())
        written = self._act(seen)
        if self._device is not None:
            written = {path: value.to(self._device) for path, value in written.items()}
        for path, value in zip(self._reads, seen, strict=True):
            self._seen[path].append(value)
        for path, value in written.items():
            self._returned.setdefault(path, []).append(value)
        self._rows.fill({**self._rows.inputs[slot], **written}, None, slot)

    def _moment(self, slot: int) -> Moment:
        """Return what the policy reads in a slot; short runs use few of them."""
        moment = self._shown.get(slot)
        if moment is None:
            root = self._rows.roots[slot]
            moment = self._shown[slot] = Moment({path: root[path] for path in self._reads})
        return moment

    def latest(self) -> dict[Path, torch.Tensor]:
        return {path: values[-1] for path, values in {**self._seen, **self._returned}.items()}

    def written(self, count: int) -> dict[Path, torch.Tensor]:
        dims = len(self._rows.batch_size)
        return _stacked(self._seen, count, dims, detach=True) | _stacked(
            self._returned, count, dims
        )


class OnTensorDicts(Actor):
    """A policy that sees TensorDicts."""

    roots_from_rows = False

    def __init__(
        self,
        rows: RowMemory,
        act: Policy,
        others: Leaves,
        dropped: frozenset[Path],
        device: torch.device | None,
    ):
        self._rows, self._act, self._device = rows, act, device
        self._others: dict[Path, Any] = dict(others)
        self._dropped, self._needed = dropped, rows.inputs[0].keys() - rows.roots[0].keys()
        self._acts_alone = len(self._needed) == len(rows.inputs[0])
        self._seen: dict[Path, list[torch.Tensor]] = {path: [] for path in rows.roots[0]}
        self._returned: dict[Path, list[torch.Tensor]] = {}

    def act(self, step: int, slot: int) -> TensorDictBase:
        rows, device = self._rows, self._device
        seen = rows.roots[slot].copies(device)
        shown = {**seen, **self._others}
        td = self._act(tensordict_of(shown, rows.batch_size, device, rows.node_axes))
        returned = self._taken(td, seen)
        if returned is None:
            self.asks = True
            return td
        for path, value in seen.items():
            self._seen[path].append(value)
        for path, value in returned.items():
            self._returned.setdefault(path, []).append(value)
        self._others = {
            path: value for path, value in returned.items() if path not in self._dropped
        }
        rows.fill(returned if self._acts_alone else td, None, slot)
        return td

    def _taken(
        self, td: TensorDictBase, seen: dict[Path, torch.Tensor]
    ) -> dict[Path, torch.Tensor] | None:
        """Return what the policy has left beside what it saw; None where it asks for what is obeyed step by step only.

        Tensors that it has put in the place of others are put into ``seen``.
        """
        returned: dict[Path, torch.Tensor] = {}
        replaced: dict[Path, torch.Tensor] = {}
        count = 0
        for path, value in leaves(td):
            before = seen.get(path)
            if before is None:
                if not isinstance(value, torch.Tensor) or asks([path]):
                    return None
                returned[path] = value
                continue
            count += 1
            if value is not before:
                if not _can_replace(value, before):
                    return None
                replaced[path] = value
        if count < len(seen) or not returned.keys() >= self._needed:
            return None
        if self._returned and returned.keys() != self._returned.keys():
            return None
        seen.update(replaced)
        return returned

    def written(self, count: int) -> dict[Path, torch.Tensor]:
        dims = len(self._rows.batch_size)
        return _stacked(self._seen, count, dims, detach=True) | _stacked(
            self._returned, count, dims
        )


def _can_replace(value: Any, before: torch.Tensor) -> bool:
    """Check whether what a policy has put in the place of what it saw can be recorded there."""
    is_plain = isinstance(value, torch.Tensor) and not value.requires_grad
    return is_plain and value.dtype == before.dtype and value.shape == before.shape


def _stacked(
    lists: Mapping[Path, list[torch.Tensor]], count: int, dims: int, *, detach: bool = False
) -> dict[Path, torch.Tensor]:
    stacks = {path: torch.stack(values[:count], dims) for path, values in lists.items()}
    return {path: stack.detach() for path, stack in stacks.items()} if detach else stacks


def _overlap(one: Path, other: Path) -> bool:
    """Check whether two entries are the same, or one is below the other."""
    return all(a == b for a, b in zip(one, other, strict=False))
