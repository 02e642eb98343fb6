"""How one torch operator is written in JAX: the form of an entry, and what it may rely on.

This module keeps torch's dtypes. It knows no operator.

Conventions
    name     ``packet.overload`` of core ATen, e.g. "add.Tensor"; "exp" means "exp.default".
    compute  takes the operator's own arguments, tensors as `jax.Array`, sizes as ints; arguments that
             say where or how a tensor is stored are removed before.
    like     what the operator gave torch: a tensor (with or without values), a number, or a list.
    dtypes   those of torch, 64-bit ones narrowed to 32 bits where JAX has no 64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

__all__ = ["Op", "table"]

_STORAGE = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}


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

    def apply(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        like: Any,
        key: jax.Array | None = None,
    ) -> Any:
        """Compute, with the dtypes that torch gives operands and results.

        Args:
            args, kwargs: those of the torch operator, tensors as arrays.
            like: see the module.
            key: for an operator that draws.
        """
        given = (tuple(args), {name: v for name, v in kwargs.items() if name not in _STORAGE})
        if self.casts:
            given = _cast(given, _dtype_of(like))
        args, kwargs = given
        return _conformed(self.compute(*((key,) if self.draws else ()), *args, **kwargs), like)


def table(
    entries: dict[str, Callable[..., Any]], *, casts: bool = False, draws: bool = False
) -> dict[str, Op]:
    """Make entries of one sort; a key may hold several names, separated by spaces."""
    return {
        name if "." in name else f"{name}.default": Op(compute, casts, draws)
        for names, compute in entries.items()
        for name in names.split()
    }


def _dtype_of(like: torch.Tensor) -> Any:
    name = str(like.dtype).removeprefix("torch.")
    return jax.dtypes.canonicalize_dtype(jnp.dtype(name))


def _cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if isinstance(leaf, jax.Array) else leaf, tree
    )


def _conformed(value: Any, like: Any) -> Any:
    if isinstance(like, torch.Tensor):
        return jnp.asarray(value, _dtype_of(like))
    if isinstance(like, tuple | list) and isinstance(value, tuple | list):
        return [_conformed(*pair) for pair in zip(value, like, strict=False)]
    return value
