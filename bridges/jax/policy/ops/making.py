"""Operators that make tensors out of numbers.

Integers are 32 bits in JAX without x64. A number that does not fit is an error here, where it enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from bridges.jax.policy.ops.table import table

__all__ = ["MAKING", "in_width"]


def in_width(value: Any) -> Any:
    """Give a number as it is.

    Raises:
        OverflowError: an integer that this JAX cannot hold.
    """
    widest = np.iinfo(jnp.zeros((), int).dtype)
    if isinstance(value, int) and not widest.min <= value <= widest.max:
        raise OverflowError(
            f"{value} does not fit into {widest.dtype}, the widest integer of this JAX"
        )
    return value


def _full(size: Sequence[int], value: Any) -> Any:
    return jnp.full(tuple(size), in_width(value))


def _arange(start: Any, end: Any, step: Any = 1) -> Any:
    return jnp.arange(in_width(start), in_width(end), in_width(step))


MAKING = table(
    {
        "full": _full,
        "full_like": lambda x, value: jnp.full(x.shape, in_width(value)),
        "scalar_tensor": lambda value: jnp.asarray(in_width(value)),
        "arange.start_step": _arange,
        "empty.memory_format": lambda size: jnp.zeros(tuple(size)),
        "empty_permuted": lambda size, layout: jnp.zeros(tuple(size)),
    }
)
