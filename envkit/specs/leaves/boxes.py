"""Leaves whose domain is a box: bounded, unbounded and binary tensors.

This module decides which class a dtype selects, how a box is sampled and what lies in it.
Bounds are stored as coordinates (see `order`), expanded to the spec's shape, so that every shape
operation applies to them. A complex box bounds real and imaginary parts, each on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor
from torch.compiler import is_compiling

from envkit.errors import SpecError
from envkit.specs.annotations import Device, Numbers, Shape
from envkit.specs.base import TensorSpec, as_device, require_dtype
from envkit.specs.leaves.bounds import bound_of, is_constant, summary
from envkit.specs.leaves.leaf import LeafSpec
from envkit.specs.leaves.order import (
    coordinates,
    digits,
    from_coordinates,
    range_of,
    uniform_integers,
)
from envkit.specs.leaves.spaces import BinaryBox, ContinuousBox
from envkit.specs.shapes import as_shape, known, lead

__all__ = [
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
]


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
        return from_coordinates(self._low, self._dtype)

    @property
    def high(self) -> Tensor:
        """Upper bounds, of the spec's shape."""
        return from_coordinates(self._high, self._dtype)

    @property
    def space(self) -> ContinuousBox | BinaryBox:
        return ContinuousBox(self.low, self.high)

    def _facts(self) -> dict[str, Any]:
        return {"low": summary(self.low), "high": summary(self.high)}

    def _nearest(self, value: Tensor) -> Tensor:
        return from_coordinates(coordinates(value).clamp(self._low, self._high), self._dtype)


class _IntegerBox(_Box):
    """A closed box of integers, which can be counted."""

    domain = "discrete"

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        if self._sampler is None:
            self._sampler = self._make_sampler()
        return self._sampler((*lead(shape), *self._size), generator)

    def _make_sampler(self) -> Callable[[tuple[int, ...], Generator | None], Tensor]:
        """Prepare uniform integers: from two numbers if the box is a cube, else from counts."""
        if is_constant(self._low) and is_constant(self._high):
            [low], [high] = (end.flatten()[:1].tolist() or [0] for end in (self.low, self.high))
            return lambda size, generator: uniform_integers(
                low, high, size, dtype=self._dtype, device=self._device, generator=generator
            )
        least = self._low.to(torch.int64)
        counts = self._counts()

        def draw(size: tuple[int, ...], generator: Generator | None) -> Tensor:
            number = torch.empty(size, dtype=torch.int64, device=self._device)
            offset = number.random_(generator=generator) % counts
            return from_coordinates(least + offset, self._dtype)

        return draw

    def _counts(self) -> Tensor:
        """Count the integers of each entry; 2**63 and more count as one less than that."""
        counts = self._high.to(torch.int64) - self._low.to(torch.int64) + 1
        return torch.where(counts > 0, counts, torch.iinfo(torch.int64).max)

    def enumerate(self, use_mask: bool = False) -> Tensor:
        return from_coordinates(digits(self._counts()) + self._low.to(torch.int64), self._dtype)

    def cardinality(self) -> int:
        pairs = zip(self.low.flatten().tolist(), self.high.flatten().tolist(), strict=True)
        return math.prod(int(high) - int(low) + 1 for low, high in pairs)


class Bounded(_Box):
    """Describe a tensor within a closed box ``[low, high]``, elementwise.

    The result is a `BoundedContinuous` for floating dtypes and a `BoundedDiscrete` otherwise.

    Args:
        low: lower bound, a number or array that broadcasts to ``shape``; complex numbers bound
            real and imaginary part, each on its own.
        high: upper bound, likewise; not below ``low``.
        shape: sizes of the tensor; the broadcast shape of the bounds by default.
        device: where values are made, ``cpu`` by default.
        dtype: the default float dtype if not given (int64 with ``domain="discrete"``).
        domain: ``"continuous"`` or ``"discrete"``; follows from the dtype.

    Raises:
        SpecError: bounds that do not broadcast to ``shape`` or are reversed or do not exist in
            the dtype, or a domain that contradicts the dtype.
    """

    if not TYPE_CHECKING:  # which would take its result for the type of what is made

        def __new__(cls, low=None, high=None, shape=None, device=None, dtype=None, *, domain=None):
            if cls is not Bounded:
                return object.__new__(cls)
            continuous = _is_continuous(dtype, domain)
            return object.__new__(BoundedContinuous if continuous else BoundedDiscrete)

    def __init__(
        self,
        low: Numbers,
        high: Numbers,
        shape: Shape | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        *,
        domain: str | None = None,
    ):
        dtype = _checked_dtype(self, dtype, domain)
        device = as_device(device)
        low, high = bound_of(low, dtype, device), bound_of(high, dtype, device)
        try:
            if shape is None:
                shape = torch.broadcast_shapes(low.shape, high.shape)
            size = known(as_shape(shape))
            self._low, self._high = (coordinates(bound.expand(size)) for bound in (low, high))
        except RuntimeError as error:
            raise SpecError(
                f"bounds of shapes {tuple(low.shape)} and {tuple(high.shape)} do not broadcast to "
                f"shape {shape}. Pass numbers, or arrays of the spec's shape."
            ) from error
        if not bool((self._low <= self._high).all()):
            raise SpecError(
                f"low={summary(low)} is not below high={summary(high)} everywhere. "
                "Exchange the bounds, and let none be NaN."
            )
        super().__init__(shape, device, dtype)

    def cast(self, dtype: torch.dtype) -> TensorSpec:
        return Bounded(self.low, self.high, self._shape, self._device, dtype)


class BoundedContinuous(Bounded):
    """Describe a floating-point tensor within a closed box; see `Bounded`."""

    domain = "continuous"

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        low, scale, factor = self._scales()
        unit = torch.rand(
            (*lead(shape), *low.shape), generator=generator, dtype=low.dtype, device=self._device
        )
        value = torch.addcmul(low, unit, scale)
        return from_coordinates(value if factor is None else value.mul_(factor), self._dtype)

    def _scales(self) -> tuple[Tensor, Tensor, Tensor | None]:
        if is_compiling():  # a trace has no values to look at, and none to keep
            return _float_sampler(self._low, self._high)
        if self._sampler is None:
            low, scale, factor = _float_sampler(self._low, self._high)
            self._sampler = low, scale, factor if bool((factor != 1).any()) else None
        return self._sampler


def _float_sampler(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare ``(low + unit * scale) * factor``, which no rounding carries above ``high``.

    The difference of two floats is rounded by half a unit in its last place at most, so one unit less
    is not above it.
    """
    info = torch.finfo(low.dtype)
    low, high = low.clamp(info.min, info.max), high.clamp(info.min, info.max)
    wide = (high - low).isinf()
    halved = torch.where(wide, 0.5, 1.0).to(low.dtype)
    low, high = low * halved, high * halved
    scale = high - low
    scale = torch.where(low + scale > high, scale * (1 - info.eps), scale)
    return low, scale, 1 / halved


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

    if not TYPE_CHECKING:  # which would take its result for the type of what is made

        def __new__(cls, shape=(1,), device=None, dtype=None, *, domain=None):
            if cls is not Unbounded:
                return object.__new__(cls)
            continuous = _is_continuous(dtype, domain)
            return object.__new__(UnboundedContinuous if continuous else UnboundedDiscrete)

    def __init__(
        self,
        shape: Shape = (1,),
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        *,
        domain: str | None = None,
    ):
        super().__init__(shape, device, _checked_dtype(self, dtype, domain))

    @property
    def space(self) -> ContinuousBox:
        low, high = range_of(self._dtype)
        make = {"size": tuple(self._size), "dtype": self._dtype, "device": self._device}
        return ContinuousBox(
            torch.full(fill_value=low, **make), torch.full(fill_value=high, **make)
        )

    def cast(self, dtype: torch.dtype) -> TensorSpec:
        return Unbounded(self._shape, self._device, dtype)

    def is_in(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.dtype == self._dtype and self._fits(value.shape)

    def project(self, value: Tensor) -> Tensor:
        return value if self.is_in(value) else super().project(value)

    def _nearest(self, value: Tensor) -> Tensor:
        return value


class UnboundedContinuous(Unbounded):
    """Describe a floating-point tensor of any value; see `Unbounded`."""

    domain = "continuous"

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        return torch.randn(
            (*lead(shape), *self._size), generator=generator, dtype=self._dtype, device=self._device
        )


class UnboundedDiscrete(Unbounded):
    """Describe an integer or boolean tensor of any value; see `Unbounded`."""

    domain = "discrete"

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        return uniform_integers(
            *range_of(self._dtype),
            (*lead(shape), *self._size),
            dtype=self._dtype,
            device=self._device,
            generator=generator,
        )


class Binary(_IntegerBox):
    """Describe a tensor of zeros and ones.

    Args:
        n: size of the last axis; the last size of ``shape`` if not given.
        shape: sizes of the tensor, ``(n,)`` by default.
        device: where values are made, ``cpu`` by default.
        dtype: int8 by default.

    Raises:
        SpecError: neither ``n`` nor ``shape`` is given, they contradict each other, or the dtype
            is complex.
    """

    def __init__(
        self,
        n: int | None = None,
        shape: Shape | None = None,
        device: Device | None = None,
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
        if require_dtype(dtype).is_complex:
            raise SpecError(f"Binary got dtype {dtype}. Pass a real one, for example torch.int8.")
        super().__init__(shape, device, dtype)
        low, high = coordinates(torch.tensor([0, 1], device=self._device).to(dtype))
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

    def cast(self, dtype: torch.dtype) -> TensorSpec:
        return Binary(shape=self._shape, device=self._device, dtype=dtype)

    def _nearest(self, value: Tensor) -> Tensor:
        nearest = super()._nearest(value)
        return nearest.round() if nearest.is_floating_point() else nearest


def _is_continuous(dtype: torch.dtype | None, domain: str | None) -> bool:
    if domain not in (None, "continuous", "discrete"):
        raise SpecError(f"domain is {domain!r}. Pass 'continuous', 'discrete' or leave it out.")
    if dtype is None:
        return domain != "discrete"
    continuous = require_dtype(dtype).is_floating_point or dtype.is_complex
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
