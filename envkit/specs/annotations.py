"""Types of the arguments of specs and envs, types of results, and which device an argument names.

tensordict ships no types that a checker can follow to the end: one base class of `TensorDictBase` stays
unknown, so any attribute of it passes, and it passes for any other class. `EnvData` names what only a
tensor has. At run time it is `TensorDictBase`.

It knows torch's devices alone; where the programs of JAX run is `envkit_bridges.dlpack`'s to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from envkit.errors import ArgumentError, ArgumentTypeError, DeviceNameError

Path = tuple[str, ...]
"""A key, always as a tuple."""

Key = str | Path
"""The key of an entry: a string when it is not nested, else a tuple of strings."""

Device = torch.device | str | int
"""A device, its name, or the number of an accelerator."""

Place = Device | torch.dtype
"""What ``to`` takes: a device or a dtype."""

Destination = Device | torch.dtype | Tensor | bool | None
"""One of the arguments of ``to`` of a module or an env."""

BatchSize = Sequence[int]
"""The number of envs along each batch axis."""

Shape = int | Sequence[int]
"""Sizes of axes; an int is one axis."""

AxisIndex = int | slice | EllipsisType | Tensor | np.ndarray | Sequence[Any] | None
"""An index along the axes of a tensor."""

Numbers = float | np.number | np.ndarray | Tensor | Sequence[Any]
"""A number, an array, a tensor, or lists of them: bounds, masks, counts."""

Value = Tensor | TensorDictBase
"""A value of a spec: a tensor of a leaf, a TensorDict of a composite."""


if TYPE_CHECKING:

    class EnvData(TensorDictBase):  # type: ignore[misc]
        """A TensorDict that an env gives or takes; its entries are the tensors: ``td["next", "reward"]``.

        An entry may be anything; what axes are indexed with gives the same kind of data. The other members
        are those of tensors that no TensorDict has; a checker reports their use.
        """

        @overload
        def __getitem__(self, index: Key) -> Any: ...
        @overload
        def __getitem__(self, index: AxisIndex) -> Self: ...
        def __getitem__(self, index: Any) -> Any: ...
        def get(self, key: Key, *default: Any, **options: Any) -> Any: ...

        argmax: None
        argmin: None
        argsort: None
        cumsum: None
        grad_fn: None
        index_select: None
        is_leaf: None
        item: None
        long: None
        matmul: None
        nonzero: None
        relu: None
        sort: None
        square: None
        topk: None

else:
    EnvData = TensorDictBase


def as_device(device: Device | None) -> torch.device:
    """Return one device exactly; ``None`` means ``cpu`` and ``"cuda"`` the current CUDA device.

    So "cuda" and "cuda:0" are equal wherever devices are compared. Where there is no GPU, "cuda" is the first.

    Raises:
        DeviceNameError: (a ValueError and a RuntimeError) torch knows no device of that name.
        ArgumentTypeError: (a TypeError) it is nothing that names a device.
    """
    try:
        device = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise _unknown(device) from error
    except TypeError as error:
        raise ArgumentTypeError(
            f"device is {device!r}, of type {type(device).__name__}, but must be a torch.device or its name. "
            "Pass 'cpu', 'cuda', or one of several GPUs: 'cuda:1'."
        ) from error
    if device.type == "cuda" and device.index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return torch.device("cuda", index)
    return device


def destination(*args: Any, **kwargs: Any) -> torch.device | None:
    """Read the device from what ``torch.nn.Module.to`` takes, named exactly; None where it says none.

    Raises:
        DeviceNameError: (a ValueError and a RuntimeError) torch knows no device of that name.
    """
    try:
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise _unknown(kwargs.get("device", args[0] if args else None)) from error
    return None if device is None else as_device(device)


def _unknown(device: object) -> DeviceNameError:
    return DeviceNameError(
        f"device is {device!r}, which is no device that torch knows. Pass 'cpu', 'cuda', or one of several GPUs: 'cuda:1'."
    )


def reading_waits(tensor: torch.Tensor) -> bool:
    """Check whether the host waits for a device where it reads a tensor's values."""
    return not tensor.is_cpu


def require_numbers(device: torch.device, spec: object, *numbers: object) -> None:
    """Check that a device holds the numbers that a spec is described by, and that they are there to be read.

    Raises:
        ArgumentError: (a ValueError) it is the meta device, or a number that was given is on it.
    """
    if device.type == "meta" or any(
        isinstance(one, torch.Tensor) and one.is_meta for one in numbers
    ):
        raise ArgumentError(
            f"{type(spec).__name__} was given the meta device, which holds no data, but it is described by numbers that "
            "are read. Make it on 'cpu' or an accelerator."
        )


def require_memory(device: torch.device | None, owner: str) -> None:
    """Check that what an env gives can be delivered to a device.

    Raises:
        ArgumentError: (a ValueError) it is the meta device, which holds no data.
        DeviceNameError: (a ValueError and a RuntimeError) it is a GPU that torch does not see.
    """
    if device is None:
        return
    if device.type == "meta":
        raise ArgumentError(
            f"{owner} was given the meta device, which holds no data, so nothing that it gives could be read. Pass "
            "'cpu' or an accelerator."
        )
    if device.type != "cuda":
        return
    seen = torch.cuda.device_count()
    if not seen:
        raise DeviceNameError(
            f"{owner} was given {str(device)!r}, but torch sees no GPU: this installation of it, or this machine, "
            "has no CUDA. Use device='cpu', or install torch for CUDA."
        )
    if device.index >= seen:
        raise DeviceNameError(
            f"{owner} was given {str(device)!r}, but torch sees {seen} GPU(s). Use one of 'cuda:0' to 'cuda:{seen - 1}'."
        )
