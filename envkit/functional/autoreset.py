"""How finished episodes are followed by new ones.

This module decides which random numbers a new episode consumes and how few resets are computed.
It does not know ``vmap``: `restart_where` is given a batched reset.

Conventions
    key    raw PRNG key (``jax.random.PRNGKey``), uint32. Every row carries its own, so that its
           draws depend neither on its neighbours nor on the size of the batch.
    mask   bool, shape (batch,); True means "start a new episode here".

Decided here: a reset costs what the finished rows cost. Rows are compacted and reset in chunks of
one fixed size, in a loop that runs as often as the finished rows ask for, zero times when there are
none. Several sizes to choose from would compile the reset once for each (seconds each for a physics
engine); with one, every restart is also computed at the same compiled size, so not even its rounding
depends on how many other rows finished.

Reset modes differ in nothing but the key that an episode is drawn from. So every mode costs the
same, and a state is complete without a copy of the state its episode began with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp

from envkit import rules
from envkit.errors import ArgumentError
from envkit.functional.core import StatelessEnv, Timestep, WrapperState, reward_shape_of

__all__ = ["EpisodeState", "Episodic", "ResetMode", "chunk_size", "reset_rows", "restart_where"]

S = TypeVar("S")
ResetMode = Literal["fresh", "pool", "cached"]
BatchedReset = Callable[[jax.Array], tuple[Any, Timestep]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EpisodeState(WrapperState[S]):
    """``key``: raw PRNG key from which the next episode of this row is drawn, uint32."""

    key: jax.Array


@dataclass(frozen=True)
class Episodic:
    """Carry in the state the key of the next episode.

    Args:
        env: the environment of one row.
        reset_mode: where an episode begins. "fresh": anywhere, every time. "pool": at one of ``pool_size``
            beginnings, the same for all rows and seeds, drawn by the row. "cached": where the first
            episode of the row began.
        pool_size: how many beginnings there are with "pool".

    Raises:
        ArgumentError: an unknown mode, or an empty pool.
    """

    env: StatelessEnv
    reset_mode: ResetMode = "fresh"
    pool_size: int = 64

    def __post_init__(self) -> None:
        if self.reset_mode not in get_args(ResetMode):
            raise ArgumentError(
                f"reset_mode={self.reset_mode!r} is not one of {get_args(ResetMode)}. Pass one of these."
            )
        if self.pool_size < 1:
            raise ArgumentError(f"pool_size is {self.pool_size}, but must be at least 1.")

    @property
    def action_space(self) -> Any:
        return self.env.action_space

    @property
    def observation_space(self) -> Any:
        return getattr(self.env, "observation_space", None)

    @property
    def reward_shape(self) -> tuple[int, ...]:
        return reward_shape_of(self.env)

    def reset(self, key: jax.Array, /) -> tuple[EpisodeState, Timestep]:
        """Draw an episode from ``key`` and carry the key of the one after it."""
        carried, episode = self._keys(key)
        inner, timestep = self.env.reset(episode)
        return EpisodeState(inner, carried), timestep

    def step(self, state: EpisodeState, action: Any, /) -> tuple[EpisodeState, Timestep]:
        """Advance the episode; the key waits for the next one."""
        inner, timestep = self.env.step(state.inner, action)
        return EpisodeState(inner, state.key), timestep

    def _keys(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Give the key to carry, and that of the episode that begins now."""
        if self.reset_mode == "cached":
            return key, key
        carried, episode = jax.random.split(key)
        if self.reset_mode == "pool":
            number = jax.random.randint(episode, (), 0, self.pool_size)
            episode = jax.random.fold_in(jax.random.PRNGKey(0), number)
        return carried, episode


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
    restarted = reset_rows(reset, mask, state.key, values)
    return jax.tree.map(lambda fresh, old: rules.choose(mask, fresh, old), restarted, kept)


def reset_rows(
    reset: Callable[[jax.Array], Any], mask: jax.Array, keys: jax.Array, values: Any
) -> Any:
    """Overwrite the rows of ``mask`` in ``values``, of any form, with what ``reset`` makes of their keys.

    Not differentiable: `restart_where` is.
    """
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
