"""Many steps as one compiled loop, of a fixed length or until episodes end.

This module decides the order of things in a rollout: restart, observe, act, step, record; when one without resets
stops; and what a row shows that has finished before the others. It does not know TensorDict.

Conventions
    transition  root (what the policy saw), action, next (what the step returned).
    time-major  recorded leaves have shape (time, batch, *event).
    counted     bool, shape (batch,): rows whose end matters. Rows that only fill up a batch are not.
    capacity    most steps of one call that may stop; what is recorded has that length, and only its first ``made``
                entries mean something.

Decided here: a finished row restarts at the START of a step. So ``next`` holds the true last
observation and the root of the following transition the fresh one. The very last step resets nothing. One long call,
several short ones and a Python loop of single steps draw and do the same. Chunks agree in every bit. Between scan and
loop, XLA may round a value apart that nothing after it
reads: of a pendulum's leaves only the reward differs, by one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
import jax.numpy as jnp

from envkit.functional.core import Timestep, choose_rows, done_of

if TYPE_CHECKING:
    from envkit.functional.structure import PyTree

Policy = Callable[[Any, Any, jax.Array], Any]
"""``(params, observation, key) -> action``: batched observation and action, one raw key a step."""

Carry = tuple[Any, Timestep]


class _RowsEnv(Protocol):
    """Functions over many rows that a rollout calls; `BatchedEnv` says what each function does."""

    def step(self, state: PyTree, action: PyTree) -> Carry: ...

    def step_where(
        self, mask: jax.Array, state: PyTree, timestep: Timestep, action: PyTree
    ) -> Carry: ...

    def restart_where(self, mask: jax.Array, state: PyTree, timestep: Timestep) -> Carry: ...

    def sample_action(self, key: jax.Array, num_rows: int, observation: PyTree) -> PyTree: ...

    def pack(self, state: PyTree) -> dict[str, jax.Array]: ...


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


def random_policy(env: _RowsEnv) -> Policy:
    """Make a policy that draws from the action space; row i's draws do not depend on the batch.

    Where the env has masks of actions, the draws are among the options that they allow.
    """

    def act(params: PyTree, observation: PyTree, key: jax.Array) -> PyTree:
        num_rows = jax.tree.leaves(observation)[0].shape[0]
        return env.sample_action(key, num_rows, observation)

    return act


def transition(
    env: _RowsEnv,
    carry: Carry,
    policy: Policy,
    params: PyTree,
    key: jax.Array,
    *,
    auto_reset: bool = True,
    record_state: bool = False,
    moving: jax.Array | None = None,
) -> tuple[Carry, Transition]:
    """Make one step of a rollout; `unroll` is a loop of these. Rows out of ``moving`` stay as they are."""
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


def _restarted(env: _RowsEnv, state: PyTree, timestep: Timestep) -> Carry:
    """Start new episodes where one has ended. No other row has a flag: said so, XLA need not carry them."""
    unset = jnp.zeros_like(timestep.terminated)
    going_on = replace(timestep, terminated=unset, truncated=unset)
    return env.restart_where(done_of(timestep), state, going_on)


def unroll(
    env: _RowsEnv,
    carry: Carry,
    policy: Policy,
    params: PyTree,
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
        (state, shown), record = transition(
            env,
            (carry[0], _with_flags(carry[1])),
            policy,
            params,
            step_key,
            auto_reset=auto_reset,
            record_state=record_state,
        )
        return (state, _with_byte(shown)), _recorded(record)

    (state, shown), records = jax.lax.scan(body, (carry[0], _with_byte(carry[1])), keys)
    terminated, truncated, *following = _flags_in(records.terminated, 4)
    ended = replace(records.next, terminated=following[0], truncated=following[1])
    records = replace(records, terminated=terminated, truncated=truncated, next=ended)
    return (state, _with_flags(shown)), records


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


def _recorded(record: Transition) -> Transition:
    """Record the four flags of a row as one byte."""
    flags = record.terminated, record.truncated, record.next.terminated, record.next.truncated
    following = replace(record.next, terminated=_NOTHING, truncated=_NOTHING)
    return replace(record, terminated=_byte_of(*flags), truncated=_NOTHING, next=following)


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
    env: _RowsEnv,
    carry: Carry,
    policy: Policy,
    params: PyTree,
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
        check_every: after how many steps the loop asks whether it goes on, for which a GPU waits for its host;
            static. Of steps beyond the end nothing is kept.

    Returns:
        The carry after the last step, the time-major transitions, and how the run ended.
    """
    first = jnp.asarray(start, dtype=jnp.uint32)
    waits = rule == "all"

    def one(carry: Carry, index: jax.Array, last: Transition | None) -> tuple[Carry, Transition]:
        step_key = jax.random.fold_in(key, first + index.astype(jnp.uint32))
        moving = None if last is None else ~done_of(carry[1])
        after, record = transition(
            env,
            carry,
            policy,
            params,
            step_key,
            auto_reset=False,
            record_state=record_state,
            moving=moving,
        )
        return after, record if moving is None or last is None else _frozen(moving, record, last)

    def ended(timestep: Timestep) -> jax.Array:
        done = done_of(timestep)
        return (done & counted).any() if rule == "any" else (done | ~counted).all()

    def unfinished(loop: PyTree) -> jax.Array:
        index, carry, *_ = loop
        return (index < limit) & ((index == 0) | ~ended(carry[1]))

    def body(loop: PyTree) -> PyTree:
        index, carry, last, record = loop
        carry, latest = one(carry, index, last)
        return index + 1, carry, latest if waits else None, _written(record, latest, index)

    def body_unless_finished(_: PyTree, loop: PyTree) -> PyTree:
        index, carry, last, record = loop
        goes_on = unfinished(loop)
        after, latest = one(carry, index, last)
        after = _if(goes_on, after, carry)
        record = _written(record, _if(goes_on, latest, _entry(record, index)), index)
        return index + goes_on, after, _if(goes_on, latest, last) if waits else None, record

    def several(loop: PyTree) -> PyTree:
        return jax.lax.fori_loop(0, check_every, body_unless_finished, loop)

    like = jax.eval_shape(lambda: one(carry, jnp.int32(0), None)[1])
    last = _blank(like) if waits else None
    loop = (jnp.int32(0), carry, last, _blank(like, capacity))
    loop = jax.lax.while_loop(unfinished, body if check_every == 1 else several, loop)
    index, carry, _, record = loop
    return carry, record, Stopped(index, ended(carry[1]))


def _blank(like: PyTree, *time: int) -> PyTree:
    """Make zeros of the shapes in ``like``, behind axes of the sizes ``time``."""
    with jax.enable_x64(True):  # a policy may give 64 bits
        return jax.tree.map(lambda leaf: jnp.zeros((*time, *leaf.shape), leaf.dtype), like)


def _written(record: Transition, latest: Transition, index: jax.Array) -> Transition:
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, index, 0), record, latest
    )


def _entry(record: Transition, index: jax.Array) -> Transition:
    take = partial(jax.lax.dynamic_index_in_dim, index=index, axis=0, keepdims=False)
    return jax.tree.map(take, record)


def _if(condition: jax.Array, fresh: PyTree, kept: PyTree) -> PyTree:
    """Take all of one tree or all of another, whatever the dtypes of its leaves."""
    return jax.tree.map(partial(jax.lax.select, condition), fresh, kept)


def _frozen(moving: jax.Array, latest: Transition, last: Transition) -> Transition:
    """Take the transition of rows that move; the others repeat their last one with reward 0."""
    shown = choose_rows(moving, latest, last)
    reward = shown.next.reward
    paid = choose_rows(moving, reward, jax.tree.map(jnp.zeros_like, reward))
    return replace(shown, next=replace(shown.next, reward=paid))
