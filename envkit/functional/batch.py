"""Many copies of one stateless environment, side by side. The only `vmap` of the package is here.

Conventions
    rows   leading axis of every array.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from envkit.functional import autoreset
from envkit.functional.autoreset import EpisodeState, Episodic
from envkit.functional.core import Space, StatelessEnv, Timestep
from envkit.functional.packing import StatePacking, conform
from envkit.functional.spaces import sample

__all__ = ["BatchedEnv"]


@dataclass(frozen=True)
class BatchedEnv:
    """Rows of one environment, each with its own key.

    Args:
        env: what one row is; give it a `TimeLimit` if episodes shall be cut.
    """

    env: StatelessEnv

    @property
    def episodic(self) -> Episodic:
        """One row, with the key of its next episode."""
        return Episodic(self.env)

    @property
    def action_space(self) -> Space:
        """Actions of one row."""
        return self.env.action_space

    @cached_property
    def packing(self) -> StatePacking:
        """How the state of a row is packed; found by tracing the reset abstractly."""
        return StatePacking.of(self.episodic)

    @cached_property
    def timestep_like(self) -> Timestep:
        """What a timestep of one row looks like, as `jax.ShapeDtypeStruct`."""
        return jax.eval_shape(self.episodic.reset, jax.random.key(0))[1]

    def row_keys(self, key: jax.Array, rows: int) -> jax.Array:
        """Give each row a key that depends on its number only, not on how many there are."""
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))

    def init(self, key: jax.Array, rows: int) -> tuple[EpisodeState, Timestep]:
        """Start an episode in each of ``rows`` rows."""
        return jax.vmap(self.episodic.reset)(self.row_keys(key, rows))

    def step(self, state: EpisodeState, action: Any) -> tuple[EpisodeState, Timestep]:
        """Step every row; what comes out has the structure and dtypes of a reset."""
        following, timestep = jax.vmap(self.episodic.step)(state, action)
        return (
            conform(following, self.packing.like, what="state"),
            conform(timestep, self.timestep_like, what="timestep"),
        )

    def restart_where(
        self, mask: jax.Array, state: EpisodeState, timestep: Timestep
    ) -> tuple[EpisodeState, Timestep]:
        """Begin new episodes in the rows of ``mask``, shape (rows,)."""
        return autoreset.restart_where(jax.vmap(self.episodic.restart), mask, state, timestep)

    def reseed(self, state: EpisodeState, key: jax.Array) -> EpisodeState:
        """Give each row a new key, so that rows copied from one state part ways."""
        return replace(state, key=self.row_keys(key, state.key.shape[0]))

    def sample_action(self, key: jax.Array, rows: int) -> Any:
        """Draw an action for every row from its space."""
        keys = self.row_keys(key, rows)
        return jax.vmap(lambda one: sample(self.env.action_space, one))(keys)
