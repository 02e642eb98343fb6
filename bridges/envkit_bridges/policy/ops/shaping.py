"""Operators that move elements: views, joins, slices, gathers, scatters; in any library.

Where torch raises since an index is out of range, the library says what happens: NumPy raises too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from envkit_bridges.policy.ops.table import rules

__all__ = ["SHAPING", "in_range"]


def in_range(xp: Any, index: Any, size: int) -> Any:
    """Put a negative index beyond the end: where libraries would count from the end, torch raises."""
    return xp.where(index < 0, size, index)


def _expand(xp: Any, x: Any, sizes: Sequence[int], *, implicit: bool = False) -> Any:
    new = len(sizes) - x.ndim
    kept = (1,) * new + x.shape
    return xp.broadcast_to(
        x, [had if size == -1 else size for size, had in zip(sizes, kept, strict=True)]
    )


def _squeeze(xp: Any, x: Any, dims: int | Sequence[int] | None = None) -> Any:
    if dims is None:
        dims = range(x.ndim)
    elif isinstance(dims, int):
        dims = [dims]
    return xp.squeeze(x, tuple(dim for dim in dims if x.ndim and x.shape[dim] == 1))


def _cat(xp: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    parts = [part for part in tensors if part.shape != (0,)]  # torch ignores these of any rank
    return xp.concatenate(parts or tensors, dim if parts else 0)


def _split(xp: Any, x: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    ends = list(accumulate(sizes))
    pairs = zip(ends, sizes, strict=True)
    return [x[_span(x, dim, end - size, end, 1)] for end, size in pairs]


def _span(
    x: Any, dim: int, start: int | None, end: int | None, step: int
) -> tuple[slice | int, ...]:
    return (slice(None),) * (dim % x.ndim) + (slice(start, end, step),)


def _slice(
    xp: Any, x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    return x[_span(x, dim, start, end, step)]


def _slice_scatter(
    xp: Any,
    x: Any,
    source: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    return xp.put(x, _span(x, dim, start, end, step), source, "set")


def _select(xp: Any, x: Any, dim: int, index: int) -> Any:
    return x[_at(x, dim, index)]


def _select_scatter(xp: Any, x: Any, source: Any, dim: int, index: int) -> Any:
    return xp.put(x, _at(x, dim, index), source, "set")


def _at(x: Any, dim: int, index: int) -> tuple[slice | int, ...]:
    return (slice(None),) * (dim % x.ndim) + (index,)


def _places(indices: Sequence[Any]) -> tuple[Any, ...]:
    if any(index is not None and index.dtype == bool for index in indices):
        raise NotImplementedError(
            "the mask of an index decides how many elements there are; use torch.where"
        )
    return tuple(slice(None) if index is None else index for index in indices)


def _index(xp: Any, x: Any, indices: Sequence[Any]) -> Any:
    return xp.indexed(x, _places(indices))


def _index_put(
    xp: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False
) -> Any:
    first = indices[0]
    if first is not None and first.dtype == bool and len(indices) == 1 and not accumulate:
        if values.size != 1:
            raise NotImplementedError(
                "values assigned through a mask must be one number; use torch.where"
            )
        mask = first.reshape(first.shape + (1,) * (x.ndim - first.ndim))
        return xp.where(mask, values.reshape(()), x)
    return xp.put(x, _places(indices), values, "add" if accumulate else "set")


def _index_select(xp: Any, x: Any, dim: int, index: Any) -> Any:
    return x if x.ndim == 0 else xp.picked(x, index, dim)


def _diagonal(xp: Any, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return xp.diagonal(x, offset, dim1, dim2)


def _gather(xp: Any, x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if x.ndim == 0:
        return xp.broadcast_to(x, index.shape)
    dim %= x.ndim
    span = tuple(
        slice(None) if axis == dim else slice(size) for axis, size in enumerate(index.shape)
    )
    return xp.gathered(x[span], index, dim)


_REDUCTIONS: dict[str | None, str] = {  # in the words of `put`
    None: "set",
    "add": "add",
    "sum": "add",
    "mean": "add",
    "multiply": "multiply",
    "prod": "multiply",
    "amax": "max",
    "amin": "min",
}


def _scatter(
    xp: Any, x: Any, dim: int, index: Any, source: Any, *, reduce: str | None = None
) -> Any:
    if x.ndim == 0:
        source = xp.reshape(source, -1)
        return _scatter(xp, x[None], 0, index.reshape(-1), source, reduce=reduce)[0]
    grid = list(xp.indices(index.shape, sparse=True))
    grid[dim % x.ndim] = in_range(xp, index, x.shape[dim])
    if getattr(source, "ndim", 0):
        source = source[tuple(slice(size) for size in index.shape)]
    return xp.put(x, tuple(grid), source, _REDUCTIONS[reduce])


def _scatter_add(xp: Any, x: Any, dim: int, index: Any, source: Any) -> Any:
    return _scatter(xp, x, dim, index, source, reduce="add")


def _scatter_reduce(
    xp: Any, x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    if not include_self:  # what is written to begins as if nothing were there
        x = _scatter(xp, x, dim, index, _neutral(xp, _REDUCTIONS[reduce], x.dtype))
    total = _scatter(xp, x, dim, index, source, reduce=reduce)
    if reduce != "mean":
        return total
    ones = xp.ones(index.shape, total.dtype)
    counts = _scatter(xp, xp.full_like(total, include_self), dim, index, ones, reduce="add")
    whole = xp.issubdtype(total.dtype, xp.integer)
    return (xp.floor_divide if whole else xp.divide)(total, xp.maximum(counts, 1))


def _neutral(xp: Any, reduction: str, dtype: Any) -> Any:
    """Give the number that a reduction leaves all others unchanged with."""
    if reduction in ("add", "multiply"):
        return xp.asarray(reduction == "multiply", dtype)
    if dtype == bool:
        return xp.asarray(reduction == "min")
    if xp.issubdtype(dtype, xp.integer):
        range_ = xp.iinfo(dtype)
        return xp.asarray(range_.min if reduction == "max" else range_.max, dtype)
    return xp.asarray(-xp.inf if reduction == "max" else xp.inf, dtype)


def _repeat(xp: Any, x: Any, repeats: Sequence[int]) -> Any:
    return xp.tile(x, tuple(repeats))


def _pad(xp: Any, x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    """Add what is positive and cut what is negative."""
    pairs = [(pad[at], pad[at + 1]) for at in range(0, len(pad), 2)]  # last axis first
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    cut = tuple(slice(max(-low, 0), -max(-high, 0) or None) for low, high in pairs)
    widths = [(max(low, 0), max(high, 0)) for low, high in pairs]
    return xp.pad(x[cut], widths, constant_values=value)


def _unfold(xp: Any, x: Any, dim: int, size: int, step: int) -> Any:
    dim %= x.ndim
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    windows = xp.take(x, starts[:, None] + np.arange(size), axis=dim)
    return xp.moveaxis(windows, dim + 1, -1)


SHAPING = {
    **rules(
        {
            "view reshape _unsafe_view": lambda xp, x, sizes: xp.reshape(x, tuple(sizes)),
            "permute": lambda xp, x, dims: xp.transpose(x, tuple(dims)),
            "expand": _expand,
            "squeeze squeeze.dim squeeze.dims": _squeeze,
            "unsqueeze": "expand_dims",
            "split_with_sizes": _split,
            "slice.Tensor": _slice,
            "select.int": _select,
            "index.Tensor": _index,
            "index_select": _index_select,
            "gather": _gather,
            "flip": "flip",
            "repeat": _repeat,
            "constant_pad_nd": _pad,
            "unfold": _unfold,
            "index_put": _index_put,
            "scatter.src scatter.value scatter.reduce scatter.value_reduce": _scatter,
            "scatter_add": _scatter_add,
            "scatter_reduce.two": _scatter_reduce,
            "diagonal": _diagonal,
            "slice_scatter": _slice_scatter,
            "select_scatter": _select_scatter,
            "sym_size.int": lambda xp, x, dim: x.shape[dim],
        }
    ),
    **rules({"cat": _cat}, casts=True),
}
