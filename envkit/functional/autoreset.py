"""How a finished episode is followed by a fresh one, row by row.

`Episodic` gives each environment a key of its own for its next episode. `restart_where` begins new
episodes in a batch, computing resets for only about as many rows as need one.

Conventions
    rows   leading axis of every leaf of a batched state.
    mask   bool (rows,); True means "begin a new episode here".
    Source of the bucketing: rows are compacted to the smallest of a few static sizes, chosen on
    device by `lax.switch`, so nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from envkit import rules
from envkit.functional.core import Space, StatelessEnv, Timestep, normalized

__all__ = ["EpisodeState", "Episodic", "bucket_sizes", "choose", "restart_where"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EpisodeState:
    """State of `Episodic`."""

    inner: Any
    key: jax.Array  # typed key "", from which the next episode of this row is drawn


@dataclass(frozen=True)
class Episodic:
    """Carry in the state the key of the next episode.

    No row's draws depend on another's, nor on how many rows there are.
    """

    env: StatelessEnv

    @property
    def action_space(self) -> Space:
        """That of the environment."""
        return self.env.action_space

    def reset(self, key: jax.Array) -> tuple[EpisodeState, Timestep]:
        """Draw an episode from one half of ``key`` and keep the other."""
        following, now = jax.random.split(key)
        inner, timestep = self.env.reset(now)
        return EpisodeState(inner, following), normalized(timestep)

    def restart(self, state: EpisodeState) -> tuple[EpisodeState, Timestep]:
        """Begin the next episode, from the key the state carries."""
        return self.reset(state.key)

    def step(self, state: EpisodeState, action: Any) -> tuple[EpisodeState, Timestep]:
        """Step the environment; the key stays."""
        inner, timestep = self.env.step(state.inner, action)
        return EpisodeState(inner, state.key), normalized(timestep)


def bucket_sizes(rows: int) -> tuple[int, ...]:
    """Give the numbers of resets that are compiled for: 0, about 1/64, 1/16 and 1/4, and all."""
    parts = {-(-rows // divisor) for divisor in (64, 16, 4)}
    return tuple(sorted({0, *parts, rows}))


def restart_where(
    restart: Callable[[Any], tuple[Any, Timestep]], mask: jax.Array, state: Any, timestep: Timestep
) -> tuple[Any, Timestep]:
    """Begin new episodes in the rows of ``mask``; all others stay bit for bit.

    Args:
        restart: batched `Episodic.restart`, from states to states and timesteps.
        mask: bool (rows,).
        state, timestep: batched; give way to the fresh ones where ``mask`` is set.
    """
    (rows,) = mask.shape
    sizes = bucket_sizes(rows)

    def nothing(operand: tuple[Any, Timestep]) -> tuple[Any, Timestep]:
        return operand

    def everything(operand: tuple[Any, Timestep]) -> tuple[Any, Timestep]:
        fresh = restart(operand[0])
        return choose(mask, fresh, operand)

    def some(size: int) -> Callable:
        def compacted(operand: tuple[Any, Timestep]) -> tuple[Any, Timestep]:
            (chosen,) = jnp.nonzero(mask, size=size, fill_value=rows)
            picked = jax.tree.map(lambda leaf: leaf[jnp.minimum(chosen, rows - 1)], operand[0])
            fresh = restart(picked)
            return jax.tree.map(
                lambda new, old: old.at[chosen].set(new, mode="drop"), fresh, operand
            )

        return compacted

    branches = [nothing, *(some(size) for size in sizes[1:-1]), everything]
    bucket = jnp.searchsorted(jnp.asarray(sizes), mask.sum())
    return jax.lax.switch(bucket, branches, (state, timestep))


def choose(mask: jax.Array, new: Any, old: Any) -> Any:
    """Apply `rules.choose` to every leaf of a pytree; PRNG keys, which it does not know, as well."""

    def chosen(fresh: jax.Array, kept: jax.Array) -> jax.Array:
        if jnp.issubdtype(fresh.dtype, jax.dtypes.prng_key):
            return jnp.where(mask.reshape(mask.shape + (1,) * (fresh.ndim - 1)), fresh, kept)
        return rules.choose(mask, fresh, kept)

    return jax.tree.map(chosen, new, old)
