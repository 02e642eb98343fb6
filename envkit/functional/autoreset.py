"""How finished episodes are followed by new ones.

This module decides which random numbers a new episode consumes and how few resets are computed.
It does not know ``vmap``: `restart_where` is given a batched reset.

Conventions
    key    raw PRNG key (``jax.random.PRNGKey``), uint32. Every row carries its own, so that its
           draws depend neither on its neighbours nor on the size of the batch.
    mask   bool, shape (batch,); True means "start a new episode here".

Decided here: a reset costs what the finished rows cost. Rows are compacted and reset in chunks of
one fixed size, in a loop that runs as often as the finished rows ask for, zero times when there are none. Design idea
6 speaks of several bucket sizes under ``lax.switch``; a loop compiles the reset once instead of once
for every size (seconds each for a physics engine), and every restart is computed at the same
compiled size, so not even its rounding depends on how many other rows finished.
Other reset modes ("pool", "cached") are other functions with the signature of `restart_where`;
`BatchedEnv` chooses among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from envkit import rules
from envkit.functional.core import StatelessEnv, Timestep, WrapperState

__all__ = ["EpisodeState", "Episodic", "chunk_size", "restart_where"]

S = TypeVar("S")
BatchedReset = Callable[[jax.Array], tuple[Any, Timestep]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EpisodeState(WrapperState[S]):
    """``key``: raw PRNG key from which the next episode of this row is drawn, uint32."""

    key: jax.Array


@dataclass(frozen=True)
class Episodic:
    """Carry in the state the key of the next episode."""

    env: StatelessEnv

    @property
    def action_space(self) -> Any:
        return self.env.action_space

    @property
    def observation_space(self) -> Any:
        return getattr(self.env, "observation_space", None)

    def reset(self, key: jax.Array, /) -> tuple[EpisodeState, Timestep]:
        """Draw an episode from one half of ``key`` and carry the other half."""
        carried, episode = jax.random.split(key)
        inner, timestep = self.env.reset(episode)
        return EpisodeState(inner, carried), timestep

    def step(self, state: EpisodeState, action: Any, /) -> tuple[EpisodeState, Timestep]:
        """Advance the episode; the key waits for the next one."""
        inner, timestep = self.env.step(state.inner, action)
        return EpisodeState(inner, state.key), timestep

    def restart(self, state: EpisodeState, /) -> tuple[EpisodeState, Timestep]:
        """Start a new episode from the carried key, which is consumed and replaced."""
        return self.reset(state.key)


def chunk_size(num_rows: int) -> int:
    """Give the number of rows that are reset together: a 32nd of the batch, and at least 16."""
    return min(num_rows, max(16, -(-num_rows // 32)))


def restart_where(
    reset: BatchedReset, mask: jax.Array, state: EpisodeState, timestep: Timestep
) -> tuple[EpisodeState, Timestep]:
    """Start new episodes in the rows of ``mask`` and leave the others bit for bit.

    Differentiable in ``state`` and ``timestep``; a new episode depends on neither, so the gradient
    of restarted rows is zero.

    Args:
        reset: ``keys (rows, ...) -> (state, timestep)`` for any number of rows.
        mask: rows to restart, bool, shape ``(batch,)``.
        state: batched `EpisodeState`; leaves ``(batch, *event)``.
        timestep: what is shown of that state, leaves ``(batch, *event)``.
    """
    kept = (state, timestep)
    # The loop sees constants, so reverse-mode differentiation has nothing to do in it.
    values = jax.lax.stop_gradient(kept)
    restarted = _reset_rows(reset, mask, state.key, values)
    return jax.tree.map(lambda fresh, old: rules.choose(mask, fresh, old), restarted, kept)


def _reset_rows(reset: BatchedReset, mask: jax.Array, keys: jax.Array, values: Any) -> Any:
    """Overwrite the masked rows of ``values`` with fresh ones, chunk by chunk."""
    num_rows = mask.shape[0]
    if num_rows == 0:
        return values
    chunk = chunk_size(num_rows)
    # Masked rows first. The padding points past the end: read as the last row, written nowhere.
    padded = num_rows + chunk
    rows = jnp.nonzero(mask, size=padded, fill_value=num_rows)[0].astype(jnp.int32)
    count = mask.sum(dtype=jnp.int32)

    def body(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        start, values = carry
        chosen = jax.lax.dynamic_slice(rows, (start,), (chunk,))
        fresh = reset(keys.at[chosen].get(mode="clip"))
        written = jax.tree.map(lambda old, new: old.at[chosen].set(new, mode="drop"), values, fresh)
        return start + chunk, written

    return jax.lax.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), values))[1]
