"""Leaves whose domain is a box: bounded, unbounded and binary tensors.

This module decides which class a dtype selects, how a box is sampled and what lies in it.
Bounds are stored expanded to the spec's shape, so that every shape operation applies to them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from envkit.errors import SpecError
from envkit.specs.base import Shape, TensorSpec, as_device, digits
from envkit.specs.leaf import LeafSpec
from envkit.specs.shapes import as_shape, known
from envkit.specs.spaces import BinaryBox, ContinuousBox

__all__ = [
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
]


# torch can make these but neither compare nor pickle them: their bounds are kept as int64.
_UNCOMPARED = (torch.uint16, torch.uint32)


class _Box(LeafSpec):
    """A closed box, elementwise."""

    _contents = ("_low", "_high")
    _caches = (*LeafSpec._caches, "_sampler")

    _low: Tensor
    _high: Tensor
    _sampler: Any = None

    @property
    def low(self) -> Tensor:
        """Lower bounds, of the spec's shape."""
        return self._low.to(self._dtype)

    @property
    def high(self) -> Tensor:
        """Upper bounds, of the spec's shape."""
        return self._high.to(self._dtype)

    @property
    def space(self) -> Any:
        return ContinuousBox(self.low, self.high)

    def _facts(self) -> dict[str, Any]:
        return {"low": _summary(self._low), "high": _summary(self._high)}

    def _nearest(self, value: Tensor) -> Tensor:
        if self._dtype in _UNCOMPARED:
            return _comparable(value).clamp(self._low, self._high).to(self._dtype)
        if self._dtype == torch.bool:
            return value.logical_and(self._high).logical_or(self._low)
        return value.clamp(self._low, self._high)


class _IntegerBox(_Box):
    """A closed box of integers, which can be counted."""

    domain = "discrete"

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        if self._sampler is None:
            self._sampler = _integer_sampler(self._low, self._high)
        low, high, spread = self._sampler
        size = (*shape, *self._size)
        if spread is not None:
            draw = torch.empty(size, dtype=torch.int64, device=self._device).random_(
                generator=generator
            )
            return (draw % spread + low).to(self._dtype)
        if high < torch.iinfo(torch.int64).max:
            return torch.randint(
                low, high + 1, size, generator=generator, dtype=self._dtype, device=self._device
            )
        return torch.empty(size, dtype=self._dtype, device=self._device).random_(
            low, None, generator=generator
        )

    def enumerate(self, use_mask: bool = False) -> Tensor:
        low = self._low.to(torch.int64)
        return (digits(self._high.to(torch.int64) - low + 1) + low).to(self._dtype)

    def cardinality(self) -> int:
        return math.prod(
            high - low + 1
            for low, high in zip(
                self._low.flatten().tolist(), self._high.flatten().tolist(), strict=True
            )
        )


def _integer_sampler(low: Tensor, high: Tensor) -> tuple[Any, Any, Tensor | None]:
    """Prepare uniform integers: two numbers if the box is a cube, else bounds and counts."""
    if low.numel() == 0:
        return 0, 0, None
    lows, highs = low.flatten().tolist(), high.flatten().tolist()
    if len(set(lows)) == len(set(highs)) == 1:
        return int(lows[0]), int(highs[0]), None
    low, high = low.to(torch.int64), high.to(torch.int64)
    spread = high - low + 1
    # A count of 2**63 or more wraps around: such an entry keeps the lower half of its range.
    return low, high, torch.where(spread > 0, spread, torch.iinfo(torch.int64).max)


class Bounded(_Box):
    """Describe a tensor within a closed box ``[low, high]``, elementwise.

    The result is a `BoundedContinuous` for floating dtypes and a `BoundedDiscrete` otherwise.

    Args:
        low: lower bound, a number or array that broadcasts to ``shape``.
        high: upper bound, likewise; not below ``low``.
        shape: sizes of the tensor; the broadcast shape of the bounds by default.
        device: where values are made, ``cpu`` by default.
        dtype: the default float dtype if not given (int64 with ``domain="discrete"``).
        domain: ``"continuous"`` or ``"discrete"``; follows from the dtype.

    Raises:
        SpecError: bounds that do not broadcast to ``shape`` or are reversed, a domain that
            contradicts the dtype, or a complex or uint64 dtype.
    """

    def __new__(cls, low=None, high=None, shape=None, device=None, dtype=None, *, domain=None):
        if cls is not Bounded:
            return object.__new__(cls)
        continuous = _is_continuous(dtype, domain)
        return object.__new__(BoundedContinuous if continuous else BoundedDiscrete)

    def __init__(
        self,
        low: Any,
        high: Any,
        shape: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        domain: str | None = None,
    ):
        dtype = _checked_dtype(self, dtype, domain)
        if dtype.is_complex or dtype == torch.uint64:
            raise SpecError(
                f"torch cannot compare values of dtype {dtype}, so they have no bounds. "
                "Use another dtype, or Unbounded."
            )
        device = as_device(device)
        low, high = (_comparable(_bound(bound, dtype, device)) for bound in (low, high))
        try:
            if shape is None:
                shape = torch.broadcast_shapes(low.shape, high.shape)
            size = known(as_shape(shape))
            self._low, self._high = low.expand(size), high.expand(size)
        except RuntimeError as error:
            raise SpecError(
                f"bounds of shapes {tuple(low.shape)} and {tuple(high.shape)} do not broadcast to "
                f"shape {shape}. Pass numbers, or arrays of the spec's shape."
            ) from error
        if not bool((low <= high).all()):
            raise SpecError(
                f"low={_summary(low)} is not below high={_summary(high)} everywhere. "
                "Exchange the bounds, and let none be NaN."
            )
        super().__init__(shape, device, dtype)

    def _cast(self, dtype: torch.dtype) -> TensorSpec:
        return Bounded(self._low, self._high, self._shape, self._device, dtype)


class BoundedContinuous(Bounded):
    """Describe a floating-point tensor within a closed box; see `Bounded`."""

    domain = "continuous"

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        if self._sampler is None:
            self._sampler = _float_sampler(self._low, self._high)
        low, scale, factor = self._sampler
        unit = torch.rand(
            (*shape, *self._size), generator=generator, dtype=self._dtype, device=self._device
        )
        value = torch.addcmul(low, unit, scale)
        return value if factor is None else value.mul_(factor)


def _float_sampler(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Prepare ``(low + unit * scale) * factor``, which no rounding carries above ``high``."""
    info = torch.finfo(low.dtype)
    low, high = low.clamp(info.min, info.max), high.clamp(info.min, info.max)
    wide = (high - low).isinf()
    halved = torch.where(wide, 0.5, 1.0).to(low.dtype)
    low, high = low * halved, high * halved
    scale = high - low
    while bool((above := low + scale > high).any()):
        scale = torch.where(above, scale * (1 - info.eps), scale)
    return low, scale, 1 / halved if bool(wide.any()) else None


class BoundedDiscrete(_IntegerBox, Bounded):
    """Describe an integer tensor within a closed box; see `Bounded`."""

    domain = "discrete"


class Unbounded(LeafSpec):
    """Describe a tensor that may take any value of its dtype.

    The result is an `UnboundedContinuous` for floating dtypes and an `UnboundedDiscrete`
    otherwise.

    Args:
        shape: sizes of the tensor.
        device: where values are made, ``cpu`` by default.
        dtype: the default float dtype if not given (int64 with ``domain="discrete"``).
        domain: ``"continuous"`` or ``"discrete"``; follows from the dtype.

    Raises:
        SpecError: a domain that contradicts the dtype.
    """

    def __new__(cls, shape=(1,), device=None, dtype=None, *, domain=None):
        if cls is not Unbounded:
            return object.__new__(cls)
        continuous = _is_continuous(dtype, domain)
        return object.__new__(UnboundedContinuous if continuous else UnboundedDiscrete)

    def __init__(
        self,
        shape: Any = (1,),
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        domain: str | None = None,
    ):
        super().__init__(shape, device, _checked_dtype(self, dtype, domain))

    @property
    def space(self) -> ContinuousBox:
        low, high = _range_of(self._dtype)
        make = {"size": tuple(self._size), "dtype": self._dtype, "device": self._device}
        return ContinuousBox(
            torch.full(fill_value=low, **make), torch.full(fill_value=high, **make)
        )

    def _cast(self, dtype: torch.dtype) -> TensorSpec:
        return Unbounded(self._shape, self._device, dtype)

    def is_in(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype == self._dtype and self._fits(value.shape)

    def _nearest(self, value: Tensor) -> Tensor:
        return value


class UnboundedContinuous(Unbounded):
    """Describe a floating-point tensor of any value; see `Unbounded`."""

    domain = "continuous"

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        return torch.randn(
            (*shape, *self._size), generator=generator, dtype=self._dtype, device=self._device
        )


class UnboundedDiscrete(Unbounded):
    """Describe an integer or boolean tensor of any value; see `Unbounded`."""

    domain = "discrete"

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        size = (*shape, *self._size)
        low, high = _range_of(self._dtype)
        if high < torch.iinfo(torch.int64).max:
            return torch.randint(
                low, high + 1, size, generator=generator, dtype=self._dtype, device=self._device
            )
        return torch.empty(size, dtype=self._dtype, device=self._device).random_(
            low, None, generator=generator
        )


class Binary(_IntegerBox):
    """Describe a tensor of zeros and ones.

    Args:
        n: size of the last axis; the last size of ``shape`` if not given.
        shape: sizes of the tensor, ``(n,)`` by default.
        device: where values are made, ``cpu`` by default.
        dtype: int8 by default.

    Raises:
        SpecError: neither ``n`` nor ``shape`` is given, or they contradict each other.
    """

    def __init__(
        self,
        n: int | None = None,
        shape: Any = None,
        device: Any = None,
        dtype: torch.dtype = torch.int8,
    ):
        if n is None and shape is None:
            raise SpecError("Binary got neither n nor shape. Pass Binary(4) or Binary(shape=(4,)).")
        shape = as_shape(n if shape is None else shape)
        if n is not None and shape[-1:] != (n,):
            raise SpecError(
                f"Binary got n={n} and shape {tuple(shape)}. The last size must equal n: pass "
                f"shape {(*shape[:-1], n)}, or leave n out."
            )
        super().__init__(shape, device, dtype)
        zero_one = torch.tensor([0, 1], dtype=dtype, device=self._device)
        low, high = _comparable(zero_one)
        self._low, self._high = low.expand(self._size), high.expand(self._size)

    @property
    def n(self) -> int:
        """Number of entries on the last axis."""
        return self._shape[-1] if self._shape else 1

    @property
    def space(self) -> BinaryBox:
        return BinaryBox(self.n)

    def _facts(self) -> dict[str, Any]:
        return {}

    def _cast(self, dtype: torch.dtype) -> TensorSpec:
        return Binary(shape=self._shape, device=self._device, dtype=dtype)

    def _nearest(self, value: Tensor) -> Tensor:
        nearest = super()._nearest(value)
        return nearest.round() if nearest.is_floating_point() else nearest


def _is_continuous(dtype: torch.dtype | None, domain: str | None) -> bool:
    if domain not in (None, "continuous", "discrete"):
        raise SpecError(f"domain is {domain!r}. Pass 'continuous', 'discrete' or leave it out.")
    if dtype is None:
        return domain != "discrete"
    continuous = dtype.is_floating_point or dtype.is_complex
    if domain is not None and continuous != (domain == "continuous"):
        raise SpecError(
            f"domain {domain!r} contradicts dtype {dtype}. Floating dtypes are continuous, all "
            "others discrete: change one of the two, or leave the domain out."
        )
    return continuous


def _checked_dtype(spec: LeafSpec, dtype: torch.dtype | None, domain: str | None) -> torch.dtype:
    """Complete the dtype and check it against the class and the domain."""
    if _is_continuous(dtype, domain or spec.domain) != (spec.domain == "continuous"):
        raise SpecError(f"{type(spec).__name__} got domain {domain!r}. Leave it out.")
    if dtype is not None:
        return dtype
    return torch.get_default_dtype() if spec.domain == "continuous" else torch.int64


def _bound(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a bound of the dtype; infinite bounds of integers become the ends of their range."""
    if not isinstance(value, Tensor):
        value = torch.from_numpy(np.array(value))  # float64 for Python floats: no digit is lost
    value = value.detach().to(device)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return value.to(dtype)
    low, high = _range_of(dtype)
    numbers = value.flatten().tolist()
    ends = {math.inf: high, -math.inf: low}
    bad = [number for number in numbers if not (low <= number <= high or number in ends)]
    if bad:
        raise SpecError(
            f"a bound is {bad[0]}, outside the range of {dtype} ({low} to {high}). "
            "Pass a bound within it, or an infinite one for no bound."
        )
    integers = [int(ends.get(number, number)) for number in numbers]
    return torch.tensor(integers, dtype=dtype, device=device).reshape(value.shape)


def _comparable(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int64) if tensor.dtype in _UNCOMPARED else tensor


def _range_of(dtype: torch.dtype) -> tuple[Any, Any]:
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point or dtype.is_complex:
        return torch.finfo(dtype).min, torch.finfo(dtype).max
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _summary(bound: Tensor) -> str:
    """Write one number for a constant bound and all of a short one."""
    values = bound.flatten().tolist()
    if values and all(value == values[0] for value in values):
        return f"{values[0]}"
    return f"{bound.tolist()}" if len(values) <= 8 else f"tensor in [{min(values)}, {max(values)}]"
