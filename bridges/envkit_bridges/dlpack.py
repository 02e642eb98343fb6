"""The border between JAX and torch: who owns memory, when values are there, where they live.

This module alone decides these. It knows arrays and trees of them; it does not know environments.

Ownership
    JAX -> torch  zero-copy, same pointer. The value is complete before torch reads it: on CPU the host waits, on a
                  GPU torch's stream. The tensor may be written in place only if the JAX array is not read again:
                  drop the array, or hand over the outputs of a jitted call and keep none of them.
    torch -> JAX  ``copy=True`` (any buffer the caller may refill): the result shares no memory.
                  ``copy=False``: the memory is lent. Do not write to it until every computation
                  that reads the result has finished, and the result must not outlive that. Who lends
                  keeps what `to_jit` gave until the results are handed to torch: on a GPU, dropped memory is
                  torch's again at once, while the program may still read it.
    order         on a GPU, a program runs after what torch has begun only if it takes a tensor. Values that the host
                  brings there waits for nothing, and may be written where a dropped tensor lay: so
                  every program takes a tensor, and numbers lie there before, see `number_to_jit`.

    graphs        on a GPU, JAX replays a program as a CUDA graph. That cannot copy from memory of another kind than
                  it was recorded with, and since jax 0.11 JAX's memory is mapped, while torch's is not. So arguments
                  that come now from one, now from the other, go through `adopted`.

Conventions
    dtypes  cross as they are. Where JAX has no 64 bits (unless configured otherwise), 32 stand in for them, and every
            value is checked: one that does not fit is an error.
    keys    typed PRNG keys cross as raw uint32 words.

Measured (us, CPU, [64, 8] float32; jax 0.10.2, torch 2.13). JAX -> torch: torch.from_dlpack 5.0, of a capsule 3.1, of
one by JAX's own C function 1.2. After a program that clears the caches these are 12, 9 and 3. torch -> JAX:
jnp.from_dlpack 32 (its copy=True does not copy), jax.device_put 27, jnp.array of the tensor's memory 16. A jitted call
takes 5.0 with a JAX array, 6.2 with memory lent to NumPy, 8.5 with a NumPy copy, 27 with jnp.array, 66 with
from_dlpack of a clone. Jit reads an aligned NumPy argument in
place while it runs, so only a copy without another holder is safe: that is `to_jit`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding
from jax.tree_util import tree_flatten, tree_unflatten
from torch.utils.dlpack import from_dlpack as _from_capsule

from envkit.arrays.elementwise import NARROWER, dtype_name
from envkit.errors import DeviceNameError, HandoffError
from envkit.functional.structure import PyTree

if TYPE_CHECKING:
    from jax.typing import DTypeLike

_NARROW = {getattr(torch, wide): getattr(torch, narrow) for wide, narrow in NARROWER.items()}


def torch_dtype_of(dtype: DTypeLike) -> torch.dtype:
    """Return the torch dtype of a JAX or NumPy dtype.

    Raises:
        HandoffError: torch has no such dtype.
    """
    name = jnp.dtype(dtype).name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise HandoffError(f"torch has no dtype {name!r}. Use one that both libraries have.")
    return found


def crossing_dtype(dtype: torch.dtype, requested: DTypeLike | None = None) -> torch.dtype:
    """Return the dtype in which a tensor crosses to JAX: its own or the JAX dtype asked for, if JAX has that."""
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


try:  # The C function that `__dlpack__` ends in is no promise of JAX: what it lacks or refuses goes that way.
    from jaxlib import _jax as _inside  # type: ignore[attr-defined]
except ImportError:
    _inside = None
_PlainArray: Any = getattr(_inside, "ArrayImpl", None)
_capsule_of: Any = getattr(_inside, "buffer_to_dlpack_managed_tensor", None)


JaxDevice = Any  # jax.Device, which is a variable to type checkers

_SAME_IN_NUMPY = frozenset(map(np.dtype, ("float32", "int32", "uint32", "bool", "uint8")))
_SAME_IN_BOTH = frozenset((torch.float32, torch.int32, torch.bool, torch.uint8))
_REFUSALS = (BufferError, TypeError, ValueError, RuntimeError)  # what DLPack raises, by library
_ALIGNMENT = 16  # bytes; on CUDA, XLA refuses memory that begins elsewhere
_BITS = {1: torch.uint8, 2: torch.int16}  # dtypes NumPy lacks cross it as these, bit by bit


# ------------------------------------------------------------------------------------ JAX -> torch


def to_torch(tree: PyTree) -> PyTree:
    """Convert JAX arrays to tensors without a copy.

    Args:
        tree: a `jax.Array` or a pytree of them, computed or still being computed.

    Returns:
        The same tree of tensors on the matching device. See the module about writing to them.

    Raises:
        HandoffError: a leaf is no concrete array on one device, or torch lacks its dtype.
    """
    leaves, treedef = tree_flatten(tree)
    return tree_unflatten(treedef, [_tensor_of(leaf) for leaf in leaves])


def torch_device_of(array: jax.Array | JaxDevice) -> torch.device:
    """Return the torch device on which a JAX array (or device) lives."""
    device = next(iter(array.devices())) if isinstance(array, jax.Array) else array
    if device.platform == "cpu":
        return torch.device("cpu")
    if device.platform in ("gpu", "cuda", "rocm"):
        return torch.device("cuda", device.local_hardware_id or 0)
    raise HandoffError(
        f"torch has no device for the JAX platform {device.platform!r}. Use JAX on CPU or CUDA."
    )


def _tensor_of(array: Any) -> torch.Tensor:
    # A deleted array is asked nothing further, for its device least of all: JAX would crash.
    if (
        type(array) is _PlainArray
        and not array.is_deleted()
        and type(array.sharding) is SingleDeviceSharding
        and array.platform() == "cpu"
    ):
        array.block_until_ready()  # what the program raises is not about the handoff
        try:
            return _from_capsule(_capsule_of(array, stream=None))
        except _REFUSALS:
            return _checked_tensor_of(array)
    return _checked_tensor_of(array)


def _checked_tensor_of(array: object) -> torch.Tensor:
    """Convert an array as both libraries document it, or raise why it cannot be."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        raise HandoffError(
            f"to_torch takes concrete jax.Array leaves, but got {_kind(array)}. "
            "Hand over what a jitted function returned, outside of it."
        )
    if array.is_deleted():
        raise HandoffError(
            f"a JAX array of dtype {array.dtype} and shape {array.shape} has been deleted, or donated to "
            "a jitted call. Hand it over before that, or hand over what the call returned."
        )
    if not isinstance(array.dtype, np.dtype):  # a typed PRNG key
        array = jax.random.key_data(array)
    if array.platform() == "cpu":
        array.block_until_ready()  # what the program raises is not about the handoff
    try:
        return torch.from_dlpack(array)  # gives JAX torch's stream, which then waits for the value
    except _REFUSALS as error:
        array.block_until_ready()  # raises what the program raised, which is not about the handoff
        raise HandoffError(
            f"a JAX array of dtype {array.dtype} and shape {array.shape} cannot become a torch "
            f"tensor: {error}. Cast it to a dtype both have (int4 to int8), and gather an array that "
            "is spread over devices onto one."
        ) from error


# ------------------------------------------------------------------------------------ torch -> JAX


def to_jax(
    tree: PyTree, *, copy: bool = True, dtype: DTypeLike | None = None, detach: bool = False
) -> PyTree:
    """Convert tensors to JAX arrays.

    Args:
        tree: a `torch.Tensor`, a NumPy array, or a pytree of them: any strides, size or alignment.
        copy: give JAX its own memory; False lends the tensor's (see the module), where layout
            and alignment allow.
        dtype: JAX dtype to convert to; None keeps each leaf's own, narrowed to 32 bits where JAX
            has no 64.
        detach: take tensors that require grad by their values; otherwise they are an error,
            since no gradient would flow back.

    Returns:
        The same tree of `jax.Array`, on the device of each tensor.

    Raises:
        HandoffError: a value is out of range, requires grad, or is not a dense array.
    """
    return jax.tree.map(lambda leaf: _array_of(_plain(leaf, dtype, detach), copy), tree)


def to_jit(tree: PyTree, *, copy: bool = True, detach: bool = False) -> PyTree:
    """Convert tensors to arguments of a jitted call: `to_jax`, three times as fast on CPU.

    On CPU the leaves are NumPy arrays, which jit takes in place; elsewhere, and beside a GPU, `jax.Array`: jit runs
    on the GPU unless an argument that the program uses lies elsewhere. They are arguments of one call, not values to
    compute with. The rules of ownership are the same, so with ``copy=False`` the tensors must not be written to until
    the call's results are ready. Leaves that are `jax.Array` stay what they are.
    """
    leaves, treedef = tree_flatten(tree)
    if jax.default_backend() == "cpu":
        arrays = [_lent(leaf, copy, detach) for leaf in leaves]
    else:
        arrays = [
            leaf if isinstance(leaf, jax.Array) else _array_of(_plain(leaf, None, detach), copy)
            for leaf in leaves
        ]
    return tree_unflatten(treedef, arrays)


def adopted(tree: PyTree) -> PyTree:
    """Copy arrays that may lie in torch's memory of a GPU into JAX's own; those on a CPU stay what they are.

    torch's stream waits for the copies, so the tensors whose memory was lent may be dropped at once.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves or not isinstance(leaves[0], jax.Array) or leaves[0].platform() == "cpu":
        return tree
    copies = _copied(tree)
    to_torch(jax.tree.leaves(copies)[0])
    return copies


# no graph: see the module
@functools.partial(jax.jit, compiler_options={"xla_gpu_graph_min_graph_size": 1 << 30})
def _copied(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


def jax_device_of(device: torch.device | str) -> JaxDevice:
    """Return the JAX device on which a torch device's memory lives.

    Raises:
        DeviceNameError: (a ValueError and a RuntimeError) torch or JAX does not see that device.
    """
    device = torch.device(device)
    platform = {"cpu": "cpu", "cuda": "cuda"}.get(device.type)
    try:
        devices = jax.local_devices(backend=platform) if platform else []
    except RuntimeError:
        devices = []
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceNameError(
            f"torch sees no {str(device)!r}: this installation of it, or this machine, has no CUDA. Use "
            "device='cpu', or install torch for CUDA."
        )
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        devices = [candidate for candidate in devices if candidate.local_hardware_id == index]
    if devices:
        return devices[0]
    raise DeviceNameError(
        f"JAX sees no device for torch's {str(device)!r}; it sees {jax.devices()}. "
        "Install JAX for that device (jax[cuda13]), or use device='cpu'."
    )


def number_to_jit(number: complex, device: torch.device | None) -> Any:
    """Return a Python number as an argument of programs on a device; it decides about no dtype there.

    It is brought to a GPU once, after torch has done what it was given to do there.
    """
    if device is None or device.type == "cpu":
        return number
    wide = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    return _number_on(device, type(number), repr(number), wide)


@functools.lru_cache(256)
def _number_on(device: torch.device, kind: type, written: str, wide: bool) -> jax.Array:
    _wait_for_torch(device)
    with jax.default_device(jax_device_of(device)):
        return jnp.asarray(kind(written) if kind is not bool else written == "True")


def _wait_for_torch(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()


def _lent(leaf: Any, copy: bool, detach: bool) -> Any:
    """Convert a leaf to an argument of a jitted call on the CPU; most are viewed as they are."""
    if not copy:
        is_known = type(leaf) is torch.Tensor and leaf.dtype in _SAME_IN_BOTH and leaf.is_cpu
        if is_known and leaf.is_contiguous() and not (leaf.requires_grad or leaf.is_neg()):
            return leaf.numpy()
        if type(leaf) is np.ndarray and leaf.dtype in _SAME_IN_NUMPY and leaf.flags.c_contiguous:
            return leaf
    return leaf if isinstance(leaf, jax.Array) else _argument_of(_plain(leaf, None, detach), copy)


def _plain(leaf: object, dtype: DTypeLike | None, detach: bool) -> torch.Tensor:
    """Return a dense, contiguous tensor without graph, in a dtype that JAX has."""
    if isinstance(leaf, np.ndarray):
        leaf = _tensor_of_numpy(leaf)
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided or leaf.is_meta:
        raise HandoffError(
            f"only dense tensors with values cross to JAX, but got {_kind(leaf)}. "
            "Convert it first, e.g. with .to_dense()."
        )
    if leaf.requires_grad:
        if not detach:
            raise HandoffError(
                f"a tensor of shape {tuple(leaf.shape)} requires grad, but no gradient flows through "
                "this handoff. Detach it (detach=True, or compute it under torch.no_grad()), or "
                "build the env with requires_grad=True."
            )
        leaf = leaf.detach()
    wanted = crossing_dtype(leaf.dtype, dtype)
    if wanted != leaf.dtype:
        leaf = converted(leaf, wanted)
    if leaf.is_conj() or leaf.is_neg():
        leaf = leaf.resolve_conj().resolve_neg()
    return leaf.contiguous()


def _tensor_of_numpy(array: np.ndarray) -> torch.Tensor:
    try:
        if array.dtype.name == "bfloat16":  # a NumPy extension type that torch does not read
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        usable = (
            array.flags.writeable and array.flags.aligned and min(array.strides, default=0) >= 0
        )
        return torch.from_numpy(array if usable else array.copy())
    except TypeError as error:
        raise HandoffError(
            f"a NumPy array of dtype {array.dtype} cannot cross to JAX. Cast it to a number type."
        ) from error


def _array_of(tensor: torch.Tensor, copy: bool) -> jax.Array:
    if tensor.device.type == "cpu" and copy:
        owned = _host_view(tensor)
        if jax.default_backend() == "cpu":
            return jnp.array(owned)  # the one call that copies at once
        return jax.device_put(np.array(owned), jax_device_of(tensor.device))
    if copy or tensor.data_ptr() % _ALIGNMENT:
        tensor = tensor.clone()
    try:
        with torch.cuda.device_of(tensor):  # torch lends nothing that is on another GPU
            return jnp.from_dlpack(tensor)
    except _REFUSALS as error:
        raise HandoffError(
            f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)} on {tensor.device} cannot "
            f"cross to JAX: {error}. Cast or move it first."
        ) from error


def _argument_of(tensor: torch.Tensor, copy: bool) -> Any:
    if tensor.device.type != "cpu":
        return _array_of(tensor, copy)
    view = _host_view(tensor)
    return np.array(view) if copy else view


def _host_view(tensor: torch.Tensor) -> np.ndarray:
    """View a contiguous CPU tensor as a NumPy array of the dtype that JAX calls the same."""
    try:
        return tensor.numpy()
    except TypeError:
        name = dtype_name(tensor.dtype)
        if not hasattr(jnp, name) or tensor.itemsize not in _BITS:
            raise HandoffError(
                f"JAX has no dtype for {tensor.dtype}. Cast the tensor, e.g. to float32."
            ) from None
        return tensor.view(_BITS[tensor.itemsize]).numpy().view(jnp.dtype(getattr(jnp, name)))


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.layout} tensor on {value.device}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
