"""Many copies of one stateless environment, and how their finished episodes are followed by new ones.

This module holds the only ``vmap`` of the package and fixes, once for each environment, the
structure, dtypes and shapes of everything it returns. It does not jit: one outer ``jit`` belongs to
the caller. It decides which random numbers a new episode consumes, which model it is stepped with, and how few
resets are computed.

Conventions
    leaf  array of shape (batch, *event).
    keys  raw PRNG keys (``jax.random.PRNGKey``), uint32, shape (batch, 2). Every row carries its own, so that its
          draws depend neither on its neighbours nor on the size of the batch.
    mask  bool, shape (batch,); True means "start a new episode here".

Decided here: a reset costs what the finished rows cost. Rows are compacted and reset in chunks of
one fixed size, in a loop that runs as often as the finished rows ask for, zero times when there are
none. Several sizes to choose from would compile the reset once for each (seconds each for a physics
engine). With one, every restart is also computed at the same compiled size, so its rounding does not depend on how
many other rows finished. A batch that is one chunk is reset whole, or not at all.

Reset modes differ in nothing but the key that an episode is drawn from. So every mode costs the
same, and a state is complete without a copy of the state its episode began with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp

from envkit.arrays.integers import as_int
from envkit.errors import ArgumentError
from envkit.functional.core import (
    EnvWrapper,
    Path,
    RewardShape,
    StatelessEnv,
    Timestep,
    WrapperState,
    choose_rows,
    in_form_of_reset,
    in_form_of_step,
    outcome_of,
)
from envkit.functional.packing import StatePacking
from envkit.functional.randomization import Drawn, Randomization
from envkit.functional.spaces import SpaceTree, choose_allowed, sample_space
from envkit.functional.structure import PyTree, is_typed_key, name_of

S = TypeVar("S")
ResetMode = Literal["fresh", "pool", "cached"]
Origin = tuple[jax.Array, Drawn]
"""What the next episode of a row is made of: its key, and what was drawn of the model it has now."""
BatchedReset = Callable[[Origin], tuple[Any, Timestep]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EpisodeState(WrapperState[S]):
    """The part of a row's state that outlives its episode, or is drawn with it.

    ``key``: raw PRNG key from which the next episode of this row is drawn, uint32.
    ``model``: leaves of the env's model that were drawn for this row, by name; empty without randomisation.
    """

    key: jax.Array
    model: Drawn = field(default_factory=dict)

    @property
    def origin(self) -> Origin:
        """The inputs of the next episode."""
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
        randomization: how rows draw their own models; None steps all with the env's. With "episode",
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
        """Return what the first episode of a row is made of."""
        return key, {} if self.randomization is None else self.randomization.draw(self.env, key)

    def again(self, origin: Origin) -> tuple[EpisodeState, Timestep]:
        """Begin an episode from what the one before left: its key, and its model if that is to last."""
        key, model = origin
        carried, episode = self._keys(key)
        if self.randomization is not None and self.randomization.at == "episode":
            model = self.randomization.draw(self.env, episode)
        inner, timestep = outcome_of(self.env_with(model).reset(episode), "reset")
        return EpisodeState(inner, carried, model), timestep

    def step(self, state: EpisodeState, action: PyTree, /) -> tuple[EpisodeState, Timestep]:
        """Advance the episode; the key waits for the next one."""
        inner, timestep = outcome_of(self.env_with(state.model).step(state.inner, action), "step")
        return EpisodeState(inner, state.key, state.model), timestep

    def env_with(self, drawn: Drawn) -> StatelessEnv:
        """Return the env that a row with these leaves of a model is stepped by."""
        return self.randomization.applied(self.env, drawn) if self.randomization else self.env

    def _keys(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the key to carry, and that of the episode that begins now."""
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
            programs branch by themselves; a GPU waits for the host to do it.
        branches: rows that are one chunk are reset behind a branch; else at each step, and kept where they end.
    """

    most: int = 32
    least: int = 16
    asks_first: bool = True
    branches: bool = True

    def size(self, num_rows: int) -> int:
        """Return the number of rows that are reset together in a batch."""
        return min(num_rows, max(self.least, -(-num_rows // self.most)))

    def where_any(self, mask: jax.Array, begun: Callable[[], S], unchanged: Callable[[], S]) -> S:
        """Return what ``begun`` does where a row of ``mask`` is set, which ``unchanged`` gives where none is."""
        return jax.lax.cond(mask.any(), begun, unchanged) if self.asks_first else begun()


ON_HOST = Chunks()
ON_CARD = Chunks(most=4, least=1024, asks_first=False)
"""After each chunk the host asks a GPU whether there are more, and so few rows take it as long as one.

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
    """Start new episodes in the rows of ``mask`` and leave the others exactly.

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
    return choose_rows(mask, restarted, kept)


def reset_rows(
    reset: Callable[[Origin], Any], mask: jax.Array, origins: Origin, values: PyTree, chunks: Chunks
) -> PyTree:
    """Overwrite the rows of ``mask`` in ``values``, of any form, with what ``reset`` makes of their origins.

    Not differentiable: `restart_where` is.
    """
    num_rows = mask.shape[0]
    if num_rows == 0:
        return values
    chunk = chunks.size(num_rows)
    if chunk == num_rows:
        # Of a loop over one chunk XLA would take the reset out, and make it at every step.
        def begun() -> PyTree:
            return choose_rows(mask, reset(origins), values)

        return jax.lax.cond(mask.any(), begun, lambda: values) if chunks.branches else begun()

    def restarted(values: PyTree) -> PyTree:
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


def _masked_first(mask: jax.Array, size: int) -> jax.Array:
    """List the rows of ``mask`` in order, int32 ``(size,)``, filled up with a row past the end: read as the last, written nowhere."""
    numbers = jnp.arange(mask.shape[0], dtype=jnp.int32)
    places = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, size)
    return jnp.full(size, mask.shape[0], jnp.int32).at[places].set(numbers, mode="drop")


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
        chunks: how many rows begin again together.
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

    def with_model(self, model: PyTree) -> BatchedEnv:
        """Return the same rows stepped with another model of the same structure; see `ModelledEnv`."""
        return self._like_this(env=self.env.with_model(model))

    def with_chunks(self, chunks: Chunks) -> BatchedEnv:
        """Return the same rows, of which others begin again together."""
        return self._like_this(chunks=chunks)

    def _like_this(self, **changed: Any) -> BatchedEnv:
        """Copy this; what it has found out of shapes holds for the copy, and to find it out again takes a trace."""
        other = copy(self)
        vars(other).update(template=self.template, packing=self.packing, **changed)
        return other

    @property
    def action_space(self) -> SpaceTree:
        return self.env.action_space

    @property
    def observation_space(self) -> SpaceTree:
        return self.env.observation_space

    @property
    def reward_shape(self) -> RewardShape:
        return self.env.reward_shape

    @property
    def action_masks(self) -> tuple[tuple[Path, Path], ...]:
        return self.env.action_masks

    @property
    def groups(self) -> Mapping[str, int]:
        return self.env.groups

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
        """Return what first episodes are made of where every row still carries the one key that `init` is given.

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
        """Return the number of the first row that is seen here."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis) * num_rows

    def reset(self, keys: jax.Array) -> tuple[EpisodeState, Timestep]:
        """Start the first episode of as many rows as there are ``keys``, shape ``(batch, 2)``."""
        return self.again(jax.vmap(self.env.origin)(keys))

    def again(self, origins: Origin) -> tuple[EpisodeState, Timestep]:
        """Start the next episode of every row, of what the one before it left."""
        return jax.vmap(self._reset_row)(origins)

    def step(self, state: EpisodeState, action: PyTree) -> tuple[EpisodeState, Timestep]:
        """Advance every row by its action.

        Raises:
            StateStructureError: while tracing, if state or timestep differ from those of `reset` in
                structure or shape. Dtypes are cast to those of `reset`.
        """
        return jax.vmap(self._step_row)(state, action)

    def step_where(
        self, mask: jax.Array, state: EpisodeState, timestep: Timestep, action: PyTree
    ) -> tuple[EpisodeState, Timestep]:
        """Advance the rows of ``mask``; the others keep every bit."""
        return choose_rows(mask, self.step(state, action), (state, timestep))

    def restart_where(
        self, mask: jax.Array, state: EpisodeState, timestep: Timestep
    ) -> tuple[EpisodeState, Timestep]:
        """Start new episodes in the rows of ``mask``; the others keep every bit."""
        return restart_where(self.again, jnp.asarray(mask), state, timestep, self.chunks)

    def restart_written(
        self,
        mask: jax.Array,
        origins: Origin,
        written: PyTree,
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

    def sample_action(self, key: jax.Array, num_rows: int, observation: PyTree = None) -> PyTree:
        """Draw one action a row from the action space; that of row i depends on ``key`` and what i observes only.

        Args:
            key: one raw PRNG key.
            num_rows: how many rows are seen here, static.
            observation: what they observe, leaves (rows, *event). Of actions whose mask is in it, options that the mask
                allows are drawn, each with equal probability; any where it allows none.

        Raises:
            StateStructureError: while tracing, a mask has not one flag for each option.
        """
        space, masks = self.action_space, self._masks_in(observation)
        if self.axis is None:
            return choose_allowed(space, sample_space(space, key, (num_rows,), masks), masks)
        everywhere = num_rows * jax.lax.axis_size(self.axis)
        drawn, first = sample_space(space, key, (everywhere,), masks), self._first(num_rows)
        here = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, num_rows), drawn)
        return choose_allowed(space, here, masks)

    def _masks_in(self, observation: PyTree) -> dict[Path, jax.Array]:
        """List the masks among the leaves of an observation by the paths of their actions; flags, as specs take them."""
        if not self.action_masks:
            return {}
        shown = jax.tree_util.tree_flatten_with_path(observation)[0]
        leaves = {name_of(path): leaf for path, leaf in shown}
        found = {action: leaves[mask] for action, mask in self.action_masks if mask in leaves}
        return {
            action: mask != 0
            for action, mask in found.items()
            if not jnp.issubdtype(mask.dtype, jnp.inexact)
        }

    def _reset_row(self, origin: Origin) -> tuple[EpisodeState, Timestep]:
        return in_form_of_reset(self.env.again(origin), self.reward_shape)

    def _step_row(self, state: EpisodeState, action: PyTree) -> tuple[EpisodeState, Timestep]:
        return in_form_of_step(self.env.step(state, action), self.template, self.reward_shape)
