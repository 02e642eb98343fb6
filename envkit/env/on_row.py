"""Envs that reset, step and run on a row of memory wherever that holds all that there is to know.

`OnRow` decides when that is. Its maker decides how a row is stepped; what a row does not hold goes the general
way, with the same data.

Conventions
    core   steps the simulator, and what is seen of it, on rows of memory; see `envkit.batched.bound_envs.row_core`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Protocol

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.env.runs import Record, Run, Runs
from envkit.env.stepping import Stepping
from envkit.env.tickets import Ticket
from envkit.specs.lasting import is_traced, lasting


class Row(Protocol):
    """The memory that one env is stepped on."""

    def fits(self, inputs: TensorDictBase) -> bool:
        """Check whether a row holds all that a step is given."""
        ...

    def check(self, inputs: TensorDictBase) -> None:
        """Refuse what a step would refuse."""
        ...

    def step(self, inputs: TensorDictBase, *, advance: bool = False) -> TensorDictBase:
        """Step with what `fits`, and return the ``next``; with ``advance`` reset what has ended."""
        ...

    def fresh_root(self) -> TensorDictBase | None:
        """Return the root that follows the last step, made with ``advance``; None where no episode has ended."""
        ...

    def reset(self, mask: torch.Tensor | None, **kwargs: Any) -> TensorDictBase:
        """Begin an episode, and return its root; with batch axes, where a mask selects them (None: all)."""
        ...

    def record(self, env: Any, run: Run) -> Record:
        """Make a rollout as `Runs.record` promises; None where rows cannot hold it."""
        ...


class OnRow(Stepping):
    """The part of an env that uses rows; it is in front of the class that goes the general way.

    `_is_plain` is decided once. It is decided again after a setting that it reads was assigned, or a method that rows
    would pass by, and after the specs have changed.
    """

    _read_by_rows: ClassVar[frozenset[str]] = frozenset(("run_type_checks",))
    """Attributes that `_find_plain` reads beside the specs."""

    @abstractmethod
    def _find_plain(self) -> bool:
        """Find out whether rows hold all that a step takes and gives."""

    @abstractmethod
    def row_core(self) -> Any:
        """Return the core that steps this env, or None where it cannot be stepped on rows."""

    @abstractmethod
    def _row_on(self, core: Any, env: Any) -> Row:
        """Make a row that ``core`` steps, for the specs of ``env``: this one, or one around it."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._read_by_rows or name in self._fast_path_bypasses:
            self._declared.cache.pop("plain", None)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._declared.cache.pop("plain", None)

    @property
    def _is_plain(self) -> bool:
        """Whether rows hold all that a step takes and gives."""
        return self._declared.cached("plain", self._find_plain)

    @property
    def _row(self) -> Row | None:
        """The row of memory on which this env steps; None where it needs more than rows hold."""
        declared = self._declared
        if not (declared.remembers and self._is_plain):
            return None
        if "row" not in declared.cache:
            if is_traced():
                return None
            declared.cache["row"] = self._made_row()
        return declared.cache["row"]

    @lasting()
    def _made_row(self) -> Row | None:
        core = self.row_core()
        return None if core is None else self._row_on(core, self)

    def _begin_on_row(self) -> None:
        """Record that a reset begins an episode on a row."""
        if not self._has_begun:
            self._has_begun = True

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        mask = None if td is None else td.get(rules.RESET, None)
        is_whole = mask is None or bool(self.batch_size) or bool(mask.all())
        row = self._row if is_whole else None
        if row is None or kwargs.get("set_state"):
            return super()._reset(td, **kwargs)
        kwargs.pop("set_state", None)  # an episode begins again anyway
        self._begin_on_row()
        return row.reset(mask, **kwargs)

    def _prepare_step(self, ticket: Ticket, *, is_ahead: bool) -> None:
        row = self._row if self._unshown is None and ticket.mask is None else None
        if row is None or not row.fits(ticket.td):
            super()._prepare_step(ticket, is_ahead=is_ahead)
            return
        if is_ahead:
            row.check(ticket.td)
        ticket.row = row
        # one env resets nothing in most steps
        ticket.restarts = bool(self.batch_size) and self._may_restart(ticket)

    def _begin_step(self, ticket: Ticket) -> None:
        if ticket.row is None:
            super()._begin_step(ticket)

    def _finish_step(self, ticket: Ticket) -> TensorDictBase:
        row = ticket.row
        if row is None:
            return super()._finish_step(ticket)
        return row.step(ticket.td, advance=ticket.restarts)

    def _fresh_root(self, ticket: Ticket, data: TensorDictBase) -> TensorDictBase:
        row = ticket.row
        if row is None:
            return super()._fresh_root(ticket, data)
        root, fresh = self.step_mdp(data), row.fresh_root()
        return root if fresh is None else root.update(fresh)

    def _runs(self) -> Runs:
        """Return rollouts on the row, where there is one."""
        row = self._row
        return super()._runs() if row is None else RunsOnRow(self, row)


class RunsOnRow(Runs):
    """Rollouts of an env on a row of memory."""

    def __init__(self, env: Stepping, row: Row):
        self._env, self._row = env, row

    def record(self, run: Run) -> Record:
        """Make a rollout on the row, if that can hold it."""
        env = self._env
        if env._unshown is not None:
            return None  # the first step says why, or ends the episode
        env._check_batch(run.root)
        return self._row.record(env, run)
