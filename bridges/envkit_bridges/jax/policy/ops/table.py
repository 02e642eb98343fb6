"""The form of operators that only JAX has, or that draw from one of its keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from envkit_bridges.jax.policy.library import JAX
from envkit_bridges.policy.ops.table import Op, by_name

__all__ = ["table"]


def table(entries: dict[str, Callable[..., Any]], *, draws: bool = False) -> dict[str, Op]:
    """Make operators of functions of JAX arrays; a key may hold several names, separated by spaces.

    Those that draw take a PRNG key before their other arguments.
    """
    return {name: Op(compute, JAX, draws=draws) for name, compute in by_name(entries).items()}
