"""Environments that contain another environment.

Each wrapper is written for one environment: no batch axis and no ``vmap``. It owns its fields in
a state of its own, forwards explicitly, and mutates nothing.

Conventions
    limit, frames  counted in steps of the wrapped environment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from envkit import rules
from envkit.errors import ArgumentError
from envkit.functional.core import (
    StatelessEnv,
    Timestep,
    WrapperState,
    done_of,
    normalize,
    reward_shape_of,
)
from envkit.functional.structure import conform, strong

__all__ = ["FrameSkip", "TimeLimit", "TimeLimitState"]

S = TypeVar("S")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TimeLimitState(WrapperState[S]):
    """``elapsed``: steps since the last reset, int32, shape ()."""

    elapsed: jax.Array


@dataclass(frozen=True)
class TimeLimit:
    """End every episode after ``limit`` steps by truncation, never by termination.

    ``limit=None`` counts the steps and ends nothing.
    """

    env: StatelessEnv
    limit: int | None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ArgumentError(
                f"a time limit must be at least 1 step, but got {self.limit}. Pass None for no limit."
            )

    @property
    def action_space(self) -> Any:
        return self.env.action_space

    @property
    def observation_space(self) -> Any:
        return getattr(self.env, "observation_space", None)

    @property
    def reward_shape(self) -> tuple[int, ...]:
        return reward_shape_of(self.env)

    def reset(self, key: jax.Array, /) -> tuple[TimeLimitState, Timestep]:
        """Start an episode with no step elapsed."""
        inner, timestep = self.env.reset(key)
        return TimeLimitState(inner, jnp.int32(0)), timestep

    def step(self, state: TimeLimitState, action: Any, /) -> tuple[TimeLimitState, Timestep]:
        """Advance, and truncate when the limit is reached."""
        inner, timestep = self.env.step(state.inner, action)
        elapsed = state.elapsed + 1
        if self.limit is None:
            return TimeLimitState(inner, elapsed), timestep
        # An episode that ends by itself on its last step is terminated, not cut short.
        cut = (elapsed >= self.limit) & jnp.logical_not(timestep.terminated)
        truncated = jnp.logical_or(timestep.truncated, cut)
        return TimeLimitState(inner, elapsed), replace(timestep, truncated=truncated)


@dataclass(frozen=True)
class FrameSkip:
    """Repeat each action for ``frames`` steps, sum the rewards, and stop where the episode ends.

    It adds no state of its own.
    """

    env: StatelessEnv
    frames: int

    def __post_init__(self) -> None:
        if not isinstance(self.frames, int) or self.frames < 1:
            raise ArgumentError(
                f"frame_skip must be an integer of at least 1, but got {self.frames!r}."
            )

    @property
    def action_space(self) -> Any:
        return self.env.action_space

    @property
    def observation_space(self) -> Any:
        return getattr(self.env, "observation_space", None)

    @property
    def reward_shape(self) -> tuple[int, ...]:
        return reward_shape_of(self.env)

    def reset(self, key: jax.Array, /) -> tuple[Any, Timestep]:
        """Start an episode; no frame is skipped."""
        return self.env.reset(key)

    def step(self, state: Any, action: Any, /) -> tuple[Any, Timestep]:
        """Advance by ``frames`` frames, or to the end of the episode if that comes first."""
        first = self._frame(state, action)
        template = jax.eval_shape(lambda: first)

        def advance(carry: tuple[Any, Timestep], _: None) -> tuple[tuple[Any, Timestep], None]:
            state, timestep = carry
            after, new = conform(self._frame(state, action), template, what="")
            over = done_of(timestep)
            new = replace(new, reward=timestep.reward + new.reward)
            kept = jax.tree.map(
                lambda old, fresh: rules.choose(over, old, fresh), carry, (after, new)
            )
            return kept, None

        return jax.lax.scan(advance, first, None, length=self.frames - 1)[0]

    def _frame(self, state: Any, action: Any) -> tuple[Any, Timestep]:
        state, timestep = self.env.step(state, action)
        return jax.tree.map(strong, state), normalize(timestep, self.reward_shape)
