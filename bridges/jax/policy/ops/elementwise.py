"""Operators that work element by element: arithmetic, activations, comparisons, casts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special

from bridges.jax.policy.ops.table import table

__all__ = ["ELEMENTWISE"]


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x + (y if alpha == 1 else alpha * y)


def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x - (y if alpha == 1 else alpha * y)


def _div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    if rounding_mode == "trunc":
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jax.lax.div(*jnp.broadcast_arrays(x, jnp.asarray(y, x.dtype)))
        return jnp.trunc(jnp.divide(x, y))
    return jnp.divide(x, y)


def _pow(x: Any, exponent: Any) -> Any:
    whole = isinstance(exponent, int | float) and float(exponent).is_integer()
    if whole and abs(exponent) <= 16 and not isinstance(x, int | float):
        return jax.lax.integer_pow(x, int(exponent))
    return jnp.power(x, exponent)


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    if low is not None:
        x = jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


def _elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    below = alpha * jnp.expm1(jnp.minimum(x, 0) * input_scale)
    return scale * jnp.where(x > 0, x, below)


def _gelu(x: Any, *, approximate: str = "none") -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _round(x: Any, *, decimals: int = 0) -> Any:
    return jnp.round(x, decimals)


def _addcmul(x: Any, one: Any, two: Any, *, value: Any = 1) -> Any:
    return x + value * one * two


def _addcdiv(x: Any, one: Any, two: Any, *, value: Any = 1) -> Any:
    return x + value * one / two


def _identity(x: Any) -> Any:
    return x


def _copy(destination: Any, source: Any) -> Any:
    return jnp.broadcast_to(source, destination.shape)


_ARITHMETIC = table(
    {
        "add.Tensor add.Scalar": _add,
        "sub.Tensor sub.Scalar": _sub,
        "mul.Tensor mul.Scalar": jnp.multiply,
        "div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode": _div,
        "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar": _pow,
        "remainder.Tensor remainder.Scalar": jnp.remainder,
        "fmod.Tensor fmod.Scalar": jnp.fmod,
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "atan2": jnp.arctan2,
        "hypot": jnp.hypot,
        "addcmul": _addcmul,
        "addcdiv": _addcdiv,
        "clamp clamp.Tensor": _clamp,
        "abs": jnp.abs,
        "neg": jnp.negative,
        "sign": jnp.sign,
        "reciprocal": jnp.reciprocal,
        "sqrt": jnp.sqrt,
        "rsqrt": jax.lax.rsqrt,
        "exp": jnp.exp,
        "expm1": jnp.expm1,
        "log": jnp.log,
        "log1p": jnp.log1p,
        "log2": jnp.log2,
        "log10": jnp.log10,
        "sin": jnp.sin,
        "cos": jnp.cos,
        "tan": jnp.tan,
        "asin": jnp.arcsin,
        "acos": jnp.arccos,
        "atan": jnp.arctan,
        "sinh": jnp.sinh,
        "cosh": jnp.cosh,
        "tanh": jnp.tanh,
        "asinh": jnp.arcsinh,
        "acosh": jnp.arccosh,
        "atanh": jnp.arctanh,
        "erf": jax.lax.erf,
        "erfinv": jax.lax.erf_inv,
        "lgamma": special.gammaln,
        "digamma": special.digamma,
        "floor": jnp.floor,
        "ceil": jnp.ceil,
        "trunc": jnp.trunc,
        "round round.decimals": _round,
        "relu": jax.nn.relu,
        "sigmoid": jax.nn.sigmoid,
        "elu": _elu,
        "gelu": _gelu,
        "leaky_relu": lambda x, slope=0.01: jnp.where(x > 0, x, slope * x),
        "hardtanh": lambda x, low=-1.0, high=1.0: jnp.clip(x, low, high),
        "copy": _copy,
    },
    casts=True,
)

_TESTS = table(
    {
        "eq.Tensor eq.Scalar": jnp.equal,
        "ne.Tensor ne.Scalar": jnp.not_equal,
        "lt.Tensor lt.Scalar": jnp.less,
        "le.Tensor le.Scalar": jnp.less_equal,
        "gt.Tensor gt.Scalar": jnp.greater,
        "ge.Tensor ge.Scalar": jnp.greater_equal,
        "isnan": jnp.isnan,
        "isinf": jnp.isinf,
        "logical_and": jnp.logical_and,
        "logical_or": jnp.logical_or,
        "logical_xor": jnp.logical_xor,
        "logical_not": jnp.logical_not,
        "bitwise_and.Tensor bitwise_and.Scalar": jnp.bitwise_and,
        "bitwise_or.Tensor bitwise_or.Scalar": jnp.bitwise_or,
        "bitwise_xor.Tensor bitwise_xor.Scalar": jnp.bitwise_xor,
        "bitwise_not": jnp.bitwise_not,
    }
)

_OTHERS = table(
    {
        "where.self where.ScalarOther where.ScalarSelf where.Scalar": jnp.where,
        "_to_copy clone alias lift_fresh_copy": _identity,
    }
)

ELEMENTWISE = {**_ARITHMETIC, **_TESTS, **_OTHERS}
