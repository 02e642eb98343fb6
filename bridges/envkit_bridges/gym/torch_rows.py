"""Simulators that step all their rows together and whose data is torch tensors on a device: steps, resets and masks.

`TorchRowsEnv` decides which rows may be left out of a step, which must be reset before the next one, and when a reset
follows a step. A kind of simulator says how all of its rows are stepped and how some of them are reset. Tensors never become
arrays. The host reads a tensor on the CPU, or where a mask or a stop rule asks for it.

Conventions
    rows     the envs of the simulator; masks over them are bool tensors of shape (num_envs,) on its device.
    ended    rows whose last step ended an episode.
    stale    rows whose simulator is no longer where the data is: it has begun another episode by itself, or the row was
             left out of a step that the simulator made. They must be reset before they are stepped. Where the simulator
             refuses to step rows that have ended, these are stale too.
    first    observations of the episodes that a simulator has begun by itself in its last step, and of which rows. They
             are what the reset of these rows gives.
    frozen   rows that are left out of a step. The simulator steps them all the same, so they must have ended.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.data.arguments import as_batch_size, as_bool
from envkit.data.keywords import known_to, refuse_unknown
from envkit.data.merging import choose_leaf, merge_reset, merge_rows
from envkit.data.paths import as_key
from envkit.data.transition import copied, leaves, stepped_rows
from envkit.env.facts import Facts
from envkit.env.options import TAKEN_HERE
from envkit.env.tickets import Ticket
from envkit.errors import (
    BatchSizeError,
    ResetMaskError,
    ResumeError,
    StepMaskError,
)
from envkit.specs import Categorical, Composite
from envkit.specs.annotations import Device, as_device, reading_waits
from envkit_bridges.gym.like import GymLikeEnv
from envkit_bridges.libraries import Simulator


class First(NamedTuple):
    """Observations of episodes that a simulator has begun by itself, and of which rows."""

    rows: torch.Tensor
    root: TensorDictBase


class TorchRowsEnv(GymLikeEnv):
    """Base class of environments over a simulator of many rows in torch; batch-locked.

    Args:
        env: the simulator.
        num_envs: its rows.
        simulator_device: where its tensors are.
        device: where data is delivered; None leaves it where it is.
        **options: of every env, see `envkit.env.options.EnvOptions`.
    """

    _fast_path_bypasses = GymLikeEnv._fast_path_bypasses | {"_step", "_reset"}
    _frozen: torch.Tensor | None = None
    _needs_reset = False
    """Rows that have ended must be reset before the next step: the simulator begins an episode in them by itself, in the step
    that ends one or in the next one, or it refuses to step them."""

    def __init__(
        self,
        env: Simulator,
        *,
        num_envs: int,
        simulator_device: Device,
        device: Device | None = None,
        **options: Any,
    ):
        if unknown := [name for name in options if name not in TAKEN_HERE]:
            refuse_unknown(type(self).__name__, unknown, known_to(type(self)) or [])
        size = options.get("batch_size")
        if size is not None and as_batch_size(size) != torch.Size([num_envs]):
            raise BatchSizeError(
                f"batch_size is {tuple(as_batch_size(size))}, but the simulator has {num_envs} rows. Leave it out."
            )
        self._simulator_device = as_device(simulator_device)
        device = self._simulator_device if device is None else device
        options["batch_size"] = [num_envs]
        self._forget()
        super().__init__(env, device=device, **options)

    def _forget(self) -> None:
        """Hold nothing of steps that were made."""
        self._ended: torch.Tensor | None = None
        self._stale: torch.Tensor | None = None
        self._first: First | None = None

    # ------------------------------------------------------------------------------ what a kind says

    @abstractmethod
    def _advance(self, td: TensorDictBase) -> TensorDict:
        """Step all rows.

        Returns:
            Observations, rewards and flags of all rows, in separate tensors. Where the simulator has begun
            episodes by itself, their first observations go to ``self._first``.
        """

    @abstractmethod
    def _begin(self, rows: torch.Tensor | None, **kwargs: Any) -> TensorDict:
        """Begin episodes in some rows, None in all.

        Returns:
            Observations in separate tensors; those of other rows may be anything.
        """

    @property
    def _resets_rows(self) -> bool:
        """Whether `_begin` can begin episodes in some rows and leave the others."""
        return True

    def _flag_specs(self) -> Composite:
        """Describe the flags of the rows."""
        flag = Categorical(2, shape=(*self.batch_size, 1), dtype=torch.bool, device=self.device)
        return Composite(
            done=flag,
            terminated=flag.clone(),
            truncated=flag.clone(),
            shape=self.batch_size,
            device=self.device,
        )

    # ----------------------------------------------------------------------------------------- steps

    def _prepare_step(self, ticket: Ticket, *, is_ahead: bool) -> None:
        super()._prepare_step(ticket, is_ahead=is_ahead)
        ticket.restarts = ticket.mask is None and self._may_restart(ticket)

    def _step(self, td: TensorDictBase) -> TensorDict:
        frozen = self._frozen
        self._require_begun()
        self._first = None
        made = self._advance(td)
        over = self._rows_done(made).to(self._simulator_device)
        if frozen is None:
            self._ended, self._stale = over, over if self._needs_reset else None
            return made
        stepped = over & ~frozen
        self._ended = stepped | frozen
        self._stale = self._ended if self._needs_reset else frozen
        if self._first is not None:
            self._first = self._first._replace(rows=stepped)
        return made

    def _fresh_root(self, ticket: Ticket, data: TensorDictBase) -> TensorDictBase:
        root, over, first = self.step_mdp(data), self._ended, self._first
        assert over is not None
        if reading_waits(over) or bool(over.any()):
            begun = self._begin(over) if first is None else first.root
            self._checks.complete(begun, rewards=False)
            root = merge_reset(root, begun, {(): over.to(root.device)}, keeps_last=True)
        self._forget()
        return root

    def _masked_next(self, td: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        if bool(mask.all()):
            return self._computed_next(td.exclude(rules.STEP))
        skipped = self._skipped_next(td)
        if not bool(mask.any()):
            return skipped
        frozen = ~mask.to(self._simulator_device)
        can_wait = torch.zeros_like(frozen) if self._ended is None else self._ended
        if bool((frozen & ~can_wait).any()):
            raise StepMaskError(
                f"rows {_numbers(frozen)} are to be left out of a step, but {type(self._env).__name__} steps all its rows, so only those "
                f"that have ended may be, here {_numbers(can_wait)}. Step all rows, or take SerialEnv or ParallelEnv of "
                "simulators of one row."
            )
        self._frozen = frozen
        try:
            stepped = self._computed_next(td)
        finally:
            self._frozen = None
        return merge_rows(skipped, stepped, {(): mask})

    def _require_begun(self) -> None:
        """Check that no row is stepped whose simulator is not where the data is."""
        stale, frozen = self._stale, self._frozen
        if stale is None:
            return
        waiting = stale if frozen is None else stale & ~frozen
        if bool(waiting.any()):
            raise StepMaskError(
                f"rows {_numbers(waiting)} have ended, and {type(self._env).__name__} does not go on from where they were. Reset them first, e.g. "
                "with env.step_and_maybe_reset or env.maybe_reset."
            )

    def _actions_in(self, td: TensorDictBase) -> Any:
        """Take the action out of a root; only rows that are stepped are looked at."""
        return self._action_in(td, None if self._frozen is None else stepped_rows(td))

    def _for_simulator(self, action: torch.Tensor) -> torch.Tensor:
        """Copy an action to the simulator; in frozen rows it is that of a row that is stepped."""
        action = action.to(self._simulator_device)
        if self._frozen is None:
            return action.clone()
        stepped = ~self._frozen
        return rules.choose(stepped, action, action[stepped][:1].expand_as(action))

    # ---------------------------------------------------------------------------------------- resets

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        mask = None if td is None else td.get(rules.RESET, None)
        if mask is None:
            fresh = self._begin(None, **kwargs)
            self._forget()
            return fresh
        rows = mask.reshape(self.batch_size).to(self._simulator_device)
        if not bool(rows.any()):
            return self.full_observation_spec.zero()
        fresh = self._begun(rows, **kwargs)
        for name in ("_ended", "_stale"):
            left = getattr(self, name)
            setattr(self, name, None if left is None else left & ~rows)
        if self._first is not None:
            self._first = self._first._replace(rows=self._first.rows & ~rows)
        return fresh

    def _begun(self, rows: torch.Tensor, **kwargs: Any) -> TensorDictBase:
        """Begin episodes in some rows, but for those that the simulator has begun by itself and that are not shown yet.

        Raises:
            ResetMaskError: the simulator cannot reset some rows and leave the others.
        """
        first = None if kwargs else self._first
        real = rows if first is None else rows & ~first.rows
        if first is not None and not bool(real.any()):
            return copied(first.root)
        if bool(rows.all()):
            return self._begin(None, **kwargs)
        if not self._resets_rows:
            known = torch.zeros_like(rows) if first is None else first.rows
            raise ResetMaskError(
                f"rows {_numbers(rows)} are to be reset, but {type(self._env).__name__} can reset only all of its rows, or those that it "
                f"has begun by itself in the last step, here {_numbers(known)}. Pass partial_reset= if it takes a mask or row "
                "numbers, or reset all rows."
            )
        fresh = self._begin(real, **kwargs)
        if first is None:
            return fresh
        return chosen(first.rows, first.root, fresh)

    def _set_seed(self, seed: int | None) -> None:
        self._seed_simulator(seed)
        self._forget()

    def _seed_simulator(self, seed: int | None) -> None:
        """Seed the simulator, by a reset unless a kind has another way."""
        super()._set_seed(seed)

    # ------------------------------------------------------------------------------------------ rest

    def _find_facts(self) -> Facts:
        return replace(
            super()._find_facts(), leaves_torch=False, steps_all_rows=type(self).__name__
        )

    def record_for_resume(self, mode: bool = True) -> Self:
        """Ask `state_dict` for the episodes under way, which it refuses: simulators in torch offer no state."""
        self._records = as_bool("mode", mode)
        return self

    @property
    def _is_recordable(self) -> bool:
        return False

    def _simulator_state(self) -> dict[str, Any]:
        if self._records:
            raise ResumeError(
                f"the episodes of {type(self._env).__name__} cannot be saved: a simulator in torch offers no state. Leave "
                "record_for_resume out; after a load, new episodes begin."
            )
        return {"is_fresh": not self._has_begun}

    def _restore_simulator(self, state: Mapping[str, Any]) -> None:
        self._forget()
        if "is_fresh" not in state:
            raise ResumeError(
                f"what is loaded was not saved by an env of this kind: it holds {sorted(state)}. Build the same env as the "
                "one that was saved."
            )


def chosen(rows: torch.Tensor, fresh: TensorDictBase, kept: TensorDictBase) -> TensorDictBase:
    """Return ``fresh`` in some rows and ``kept`` in the others, in new tensors."""
    result = kept.copy()
    for path, value in leaves(fresh):
        result.set(as_key(path), choose_leaf(rows, value, kept.get(as_key(path))))
    return result


def _numbers(rows: torch.Tensor) -> list[int]:
    return rows.nonzero().squeeze(-1).tolist()
