"""Operators that give images another size: pools, adaptive pools, interpolation.

Conventions
    rank   number of axes that are pooled, the last ones: 2 for images, 3 for volumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envkit_bridges.jax.policy.ops.table import table

__all__ = ["POOLING"]

Sizes = int | Sequence[int]


# -------------------------------------------------------------------------------------- sliding windows


def _each(sizes: Sizes, rank: int) -> tuple[int, ...]:
    """Read one number for all axes, or one for each."""
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return sizes * (rank // len(sizes))


def _windows(x: Any, rank: int, size: Sizes, stride: Sizes, padding: Sizes) -> dict[str, Any]:
    front = x.ndim - rank
    around = tuple((pad, pad) for pad in _each(padding, rank))
    return {
        "window_dimensions": (1,) * front + _each(size, rank),
        "window_strides": (1,) * front + _each(stride or size, rank),
        "padding": ((0, 0),) * front + around,
    }


def _refuse_ceil(ceil_mode: bool) -> None:
    if ceil_mode:
        raise NotImplementedError("ceil_mode=True is not covered; pad the input instead")


def _max_pool(rank: int) -> Callable[..., Any]:
    def pool(
        x: Any,
        size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> Any:
        _refuse_ceil(ceil_mode)
        least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
        pooled = jax.lax.reduce_window(
            x,
            np.asarray(least, x.dtype)[()],
            jax.lax.max,
            window_dilation=(1,) * (x.ndim - rank) + _each(dilation, rank),
            **_windows(x, rank, size, stride, padding),
        )
        return (pooled,)  # without the indices: asking for them is an error

    return pool


def _avg_pool(rank: int) -> Callable[..., Any]:
    def pool(
        x: Any,
        size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        _refuse_ceil(ceil_mode)
        windows = _windows(x, rank, size, stride, padding)

        def total(values: Any) -> Any:
            return jax.lax.reduce_window(values, np.zeros((), x.dtype)[()], jax.lax.add, **windows)

        if divisor_override is not None:
            return total(x) / divisor_override
        if count_include_pad:
            return total(x) / float(np.prod(windows["window_dimensions"]))
        return total(x) / total(jnp.ones_like(x))

    return pool


# --------------------------------------------------------------------- windows that follow from the size


def _adaptive(x: Any, sizes: Sequence[int], reduce: Callable[[Any, Any, int], Any]) -> Any:
    """Reduce, one axis after the other, windows that cover the input; they overlap if it is no multiple.

    Args:
        reduce: takes windows of equal length along an axis, and which of their entries count.
    """
    for axis, wanted in enumerate(sizes, start=x.ndim - len(sizes)):
        has = x.shape[axis]
        number = np.arange(wanted)
        starts, ends = number * has // wanted, -(-(number + 1) * has // wanted)
        places = starts[:, None] + np.arange(max(ends - starts, default=0))
        windows = jnp.take(x, np.minimum(places, has - 1), axis)
        counted = (places < ends[:, None]).reshape(places.shape + (1,) * (x.ndim - axis - 1))
        x = reduce(windows, counted, axis + 1)
    return x


def _mean(windows: Any, counted: Any, axis: int) -> Any:
    return windows.mean(axis, where=counted)


def _max(windows: Any, counted: Any, axis: int) -> Any:
    return windows.max(axis, where=counted, initial=-jnp.inf)


# -------------------------------------------------------------------------------------- interpolation


def _steps(
    x: Any, sizes: Sequence[int] | None, factors: Sequence[float | None] | None, rank: int
) -> list[tuple[int, np.float32]]:
    """Say for each axis what size it gets, and how far apart in the input two neighbours lie.

    The distance is computed in float32, as torch does: an image may hang on its last bit.
    """
    found = []
    factors = factors or [None] * rank
    for axis, factor in enumerate(factors, start=x.ndim - rank):
        has = x.shape[axis]
        size = sizes[axis - x.ndim + rank] if sizes else int(has * (factor or 1))
        if factor and size != has:  # otherwise torch copies, whatever the factor
            found.append((size, np.float32(1 / factor)))
        else:
            found.append((size, np.float32(has) / np.float32(size)))
    return found


def _nearest(x: Any, steps: Sequence[tuple[int, np.float32]]) -> Any:
    for axis, (size, step) in enumerate(steps, start=x.ndim - len(steps)):
        if size == 2 * x.shape[axis]:  # torch doubles, whatever the factor
            step = np.float32(0.5)
        places = np.floor(np.arange(size, dtype=np.float32) * step).astype(int)
        x = jnp.take(x, np.minimum(places, x.shape[axis] - 1), axis)
    return x


def _linear(x: Any, steps: Sequence[tuple[int, np.float32]], align_corners: bool) -> Any:
    for axis, (size, step) in enumerate(steps, start=x.ndim - len(steps)):
        has, number = x.shape[axis], np.arange(size, dtype=np.float32)
        if align_corners:
            places = number * np.float32((has - 1) / max(size - 1, 1))
        else:
            places = np.maximum((number + np.float32(0.5)) * step - np.float32(0.5), 0)
        low = np.minimum(places.astype(int), has - 1)
        high = np.minimum(low + 1, has - 1)
        share = (places - low).reshape(-1, *(1,) * (x.ndim - axis - 1))
        x = jnp.take(x, low, axis) * (1 - share) + jnp.take(x, high, axis) * share
    return x


def _upsample_nearest_vec(x: Any, sizes: Any, factors: Any) -> Any:
    return _nearest(x, _steps(x, sizes, factors, 2))


def _upsample_nearest(x: Any, sizes: Any, *factors: float | None) -> Any:
    return _nearest(x, _steps(x, sizes, factors, 2))


def _upsample_linear_vec(x: Any, sizes: Any, align_corners: bool, factors: Any) -> Any:
    return _linear(x, _steps(x, sizes, factors, 2), align_corners)


def _upsample_linear(x: Any, sizes: Any, align_corners: bool, *factors: float | None) -> Any:
    return _linear(x, _steps(x, sizes, factors, 2), align_corners)


POOLING = table(
    {
        "max_pool2d_with_indices": _max_pool(2),
        "max_pool3d_with_indices": _max_pool(3),
        "avg_pool2d": _avg_pool(2),
        "avg_pool3d": _avg_pool(3),
        "_adaptive_avg_pool2d _adaptive_avg_pool3d": lambda x, sizes: _adaptive(x, sizes, _mean),
        "adaptive_max_pool2d adaptive_max_pool3d": lambda x, sizes: (_adaptive(x, sizes, _max),),
        "upsample_nearest2d": _upsample_nearest,
        "upsample_nearest2d.vec": _upsample_nearest_vec,
        "upsample_bilinear2d": _upsample_linear,
        "upsample_bilinear2d.vec": _upsample_linear_vec,
    }
)
