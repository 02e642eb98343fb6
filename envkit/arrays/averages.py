"""Running averages of values and of their squares, begun at zero.

Pure functions of leaves in any array namespace. They do not know which rows are new, nor where averages are kept.
What was seen is all that averages hold: dividing by the weight given out so far corrects for the zeros.

Conventions
    averages  running mean, running mean of squares, and the number of updates (int64), all of one shape.
    decay     weight of what was seen before, at each update; 1 weighs all updates alike.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace

__all__ = ["Averages", "loc_and_scale", "nothing", "with_rows", "with_values"]

Averages = tuple[Any, Any, Any]


def nothing(value: Any) -> Averages:
    """Give the averages of an entry of which nothing was seen, in its shape and dtype."""
    xp = array_namespace(value)
    return xp.zeros_like(value), xp.zeros_like(value), xp.zeros_like(value, dtype=xp.int64)


def with_values(averages: Averages, value: Any, decay: float) -> Averages:
    """Count one value for each average, of their shape."""
    xp = array_namespace(value)
    loc, squares, count = averages
    count = count + 1
    weight = 1 - decay if decay < 1 else 1 / xp.astype(count, value.dtype)
    return loc + (value - loc) * weight, squares + (value * value - squares) * weight, count


def with_rows(averages: Averages, rows: Any, decay: float) -> Averages:
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


def loc_and_scale(averages: Averages, decay: float, eps: float) -> tuple[Any, Any]:
    """Give mean and deviation, of at least ``eps``; 0 and 1 where nothing was seen."""
    loc, squares, count = averages
    xp = array_namespace(loc)
    is_seen, one = count > 0, xp.ones_like(loc)
    given = -xp.expm1(xp.astype(count, loc.dtype) * math.log(decay)) if decay < 1 else one
    given = xp.where(is_seen, given, one)
    spread = squares - loc * loc
    scale = xp.sqrt(xp.maximum(spread, xp.zeros_like(spread)) / given)
    scale = xp.where(is_seen, xp.maximum(scale, xp.full_like(scale, eps)), one)
    return loc / given, scale
