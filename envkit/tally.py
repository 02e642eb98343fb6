"""What is added up over an episode, one step at a time: counts, sums, what is left of a target.

Pure functions of leaves in any array namespace (NumPy, torch, JAX, also inside `jax.jit`), so that
transforms and compiled steps can share them. They do not know when an episode begins: `rules` does.

Conventions
    leaf    array of shape (*batch, *event); every function is element-wise.
    before  value at the root of a step; the result is the value at its ``next``.
"""

from __future__ import annotations

from typing import Any

__all__ = ["added", "counted", "left", "over_limit"]


def counted(before: Any) -> Any:
    """Count one more step; same dtype."""
    return before + 1


def added(before: Any, reward: Any) -> Any:
    """Add the reward of this step to those before."""
    return before + reward


def left(before: Any, reward: Any) -> Any:
    """Take the reward of this step from what is left of a target."""
    return before - reward


def over_limit(count: Any, limit: int, truncated: Any | None = None) -> Any:
    """Say where an episode is cut short: it was already, or has taken ``limit`` steps; bool."""
    cut = count >= limit
    return cut if truncated is None else cut | truncated
