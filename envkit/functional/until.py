"""Many steps as one compiled loop that stops where an episode ends.

This module decides when a rollout without resets stops, and what a row shows that has finished before
the others. One step is made by `rollout.transition`, as everywhere.

Conventions
    counted   bool, shape (batch,): rows whose end matters. Rows that only fill up a batch are not.
    capacity  most steps of one call; what is recorded has that length, and only its first ``made``
              entries mean something.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from envkit import rules
from envkit.functional.core import Timestep, done_of
from envkit.functional.rollout import Carry, Policy, RowsEnv, Transition, transition

__all__ = ["StopRule", "Stopped", "unroll_until"]

StopRule = Literal["any", "all"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stopped:
    """How a run ended.

    ``made``: steps taken, int32. ``ended``: the rule was met, bool.
    """

    made: jax.Array
    ended: jax.Array


def unroll_until(
    env: RowsEnv,
    carry: Carry,
    policy: Policy,
    params: Any,
    key: jax.Array,
    counted: jax.Array,
    *,
    rule: StopRule,
    capacity: int,
    limit: int | jax.Array,
    start: int | jax.Array = 0,
    check_every: int = 1,
    record_state: bool = False,
) -> tuple[Carry, Transition, Stopped]:
    """Act and step until any row, or all rows, are done; nothing is reset.

    With ``rule="all"``, a row that is done waits: it keeps its state and repeats its last transition
    with reward 0. One that is done in ``carry`` waits as well, but what it repeats is left to the caller.

    Args:
        env, carry, policy, params, key, start, record_state: see `rollout.unroll`.
        counted: see the module.
        rule: what ends the run.
        capacity: see the module; static.
        limit: most steps of this call, up to ``capacity``.
        check_every: after how many steps the loop asks whether it goes on, for which a card waits for its host;
            static. Of steps beyond the end nothing is kept.

    Returns:
        The carry after the last step, the time-major transitions, and how the run ended.
    """
    first = jnp.asarray(start, dtype=jnp.uint32)
    waits = rule == "all"

    def one(carry: Carry, index: jax.Array, last: Transition | None) -> tuple[Carry, Transition]:
        step_key = jax.random.fold_in(key, first + index.astype(jnp.uint32))
        moving = None if last is None else ~done_of(carry[1])
        flags = {"auto_reset": False, "record_state": record_state, "moving": moving}
        after, made = transition(env, carry, policy, params, step_key, **flags)
        return after, made if moving is None else _frozen(moving, made, last)

    def ended(timestep: Timestep) -> jax.Array:
        done = done_of(timestep)
        return (done & counted).any() if rule == "any" else (done | ~counted).all()

    def unfinished(loop: Any) -> jax.Array:
        index, carry, *_ = loop
        return (index < limit) & ((index == 0) | ~ended(carry[1]))

    def body(loop: Any) -> Any:
        index, carry, last, record = loop
        carry, made = one(carry, index, last)
        return index + 1, carry, made if waits else None, _written(record, made, index)

    def body_unless_finished(_: Any, loop: Any) -> Any:
        index, carry, last, record = loop
        goes_on = unfinished(loop)
        after, made = one(carry, index, last)
        after = _if(goes_on, after, carry)
        record = _written(record, _if(goes_on, made, _entry(record, index)), index)
        return index + goes_on, after, _if(goes_on, made, last) if waits else None, record

    def several(loop: Any) -> Any:
        return jax.lax.fori_loop(0, check_every, body_unless_finished, loop)

    like = jax.eval_shape(lambda: one(carry, jnp.int32(0), None)[1])
    last = _blank(like) if waits else None
    loop = (jnp.int32(0), carry, last, _blank(like, capacity))
    loop = jax.lax.while_loop(unfinished, body if check_every == 1 else several, loop)
    index, carry, _, record = loop
    return carry, record, Stopped(index, ended(carry[1]))


def _blank(like: Any, *time: int) -> Any:
    """Make zeros of the shapes in ``like``, behind axes of the sizes ``time``."""
    with jax.enable_x64(True):  # a policy may give 64 bits
        return jax.tree.map(lambda leaf: jnp.zeros((*time, *leaf.shape), leaf.dtype), like)


def _written(record: Transition, made: Transition, index: jax.Array) -> Transition:
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, index, 0), record, made
    )


def _entry(record: Transition, index: jax.Array) -> Transition:
    take = partial(jax.lax.dynamic_index_in_dim, index=index, axis=0, keepdims=False)
    return jax.tree.map(take, record)


def _if(condition: jax.Array, fresh: Any, kept: Any) -> Any:
    """Take all of one tree or all of another, whatever the dtypes of its leaves."""
    return jax.tree.map(partial(jax.lax.select, condition), fresh, kept)


def _frozen(moving: jax.Array, made: Transition, last: Transition) -> Transition:
    """Take the transition of rows that move; the others repeat their last one with reward 0."""
    shown = jax.tree.map(lambda new, old: rules.choose(moving, new, old), made, last)
    paid = jax.tree.map(
        lambda paid: rules.choose(moving, paid, jnp.zeros_like(paid)), shown.next.reward
    )
    return replace(shown, next=replace(shown.next, reward=paid))
