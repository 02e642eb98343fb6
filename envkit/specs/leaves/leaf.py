"""What all specs of a single tensor share: the base class, the domain it shows, and the order of its values.

This module decides how shape, device and dtype of a leaf change, when a value belongs to it and
how raw data becomes a tensor. A kind of leaf adds its domain: `rand` and `_nearest`. The boxes describe a domain for
readers: `spec.space` returns one, and nothing is sampled from it. `coordinates` decides what stands for a value where
torch itself cannot compare it.

Conventions
    contents     tensors of a leaf (bounds, mask) whose leading axes are those of the spec.
    size         shape of the data: the spec's shape with 1 for each dynamic axis.
    coordinates  a tensor in the order of the values, which torch can compare, clamp and pickle:
                 the values themselves where it can. Else int64 for bool, uint16 and uint32; for uint64 the int64 that
                 is 2**63 less; for complex numbers real and imaginary part on a new last axis.
    A value is in the domain exactly if it is its own nearest value there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Generator, Tensor
from torch.compiler import is_compiling

from envkit.errors import EncodingError, NotEnumerableError, SpecError, SpecTypeError
from envkit.specs import shapes
from envkit.specs.annotations import Device, Place, Shape, as_device
from envkit.specs.in_torchrl import register_in_torchrl
from envkit.specs.shapes import Index, ShapeOp, as_shape, data_shape, lead
from envkit.specs.tensor_spec import TensorSpec, checks_values, require_dtype


class LeafSpec(TensorSpec):
    """Describe one tensor. A kind of leaf defines `rand` and `_nearest`."""

    _contents: ClassVar[tuple[str, ...]] = ()
    _caches = ("_memo",)

    _device: torch.device
    _dtype: torch.dtype
    _memo: Callable[[Any], Tensor] | bool = False  # True: record at the next encode

    def __init__(self, shape: Shape, device: Device | None, dtype: torch.dtype):
        register_in_torchrl()
        self._device = as_device(device)
        self._dtype = dtype
        self._set_shape(as_shape(shape))

    # -- assignment --------------------------------------------------------------------

    def _become(self, other: LeafSpec) -> None:
        """Convert this object in place into another spec, of a sister class where the dtype asks for it."""
        self.__class__ = type(other)  # type: ignore[assignment]
        self.__dict__ = other.__getstate__()

    @property
    def shape(self) -> torch.Size:
        """Sizes including the env's batch axes; bounds and masks follow where they can.

        Raises:
            SpecError: bounds or a mask are to be spread that differ along an axis that is no more.
        """
        return self._shape

    @shape.setter
    def shape(self, shape: Shape) -> None:
        self._become(self._of_shape(as_shape(shape)))

    def _of_shape(self, shape: torch.Size) -> Self:
        free = self._without_encoding(shape)
        new = self._map_contents(
            lambda content: _spread(content, self._free_shape, data_shape(free))
        )
        new._set_shape(shape)
        return new

    @property
    def device(self) -> torch.device:
        return self._device

    @device.setter
    def device(self, device: Device) -> None:
        self._become(self.to(device))  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @dtype.setter
    def dtype(self, dtype: torch.dtype) -> None:
        self._become(self.cast(require_dtype(dtype)))  # type: ignore[arg-type]

    @property
    def space(self) -> Any:
        return self._make_space()

    @space.setter
    def space(self, space: object) -> None:
        self._become(self._of_space(space))

    def _make_space(self) -> Any:
        return None

    def _of_space(self, space: object) -> LeafSpec:
        """Make the spec with another domain."""
        if space == self._make_space():
            return self
        raise SpecTypeError(
            f"{type(self).__name__} cannot take the space {space!r}. Make a spec that has it."
        )

    def _set_shape(self, shape: torch.Size) -> None:
        self._shape = shape
        self._size = data_shape(shape)  # of the data: -1 becomes 1
        self._dynamic = -1 in shape

    # -- copies, shape, device, dtype --------------------------------------------------

    def _map_contents(self, op: ShapeOp) -> Self:
        new = self._copy()
        for name in self._contents:
            content = getattr(self, name)
            if content is not None:
                setattr(new, name, op(content))
        return new

    def _map_shape(self, op: ShapeOp) -> Self:
        shape = shapes.shape_after(op, self._shape)
        new = self._map_contents(op)
        new._set_shape(shape)
        return new

    def _with_dynamic(self, axis: int) -> Self:
        new = self._map_shape(Index((*(slice(None),) * axis, slice(0, 1))))
        new._set_shape(shapes.with_dynamic(self._shape, axis))
        return new

    def clone(self) -> Self:
        return self._map_contents(torch.clone)

    def to(self, dest: Place | None) -> TensorSpec:
        if dest is None:
            return self
        if isinstance(dest, torch.dtype):
            return self.cast(dest)
        device = as_device(dest)
        new = self._map_contents(lambda content: content.to(device))
        new._device = device
        return new

    def cast(self, dtype: torch.dtype) -> TensorSpec:
        new = self._copy()
        new._dtype = dtype
        return new

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LeafSpec)
            and self._signature() == other._signature()
            and all(_same(getattr(self, name), getattr(other, name)) for name in self._contents)
        )

    __hash__ = None  # type: ignore[assignment]

    def _signature(self) -> tuple[Any, ...]:
        """All that must agree for two specs to be equal, tensors apart."""
        return type(self), self._shape, self._dtype, self._device

    # -- values ------------------------------------------------------------------------

    def zero(self, shape: Shape = ()) -> Tensor:
        return torch.zeros((*lead(shape), *self._size), dtype=self._dtype, device=self._device)

    def one(self, shape: Shape = ()) -> Tensor:
        return torch.ones((*lead(shape), *self._size), dtype=self._dtype, device=self._device)

    def _nearest(self, value: Tensor) -> Tensor:
        """Return the value of the domain that is nearest; shape and dtype are right already."""
        raise NotImplementedError

    def is_in(self, value: object) -> bool:
        if not isinstance(value, Tensor) or value.dtype != self._dtype:
            return False
        if not self._fits(value.shape):
            return False
        if value.device != self._device:
            return self.to(value.device).is_in(value)
        return torch.equal(value, self._nearest(value))

    def _is_shape(self, shape: Sequence[int]) -> bool:
        """Check whether a shape is the spec's, with no further leading axes."""
        return len(shape) == len(self._shape) and self._fits(shape)

    def _fits(self, shape: Sequence[int]) -> bool:
        """Check whether a shape ends in the spec's shape."""
        extra = len(shape) - len(self._shape)
        if extra < 0:
            return False
        if not self._dynamic:
            return tuple(shape[extra:]) == self._shape
        return all(o in (n, -1) for n, o in zip(shape[extra:], self._shape, strict=True))

    def _complaint(self, value: object) -> str:
        if not isinstance(value, Tensor):
            return f"got {value!r} of type {type(value).__name__}, which is no tensor"
        if value.dtype != self._dtype:
            return f"got dtype {value.dtype}"
        if not self._fits(value.shape):
            return f"got shape {tuple(value.shape)}"
        return f"got {value!r}"

    def project(self, value: Tensor) -> Tensor:
        if not is_compiling() and self.is_in(value):  # a trace has no values to look at
            return value
        _check_is_tensor(value)
        if not self._fits(value.shape):
            raise SpecError(
                f"a value of shape {tuple(value.shape)} cannot be projected: the spec has shape "
                f"{tuple(self._shape)}. Give it these trailing axes first."
            )
        if value.is_floating_point() or value.is_complex():
            value = torch.where(value.isnan(), 0, value)
        spec = self if value.device == self._device else self.to(value.device)
        return spec._nearest(spec._as_own(value))  # type: ignore[attr-defined]

    def _as_own(self, value: Tensor) -> Tensor:
        """Return a value in the spec's dtype, at the end of its range where it lies beyond."""
        return saturated(value, self._dtype)

    # -- conversion --------------------------------------------------------------------

    def encode(self, raw: object, *, ignore_device: bool = False) -> Tensor:
        if callable(self._memo):
            return self._memo(raw)
        value = self._to_tensor(raw, ignore_device)
        shaped = self._to_shape(value)
        if checks_values():
            self.assert_is_in(shaped)
        if self._memo:
            self._memo = self._recording(value.shape != shaped.shape, shaped.shape, ignore_device)
        return shaped

    def _recording(
        self, reshaped: bool, shape: torch.Size, ignore_device: bool
    ) -> Callable[[Any], Tensor]:
        """Make a function that repeats one `encode`."""
        if reshaped:
            return lambda raw: self._to_tensor(raw, ignore_device).reshape(shape)
        return lambda raw: self._to_tensor(raw, ignore_device)

    def _to_tensor(self, raw: object, ignore_device: bool = False) -> Tensor:
        """Make a tensor of the spec's dtype and device that shares no memory with NumPy data."""
        device = None if ignore_device else self._device
        if not isinstance(raw, Tensor):
            raw = _owned(raw, self._dtype)
        elif raw.dtype != self._dtype and raw.device.type == "cpu" and not is_compiling():
            _require_kept(raw, raw.detach().to(self._dtype))
        return raw.to(device=device, dtype=self._dtype)

    def _to_shape(self, value: Tensor) -> Tensor:
        if self._is_shape(value.shape):
            return value
        if value.numel() == self._size.numel():
            return value.reshape(self._size)
        raise EncodingError(
            f"a value of shape {tuple(value.shape)} has {value.numel()} elements and does not fit "
            f"{type(self).__name__} of shape {tuple(self.shape)}. Pass {self._size.numel()} "
            "elements, or expand the spec to the batch first."
        )

    def memoize_encode(self, mode: bool = True) -> None:
        self._memo = mode

    def erase_memoize_cache(self) -> None:
        self._memo = bool(self._memo)

    def to_numpy(self, value: Tensor, safe: bool | None = None) -> np.ndarray:
        self._check_if_safe(value, safe)
        _check_is_tensor(value)
        if value.dtype == torch.bfloat16:  # NumPy has no such dtype
            value = value.float()
        return value.detach().cpu().numpy()


def _check_is_tensor(value: object) -> None:
    if not isinstance(value, Tensor):
        raise SpecTypeError(
            f"got {value!r} of type {type(value).__name__}, which is no tensor. "
            "Turn raw data into a value with `spec.encode` first."
        )


def _owned(raw: object, dtype: torch.dtype) -> Tensor:
    """Copy numbers, arrays and lists of either (or of tensors) into a new CPU tensor."""
    if isinstance(raw, (list, tuple)) and any(isinstance(item, Tensor) for item in raw):
        return torch.stack([torch.as_tensor(item) for item in raw])
    if raw is None:  # which NumPy writes as NaN
        raise EncodingError("None is no number. Pass one, an array, or a list of one shape.")
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what is lost is an error below
            array = np.array(raw, dtype=_NUMPY_DTYPES.get(dtype))
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodingError(
            f"{raw!r} of type {type(raw).__name__} cannot become a tensor of {dtype}: {error}. "
            "Pass numbers, arrays, or lists of one shape."
        ) from error
    if getattr(raw, "dtype", None) != array.dtype and type(raw) not in (int, bool):
        original = np.asarray(raw)
        if original.dtype != array.dtype and original.dtype.kind in "biufc":
            _require_kept(original, array)
    return torch.from_numpy(array)


def _require_kept(original: Any, cast: Any) -> None:
    """Check that a cast kept what was given, apart from the rounding of floats.

    Args:
        given, made: two arrays, or two tensors on the CPU, of one shape.

    Raises:
        EncodingError: a number left the range of the dtype, a fraction or NaN became an integer.
    """
    if _is_inexact(cast):
        lost = (abs(cast) == float("inf")) & (abs(original) != float("inf"))
    else:
        back = (
            cast.astype(original.dtype) if isinstance(cast, np.ndarray) else cast.to(original.dtype)
        )
        lost = (back != original) | ((cast < 0) != (original < 0))
    if lost.any():
        first = original[lost].reshape(-1)[0].item()
        raise EncodingError(
            f"{first!r} of dtype {original.dtype} would be {cast[lost].reshape(-1)[0].item()!r} in {cast.dtype}. "
            "Pass numbers that the dtype of the spec holds, e.g. by rounding or clipping them first."
        )


def _is_inexact(values: Any) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind in "fc"
    return values.dtype.is_floating_point or values.dtype.is_complex


_NUMPY_DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


def _spread(content: Tensor, shape: torch.Size, sizes: torch.Size) -> Tensor:
    """Expand or reduce a tensor with leading axes ``shape`` to the leading axes ``sizes``, if that loses nothing."""
    rest = content.shape[len(shape) :]
    first = content[(slice(0, 1),) * len(shape)]
    if content.numel() and bool((content == first).all()):
        content = first.reshape(rest)
    try:
        return content.expand((*sizes, *rest))
    except RuntimeError as error:
        raise SpecError(
            f"a spec of shape {tuple(shape)} whose bounds or mask differ along it cannot take the shape "
            f"{tuple(sizes)}. Assign its `space` or mask first, or make a new spec."
        ) from error


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.is_meta or b.is_meta:  # without values
        return a.is_meta and b.is_meta and a.shape == b.shape
    return torch.equal(a, b)


class ContinuousBox:
    """Hold the bounds of a closed box; ``low`` and ``high`` have the shape of the spec.

    Args:
        low: lower bounds.
        high: upper bounds.
        assigned: called with the box when another bound is assigned to it.

    Example:
        >>> from envkit import Bounded
        >>> box = Bounded(-1.0, 2.0, shape=(2,)).space
        >>> box.low, box.high
        (tensor([-1., -1.]), tensor([2., 2.]))
    """

    def __init__(
        self, low: Tensor, high: Tensor, assigned: Callable[[ContinuousBox], Any] | None = None
    ):
        self._low, self._high, self._assigned = low, high, assigned

    @property
    def low(self) -> Tensor:
        return self._low

    @low.setter
    def low(self, low: Tensor) -> None:
        self._assign(low, self._high)

    @property
    def high(self) -> Tensor:
        return self._high

    @high.setter
    def high(self, high: Tensor) -> None:
        self._assign(self._low, high)

    def _assign(self, low: Tensor, high: Tensor) -> None:
        if self._assigned is not None:
            self._assigned(ContinuousBox(low, high))
        self._low, self._high = low, high

    def __repr__(self) -> str:
        return f"ContinuousBox(low={self._low}, high={self._high})"

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.low, self.high))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ContinuousBox)
            and torch.equal(self.low, other.low)
            and torch.equal(self.high, other.high)
        )

    def to(self, destination: Place) -> ContinuousBox:
        """Move or cast both bounds."""
        return ContinuousBox(self.low.to(destination), self.high.to(destination))

    def clone(self) -> ContinuousBox:
        """Copy both bounds."""
        return ContinuousBox(self.low.clone(), self.high.clone())


class _Counted:
    """A box that holds numbers only: it is nowhere, and its copy is itself."""

    def to(self, destination: Place) -> Self:
        """Return the box itself; there is nothing to move."""
        return self

    def clone(self) -> Self:
        """Return the box itself; it cannot be changed."""
        return self


@dataclass(frozen=True)
class CategoricalBox(_Counted):
    """Hold the number of options of one choice.

    Args:
        n: number of options.

    Example:
        >>> from envkit import Categorical
        >>> Categorical(4).space
        CategoricalBox(n=4)
    """

    n: int


DiscreteBox = CategoricalBox


@dataclass(frozen=True)
class BinaryBox(_Counted):
    """Hold the number of 0/1 entries.

    Args:
        n: number of entries.

    Example:
        >>> from envkit import Binary
        >>> Binary(4).space
        BinaryBox(n=4)
    """

    n: int


@dataclass(frozen=True)
class BoxList:
    """Hold one box per sub-action, or per member of a stack.

    Args:
        boxes: the boxes, in order.

    Example:
        >>> from envkit import MultiCategorical
        >>> MultiCategorical([3, 2]).space
        BoxList(boxes=(CategoricalBox(n=3), CategoricalBox(n=2)))
    """

    boxes: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.boxes)

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: int) -> Any:
        return self.boxes[index]

    @staticmethod
    def from_nvec(nvec: int | Sequence[Any] | Tensor) -> BoxList | CategoricalBox:
        """Make a box of each number of options, nested as the numbers are.

        Args:
            nvec: a number, or a tensor or (nested) list of numbers.
        """
        numbers = nvec.tolist() if isinstance(nvec, Tensor) else nvec
        if isinstance(numbers, int):
            return CategoricalBox(numbers)
        return BoxList(tuple(BoxList.from_nvec(number) for number in numbers))

    def to(self, destination: Place) -> BoxList:
        """Move or cast all boxes."""
        return BoxList(tuple(box.to(destination) for box in self.boxes))

    def clone(self) -> BoxList:
        """Copy all boxes."""
        return BoxList(tuple(box.clone() for box in self.boxes))


_AS_INT64 = frozenset((torch.bool, torch.uint16, torch.uint32))
_CODED = _AS_INT64 | {torch.uint64, torch.complex32, torch.complex64, torch.complex128}
_HALF = 2**63
_MOST_LISTED = 2**31  # rows; more would fill the memory of any machine


def coordinates(values: Tensor) -> Tensor:
    """Return the coordinates of values of any dtype."""
    if values.dtype not in _CODED:
        return values
    if values.dtype in _AS_INT64:
        return values.to(torch.int64)
    if values.dtype == torch.uint64:
        return values.view(torch.int64) ^ -_HALF
    return torch.view_as_real(values)


def from_coordinates(coords: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of ``dtype`` that have these coordinates."""
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
    """Return the least and the greatest finite value of a dtype, as Python numbers."""
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
