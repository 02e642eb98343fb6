"""Operators that go along axes: sums, extremes, orders, norms, searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bridges.jax.policy.ops.table import table

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
    """The lower one of the two in the middle, as torch has it; the first NaN if there is one."""
    value, order = _kth_value(x, (_size(x, dim) + 1) // 2, dim, keepdim)
    if not jnp.issubdtype(x.dtype, jnp.inexact) or x.ndim == 0:
        return value, order
    missing = jnp.isnan(x)
    lost, first = missing.any(dim, keepdims=keepdim), missing.argmax(dim, keepdims=keepdim)
    return jnp.where(lost, jnp.nan, value), jnp.where(lost, first, order)


def _median_of_all(x: Any) -> Any:
    return _median(x.reshape(-1), 0)[0]


def _size(x: Any, dim: int) -> int:
    return x.shape[dim] if x.ndim else 1


def _kth_value(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    value, order = (jax.lax.index_in_dim(part, k - 1, dim, keepdim) for part in _sort(x, dim))
    return value, order


def _running(extreme: Callable[..., Any]) -> Callable[..., Any]:
    """Go along an axis; the place is that of the last of equal ones, as torch has it."""

    def over(x: Any, dim: int) -> tuple[Any, Any]:
        if x.ndim == 0:
            return x, jnp.zeros((), int)
        dim %= x.ndim
        ordered = x.astype(jnp.uint8) if x.dtype == bool else x
        best = extreme(ordered, dim)
        places = jax.lax.broadcasted_iota(int, x.shape, dim)
        is_best = (ordered == best) | (ordered != ordered)  # NaN stays the best
        return best, jax.lax.cummax(jnp.where(is_best, places, -1), dim)

    return over


def _log_cum_sum_exp(x: Any, dim: int) -> Any:
    return jax.lax.cumlogsumexp(x, dim % x.ndim) if x.ndim else x


def _search(
    ordered: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Halve the span step by step as torch does, so that they agree on NaN and on what is not sorted."""
    if sorter is not None:
        ordered = jnp.take_along_axis(ordered, sorter, -1)
    values = jnp.asarray(values)
    size = ordered.shape[-1]
    low = jnp.zeros(values.shape, int)
    high = jnp.full(values.shape, size)
    for _ in range(size.bit_length()):
        middle = (low + high) // 2
        places = jnp.minimum(middle, size - 1)
        found = ordered[places] if ordered.ndim == 1 else jnp.take_along_axis(ordered, places, -1)
        stays = found > values if right or side == "right" else found >= values
        goes_on = low < high
        high = jnp.where(goes_on & stays, middle, high)
        low = jnp.where(goes_on & ~stays, middle + 1, low)
    return low


def _bucketize(values: Any, ordered: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    return _search(ordered, values, right=right)


REDUCING = {
    **table(
        {
            "sum sum.dim_IntList": _along(jnp.sum),
            "mean mean.dim": _along(jnp.mean),
            "prod prod.dim_int": _along(jnp.prod),
            "cumsum": lambda x, dim: jnp.cumsum(x, axis=dim),
            "cumprod": lambda x, dim: jnp.cumprod(x, axis=dim),
            "logcumsumexp": _log_cum_sum_exp,
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
            "median": _median_of_all,
            "kthvalue": _kth_value,
            "cummax": _running(jax.lax.cummax),
            "cummin": _running(jax.lax.cummin),
            "searchsorted.Tensor searchsorted.Scalar": _search,
            "bucketize.Tensor bucketize.Scalar": _bucketize,
        }
    ),
}
