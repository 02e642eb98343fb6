"""Steps and resets of single sub-envs, each at its own time: what the exchanges of asynchronous pools add.

Each sub-env has its own worker, so a job of one moves nothing else. Requests to all at once go the
way of the exchange it derives from, and leaves and finds the same rows. Rows in memory that are sent or taken at the
same time are also moved together, where nothing was lost and nothing is masked.

Conventions
    row   number of a sub-env, and of its worker.
    td    root of one sub-env, batch size ``sub_batch``; masks in it select parts of that.
    kind  what is asked: a step, a reset, or a step and a reset of what is done then.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.batched.env_host import ADVANCE, RESET, RESTART, STEP
from envkit.batched.exchange.shared_rows import BufferExchange
from envkit.batched.exchange.tensordicts import TensorDictExchange
from envkit.batched.metadata import EnvMetaData
from envkit.data.paths import Path, as_key, tensordict_of
from envkit.data.transition import keep_unstepped
from envkit.errors import InputError, WorkerError
from envkit.specs.inputs import require_input
from envkit.transport import Job, Pool

JobKind = Literal["step", "reset", "step_and_maybe_reset"]
Leaves = dict[Path, torch.Tensor]


class Outcome(NamedTuple):
    """What a job has made: `next` of a step, and the root that follows a reset, each None where there is none."""

    following: TensorDictBase | None
    root: TensorDictBase | None


class _Recovering:
    """Handling of a row that failed and was built again, for both exchanges."""

    recovery: Any
    pool: Pool

    def _answer(self, job: Job) -> Any:
        """Return what a job has returned; None where its row was built again instead.

        Raises:
            WorkerError: it failed, and is not made good.
        """
        try:
            return self.pool.outcome(job)
        except WorkerError as error:
            self.recovery.repair(error)
            return None

    def _begin_anew(self, row: int, kind: JobKind) -> None:
        """Record that the loss of a row was reported; its next episode begins where the job was to begin one."""
        self.recovery.tell([row])
        if kind != "step":
            self._begin_episode(row)

    @abstractmethod
    def _begin_episode(self, row: int) -> None:
        """Reset a row that was built again, with all its parts."""


class BufferJobs(_Recovering, BufferExchange):
    """Rows in memory, moved one by one as well."""

    def has_root(self, row: int) -> bool:
        """Check whether a row has been reset once."""
        return bool(self._has_roots[row])

    def fill_one(self, row: int, kind: JobKind, td: TensorDictBase) -> None:
        """Check the inputs of a job of one row and write them, which are not read before `begin_one`.

        Actions of a row that is left out stay as they lie there.

        Raises:
            InputError, MissingKeyError: see `ActionInput.take`.
            StepMaskError: the mask does not fit.
        """
        if kind == "reset":
            self._write_states(row, td)
            return
        is_left_out = _is_left_out(td)
        for path, rows, _, _, is_action, _ in self._filled[self.slot]:
            value = td.get(path, None)
            if is_action and is_left_out:
                self._actions.require_form(path, value, row)
            elif is_action:
                self._actions.write_one(path, value, rows, row)
            else:
                require_input(as_key(path), value, rows.shape[1:], rows.dtype)
                rows[row].copy_(cast(torch.Tensor, value).detach())

    def fill_together(self, rows: Sequence[int], kind: JobKind, given: Leaves) -> bool:
        """Do what `fill_one` does for several rows, whose values are stacked; or say that it must be done one by one.

        It must where rows differ in what they take, and to name the row where something is refused.
        """
        if kind == "reset":
            return False
        for path, memory, _, _, is_action, _ in self._filled[self.slot]:
            value = given.get(path)
            if not is_action or value is None or not self._actions.are_alike:
                return False
            try:
                taken = self._actions.taken(path, value.detach().to(memory.device), len(rows))
            except InputError:
                return False
            memory.index_copy_(0, torch.tensor(rows, device="cpu"), taken)
        return True

    def begin_one(self, row: int, kind: JobKind, td: TensorDictBase) -> Job:
        """Have one row step, or be reset; its worker has no other job."""
        self._mask(row, td)
        pool = self.pool
        if kind != "reset":
            if row in self.recovery.unstarted:
                self._begin_episode(row)
            if not bool(self.masks[(rules.STEP,)][row].any()):
                return self._begin_skipped(row, kind, td)
            return pool.begin(row, STEP if kind == "step" else ADVANCE)
        given = () if row in self.recovery.unstarted else self._states_in(td)
        if given in ((), self._states):
            return pool.begin(row, RESTART if given else RESET)
        return pool.begin_call(row, "reset_rows", {row: (given, {})})

    def _begin_skipped(self, row: int, kind: JobKind, td: TensorDictBase) -> Job:
        """Have a row that is left out pass a step: what is known of it stays, but where it has ended and begins again."""
        root, following = self.roots[self.slot + 1], self.nexts[self.slot]
        flags = self.metadata[row].paths("done")
        advance, is_next = kind != "step", self.newest_is_next[row]
        for path in root:
            if not advance and not is_next:
                following[path][row].copy_(root[path][row])
            elif advance and is_next and path not in flags:  # those of a root are not set
                root[path][row].copy_(following[path][row])
        given = (td.get(as_key(path), None) for path in flags)
        has_ended = any(flag is not None and bool(flag.any()) for flag in given)
        skipped = {row: (advance, has_ended)}
        return self.pool.begin_call(row, "skip_rows", skipped)

    def begin_whole(self, row: int, kind: JobKind) -> Job:
        """Have one row step, with all its parts; its worker has no other job."""
        if not self._masks_are_full:
            for masks in self.masks.values():
                masks[row] = True
        if row in self.recovery.unstarted:
            self._begin_episode(row)
        return self.pool.begin(row, STEP if kind == "step" else ADVANCE)

    def _begin_episode(self, row: int) -> None:
        self.recovery.begin({row}, self._reset_rows)

    def _states_in(self, td: TensorDictBase) -> tuple[Path, ...]:
        return tuple(path for path in self._states if td.get(as_key(path), None) is not None)

    def _write_states(self, row: int, td: TensorDictBase) -> None:
        for path in self._states_in(td):
            value, rows = td.get(as_key(path)), self.inputs[self.slot][path]
            require_input(as_key(path), value, rows.shape[1:], rows.dtype)
            rows[row].copy_(value.detach())

    def _mask(self, row: int, td: TensorDictBase) -> None:
        """Write the masks that select parts of one row."""
        for path, masks in self.masks.items():
            given = td.get(as_key(path), None)
            if given is None:
                masks[row] = True
            else:
                masks[row] = given.reshape((*given.shape, *(1,) * (masks.ndim - 1 - given.ndim)))
                self._masks_are_full = False

    def take_one(self, row: int, kind: JobKind, td: TensorDictBase, job: Job) -> Outcome:
        """Return what a job that is done has made, copied.

        Raises:
            WorkerError: it failed, and is not made good.
        """
        self._answer(job)
        is_lost = row in self.recovery.lost
        if is_lost:
            self._begin_anew(row, kind)
        elif kind == "reset":
            self.recovery.unstarted.discard(row)
        self.newest_is_next[row] = kind == "step"
        self._has_roots[row] = True
        self.has_begun = bool(self._has_roots.all())
        root = None if kind == "step" else self._copied(self.roots[self.slot + 1], row)
        if kind == "reset":
            return Outcome(None, root)
        if is_lost:
            return Outcome(self.metadata[0].lost_next(td), root)
        following = self._copied(self.nexts[self.slot], row)
        return Outcome(_unmasked(self.metadata[0], td, following), root)

    def take_together(self, rows: Sequence[int], kind: JobKind) -> tuple[Leaves, Leaves] | None:
        """Do what `take_one` does for several rows, none of which failed: `next`, and the roots that follow, by path.

        Entries that a kind does not make are empty. None where a row was lost, which is reported one by one.
        """
        if not self.recovery.lost.isdisjoint(rows):
            return None
        if kind == "reset":
            self.recovery.unstarted.difference_update(rows)
        self.newest_is_next[rows] = kind == "step"
        self._has_roots[rows] = True
        self.has_begun = bool(self._has_roots.all())
        chosen = torch.tensor(rows, device="cpu")
        regions = (self.nexts[self.slot], self.roots[self.slot + 1])
        following, roots = (
            {} if kind == without else self._gathered(region, chosen)
            for region, without in zip(regions, ("reset", "step"), strict=True)
        )
        return following, roots

    def _gathered(self, region: Leaves, chosen: torch.Tensor) -> Leaves:
        found = {path: tensor.index_select(0, chosen) for path, tensor in region.items()}
        if self._device is None:
            return found
        return {path: tensor.to(self._device) for path, tensor in found.items()}

    def _copied(self, region: dict[Path, torch.Tensor], row: int) -> TensorDictBase:
        owned = {path: tensor[row].to(self._device, copy=True) for path, tensor in region.items()}
        return tensordict_of(owned, self.batch_size[1:], self._device, self.node_axes)


class TensorDictJobs(_Recovering, TensorDictExchange):
    """Whole TensorDicts, exchanged with one sub-env as well."""

    def has_root(self, row: int) -> bool:
        """Check whether a row has been reset once."""
        return self._last[row] is not None

    def fill_one(self, row: int, kind: JobKind, td: TensorDictBase) -> None:
        """Check the inputs of a job of one row.

        Raises:
            InputError, MissingKeyError: see `ActionInput.take`.
            StepMaskError: the mask does not fit.
        """
        if kind != "reset":
            self._usable(row, td)

    def _usable(self, row: int, part: TensorDictBase) -> TensorDictBase:
        """Return a row's part as `_checked` does; one that is left out with actions of 0: its transforms look at them."""
        if not _is_left_out(part):
            return self._checked(row, part)
        zeros, device = {}, part.device or torch.device("cpu")
        for path, rule in self._actions[row].items():
            if not self._individual:
                rule.require_form(part.get(as_key(path), None))
            zeros[as_key(path)] = torch.zeros(rule.shape, dtype=rule.dtype, device=device)
        return part.copy().update(zeros)

    def fill_together(self, rows: Sequence[int], kind: JobKind, given: Leaves) -> bool:
        """Note that rows are filled one by one."""
        return False

    def begin_one(self, row: int, kind: JobKind, td: TensorDictBase) -> Job:
        """Have one row step, or be reset; its worker has no other job."""
        pool = self.pool
        part: TensorDictBase | None = self._moved(td.exclude("next"), row)
        if row in self.recovery.unstarted:
            if kind == "reset":
                part = None
            else:
                self._begin_episode(row)
        if part is not None and kind != "reset":
            part = self._usable(row, part)
        return pool.begin_call(row, kind, not self._individual, {row: (part, {})})

    def _begin_episode(self, row: int) -> None:
        self.recovery.begin({row}, self._reset_wholly)

    def take_one(self, row: int, kind: JobKind, td: TensorDictBase, job: Job) -> Outcome:
        """Return what a job that is done has made.

        Raises:
            WorkerError: it failed, and is not made good.
        """
        answer = self._answer(job)
        if row in self.recovery.lost:
            self._begin_anew(row, kind)
            following = None if kind == "reset" else self.metadata[row].lost_next(td)
            if kind == "step":
                self._remember(row, cast(TensorDictBase, following))
            return self._delivered(following, None if kind == "step" else self._last[row])
        made = answer[row]
        if kind == "reset":
            self.recovery.unstarted.discard(row)
            self._remember(row, made)
            return self._delivered(None, self._last[row])
        data, root = made if kind == "step_and_maybe_reset" else (made, None)
        following = self._declared(row, data.get("next"))
        self._remember(row, following if root is None else root)
        following = _unmasked(self.metadata[row], td, following)
        return self._delivered(following, None if root is None else self._last[row])

    def _delivered(self, *made: TensorDictBase | None) -> Outcome:
        if self._device is None:
            return Outcome(*(part if part is None else part.copy() for part in made))
        return Outcome(*(part if part is None else part.to(self._device) for part in made))


def _is_left_out(td: TensorDictBase) -> bool:
    """Check whether a `_step` mask leaves out all of a row, whose actions may be anything then."""
    mask = td.get(rules.STEP, None)
    return mask is not None and not bool(rules.step_mask(mask, td.batch_size).any())


def _unmasked(
    metadata: EnvMetaData, td: TensorDictBase, following: TensorDictBase
) -> TensorDictBase:
    """Return `next` of one row with root values where a `_step` mask in ``td`` left parts out."""
    mask = td.get(rules.STEP, None)
    if mask is None:
        return following
    return keep_unstepped(
        following, metadata.skipped_next(td), rules.step_mask(mask, td.batch_size)
    )
