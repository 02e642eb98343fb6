"""The bounds of a box: numbers of any kind as tensors of the box's dtype, and in words.

A bound that the dtype cannot hold is refused; an infinite one of integers is the end of their range.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envkit.errors import SpecError
from envkit.specs.annotations import Numbers
from envkit.specs.leaves.order import range_of

__all__ = ["bound_of", "is_constant", "summary"]


def bound_of(value: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a bound of the dtype, on the device, of the value's own shape.

    Raises:
        SpecError: the dtype has no such number.
    """
    if isinstance(value, Tensor) and value.dtype == dtype:
        return value.detach().to(device).clone()
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
        return _integerbound_of(value, dtype, device)
    if not isinstance(value, Tensor):
        array = np.array(value)  # float64 for Python floats: no digit is lost
        value = torch.from_numpy(array.astype(np.float64) if array.dtype.kind in "uiO" else array)
    value = value.detach().to(device)
    if value.is_complex() and not dtype.is_complex:
        if bool((value.imag != 0).any()):
            raise SpecError(
                f"a bound is {summary(value)}, which no {dtype} is. Pass real bounds, or a "
                "complex dtype."
            )
        value = value.real
    return value.to(dtype)


def _integerbound_of(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a bound from numbers of any size; infinite ones become the ends of the range."""
    value = value if isinstance(value, Tensor) else np.array(value, dtype=object)
    low, high = range_of(dtype)
    numbers = value.flatten().tolist()
    ends = {math.inf: high, -math.inf: low}
    for number in numbers:
        if isinstance(number, complex) or not (low <= number <= high or number in ends):
            raise SpecError(
                f"a bound is {number}, outside the range of {dtype} ({low} to {high}). "
                "Pass a bound within it, or an infinite one for no bound."
            )
    integers = [int(ends.get(number, number)) for number in numbers]
    return torch.tensor(integers, dtype=dtype, device=device).reshape(value.shape)


def is_constant(bound: Tensor) -> bool:
    """Tell whether all numbers of a bound are equal."""
    return bound.numel() == 0 or bool((bound == bound.flatten()[0]).all())


def summary(bound: Tensor) -> str:
    """Write one number for a constant bound and all of a short one."""
    if bound.is_meta:
        return "unknown"
    values = bound.flatten().tolist()
    if values and all(value == values[0] for value in values):
        return f"{values[0]}"
    if len(values) <= 8 or bound.is_complex():
        return f"{bound.tolist()}" if len(values) <= 8 else f"tensor of {len(values)} numbers"
    return f"tensor in [{min(values)}, {max(values)}]"
