"""JAX as an array library that operators are computed in.

Matrix products are computed in the precision of their operands, as torch does by default; without
saying so, JAX would take a faster and coarser one on some GPUs.

Where torch raises since an index is out of range, a program cannot: what was to be read becomes NaN, and
so does all of a tensor that was to be written to. In integers that is the least number there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch
from jax.scipy import special

from envkit_bridges.policy.core_aten import Library, in_range, namespace

if TYPE_CHECKING:
    import numpy as np

FULL = jax.lax.Precision.HIGHEST


def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply matrices in the precision of their operands."""
    return jnp.matmul(x, y, precision=FULL)


def picked(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """Take entries along an axis."""
    return jnp.take(x, in_range(jnp, index, x.shape[axis]), axis=axis, mode="fill")


def _gathered(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return jnp.take_along_axis(x, in_range(jnp, index, x.shape[axis]), axis, mode="fill")


def _indexed(x: jax.Array, places: tuple[jax.Array | slice, ...]) -> jax.Array:
    return x.at[places].get(mode="fill")


def _put(x: jax.Array, places: tuple[Any, ...], values: jax.Array | float, how: str) -> jax.Array:
    out = getattr(x.at[places], how)(values)
    pairs = zip(places, x.shape, strict=False)
    bad = [((i < -size) | (i >= size)).any() for i, size in pairs if hasattr(i, "dtype")]
    return _void_where(jnp.stack(bad).any(), out) if bad else out


def _void_where(bad: jax.Array, x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.where(bad, jnp.nan, x)
    return jnp.where(bad, True if x.dtype == bool else jnp.iinfo(x.dtype).min, x)


def _argsort(x: jax.Array, axis: int, descending: bool) -> jax.Array:
    return jnp.argsort(x, axis=axis, stable=True, descending=descending)


def _placed(plain: Callable[..., Any], extreme: Callable[..., Any]) -> Callable[..., Any]:
    """Find the first place of an extreme; NaN is one.

    JAX's own function cannot be lowered for 64 bits that are switched on within a trace.
    """

    def place(x: jax.Array, axis: int | None = None, keepdims: bool = False) -> jax.Array:
        if x.dtype.itemsize < 8:
            with jax.enable_x64(False):
                return plain(x, axis, keepdims=keepdims)
        flat = x.reshape(-1) if axis is None or not x.ndim else x
        at = 0 if axis is None or not x.ndim else axis % x.ndim
        best = extreme(flat, at, keepdims=True)
        places = jax.lax.broadcasted_iota(jnp.int32, flat.shape, at)
        is_best = (flat == best) | (flat != flat)
        found = jnp.where(is_best, places, jnp.int32(flat.shape[at])).min(at)
        if not keepdims:
            return found
        return found.reshape((1,) * x.ndim) if axis is None else jnp.expand_dims(found, at)

    return place


def _digamma(x: jax.Array) -> jax.Array:
    """Correct the sign of the pole at zero to that of torch."""
    return jnp.where(x == 0, -jnp.copysign(jnp.inf, x).astype(x.dtype), special.digamma(x))


def _dtype_of(dtype: torch.dtype) -> np.dtype:
    name = str(dtype).removeprefix("torch.")
    return jax.dtypes.canonicalize_dtype(jnp.dtype(name))  # 64 bits become 32 where JAX has no 64


JAX = Library(
    "JAX",
    namespace(
        jnp,
        matmul=matmul,
        rsqrt=jax.lax.rsqrt,
        sigmoid=jax.nn.sigmoid,
        erf=jax.lax.erf,
        erfinv=jax.lax.erf_inv,
        lgamma=special.gammaln,
        digamma=_digamma,
        argmax=_placed(jnp.argmax, jnp.max),
        argmin=_placed(jnp.argmin, jnp.min),
        argsort=_argsort,
        cummax=jax.lax.cummax,
        cummin=jax.lax.cummin,
        logcumsumexp=jax.lax.cumlogsumexp,
        picked=picked,
        gathered=_gathered,
        indexed=_indexed,
        put=_put,
    ),
    jax.Array,
    _dtype_of,
)
