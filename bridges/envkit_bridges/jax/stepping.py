"""Which compiled program a stateless env runs when it resets, steps, and makes a run, and from what it starts.

What is computed stands in `programs`, a run of many steps in `unrolling`, how a batch becomes rows in `handoff`.

Conventions
    state    everything of a row that a step needs, its PRNG key and elapsed steps included; nothing but the
             key for new rows lives in the env. It is made of the seed, or where none was set, of a number
             from torch's global generator at its first use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.data.arguments import as_int, require_tensordict
from envkit.data.paths import as_key
from envkit.data.resets import collect_reset_masks
from envkit.data.transition import carry, leaves, selected_rows
from envkit.env.base import EnvBase
from envkit.env.fragments import Begun
from envkit.env.input_checks import require_actions
from envkit.env.policy import PolicyLike
from envkit.env.runs import Run
from envkit.env.seeding import checked_seed, drawn_seed
from envkit.env.tickets import Ticket
from envkit.errors import ArgumentError, GradientError
from envkit.rules import STEP
from envkit.specs.annotations import EnvData
from envkit.specs.devices import reading_waits
from envkit_bridges.dlpack import adopted, number_to_jit, to_jit, to_torch
from envkit_bridges.jax.gradients import is_wanted
from envkit_bridges.jax.handoff import RowEnv
from envkit_bridges.jax.keys import key_of, split
from envkit_bridges.jax.policy.inputs import is_compilable
from envkit_bridges.jax.programs import BEGIN, NOTHING, RESTART, Constants
from envkit_bridges.jax.unrolling import begin_unroll, unroll_until

__all__ = ["ProgramEnv"]


class ProgramEnv(RowEnv):
    """A stateless env that resets, steps and runs by the programs that it holds.

    Attributes:
        cache_clear_frequency: JAX forgets what it compiled after this many steps; 0 never.
    """

    cache_clear_frequency: int

    _batch_locked = False
    leaves_torch = True
    _passes_by = EnvBase._passes_by | {"_step", "_reset"}
    _steps_since_clear = 0
    _key: np.ndarray | None = None  # where keys for new rows come from; None is not seeded yet

    @property
    def traces(self) -> dict[str, int]:
        """How often each program was traced for this env, by name."""
        return dict(self._programs.traces)

    # -------------------------------------------------------------------------------------- resets

    def _next_key(self) -> np.ndarray:
        if self._key is None:
            self._set_seed(drawn_seed())
        self._key, now = split(self._key)
        return now

    def _set_seed(self, seed: int | None) -> None:
        if seed is None:
            raise ArgumentError(
                "a stateless env needs a seed: set_seed(0), say. None makes no key."
            )
        self._key = key_of(checked_seed(seed))

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        if kwargs:
            raise ArgumentError(
                f"a stateless env takes no reset keywords, but got {sorted(kwargs)}. A seed is set by "
                "set_seed(3), what to start from is passed in the TensorDict."
            )
        shape = self.batch_size if td is None else td.batch_size
        if td is None or td.get("state", None) is None:
            return self._out(shape, self._begun(shape))
        masks = collect_reset_masks(td, self.done_levels, self.full_done_spec)
        mask = masks.get((), torch.ones(shape, dtype=torch.bool, device=self.device))
        given = adopted(to_jit((self._state_in(td), self._mask_in(mask)), copy=False, detach=True))
        # No gradient is lost: rows that are not selected keep what ``td`` holds, graph included.
        constants, follows = self._constants(shape, mask), number_to_jit(RESTART, self.device)
        outputs = self._programs.restart(*given, constants, follows)
        return self._out(shape, to_torch(self._kept(outputs)))

    def _begun(self, shape: torch.Size) -> dict[str, Any]:
        """Begin an episode in every row; gives the tensors of its root.

        A program that resets takes long to compile. So `advance` does it where it can and is compiled, or is about
        to be, and else `restart`: both reset in the same loop, bit for bit.
        """
        size, constants = self._size(shape.numel()), self._constants(shape)
        state, action, memory = adopted(to_jit(self._first_in(size, constants), copy=False))
        follows = number_to_jit(BEGIN, self.device)
        if self._programs.env.chunks.asks_first and size in self._programs.advancing:
            _, outputs, flags = self._programs.advance(state, action, memory, constants, follows)
            return to_torch(self._kept(outputs)) | {"flags": to_torch(flags)[3:]}
        every = to_jit(torch.ones(size, dtype=torch.bool, device=self.device), copy=False)
        return to_torch(self._kept(self._programs.restart(state, every, constants, follows)))

    # --------------------------------------------------------------------------------------- steps

    def _inputs(self, td: TensorDictBase, mask: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Read what a step takes; ``mask`` says which rows are stepped."""
        rows = None if mask is None else selected_rows(mask)
        return self._state_or_arrays_in(td), self._action_in(td, rows), self._memory_in(td)

    def _count_steps(self, steps: int) -> None:
        """Clear the caches of JAX now and then, if that was asked for."""
        if not self.cache_clear_frequency:
            return
        self._steps_since_clear += steps
        if self.cache_clear_frequency <= self._steps_since_clear:
            self._steps_since_clear = 0
            jax.clear_caches()

    def _prepare_step(self, ticket: Ticket, *, is_ahead: bool) -> None:
        td, mask = ticket.td, ticket.mask
        if self._overrides(_PROGRAM) or not (mask is None or bool(mask.any())):
            super()._prepare_step(ticket, is_ahead=is_ahead)
            return
        if self.run_type_checks:
            require_actions(td, self.full_action_spec)
        work = ticket.work = _ProgramWork(self._inputs(td, mask))
        ticket.restarts = self._resets_in_program(ticket, work.inputs)

    def _resets_in_program(self, ticket: Ticket, inputs: tuple[Any, ...]) -> bool:
        """Say whether one program may make a step and the reset after it.

        Not with a graph, so that one backward program serves every kind of step.
        """
        has_graph = self.requires_grad and is_wanted(inputs)
        return not has_graph and self._may_restart(ticket)

    def _begin_step(self, ticket: Ticket) -> None:
        work: _ProgramWork | None = ticket.work
        if work is None:
            return
        constants = self._begun_constants(ticket.td, ticket.mask)
        if not ticket.restarts:
            work.running = self._start(self._programs.step, work.inputs, (constants,))
            self._kept(work.running.outputs)
            return
        given, follows = self._lent(work.inputs), number_to_jit(work.follows, self._device)
        work.lent = given, constants
        following, fresh, flags = self._programs.advance(*given, constants, follows)
        work.outputs = following, self._kept(fresh), flags

    def _begun_constants(self, td: TensorDictBase, mask: torch.Tensor | None) -> Constants:
        self._count_steps(1)
        return self._constants(td.batch_size, mask)

    def _finish_step(self, ticket: Ticket) -> TensorDictBase:
        td, mask, work = ticket.td, ticket.mask, ticket.work
        if work is None:
            return super()._finish_step(ticket)
        if ticket.restarts:
            following = self._received(td.batch_size, work)
        else:
            following = self._accepted(self._out(td.batch_size, work.running.result()), td)
        return following if mask is None else self._kept_where_skipped(td, mask, following)

    def _received(self, shape: torch.Size, work: _ProgramWork) -> TensorDictBase:
        """Give the ``next`` of a step that has restarted what ended, and keep the root that follows."""
        outcome, begun, both = to_torch(work.outputs)
        flags = both.unbind(0)
        outcome["flags"], begun["flags"] = flags[:3], flags[3:]
        following, work.fresh = self._out(shape, outcome), self._out(shape, begun)
        if reading_waits(both):
            self._keep_arrays(work.fresh, work.outputs[1]["state"])
        return following

    def _fresh_root(self, ticket: Ticket, data: TensorDictBase) -> TensorDictBase:
        fresh = ticket.work.fresh
        if ticket.mask is None:
            return carry(data, self._table.carrying, fresh)
        root = self.step_mdp(data)
        return root.update(self._kept_where_skipped(root, ticket.mask, fresh))

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        mask = td.get(STEP, None)
        mask = None if mask is None else rules.step_mask(mask, td.batch_size)
        constants = self._begun_constants(td, mask)
        running = self._start(self._programs.step, self._inputs(td, mask), (constants,))
        self._kept(running.outputs)
        return self._out(td.batch_size, running.result())

    def _masked_next(self, td: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        if not bool(mask.any()):
            self._state_in(td)  # which brings it into the env's own layout
            return self._skipped_next(td).clone()
        return self._kept_where_skipped(td, mask, self._computed_next(td))

    def _kept_where_skipped(
        self, td: TensorDictBase, mask: torch.Tensor, following: TensorDictBase
    ) -> TensorDictBase:
        """Keep what was there in rows that ``mask`` leaves out; their reward is 0."""
        if bool(mask.all()):
            return following
        skipped = self._skipped_next(td)
        for path, value in leaves(following):
            key = as_key(path)
            following.set(key, rules.choose(mask, value, skipped.get(key)))
        return following

    def _step_last(self, td: TensorDictBase) -> TensorDictBase:
        """Step by the program that has made the steps before, so that none is compiled for this one."""
        if not self._steps_by_itself or self.run_type_checks:
            return self.step(td)
        ticket = self._make_step(td, advance=True)
        if ticket.restarts:
            ticket.work.follows = NOTHING
        self._begin_step(ticket)
        return self._stepped(ticket)

    # ---------------------------------------------------------------------------------- many steps

    def unroll(
        self,
        td: TensorDictBase,
        steps: int,
        policy: PolicyLike = None,
        *,
        record_state: bool = False,
    ) -> tuple[EnvData, EnvData]:
        """Take ``steps`` steps as one program, new episodes begun inside.

        Args:
            td: root to start from: ``state``, observation, done flags; what is done begins anew.
            steps: length of the run.
            policy: None for random actions, a `JaxPolicy`, or what `compile_policy` gave. What they draw
                comes from the env's seed.
            record_state: record ``state`` at root and next of every step, as `rollout` does.

        Returns:
            ``(data, td_next)``: transitions of batch size (*batch, steps), which lie time-major in
            memory, and the root after the last step, from which the next call goes on.

        Raises:
            ArgumentError: ``steps`` is no integer above 0.
            DataTypeError: ``td`` is no TensorDict.
            PolicyError: (a TypeError) ``policy`` is of another kind.
            TranslationError: (a NotImplementedError) the policy cannot be translated.
            FusionError: (a NotImplementedError) a subclass steps or resets in its own way.
            GradientError: gradients would be asked for, see `requires_grad`.
        """
        require_tensordict("td", td)
        steps = as_int("steps", steps, least=1, meaning="the number of steps to take")
        self._require_no_override(draws=policy is None)
        if self._gives_gradients(td, policy):
            raise GradientError(
                "no gradient flows through unroll, but the env has requires_grad=True, and the policy or "
                "the data to start from requires grad. Use rollout(steps, break_when_any_done=False), or "
                "call unroll under torch.no_grad()."
            )
        self._count_steps(steps)
        return begin_unroll(self, td, steps, policy, record_state=record_state)()

    def _gives_gradients(self, td: TensorDictBase, policy: Any) -> bool:
        """Say whether a run from ``td`` must be made of steps with a graph."""
        if not (self.requires_grad and torch.is_grad_enabled()):
            return False
        given = [leaf for _, leaf in leaves(td) if isinstance(leaf, torch.Tensor)]
        if isinstance(policy, torch.nn.Module):
            given.extend(policy.parameters())
        return is_wanted(given)

    def _expect_run(self, stop: rules.Stop, policy: Any) -> None:
        may_keep_graph = self.requires_grad and torch.is_grad_enabled()
        steps = self._steps_by_itself and not (is_compilable(policy) or may_keep_graph)
        if stop == "never" and steps:
            self._programs.advancing.add(self._size(self.numel()))

    @property
    def _cannot_drop_steps(self) -> str | None:
        return None if self._steps_by_itself else type(self).__name__

    _unrecorded = ("state",)

    def _runs_at_once(self, policy: Any) -> bool:
        return is_compilable(policy) and not (policy is None and self._draws_its_own)

    def _begin_run(self, run: Run) -> Begun:
        self._count_steps(run.steps)
        return begin_unroll(self, run.root, run.steps, run.policy, record_state=run.record_state)

    def _fast_rollout(self, run: Run) -> TensorDictBase | None:
        root, steps, policy = run.root, run.steps, run.policy
        if not is_compilable(policy) or self._gives_gradients(root, policy):
            return None
        if run.stop == "never":
            return self.unroll(root, steps, policy, record_state=run.record_state)[0]
        if self._programs.shards is not None:
            return None
        self._count_steps(steps)
        return unroll_until(self, run)


@dataclass(slots=True, eq=False)
class _ProgramWork:
    """What a stateless env remembers of a step under way.

    Attributes:
        inputs: what the program is given.
        follows: what follows the step, see `Programs.advance`; after `NOTHING` the root is of no use.
        running: a program of a step alone, once it was begun.
        lent: what a program that restarts was given, kept until torch has what it gives.
        outputs: what it gives.
        fresh: the root that follows, once the step was received.
    """

    inputs: tuple[Any, ...]
    follows: int = RESTART
    running: Any = field(default=None, init=False)
    lent: Any = field(default=None, init=False)
    outputs: Any = field(default=None, init=False)
    fresh: Any = field(default=None, init=False)


_PROGRAM = frozenset(("_step",))
