"""The border between JAX and torch: ownership, dtype, layout, device and stream order.

Everything about handing an array over is decided here, once; who needs another rule asks for it
by a keyword.

Conventions
    JAX -> torch  zero-copy. The array is complete before torch sees it, and JAX must never read or
                  write it again: whoever receives the tensor owns the memory.
    torch -> JAX  on the CPU a NumPy view, which a jitted function takes in 1 us where
                  `jnp.from_dlpack` needs 31 us; elsewhere DLPack. JAX reads the memory
                  until the program that got it has finished: pass ``copy=True`` for a tensor
                  that somebody may refill before then. (``jnp.from_dlpack(..., copy=True)`` does
                  not copy on the CPU.)
    64 bits       JAX has them only with x64 enabled. Otherwise integers in the 32-bit range and
                  floats are narrowed when ``dtype`` says so; anything else is an error.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from envkit.errors import HandoffError

__all__ = ["jax_device_of", "to_jax", "to_torch", "torch_device_of", "torch_dtype_of"]

_64_BITS = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.uint64: torch.uint32,
    torch.complex128: torch.complex64,
}
_TORCH_OF = {
    np.dtype(ml_dtypes.bfloat16): torch.bfloat16,
    np.dtype(bool): torch.bool,
    **{
        np.dtype(name): getattr(torch, name)
        for name in (
            *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    },
}


def torch_dtype_of(dtype: Any) -> torch.dtype:
    """Give the torch dtype of a JAX or NumPy dtype.

    Raises:
        HandoffError: torch has no such dtype (int4, typed PRNG keys, ...).
    """
    try:
        return _TORCH_OF[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise HandoffError(
            f"JAX dtype {dtype} has no torch counterpart. Convert it first: int4 with "
            "astype(int8), PRNG keys with jax.random.key_data."
        ) from None


# ------------------------------------------------------------------------------------ JAX -> torch


def to_torch(tree: Any) -> Any:
    """Hand the arrays of a pytree to torch without copying.

    Args:
        tree: pytree of JAX arrays that nothing in JAX uses any more. Typed PRNG keys cross as
            their raw uint32 words; None stays None.

    Returns:
        The same pytree with tensors in the place of arrays; they may be written to.

    Raises:
        HandoffError: a dtype torch does not have, or an array spread over several devices.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        return tree
    leaves = [_words(leaf) if _is_key(leaf) else leaf for leaf in leaves]
    if leaves[0].device.platform == "cpu":
        jax.block_until_ready(leaves)  # other platforms order streams through DLPack
    return treedef.unflatten([_to_tensor(leaf) for leaf in leaves])


def _to_tensor(array: jax.Array) -> torch.Tensor:
    try:
        return torch.utils.dlpack.from_dlpack(
            array if array.device.platform != "cpu" else array.__dlpack__()
        )
    except (RuntimeError, BufferError, ValueError, TypeError, AttributeError) as error:
        raise HandoffError(
            f"a JAX array of dtype {array.dtype}, shape {array.shape} on {array.sharding} cannot "
            f"be handed to torch: {error}. Convert its dtype, or gather it on one device first."
        ) from error


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _words(keys: jax.Array) -> jax.Array:
    return jnp.array(jax.random.key_data(keys))


# ------------------------------------------------------------------------------------ torch -> JAX


def to_jax(value: torch.Tensor | np.ndarray, *, copy: bool, dtype: torch.dtype | None = None) -> Any:
    """Hand one tensor to JAX: as something a jitted function or `jnp` call takes.

    Args:
        value: tensor, or NumPy array (read-only ones are copied). Strided, expanded and misaligned
            memory is made contiguous by a copy.
        copy: give JAX memory of its own.
        dtype: 32-bit dtype to narrow a 64-bit tensor to.

    Returns:
        NumPy view of the memory for a CPU tensor, `jax.Array` on other devices (and for
        bfloat16).

    Raises:
        HandoffError: the tensor requires grad; it has 64 bits that nobody asked to narrow, or
            integers beyond 32 bits; JAX has no such dtype.
    """
    tensor = _as_tensor(value)
    if tensor.requires_grad:
        raise HandoffError(
            "a tensor that requires grad cannot cross to JAX, where torch's graph ends. "
            "Pass tensor.detach(), or build the env with requires_grad=True."
        )
    if tensor.dtype in _64_BITS and not jax.config.jax_enable_x64:
        tensor, copy = _narrowed(tensor, dtype), False
    if not tensor.is_contiguous():
        tensor, copy = tensor.contiguous(), False
    if copy:
        tensor = tensor.clone()
    if tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    if tensor.device.type == "cpu" and tensor.data_ptr() % 64:
        tensor = tensor.clone()
    try:
        return jnp.from_dlpack(tensor)
    except (RuntimeError, BufferError, TypeError, ValueError) as error:
        raise HandoffError(
            f"a torch tensor of dtype {tensor.dtype} on {tensor.device} cannot be handed to JAX: "
            f"{error}. Convert its dtype, or check that JAX sees that device."
        ) from error


def _as_tensor(value: torch.Tensor | np.ndarray) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, np.ndarray):
        raise HandoffError(
            f"{type(value).__name__} is neither a torch tensor nor a NumPy array. "
            "Make a tensor of it: torch.as_tensor(value)."
        )
    return torch.from_numpy(value if value.flags.writeable else value.copy())


def _narrowed(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    narrow = _64_BITS[tensor.dtype]
    if dtype != narrow:
        raise HandoffError(
            f"{tensor.dtype} does not exist in JAX unless x64 is enabled, and would be cut down "
            f"silently. Convert it explicitly: tensor.to({narrow}), or enable jax_enable_x64."
        )
    if not tensor.dtype.is_floating_point and tensor.numel():
        info = torch.iinfo(narrow)
        low, high = int(tensor.min()), int(tensor.max())
        if low < info.min or high > info.max:
            raise HandoffError(
                f"values from {low} to {high} do not fit {narrow}, which JAX would use for "
                f"{tensor.dtype}. Enable jax_enable_x64, or keep them in the 32-bit range."
            )
    return tensor.to(narrow)


# ---------------------------------------------------------------------------------------- devices


def jax_device_of(device: torch.device) -> Any:
    """Give the JAX device that is the same hardware as a torch device.

    Raises:
        HandoffError: JAX does not see that device.
    """
    platform = {"cuda": "gpu"}.get(device.type, device.type)
    try:
        return jax.devices(platform)[device.index or 0]
    except (RuntimeError, IndexError) as error:
        raise HandoffError(
            f"JAX sees no device for torch's {device}: {error}. Install JAX for it "
            "(pip install 'jax[cuda13]'), or use device='cpu'."
        ) from error


def torch_device_of(array: jax.Array) -> torch.device:
    """Give the torch device an array lives on."""
    device = array.device
    kind = "cuda" if device.platform == "gpu" else device.platform
    return torch.device(kind, device.local_hardware_id if kind != "cpu" else None)
