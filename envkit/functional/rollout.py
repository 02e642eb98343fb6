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
    state, root = _restarted(env, *carry) if auto_reset else carry
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


def _restarted(env: RowsEnv, state: Any, timestep: Timestep) -> Carry:
    """Start new episodes where one has ended. No other row has a flag: said so, XLA need not carry them."""
    unset = jnp.zeros_like(timestep.terminated)
    going_on = replace(timestep, terminated=unset, truncated=unset)
    return env.restart_where(done_of(timestep), state, going_on)


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
        (state, shown), made = transition(
            env, (carry[0], _with_flags(carry[1])), policy, params, step_key, **how
        )
        return (state, _with_byte(shown)), _recorded(made)

    (state, shown), made = jax.lax.scan(body, (carry[0], _with_byte(carry[1])), keys)
    terminated, truncated, *following = _flags_in(made.terminated, 4)
    ended = replace(made.next, terminated=following[0], truncated=following[1])
    made = replace(made, terminated=terminated, truncated=truncated, next=ended)
    return (state, _with_flags(shown)), made


def _byte_of(*flags: jax.Array) -> jax.Array:
    """Put the flags of a row into one byte: each array that a loop carries or writes costs a CPU 0.1 us."""
    return reduce(or_, (flag.astype(jnp.uint8) << place for place, flag in enumerate(flags)))


def _flags_in(byte: jax.Array, count: int) -> list[jax.Array]:
    return [(byte >> place) & 1 != 0 for place in range(count)]


_NOTHING: Any = None


def _with_byte(shown: Timestep) -> Timestep:
    """Carry both flags as one byte, in the place of the first."""
    byte = _byte_of(shown.terminated, shown.truncated)
    return replace(shown, terminated=byte, truncated=_NOTHING)


def _with_flags(shown: Timestep) -> Timestep:
    terminated, truncated = _flags_in(shown.terminated, 2)
    return replace(shown, terminated=terminated, truncated=truncated)


def _recorded(made: Transition) -> Transition:
    """Record the four flags of a row as one byte."""
    flags = made.terminated, made.truncated, made.next.terminated, made.next.truncated
    following = replace(made.next, terminated=_NOTHING, truncated=_NOTHING)
    return replace(made, terminated=_byte_of(*flags), truncated=_NOTHING, next=following)
