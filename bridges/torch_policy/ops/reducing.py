"""Operators that go along axes: sums, extremes, orders, norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from bridges.torch_policy.ops.table import table

__all__ = ["REDUCING"]

Axes = int | Sequence[int] | None


def _axes(dims: Axes) -> int | tuple[int, ...] | None:
    """Read torch's axes: none at all mean all of them."""
    if dims is None or isinstance(dims, int):
        return dims
    return tuple(dims) or None


def _along(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def over(x: Any, dims: Axes = None, keepdim: bool = False) -> Any:
        return reduce(x, axis=_axes(dims), keepdims=keepdim)

    return over


def _extreme(value: Callable[..., Any], place: Callable[..., Any]) -> Callable[..., Any]:
    def over(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        return value(x, axis=dim, keepdims=keepdim), place(x, axis=dim, keepdims=keepdim)

    return over


def _var(
    x: Any, dims: Axes = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    ddof = 1 if correction is None else correction
    return jnp.var(x, axis=_axes(dims), ddof=ddof, keepdims=keepdim)  # type: ignore[arg-type]


def _var_mean(
    x: Any, dims: Axes = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Any, Any]:
    mean = jnp.mean(x, axis=_axes(dims), keepdims=keepdim)
    return _var(x, dims, correction=correction, keepdim=keepdim), mean


def _vector_norm(x: Any, order: float = 2, dims: Axes = None, keepdim: bool = False) -> Any:
    if dims is None:
        x, dims = (x.reshape(-1), 0) if not keepdim else (x, tuple(range(x.ndim)))
    axes = _axes(dims)
    size = jnp.abs(x)
    if order == float("inf"):
        return size.max(axis=axes, keepdims=keepdim)
    if order == float("-inf"):
        return size.min(axis=axes, keepdims=keepdim)
    if order == 0:
        return (x != 0).sum(axis=axes, keepdims=keepdim)
    if order == 1:
        return size.sum(axis=axes, keepdims=keepdim)
    if order == 2:
        return jnp.sqrt((size * size).sum(axis=axes, keepdims=keepdim))
    return (size**order).sum(axis=axes, keepdims=keepdim) ** (1 / order)


def _sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = True) -> Any:
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, order = _sort(x, dim, largest)
    first = (slice(None),) * (dim % x.ndim) + (slice(k),)
    return values[first], order[first]


def _median(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower one of the two in the middle, as torch has it."""
    middle = (slice(None),) * (dim % x.ndim) + ((x.shape[dim] - 1) // 2,)
    value, order = (part[middle] for part in _sort(x, dim))
    return (jnp.expand_dims(value, dim), jnp.expand_dims(order, dim)) if keepdim else (value, order)


REDUCING = {
    **table(
        {
            "sum sum.dim_IntList": _along(jnp.sum),
            "mean mean.dim": _along(jnp.mean),
            "prod prod.dim_int": _along(jnp.prod),
            "cumsum": lambda x, dim: jnp.cumsum(x, axis=dim),
            "cumprod": lambda x, dim: jnp.cumprod(x, axis=dim),
            "var.correction": _var,
            "linalg_vector_norm": _vector_norm,
            "amax max": _along(jnp.max),
            "amin min": _along(jnp.min),
        },
        casts=True,
    ),
    **table(
        {
            "any any.dim any.dims": _along(jnp.any),
            "all all.dim all.dims": _along(jnp.all),
            "argmax": _along(jnp.argmax),
            "argmin": _along(jnp.argmin),
            "max.dim": _extreme(jnp.max, jnp.argmax),
            "min.dim": _extreme(jnp.min, jnp.argmin),
            "var_mean.correction": _var_mean,
            "sort sort.stable": _sort,
            "topk": _topk,
            "median.dim": _median,
        }
    ),
}
