"""Two ways to get a step to sub-envs and back: shared rows, or whole TensorDicts.

Both give the same data. Shared rows are fast and need fixed, equal shapes; TensorDicts serve
everything else: dynamic or different specs, non-tensor data, and gradients within one process.

Conventions
    rows    global row numbers, or None for all.
    masks   level path -> bool mask over rows and the sub-envs' own batch, see `rules`.
    td      data of the whole batch, batch size (rows, *sub_batch).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.batched.buffers import SLOT, BufferPlan
from envkit.batched.host import ADVANCE, RESET, STEP
from envkit.batched.metadata import EnvMetaData
from envkit.batched.recovery import Recovery
from envkit.batched.stacking import keep_unstepped, stack_rows
from envkit.env_specs import as_key
from envkit.errors import InputError, MissingKeyError, ResetMaskError, WorkerError
from envkit.specs import TensorSpec
from envkit.transport import Layout, Pool

__all__ = ["BufferExchange", "TensorDictExchange", "call_by_row"]

Path = tuple[str, ...]


class BufferExchange:
    """Steps and resets through rows in memory that parent and hosts share.

    ``lost`` are the rows of which the last step told that they were lost, see `recovery`.

    ``slot`` is the moment that the next step reads and writes, see `buffers`. Stepping one by one
    leaves it at 0; `recording` moves it. ``more_inputs`` are sent beside what the specs ask for.
    """

    keeps_unstepped = False
    """`recv` gives the root values of rows that were not stepped."""

    def __init__(
        self,
        pool: Pool,
        metadata: EnvMetaData,
        num_rows: int,
        device: Any,
        *,
        more_inputs: Mapping[Path, TensorSpec],
        recovery: Recovery,
    ):
        plan = BufferPlan.of(metadata, num_rows, more_inputs)
        arrays = pool.bind(Layout(plan.fields(), num_rows))
        self._pool = pool
        self._recovery = recovery
        self._metadata = metadata
        self._device, self._non_blocking = device, False
        self._slot = arrays[SLOT.name]
        self.batch_size = torch.Size((num_rows, *metadata.batch_size))
        self.num_slots = plan.num_slots
        self.input_ring, self.root_ring, self.next_ring = (
            plan.tensors(arrays, region) for region in ("in", "root", "next")
        )
        self.inputs = _by_slot(self.input_ring, plan.num_slots)
        self.roots = _by_slot(self.root_ring, plan.num_slots + 1)
        self.nexts = _by_slot(self.next_ring, plan.num_slots)
        self.masks = plan.tensors(arrays, "mask")
        for mask in self.masks.values():
            mask.fill_(True)
        self._masks_are_full = True
        self._rows_have_parts = (
            sum(mask[0].numel() for path, mask in self.masks.items() if path[-1] == rules.RESET) > 1
        )
        self._newest_is_next = np.zeros(num_rows, bool)
        self._has_roots = np.zeros(num_rows, bool)
        self.lost: set[int] = set()

    @property
    def slot(self) -> int:
        """The moment that the next step reads and writes."""
        return int(self._slot[0])

    @slot.setter
    def slot(self, slot: int) -> None:
        self._slot.fill(slot)

    # --------------------------------------------------------------------------------------- step

    def send(self, td: TensorDictBase, mask: torch.Tensor | None, *, advance: bool) -> None:
        """Hand out the inputs and wake whoever has a row to step."""
        for path, tensor in self.inputs[self.slot].items():
            _fill(tensor, td.get(as_key(path), None), path)
        self.wake(td, mask, advance=advance)

    def wake(
        self,
        root: TensorDictBase | None = None,
        mask: torch.Tensor | None = None,
        *,
        advance: bool,
    ) -> None:
        """Step with the inputs as they lie in the rows.

        ``root`` is what is known before; None where it lies in the rows too.
        """
        rows = self._select({(rules.STEP,): mask} if mask is not None else {})
        self._sent_rows, self._sent_root = rows, root
        self._advanced = advance
        if self._recovery.unstarted:
            chosen = range(len(self._newest_is_next)) if rows is None else rows
            rows = self._recovery.ready(chosen, self._reset_wholly)
        self._pool.send(ADVANCE if advance else STEP, rows)
        if advance and self._rows_have_parts:
            self._masks_are_full = False  # sub-envs note there which of their parts they reset

    def wait(self) -> None:
        """Wait for the step; rows that were not stepped hold anything."""
        try:
            self._pool.recv()
        except WorkerError as error:
            self._recovery.repair(error)
        rows = slice(None) if self._sent_rows is None else self._sent_rows
        self._newest_is_next[rows] = not self._advanced
        self.lost = self._tell_lost() if self._recovery.lost else set()

    def _tell_lost(self) -> set[int]:
        """Write `next` of the rows that were lost, and their root where the others have one."""
        lost = self._recovery.tell(self._sent_rows)
        root = self._sent_root
        if root is None:
            root = tensordict_of(self.roots[self.slot], self.batch_size, None)
        for row in lost:
            outcome = self._metadata.lost_next(cast(TensorDictBase, root[row]))
            for path, tensor in self.nexts[self.slot].items():
                tensor[row].copy_(outcome.get(as_key(path)))
        if self._advanced:
            self._recovery.begin(lost, self._reset_wholly)
        return lost

    def recv(self) -> TensorDict:
        """Wait for the step and give `next`; rows that were not stepped hold anything."""
        self.wait()
        return self._clone(self.nexts[self.slot])

    def fresh_rows(self) -> TensorDict:
        """Give the root rows as the last reset or advance left them."""
        return self._clone(self.roots[self.slot + 1])

    # -------------------------------------------------------------------------------------- reset

    def reset(
        self,
        td: TensorDictBase | None,
        masks: dict[Path, torch.Tensor],
        kwargs: list[dict[str, Any]] | None,
    ) -> TensorDict:
        """Reset what the masks select and give the newest known values of everything."""
        rows = self._select({(*level, rules.RESET): mask for level, mask in masks.items()})
        chosen = set(range(len(self._has_roots)) if rows is None else rows)
        refuse_early_part(chosen, self._has_roots)
        if self._recovery.unstarted:
            self._ask_for_all(self._recovery.unstarted)
        self._recovery.reset(
            chosen,
            masks,
            partial(self._reset_rows, kwargs=kwargs),
            partial(self._reset_wholly, kwargs=kwargs),
        )
        touched = slice(None) if rows is None else rows
        self._newest_is_next[touched] = False
        self._has_roots[touched] = True
        return self._newest()

    def _reset_rows(self, rows: set[int], kwargs: list[dict[str, Any]] | None) -> None:
        if kwargs is not None:
            call_by_row(self._pool, "reset_rows", {row: kwargs[row] for row in sorted(rows)})
        elif rows:
            self._pool.send(RESET, None if len(rows) == len(self._has_roots) else sorted(rows))
            self._pool.recv()

    def _reset_wholly(self, rows: set[int], kwargs: list[dict[str, Any]] | None = None) -> None:
        """Reset rows with all their parts, whatever the masks say."""
        self._ask_for_all(rows)
        self._reset_rows(rows, kwargs)

    def _ask_for_all(self, rows: set[int]) -> None:
        for path, mask in self.masks.items():
            if path[-1] == rules.RESET:
                mask[sorted(rows)] = True

    def _newest(self) -> TensorDict:
        slot = self.slot
        root, made = self.roots[slot + 1], self.nexts[slot]
        if not self._newest_is_next.any():
            return self._clone(root)
        stale = torch.from_numpy(self._newest_is_next)
        return self._clone(
            {path: rules.choose(stale, made[path], kept) for path, kept in root.items()}
        )

    def _select(self, masks: dict[Path, torch.Tensor]) -> list[int] | None:
        """Write masks into the rows and say which rows are touched; None means all."""
        if not self._masks_are_full:
            for mask in self.masks.values():
                mask.fill_(True)
            self._masks_are_full = True
        if not masks:
            return None
        touched = None
        for path, mask in masks.items():
            rows = self.masks[path]
            rows.copy_(mask.reshape(*mask.shape, *(1,) * (rows.ndim - mask.ndim)))
            flat = mask.reshape(len(mask), -1).any(-1).cpu()
            touched = flat if touched is None else touched | flat
        self._masks_are_full = False
        assert touched is not None
        return touched.nonzero().squeeze(-1).tolist()

    def _clone(self, region: dict[Path, torch.Tensor]) -> TensorDict:
        device, later = self._device, self._non_blocking
        owned = {
            path: tensor.to(device, copy=True, non_blocking=later)
            for path, tensor in region.items()
        }
        return tensordict_of(owned, self.batch_size, device)

    def deliver_to(self, device: torch.device | None, *, non_blocking: bool) -> None:
        """Copy what comes out to ``device`` from now on."""
        self._device, self._non_blocking = device, _can_wait(device, non_blocking)


class TensorDictExchange:
    """Steps and resets by handing each sub-env its part of the TensorDict.

    Within one process nothing is copied, and the autograd graph is kept. With ``individual`` what
    comes out is a lazy stack, one TensorDict per row.
    """

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
        self._pool = pool
        self._recovery = recovery
        self.lost: set[int] = set()
        self._num_rows = len(metadata)
        self._metadata = metadata
        self._input_devices = [found.device for found in metadata]
        self._device = device
        self._non_blocking = False
        self._individual = individual
        self._root_keys = [
            [as_key(path) for path in found.paths("observation", "done")] for found in metadata
        ]
        self._last: list[TensorDictBase | None] = [None] * self._num_rows

    def _remember(self, row: int, td: TensorDictBase) -> None:
        """Keep a row's newest root: what the env says of itself, not what the caller put there."""
        self._last[row] = td.select(*self._root_keys[row], strict=False)

    def _input(self, td: TensorDictBase, row: int, *without: Any) -> TensorDictBase:
        """Give one row's part of ``td`` on the device of its sub-env, the CPU if it names none."""
        part = cast(TensorDictBase, td[row]).exclude(*without)
        device = self._input_devices[row] or torch.device("cpu")
        return part if part.device in (None, device) else part.to(device)

    def send(self, td: TensorDictBase, mask: torch.Tensor | None, *, advance: bool) -> None:
        """Remember the step; all of it happens in `recv`."""
        self._sent = td, mask, advance

    def recv(self) -> TensorDictBase:
        """Step the selected sub-envs and give their stacked `next`."""
        td, mask, advance = self._sent
        chosen = rows = _rows_of(mask, self._num_rows)
        if self._recovery.unstarted:
            rows = self._recovery.ready(chosen, self._reset_wholly)
        inputs = {}
        for row in rows:
            part = self._input(td, row, rules.STEP, "next")
            if mask is not None and mask.ndim > 1:
                part.set(rules.STEP, mask[row])
            inputs[row] = (part, {})
        nexts: dict[int, TensorDictBase] = {}

        def take(row: int, result: Any) -> None:
            data, following = result if advance else (result, None)
            nexts[row] = data.get("next")
            self._remember(row, nexts[row] if following is None else following)

        try:
            self._call("step_and_maybe_reset" if advance else "step", inputs, take)
        except WorkerError as error:
            self._recovery.repair(error)
        self.lost = self._tell_lost(td, chosen, nexts, advance) if self._recovery.lost else set()
        if mask is not None:
            nexts = self._keep_unstepped(td, mask, nexts)
        return self._stack([nexts[row] for row in range(self._num_rows)])

    def _tell_lost(
        self,
        td: TensorDictBase,
        stepped: list[int],
        nexts: dict[int, TensorDictBase],
        advanced: bool,
    ) -> set[int]:
        """Write `next` of the rows that were lost, and their root where the others have one."""
        lost = self._recovery.tell(stepped)
        for row in lost:
            nexts.pop(row, None)
        model = self._model(nexts)
        for row in lost:
            outcome = self._metadata[row].lost_next(self._input(td, row))
            nexts[row] = _like(model, outcome)
            self._remember(row, outcome)
        if advanced:
            self._recovery.begin(lost, self._reset_wholly)
        return lost

    def _keep_unstepped(
        self, td: TensorDictBase, mask: torch.Tensor, nexts: dict[int, TensorDictBase]
    ) -> dict[int, TensorDictBase]:
        """Give `next` of all rows: where ``mask`` is False their root values, or else zeros."""
        model = self._model(nexts)
        complete = {}
        for row, found in enumerate(self._metadata):
            skipped: TensorDictBase = found.skipped_next(self._input(td, row))
            if row in self.lost:
                complete[row] = nexts[row]
            elif row in nexts:
                complete[row] = keep_unstepped(nexts[row], skipped, mask[row])
            else:
                complete[row] = _like(model, skipped)
        return complete

    def _model(self, nexts: dict[int, TensorDictBase]) -> TensorDictBase | None:
        """Give an example of what sub-envs return, which may be more than their specs say."""
        return None if self._individual else next(iter(nexts.values()), None)

    def fresh_rows(self) -> TensorDictBase:
        """Give the newest root of every sub-env."""
        return self._stack([part for part in self._last if part is not None])

    def reset(
        self,
        td: TensorDictBase | None,
        masks: dict[Path, torch.Tensor],
        kwargs: list[dict[str, Any]] | None,
    ) -> TensorDictBase:
        """Reset what the masks select and give the newest known values of everything."""
        inputs: dict[int, TensorDictBase | None] = {}
        for row in range(self._num_rows):
            own = {level: mask[row] for level, mask in masks.items()}
            if own and not any(bool(mask.any()) for mask in own.values()):
                continue
            inputs[row] = None
            if td is None or row in self._recovery.unstarted:
                continue
            part = inputs[row] = self._input(td, row, "next", *masks_at(td))
            for level, mask in own.items():
                if not bool(mask.all()):
                    part.set(as_key((*level, rules.RESET)), mask)
        refuse_early_part(inputs.keys(), [part is not None for part in self._last])

        def reset(rows: set[int]) -> None:
            self._reset_rows({row: inputs[row] for row in sorted(rows)}, kwargs)

        wholly = partial(self._reset_wholly, kwargs=kwargs)
        self._recovery.reset(set(inputs), masks, reset, wholly)
        return self._stack(list(self._last))  # type: ignore[arg-type]

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
            replies = call_by_row(self._pool, "tensordicts", inputs, method, checked)
        except WorkerError as error:
            failed, replies = error, error.answers.values()
        for reply in replies:
            for row, result in reply.items():
                take(row, result)
        if failed is not None:
            raise failed

    def _stack(self, parts: list[TensorDictBase]) -> TensorDictBase:
        stacked = stack_rows(parts, individual=self._individual)
        if self._device is None:
            return stacked
        return stacked.to(self._device, non_blocking=self._non_blocking)

    def deliver_to(self, device: torch.device | None, *, non_blocking: bool) -> None:
        """Move what comes out to ``device`` from now on."""
        self._device, self._non_blocking = device, _can_wait(device, non_blocking)

    def sub_envs_are_on(self, device: torch.device) -> None:
        """Cast inputs to ``device`` from now on."""
        self._input_devices = [device] * self._num_rows
        self._metadata = [found.to(device) for found in self._metadata]


def _can_wait(device: torch.device | None, non_blocking: bool) -> bool:
    """Say whether a copy to ``device`` may end after the call: what reads it there is queued too."""
    return non_blocking and device is not None and device.type == "cuda"


def _by_slot(region: dict[Path, torch.Tensor], slots: int) -> list[dict[Path, torch.Tensor]]:
    """Turn leaves with a leading slot axis into one dict of leaves for each slot."""
    return [{path: tensor[slot] for path, tensor in region.items()} for slot in range(slots)]


def call_by_row(pool: Pool, method: str, values: dict[int, Any], *leading: Any) -> list[Any]:
    """Call ``method(*leading, {row: value})`` of every worker that owns one of the rows."""
    arguments, workers = [], []
    for worker, owned in enumerate(pool.rows_of):
        own = {row: values[row] for row in owned if row in values}
        if own:
            arguments.append(((*leading, own), {}))
            workers.append(worker)
    return pool.call_each(method, arguments, workers)


def tensordict_of(
    leaves: Mapping[Path, torch.Tensor], batch_size: torch.Size, device: Any
) -> TensorDict:
    """Build a (possibly nested) TensorDict of leaves by path that are on ``device`` already."""
    tree: dict[str, Any] = {}
    for path, tensor in leaves.items():
        if len(path) == 1:
            tree[path[0]] = tensor
            continue
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = tensor

    def build(node: dict[str, Any]) -> TensorDict:
        for name, value in node.items():
            if isinstance(value, dict):
                node[name] = build(value)
        return TensorDict._new_unsafe(node, batch_size=batch_size, device=device)

    return build(tree)


def masks_at(td: TensorDictBase) -> list:
    """List the `_reset` entries of a TensorDict."""
    return [
        key
        for key in td.keys(True, True)
        if (key if isinstance(key, str) else key[-1]) == rules.RESET
    ]


def refuse_early_part(rows: Collection[int], has_root: Sequence[bool] | np.ndarray) -> None:
    """Check that a reset leaves no row without data.

    Raises:
        ResetMaskError: a row that is not reset has never been before.
    """
    if len(rows) < len(has_root) and not all(
        known or row in rows for row, known in enumerate(has_root)
    ):
        raise ResetMaskError(
            "a partial reset came before the first full one, so there is no data of the other "
            "sub-envs. Call reset() once without a mask."
        )


def _like(model: TensorDictBase | None, outcome: TensorDictBase) -> TensorDictBase:
    """Add the entries that a model has more, as zeros."""
    if model is None:
        return outcome
    return model.apply(torch.zeros_like).update(outcome)  # type: ignore[union-attr]


def _rows_of(mask: torch.Tensor | None, count: int) -> list[int]:
    if mask is None:
        return list(range(count))
    return mask.reshape(count, -1).any(-1).nonzero().squeeze(-1).tolist()


def _fill(rows: torch.Tensor, value: torch.Tensor | None, path: Path) -> None:
    key = as_key(path)
    if value is None:
        raise MissingKeyError(
            f"the TensorDict has no {key!r}, which the env takes. "
            "Write it first, e.g. with env.rand_action(td)."
        )
    if value.shape != rows.shape:
        raise InputError(
            f"{key!r} has shape {tuple(value.shape)}, but the env takes {tuple(rows.shape)}. "
            "env.rand_action() shows the form it takes."
        )
    if value.dtype != rows.dtype:
        raise InputError(
            f"{key!r} has dtype {value.dtype}, but the env takes {rows.dtype}. "
            f"Convert it: value.to({rows.dtype})."
        )
    try:
        rows.copy_(value.detach() if value.requires_grad else value)
    except NotImplementedError as error:
        raise InputError(
            f"{key!r} is on the {value.device.type} device, which holds no data, but the env takes "
            "values. Build it on the CPU or on an accelerator."
        ) from error
