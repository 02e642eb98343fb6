"""Operators that make tensors out of numbers.

Integers are 32 bits in JAX without x64. A number that does not fit is an error here, where it enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from envkit_bridges.policy.ops.table import rules

__all__ = ["MAKING", "in_width"]


def in_width(xp: Any, value: Any) -> Any:
    """Give a number as it is.

    Raises:
        OverflowError: an integer that the library cannot hold.
    """
    widest = np.iinfo(xp.zeros((), int).dtype)
    if isinstance(value, int) and not widest.min <= value <= widest.max:
        raise OverflowError(
            f"{value} does not fit into {widest.dtype}, the widest integer there is here"
        )
    return value


def _full(xp: Any, size: Sequence[int], value: Any) -> Any:
    return xp.full(tuple(size), in_width(xp, value))


def _arange(xp: Any, start: Any, end: Any, step: Any = 1) -> Any:
    return xp.arange(*(in_width(xp, number) for number in (start, end, step)))


MAKING = rules(
    {
        "full": _full,
        "full_like": lambda xp, x, value: xp.full(x.shape, in_width(xp, value)),
        "scalar_tensor": lambda xp, value: xp.asarray(in_width(xp, value)),
        "arange.start_step": _arange,
        "empty.memory_format": lambda xp, size: xp.zeros(tuple(size)),
        "empty_permuted": lambda xp, size, layout: xp.zeros(tuple(size)),
    }
)
