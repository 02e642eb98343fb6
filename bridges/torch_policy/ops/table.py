"""How one torch operator is written in JAX: the form of an entry.

This module decides what every entry may rely on. It knows no operator.

Conventions
    name     ``packet.overload`` of core ATen, e.g. "add.Tensor"; "exp" means "exp.default".
    compute  takes the operator's own arguments, tensors as `jax.Array`, sizes as ints; arguments that
             say where or how a tensor is stored are removed before.
    result   is cast to the dtype that torch gave the operator's result, so an entry need not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Op", "table"]


@dataclass(frozen=True)
class Op:
    """One operator in JAX.

    Attributes:
        compute: the function.
        casts: cast operands to the dtype of the result first, as torch promotes them.
        draws: takes a PRNG key before its other arguments.
    """

    compute: Callable[..., Any]
    casts: bool = False
    draws: bool = False


def table(
    entries: dict[str, Callable[..., Any]], *, casts: bool = False, draws: bool = False
) -> dict[str, Op]:
    """Make entries of one sort; a key may hold several names, separated by spaces."""
    return {
        name if "." in name else f"{name}.default": Op(compute, casts, draws)
        for names, compute in entries.items()
        for name in names.split()
    }
