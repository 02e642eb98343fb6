"""Running mean and variance of rows, all rows together, older ones decayed.

Pure functions of leaves in any array namespace (NumPy, torch, JAX, also inside `jax.jit`). They do not
know which rows are new, nor who shares the result.

Conventions
    moments  weight, mean and sum of squared deviations of what was seen. The weight has shape (), the
             others one value for each element of a row.
    rows     shape (rows, *event), floats.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

__all__ = ["Moments", "are_finite", "increased", "loc_and_scale", "with_rows"]

Moments = tuple[Any, Any, Any]


def are_finite(rows: Any, batch_dims: int = 1) -> Any:
    """Say which rows hold finite numbers alone, bool, shape of the first ``batch_dims`` axes."""
    xp = array_namespace(rows)
    found = xp.isfinite(rows)
    for _ in range(rows.ndim - batch_dims):
        found = xp.all(found, axis=-1)
    return found


def increased(number: Any, rows: Any) -> Any:
    """Add the number of set rows, bool, to an integer of shape ()."""
    xp = array_namespace(rows)
    return number + xp.astype(xp.sum(xp.astype(rows, number.dtype)), number.dtype)


def with_rows(moments: Moments, rows: Any, decay: Any, mask: Any | None = None) -> Moments:
    """Count rows, all at once; nothing changes where there are none, not even by decay.

    Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances", 1979.

    Args:
        moments: what was seen before.
        rows: what is new.
        decay: weight of what was seen before.
        mask: rows that count, bool, shape (rows,); None: all of them.

    Returns:
        New moments, in the dtypes of the old ones.
    """
    weight, mean, squares = moments
    xp = array_namespace(mean)
    if mask is None:
        count = xp.zeros_like(weight) + rows.shape[0]
    else:
        count = xp.sum(xp.astype(mask, weight.dtype))
        mask = xp.reshape(mask, (-1, *(1,) * (rows.ndim - 1)))

    def added(values: Any) -> Any:
        return xp.sum(values if mask is None else xp.where(mask, values, 0), axis=0)

    def like_mean(number: Any) -> Any:
        return xp.astype(number, mean.dtype)

    before = weight * decay
    is_new = count > 0
    total = xp.where(is_new, before + count, 1)
    own = added(rows) / like_mean(xp.where(is_new, count, 1))
    change, away = own - mean, rows - own
    spread = added(away * away) + change * change * like_mean(before * count / total)
    return (
        xp.where(is_new, total, weight),
        mean + change * like_mean(count / total),
        xp.where(is_new, squares * like_mean(xp.zeros_like(weight) + decay) + spread, squares),
    )


def loc_and_scale(moments: Moments, eps: Any) -> tuple[Any, Any]:
    """Give mean and standard deviation, of a variance of at least ``eps``; 0 and 1 before anything was seen."""
    weight, mean, squares = moments
    xp = array_namespace(mean)
    is_seen = weight > 0
    variance = squares / xp.astype(xp.where(is_seen, weight, 1), mean.dtype)
    return mean, xp.sqrt(xp.where(is_seen, xp.maximum(variance, xp.full_like(variance, eps)), 1))
