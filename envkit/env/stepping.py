"""One reset and one step: what is checked, called, completed and merged, in which order.

`Stepping` owns the public calls that take one TensorDict and give one. Requirements on outputs are
decided in `outputs`, what masks select in `rules`. It does not know how specs are declared, how
steps become a rollout, nor who drives it.

Conventions
    td      TensorDict whose root is what was known before the action; ``td["next"]`` is what the
            step produced.
    masks   `_step` and `_reset`, see `rules`. They never survive in an output.
    ticket  a step under way, see `tickets`: the env itself holds nothing of it. `_make_step` gives one. How the step is
            made is up to the kind of env: `_prepare_step`, `_begin_step`, `_finish_step` and `_fresh_root`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from operator import is_ as is_same
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.data.arguments import require_tensordict
from envkit.data.merging import merge_reset, merge_rows, spread_rows
from envkit.data.outcomes import Noted, callers_part, noted
from envkit.data.paths import Path, as_path, infos_in
from envkit.data.resets import (
    any_done,
    collect_reset_masks,
    done_outside,
    forget,
    shape_masks_like_done,
    undeclared,
)
from envkit.data.transition import carry
from envkit.env.facts import Facts
from envkit.env.input_checks import in_functorch, require_actions, require_values, tell_missing
from envkit.env.own_state import LOADED
from envkit.env.runs import Runs
from envkit.env.seeding import seed_of_reset
from envkit.env.set_state import refuse_state_left_out, start_keywords
from envkit.env.spec_names import SpecNames
from envkit.env.tickets import OverriddenTicket, Ticket
from envkit.errors import BatchSizeError, ClosedEnvError, NotResetError, StaleNextWarning
from envkit.process_wide import warn
from envkit.specs.annotations import EnvData, reading_waits


class Stepping(SpecNames, ABC):
    """The part of an environment that resets and steps.

    Attributes:
        run_type_checks: compare the dtypes of every reset and step with the specs, and the actions.
        allow_done_after_reset: accept done flags that are set right after a reset.
        is_closed: the simulator has been released.
    """

    run_type_checks: bool
    allow_done_after_reset: bool
    is_closed: bool

    _supports_set_state = False
    """`_reset` takes the keyword ``set_state``, see `envkit.env.set_state`."""

    _hands_resets_on = False
    """`_reset` resets envs inside this one with the keywords that it is given."""

    keeps_last_output = False
    """`_reset` returns the last known values of the parts that were not selected."""

    _rows_are_envs = False
    """Each row along the first axis is an env that steps by itself."""

    resets_on_empty_mask = False
    """`_reset` of an env without a batch is called even where its masks select nothing."""

    _completes_outputs = False
    """`_reset` gives every flag, in its shape."""

    _has_begun = False
    """`reset` was called."""

    _unshown: torch.Tensor | None = None
    """Rows whose simulator left its episode, which no `reset` has shown since; None where there are none."""

    _left_by = "set_seed()"
    """The call that did so."""

    _to_truncate: torch.Tensor | None = None
    """Rows of them whose next step reports their episode truncated; that of others is refused."""

    _has_warned_of_old_root = False
    _has_warned_of_ended = False
    """A `StaleNextWarning` was given."""

    # -------------------------------------------------------------------------- for concrete envs

    @abstractmethod
    def _reset(self, td: TensorDictBase | None, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Start new episodes where ``td``'s `_reset` masks ask for it.

        Its own env names the keywords it takes, none say, which type checkers allow beside ``*args, **kwargs``.

        Returns:
            A new TensorDict with observations, states and done flags. The entries of parts that
            were not selected are ignored.
        """

    @abstractmethod
    def _step(self, td: TensorDictBase) -> TensorDictBase:
        """Advance by one step.

        Returns:
            A new TensorDict with observations, states, rewards and done flags of the new moment.
        """

    @property
    def _facts(self) -> Facts:
        """Facts about the env that hold while its specs and settings stay."""
        return self._declared.cached("facts", self._find_facts)

    def _find_facts(self) -> Facts:
        """Find the facts of this kind of env; a class replaces those that it changes.

        Infos are observations below a node "info".
        """
        name = type(self).__name__
        return Facts(
            infos=infos_in(as_path(key) for key in self.observation_keys),
            no_start_at_state=None if self._supports_set_state else name,
            steps_have_effects=name,
        )

    @abstractmethod
    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Sample every action from its spec; see `EnvBase.rand_action`."""

    # ------------------------------------------------------------------------------------- reset

    def reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        set_state: bool | None = None,
        select_reset_only: bool = False,
        **kwargs: Any,
    ) -> EnvData:
        """Start new episodes, in all of the env or where `_reset` masks say so.

        Args:
            tensordict: current data; gives the batch size (of an unlocked env), the masks, and the
                values kept where nothing is reset. It is written to and returned.
            set_state: True begins at the state that ``tensordict`` holds, False at one that the env chooses, None as
                `_reset` likes, which mostly is at a new one.
            select_reset_only: `_reset` is shown the masks in ``tensordict``, and nothing else of it.
            **kwargs: passed on to the simulator; ``seed`` as a Python int.

        Returns:
            Observations, states and done flags, batch size ``(*batch,)``.

        Raises:
            DataTypeError: ``tensordict`` is something else than a TensorDict.
            BatchSizeError: the env is batch-locked and ``tensordict`` has another batch size.
            ResetMaskError: a mask does not fit.
            DoneError: a done flag is set where a reset was requested.
            SetStateError: (a NotImplementedError) ``set_state`` is set, and this env cannot.
            ArgumentError: (a ValueError) ``set_state`` and ``select_reset_only`` are both set, or ``seed`` is none.

        Example:
            >>> from envkit import PendulumEnv
            >>> env = PendulumEnv()
            >>> env.reset()["done"]
            tensor([False])
        """
        refuse_state_left_out(set_state=set_state, select_reset_only=select_reset_only)
        td = TensorDict(batch_size=self.batch_size) if tensordict is None else tensordict
        require_tensordict("what reset() was given", td)
        self._check_batch(td)
        checks, source = self._checks, tensordict
        levels, masks = checks.table.levels, {}
        if tensordict is not None:
            masks = collect_reset_masks(tensordict, levels, self.full_done_spec)
            if self._is_left_alone(masks):
                return checks.kept_root(tensordict)
        if "seed" in kwargs:
            kwargs["seed"] = seed_of_reset(kwargs["seed"])
        if set_state is not None or self._supports_set_state:
            kwargs.update(start_keywords(self, tensordict, set_state))
        if select_reset_only and source is not None:
            source = source.select(*self.reset_keys, strict=False)
        if source is not None and masks:
            shape_masks_like_done(source, masks, levels, self.full_done_spec)
        fresh = checks.delivered(self._reset(source, **kwargs), source, "_reset")
        if not self._completes_outputs:
            checks.complete(fresh, rewards=False)
        if self.run_type_checks:
            checks.require_dtypes(fresh, "_reset")
        if not self.allow_done_after_reset:
            checks.refuse_done(fresh, tensordict, masks, self)
        if not self._has_begun:  # a module's attribute is dear to write
            self._has_begun = True
        if self._unshown is not None:
            self._unshown = _still_unshown(self._unshown, masks)
        if tensordict is None:
            return fresh
        if not masks:
            self._in_use.begun_beside = tensordict.get("next", None)
        return merge_reset(tensordict, fresh, masks, keeps_last=self.keeps_last_output)

    def _is_left_alone(self, masks: dict[tuple[str, ...], torch.Tensor]) -> bool:
        """Check whether masks ask nothing of an env that could not reset in part by itself."""
        if self.resets_on_empty_mask or not self.batch_locked or len(self.batch_size):
            return False
        governing = [rules.governing_level(level, masks) for level in self._table.levels]
        return all(level is not None and not bool(masks[level].any()) for level in governing)

    # -------------------------------------------------------------------------------------- step

    def step(self, tensordict: TensorDictBase) -> EnvData:
        """Advance by one step and write the outcome under ``"next"``.

        Args:
            tensordict: root with the action (and state of a stateless env), batch size
                ``(*batch,)``. A `_step` mask limits the step to its rows. Entries that you put under
                ``"next"`` win over computed ones. The outcome of an earlier step is replaced, with one
                `StaleNextWarning` for each env.

        Returns:
            ``tensordict`` itself.

        Raises:
            DataTypeError: ``tensordict`` is something else than a TensorDict.
            BatchSizeError: the env is batch-locked and ``tensordict`` has another batch size.
            StepMaskError: the mask does not fit.
            MissingKeyError: (a KeyError) the env failed, and an action or state is not there.
            TypeError: ``run_type_checks`` is set and a dtype differs from its spec.
            InputError: (a ValueError) it is set and an action has another shape than its spec.

        Example:
            >>> from envkit import PendulumEnv
            >>> env = PendulumEnv()
            >>> td = env.step(env.rand_action(env.reset()))
            >>> td["next", "reward"].shape
            torch.Size([1])
        """
        if not isinstance(tensordict, TensorDictBase):
            require_tensordict("what step() was given", tensordict)
        if not self._facts.steps_have_effects and not self._has_warned_of_ended:
            self._warn_of_ended(tensordict)
        return self._step_on(tensordict)

    def _step_on(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step, whether episodes have ended or not; see `step`."""
        ticket = self._make_step(tensordict, advance=False)
        env = ticket.env  # which may be one that stands for this one
        env._begin_step(ticket)
        data = env._stepped(ticket)
        env._in_use.outcome = noted(ticket.following, is_fresh=ticket.row is not None)
        return data

    def _warn_of_ended(self, td: TensorDictBase) -> None:
        """Warn once of rows that are stepped beyond the end of their episode, of which a stateless env knows nothing."""
        done = td.get("done", None)
        if done is None or in_functorch() or reading_waits(done):  # a GPU is not waited for
            return
        ended, mask = done, td.get(rules.STEP, None)
        if ended.ndim > td.batch_dims:
            ended = ended.flatten(td.batch_dims).all(-1)
        if mask is not None:
            ended = ended & rules.step_mask(mask, td.batch_size)
        if bool(ended.any()):
            self._has_warned_of_ended = True
            place = tuple(ended.nonzero()[0].tolist())
            row = f"row {place} of {type(self).__name__}" if place else type(self).__name__
            warn(
                f"{row} is stepped after its episode has ended, and its flags stay set. Begin "
                "a new one: write data, td = env.step_and_maybe_reset(td), or td = env.maybe_reset(env.step_mdp(data))."
            )

    def _make_step(self, td: TensorDictBase, *, advance: bool, is_ahead: bool = False) -> Ticket:
        """Refuse data that does not fit, and give the step; nothing moves before it is begun.

        With ``is_ahead`` others may begin before it: what the simulator would refuse is refused now.
        """
        self._check_batch(td)
        mask = td.get(rules.STEP, None)
        if mask is not None:
            mask = rules.step_mask(mask, td.batch_size)
        if self._unshown is not None:
            self._require_shown(mask)
        ticket = Ticket(self, td, advance, mask)
        self._prepare_step(ticket, is_ahead=is_ahead)
        return ticket

    def _may_restart(self, ticket: Ticket) -> bool:
        """Check whether the work of a step may begin new episodes where some end: it alone decides what ends."""
        td, mask = ticket.td, ticket.mask
        if not ticket.advance or td.get("next", None) is not None:
            return False
        return mask is None or not done_outside(mask, td, self.done_keys)

    def _prepare_step(self, ticket: Ticket, *, is_ahead: bool) -> None:
        """Read and check what a step is given, and say whether its work ``restarts``; nothing moves."""
        if is_ahead:
            self._check_inputs(ticket.td)

    def _begin_step(self, ticket: Ticket) -> None:
        """Set a step going, where others make it; here all of it happens in `_finish_step`."""

    def _finish_step(self, ticket: Ticket) -> TensorDictBase:
        """Wait for a step and give its ``next``, complete, with root values in rows that were not stepped."""
        td, mask = ticket.td, ticket.mask
        if self._unshown is not None and self._to_truncate is not None:
            return self._truncated_next(td, self._unshown & self._to_truncate, mask)
        return self._computed_next(td) if mask is None else self._masked_next(td, mask)

    def _truncated_next(
        self, td: TensorDictBase, left: torch.Tensor, mask: torch.Tensor | None
    ) -> TensorDictBase:
        """Step rows but those that `load_state_dict` has led out of their episodes: these keep their values, truncated, once."""
        left = left.to(td.device or "cpu")
        ended = left if mask is None else left & mask
        self._to_truncate = left.cpu() & ~ended.cpu()
        following = self._masked_next(td, ~left if mask is None else mask & ~left)
        for key in self.done_keys:
            if as_path(key)[-1] in ("done", "truncated"):
                flag = following.get(key)
                following.set(
                    key, flag | ended.reshape(*left.shape, *[1] * (flag.ndim - left.ndim))
                )
        return following

    def _fresh_root(self, ticket: Ticket, data: TensorDictBase) -> TensorDictBase:
        """Return the root that follows a step whose work has restarted what ended."""
        raise NotImplementedError(f"steps of {type(self).__name__} restart nothing.")

    def _stepped(self, ticket: Ticket) -> TensorDictBase:
        """Return the data of a step with its outcome under ``next``, once it is made; the caller's entries there win."""
        latest = self._in_use.outcome  # before envs inside step
        following, td = self._finish_step(ticket), ticket.td
        if ticket.mask is not None:
            td = td.exclude(rules.STEP, inplace=True)
        preset = td.get("next", None)
        if preset is not None:
            following.update(self._callers_part(ticket, preset, following, latest))
        td.set("next", following)
        ticket.following = following
        return td

    def _callers_part(
        self, ticket: Ticket, preset: TensorDictBase, following: TensorDictBase, latest: Noted
    ) -> TensorDictBase:
        """Return what the caller put under ``next``; warn, once for each env, of what an earlier step wrote there."""
        scalars = [as_path(scalar.key) for scalar in self._table.scalars]
        preset_of_caller, has_outcome = callers_part(preset, following, latest, scalars)
        begun = self._in_use.begun_beside
        is_old = begun is None or not any(map(is_same, preset.values(), begun.values()))
        if not has_outcome or not is_old or self._has_warned_of_old_root:
            return preset_of_caller
        self._has_warned_of_old_root = True
        warn(
            "the data of this step holds the outcome of an earlier step under 'next', so its observations are those "
            "before that step. The new outcome replaces the old one. Step from the next root: "
            "td = env.step_mdp(td), or write data, td = env.step_and_maybe_reset(td).",
            StaleNextWarning,
        )
        return preset_of_caller

    def _stepped_and_reset(self, ticket: Ticket) -> tuple[TensorDictBase, TensorDictBase]:
        """Wait for a step, and give the same and the root that follows, in which what was done is reset."""
        data = self._stepped(ticket)
        if ticket.restarts:
            return data, self._fresh_root(ticket, data)
        return data, self.maybe_reset(self.step_mdp(data))

    def _computed_next(self, td: TensorDictBase) -> TensorDictBase:
        if self.run_type_checks:
            require_actions(td, self.full_action_spec)
        try:
            out = self._step(td)
        except (KeyError, TypeError, AttributeError) as error:  # as data does that lacks an entry
            tell_missing(td, self._table.inputs, type(self).__name__, error)
            raise
        return self._accepted(out, td)

    def _accepted(self, out: Any, td: TensorDictBase) -> TensorDictBase:
        """Check what a step of ``td`` gave, and complete it."""
        checks = self._declared.checks or self._checks
        following = checks.delivered(out, td, "_step")
        checks.complete(following, rewards=True)
        if self.run_type_checks:
            checks.require_dtypes(following, "_step")
        return following

    def _skipped_next(self, td: TensorDictBase) -> TensorDictBase:
        """Build ``next`` of rows that are not stepped; see `OutputChecks`."""
        return self._checks.skipped_next(td)

    def _rows_done(self, following: TensorDictBase) -> torch.Tensor:
        """Return which rows have ended, shape ``(*batch,)``; see `OutputChecks`."""
        return self._checks.rows_done(following)

    def _masked_next(self, td: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        """Compute ``next`` when a `_step` mask is given; batched envs have their own ways."""
        if bool(mask.all()):
            return self._computed_next(td.exclude(rules.STEP))
        if self.batch_locked and len(self.batch_size) and bool(mask.any()):
            # trusted to honour the mask: see docs/custom_envs.md
            return self._computed_next(td.copy().set(rules.STEP, mask))
        skipped = self._skipped_next(td)
        if not bool(mask.any()):
            return skipped
        stepped = self._computed_next(td.exclude(rules.STEP)[mask])
        return merge_rows(skipped, spread_rows(stepped, mask), {(): mask}, keeps_last=False)

    def _check_batch(self, td: TensorDictBase) -> None:
        if self.is_closed:
            raise ClosedEnvError(f"{self} is closed. Build a new one.")
        if in_functorch() and self._facts.leaves_torch:
            require_values(td, self._table.inputs, type(self).__name__)
        table = self._declared.table or self._table
        if table.batch_locked and td.batch_size != table.batch_size:
            raise BatchSizeError(
                f"the TensorDict has batch size {tuple(td.batch_size)}, but {type(self).__name__} "
                f"is batch-locked to {tuple(table.batch_size)}. Pass data of that batch size."
            )

    # ---------------------------------------------------------------------------- the next input

    def step_mdp(self, next_tensordict: TensorDictBase) -> EnvData:
        """Return the root of the next step: ``next`` over root, rewards and actions dropped.

        Example:
            >>> from envkit import PendulumEnv
            >>> env = PendulumEnv()
            >>> td = env.rand_step(env.reset())
            >>> root = env.step_mdp(td)
            >>> bool(root["th"] == td["next", "th"]), "action" in root.keys()
            (True, False)
        """
        return carry(next_tensordict, (self._declared.table or self._table).carrying)

    def any_done(self, tensordict: TensorDictBase) -> bool:
        """Check whether anything is done, and if so write the `_reset` masks into ``tensordict``.

        Where the flags of a level decide for levels below it, what is done there alone does not count.

        Example:
            >>> from envkit import PendulumEnv
            >>> env = PendulumEnv(batch_size=[2])
            >>> root = env.reset()
            >>> env.any_done(root)
            False
            >>> root["done"][1] = True
            >>> env.any_done(root), root["_reset"].flatten()
            (True, tensor([False,  True]))
        """
        table = self._declared.table
        return any_done(tensordict, self.done_levels if table is None else table.levels)

    def maybe_reset(self, tensordict: TensorDictBase) -> EnvData:
        """Reset what is done in a root (the output of `step_mdp`); the rest is returned unchanged.

        Example:
            >>> from envkit import GymEnv
            >>> env = GymEnv("CartPole-v1", max_episode_steps=1)
            >>> root = env.step_mdp(env.rand_step(env.reset()))
            >>> bool(root["done"]), bool(env.maybe_reset(root)["done"])
            (True, False)
            >>> env.close()
        """
        return self._reset_anew(tensordict) if self.any_done(tensordict) else tensordict

    def _reset_anew(self, root: TensorDictBase) -> TensorDictBase:
        """Reset what is done; the state at the end of an episode is none to begin at."""
        knows = self._declared.cached("set_state", lambda: self._facts.no_start_at_state is None)
        return self.reset(root, set_state=False) if knows else self.reset(root)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[EnvData, EnvData]:
        """Step, and reset what is done.

        Tensors that a policy has written under ``next`` and no spec declares are zero where an episode
        begins; a `TensorDictPrimer` declares them, and says with which value they begin.

        Returns:
            ``(data, data_)``: the transition, whose ``next`` keeps the true last observation, and
            the root of the following transition, fresh where an episode ended.

        Example:
            >>> from envkit import PendulumEnv
            >>> env = PendulumEnv()
            >>> td, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
            >>> "next" in td.keys(), "next" in root.keys()
            (True, False)
        """
        if not isinstance(tensordict, TensorDictBase):
            require_tensordict("what step_and_maybe_reset() was given", tensordict)
        preset, remembered = tensordict.get("next", None), ()
        if preset is not None:
            remembered = undeclared(preset, self._table.declared)
        if not self._steps_by_itself:
            data = self.step(tensordict)
            return data, self._root_after(data, remembered)
        ticket = self._make_step(tensordict, advance=True)
        env = ticket.env
        env._begin_step(ticket)
        data, root = env._stepped_and_reset(ticket)
        env._in_use.outcome = noted(ticket.following, is_fresh=ticket.row is not None)
        if remembered:
            forget(root, remembered, data.get("next"), self._table.levels)
        return data, root

    def _root_after(self, data: TensorDictBase, remembered: Iterable[Path]) -> TensorDictBase:
        """Return the root that follows a transition, fresh where an episode has ended.

        ``remembered`` are the entries under ``next`` that the policy alone knows.
        """
        root = self.maybe_reset(self.step_mdp(data))
        if remembered:
            forget(root, remembered, data.get("next"), self._table.levels)
        return root

    def _step_last(self, td: TensorDictBase) -> TensorDictBase:
        """Step as `step` does, after calls of `step_and_maybe_reset` and before none."""
        return self.step(td)

    # ------------------------------------------------------------------------ steps as values

    def _send(self, td: TensorDictBase, *, advance: bool = False) -> Ticket:
        """Check and begin a step; ``recv()`` of the ticket ends it."""
        return self._honoured_step(td, advance=advance, is_ahead=True).begin()

    def _honoured_step(self, td: TensorDictBase, *, advance: bool, is_ahead: bool) -> Ticket:
        """Make a step on behalf of an env around this one: as a subclass steps, if it has its own way."""
        if advance:
            overridden = not self._steps_by_itself
        else:
            overridden = "step" in self._defined_since or "step" in vars(self)
        if overridden:
            return OverriddenTicket(self, td, advance)
        return self._make_step(td, advance=advance, is_ahead=is_ahead)

    def _after_seed(self) -> None:
        """Record that a seed has reset simulators in the middle of their episodes."""
        if self._has_begun and self._facts.keeps_state is not None:
            self._leave_episodes("set_seed()")

    def _leave_episodes(self, call: str) -> None:
        """Require a reset of simulators before their next step: a call has led them out of their episodes."""
        if self.batch_locked:
            self._unshown = torch.ones(self.batch_size, dtype=torch.bool, device="cpu")
            self._left_by = call
            self._to_truncate = self._unshown if call == LOADED else None
            self._in_use.moves += 1

    def _require_shown(self, mask: torch.Tensor | None = None) -> None:
        """Refuse a step that would lead from the root of one episode into another one; None: of all rows."""
        assert self._unshown is not None
        waiting = self._unshown if self._to_truncate is None else self._unshown & ~self._to_truncate
        waiting = waiting if mask is None else waiting & mask.cpu()
        if bool(waiting.any()):
            raise NotResetError(self._why_unshown(waiting))

    def _why_unshown(self, rows: torch.Tensor) -> str:
        """Return why some rows, bool, cannot be stepped before a reset, and what to do."""
        if self._left_by == LOADED:
            return (
                f"the episode of {type(self).__name__} was not restored by {LOADED}, and an earlier step has reported "
                "it truncated. Call reset(), or maybe_reset() with the data of that step, and step from the result."
            )
        return (
            f"{type(self).__name__} is in another episode since {self._left_by}, and is stepped before a reset. "
            f"Call reset() after {self._left_by}, and step from what it returns."
        )

    def _check_inputs(self, td: TensorDictBase) -> None:
        """Refuse what `_step` would refuse, where that can be reported before."""

    # ------------------------------------------------------------------- what some offer, see `runs`

    def _runs(self) -> Runs:
        """Return what this env offers beside single steps."""
        return Runs()

    def _check_begun(self, root: TensorDictBase) -> None:
        """Check the first root of a run that began its episodes itself, as `reset` checks its own."""
        if not self.allow_done_after_reset:
            self._checks.refuse_done(root, None, {}, self)
        self._has_begun, self._unshown = True, None


def _still_unshown(
    rows: torch.Tensor, masks: Mapping[tuple[str, ...], torch.Tensor]
) -> torch.Tensor | None:
    """Return the rows that no reset has shown yet."""
    if masks:
        root = masks.get(())
        rows = rows if root is None else rows & ~root.reshape(rows.shape).cpu()
    return rows if masks and bool(rows.any()) else None
