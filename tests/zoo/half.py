"""A float of 16 bits that XLA computes with on this CPU.

Without instructions that convert float16 (F16C), XLA's CPU backend cannot compile it; that is so where
XLA is told to keep to SSE4.2 (``make isa``). There bfloat16 takes its place in tests of mixed dtypes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

__all__ = ["HALF", "HAS_FLOAT16", "TORCH_HALF"]


def _has_float16() -> bool:
    try:
        jax.jit(lambda value: value.astype(jnp.float32))(jnp.ones(2, jnp.float16))
    except jax.errors.JaxRuntimeError as error:
        if "Failed to materialize symbols" not in str(error):
            raise
        return False
    return True


HAS_FLOAT16 = _has_float16()
HALF = jnp.float16 if HAS_FLOAT16 else jnp.bfloat16
TORCH_HALF = torch.float16 if HAS_FLOAT16 else torch.bfloat16
