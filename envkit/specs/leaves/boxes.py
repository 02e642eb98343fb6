"""Leaves whose domain is a box: bounded, unbounded and binary tensors.

This module decides which class a dtype selects, how bounds are made, held, changed and shown, and what is drawn
between them. Bounds are stored as coordinates (see `order`), expanded to the spec's shape, so that every shape
operation applies to them. A complex box bounds real and imaginary parts, each on its own. A bound that the dtype
cannot hold is refused; an infinite one of integers is the end of their range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Generator, Tensor
from torch.compiler import is_compiling

from envkit.errors import SpecError
from envkit.specs.annotations import Device, Numbers, Shape, as_device, require_numbers
from envkit.specs.lasting import is_traced, lasting
from envkit.specs.leaves.leaf import (
    BinaryBox,
    ContinuousBox,
    LeafSpec,
    coordinates,
    digits,
    from_coordinates,
    range_of,
    uniform_integers,
)
from envkit.specs.shapes import as_shape, data_shape, lead
from envkit.specs.tensor_spec import TensorSpec, require_dtype


def _bound_of(value: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
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
                f"a bound is {_summary(value)}, which no {dtype} is. Pass real bounds, or a "
                "complex dtype."
            )
        value = value.real
    return value.to(dtype)


def _integerbound_of(value: object, dtype: torch.dtype, device: torch.device) -> Tensor:
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


def _is_constant(bound: Tensor) -> bool:
    """Check whether all numbers of a bound are equal."""
    return bound.numel() == 0 or bool((bound == bound.flatten()[0]).all())


def _summary(bound: Tensor) -> str:
    """Write one number for a constant bound and all of a short one."""
    if bound.is_meta:
        return "unknown"
    values = bound.flatten().tolist()
    if values and all(value == values[0] for value in values):
        return f"{values[0]}"
    if len(values) <= 8 or bound.is_complex():
        return f"{bound.tolist()}" if len(values) <= 8 else f"tensor of {len(values)} numbers"
    return f"tensor in [{min(values)}, {max(values)}]"


class _Box(LeafSpec):
    """A closed box, elementwise."""

    _contents = ("_low", "_high")
    _caches = (*LeafSpec._caches, "_sampler", "_owns_bounds")

    _low: Tensor
    _high: Tensor
    _sampler: tuple[Any, Any] | None = None  # for how many writes into the bounds, and what
    _owns_bounds: bool = False

    @property
    def low(self) -> Tensor:
        """Lower bounds, of the spec's shape; writing into them changes the spec."""
        return self._handed_out()[0]

    @property
    def high(self) -> Tensor:
        """Upper bounds, of the spec's shape; writing into them changes the spec."""
        return self._handed_out()[1]

    def _make_space(self) -> ContinuousBox | BinaryBox:
        return ContinuousBox(*self._handed_out(), self._take_space)

    def _take_space(self, space: ContinuousBox) -> None:
        self.space = space

    def _bounds(self) -> tuple[Tensor, Tensor]:
        """The bounds, to be read only: entries may share memory."""
        low, high = self._low, self._high
        return from_coordinates(low, self._dtype), from_coordinates(high, self._dtype)

    def _handed_out(self) -> tuple[Tensor, Tensor]:
        """The bounds in memory of this spec's own, so that writing changes one entry of one spec.

        Those of dtypes that have their own coordinates are copies (bool, unsigned beyond a byte).
        """
        if not self._owns_bounds and not is_traced():
            with lasting():
                self._low, self._high = self._low.clone(), self._high.clone()
            self._owns_bounds, self._sampler = True, None
        return self._bounds()

    def _prepared(self, make: Callable[[], Any]) -> Any:
        """Values that drawing needs of the bounds, made again once someone has written into them."""
        written = _writes_into(self._low), _writes_into(self._high)
        if self._sampler is not None and self._sampler[0] == written:
            return self._sampler[1]
        if is_traced():
            return make()
        with lasting():
            self._sampler = written, make()
        return self._sampler[1]

    def _facts(self) -> dict[str, Any]:
        low, high = self._bounds()
        return {"low": _summary(low), "high": _summary(high)}

    def _nearest(self, value: Tensor) -> Tensor:
        return from_coordinates(coordinates(value).clamp(self._low, self._high), self._dtype)


class _IntegerBox(_Box):
    """A closed box of integers, which can be counted."""

    domain = "discrete"

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        sampler = self._prepared(self._make_sampler)
        return sampler((*lead(shape), *self._size), generator)

    def _make_sampler(self) -> Callable[[tuple[int, ...], Generator | None], Tensor]:
        """Prepare uniform integers: from two numbers if the box is a cube, else from counts."""
        if _is_constant(self._low) and _is_constant(self._high):
            [low], [high] = (end.flatten()[:1].tolist() or [0] for end in self._bounds())
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
        pairs = zip(*(end.flatten().tolist() for end in self._bounds()), strict=True)
        return math.prod(int(high) - int(low) + 1 for low, high in pairs)


def _writes_into(bound: Tensor) -> int:
    """Count the writes into a tensor; those of inference mode are not counted by torch."""
    return 0 if bound.is_inference() else bound._version


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
        ArgumentError: (a ValueError) the meta device, which holds no bounds.

    Example:
        >>> import torch
        >>> from envkit import Bounded
        >>> spec = Bounded(low=-1.0, high=1.0, shape=(3,))
        >>> spec.is_in(torch.tensor([0.0, 0.5, 2.0]))
        False
        >>> spec.project(torch.tensor([0.0, 0.5, 2.0]))
        tensor([0.0000, 0.5000, 1.0000])
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
        require_numbers(device, self, low, high)
        low, high = _bound_of(low, dtype, device), _bound_of(high, dtype, device)
        try:
            if shape is None:
                shape = torch.broadcast_shapes(low.shape, high.shape)
            size = data_shape(as_shape(shape))
            self._low, self._high = (coordinates(bound.expand(size)) for bound in (low, high))
        except RuntimeError as error:
            raise SpecError(
                f"bounds of shapes {tuple(low.shape)} and {tuple(high.shape)} do not broadcast to "
                f"shape {shape}. Pass numbers, or arrays of the spec's shape."
            ) from error
        if not bool((self._low <= self._high).all()):
            raise SpecError(
                f"low={_summary(low)} is not below high={_summary(high)} everywhere. "
                "Exchange the bounds, and let none be NaN."
            )
        super().__init__(shape, device, dtype)

    def cast(self, dtype: torch.dtype) -> TensorSpec:
        return Bounded(*self._bounds(), self._shape, self._device, dtype)

    def _of_space(self, space: object) -> LeafSpec:
        if not isinstance(space, ContinuousBox):
            return super()._of_space(space)
        return Bounded(space.low, space.high, self._shape, self._device, self._dtype)

    def _register_batch_size(self, batch_size: Shape) -> None:
        """Ignore the batch size: TorchRL's composite calls this on each box that it takes in."""


class BoundedContinuous(Bounded):
    """Describe a floating-point tensor within a closed box; see `Bounded`.

    Example:
        >>> from envkit import Bounded, BoundedContinuous
        >>> spec = Bounded(-1.0, 1.0, shape=(2,))
        >>> isinstance(spec, BoundedContinuous), spec.dtype
        (True, torch.float32)
    """

    domain = "continuous"

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        """Draw uniformly; from a Gaussian where no bound is finite, from an exponential where one is.

        Source: gymnasium.spaces.Box.sample.
        """
        low, scale, factor, has_tails = self._scales()
        unit = torch.rand(
            (*lead(shape), *low.shape), generator=generator, dtype=low.dtype, device=self._device
        )
        value = torch.addcmul(low, unit, scale)
        value = value if factor is None else value.mul_(factor)
        if has_tails:
            value = self._with_tails(value, generator)
        return from_coordinates(value, self._dtype)

    @property
    def has_tails(self) -> bool:
        """Whether a bound is infinite."""
        return self._scales()[3]

    def _with_tails(self, value: Tensor, generator: Generator | None) -> Tensor:
        """Draw again where a bound is infinite."""
        open_low, open_high = self._low.isinf(), self._high.isinf()
        tail = torch.empty_like(value).exponential_(generator=generator)
        free = torch.empty_like(value).normal_(generator=generator)
        value = torch.where(open_high & ~open_low, self._low + tail, value)
        value = torch.where(open_low & ~open_high, self._high - tail, value)
        return torch.where(open_low & open_high, free, value)

    def _scales(self) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        if is_compiling():  # a trace has no values to look at, and none to keep
            return *_float_sampler(self._low, self._high), False
        return self._prepared(self._make_scales)

    def _make_scales(self) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        low, scale, factor = _float_sampler(self._low, self._high)
        has_tails = bool((self._low.isinf() | self._high.isinf()).any())
        return low, scale, factor if bool((factor != 1).any()) else None, has_tails


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
    """Describe an integer tensor within a closed box; see `Bounded`.

    Example:
        >>> import torch
        >>> from envkit import Bounded, BoundedDiscrete
        >>> spec = Bounded(0, 255, shape=(3, 64, 64), dtype=torch.uint8)
        >>> isinstance(spec, BoundedDiscrete), spec.rand().dtype
        (True, torch.uint8)
    """

    domain = "discrete"


class Unbounded(LeafSpec):
    """Describe a tensor that may take any value of its dtype.

    The result is an `UnboundedContinuous` for floating dtypes and an `UnboundedDiscrete`
    otherwise, whichever of the three was called.

    Args:
        shape: sizes of the tensor.
        device: where values are made, ``cpu`` by default.
        dtype: the default float dtype if not given (int64 with ``domain="discrete"``).
        domain: ``"continuous"`` or ``"discrete"``; follows from the dtype.

    Raises:
        SpecError: a domain that contradicts the dtype.

    Example:
        >>> from envkit import Unbounded
        >>> spec = Unbounded(shape=(2, 3))
        >>> spec.zero().shape, spec.dtype
        (torch.Size([2, 3]), torch.float32)
    """

    if not TYPE_CHECKING:  # which would take its result for the type of what is made

        def __new__(cls, shape=(1,), device=None, dtype=None, *, domain=None):
            if cls is Unbounded or dtype is not None:
                continuous = _is_continuous(dtype, domain)
                kind = UnboundedContinuous if continuous else UnboundedDiscrete
                if not issubclass(kind, cls) and not issubclass(cls, kind):
                    return kind(shape, device, dtype)  # the sister that the dtype asks for
                return object.__new__(kind if cls is Unbounded else cls)
            return object.__new__(cls)

    def __init__(
        self,
        shape: Shape = (1,),
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        *,
        domain: str | None = None,
    ):
        super().__init__(shape, device, _checked_dtype(self, dtype, domain))

    def _make_space(self) -> ContinuousBox:
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
    """Describe a floating-point tensor of any value; see `Unbounded`.

    Example:
        >>> from envkit import Unbounded, UnboundedContinuous
        >>> spec = Unbounded(shape=(3,))
        >>> isinstance(spec, UnboundedContinuous), spec.dtype
        (True, torch.float32)
    """

    domain = "continuous"

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        return torch.randn(
            (*lead(shape), *self._size), generator=generator, dtype=self._dtype, device=self._device
        )


class UnboundedDiscrete(Unbounded):
    """Describe an integer or boolean tensor of any value; see `Unbounded`.

    Example:
        >>> import torch
        >>> from envkit import Unbounded, UnboundedDiscrete
        >>> spec = Unbounded(shape=(3,), dtype=torch.int64)
        >>> isinstance(spec, UnboundedDiscrete), spec.zero()
        (True, tensor([0, 0, 0]))
    """

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

    Example:
        >>> import torch
        >>> from envkit import Binary
        >>> spec = Binary(4)
        >>> spec.zero()
        tensor([0, 0, 0, 0], dtype=torch.int8)
        >>> spec.is_in(torch.tensor([0, 1, 1, 0], dtype=torch.int8))
        True
        >>> spec.is_in(torch.tensor([0, 1, 2, 0], dtype=torch.int8))
        False
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

    def _make_space(self) -> BinaryBox:
        return BinaryBox(self.n)

    def _of_shape(self, shape: torch.Size) -> Self:
        if shape[-1:] != self._shape[-1:]:
            raise SpecError(
                f"Binary of {self.n} entries got shape {tuple(shape)}. Keep the last size, or make a new one."
            )
        return super()._of_shape(shape)

    def _select(self, axis: int, index: Tensor) -> Self:
        if axis == self.ndim - 1:
            raise self._encodes(f"index_select along axis {axis}")
        return super()._select(axis, index)

    def enumerate(self, use_mask: bool = False) -> Tensor:
        bits = digits(torch.full(self._size[-1:], 2, device=self._device))
        rows = bits[(slice(None), *(None,) * len(self._size[:-1]))]
        return rows.expand(len(bits), *self._size).to(self._dtype).contiguous()

    def cardinality(self) -> int:
        return 2**self.n

    def _facts(self) -> dict[str, Any]:
        return {}

    def cast(self, dtype: torch.dtype) -> TensorSpec:
        return Binary(shape=self._shape, device=self._device, dtype=dtype)

    def _nearest(self, value: Tensor) -> Tensor:
        nearest = super()._nearest(value)
        return nearest.round() if nearest.is_floating_point() else nearest


def _is_continuous(dtype: torch.dtype | None, domain: str | None) -> bool:
    if domain not in (None, "continuous", "discrete"):
        raise SpecError(
            f"domain is {domain!r}, but must be 'continuous' or 'discrete'. Pass one of them, or leave it out."
        )
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
