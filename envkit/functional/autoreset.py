"""How finished episodes are followed by new ones.

This module decides which random numbers a new episode consumes, which model it is stepped with, and how few
resets are computed.
It does not know ``vmap``: `restart_where` is given a batched reset.

Conventions
    key    raw PRNG key (``jax.random.PRNGKey``), uint32. Every row carries its own, so that its
           draws depend neither on its neighbours nor on the size of the batch.
    mask   bool, shape (batch,); True means "start a new episode here".

Decided here: a reset costs what the finished rows cost. Rows are compacted and reset in chunks of
one fixed size, in a loop that runs as often as the finished rows ask for, zero times when there are
none. Several sizes to choose from would compile the reset once for each (seconds each for a physics
engine); with one, every restart is also computed at the same compiled size, so not even its rounding
depends on how many other rows finished. A batch that is one chunk is reset whole, or not at all.

Reset modes differ in nothing but the key that an episode is drawn from. So every mode costs the
same, and a state is complete without a copy of the state its episode began with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp

from envkit import rules
from envkit.arrays.integers import as_int
from envkit.errors import ArgumentError
from envkit.functional.core import EnvWrapper, Timestep, WrapperState, outcome_of
from envkit.functional.randomization import Drawn, Randomization

__all__ = [
    "ALL_ON_CARD",
    "ALL_ON_HOST",
    "ON_CARD",
    "ON_HOST",
    "Chunks",
    "EpisodeState",
    "Episodic",
    "Origin",
    "ResetMode",
    "reset_rows",
    "restart_where",
]

S = TypeVar("S")
ResetMode = Literal["fresh", "pool", "cached"]
Origin = tuple[jax.Array, Drawn]
"""What the next episode of a row is made of: its key, and what was drawn of the model it has now."""
BatchedReset = Callable[[Origin], tuple[Any, Timestep]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EpisodeState(WrapperState[S]):
    """What of a row's state outlives its episode, or is drawn with it.

    ``key``: raw PRNG key from which the next episode of this row is drawn, uint32.
    ``model``: leaves of the env's model that were drawn for this row, by name; empty without randomisation.
    """

    key: jax.Array
    model: Drawn = field(default_factory=dict)

    @property
    def origin(self) -> Origin:
        """What the next episode is made of."""
        return self.key, self.model


@dataclass(frozen=True)
class Episodic(EnvWrapper):
    """Carry in the state the key of the next episode, and the model that this one is stepped with.

    Args:
        env: the environment of one row.
        reset_mode: where an episode begins. "fresh": anywhere, every time. "pool": at one of ``pool_size``
            beginnings, the same for all rows and seeds, drawn by the row. "cached": where the first
            episode of the row began.
        pool_size: how many beginnings there are with "pool".
        randomization: how rows draw models of their own; None steps all with the env's. With "episode",
            what is drawn is part of the beginning: a pool has ``pool_size`` models, "cached" one a row.

    Raises:
        ArgumentError: an unknown mode, or a pool that is empty or no number.
    """

    reset_mode: ResetMode = "fresh"
    pool_size: int = 64
    randomization: Randomization | None = None

    def __post_init__(self) -> None:
        if self.reset_mode not in get_args(ResetMode):
            raise ArgumentError(
                f"reset_mode={self.reset_mode!r} is not one of {get_args(ResetMode)}. Pass one of these."
            )
        size = as_int("pool_size", self.pool_size, least=1, meaning="how many beginnings there are")
        object.__setattr__(self, "pool_size", size)

    def reset(self, key: jax.Array, /) -> tuple[EpisodeState, Timestep]:
        """Begin the first episode of a row, and carry the key of the one after it."""
        return self.again(self.origin(key))

    def origin(self, key: jax.Array) -> Origin:
        """Give what the first episode of a row is made of."""
        return key, {} if self.randomization is None else self.randomization.draw(self.env, key)

    def again(self, origin: Origin) -> tuple[EpisodeState, Timestep]:
        """Begin an episode from what the one before left: its key, and its model if that is to last."""
        key, model = origin
        carried, episode = self._keys(key)
        if self.randomization is not None and self.randomization.at == "episode":
            model = self.randomization.draw(self.env, episode)
        inner, timestep = outcome_of(self.env_with(model).reset(episode), "reset")
        return EpisodeState(inner, carried, model), timestep

    def step(self, state: EpisodeState, action: Any, /) -> tuple[EpisodeState, Timestep]:
        """Advance the episode; the key waits for the next one."""
        inner, timestep = outcome_of(self.env_with(state.model).step(state.inner, action), "step")
        return EpisodeState(inner, state.key, state.model), timestep

    def env_with(self, drawn: Drawn) -> Any:
        """Give the env that a row with these leaves of a model is stepped by."""
        return self.randomization.applied(self.env, drawn) if self.randomization else self.env

    def _keys(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Give the key to carry, and that of the episode that begins now."""
        if self.reset_mode == "cached":
            return key, key
        carried, episode = jax.random.split(key)
        if self.reset_mode == "pool":
            number = jax.random.randint(episode, (), 0, self.pool_size)
            episode = jax.random.fold_in(jax.random.PRNGKey(0), number)
        return carried, episode


@dataclass(frozen=True)
class Chunks:
    """How many rows are reset together.

    Attributes:
        most: chunks there are at most: each is such a part of the batch.
        least: rows of a chunk at least, where there are as many.
        asks_first: nothing is counted, listed or copied where no row is to be reset. To ask costs little where
            programs branch by themselves; a card waits for the host to do it.
        branches: rows that are one chunk are reset behind a branch; else at each step, and kept where they end.
    """

    most: int = 32
    least: int = 16
    asks_first: bool = True
    branches: bool = True

    def size(self, num_rows: int) -> int:
        """Give the number of rows that are reset together in a batch."""
        return min(num_rows, max(self.least, -(-num_rows // self.most)))

    def where_any(self, mask: jax.Array, begun: Callable[[], S], unchanged: Callable[[], S]) -> S:
        """Give what ``begun`` does where a row of ``mask`` is set, which ``unchanged`` gives where none is."""
        return jax.lax.cond(mask.any(), begun, unchanged) if self.asks_first else begun()


ON_HOST = Chunks()
ON_CARD = Chunks(most=4, least=1024, asks_first=False)
"""After each chunk the host asks a card whether there are more, and so few rows take it as long as one.

Whether there are any it would ask as well."""

ALL_ON_HOST = Chunks(most=1)
ALL_ON_CARD = Chunks(most=1, asks_first=False, branches=False)
"""The host is asked nothing: every row is reset at each step."""


def restart_where(
    reset: BatchedReset,
    mask: jax.Array,
    state: EpisodeState,
    timestep: Timestep,
    chunks: Chunks = ON_HOST,
) -> tuple[EpisodeState, Timestep]:
    """Start new episodes in the rows of ``mask`` and leave the others bit for bit.

    Differentiable in ``state`` and ``timestep``; a new episode depends on neither, so the gradient
    of restarted rows is zero.

    Args:
        reset: begins episodes from the `Origin` of any number of rows.
        mask: rows to restart, bool, shape ``(batch,)``.
        state: batched `EpisodeState`; leaves ``(batch, *event)``.
        timestep: what is shown of that state, leaves ``(batch, *event)``.
        chunks: how many rows are reset together.
    """
    kept = (state, timestep)
    # The loop sees constants, so reverse-mode differentiation has nothing to do in it.
    values = jax.lax.stop_gradient(kept)
    restarted = reset_rows(reset, mask, state.origin, values, chunks)
    return jax.tree.map(lambda fresh, old: rules.choose(mask, fresh, old), restarted, kept)


def reset_rows(
    reset: Callable[[Origin], Any], mask: jax.Array, origins: Origin, values: Any, chunks: Chunks
) -> Any:
    """Overwrite the rows of ``mask`` in ``values``, of any form, with what ``reset`` makes of their origins.

    Not differentiable: `restart_where` is.
    """
    num_rows = mask.shape[0]
    if num_rows == 0:
        return values
    chunk = chunks.size(num_rows)
    if chunk == num_rows:
        return _reset_together(reset, mask, origins, values, chunks.branches)

    def restarted(values: Any) -> Any:
        count = mask.sum(dtype=jnp.int32)
        rows = _masked_first(mask, num_rows + chunk)

        def body(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            start, values = carry
            chosen = jax.lax.dynamic_slice(rows, (start,), (chunk,))
            fresh = reset(jax.tree.map(lambda leaf: leaf.at[chosen].get(mode="clip"), origins))
            written = jax.tree.map(
                lambda old, new: old.at[chosen].set(new, mode="drop"), values, fresh
            )
            return start + chunk, written

        return jax.lax.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), values))[1]

    # In most steps of most runs nothing is done, and listing the rows costs more than a small env's step.
    return chunks.where_any(mask, lambda: restarted(values), lambda: values)


def _reset_together(
    reset: Callable[[Origin], Any],
    mask: jax.Array,
    origins: Origin,
    values: Any,
    branches: bool,
) -> Any:
    """Do what `reset_rows` does where all rows are one chunk: reset them together, or none if it ``branches``.

    Of a loop, in which the rows are the same in every round, XLA would take the reset out, and make it at every step.
    """

    def begun() -> Any:
        return jax.tree.map(partial(rules.choose, mask), reset(origins), values)

    return jax.lax.cond(mask.any(), begun, lambda: values) if branches else begun()


def _masked_first(mask: jax.Array, size: int) -> jax.Array:
    """List the rows of ``mask`` in order, int32 ``(size,)``, filled up with a row past the end: read as the last, written nowhere."""
    numbers = jnp.arange(mask.shape[0], dtype=jnp.int32)
    places = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, size)
    return jnp.full(size, mask.shape[0], jnp.int32).at[places].set(numbers, mode="drop")
