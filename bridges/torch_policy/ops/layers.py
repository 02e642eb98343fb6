"""Operators that layers are made of: matrix products, convolutions, norms, pools, embeddings.

Matrix products are computed in the precision of their operands, as torch does by default; without
saying so, JAX would take a faster and coarser one on some GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridges.torch_policy.ops.table import table

__all__ = ["LAYERS"]

_FULL = jax.lax.Precision.HIGHEST


def _matmul(x: Any, y: Any) -> Any:
    return jnp.matmul(x, y, precision=_FULL)


def _addmm(bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = _matmul(x, y)
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


def _windows(
    x: Any, size: Sequence[int], stride: Sequence[int], padding: int | Sequence[int]
) -> dict[str, Any]:
    size = tuple(size) * (2 // len(size))
    stride = tuple(stride) * (2 // len(stride)) if stride else size
    pads = (padding,) * 2 if isinstance(padding, int) else tuple(padding) * (2 // len(padding))
    front = x.ndim - 2
    return {
        "window_dimensions": (1,) * front + size,
        "window_strides": (1,) * front + stride,
        "padding": ((0, 0),) * front + tuple((pad, pad) for pad in pads),
    }


def _refuse_ceil(ceil_mode: bool) -> None:
    if ceil_mode:
        raise NotImplementedError("ceil_mode=True is not covered; pad the input instead")


def _max_pool(
    x: Any,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Any:
    _refuse_ceil(ceil_mode)
    spread = (dilation,) * 2 if isinstance(dilation, int) else tuple(dilation)
    windows = _windows(x, size, stride, padding)
    least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    pooled = jax.lax.reduce_window(
        x,
        np.asarray(least, x.dtype)[()],
        jax.lax.max,
        window_dilation=(1,) * (x.ndim - 2) + spread * (2 // len(spread)),
        **windows,
    )
    return (pooled,)  # without the indices: asking for them is an error


def _avg_pool(
    x: Any,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    _refuse_ceil(ceil_mode)
    windows = _windows(x, size, stride, padding)

    def total(values: Any) -> Any:
        return jax.lax.reduce_window(values, np.zeros((), x.dtype)[()], jax.lax.add, **windows)

    if divisor_override is not None:
        return total(x) / divisor_override
    if count_include_pad:
        return total(x) / float(np.prod(windows["window_dimensions"]))
    return total(x) / total(jnp.ones_like(x))


def _embedding(weight: Any, indices: Any, *_: Any) -> Any:
    return jnp.take(weight, indices, axis=0, mode="fill")


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
        "mm bmm": _matmul,
        "addmm baddbmm": _addmm,
        "convolution": _convolution,
        "native_layer_norm": _layer_norm,
        "native_group_norm": _group_norm,
        "_native_batch_norm_legit_no_training": _batch_norm,
        "_native_batch_norm_legit.no_stats": _instance_norm,
        "_softmax": lambda x, dim, half_to_float: jax.nn.softmax(x, axis=dim),
        "_log_softmax": lambda x, dim, half_to_float: jax.nn.log_softmax(x, axis=dim),
        "max_pool2d_with_indices": _max_pool,
        "avg_pool2d": _avg_pool,
        "embedding": _embedding,
        "_trilinear": _trilinear,
    }
)
