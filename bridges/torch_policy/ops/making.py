"""Operators that make tensors out of numbers.

Integers are 32 bits in JAX without x64. A number that does not fit is an error here, where it enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from bridges.torch_policy.ops.table import table

__all__ = ["MAKING"]


def _checked(value: Any) -> Any:
    widest = np.iinfo(jnp.zeros((), int).dtype)
    if isinstance(value, int) and not widest.min <= value <= widest.max:
        raise OverflowError(
            f"{value} does not fit into {widest.dtype}, the widest integer of this JAX"
        )
    return value


def _full(size: Sequence[int], value: Any) -> Any:
    return jnp.full(tuple(size), _checked(value))


def _arange(start: Any, end: Any, step: Any = 1) -> Any:
    return jnp.arange(_checked(start), _checked(end), _checked(step))


MAKING = table(
    {
        "full": _full,
        "full_like": lambda x, value: jnp.full(x.shape, _checked(value)),
        "scalar_tensor": lambda value: jnp.asarray(_checked(value)),
        "arange.start_step": _arange,
        "empty.memory_format": lambda size: jnp.zeros(tuple(size)),
    }
)
