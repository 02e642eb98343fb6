"""Operators of layers that JAX alone has: convolutions, and bags of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from envkit_bridges.jax.policy.library import FULL, picked
from envkit_bridges.jax.policy.ops.table import table

__all__ = ["LAYERS"]


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
        precision=FULL,
    )
    return out if bias is None else out + bias.reshape(-1, *(1,) * axes)


def _turned(weight: Any, groups: int) -> Any:
    """Bring the kernel of a transposed convolution, (in, out / groups, *size), into that of a plain one."""
    channels, each, *size = weight.shape
    weight = jnp.flip(weight, tuple(range(2, weight.ndim)))
    grouped = weight.reshape(groups, channels // groups, each, *size).swapaxes(1, 2)
    return grouped.reshape(groups * each, channels // groups, *size)


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
    rows = picked(weight, indices, 0)
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


LAYERS = table(
    {
        "convolution": _convolution,
        "_embedding_bag _embedding_bag_forward_only": _embedding_bag,
    }
)
