"""Operators that go along axes: sums, extremes, orders, norms, searches; in any library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from envkit_bridges.policy.ops.table import rules

__all__ = ["REDUCING"]

Axes = int | Sequence[int] | None


def _axes(dims: Axes) -> int | tuple[int, ...] | None:
    """Read torch's axes: none at all mean all of them."""
    if dims is None or isinstance(dims, int):
        return dims
    return tuple(dims) or None


def _along(reduce: str) -> Callable[..., Any]:
    def over(xp: Any, x: Any, dims: Axes = None, keepdim: bool = False) -> Any:
        return getattr(xp, reduce)(x, axis=_axes(dims), keepdims=keepdim)

    return over


def _extreme(value: str, place: str) -> Callable[..., Any]:
    def over(xp: Any, x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        best = getattr(xp, value)(x, axis=dim, keepdims=keepdim)
        return best, getattr(xp, place)(x, axis=dim, keepdims=keepdim)

    return over


def _var(
    xp: Any, x: Any, dims: Axes = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    ddof = 1 if correction is None else correction
    return xp.var(x, axis=_axes(dims), ddof=ddof, keepdims=keepdim)  # type: ignore[arg-type]


def _var_mean(
    xp: Any, x: Any, dims: Axes = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Any, Any]:
    mean = xp.mean(x, axis=_axes(dims), keepdims=keepdim)
    return _var(xp, x, dims, correction=correction, keepdim=keepdim), mean


def _vector_norm(
    xp: Any, x: Any, order: float = 2, dims: Axes = None, keepdim: bool = False
) -> Any:
    if dims is None:
        x, dims = (x.reshape(-1), 0) if not keepdim else (x, tuple(range(x.ndim)))
    axes = _axes(dims)
    size = xp.abs(x)
    if order == float("inf"):
        return size.max(axis=axes, keepdims=keepdim)
    if order == float("-inf"):
        return size.min(axis=axes, keepdims=keepdim)
    if order == 0:
        return (x != 0).sum(axis=axes, keepdims=keepdim)
    if order == 1:
        return size.sum(axis=axes, keepdims=keepdim)
    if order == 2:
        return xp.sqrt((size * size).sum(axis=axes, keepdims=keepdim))
    return (size**order).sum(axis=axes, keepdims=keepdim) ** (1 / order)


def _sort(
    xp: Any, x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = True
) -> Any:
    order = xp.argsort(x, dim, descending)
    return xp.take_along_axis(x, order, dim), order


def _topk(xp: Any, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, order = _sort(xp, x, dim, largest)
    first = (slice(None),) * (dim % x.ndim) + (slice(k),)
    return values[first], order[first]


def _median(xp: Any, x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower one of the two in the middle, as torch has it; the first NaN if there is one."""
    value, order = _kth_value(xp, x, (_size(x, dim) + 1) // 2, dim, keepdim)
    if not xp.issubdtype(x.dtype, xp.inexact) or x.ndim == 0:
        return value, order
    missing = xp.isnan(x)
    lost, first = missing.any(dim, keepdims=keepdim), missing.argmax(dim, keepdims=keepdim)
    return xp.where(lost, xp.nan, value), xp.where(lost, first, order)


def _median_of_all(xp: Any, x: Any) -> Any:
    return _median(xp, x.reshape(-1), 0)[0]


def _size(x: Any, dim: int) -> int:
    return x.shape[dim] if x.ndim else 1


def _kth_value(xp: Any, x: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    if x.ndim == 0:
        return x, xp.zeros((), int)
    place = slice(k - 1, k) if keepdim else k - 1
    value, order = (part[(slice(None),) * (dim % x.ndim) + (place,)] for part in _sort(xp, x, dim))
    return value, order


def _running(extreme: str) -> Callable[..., Any]:
    """Go along an axis; the place is that of the last of equal ones, as torch has it."""

    def over(xp: Any, x: Any, dim: int) -> tuple[Any, Any]:
        if x.ndim == 0:
            return x, xp.zeros((), int)
        dim %= x.ndim
        ordered = x.astype(xp.uint8) if x.dtype == bool else x
        best = getattr(xp, extreme)(ordered, dim)
        size = x.shape[dim]
        places = xp.arange(size).reshape(size, *(1,) * (x.ndim - dim - 1))
        is_best = (ordered == best) | (ordered != ordered)  # NaN stays the best
        return best, xp.cummax(xp.where(is_best, places, -1), dim)

    return over


def _log_cum_sum_exp(xp: Any, x: Any, dim: int) -> Any:
    return xp.logcumsumexp(x, dim % x.ndim) if x.ndim else x


def _search(
    xp: Any,
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
        ordered = xp.take_along_axis(ordered, sorter, -1)
    values = xp.asarray(values)
    size = ordered.shape[-1]
    low = xp.zeros(values.shape, int)
    high = xp.full(values.shape, size)
    for _ in range(size.bit_length()):
        middle = (low + high) // 2
        places = xp.minimum(middle, size - 1)
        found = ordered[places] if ordered.ndim == 1 else xp.take_along_axis(ordered, places, -1)
        stays = found > values if right or side == "right" else found >= values
        goes_on = low < high
        high = xp.where(goes_on & stays, middle, high)
        low = xp.where(goes_on & ~stays, middle + 1, low)
    return low


def _bucketize(
    xp: Any, values: Any, ordered: Any, *, out_int32: bool = False, right: bool = False
) -> Any:
    return _search(xp, ordered, values, right=right)


REDUCING = {
    **rules(
        {
            "sum sum.dim_IntList": _along("sum"),
            "mean mean.dim": _along("mean"),
            "prod prod.dim_int": _along("prod"),
            "cumsum": lambda xp, x, dim: xp.cumsum(x, axis=dim),
            "cumprod": lambda xp, x, dim: xp.cumprod(x, axis=dim),
            "logcumsumexp": _log_cum_sum_exp,
            "var.correction": _var,
            "linalg_vector_norm": _vector_norm,
            "amax max": _along("max"),
            "amin min": _along("min"),
        },
        casts=True,
    ),
    **rules(
        {
            "any any.dim any.dims": _along("any"),
            "all all.dim all.dims": _along("all"),
            "argmax": _along("argmax"),
            "argmin": _along("argmin"),
            "max.dim": _extreme("max", "argmax"),
            "min.dim": _extreme("min", "argmin"),
            "var_mean.correction": _var_mean,
            "sort sort.stable": _sort,
            "topk": _topk,
            "median.dim": _median,
            "median": _median_of_all,
            "kthvalue": _kth_value,
            "cummax": _running("cummax"),
            "cummin": _running("cummin"),
            "searchsorted.Tensor searchsorted.Scalar": _search,
            "bucketize.Tensor bucketize.Scalar": _bucketize,
        }
    ),
}
