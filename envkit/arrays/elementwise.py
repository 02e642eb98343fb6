"""What transforms compute on values: casts, scales, bounds, signs, other shapes, windows of frames.

Pure functions of leaves in any array namespace (NumPy, torch, JAX, also inside `jax.jit`), so that
transforms and compiled steps can share them. They know neither keys, nor specs, nor episodes. Where a namespace has
no 64-bit numbers (JAX, unless configured otherwise), those of 32 bits stand in for them, see `dtype_named`.

Conventions
    value   array of shape (*batch, *event); unless said otherwise a function is element-wise.
    window  the last few frames of an episode, joined along one axis, the newest at the end.
    axis    negative: counted from the end, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from array_api_compat import array_namespace

Array = Any
"""An array of NumPy, torch, JAX or another namespace; no one type has them all."""


def cast(value: Array, dtype: Array) -> Array:
    """Return ``value`` in another dtype of its namespace."""
    return array_namespace(value).astype(value, dtype, copy=False)


def scaled(value: Array, loc: Array, scale: Array) -> Array:
    """Compute ``value * scale + loc``; ``loc`` and ``scale`` broadcast to ``value``."""
    return value * scale + loc


def standardised(value: Array, loc: Array, scale: Array) -> Array:
    """Compute ``(value - loc) / scale``, the inverse of `scaled`."""
    return (value - loc) / scale


def clipped(value: Array, low: Any | None, high: Any | None) -> Array:
    """Clip ``value`` to ``[low, high]``; None sets no bound."""
    return array_namespace(value).clip(value, low, high)


def sign(value: Array) -> Array:
    """Return -1, 0 or 1, same dtype."""
    return array_namespace(value).sign(value)


def is_positive(value: Array) -> Array:
    """Return where ``value`` is above zero; bool."""
    return value > 0


def weighted_sum(value: Array, weights: Array) -> Array:
    """Add up the last axis, weighted, and keep it as a singleton; ``weights`` is as long as it."""
    return array_namespace(value).sum(value * weights, axis=-1, keepdims=True)


# ------------------------------------------------------------------------------------------- axes


def _axis_of(value: Array, axis: int) -> int:
    """Count an axis from the first one.

    Raises:
        IndexError: there is no such axis.
    """
    if not -value.ndim <= axis < value.ndim:
        raise IndexError(f"axis {axis} of a value of shape {tuple(value.shape)}")
    return axis % value.ndim


def flattened(value: Array, first: int, last: int) -> Array:
    """Make one axis of those from ``first`` to ``last``.

    Raises:
        IndexError: an axis does not exist, or ``last`` comes before ``first``.
    """
    start, end = _axis_of(value, first), _axis_of(value, last)
    if end < start:
        raise IndexError(f"the last axis, {last}, comes before the first one, {first}")
    size = prod(value.shape[start : end + 1])
    shape = (*value.shape[:start], size, *value.shape[end + 1 :])
    return array_namespace(value).reshape(value, shape)


def unsqueezed(value: Array, axis: int) -> Array:
    """Insert an axis of size one, at the place ``axis`` of the result."""
    return array_namespace(value).expand_dims(value, axis=axis)


def squeezed(value: Array, axis: int) -> Array:
    """Remove an axis of size one; another stays."""
    axis = _axis_of(value, axis)
    return array_namespace(value).squeeze(value, axis=axis) if value.shape[axis] == 1 else value


def permuted(value: Array, axes: Sequence[int]) -> Array:
    """Reorder the last ``len(axes)`` axes, which are counted from the end."""
    lead = range(value.ndim - len(axes))
    last = (value.ndim + axis for axis in axes)
    return array_namespace(value).permute_dims(value, (*lead, *last))


def joined(values: Sequence[Any], axis: int) -> Array:
    """Join values along an axis, in the dtype they have in common."""
    return array_namespace(*values).concat(list(values), axis=axis)


# ----------------------------------------------------------------------------------------- windows


def tiled(frame: Array, count: int, axis: int) -> Array:
    """Join ``count`` copies of a frame along ``axis``."""
    return array_namespace(frame).concat([frame] * count, axis=axis)


def padded(frame: Array, count: int, axis: int, value: float) -> Array:
    """Join ``count`` frames filled with ``value``, of the shape and dtype of ``frame``."""
    xp = array_namespace(frame)
    return tiled(xp.full_like(frame, value), count, axis)


def pushed(window: Array, frame: Array, axis: int) -> Array:
    """Append a frame to a window, which grows by it."""
    return array_namespace(window, frame).concat([window, frame], axis=axis)


def recent(window: Array, size: int, axis: int) -> Array:
    """Return the last ``size`` elements of a window along ``axis``."""
    start = window.shape[axis] - size
    return window[(..., slice(start, None), *(slice(None),) * (-axis - 1))]


def peak(window: Array, count: int, axis: int) -> Array:
    """Take the element-wise maximum of the ``count`` frames of a window."""
    xp = array_namespace(window)
    axis += window.ndim
    size = window.shape[axis] // count
    shape = (*window.shape[:axis], count, size, *window.shape[axis + 1 :])
    return xp.max(xp.reshape(window, shape), axis=axis)


NARROWER = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def dtype_named(value: Array, name: str) -> Any:
    """Return the dtype called ``name``, e.g. "int64", in the namespace of ``value``."""
    xp = array_namespace(value)
    if name in NARROWER and not _has_64_bits(xp):
        name = NARROWER[name]
    return getattr(xp, name)


def _has_64_bits(xp: Array) -> bool:
    """Check whether a namespace has 64-bit numbers, by the dtype it gives integers.

    Asked which dtypes there are, array_api_compat makes a tensor of each below a bare ``except``, where a Ctrl-C is lost.
    """
    return xp.__array_namespace_info__().default_dtypes()["integral"] == xp.int64


def dtype_name(dtype: object) -> str:
    """Return the name a dtype of torch has in every namespace."""
    return str(dtype).removeprefix("torch.")
