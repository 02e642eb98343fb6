"""Many steps as one compiled loop.

This module decides the order of things in a rollout: restart, observe, act, step, record. It does
not know TensorDict, and stops early for nobody: ``break_when_any_done`` is the caller's.

Conventions
    transition  root (what the policy saw), action, next (what the step returned).
    time-major  recorded leaves have shape (time, batch, *event).

Decided here: a finished row restarts at the START of a step. So ``next`` holds the true last
observation and the root of the following transition the fresh one; the very last step resets
nothing; and one long call, several short ones and a Python loop of single steps draw and do the same.
Chunks agree in every bit. Between scan and loop, XLA may round a value apart that nothing after it
reads: of a pendulum's leaves only the reward differs, by one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from envkit.functional.core import Timestep, done_of

__all__ = ["Policy", "RowsEnv", "Transition", "random_policy", "transition", "unroll"]

Policy = Callable[[Any, Any, jax.Array], Any]
"""``(params, observation, key) -> action``: batched observation and action, one raw key a step."""

Carry = tuple[Any, Timestep]


class RowsEnv(Protocol):
    """What a rollout asks of many rows; `BatchedEnv` says what each function does."""

    def step(self, state: Any, action: Any) -> Carry: ...

    def step_where(self, mask: jax.Array, state: Any, timestep: Timestep, action: Any) -> Carry: ...

    def restart_where(self, mask: jax.Array, state: Any, timestep: Timestep) -> Carry: ...

    def sample_action(self, key: jax.Array, num_rows: int) -> Any: ...

    def pack(self, state: Any) -> dict[str, jax.Array]: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transition:
    """One step of every row; time-major when many are stacked.

    ``state`` and ``next_state`` are packed buffers (`StatePacking`), or None if not recorded.
    """

    observation: Any
    terminated: jax.Array
    truncated: jax.Array
    action: Any
    next: Timestep
    info: Any = None  # of the root
    state: dict[str, jax.Array] | None = None
    next_state: dict[str, jax.Array] | None = None


def random_policy(env: RowsEnv) -> Policy:
    """Make a policy that draws from the action space; row i's draws do not depend on the batch."""

    def act(params: Any, observation: Any, key: jax.Array) -> Any:
        num_rows = jax.tree.leaves(observation)[0].shape[0]
        return env.sample_action(key, num_rows)

    return act


def transition(
    env: RowsEnv,
    carry: Carry,
    policy: Policy,
    params: Any,
    key: jax.Array,
    *,
    auto_reset: bool = True,
    record_state: bool = False,
    moving: jax.Array | None = None,
) -> tuple[Carry, Transition]:
    """Make one step of a rollout; `unroll` is a loop of these. RowsEnv out of ``moving`` stay as they are."""
    state, root = env.restart_where(done_of(carry[1]), *carry) if auto_reset else carry
    action = policy(params, root.observation, key)
    if moving is None:
        after, timestep = env.step(state, action)
    else:
        after, timestep = env.step_where(moving, state, root, action)
    recorded = Transition(
        root.observation,
        root.terminated,
        root.truncated,
        action,
        timestep,
        info=root.info,
        state=env.pack(state) if record_state else None,
        next_state=env.pack(after) if record_state else None,
    )
    return (after, timestep), recorded


def unroll(
    env: RowsEnv,
    carry: Carry,
    policy: Policy,
    params: Any,
    key: jax.Array,
    *,
    steps: int,
    start: int | jax.Array = 0,
    auto_reset: bool = True,
    record_state: bool = False,
) -> tuple[Carry, Transition]:
    """Act and step ``steps`` times in one ``lax.scan``.

    Args:
        env: the batched environment.
        carry: ``(state, timestep)`` as `BatchedEnv.reset` or an earlier call returned it; rows that
            are done there restart first.
        policy: what acts (see `Policy`).
        params: any pytree, handed to the policy unchanged.
        key: one key for the whole run; the policy gets ``fold_in(key, start + t)`` at step t.
        steps: length of the loop, static.
        start: steps of this run that were made before. Chunks that count on draw the same numbers
            as one long call.
        auto_reset: restart finished rows. If not, they are stepped on.
        record_state: record the packed state at root and next of every step.

    Returns:
        The carry for the next call, and the time-major transitions.
    """
    numbers = jnp.asarray(start, dtype=jnp.uint32) + jnp.arange(steps, dtype=jnp.uint32)
    # Hashed before the loop: one call there costs a CPU as much as a step of a small env.
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)

    def body(carry: Carry, step_key: jax.Array) -> tuple[Carry, Transition]:
        how = {"auto_reset": auto_reset, "record_state": record_state}
        carry, made = transition(env, carry, policy, params, step_key, **how)
        return carry, _with_flags_as_bits(made)

    carry, made = jax.lax.scan(body, carry, keys)
    return carry, _with_flags_from_bits(made)


def _with_flags_as_bits(made: Transition) -> Transition:
    """Put the four flags of a row into one byte: each array that a loop writes costs a CPU 0.1 us."""
    flags = made.terminated, made.truncated, made.next.terminated, made.next.truncated
    bits = (flag.astype(jnp.uint8) << place for place, flag in enumerate(flags))
    nothing: Any = None
    following = replace(made.next, terminated=nothing, truncated=nothing)
    return replace(made, terminated=reduce(or_, bits), truncated=nothing, next=following)


def _with_flags_from_bits(made: Transition) -> Transition:
    byte = made.terminated
    flags = [(byte >> place) & 1 != 0 for place in range(4)]
    following = replace(made.next, terminated=flags[2], truncated=flags[3])
    return replace(made, terminated=flags[0], truncated=flags[1], next=following)
