"""Running statistics of rows, older ones decayed: moments of all rows together, averages begun at zero.

Pure functions of leaves in any array namespace (NumPy, torch, JAX, also inside `jax.jit`). They do not know which rows are
new, who shares the result, nor where it is kept. Averages hold the values that were seen and no more: dividing by the weight
given out so far corrects for the zeros.

Conventions
    moments   weight, mean and sum of squared deviations of what was seen. The weight is a float or has shape (), the
              others have one value for each element of a row. Or leading axes of a row, its groups, have moments of
              their own: the weight has their shape.
    averages  running mean, running mean of squares, and the number of updates (int64), all of one shape.
    rows      shape (rows, *event), floats.
    decay     weight of what was seen before, at each update; 1 weighs all updates alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from array_api_compat import array_namespace

from envkit.arrays.elementwise import Array

Moments = tuple[Any, Any, Any]


def are_finite(rows: Array, batch_dims: int = 1) -> Array:
    """Return which rows hold finite numbers alone, bool, shape of the first ``batch_dims`` axes."""
    xp = array_namespace(rows)
    found = xp.isfinite(rows)
    for _ in range(rows.ndim - batch_dims):
        found = xp.all(found, axis=-1)
    return found


def increased(number: Array, rows: Array) -> Array:
    """Add the number of set rows, bool, to an integer of shape ()."""
    xp = array_namespace(rows)
    return number + xp.astype(xp.sum(xp.astype(rows, number.dtype)), number.dtype)


def moments_with_rows(
    moments: Moments, rows: Array, decay: Array, mask: Any | None = None
) -> Moments:
    """Count rows, all at once; nothing changes where there are none, not even by decay.

    Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances", 1979.

    Args:
        moments: what was seen before.
        rows: what is new.
        decay: weight of what was seen before.
        mask: rows that count, bool, shape (rows, *groups); None: all of them.

    Returns:
        New moments, in the dtypes of the old ones.
    """
    weight, mean, squares = moments
    xp = array_namespace(mean)
    before = weight * decay
    if mask is None:
        if not len(rows):
            return moments
        count = divisor = len(rows)
        is_new, total = True, before + count
    else:
        count = xp.sum(xp.astype(mask, weight.dtype), axis=0)
        mask = xp.reshape(mask, (*mask.shape, *(1,) * (rows.ndim - mask.ndim)))
        is_new = count > 0
        divisor = _like(mean, xp.where(is_new, count, 1))
        total = xp.where(is_new, before + count, 1)

    def added(values: Array) -> Array:
        return xp.sum(values if mask is None else xp.where(mask, values, 0), axis=0)

    own = added(rows) / divisor
    change, away = own - mean, rows - own
    spread = added(away * away) + change * change * _like(mean, before * count / total)
    after = mean + change * _like(mean, count / total)
    spread = squares * _like(mean, weight * 0 + decay) + spread
    if mask is None:
        return total, after, spread
    return xp.where(is_new, total, weight), after, xp.where(_in_axes(mean, is_new), spread, squares)


def loc_and_scale_of_moments(moments: Moments, eps: Array) -> tuple[Any, Any]:
    """Return mean and standard deviation, of a variance of at least ``eps``; 0 and 1 before anything was seen."""
    xp = array_namespace(moments[1])

    def at_least(variance: Array) -> Array:
        return xp.maximum(variance, xp.full_like(variance, eps))

    return moments[1], xp.sqrt(_variance(moments, at_least))


def deviation_of_moments(moments: Moments, eps: Array) -> Any:
    """Return ``sqrt(variance + eps)``; 1 in place of the variance before anything was seen."""
    return array_namespace(moments[2]).sqrt(_variance(moments, lambda variance: variance) + eps)


def _variance(moments: Moments, change: Callable[[Array], Array]) -> Array:
    """Return what a function makes of the variance; 1 before anything was seen."""
    weight, _, squares = moments
    xp = array_namespace(squares)
    if isinstance(weight, float):
        return change(squares / weight) if weight else xp.ones_like(squares)
    is_seen = weight > 0
    variance = squares / _like(squares, xp.where(is_seen, weight, 1))
    return xp.where(_in_axes(squares, is_seen), change(variance), 1)


def _like(array: Array, number: Any) -> Any:
    """Bring numbers of groups to the dtype and the axes of an array; a Python number takes them by itself."""
    if isinstance(number, float):
        return number
    return _in_axes(array, array_namespace(array).astype(number, array.dtype))


def _in_axes(array: Array, number: Any) -> Any:
    """Show numbers of groups, the first axes of an array, in all of its axes."""
    if not number.ndim:
        return number
    axes = (*number.shape, *(1,) * (array.ndim - number.ndim))
    return array_namespace(array).reshape(number, axes)


Averages = tuple[Any, Any, Any]


def no_averages(value: Array) -> Averages:
    """Return the averages of an entry of which nothing was seen, in its shape and dtype."""
    xp = array_namespace(value)
    return xp.zeros_like(value), xp.zeros_like(value), xp.zeros_like(value, dtype=xp.int64)


def averages_with_values(averages: Averages, value: Array, decay: float) -> Averages:
    """Count one value for each average, of their shape."""
    xp = array_namespace(value)
    loc, squares, count = averages
    count = count + 1
    weight = 1 - decay if decay < 1 else 1 / xp.astype(count, value.dtype)
    return loc + (value - loc) * weight, squares + (value * value - squares) * weight, count


def averages_with_rows(averages: Averages, rows: Array, decay: float) -> Averages:
    """Count rows at once, shape (rows, *event): their mean weighs what as many updates would."""
    new = rows.shape[0]
    if not new:
        return averages
    xp = array_namespace(rows)
    loc, squares, count = averages
    count = count + new
    weight = 1 - decay**new if decay < 1 else new / xp.astype(count, rows.dtype)
    mean, mean_square = xp.mean(rows, axis=0), xp.mean(rows * rows, axis=0)
    return loc + (mean - loc) * weight, squares + (mean_square - squares) * weight, count


def loc_and_scale_of_averages(averages: Averages, decay: float, eps: float) -> tuple[Any, Any]:
    """Return mean and deviation, of at least ``eps``; 0 and 1 where nothing was seen."""
    loc, squares, count = averages
    xp = array_namespace(loc)
    is_seen, one = count > 0, xp.ones_like(loc)
    weight = -xp.expm1(xp.astype(count, loc.dtype) * math.log(decay)) if decay < 1 else one
    weight = xp.where(is_seen, weight, one)
    spread = squares - loc * loc
    scale = xp.sqrt(xp.maximum(spread, xp.zeros_like(spread)) / weight)
    scale = xp.where(is_seen, xp.maximum(scale, xp.full_like(scale, eps)), one)
    return loc / weight, scale
