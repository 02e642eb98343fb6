"""Dtypes that JAX and torch both have, and values that change theirs on the way between them.

Dtypes cross as they are. Where JAX has no 64 bits (unless told otherwise), 32 stand in for them, and every value is
checked: one that does not fit is an error.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from envkit.arrays.dtypes import NARROWER
from envkit.errors import HandoffError

__all__ = ["converted", "crossing_dtype", "torch_dtype_of"]

_NARROW = {getattr(torch, wide): getattr(torch, narrow) for wide, narrow in NARROWER.items()}


def torch_dtype_of(dtype: Any) -> torch.dtype:
    """Name the torch dtype of a JAX or NumPy dtype.

    Raises:
        HandoffError: torch has no such dtype.
    """
    name = jnp.dtype(dtype).name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise HandoffError(f"torch has no dtype {name!r}. Use one that both libraries have.")
    return found


def crossing_dtype(dtype: torch.dtype, requested: Any | None = None) -> torch.dtype:
    """Name the dtype in which a tensor crosses to JAX: its own or the JAX dtype asked for, if JAX has that."""
    if requested is not None:
        dtype = torch_dtype_of(requested)
    if dtype in _NARROW and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return _NARROW[dtype]
    return dtype


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert by value.

    Raises:
        HandoffError: the new dtype cannot hold a value.
    """
    if torch.bool in (tensor.dtype, dtype):
        return tensor.to(dtype)
    part = tensor.real if tensor.is_complex() and not dtype.is_complex else tensor
    result = part.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        lost = result.isinf() & ~part.isinf()
    else:
        lost = _outside(part, dtype)
    if part is not tensor:
        lost = lost | (tensor.imag != 0)
    if bool(lost.any()):
        raise HandoffError(
            f"a tensor of {tensor.dtype} holds values that {dtype} cannot: {tensor[lost][:3].tolist()}. "
            "Scale or clamp it before the handoff, or enable 64-bit types in JAX (jax_enable_x64)."
        )
    return result


def _outside(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Mark what an integer dtype cannot hold: out of range, a fraction, not a number."""
    info = torch.iinfo(dtype)
    if tensor.is_floating_point():
        tensor = tensor.double()
        return (tensor < info.min) | (tensor > info.max) | (tensor != tensor.round())
    if tensor.dtype == torch.uint64:  # torch compares no uint64: what exceeds int64 reads negative
        signed = tensor.view(torch.int64)
        return (signed < 0) | (signed > info.max)
    wide = tensor.to(torch.int64)
    return wide < info.min if dtype == torch.uint64 else (wide < info.min) | (wide > info.max)
