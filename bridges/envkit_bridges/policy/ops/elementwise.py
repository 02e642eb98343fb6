"""Operators that work element by element: arithmetic, activations, comparisons, casts; in any library."""

from __future__ import annotations

from math import pi
from typing import Any

from envkit_bridges.policy.ops.table import rules

__all__ = ["ELEMENTWISE"]


def _add(xp: Any, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x + (y if alpha == 1 else alpha * y)


def _sub(xp: Any, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x - (y if alpha == 1 else alpha * y)


def _div(xp: Any, x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return xp.floor_divide(x, y)
    if rounding_mode == "trunc":
        if xp.issubdtype(x.dtype, xp.integer):
            return xp.sign(x) * xp.sign(y) * (xp.abs(x) // xp.abs(y))
        return xp.trunc(xp.divide(x, y))
    return xp.divide(x, y)


def _pow(xp: Any, x: Any, exponent: Any) -> Any:
    whole = isinstance(exponent, int | float) and float(exponent).is_integer()
    if whole and abs(exponent) <= 16 and not isinstance(x, int | float):
        return x ** int(exponent)
    if (
        isinstance(exponent, float) and abs(exponent) == 0.5
    ):  # as torch: -inf and -0 give other numbers in a power
        return xp.sqrt(x) if exponent > 0 else 1 / xp.sqrt(x)
    return xp.power(x, exponent)


def _sign(xp: Any, x: Any) -> Any:
    return xp.where(x != x, xp.zeros_like(x), xp.sign(x))  # of NaN it is 0 in torch


def _clamp(xp: Any, x: Any, low: Any = None, high: Any = None) -> Any:
    if low is not None:
        x = xp.maximum(x, low)
    return x if high is None else xp.minimum(x, high)


def _elu(xp: Any, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    below = alpha * xp.expm1(xp.minimum(x, 0) * input_scale)
    return scale * xp.where(x > 0, x, below)


def _gelu(xp: Any, x: Any, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + xp.tanh((2 / pi) ** 0.5 * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + xp.erf(x * 0.5**0.5))


def _round(xp: Any, x: Any, *, decimals: int = 0) -> Any:
    return xp.round(x, decimals)


def _addcmul(xp: Any, x: Any, one: Any, two: Any, *, value: Any = 1) -> Any:
    return x + value * one * two


def _addcdiv(xp: Any, x: Any, one: Any, two: Any, *, value: Any = 1) -> Any:
    return x + value * one / two


def _identity(xp: Any, x: Any) -> Any:
    return x


def _copy(xp: Any, destination: Any, source: Any) -> Any:
    return xp.broadcast_to(source, destination.shape)


_ARITHMETIC = rules(
    {
        "add.Tensor add.Scalar": _add,
        "sub.Tensor sub.Scalar": _sub,
        "mul.Tensor mul.Scalar": "multiply",
        "div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode": _div,
        "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar": _pow,
        "remainder.Tensor remainder.Scalar": "remainder",
        "fmod.Tensor fmod.Scalar": "fmod",
        "maximum": "maximum",
        "minimum": "minimum",
        "atan2": "arctan2",
        "hypot": "hypot",
        "addcmul": _addcmul,
        "addcdiv": _addcdiv,
        "clamp clamp.Tensor": _clamp,
        "abs": "abs",
        "neg": "negative",
        "sign": _sign,
        "reciprocal": "reciprocal",
        "sqrt": "sqrt",
        "rsqrt": "rsqrt",
        "exp": "exp",
        "expm1": "expm1",
        "log": "log",
        "log1p": "log1p",
        "log2": "log2",
        "log10": "log10",
        "sin": "sin",
        "cos": "cos",
        "tan": "tan",
        "asin": "arcsin",
        "acos": "arccos",
        "atan": "arctan",
        "sinh": "sinh",
        "cosh": "cosh",
        "tanh": "tanh",
        "asinh": "arcsinh",
        "acosh": "arccosh",
        "atanh": "arctanh",
        "erf": "erf",
        "erfinv": "erfinv",
        "lgamma": "lgamma",
        "digamma": "digamma",
        "floor": "floor",
        "ceil": "ceil",
        "trunc": "trunc",
        "round round.decimals": _round,
        "relu": lambda xp, x: xp.maximum(x, 0),
        "sigmoid": "sigmoid",
        "elu": _elu,
        "gelu": _gelu,
        "leaky_relu": lambda xp, x, slope=0.01: xp.where(x > 0, x, slope * x),
        "hardtanh": lambda xp, x, low=-1.0, high=1.0: xp.clip(x, low, high),
        "copy": _copy,
    },
    casts=True,
)

_TESTS = rules(
    {
        "eq.Tensor eq.Scalar": "equal",
        "ne.Tensor ne.Scalar": "not_equal",
        "lt.Tensor lt.Scalar": "less",
        "le.Tensor le.Scalar": "less_equal",
        "gt.Tensor gt.Scalar": "greater",
        "ge.Tensor ge.Scalar": "greater_equal",
        "isnan": "isnan",
        "isinf": "isinf",
        "logical_and": "logical_and",
        "logical_or": "logical_or",
        "logical_xor": "logical_xor",
        "logical_not": "logical_not",
        "bitwise_and.Tensor bitwise_and.Scalar": "bitwise_and",
        "bitwise_or.Tensor bitwise_or.Scalar": "bitwise_or",
        "bitwise_xor.Tensor bitwise_xor.Scalar": "bitwise_xor",
        "bitwise_not": "bitwise_not",
    }
)

_OTHERS = rules(
    {
        "where.self where.ScalarOther where.ScalarSelf where.Scalar": "where",
        "_to_copy clone alias lift_fresh_copy": _identity,
    }
)

ELEMENTWISE = {**_ARITHMETIC, **_TESTS, **_OTHERS}
