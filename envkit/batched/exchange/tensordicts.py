"""Steps and resets as whole TensorDicts, one for each sub-env.

This serves what rows in memory cannot: entries of varying size, data that is no tensor, unlike
sub-envs, and gradients within one process. `exchange` is the faster way; both give the same data.

Conventions
    rows    global row numbers.
    masks   level path -> bool mask over rows and the sub-envs' own batch, see `rules`.
    td      data of the whole batch, batch size (rows, *sub_batch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.batched.exchange.checks import refuse_early_part, require_keys, rows_of
from envkit.batched.exchange.memory import can_wait
from envkit.batched.lazy_stacks import stack_rows, with_objects_like
from envkit.batched.metadata import EnvMetaData
from envkit.batched.recovery import Recovery
from envkit.data.merging import merge_rows
from envkit.data.paths import Path, as_key
from envkit.data.plain import from_plain, plain
from envkit.errors import WorkerError
from envkit.specs.inputs import require_input
from envkit.transport import Pool
from envkit.transport.pool import call_by_row, merged

Parts = dict[int, TensorDictBase]


class Inputs(NamedTuple):
    """What a step is given: the parts of the rows that move, and the mask that says so (None: all of all)."""

    parts: Parts
    mask: torch.Tensor | None


class Round(NamedTuple):
    """A step that is to be made: its root, what it is given, how it ends."""

    root: TensorDictBase
    inputs: Inputs
    advance: bool


class TensorDictExchange:
    """Steps and resets by handing each sub-env its part of the TensorDict.

    Within one process nothing is copied, and the autograd graph is kept. With ``individual`` what
    comes out is a lazy stack, one TensorDict per row.
    """

    has_large_rows = False
    keeps_unstepped = True

    def __init__(
        self,
        pool: Pool,
        metadata: list[EnvMetaData],
        device: Any,
        *,
        individual: bool,
        recovery: Recovery,
    ):
        self.pool = pool
        self.recovery = recovery
        self.lost: set[int] = set()
        self._num_rows = len(metadata)
        self.metadata = metadata
        self._input_devices = [one.device for one in metadata]
        self._device = device
        self._non_blocking = False
        self._individual = individual
        self._states = [_states_of(one) for one in metadata]
        self._actions = [one.action_inputs() for one in metadata]
        self._root_keys = [one.keys("observation", "done") for one in metadata]
        self._next_keys = [
            dict.fromkeys(one.keys("observation", "reward", "done")) for one in metadata
        ]
        self._last: list[TensorDictBase | None] = [None] * self._num_rows

    @property
    def has_begun(self) -> bool:
        """Whether every row has been reset once."""
        return all(part is not None for part in self._last)

    def _remember(self, row: int, td: TensorDictBase) -> None:
        """Store the newest root of a row: what the env returned, not what the caller put there."""
        newest = td.select(*self._root_keys[row], strict=False)
        self._last[row] = self._apart(newest)

    def _apart(self, part: TensorDictBase) -> TensorDictBase:
        """Copy what a lazy stack would hand on as it is: the caller may write into it."""
        return part.clone() if self._individual else part

    def _declared(self, row: int, following: TensorDictBase) -> TensorDictBase:
        """Remove from `next` of a row what no spec of its env declares, as rows in memory do."""
        keys = self._next_keys[row]
        if all(key in keys for key in following.keys(True, True)):
            return following
        return following.select(*keys, strict=False)

    def _input(self, td: TensorDictBase, row: int, *without: Any) -> TensorDictBase:
        """Return one row's part of ``td`` on the device of its sub-env, the CPU if it names none."""
        return self._moved(cast(TensorDictBase, td[row]).exclude(*without), row)

    def _moved(self, part: TensorDictBase, row: int) -> TensorDictBase:
        device = self._input_devices[row] or torch.device("cpu")
        return part if part.device in (None, device) else part.to(device)

    def fill(self, td: TensorDictBase, mask: torch.Tensor | None) -> Inputs:
        """Check the inputs of a step and give them by row, for `wake`."""
        if not self._individual:  # one layout for all rows; reported as the caller sees it
            lead = (self._num_rows,)
            for key, leaf in self._states[0].items():
                require_input(key, td.get(key, None), (*lead, *leaf.shape), leaf.dtype)
            for path, rule in self._actions[0].items():
                rule.require_form(td.get(as_key(path), None), lead)
        rows = rows_of(mask, self._num_rows)
        parts = {row: self._checked(row, cast(TensorDictBase, td[row])) for row in rows}
        return Inputs(parts, mask)

    def wake(self, td: TensorDictBase, inputs: Inputs, *, advance: bool) -> Round:
        """Return the step; all of it happens in `wait`."""
        return Round(td, inputs, advance)

    def _checked(self, row: int, part: TensorDictBase) -> TensorDictBase:
        """Return a row's part, its actions as the spec of its env says."""
        if self._individual:
            for key, leaf in self._states[row].items():
                require_input(key, part.get(key, None), leaf.shape, leaf.dtype)
        converted = {}
        for path, rule in self._actions[row].items():
            value = part.get(as_key(path), None)
            taken = rule.take(value, first=row)
            if taken is not value:
                converted[as_key(path)] = taken
        return part.copy().update(converted) if converted else part  # the caller's stays as it is

    def wait(self, sent: Round) -> list[TensorDictBase]:
        """Step the selected sub-envs and give the `next` of all rows."""
        td, (parts, mask), advance = sent
        chosen = rows = list(parts)
        if self.recovery.unstarted:
            rows = self.recovery.ready(chosen, self._reset_wholly)
        inputs = {}
        for row in rows:
            part = self._moved(parts[row].exclude(rules.STEP, "next"), row)
            if mask is not None and mask.ndim > 1:
                part.set(rules.STEP, mask[row])
            inputs[row] = (part, {})
        nexts: dict[int, TensorDictBase] = {}

        def take(row: int, result: Any) -> None:
            data, following = result if advance else (result, None)
            nexts[row] = self._declared(row, data.get("next"))
            self._remember(row, nexts[row] if following is None else following)

        try:
            self._call("step_and_maybe_reset" if advance else "step", inputs, take)
        except WorkerError as error:
            self.recovery.repair(error)
        self.lost = self._tell_lost(td, chosen, nexts, advance) if self.recovery.lost else set()
        if mask is not None:
            nexts = self._keep_unstepped(td, mask, nexts)
        return [nexts[row] for row in range(self._num_rows)]

    def _tell_lost(
        self,
        td: TensorDictBase,
        stepped: list[int],
        nexts: dict[int, TensorDictBase],
        advanced: bool,
    ) -> set[int]:
        """Write `next` of the rows that were lost, and their root where the others have one."""
        lost = self.recovery.tell(stepped)
        for row in lost:
            nexts[row] = self.metadata[row].lost_next(self._input(td, row))
            self._remember(row, nexts[row])
        if advanced:
            self.recovery.begin(lost, self._reset_wholly)
        return lost

    def _keep_unstepped(
        self, td: TensorDictBase, mask: torch.Tensor, nexts: dict[int, TensorDictBase]
    ) -> dict[int, TensorDictBase]:
        """Return `next` of all rows: where ``mask`` is False their root values, or else zeros."""
        complete = {}
        for row, found in enumerate(self.metadata):
            skipped: TensorDictBase = found.skipped_next(self._input(td, row))
            if row in self.lost:
                complete[row] = nexts[row]
            elif row in nexts:
                complete[row] = merge_rows(skipped, nexts[row], {(): mask[row]})
            else:
                stepped = next(iter(nexts.values()), skipped)
                complete[row] = with_objects_like(skipped, stepped)
        return complete

    def fresh_rows(self) -> TensorDictBase:
        """Return the newest root of every sub-env."""
        return self.deliver([self._apart(part) for part in self._last if part is not None])

    def reset(
        self,
        td: TensorDictBase | None,
        masks: dict[Path, torch.Tensor],
        kwargs: list[dict[str, Any]] | None,
    ) -> TensorDictBase:
        """Reset what the masks select and give the newest known values of everything."""
        inputs: dict[int, TensorDictBase | None] = {}
        for row in range(self._num_rows):
            of_row = {level: mask[row] for level, mask in masks.items()}
            if of_row and not any(bool(mask.any()) for mask in of_row.values()):
                continue
            inputs[row] = None
            if td is None or row in self.recovery.unstarted:
                continue
            part = self._input(td, row, "next", *_masks_at(td))
            last = self._last[row]
            in_part = {level: mask for level, mask in of_row.items() if not bool(mask.all())}
            if in_part and last is not None:  # what is not reset and not given is as it was last
                part = last.copy().update(part)
            for level, mask in in_part.items():
                part.set(as_key((*level, rules.RESET)), mask)
            inputs[row] = part
        refuse_early_part(inputs.keys(), [part is not None for part in self._last])

        def reset(rows: set[int]) -> None:
            self._reset_rows({row: inputs[row] for row in sorted(rows)}, kwargs)

        wholly = partial(self._reset_wholly, kwargs=kwargs)
        self.recovery.reset(set(inputs), masks, reset, wholly)
        return self.fresh_rows()

    def _reset_wholly(self, rows: set[int], kwargs: list[dict[str, Any]] | None = None) -> None:
        """Reset rows with all their parts, from nothing."""
        self._reset_rows(dict.fromkeys(sorted(rows)), kwargs)

    def _reset_rows(
        self, inputs: dict[int, TensorDictBase | None], kwargs: list[dict[str, Any]] | None
    ) -> None:
        given = {row: (part, {} if kwargs is None else kwargs[row]) for row, part in inputs.items()}
        self._call("reset", given, self._remember)

    def _call(self, method: str, inputs: dict[int, Any], take: Callable[[int, Any], None]) -> None:
        """Call a method of the sub-envs, and hand each result to ``take``, also if others fail."""
        failed: WorkerError | None = None
        try:
            checked = not self._individual
            results = call_by_row(self.pool, method, inputs, checked)
        except WorkerError as error:
            failed, results = error, merged(error.answers.values())
        for row, result in results.items():
            take(row, result)
        if failed is not None:
            raise failed

    def deliver(self, parts: list[TensorDictBase]) -> TensorDictBase:
        """Stack the parts of all rows, where data is delivered."""
        stacked = stack_rows(parts, individual=self._individual)
        if self._device is None:
            return stacked
        return stacked.to(self._device, non_blocking=self._non_blocking)

    def state(self) -> list[Any]:
        """Return the newest root of every row in plain form, None before its first reset."""
        return plain(self._last)

    def take(self, state: Sequence[Any]) -> None:
        """Load what `state` of any exchange returned.

        Raises:
            ResumeError: it lacks entries.
        """
        last = from_plain(state)
        for row, known in enumerate(last):
            if known is not None:
                require_keys(known, self._root_keys[row])
        self._last = last

    def deliver_to(self, device: torch.device | None, *, non_blocking: bool) -> None:
        """Move what comes out to ``device`` from now on."""
        self._device, self._non_blocking = device, can_wait(device, non_blocking)

    def sub_envs_are_on(self, device: torch.device) -> None:
        """Cast inputs to ``device`` from now on."""
        self._input_devices = [device] * self._num_rows
        self.metadata = [found.to(device) for found in self.metadata]


def _masks_at(td: TensorDictBase) -> list:
    """List the `_reset` entries of a TensorDict."""
    return [
        key
        for key in td.keys(True, True)
        if (key if isinstance(key, str) else key[-1]) == rules.RESET
    ]


def _states_of(metadata: EnvMetaData) -> dict[Any, Any]:
    """Return the leaves of the state whose form is known beforehand, by key."""
    return {
        as_key(path): leaf
        for path, leaf in metadata.paths("state").items()
        if leaf.dtype is not None and min(leaf.shape, default=0) >= 0
    }
