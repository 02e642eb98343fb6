"""Operators that move elements: views, joins, slices, gathers, scatters.

Where torch raises since an index is out of range, a program cannot: what was to be read becomes NaN, and
so does all of a tensor that was to be written to. In integers that is the least number there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridges.jax.policy.ops.table import table

__all__ = ["SHAPING", "in_range"]


def in_range(index: Any, size: int) -> Any:
    """Put a negative index beyond the end: where JAX would count from the end, torch raises."""
    return jnp.where(index < 0, size, index)


def _void_where(bad: Any, x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.where(bad, jnp.nan, x)
    return jnp.where(bad, True if x.dtype == bool else jnp.iinfo(x.dtype).min, x)


def _expand(x: Any, sizes: Sequence[int], *, implicit: bool = False) -> Any:
    new = len(sizes) - x.ndim
    kept = (1,) * new + x.shape
    return jnp.broadcast_to(
        x, [had if size == -1 else size for size, had in zip(sizes, kept, strict=True)]
    )


def _squeeze(x: Any, dims: int | Sequence[int] | None = None) -> Any:
    if dims is None:
        dims = range(x.ndim)
    elif isinstance(dims, int):
        dims = [dims]
    return jnp.squeeze(x, tuple(dim for dim in dims if x.ndim and x.shape[dim] == 1))


def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    parts = [part for part in tensors if part.shape != (0,)]  # torch ignores these of any rank
    return jnp.concatenate(parts or tensors, dim if parts else 0)


def _split(x: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim)


def _span(
    x: Any, dim: int, start: int | None, end: int | None, step: int
) -> tuple[slice | int, ...]:
    return (slice(None),) * (dim % x.ndim) + (slice(start, end, step),)


def _slice(
    x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    return x[_span(x, dim, start, end, step)]


def _slice_scatter(
    x: Any,
    source: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    return x.at[_span(x, dim, start, end, step)].set(source)


def _select(x: Any, dim: int, index: int) -> Any:
    return jax.lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


def _select_scatter(x: Any, source: Any, dim: int, index: int) -> Any:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(source)


def _places(indices: Sequence[Any]) -> tuple[Any, ...]:
    if any(index is not None and index.dtype == bool for index in indices):
        raise NotImplementedError(
            "the mask of an index decides how many elements there are; use torch.where"
        )
    return tuple(slice(None) if index is None else index for index in indices)


def _index(x: Any, indices: Sequence[Any]) -> Any:
    return x.at[_places(indices)].get(mode="fill")


def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    first = indices[0]
    if first is not None and first.dtype == bool and len(indices) == 1 and not accumulate:
        if values.size != 1:
            raise NotImplementedError(
                "values assigned through a mask must be one number; use torch.where"
            )
        mask = first.reshape(first.shape + (1,) * (x.ndim - first.ndim))
        return jnp.where(mask, values.reshape(()), x)
    place = x.at[_places(indices)]
    pairs = zip(indices, x.shape, strict=False)
    bad = [((i < -size) | (i >= size)).any() for i, size in pairs if i is not None]
    out = place.add(values) if accumulate else place.set(values)
    return _void_where(jnp.stack(bad).any(), out)


def _index_select(x: Any, dim: int, index: Any) -> Any:
    if x.ndim == 0:
        return x
    return jnp.take(x, in_range(index, x.shape[dim]), axis=dim, mode="fill")


def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(x, offset, dim1, dim2)


def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if x.ndim == 0:
        return jnp.broadcast_to(x, index.shape)
    dim %= x.ndim
    index = in_range(index, x.shape[dim])
    span = tuple(
        slice(None) if axis == dim else slice(size) for axis, size in enumerate(index.shape)
    )
    return jnp.take_along_axis(x[span], index, dim, mode="fill")


_REDUCTIONS: dict[str | None, str] = {  # in JAX's words
    None: "set",
    "add": "add",
    "sum": "add",
    "mean": "add",
    "multiply": "multiply",
    "prod": "multiply",
    "amax": "max",
    "amin": "min",
}


def _scatter(x: Any, dim: int, index: Any, source: Any, *, reduce: str | None = None) -> Any:
    if x.ndim == 0:
        source = jnp.reshape(source, -1)
        return _scatter(x[None], 0, index.reshape(-1), source, reduce=reduce)[0]
    size = x.shape[dim]
    grid = list(jnp.indices(index.shape, sparse=True))
    grid[dim % x.ndim] = in_range(index, size)
    if getattr(source, "ndim", 0):
        source = source[tuple(slice(size) for size in index.shape)]
    out = getattr(x.at[tuple(grid)], _REDUCTIONS[reduce])(source)
    return _void_where(((index < 0) | (index >= size)).any(), out)


def _scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    return _scatter(x, dim, index, source, reduce="add")


def _scatter_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    if not include_self:  # what is written to begins as if nothing were there
        x = _scatter(x, dim, index, _neutral(_REDUCTIONS[reduce], x.dtype))
    total = _scatter(x, dim, index, source, reduce=reduce)
    if reduce != "mean":
        return total
    ones = jnp.ones(index.shape, total.dtype)
    counts = _scatter(jnp.full_like(total, include_self), dim, index, ones, reduce="add")
    whole = jnp.issubdtype(total.dtype, jnp.integer)
    return (jnp.floor_divide if whole else jnp.divide)(total, jnp.maximum(counts, 1))


def _neutral(reduction: str, dtype: Any) -> Any:
    """Give the number that a reduction leaves all others unchanged with."""
    if reduction in ("add", "multiply"):
        return jnp.asarray(reduction == "multiply", dtype)
    if dtype == bool:
        return jnp.asarray(reduction == "min")
    if jnp.issubdtype(dtype, jnp.integer):
        range_ = jnp.iinfo(dtype)
        return jnp.asarray(range_.min if reduction == "max" else range_.max, dtype)
    return jnp.asarray(-jnp.inf if reduction == "max" else jnp.inf, dtype)


def _repeat(x: Any, repeats: Sequence[int]) -> Any:
    return jnp.tile(x, tuple(repeats))


def _pad(x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    pairs = [(pad[at], pad[at + 1], 0) for at in range(0, len(pad), 2)]  # last axis first
    config = [(0, 0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), config)


def _unfold(x: Any, dim: int, size: int, step: int) -> Any:
    dim %= x.ndim
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=dim)
    return jnp.moveaxis(windows, dim + 1, -1)


SHAPING = {
    **table(
        {
            "view reshape _unsafe_view": lambda x, sizes: jnp.reshape(x, tuple(sizes)),
            "permute": lambda x, dims: jnp.transpose(x, tuple(dims)),
            "expand": _expand,
            "squeeze squeeze.dim squeeze.dims": _squeeze,
            "unsqueeze": jnp.expand_dims,
            "split_with_sizes": _split,
            "slice.Tensor": _slice,
            "select.int": _select,
            "index.Tensor": _index,
            "index_select": _index_select,
            "gather": _gather,
            "flip": jnp.flip,
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
            "sym_size.int": lambda x, dim: x.shape[dim],
        }
    ),
    **table({"cat": _cat}, casts=True),
}
