"""What every spec can do: be reshaped, moved, sampled, tested, converted and shown.

This module decides the public calls of a spec that do not depend on its domain. These are the shape operations that
a tensor has too, device, dtype, the membership test, encoding, and how a spec is shown. A kind of spec adds its
domain, `rand` and `_nearest`, and `_map_shape`, by which it applies a shape operation to all it holds. It knows no
composite and no stack: what torch's functions make of specs is registered by the package (`on_torch_function`).

A spec is a value: all calls but `update_mask` and the edits of a composite return a new one.

Conventions
    encoding   trailing axes that spell one value (a one-hot row); shape operations leave them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor

from envkit.arrays.elementwise import dtype_name
from envkit.errors import (
    ArgumentTypeError,
    NoChoiceError,
    NotEnumerableError,
    OutOfSpecError,
    SpecAxisError,
    SpecTypeError,
)
from envkit.specs import shapes
from envkit.specs.annotations import AxisIndex, Key, Place, Shape, Value
from envkit.specs.in_torchrl import register_in_torchrl
from envkit.specs.shapes import Index, ShapeOp, as_shape, data_shape

_COLUMNS = ("entry", "spec", "shape", "dtype", "device", "values")


def _text(spec: Any) -> str:
    """Write a leaf on one line, and a tree or a stack with one entry a line."""
    name = type(spec).__name__
    if not spec._shown():
        facts = {"shape": tuple(spec.shape), **spec._facts(), "device": spec.device}
        if spec.dtype is not None:
            facts["dtype"] = dtype_name(spec.dtype)
        return f"{name}({', '.join(f'{key}={fact}' for key, fact in facts.items())})"
    lines = [f"{label}: {part!r}," for label, part in spec._shown()]
    lines += [f"{key}={fact}," for key, fact in spec._facts().items()]
    lines += [f"device={spec.device},", f"shape={tuple(spec.shape)})"]
    body = "\n".join(lines).replace("\n", "\n    ")
    return f"{name}(\n    {body}"


def _html(spec: object) -> str:
    """Make a table with one row for each entry at any depth, for Jupyter."""
    head = "".join(f"<th style='text-align: left'>{column}</th>" for column in _COLUMNS)
    rows = "".join(
        f"<tr>{''.join(_cell(cell, depth * (i == 0)) for i, cell in enumerate(cells))}</tr>"
        for depth, cells in _rows("", spec, 0)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _rows(label: str, spec: Any, depth: int) -> Iterator[tuple[int, list[str]]]:
    if spec is None:
        yield depth, [label, "None", "", "", "", ""]
        return
    facts = ", ".join(f"{key}={fact}" for key, fact in spec._facts().items())
    dtype = "" if spec.dtype is None else dtype_name(spec.dtype)
    device = "" if spec.device is None else str(spec.device)
    yield depth, [label, type(spec).__name__, str(tuple(spec.shape)), dtype, device, facts]
    for name, part in spec._shown():
        yield from _rows(name, part, depth + 1)


def _cell(content: str, depth: int) -> str:
    return (
        f"<td style='text-align: left; padding-left: {0.5 + 1.5 * depth}em'>{escape(content)}</td>"
    )


class _Reshapable:
    """Something that has a shape and takes the shape operations of a tensor.

    Attributes:
        shape: sizes including the env's batch axes; -1 marks an axis of unknown size.
    """

    _shape: torch.Size
    _encoding_ndim: ClassVar[int] = 0

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def ndimension(self) -> int:
        """Count the axes."""
        return self.ndim

    def numel(self) -> int:
        """Count the elements of one value; an axis of unknown size counts as 1."""
        return data_shape(self.shape).numel()

    @property
    def _free_shape(self) -> torch.Size:
        """The axes that shape operations may touch."""
        return self.shape[: self.ndim - self._encoding_ndim]

    # -- operations --------------------------------------------------------------------

    def _map_shape(self, op: ShapeOp) -> Self:
        """Apply an operation on leading axes to the shape and to everything the spec holds."""
        raise NotImplementedError

    def __getitem__(self, index: AxisIndex) -> Any:
        """Index the shape as a tensor would be.

        Raises:
            SpecAxisError: the index reaches into an encoding axis.
            SpecTypeError: the index is nothing that indexes axes.
            IndexError: the index is out of range.
        """
        items = shapes.split_index(index, self.ndim)
        if self._encoding_ndim:
            if not (isinstance(items[-1], slice) and items[-1] == slice(None)):
                raise self._encodes(f"index {index!r}")
            items = items[:-1]
        return self._map_shape(Index(items))

    def __iter__(self) -> Iterator[Any]:
        """Walk along the first axis, as over a tensor."""
        return iter(self.unbind(0))

    def _encodes(self, what: str) -> SpecAxisError:
        return SpecAxisError(
            f"{what} selects within the last axis of {type(self).__name__} of shape "
            f"{tuple(self.shape)}, which encodes one value. {self._free_advice()}"
        )

    def expand(self, *shape: Shape) -> Self:
        """Add leading axes and grow axes of size 1; a size of -1 keeps an axis, or adds a dynamic one.

        Raises:
            SpecError: a trailing size differs from the spec's.

        Example:
            >>> from envkit import Bounded
            >>> Bounded(-1.0, 1.0, shape=(3,)).expand(4, 3).shape
            torch.Size([4, 3])
        """
        return self._map_shape(shapes.expand_op(self._free_shape, self._without_encoding(shape)))

    def reshape(self, *shape: Shape) -> Self:
        """Reshape; a composite reshapes its batch axes and leaves keep their feature axes.

        Raises:
            SpecError: the number of elements differs.

        Example:
            >>> from envkit import Unbounded
            >>> Unbounded(shape=(4, 3)).reshape(2, 6).shape
            torch.Size([2, 6])
        """
        return self._map_shape(shapes.reshape_op(self._free_shape, self._without_encoding(shape)))

    def view(self, *shape: Shape) -> Self:
        """Reshape; the same as `reshape`, since a spec holds no data."""
        return self.reshape(*shape)

    def squeeze(self, dim: int | None = None) -> Self:
        """Drop axis ``dim`` if its size is 1, or every axis of size 1.

        Example:
            >>> from envkit import Unbounded
            >>> Unbounded(shape=(1, 3)).squeeze(0).shape
            torch.Size([3])
        """
        if dim is not None:
            dim = self._free_axis(dim)
        return self._map_shape(shapes.squeeze_op(self._free_shape, dim))

    def unsqueeze(self, dim: int) -> Self:
        """Insert an axis of size 1; ``dim=-1`` appends it last.

        Example:
            >>> from envkit import Unbounded
            >>> Unbounded(shape=(3,)).unsqueeze(0).shape
            torch.Size([1, 3])
        """
        return self._map_shape(shapes.unsqueeze_op(self._free_axis(dim, new=1)))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Merge the axes from ``start_dim`` to ``end_dim``, both included; at least one remains.

        Example:
            >>> from envkit import Unbounded
            >>> Unbounded(shape=(4, 3)).flatten(0, 1).shape
            torch.Size([12])
        """
        if not self.ndim:
            return self.reshape(1)
        start, end = self._free_axis(start_dim), self._free_axis(end_dim)
        return self._map_shape(shapes.flatten_op(self._free_shape, start, end))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Self:
        """Split axis ``dim`` into ``sizes``, one of which may be -1.

        Example:
            >>> from envkit import Unbounded
            >>> Unbounded(shape=(12,)).unflatten(0, (4, 3)).shape
            torch.Size([4, 3])
        """
        return self._map_shape(
            shapes.unflatten_op(self._free_shape, self._free_axis(dim), tuple(sizes))
        )

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Split along axis ``dim`` into one spec per index.

        Example:
            >>> from envkit import Unbounded
            >>> [spec.shape for spec in Unbounded(shape=(2, 3)).unbind(0)]
            [torch.Size([3]), torch.Size([3])]
        """
        axis = self._free_axis(dim)
        return tuple(self[(slice(None),) * axis + (i,)] for i in range(self.shape[axis]))

    def make_neg_dim(self, dim: int) -> Self:
        """Mark axis ``dim`` as of unknown size (-1). Data made from the spec has size 1 there.

        Example:
            >>> from envkit import Unbounded
            >>> spec = Unbounded(shape=(4, 3)).make_neg_dim(0)
            >>> spec.shape, spec.zero().shape
            (torch.Size([-1, 3]), torch.Size([1, 3]))
        """
        return self._with_dynamic(self._free_axis(dim))

    def _select(self, axis: int, index: Tensor) -> Self:
        """Select along an axis, with what ``torch.index_select`` takes."""
        if axis >= len(self._free_shape):
            raise self._encodes(f"index_select along axis {axis}")
        return self._map_shape(Index((*(slice(None),) * axis, index)))

    def _with_dynamic(self, axis: int) -> Self:
        raise NotImplementedError

    def _free_axis(self, dim: int, *, new: int = 0) -> int:
        """Normalise an axis and check that it is no encoding axis."""
        axis = shapes.axis_of(dim, self.ndim + new)
        if axis >= len(self._free_shape) + new:
            raise SpecAxisError(
                f"dim {dim} is the encoding axis of {type(self).__name__} of shape "
                f"{tuple(self.shape)}. {self._free_advice(new)}"
            )
        return axis

    def _free_advice(self, new: int = 0) -> str:
        count = len(self._free_shape) + new
        return (
            f"Use the first {count} axes only."
            if count
            else "It has no other axis. Expand it first."
        )

    def _without_encoding(self, sizes: object) -> torch.Size:
        """Check that the sizes asked for end in the encoding axes, and drop these."""
        sizes = as_shape(sizes)
        encoding = self.shape[len(self._free_shape) :]
        cut = len(sizes) - len(encoding)
        if cut < 0 or any(n not in (o, -1) for n, o in zip(sizes[cut:], encoding, strict=True)):
            raise SpecAxisError(
                f"{type(self).__name__} of shape {tuple(self.shape)} cannot take the shape "
                f"{tuple(sizes)}: the last axis encodes a value. End the sizes in "
                f"{tuple(encoding)}."
            )
        return sizes[:cut]


def index_select(spec: Any, dim: int, index: Tensor) -> Any:
    """Select indices along an axis; this is what ``torch.index_select`` does with a spec.

    Args:
        spec: a leaf or a composite; a stack of unlike specs is indexed instead: ``stack[index]``.
        dim: an axis that does not encode values.
        index: integers from 0 on, of shape ``()`` or ``(count,)``.

    Returns:
        A spec of the same class whose axis has size ``count``, bounds and masks selected.

    Raises:
        ArgumentTypeError: ``index`` is no tensor of integers.
        SpecAxisError: there is no such axis, it encodes values, or an index is out of range.
        NotSelectableError: the spec is or holds a stack of unlike specs.
    """
    axis = shapes.axis_of(dim, spec.ndim)
    if not isinstance(index, Tensor) or index.dtype.is_floating_point or index.dtype == torch.bool:
        raise ArgumentTypeError(f"index is {index!r}. Pass a tensor of integers.")
    numbers, size = index.flatten().tolist(), spec.shape[axis]
    if index.ndim > 1 or any(not 0 <= number < abs(size) for number in numbers):
        raise SpecAxisError(
            f"index {index.tolist()} does not select from axis {axis} of shape {tuple(spec.shape)}. Pass "
            f"one axis of numbers from 0 to {size - 1}."
        )
    return spec._select(axis, index.flatten())


_TORCH_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}


def on_torch_function(function: Callable[..., Any], of_specs: Callable[..., Any]) -> None:
    """Register what a function of torch does when it is called with specs; both functions take the same arguments."""
    _TORCH_FUNCTIONS[function] = of_specs


def checks_values() -> bool:
    """Check whether ``CHECK_SPEC_ENCODE`` asks `encode` and `to_numpy` to check their values."""
    return os.environ.get("CHECK_SPEC_ENCODE", "0").lower() not in ("", "0", "false", "no")


def require_dtype(dtype: object) -> torch.dtype:
    """Return the dtype itself.

    Raises:
        SpecTypeError: it is something else.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    raise SpecTypeError(
        f"dtype is {dtype!r} of type {type(dtype).__name__}. Pass a dtype of torch, e.g. torch.float32."
    )


def type_and_fix(value: object, fix: str) -> str:
    """Return the type of something that is no spec, and the fix: for a spec of TorchRL, how it becomes one."""
    kind = type(value)
    if kind.__module__.startswith("torchrl."):
        return (
            f"{kind.__name__} of TorchRL. Import the class from envkit, or pass "
            "envkit.from_torchrl_spec(spec)."
        )
    return f"{kind.__name__}. {fix}"


class TensorSpec(_Reshapable):
    """Describe a tensor, or a tree of tensors, without holding data.

    Attributes:
        shape: sizes including the env's batch axes; -1 marks an axis of unknown size.
        device: where values are made; a composite may have ``None``.
        dtype: dtype of the values, ``None`` for composites and non-tensor data.
        space: a description of the domain, or ``None``.
        domain: ``"continuous"``, ``"discrete"`` or ``None``.

    Example:
        >>> from envkit import Bounded, TensorSpec
        >>> spec = Bounded(-1.0, 1.0, shape=(2,))
        >>> isinstance(spec, TensorSpec), spec.shape, spec.dtype, spec.domain
        (True, torch.Size([2]), torch.float32, 'continuous')
        >>> spec.expand(5, 2).rand().shape
        torch.Size([5, 2])
    """

    domain: ClassVar[str | None] = None

    _takes_batch_axes: ClassVar[bool] = False  # of the composite that it is put into
    _caches: ClassVar[tuple[str, ...]] = ()  # attributes that are rebuilt on demand

    _device: Any  # these are None in some trees, and never in a leaf
    _dtype: Any

    # -- description -------------------------------------------------------------------

    @property
    def device(self) -> torch.device | None:
        return self._device

    @property
    def dtype(self) -> torch.dtype | None:
        return self._dtype

    @property
    def is_choice(self) -> bool:
        """Whether it converts between categorical and one-hot."""
        return False

    @property
    def space(self) -> Any:
        return None

    # -- copies ------------------------------------------------------------------------

    def _copy(self) -> Self:
        """Copy the spec, sharing its contents and dropping its caches."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__getstate__())
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in self._caches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        register_in_torchrl()
        self.__dict__.update(state)

    def clone(self) -> Self:
        """Copy the spec and all it holds. The copy is never locked.

        Example:
            >>> from envkit import Bounded
            >>> spec = Bounded(-1.0, 1.0, shape=(2,))
            >>> spec.clone() == spec, spec.clone() is spec
            (True, False)
        """
        raise NotImplementedError

    def to(self, dest: Place | None) -> TensorSpec:
        """Make the same spec on another device, or with another dtype.

        Args:
            dest: a device (or its name), or a dtype; for ``None`` the spec itself is given back.

        Example:
            >>> from envkit import Bounded
            >>> spec = Bounded(-1.0, 1.0, shape=(2,))
            >>> spec.to("cpu").device
            device(type='cpu')
        """
        raise NotImplementedError

    def cast(self, dtype: torch.dtype) -> TensorSpec:
        """Make the same spec with another dtype.

        Raises:
            SpecError: the domain has no form in that dtype.

        Example:
            >>> import torch
            >>> from envkit import Bounded
            >>> Bounded(-1.0, 1.0, shape=(2,)).cast(torch.float64).dtype
            torch.float64
        """
        raise NotImplementedError

    def clear_device_(self) -> Self:
        """Drop the constraint on devices of a tree; a leaf keeps its device."""
        return self

    def cpu(self) -> TensorSpec:
        """Make the same spec on the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> TensorSpec:
        """Make the same spec on a CUDA device, the current one by default."""
        return self.to(torch.device("cuda") if device is None else torch.device("cuda", device))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _TORCH_FUNCTIONS:
            return NotImplemented
        return _TORCH_FUNCTIONS[func](*args, **(kwargs or {}))

    # -- values ------------------------------------------------------------------------

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Value:
        """Draw a random value of shape ``(*shape, *self.shape)``; an int is one axis in front.

        From ``generator``, which must be on the spec's device; None takes torch's global one.

        Example:
            >>> from envkit import Bounded
            >>> spec = Bounded(-1.0, 1.0, shape=(3,))
            >>> spec.rand().shape, spec.rand((5,)).shape
            (torch.Size([3]), torch.Size([5, 3]))
        """
        raise NotImplementedError

    def sample(self, shape: Shape = (), generator: Generator | None = None) -> Value:
        """Draw a random value; the same as `rand`."""
        return self.rand(shape, generator)

    def zero(self, shape: Shape = ()) -> Value:
        """Make zeros, in the domain or not, of shape ``(*shape, *self.shape)``.

        Example:
            >>> from envkit import Unbounded
            >>> Unbounded(shape=(3,)).zero((2,))
            tensor([[0., 0., 0.],
                    [0., 0., 0.]])
        """
        raise NotImplementedError

    def zeros(self, shape: Shape = ()) -> Value:
        """Make a value filled with zeros; the same as `zero`."""
        return self.zero(shape)

    def one(self, shape: Shape = ()) -> Value:
        """Make ones, in the domain or not, of shape ``(*shape, *self.shape)``.

        Example:
            >>> from envkit import Unbounded
            >>> Unbounded(shape=(3,)).one()
            tensor([1., 1., 1.])
        """
        raise NotImplementedError

    def ones(self, shape: Shape = ()) -> Value:
        """Make a value filled with ones; the same as `one`."""
        return self.one(shape)

    def enumerate(self, use_mask: bool = False) -> Value:
        """List all values, stacked on a new first axis.

        A choice with batch axes lists the values of one position, each taken by the whole batch.

        Args:
            use_mask: list only what the mask allows.

        Raises:
            NotEnumerableError: the values of this spec cannot be listed.

        Example:
            >>> from envkit import Categorical, OneHot
            >>> Categorical(3).enumerate()
            tensor([0, 1, 2])
            >>> OneHot(3).enumerate().shape
            torch.Size([3, 3])
        """
        raise NotEnumerableError(
            f"{type(self).__name__} has no finite list of values. Enumerate a discrete spec."
        )

    def cardinality(self) -> float | int:
        """Count the values that `enumerate` lists, masks left aside; ``inf`` where there is no end.

        Example:
            >>> from envkit import MultiCategorical, Unbounded
            >>> MultiCategorical([3, 2]).cardinality(), Unbounded((1,)).cardinality()
            (6, inf)
        """
        return float("inf")

    # -- testing and repairing ---------------------------------------------------------

    def is_in(self, value: object) -> bool:
        """Check whether a value belongs to the spec, extra leading axes allowed; never raise.

        Example:
            >>> import torch
            >>> from envkit import Bounded
            >>> spec = Bounded(-1.0, 1.0, shape=(2,))
            >>> spec.is_in(torch.zeros(2)), spec.is_in(torch.tensor([0.0, 2.0]))
            (True, False)
            >>> torch.zeros(3) in spec
            False
        """
        raise NotImplementedError

    def __contains__(self, value: object) -> bool:
        return self.is_in(value)

    def contains(self, value: object) -> bool:
        """Check whether a value belongs to the spec; the same as `is_in`."""
        return self.is_in(value)

    def assert_is_in(self, value: object) -> None:
        """Check that a value belongs to the spec.

        Raises:
            OutOfSpecError: it does not; the message says why.

        Example:
            >>> import torch
            >>> from envkit import Bounded
            >>> Bounded(-1.0, 1.0, shape=(2,)).assert_is_in(torch.zeros(2))
        """
        if not self.is_in(value):
            raise OutOfSpecError(
                f"{self._complaint(value)}. Expected a value of {self!r}; "
                "`spec.project(value)` gives the nearest one."
            )

    def _complaint(self, value: object) -> str:
        """Return what keeps a value out of the spec."""
        return f"got {value!r}"

    def type_check(self, value: object, key: Key | None = None) -> None:
        """Check the dtype of a value, and nothing else.

        Args:
            value: what to check.
            key: name of the entry, used in the message only.

        Raises:
            SpecTypeError: the dtype differs.

        Example:
            >>> import torch
            >>> from envkit import Unbounded
            >>> Unbounded(shape=(2,)).type_check(torch.zeros(2))
        """
        dtype = getattr(value, "dtype", None)
        if self._dtype is not None and dtype != self._dtype:
            raise SpecTypeError(
                f"{'value' if key is None else f'entry {key!r}'} has dtype {dtype}, but its spec "
                f"has {self._dtype}. Convert it with `value.to({self._dtype})`."
            )

    def project(self, value: Value) -> Value:
        """Return the value itself if it is in the spec, else the nearest value that is.

        NaN counts as 0 where the spec has bounds or options; `Unbounded` takes it as it is.

        Example:
            >>> import torch
            >>> from envkit import Bounded
            >>> Bounded(-1.0, 1.0, shape=(3,)).project(torch.tensor([-3.0, 0.5, 2.0]))
            tensor([-1.0000,  0.5000,  1.0000])
        """
        raise NotImplementedError

    # -- conversion --------------------------------------------------------------------

    def encode(self, raw: object, *, ignore_device: bool = False) -> Value:
        """Turn a number, array, list or dict into a value of this spec.

        Args:
            raw: what an env produced. NumPy data is copied, a tensor that already fits is not.
            ignore_device: leave the result where the raw data is (CPU for non-tensors).

        Raises:
            EncodingError: the number of elements does not fit the shape, or an option that is to
                be spelled does not exist.
            OutOfSpecError: the value is outside the domain, and the environment variable
                ``CHECK_SPEC_ENCODE`` asks for the check.

        Example:
            >>> from envkit import Bounded, OneHot
            >>> Bounded(-1.0, 1.0, shape=(3,)).encode([0.0, 0.5, 1.0])
            tensor([0.0000, 0.5000, 1.0000])
            >>> OneHot(3).encode(2)
            tensor([False, False,  True])
        """
        raise NotImplementedError

    def memoize_encode(self, mode: bool = True) -> None:
        """Record the conversions of the next `encode` and replay them, unchecked, afterwards.

        Valid only while the raw values keep their type and shape.
        """
        raise NotImplementedError

    def erase_memoize_cache(self) -> None:
        """Forget recorded conversions; the next `encode` records them again if memoizing."""
        raise NotImplementedError

    def to_numpy(self, value: Value, safe: bool | None = None) -> Any:
        """Turn a value of this spec into NumPy data, the inverse of `encode`.

        Args:
            value: a value of this spec, on any device.
            safe: call `assert_is_in` first.

        Example:
            >>> from envkit import OneHot
            >>> spec = OneHot(3)
            >>> int(spec.to_numpy(spec.encode(2)))
            2
        """
        raise NotImplementedError

    def _check_if_safe(self, value: object, safe: bool | None) -> None:
        if checks_values() if safe is None else safe:
            self.assert_is_in(value)

    def index(self, index: Value, tensor: Tensor) -> Tensor:
        """Pick from ``tensor`` what a value of this spec, a choice among options, points at.

        Example:
            >>> import torch
            >>> from envkit import OneHot
            >>> spec = OneHot(3)
            >>> spec.index(spec.encode(2), torch.tensor([10.0, 20.0, 30.0]))
            tensor([30.])
        """
        raise self._no_choices()

    def to_one_hot(self, value: Value, safe: bool | None = None) -> Value:
        """Turn a categorical value into its one-hot form.

        Example:
            >>> import torch
            >>> from envkit import Categorical
            >>> Categorical(3).to_one_hot(torch.tensor(1))
            tensor([False,  True, False])
        """
        raise self._no_choices()

    def to_one_hot_spec(self) -> TensorSpec:
        """Describe the values that `to_one_hot` gives.

        Example:
            >>> from envkit import Categorical
            >>> spec = Categorical(3).to_one_hot_spec()
            >>> type(spec).__name__, spec.shape
            ('OneHot', torch.Size([3]))
        """
        raise self._no_choices()

    def to_categorical(self, value: Value, safe: bool | None = None) -> Value:
        """Turn a one-hot value into its categorical form.

        Example:
            >>> from envkit import OneHot
            >>> spec = OneHot(3)
            >>> spec.to_categorical(spec.encode(2))
            tensor(2)
        """
        raise self._no_choices()

    def to_categorical_spec(self) -> TensorSpec:
        """Describe the values that `to_categorical` gives.

        Example:
            >>> from envkit import OneHot
            >>> spec = OneHot(3).to_categorical_spec()
            >>> type(spec).__name__, spec.shape
            ('Categorical', torch.Size([]))
        """
        raise self._no_choices()

    def _no_choices(self) -> NoChoiceError:
        return NoChoiceError(
            f"{type(self).__name__} is no choice among n options. "
            "Use a Categorical, OneHot, MultiCategorical or MultiOneHot: these convert to each other "
            "and index tensors."
        )

    # -- display -----------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        """Facts about the values beside shape, device and dtype, for `repr`."""
        return {}

    def _shown(self) -> list[tuple[str, Any]]:
        """The specs that this one is made of, under the labels to show; empty for a leaf."""
        return []

    def __repr__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        return _html(self)
