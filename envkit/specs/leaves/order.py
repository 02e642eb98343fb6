"""How values of every dtype are compared and counted.

This module decides what stands for a value where torch itself cannot compare it. It knows no spec.

Conventions
    coordinates  a tensor in the order of the values, which torch can compare, clamp and pickle:
                 the values themselves where it can; int64 for bool, uint16 and uint32; for uint64
                 the int64 that is 2**63 less; for complex numbers real and imaginary part on a
                 new last axis.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Generator, Tensor

from envkit.errors import NotEnumerableError

__all__ = ["clamp", "coordinates", "digits", "from_coordinates", "range_of", "uniform_integers"]

_AS_INT64 = frozenset((torch.bool, torch.uint16, torch.uint32))
_CODED = _AS_INT64 | {torch.uint64, torch.complex32, torch.complex64, torch.complex128}
_HALF = 2**63
_MOST_LISTED = 2**31  # rows; more would fill the memory of any machine


def coordinates(values: Tensor) -> Tensor:
    """Give the coordinates of values of any dtype."""
    if values.dtype not in _CODED:
        return values
    if values.dtype in _AS_INT64:
        return values.to(torch.int64)
    if values.dtype == torch.uint64:
        return values.view(torch.int64) ^ -_HALF
    return torch.view_as_real(values)


def from_coordinates(coords: Tensor, dtype: torch.dtype) -> Tensor:
    """Give the values of ``dtype`` that have these coordinates."""
    if dtype == torch.uint64:
        return (coords ^ -_HALF).view(torch.uint64)
    if dtype.is_complex:
        return torch.view_as_complex(coords.contiguous())
    return coords if coords.dtype == dtype else coords.to(dtype)


def clamp(values: Tensor, low: int, high: int) -> Tensor:
    """Clamp real values of any dtype to the integers from ``low`` to ``high``.

    Fractions are rounded; NaN stays as it is.
    """
    shift = _HALF if values.dtype == torch.uint64 else 0
    clamped = coordinates(values).clamp(low - shift, high - shift)
    clamped = from_coordinates(clamped, values.dtype)
    return clamped.round() if clamped.is_floating_point() else clamped


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast values; those beyond the range of an integer dtype become the nearest that it holds."""
    if dtype not in _INTEGERS or values.dtype == dtype:
        return values.to(dtype)
    low, high = range_of(dtype)
    wide = (values.real if values.is_complex() else values).double()
    above, below = wide >= high, wide <= low
    cast = torch.where(above | below, 0, values).to(dtype)
    return torch.where(above, high, torch.where(below, low, cast)).to(dtype)


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def range_of(dtype: torch.dtype) -> tuple[Any, Any]:
    """Tell the least and the greatest finite value of a dtype, as Python numbers."""
    if dtype == torch.bool:
        return 0, 1
    if dtype == torch.uint64:  # torch.iinfo gives a rounded float
        return 0, 2**64 - 1
    if dtype.is_floating_point or dtype.is_complex:
        low, high = torch.finfo(dtype).min, torch.finfo(dtype).max
        return (complex(low, low), complex(high, high)) if dtype.is_complex else (low, high)
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def uniform_integers(
    low: int,
    high: int,
    size: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: torch.device,
    generator: Generator | None = None,
) -> Tensor:
    """Draw numbers of any real dtype from ``low`` to ``high``, both included."""
    shift = _HALF if dtype == torch.uint64 else 0
    drawn = torch.int64 if shift else dtype
    low, high = int(low) - shift, int(high) - shift
    if high < torch.iinfo(torch.int64).max:
        draw = torch.randint(low, high + 1, size, generator=generator, dtype=drawn, device=device)
    else:
        draw = torch.empty(size, dtype=drawn, device=device).random_(low, None, generator=generator)
    return from_coordinates(draw, dtype) if shift else draw


def digits(counts: Tensor) -> Tensor:
    """List all integer tensors ``v`` with ``0 <= v < counts``, shape ``(prod(counts), *shape)``.

    Raises:
        NotEnumerableError: there are more than memory holds.
    """
    radix = counts.reshape(-1).to(torch.int64)
    total = math.prod(radix.tolist())
    if total > _MOST_LISTED:
        raise NotEnumerableError(
            f"{total} values are too many to be listed. Enumerate a spec of fewer values, for "
            "example one row of it: `spec[0]`."
        )
    weights = radix.flip(0).cumprod(0).flip(0)  # weights[i] = product of radix[i:]
    steps = torch.cat([weights[1:], weights.new_ones(min(1, radix.numel()))])
    numbers = torch.arange(total, device=counts.device)[:, None] // steps % radix
    return numbers.reshape(total, *counts.shape)
