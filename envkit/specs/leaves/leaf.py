"""What all specs of a single tensor share.

This module decides how shape, device and dtype of a leaf change, when a value belongs to it and
how raw data becomes a tensor. A kind of leaf adds its domain: `rand` and `_nearest`.

Conventions
    contents   tensors of a leaf (bounds, mask) whose leading axes are those of the spec.
    size       shape of the data: the spec's shape with 1 for each dynamic axis.
    A value is in the domain exactly if it is its own nearest value there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from envkit.errors import EncodingError, SpecError, SpecTypeError
from envkit.specs import shapes
from envkit.specs.annotations import Device, Place, Shape
from envkit.specs.base import TensorSpec, checks_values, require_dtype
from envkit.specs.devices import as_device
from envkit.specs.leaves.order import saturated
from envkit.specs.shapes import Index, ShapeOp, as_shape, known, lead

__all__ = ["LeafSpec"]


class LeafSpec(TensorSpec):
    """Describe one tensor. A kind of leaf defines `rand` and `_nearest`."""

    _contents: ClassVar[tuple[str, ...]] = ()
    _caches = ("_memo",)

    _device: torch.device
    _dtype: torch.dtype
    _memo: Callable[[Any], Tensor] | bool = False  # True: record at the next encode

    def __init__(self, shape: Shape, device: Device | None, dtype: torch.dtype):
        self._device = as_device(device)
        self._dtype = dtype
        self._set_shape(as_shape(shape))

    # -- assignment --------------------------------------------------------------------

    def _become(self, other: LeafSpec) -> None:
        """Turn this very object into another spec, of a sister class where the dtype asks for it."""
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
        new = self._map_contents(lambda content: _spread(content, self._free_shape, known(free)))
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
    def space(self, space: Any) -> None:
        self._become(self._of_space(space))

    def _make_space(self) -> Any:
        return None

    def _of_space(self, space: Any) -> LeafSpec:
        """Make the spec with another domain."""
        if space == self._make_space():
            return self
        raise SpecTypeError(
            f"{type(self).__name__} cannot take the space {space!r}. Make a spec that has it."
        )

    def _set_shape(self, shape: torch.Size) -> None:
        self._shape = shape
        self._size = known(shape)  # of the data: -1 becomes 1
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
        """Give the value of the domain that is nearest; shape and dtype are right already."""
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
        """Tell whether a shape is the spec's, with no further leading axes."""
        return len(shape) == len(self._shape) and self._fits(shape)

    def _fits(self, shape: Sequence[int]) -> bool:
        """Tell whether a shape ends in the spec's shape."""
        extra = len(shape) - len(self._shape)
        if extra < 0:
            return False
        if not self._dynamic:
            return tuple(shape[extra:]) == self._shape
        return all(o in (n, -1) for n, o in zip(shape[extra:], self._shape, strict=True))

    def _complaint(self, value: Any) -> str:
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
        """Give a value in the spec's dtype, at the end of its range where it lies beyond."""
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

    def _to_tensor(self, raw: Any, ignore_device: bool = False) -> Tensor:
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


def _check_is_tensor(value: Any) -> None:
    if not isinstance(value, Tensor):
        raise SpecTypeError(
            f"got {value!r} of type {type(value).__name__}, which is no tensor. "
            "Turn raw data into a value with `spec.encode` first."
        )


def _owned(raw: Any, dtype: torch.dtype) -> Tensor:
    """Copy numbers, arrays and lists of either (or of tensors) into a new CPU tensor."""
    if isinstance(raw, (list, tuple)) and any(isinstance(item, Tensor) for item in raw):
        return torch.stack([torch.as_tensor(item) for item in raw])
    if raw is None:  # which NumPy writes as NaN
        raise EncodingError("None is no number. Pass one, an array, or a list of one shape.")
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what is lost is an error below
            made = np.array(raw, dtype=_NUMPY_DTYPES.get(dtype))
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodingError(
            f"{raw!r} of type {type(raw).__name__} cannot become a tensor of {dtype}: {error}. "
            "Pass numbers, arrays, or lists of one shape."
        ) from error
    if getattr(raw, "dtype", None) != made.dtype and type(raw) not in (int, bool):
        given = np.asarray(raw)
        if given.dtype != made.dtype and given.dtype.kind in "biufc":
            _require_kept(given, made)
    return torch.from_numpy(made)


def _require_kept(given: Any, made: Any) -> None:
    """Check that a cast kept what was given, apart from the rounding of floats.

    Args:
        given, made: two arrays, or two tensors on the CPU, of one shape.

    Raises:
        EncodingError: a number left the range of the dtype, a fraction or NaN became an integer.
    """
    if _is_inexact(made):
        lost = (abs(made) == float("inf")) & (abs(given) != float("inf"))
    else:
        back = made.astype(given.dtype) if isinstance(made, np.ndarray) else made.to(given.dtype)
        lost = (back != given) | ((made < 0) != (given < 0))
    if lost.any():
        first = given[lost].reshape(-1)[0].item()
        raise EncodingError(
            f"{first!r} of dtype {given.dtype} would be {made[lost].reshape(-1)[0].item()!r} in {made.dtype}. "
            "Pass numbers that the dtype of the spec holds, e.g. by rounding or clipping them first."
        )


def _is_inexact(values: Any) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind in "fc"
    return values.dtype.is_floating_point or values.dtype.is_complex


_NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}


def _spread(content: Tensor, shape: torch.Size, sizes: torch.Size) -> Tensor:
    """Give a tensor with leading axes ``shape`` the leading axes ``sizes``, if that loses nothing."""
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
