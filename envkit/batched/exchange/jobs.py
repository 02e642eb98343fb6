"""Steps and resets of single sub-envs, each at its own time: what the exchanges of asynchronous pools add.

Each sub-env has its own worker, so a job of one moves nothing else. Requests to all at once go the
way of the exchange it derives from, and leave and find the same newest data. Both exchanges have the same methods:
`fill_jobs` checks what is sent to some sub-envs, `begin_job` starts the job of one, `settle_job` looks after one that
is done, and `take_jobs` reads the results of several.

Conventions
    row   number of a sub-env, and of its worker.
    root  data of one sub-env, batch size ``sub_batch``; masks in it select parts of that.
    kind  what is asked: a step, a reset, or a step and a reset of what is done then.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.batched.env_host import ADVANCE, RESET, RESTART, STEP
from envkit.batched.exchange.shared_memory import BufferExchange, Input
from envkit.batched.exchange.tensordicts import TensorDictExchange
from envkit.batched.metadata import EnvMetaData
from envkit.data.merging import merge_rows
from envkit.data.paths import Path, as_key, tensordict_of
from envkit.errors import WorkerError
from envkit.specs.inputs import require_input
from envkit.transport import Job, Pool

JobKind = Literal["step", "reset", "step_and_maybe_reset"]


@dataclass(eq=False)
class Roots:
    """Roots that were sent together, owned: a dense TensorDict of batch size ``(len(rows), *sub_batch)``.

    Attributes:
        rows: the sub-envs they are of.
        left_out: rows of which a ``_step`` mask leaves out all parts; their actions may be anything.
    """

    rows: list[int]
    td: TensorDict
    left_out: set[int] = field(default_factory=set)

    def find_left_out(self) -> None:
        """Read the ``_step`` mask.

        Raises:
            StepMaskError: it does not fit.
        """
        mask = self.td.get(rules.STEP, None)
        if mask is not None:
            moved = rules.step_mask(mask, self.td.batch_size).reshape(len(self.rows), -1).any(-1)
            pairs = zip(self.rows, moved.tolist(), strict=True)
            self.left_out = {row for row, is_moved in pairs if not is_moved}

    def of(self, row: int) -> TensorDictBase:
        """Return the root of a sub-env."""
        return cast(TensorDictBase, self.td[self.rows.index(row)])


@dataclass(eq=False)
class SentJob:
    """A job of one sub-env.

    Attributes:
        roots: what was sent at the same time; the root of this sub-env is among it.
        is_slot: whether it was sent with an int ``env_index``.
        is_lost: whether the sub-env failed, and was built again.
    """

    row: int
    kind: JobKind
    roots: Roots
    job: Job
    is_slot: bool
    is_lost: bool = False

    @property
    def keeps_some(self) -> bool:
        """Whether its `next` is not, or not wholly, what the sub-env made."""
        return self.is_lost or rules.STEP in self.roots.td.keys()

    def completed(self, following: TensorDictBase | None, metadata: EnvMetaData) -> TensorDictBase:
        """Return `next` of the job: root values where a mask left parts out, and a truncated episode for a lost row."""
        root = self.roots.of(self.row)
        if self.is_lost or following is None:
            return metadata.lost_next(root)
        mask = root.get(rules.STEP, None)
        if mask is None:
            return following
        moved = rules.step_mask(mask, root.batch_size)
        return merge_rows(metadata.skipped_next(root), following, {(): moved})


Results = tuple[TensorDictBase | None, TensorDictBase | None]
"""`next` of some steps, and the roots that follow resets, stacked; None where a kind has none."""


class _Recovering:
    """Handling of a row that failed and was built again, for both exchanges."""

    recovery: Any
    pool: Pool

    def settle_job(self, sent: SentJob) -> None:
        """Process a job that is done: a row that failed is built again, and begins an episode where it was to.

        Raises:
            WorkerError: it failed, and is not built again.
        """
        if not sent.is_lost:
            try:
                self.pool.outcome(sent.job)
            except WorkerError as error:
                self.recovery.repair(error)
            sent.is_lost = sent.row in self.recovery.lost
        if sent.is_lost:  # also where Ctrl-C came before
            self.recovery.tell([sent.row])
            if sent.kind != "step" and sent.row in self.recovery.unstarted:
                self._begin_episode(sent.row)

    @abstractmethod
    def _begin_episode(self, row: int) -> None:
        """Reset a row that was built again, with all its parts."""


class BufferJobs(_Recovering, BufferExchange):
    """Rows in memory, moved one by one as well."""

    def has_root(self, row: int) -> bool:
        """Check whether a row has been reset once."""
        return bool(self._has_roots[row])

    def fill_jobs(self, roots: Roots, kind: JobKind) -> None:
        """Check the inputs of jobs and write them, which are not read before `begin_job`.

        Actions of a row that is left out may stay as they lie there.

        Raises:
            InputError, MissingKeyError: see `ActionInput.take`.
            StepMaskError: the mask does not fit.
        """
        if kind != "reset":
            roots.find_left_out()
        states = self._states_in(roots.td) if kind == "reset" else None
        for entry in self._filled[self.slot]:
            if states is not None and entry.path not in states:
                continue
            if entry.is_action:
                self._write_actions(entry, roots)
            else:
                key, value = as_key(entry.path), roots.td.get(entry.path, None)
                one = None if value is None else value[0]
                require_input(key, one, entry.rows.shape[1:], entry.rows.dtype)
                entry.rows[roots.rows] = cast(torch.Tensor, value).detach().to(entry.rows.device)
        for path, masks in self.masks.items():
            mask = roots.td.get(as_key(path), None)
            if mask is not None:
                shape = mask.shape[: masks.ndim]
                mask = mask.reshape((*shape, *(1,) * (masks.ndim - len(shape))))
                masks[roots.rows] = mask.to(masks.device)
                self._masks_are_full = False
            elif not self._masks_are_full:
                masks[roots.rows] = True

    def _write_actions(self, entry: Input, roots: Roots) -> None:
        """Write the values of one action, at once where they fit as they are, else one by one."""
        value, rule = roots.td.get(entry.path, None), entry.rule
        if (
            rule is not None
            and rule.values_of(value, (len(roots.rows), *entry.shape[1:])) is not None
        ):
            entry.rows[roots.rows] = cast(torch.Tensor, value).detach()
            return
        for index, row in enumerate(roots.rows):
            one = None if value is None else value[index]
            if row in roots.left_out:
                self._actions.require_form(entry.path, one, row)
            else:
                self._actions.write_one(entry.path, one, entry.rows, row)

    def begin_job(self, roots: Roots, row: int, kind: JobKind) -> Job:
        """Start a step or a reset of one row; its worker has no other job. A step of a lost row only reports that."""
        is_new = row in self.recovery.unstarted
        if kind == "reset":
            given = () if is_new else self._states_in(roots.td)
            if given in ((), self._states):
                return self.pool.begin(row, RESTART if given else RESET)
            return self.pool.begin_call(row, "reset_rows", {row: (given, {})})
        if row in self.recovery.lost:
            return self.pool.done_job(row)
        if is_new:
            self._begin_episode(row)
        if row in roots.left_out:
            return self._skip(row, kind, roots.of(row))
        return self.pool.begin(row, STEP if kind == "step" else ADVANCE)

    def _skip(self, row: int, kind: JobKind, root: TensorDictBase) -> Job:
        """Skip a step in a row that is left out: its newest data stays, but where it has ended and begins again."""
        fresh, following = self.roots[self.slot + 1], self.nexts[self.slot]
        flags = self.metadata[row].paths("done")
        advance, is_next = kind != "step", self.newest_is_next[row]
        for path in fresh:
            if not advance and not is_next:
                following[path][row].copy_(fresh[path][row])
            elif advance and is_next and path not in flags:  # those of a root are not set
                fresh[path][row].copy_(following[path][row])
        given = (root.get(as_key(path), None) for path in flags)
        has_ended = any(flag is not None and bool(flag.any()) for flag in given)
        return self.pool.begin_call(row, "skip_rows", {row: (advance, has_ended)})

    def _begin_episode(self, row: int) -> None:
        self.recovery.begin({row}, self._reset_rows)

    def _states_in(self, td: TensorDictBase) -> tuple[Path, ...]:
        return tuple(path for path in self._states if td.get(as_key(path), None) is not None)

    def take_jobs(self, jobs: Sequence[SentJob], kind: JobKind) -> Results:
        """Return what jobs of a kind, which are settled, have made, copied."""
        rows = [sent.row for sent in jobs]
        if kind == "reset":
            self.recovery.unstarted.difference_update(rows)
        self.newest_is_next[rows] = kind == "step"
        self._has_roots[rows] = True
        self.has_begun = bool(self._has_roots.all())
        chosen = torch.tensor(rows, device="cpu")
        roots = None if kind == "step" else self._copied(self.roots[self.slot + 1], chosen)
        if kind == "reset":
            return None, roots
        following = self._copied(self.nexts[self.slot], chosen)
        for index, sent in enumerate(jobs):
            if sent.keeps_some:
                own = sent.completed(following[index], self.metadata[0])
                for path in self.nexts[self.slot]:
                    following.get(as_key(path))[index] = own.get(as_key(path))
        return following, roots

    def _copied(self, region: dict[Path, torch.Tensor], chosen: torch.Tensor) -> TensorDict:
        owned = {path: tensor.index_select(0, chosen) for path, tensor in region.items()}
        if self._device is not None:
            owned = {path: tensor.to(self._device) for path, tensor in owned.items()}
        size = torch.Size((len(chosen), *self.batch_size[1:]))
        return tensordict_of(owned, size, self._device, self.node_axes)


class TensorDictJobs(_Recovering, TensorDictExchange):
    """Whole TensorDicts, exchanged with one sub-env as well."""

    def has_root(self, row: int) -> bool:
        """Check whether a row has been reset once."""
        return self._last[row] is not None

    def fill_jobs(self, roots: Roots, kind: JobKind) -> None:
        """Check the inputs of jobs; see `BufferJobs.fill_jobs`."""
        if kind != "reset":
            roots.find_left_out()
            for row in roots.rows:
                self._usable(roots, row)

    def _usable(self, roots: Roots, row: int) -> TensorDictBase:
        """Return a row's root as `_checked` does; one that is left out with actions of 0: its transforms look at them."""
        root = roots.of(row)
        if row not in roots.left_out:
            return self._checked(row, root)
        zeros, device = {}, root.device or torch.device("cpu")
        for path, rule in self._actions[row].items():
            if not self._individual:
                rule.require_form(root.get(as_key(path), None))
            zeros[as_key(path)] = torch.zeros(rule.shape, dtype=rule.dtype, device=device)
        return root.copy().update(zeros)

    def begin_job(self, roots: Roots, row: int, kind: JobKind) -> Job:
        """Start a step or a reset of one row; see `BufferJobs.begin_job`."""
        root, is_new = None, row in self.recovery.unstarted
        if kind != "reset":
            if row in self.recovery.lost:
                return self.pool.done_job(row)
            if is_new:
                self._begin_episode(row)
            root = self._moved(self._usable(roots, row), row)
        elif not is_new:
            root = self._moved(roots.of(row), row)
        return self.pool.begin_call(row, kind, not self._individual, {row: (root, {})})

    def _begin_episode(self, row: int) -> None:
        self.recovery.begin({row}, self._reset_wholly)

    def take_jobs(self, jobs: Sequence[SentJob], kind: JobKind) -> Results:
        """Return what jobs of a kind, which are settled, have made."""
        nexts, roots = [], []
        for sent in jobs:
            following, root = self._taken(sent)
            nexts.append(following)
            roots.append(self._apart(root))
        following = None if kind == "reset" else self.deliver(nexts)
        return following, None if kind == "step" else self.deliver(roots)

    def _taken(self, sent: SentJob) -> tuple[TensorDictBase | None, TensorDictBase]:
        """Return `next` of a job and the newest root of its row, which is remembered."""
        row, following = sent.row, None
        answer = None if sent.is_lost else self.pool.outcome(sent.job)[row]
        if sent.kind == "reset" and answer is not None:
            self.recovery.unstarted.discard(row)
            self._remember(row, answer)
        elif sent.kind != "reset":
            if answer is not None:
                data, root = answer if sent.kind == "step_and_maybe_reset" else (answer, None)
                following = self._declared(row, data.get("next"))
                self._remember(row, following if root is None else root)
            following = sent.completed(following, self.metadata[row])
            if answer is None and sent.kind == "step":
                self._remember(row, following)
        return following, cast(TensorDictBase, self._last[row])
