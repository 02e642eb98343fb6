"""Operators that layers are made of: matrix products, norms, softmax, embeddings; in any library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from envkit_bridges.policy.ops.table import rules

__all__ = ["LAYERS"]


def _addmm(xp: Any, bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = xp.matmul(x, y)
    return (bias if beta == 1 else beta * bias) + (product if alpha == 1 else alpha * product)


def _normalised(xp: Any, x: Any, axes: tuple[int, ...], eps: float) -> tuple[Any, Any, Any]:
    mean = x.mean(axes, keepdims=True)
    scale = xp.rsqrt(x.var(axes, keepdims=True) + eps)
    return (x - mean) * scale, mean, scale


def _in_float32(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Compute halves in float32, as torch's kernels do: a variance of halves leaves their range."""

    def wide(xp: Any, x: Any, *rest: Any) -> Any:
        if x.dtype.itemsize != 2:
            return rule(xp, x, *rest)
        wider = [value.astype(xp.float32) if hasattr(value, "astype") else value for value in rest]
        return rule(xp, x.astype(xp.float32), *wider)

    return wide


def _affine(x: Any, weight: Any, bias: Any, shape: tuple[int, ...]) -> Any:
    if weight is not None:
        x = x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _layer_norm(xp: Any, x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    out, mean, scale = _normalised(xp, x, tuple(range(x.ndim - len(shape), x.ndim)), eps)
    return _affine(out, weight, bias, tuple(shape)), mean, scale


def _group_norm(
    xp: Any,
    x: Any,
    weight: Any,
    bias: Any,
    rows: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> Any:
    grouped = x.reshape(rows, groups, -1)
    out, mean, scale = _normalised(xp, grouped, (2,), eps)
    shape = (channels, *(1,) * (x.ndim - 2))
    return _affine(out.reshape(x.shape), weight, bias, shape), mean[..., 0], scale[..., 0]


def _batch_norm(
    xp: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    shape = (x.shape[1], *(1,) * (x.ndim - 2))
    out = (x - mean.reshape(shape)) * xp.rsqrt(var.reshape(shape) + eps)
    return (_affine(out, weight, bias, shape),)


def _instance_norm(
    xp: Any, x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Batch norm without running statistics, which instance norm is made of."""
    out, mean, scale = _normalised(xp, x, (0, *range(2, x.ndim)), eps)
    shape = (x.shape[1], *(1,) * (x.ndim - 2))
    return _affine(out, weight, bias, shape), mean.reshape(-1), scale.reshape(-1)


def _embedding(xp: Any, weight: Any, indices: Any, *_: Any) -> Any:
    return xp.picked(weight, indices, 0)


def _softmax(xp: Any, x: Any, dim: int, half_to_float: bool) -> Any:
    sizes = xp.exp(x - x.max(axis=dim, keepdims=True))
    return sizes / sizes.sum(axis=dim, keepdims=True)


def _log_softmax(xp: Any, x: Any, dim: int, half_to_float: bool) -> Any:
    below = x - x.max(axis=dim, keepdims=True)
    return below - xp.log(xp.exp(below).sum(axis=dim, keepdims=True))


def _trilinear(
    xp: Any,
    x: Any,
    y: Any,
    z: Any,
    expand_x: Sequence[int],
    expand_y: Sequence[int],
    expand_z: Sequence[int],
    summed: Sequence[int],
    unroll_dim: int = 1,
) -> Any:
    """The product of three tensors after each was given new axes; a bilinear layer is one."""
    parts = ((x, expand_x), (y, expand_y), (z, expand_z))
    one, two, three = (xp.expand_dims(part, tuple(axes)) for part, axes in parts)
    return (one * two * three).sum(tuple(summed))


LAYERS = rules(
    {
        "mm bmm": "matmul",
        "addmm baddbmm": _addmm,
        "native_layer_norm": _in_float32(_layer_norm),
        "native_group_norm": _in_float32(_group_norm),
        "_native_batch_norm_legit_no_training": _in_float32(_batch_norm),
        "_native_batch_norm_legit.no_stats": _in_float32(_instance_norm),
        "_softmax": _in_float32(_softmax),
        "_log_softmax": _in_float32(_log_softmax),
        "embedding": _embedding,
        "_trilinear": _trilinear,
    }
)
