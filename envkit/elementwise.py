"""What transforms compute on values: casts, scales, bounds, signs, windows of frames.

Pure functions of leaves in any array namespace (NumPy, torch, JAX, also inside `jax.jit`), so that
transforms and compiled steps can share them. They know neither keys, nor specs, nor episodes.

Conventions
    value   array of shape (*batch, *event); unless said otherwise a function is element-wise.
    window  the last few frames of an episode, joined along one axis, the newest at the end.
    axis    negative: counted from the end, whatever the batch.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

__all__ = [
    "cast",
    "clipped",
    "is_positive",
    "padded",
    "peak",
    "pushed",
    "recent",
    "scaled",
    "sign",
    "standardised",
    "tiled",
    "weighted_sum",
]


def cast(value: Any, dtype: Any) -> Any:
    """Give ``value`` in another dtype of its namespace."""
    return array_namespace(value).astype(value, dtype, copy=False)


def scaled(value: Any, loc: Any, scale: Any) -> Any:
    """Compute ``value * scale + loc``; ``loc`` and ``scale`` broadcast to ``value``."""
    return value * scale + loc


def standardised(value: Any, loc: Any, scale: Any) -> Any:
    """Compute ``(value - loc) / scale``, the inverse of `scaled`."""
    return (value - loc) / scale


def clipped(value: Any, low: Any | None, high: Any | None) -> Any:
    """Bring ``value`` into ``[low, high]``; None sets no bound."""
    return array_namespace(value).clip(value, low, high)


def sign(value: Any) -> Any:
    """Give -1, 0 or 1, same dtype."""
    return array_namespace(value).sign(value)


def is_positive(value: Any) -> Any:
    """Say where ``value`` is above zero; bool."""
    return value > 0


def weighted_sum(value: Any, weights: Any) -> Any:
    """Add up the last axis, weighted, and keep it as a singleton; ``weights`` is as long as it."""
    return array_namespace(value).sum(value * weights, axis=-1, keepdims=True)


# ----------------------------------------------------------------------------------------- windows


def tiled(frame: Any, count: int, axis: int) -> Any:
    """Join ``count`` copies of a frame along ``axis``."""
    return array_namespace(frame).concat([frame] * count, axis=axis)


def padded(frame: Any, count: int, axis: int, value: float) -> Any:
    """Join ``count`` frames filled with ``value``, of the shape and dtype of ``frame``."""
    xp = array_namespace(frame)
    return tiled(xp.full_like(frame, value), count, axis)


def pushed(window: Any, frame: Any, axis: int) -> Any:
    """Append a frame to a window, which grows by it."""
    return array_namespace(window, frame).concat([window, frame], axis=axis)


def recent(window: Any, size: int, axis: int) -> Any:
    """Give the last ``size`` elements of a window along ``axis``."""
    start = window.shape[axis] - size
    return window[(..., slice(start, None), *(slice(None),) * (-axis - 1))]


def peak(window: Any, count: int, axis: int) -> Any:
    """Take the element-wise maximum of the ``count`` frames of a window."""
    xp = array_namespace(window)
    axis += window.ndim
    shape = (*window.shape[:axis], count, -1, *window.shape[axis + 1 :])
    return xp.max(xp.reshape(window, shape), axis=axis)
