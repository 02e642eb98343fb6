"""Environments whose state contains another's: time limits and frame skips.

Each is written for one environment, without a batch axis, and forwards explicitly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from envkit.errors import ArgumentError
from envkit.functional.core import Space, StatelessEnv, Timestep, normalized

__all__ = ["FrameSkip", "TimeLimit", "TimeLimitState"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TimeLimitState:
    """State of `TimeLimit`."""

    inner: Any
    elapsed: jax.Array  # int32 "", steps since the last reset


@dataclass(frozen=True)
class TimeLimit:
    """End every episode after ``limit`` steps by truncation, never by termination.

    Args:
        env: the environment.
        limit: steps of an episode; None only counts them.

    Raises:
        ArgumentError: ``limit`` is below 1.
    """

    env: StatelessEnv
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ArgumentError(f"the time limit is {self.limit}, but must be at least 1 step.")

    @property
    def action_space(self) -> Space:
        """That of the environment."""
        return self.env.action_space

    def reset(self, key: jax.Array) -> tuple[TimeLimitState, Timestep]:
        """Reset the environment and the count."""
        inner, timestep = self.env.reset(key)
        return TimeLimitState(inner, jnp.int32(0)), normalized(timestep)

    def step(self, state: TimeLimitState, action: Any) -> tuple[TimeLimitState, Timestep]:
        """Step, count, and truncate at the limit."""
        inner, timestep = self.env.step(state.inner, action)
        timestep = normalized(timestep)
        elapsed = state.elapsed + 1
        if self.limit is not None:
            # An episode that ends by itself on its last step is terminated, not cut short.
            cut = (elapsed >= self.limit) & ~timestep.terminated
            timestep = replace(timestep, truncated=timestep.truncated | cut)
        return TimeLimitState(inner, elapsed), timestep


@dataclass(frozen=True)
class FrameSkip:
    """Repeat each action ``count`` times, sum the rewards, and stop where the episode ends.

    Raises:
        ArgumentError: ``count`` is below 1.
    """

    env: StatelessEnv
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ArgumentError(f"the frame skip is {self.count}, but must be at least 1.")

    @property
    def action_space(self) -> Space:
        """That of the environment."""
        return self.env.action_space

    def reset(self, key: jax.Array) -> tuple[Any, Timestep]:
        """Reset the environment."""
        return self.env.reset(key)

    def step(self, state: Any, action: Any) -> tuple[Any, Timestep]:
        """Step up to ``count`` times."""

        def once(carry: tuple[Any, Timestep]) -> tuple[Any, Timestep]:
            state, timestep = carry
            following, new = self.env.step(state, action)
            new = normalized(new)
            return following, replace(new, reward=timestep.reward + new.reward)

        def again(_: int, carry: tuple[Any, Timestep]) -> tuple[Any, Timestep]:
            ended = carry[1].terminated | carry[1].truncated
            return jax.lax.cond(ended, lambda kept: kept, once, carry)

        state, timestep = self.env.step(state, action)
        return jax.lax.fori_loop(1, self.count, again, (state, normalized(timestep)))
