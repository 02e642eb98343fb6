"""Operators that layers are made of: matrix products, convolutions, norms, embeddings.

Matrix products are computed in the precision of their operands, as torch does by default; without
saying so, JAX would take a faster and coarser one on some GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bridges.jax.policy.ops.shaping import in_range
from bridges.jax.policy.ops.table import table

__all__ = ["LAYERS", "matmul"]

_FULL = jax.lax.Precision.HIGHEST


def matmul(x: Any, y: Any) -> Any:
    """Multiply matrices in the precision of their operands."""
    return jnp.matmul(x, y, precision=_FULL)


def _addmm(bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = matmul(x, y)
    return (bias if beta == 1 else beta * bias) + (product if alpha == 1 else alpha * product)


def _convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    axes = weight.ndim - 2
    around = [(pad, pad) for pad in padding]
    spread: Sequence[int] = (1,) * axes
    if transposed:  # a convolution of the input with zeros put between its elements
        weight = _turned(weight, groups)
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        around = [
            (r - pad, r - pad + extra)
            for r, pad, extra in zip(reach, padding, output_padding, strict=True)
        ]
        stride, spread = (1,) * axes, tuple(stride)
    names = "DHW"[-axes:]
    out = jax.lax.conv_general_dilated(
        x,
        weight,
        window_strides=tuple(stride),
        padding=around,
        lhs_dilation=spread,
        rhs_dilation=tuple(dilation),
        dimension_numbers=(f"NC{names}", f"OI{names}", f"NC{names}"),
        feature_group_count=groups,
        precision=_FULL,
    )
    return out if bias is None else out + bias.reshape(-1, *(1,) * axes)


def _turned(weight: Any, groups: int) -> Any:
    """Bring the kernel of a transposed convolution, (in, out / groups, *size), into that of a plain one."""
    channels, each, *size = weight.shape
    weight = jnp.flip(weight, tuple(range(2, weight.ndim)))
    grouped = weight.reshape(groups, channels // groups, each, *size).swapaxes(1, 2)
    return grouped.reshape(groups * each, channels // groups, *size)


def _normalised(x: Any, axes: tuple[int, ...], eps: float) -> tuple[Any, Any, Any]:
    mean = x.mean(axes, keepdims=True)
    scale = jax.lax.rsqrt(x.var(axes, keepdims=True) + eps)
    return (x - mean) * scale, mean, scale


def _affine(x: Any, weight: Any, bias: Any, shape: tuple[int, ...]) -> Any:
    if weight is not None:
        x = x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    out, mean, scale = _normalised(x, tuple(range(x.ndim - len(shape), x.ndim)), eps)
    return _affine(out, weight, bias, tuple(shape)), mean, scale


def _group_norm(
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
    out, mean, scale = _normalised(grouped, (2,), eps)
    shape = (channels, *(1,) * (x.ndim - 2))
    return _affine(out.reshape(x.shape), weight, bias, shape), mean[..., 0], scale[..., 0]


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    shape = (x.shape[1], *(1,) * (x.ndim - 2))
    out = (x - mean.reshape(shape)) * jax.lax.rsqrt(var.reshape(shape) + eps)
    return (_affine(out, weight, bias, shape),)


def _instance_norm(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Batch norm without running statistics, which instance norm is made of."""
    out, mean, scale = _normalised(x, (0, *range(2, x.ndim)), eps)
    shape = (x.shape[1], *(1,) * (x.ndim - 2))
    return _affine(out, weight, bias, shape), mean.reshape(-1), scale.reshape(-1)


def _embedding(weight: Any, indices: Any, *_: Any) -> Any:
    return jnp.take(weight, in_range(indices, weight.shape[0]), axis=0, mode="fill")


def _embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Sum (mode 0), average (1) or maximise (2) rows of ``weight``; bag i begins at ``offsets[i]``."""
    number, bags = indices.shape[0], offsets.shape[0] - include_last_offset
    bag = jnp.searchsorted(offsets[:bags], jnp.arange(number), side="right") - 1
    if padding_idx >= 0:
        bag = jnp.where(indices == padding_idx, bags, bag)  # no bag: left out
    rows = _embedding(weight, indices)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    counts = jax.ops.segment_sum(jnp.ones(number), bag, bags)[:, None]
    if mode == 2:
        out = jnp.where(counts > 0, jax.ops.segment_max(rows, bag, bags), 0)
    else:
        out = jax.ops.segment_sum(rows, bag, bags)
        out = out / jnp.maximum(counts, 1) if mode == 1 else out
    proper = (offsets[:1] == 0).all()
    if include_last_offset:
        proper &= offsets[-1] == number
    return (jnp.where(proper, out, jnp.nan),)  # without what only gradients need


def _trilinear(
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
    one, two, three = (jnp.expand_dims(part, tuple(axes)) for part, axes in parts)
    return (one * two * three).sum(tuple(summed))


LAYERS = table(
    {
        "mm bmm": matmul,
        "addmm baddbmm": _addmm,
        "convolution": _convolution,
        "native_layer_norm": _layer_norm,
        "native_group_norm": _group_norm,
        "_native_batch_norm_legit_no_training": _batch_norm,
        "_native_batch_norm_legit.no_stats": _instance_norm,
        "_softmax": lambda x, dim, half_to_float: jax.nn.softmax(x, axis=dim),
        "_log_softmax": lambda x, dim, half_to_float: jax.nn.log_softmax(x, axis=dim),
        "embedding": _embedding,
        "_embedding_bag _embedding_bag_forward_only": _embedding_bag,
        "_trilinear": _trilinear,
    }
)
