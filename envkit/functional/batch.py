"""Many copies of one stateless environment.

This module holds the only ``vmap`` of the package and fixes, once for each environment, the
structure, dtypes and shapes of everything it returns. It does not jit: one outer ``jit`` belongs to
the caller.

Conventions
    leaf  array of shape (batch, *event).
    keys  raw PRNG keys, uint32, shape (batch, 2): one for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from envkit import rules
from envkit.functional.autoreset import (
    ON_HOST,
    Chunks,
    EpisodeState,
    Episodic,
    Origin,
    ResetMode,
    reset_rows,
    restart_where,
)
from envkit.functional.core import StatelessEnv, Timestep, normalize
from envkit.functional.packing import StatePacking
from envkit.functional.randomization import Randomization
from envkit.functional.spaces import sample_space
from envkit.functional.structure import conform, is_typed_key, strong

__all__ = ["BatchedEnv", "row_keys"]


def row_keys(key: jax.Array, num_rows: int, first: int | jax.Array = 0) -> jax.Array:
    """Derive one raw key a row; that of row i depends on ``key`` and i only, not on ``num_rows``.

    Args:
        key: one PRNG key, raw or typed.
        num_rows: how many keys, static.
        first: number of the first row.
    """
    raw = jax.random.key_data(key) if is_typed_key(key.dtype) else key
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
        raw, jnp.uint32(first) + jnp.arange(num_rows, dtype=jnp.uint32)
    )


class BatchedEnv:
    """Run any number of copies of a stateless environment side by side.

    Every function is pure and may be called under ``jit``, ``scan``, ``grad`` and ``shard_map``.
    The number of rows is that of the arguments. Rows do not see each other.

    Args:
        env: the environment of one row.
        reset_mode, pool_size, randomization: where episodes begin, and with which model, see `Episodic`.
        axis: name of the mesh axis over which rows are spread, where functions are called under
            ``shard_map``; None where they see all rows.
        chunks: how many rows begin anew together.
    """

    def __init__(
        self,
        env: StatelessEnv,
        *,
        reset_mode: ResetMode = "fresh",
        pool_size: int = 64,
        randomization: Randomization | None = None,
        axis: str | None = None,
        chunks: Chunks = ON_HOST,
    ) -> None:
        self.env = Episodic(env, reset_mode, pool_size, randomization)
        self.axis = axis
        self.chunks = chunks

    def __getstate__(self) -> dict[str, Any]:
        """A copy finds out for itself what this one remembers of shapes."""
        return {"env": self.env, "axis": self.axis, "chunks": self.chunks}

    def with_model(self, model: Any) -> BatchedEnv:
        """Give the same rows stepped with another model of the same structure; see `ModelledEnv`."""
        other = self._like_this()
        other.env = self.env.with_model(model)
        return other

    def with_chunks(self, chunks: Chunks) -> BatchedEnv:
        """Give the same rows, of which others begin anew together."""
        other = self._like_this()
        other.chunks = chunks
        return other

    def _like_this(self) -> BatchedEnv:
        """Copy this; what it has found out of shapes holds for the copy, and to find it out again takes a trace."""
        other = copy(self)
        vars(other).update(template=self.template, packing=self.packing)
        return other

    @property
    def action_space(self) -> Any:
        return self.env.action_space

    @property
    def observation_space(self) -> Any:
        return self.env.observation_space

    @property
    def reward_shape(self) -> tuple[int, ...]:
        return self.env.reward_shape

    @cached_property
    def template(self) -> tuple[EpisodeState, Timestep]:
        """Shapes and dtypes of one row: `jax.ShapeDtypeStruct` leaves without a batch axis."""
        key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
        return jax.eval_shape(lambda key: self._reset_row(self.env.origin(key)), key)

    @cached_property
    def packing(self) -> StatePacking:
        """How the state of a row lies in two buffers."""
        return StatePacking(self.template[0], {"model": self.env.model_name})

    def init(self, key: jax.Array, num_rows: int) -> tuple[EpisodeState, Timestep]:
        """Start ``num_rows`` episodes, all derived from one key (see `row_keys`)."""
        return self.reset(self.row_keys(key, num_rows))

    def first_origins(self, keys: jax.Array) -> Origin:
        """Give what first episodes are made of where every row still carries the one key that `init` is given.

        ``again`` of them is what `init` gives.

        Args:
            keys: the key of all rows that are seen here, repeated, shape (rows, 2).
        """
        num_rows = keys.shape[0]
        numbers = jnp.uint32(self._first(num_rows)) + jnp.arange(num_rows, dtype=jnp.uint32)
        return jax.vmap(self.env.origin)(jax.vmap(jax.random.fold_in)(keys, numbers))

    def row_keys(self, key: jax.Array, num_rows: int) -> jax.Array:
        """Derive the keys of the rows that are seen here, see the function of that name."""
        return row_keys(key, num_rows, self._first(num_rows))

    def _first(self, num_rows: int) -> int | jax.Array:
        """Give the number of the first row that is seen here."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis) * num_rows

    def reset(self, keys: jax.Array) -> tuple[EpisodeState, Timestep]:
        """Start the first episode of as many rows as there are ``keys``, shape ``(batch, 2)``."""
        return self.again(jax.vmap(self.env.origin)(keys))

    def again(self, origins: Origin) -> tuple[EpisodeState, Timestep]:
        """Start the next episode of every row, of what the one before it left."""
        return jax.vmap(self._reset_row)(origins)

    def step(self, state: EpisodeState, action: Any) -> tuple[EpisodeState, Timestep]:
        """Advance every row by its action.

        Raises:
            StateStructureError: while tracing, if state or timestep differ from those of `reset` in
                structure or shape. Dtypes are cast to those of `reset`.
        """
        return jax.vmap(self._step_row)(state, action)

    def step_where(
        self, mask: jax.Array, state: EpisodeState, timestep: Timestep, action: Any
    ) -> tuple[EpisodeState, Timestep]:
        """Advance the rows of ``mask``; the others keep every bit."""
        stepped, kept = self.step(state, action), (state, timestep)
        return jax.tree.map(lambda new, old: rules.choose(mask, new, old), stepped, kept)

    def restart_where(
        self, mask: jax.Array, state: EpisodeState, timestep: Timestep
    ) -> tuple[EpisodeState, Timestep]:
        """Start new episodes in the rows of ``mask``; the others keep every bit."""
        return restart_where(self.again, jnp.asarray(mask), state, timestep, self.chunks)

    def restart_written(
        self,
        mask: jax.Array,
        origins: Origin,
        written: Any,
        timestep: Timestep,
        write: Callable[[EpisodeState], Any],
    ) -> tuple[Any, Timestep]:
        """Start new episodes in the rows of ``mask`` of states that are written already.

        It is cheaper than writing what `restart_where` gives, since only new rows are written twice.
        Not differentiable.

        Args:
            mask: rows to restart, bool, shape ``(batch,)``.
            origins: ``state.origin`` of all rows.
            written: ``write(state)``.
            timestep: what is shown of that state.
            write: lays out the state of any number of rows.
        """

        def again(origins: Origin) -> tuple[Any, Timestep]:
            fresh, shown = self.again(origins)
            return write(fresh), shown

        return reset_rows(again, jnp.asarray(mask), origins, (written, timestep), self.chunks)

    def pack(self, state: EpisodeState) -> dict[str, jax.Array]:
        """Lay the state of every row out in two buffers; see `packing`."""
        return self.packing.pack(state)

    def sample_action(self, key: jax.Array, num_rows: int) -> Any:
        """Draw one action a row from the action space; that of row i depends on ``key`` and i only."""
        if self.axis is None:
            return sample_space(self.action_space, key, (num_rows,))
        everywhere = num_rows * jax.lax.axis_size(self.axis)
        drawn, first = sample_space(self.action_space, key, (everywhere,)), self._first(num_rows)
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, num_rows), drawn)

    def _reset_row(self, origin: Origin) -> tuple[EpisodeState, Timestep]:
        state, timestep = self.env.again(origin)
        return jax.tree.map(strong, state), normalize(timestep, self.reward_shape)

    def _step_row(self, state: EpisodeState, action: Any) -> tuple[EpisodeState, Timestep]:
        state_like, timestep_like = self.template
        state, timestep = self.env.step(state, action)
        return (
            conform(state, state_like, what="state"),
            conform(normalize(timestep, self.reward_shape), timestep_like, what="timestep"),
        )
