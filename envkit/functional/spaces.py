"""What actions and observations of a stateless environment may be.

Conventions
    A space describes one environment: no batch axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envkit.errors import ArgumentError

__all__ = ["Box", "Discrete", "sample"]


@dataclass(frozen=True)
class Box:
    """Arrays between ``low`` and ``high``, both included.

    Args:
        low, high: bounds, numbers or arrays that broadcast to ``shape``.
        shape: shape of the arrays.
        dtype: floating or integer NumPy dtype.

    Raises:
        ArgumentError: a lower bound exceeds its upper bound.
    """

    low: Any
    high: Any
    shape: tuple[int, ...] = ()
    dtype: Any = np.float32

    def __post_init__(self) -> None:
        if np.any(np.asarray(self.low) > np.asarray(self.high)):
            raise ArgumentError(
                f"Box has low {self.low} above high {self.high}. Give the lower bounds first."
            )

    def sample(self, key: jax.Array) -> jax.Array:
        """Draw uniformly; shape ``shape``."""
        if np.issubdtype(self.dtype, np.integer):
            return jax.random.randint(key, self.shape, self.low, jnp.asarray(self.high) + 1, self.dtype)
        return jax.random.uniform(
            key, self.shape, self.dtype, jnp.asarray(self.low, self.dtype), self.high
        )


@dataclass(frozen=True)
class Discrete:
    """Integers 0 .. n - 1, int32."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ArgumentError(f"Discrete({self.n}) has no value; n must be at least 1.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Always ``()``."""
        return ()

    def sample(self, key: jax.Array) -> jax.Array:
        """Draw uniformly; a scalar."""
        return jax.random.randint(key, (), 0, self.n, jnp.int32)


def sample(space: Any, key: jax.Array) -> Any:
    """Draw from a space or a dict of spaces, each leaf from a key of its own."""
    leaves, tree = jax.tree.flatten(space)
    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([leaf.sample(one) for leaf, one in zip(leaves, keys, strict=True)])
