"""Operators that move elements and change none: views, joins, slices, gathers, scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridges.torch_policy.ops.table import table

__all__ = ["SHAPING"]


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
    return place.add(values) if accumulate else place.set(values)


def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if x.ndim == 0:
        return jnp.broadcast_to(x, index.shape)
    dim %= x.ndim
    span = tuple(
        slice(None) if axis == dim else slice(size) for axis, size in enumerate(index.shape)
    )
    return jnp.take_along_axis(x[span], index, dim, mode="fill")


def _scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    grid = list(jnp.indices(index.shape, sparse=True))
    grid[dim % x.ndim] = index
    if getattr(source, "ndim", 0):
        source = source[tuple(slice(size) for size in index.shape)]
    return x.at[tuple(grid)].set(source)


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
            "index_select": lambda x, dim, index: jnp.take(x, index, axis=dim, mode="fill"),
            "gather": _gather,
            "flip": jnp.flip,
            "repeat": _repeat,
            "constant_pad_nd": _pad,
            "unfold": _unfold,
            "index_put": _index_put,
            "scatter.src scatter.value": _scatter,
            "slice_scatter": _slice_scatter,
            "select_scatter": _select_scatter,
            "sym_size.int": lambda x, dim: x.shape[dim],
        }
    ),
    **table({"cat": _cat}, casts=True),
}
