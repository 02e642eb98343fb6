"""Steps and resets through rows in memory that sub-envs share with the batched env.

Rows are fast and need entries of fixed, equal shapes; `tensordicts` serves everything else. Both
give the same data. A step may also be read where the sub-envs wrote it, by callers that look at a few entries and keep
none of them: both ways share one exchange, which knows what is newest.

Conventions
    rows    global row numbers, or None for all.
    masks   level path -> bool mask over rows and the sub-envs' own batch, see `rules`.
    td      data of the whole batch, batch size (rows, *sub_batch).
    idle    rows that were not stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.batched.env_host import ADVANCE, RESET, RESTART, STEP
from envkit.batched.exchange.checks import refuse_early_part, require_leaves, rows_of
from envkit.batched.exchange.memory import SLOT, BufferPlan, Moment, Rings, RowMemory
from envkit.batched.metadata import EnvMetaData
from envkit.batched.recovery import Recovery
from envkit.data.paths import Key, Path, as_key, tensordict_of
from envkit.data.plain import from_plain, plain
from envkit.errors import StaleDataError, WorkerError
from envkit.specs import TensorSpec
from envkit.specs.inputs import ActionInput, require_input
from envkit.transport import Layout, Pool, Traffic
from envkit.transport.pool import call_by_row


class Round(NamedTuple):
    """A step that was begun: which it is, its rows (None for all), what was known before, how it ends."""

    number: int
    rows: list[int] | None
    root: TensorDictBase | None
    advance: bool


class Input(NamedTuple):
    """Where an input of a step lies.

    Attributes:
        rows, memory: its rows, as a tensor and, if it has a rule, as an array.
        shape: of these.
        is_action: it is converted to what its spec says; all else must be that.
        rule: of an action, see `ActionRows.rule_of_all`.
    """

    path: Path
    rows: torch.Tensor
    memory: Any
    shape: tuple[int, ...]
    is_action: bool
    rule: ActionInput | None


class BufferExchange(RowMemory):
    """Steps and resets through rows in memory that parent and hosts share.

    Stepping one by one leaves ``slot`` as it is; `recording` moves it. ``more_inputs`` are sent beside what the
    specs ask for. Actions are converted, or refused, here: the sub-envs trust their rows. ``lost`` are the rows
    which the last step reported as lost, see `recovery`.

    Args:
        metadata: of each row; they share one layout.
    """

    keeps_unstepped = False
    """`recv` gives the root values of rows that were not stepped."""

    def __init__(
        self,
        pool: Pool,
        metadata: Sequence[EnvMetaData],
        device: Any,
        *,
        more_inputs: Mapping[Path, TensorSpec],
        recovery: Recovery,
    ):
        model, num_rows = metadata[0], len(metadata)
        plan = BufferPlan.of(model, num_rows, more_inputs)
        arrays = pool.bind(_layout(plan, num_rows))
        super().__init__(
            Rings(*(plan.tensors(arrays, region) for region in ("in", "root", "next"))),
            model.paths("action"),
            arrays[SLOT.name],
            torch.Size((num_rows, *model.batch_size)),
            model.node_axes(),
            device,
        )
        self.pool = pool
        self.recovery = recovery
        self.metadata = metadata
        self._actions = ActionRows(metadata)
        self._filled = [
            [self._input(path, rows) for path, rows in inputs.items()] for inputs in self.inputs
        ]
        self.has_large_rows = plan.has_large_rows
        self.masks = plan.tensors(arrays, "mask")
        for mask in self.masks.values():
            mask.fill_(True)
        self._masks_are_full = True
        self._states = tuple(model.paths("state"))
        self._has_roots = np.zeros(num_rows, bool)
        self.lost: set[int] = set()
        self._rounds = 0  # steps and resets so far

    def _input(self, path: Path, rows: torch.Tensor) -> Input:
        rule = self._actions.rule_of_all(path)
        memory = None if rule is None else rows.numpy()
        return Input(path, rows, memory, tuple(rows.shape), path in self._actions.paths, rule)

    # --------------------------------------------------------------------------------------- step

    def fill(
        self,
        inputs: TensorDictBase | Mapping[Path, Any],
        mask: torch.Tensor | None,
        slot: int | None = None,
    ) -> list[int] | None:
        """Check the inputs of a step and write them into the rows, which are not read before `wake`.

        Args:
            inputs: tensors or arrays by path, of all rows; those of rows that are not stepped may hold anything.
            mask: which parts are stepped, shape (rows,) or (rows, *sub_batch); None: all.
            slot: where; None: where the last step was.

        Returns:
            The rows that are stepped, for `wake`; None: all.
        """
        rows = None if mask is None else rows_of(mask, len(mask))
        for path, leaf, memory, shape, is_action, rule in self._filled[
            self.slots[0] if slot is None else slot
        ]:
            value = inputs.get(path, None)
            array = None if rule is None else rule.values_of(value, shape)
            if array is not None:
                np.copyto(memory, array)
            elif is_action:
                self._actions.write(path, value, leaf, rows)
            else:
                fill(leaf, value, path)
        if mask is not None and mask.ndim > 1:
            return self._select({(rules.STEP,): mask})
        if not self._masks_are_full:
            self._select({})
        return rows

    def wake(
        self,
        root: TensorDictBase | None,
        rows: list[int] | None,
        *,
        advance: bool,
        slot: int | None = None,
    ) -> Round:
        """Start a step of some rows, None: of all, with the inputs as they lie there.

        ``root`` is what is known before; None where it lies in the rows too. ``slot`` is that of `fill`.
        """
        if slot is not None:
            self.slot = slot
        elif self._leave:
            self.hand_over()
        self._rounds += 1
        sent = Round(self._rounds, rows, root, advance)
        if self.recovery.unstarted:
            chosen = range(len(self.newest_is_next)) if rows is None else rows
            rows = self.recovery.ready(chosen, self._reset_rows)
        self.pool.send(ADVANCE if advance else STEP, rows)
        return sent

    def wait(self, sent: Round) -> Moment:
        """Wait for the step, and give the rows of its `next`; those that were not stepped hold anything.

        Raises:
            StaleDataError: something else was begun meanwhile, and has the rows.
        """
        if sent.number != self._rounds:
            raise StaleDataError(
                "the env was stepped or reset again before the result of this step was received, so that result is "
                "overwritten. Receive each step before you begin the next step or a reset."
            )
        rows = slice(None) if sent.rows is None else sent.rows
        self.newest_is_next[rows] = not sent.advance  # also where others fail, or Ctrl-C comes
        try:
            self.pool.recv()
        except WorkerError as error:
            self.recovery.repair(error)
        self.lost = set()
        if self.recovery.lost:
            self.lost = self._tell_lost(sent)
        return self.nexts[self.slots[0]]

    def _tell_lost(self, sent: Round) -> set[int]:
        """Write `next` of those rows of a step that were lost, and their root where the others have one."""
        lost, root = self.recovery.tell(sent.rows), sent.root
        with torch.no_grad():
            if root is None:
                root = tensordict_of(self.roots[self.slot], self.batch_size, None, self.node_axes)
            for row in lost:
                outcome = self.metadata[0].lost_next(root[row])
                for path, tensor in self.nexts[self.slot].items():
                    tensor[row].copy_(outcome.get(as_key(path)))
        if sent.advance:
            self.recovery.begin(lost, self._reset_rows)
        return lost

    def check_actions(self, rows: Mapping[Path, np.ndarray]) -> None:
        """Check actions that were written into the rows of a slot; see `fill`."""
        for path, value in rows.items():
            self._actions.check(path, value)

    def fresh_rows(self) -> TensorDict:
        """Return the root rows as the last reset or advance left them."""
        return self.deliver(self.roots[self.slot + 1])

    # -------------------------------------------------------------------------------------- reset

    def reset(
        self,
        td: TensorDictBase | None,
        masks: dict[Path, torch.Tensor],
        kwargs: list[dict[str, Any]] | None,
    ) -> TensorDict:
        """Reset what the masks select and give the newest known values of everything."""
        self.begin_episodes(td, masks, kwargs)
        return self.newest()

    def begin_episodes(
        self,
        td: TensorDictBase | None,
        masks: dict[Path, torch.Tensor],
        kwargs: list[dict[str, Any]] | None = None,
    ) -> None:
        """Reset what the masks select, all where there are none, and leave the roots in the rows."""
        self.hand_over()
        self._rounds += 1
        rows = self._select({(*level, rules.RESET): mask for level, mask in masks.items()})
        chosen = set(range(len(self._has_roots)) if rows is None else rows)
        refuse_early_part(chosen, self._has_roots)
        states = () if td is None else self._take_states(td)
        self.recovery.reset(
            chosen,
            masks,
            partial(self._reset_rows, kwargs=kwargs, states=states),
            partial(self._reset_rows, kwargs=kwargs),
        )
        touched = slice(None) if rows is None else rows
        self.newest_is_next[touched] = False
        self._has_roots[touched] = True
        self.has_begun = True  # the first reset was one of all rows

    def begin_ended(self, rows: list[int]) -> None:
        """Reset some rows within a run, which moves all of them, and leave their roots in the rows."""
        self._rounds += 1
        self._reset_rows(set(rows))
        self.newest_is_next[rows] = False

    def _take_states(self, td: TensorDictBase) -> tuple[Path, ...]:
        """Write the states that ``td`` holds into the rows, and name them."""
        found = {path: td.get(as_key(path), None) for path in self._states}
        given = {path: value for path, value in found.items() if value is not None}
        for path, value in given.items():
            fill(self.inputs[self.slot][path], value, path)
        return tuple(given)

    def _reset_rows(
        self,
        rows: set[int],
        kwargs: list[dict[str, Any]] | None = None,
        states: tuple[Path, ...] = (),
    ) -> None:
        """Reset rows from the inputs ``states`` that lie there; rows whose env is new start from nothing.

        Such an env has no root yet, so it begins with all its parts, whatever the masks say.
        """
        new = self.recovery.unstarted & rows if states else set()
        if kwargs is not None or new or states not in ((), self._states):
            inputs = {
                row: (() if row in new else states, kwargs[row] if kwargs else {})
                for row in sorted(rows)
            }
            call_by_row(self.pool, "reset_rows", inputs)
        elif rows:
            command = RESTART if states else RESET
            self.pool.send(command, None if len(rows) == len(self._has_roots) else sorted(rows))
            self.pool.recv()

    @property
    def has_lost(self) -> bool:
        """Whether rows were lost that were not reported, or that have not begun again."""
        return bool(self.recovery.unstarted)

    def newest(self) -> TensorDict:
        """Return what is known now of every row, as a root."""
        slot = self.slot
        root, following = self.roots[slot + 1], self.nexts[slot]
        if not self.newest_is_next.any():
            return self.deliver(root)
        stale = torch.from_numpy(self.newest_is_next)
        newest = {path: rules.choose(stale, following[path], kept) for path, kept in root.items()}
        return self.deliver(Moment(newest))

    def select_all(self) -> None:
        """Select every part of every row for steps that nothing is filled for; a run that is under way is ended."""
        self.hand_over()
        if not self._masks_are_full:
            self._select({})

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
            rows.copy_(mask.reshape((*mask.shape, *(1,) * (rows.ndim - mask.ndim))))
            flat = mask.reshape(len(mask), -1).any(-1).cpu()
            touched = flat if touched is None else touched | flat
        self._masks_are_full = False
        assert touched is not None
        return touched.nonzero().squeeze(-1).tolist()

    # ----------------------------------------------------------------------------------- resuming

    def state(self) -> list[Any]:
        """Return the newest root of every row in plain form, None before its first reset."""
        newest = self.newest()
        return [plain(newest[row]) if had else None for row, had in enumerate(self._has_roots)]

    def take(self, state: Sequence[Any]) -> None:
        """Load what `state` of any exchange returned.

        Raises:
            ResumeError: it has other entries.
        """
        self.hand_over()
        for row, saved in enumerate(state):
            self._has_roots[row] = self.newest_is_next[row] = saved is not None
            if saved is None:
                continue
            root: TensorDictBase = from_plain(saved)
            rows = {path: self.nexts[self.slot][path][row] for path in self.roots[0]}
            require_leaves(root, {path: tuple(leaf.shape) for path, leaf in rows.items()})
            for path, leaf in rows.items():
                leaf.copy_(root.get(as_key(path)))
        self.has_begun = bool(self._has_roots.all())


def _layout(plan: BufferPlan, num_rows: int) -> Layout:
    """Lay out the rows of a plan, and say what of them each command and method moves."""
    asked = (SLOT.name, *plan.names("in", "mask"))
    reset, written = Traffic(asked, plan.names("root")), plan.names("next", "root")
    traffic: dict[int | str, Traffic] = {
        STEP: Traffic(asked, plan.names("next")),
        ADVANCE: Traffic(asked, written),
        "skip_rows": Traffic((*asked, *written), written),
        **dict.fromkeys((RESET, RESTART, "reset_rows"), reset),
    }
    return Layout(tuple(plan.fields()), num_rows, traffic, SLOT.name)


def fill(rows: torch.Tensor, value: torch.Tensor | None, path: Path) -> None:
    """Write an input of the form of its rows, or say what is wrong with it."""
    require_input(as_key(path), value, rows.shape, rows.dtype)
    assert value is not None
    rows.copy_(value.detach() if value.requires_grad else value)


# ------------------------------------------------------------------------------------------ actions


class ActionRows:
    """Write actions into the rows of the sub-envs, each as the spec of its row says.

    Args:
        metadata: of each row; they share one layout.
        first: what the first row is called in messages.
    """

    def __init__(self, metadata: Sequence[EnvMetaData], *, first: int = 0):
        self._first = first
        self._runs = [(found.action_inputs(), rows) for found, rows in _runs(metadata)]

    @property
    def paths(self) -> set[Path]:
        """The actions that have a rule."""
        return set(self._runs[0][0])

    def rule_of_all(self, path: Path) -> ActionInput | None:
        """Return the rule of an action, if it is the same in all rows and takes what fits as it is."""
        rule = self._runs[0][0].get(path) if len(self._runs) == 1 else None
        return rule if rule is not None and rule.takes_as_is else None

    def write(
        self,
        path: Path,
        value: torch.Tensor | np.ndarray | None,
        rows: torch.Tensor,
        stepped: Sequence[int] | None = None,
    ) -> None:
        """Convert one action of all rows and write it; those that are not ``stepped`` (None steps all) hold anything.

        Raises:
            InputError, MissingKeyError: see `ActionInput.take`.
        """
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        for inputs, run in self._runs:
            rule = inputs[path]
            rule.require_form(value, (len(rows),))  # reported as the caller sees it
            assert value is not None
            own = None if stepped is None else [row - run.start for row in stepped if row in run]
            part = value[run.start : run.stop].detach().to(rows.device)
            taken = rule.converted(part, (len(run),), rows=own, first=self._first + run.start)
            rows[run.start : run.stop].copy_(taken)

    def check(self, path: Path, rows: np.ndarray) -> None:
        """Check, and convert, rows that hold an action of all sub-envs already; see `write`."""
        for inputs, run in self._runs:
            part = rows[run.start : run.stop] if len(self._runs) > 1 else rows
            if inputs[path].values_of(part, part.shape) is None:
                taken = inputs[path].take(
                    torch.from_numpy(part), (len(run),), first=self._first + run.start
                )
                part[...] = taken.numpy()

    def write_one(
        self, path: Path, value: torch.Tensor | None, rows: torch.Tensor, row: int
    ) -> None:
        """Write one action of one row; ``value`` has no axis of rows.

        Raises:
            InputError, MissingKeyError: see `ActionInput.take`.
        """
        rule = self.require_form(path, value, row)
        assert value is not None
        rows[row].copy_(rule.take(value.detach().to(rows.device), first=row))

    def require_form(self, path: Path, value: torch.Tensor | None, row: int) -> ActionInput:
        """Check one action of one row but for its numbers, which may be anything, and give its rule; see `write_one`."""
        rule = next(inputs[path] for inputs, run in self._runs if row in run)
        rule.require_form(value, ())
        return rule


def _runs(metadata: Sequence[EnvMetaData]) -> Iterator[tuple[EnvMetaData, range]]:
    """Part the rows into runs of equal action specs."""
    kinds: list[EnvMetaData] = []

    def kind_of(one: EnvMetaData) -> int:
        for number, kind in enumerate(kinds):
            if one is kind or one.full_spec("action") == kind.full_spec("action"):
                return number
        kinds.append(one)
        return len(kinds) - 1

    start = 0
    for kind, run in groupby(map(kind_of, metadata)):
        stop = start + len(list(run))
        yield kinds[kind], range(start, stop)
        start = stop


Arrays = dict[Key, np.ndarray]


class RowsInPlace:
    """Advance the rows of a pool; see `envkit.env.runs`.

    Args:
        exchange: what steps the rows.
        is_current: says whether the env still delivers what ``exchange`` holds, on the CPU.
        may_lose: rows may be lost, and are reported then by what was known of them before the step.
    """

    def __init__(self, exchange: BufferExchange, is_current: Callable[[], bool], *, may_lose: bool):
        self._exchange, self._may_lose = exchange, may_lose
        self.is_current = is_current
        self._moments: dict[int, tuple[Arrays, Arrays]] = {}

    @staticmethod
    def can_show(exchange: BufferExchange) -> bool:
        """Check whether NumPy knows the dtypes of all entries."""
        regions = (*exchange.inputs, *exchange.roots, *exchange.nexts)
        return all(rows.dtype != torch.bfloat16 for region in regions for rows in region.values())

    def root(self) -> TensorDict:
        """Return what is known now, as its own TensorDict."""
        return self._exchange.newest()

    def advance(
        self, actions: Mapping[Path, torch.Tensor | np.ndarray], mask: np.ndarray | None
    ) -> tuple[Arrays, Arrays]:
        """Step the rows of a mask (None: all), and reset those that end; gives `next` and the root that follows.

        Idle rows show in `next` what their root holds, with reward 0. Their values in ``actions`` may be anything.

        Raises:
            InputError: (a ValueError) an action is none of the spec; nothing has moved then.
            WorkerError: a worker failed, and may not be restarted.
        """
        exchange = self._exchange
        if mask is not None and mask.all():
            mask = None
        root = self.root() if self._may_lose or exchange.has_lost else None
        rows = exchange.fill(actions, None if mask is None else torch.from_numpy(mask))
        exchange.wait(exchange.wake(root, rows, advance=True))
        following, fresh = self._at(exchange.slot)
        if mask is not None:
            self._keep_idle(following, fresh, np.flatnonzero(~mask))
        return following, fresh

    def _keep_idle(self, following: Arrays, root: Arrays, idle: np.ndarray) -> None:
        # Where `next` is newest already, it holds what the root would.
        at_root = idle[~self._exchange.newest_is_next[idle]]
        for key, values in following.items():
            if key in root:
                values[at_root] = root[key][at_root]
            else:
                values[idle] = 0  # rewards

    def _at(self, slot: int) -> tuple[Arrays, Arrays]:
        if slot not in self._moments:
            exchange = self._exchange
            self._moments[slot] = _arrays(exchange.nexts[slot]), _arrays(exchange.roots[slot + 1])
        return self._moments[slot]


def _arrays(region: Mapping[Path, torch.Tensor]) -> Arrays:
    return {as_key(path): rows.numpy() for path, rows in region.items()}
