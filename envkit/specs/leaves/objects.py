"""Leaves that are no tensors: Python objects.

This module decides how an object travels in a TensorDict. It knows nothing of the object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorDataBase, NonTensorStack, TensorDictBase, lazy_stack
from torch import Generator, Tensor

from envkit.errors import NotEnumerableError, SpecError, SpecTypeError
from envkit.specs.annotations import Device, Key, Shape, Value
from envkit.specs.leaves.leaf import LeafSpec
from envkit.specs.shapes import lead
from envkit.specs.tensor_spec import TensorSpec


class NonTensor(LeafSpec):
    """Describe any Python object, carried as non-tensor data of the batch size.

    Args:
        shape: batch size of the data.
        device: device the data reports, ``cpu`` by default; objects do not move.
        example_data: the object that `rand`, `zero` and `one` give.
        batched: give every element of the batch its own entry (`NonTensorStack`), instead of one
            object for all.
        feature_dims: number of last axes that one entry covers, where all axes before them have separate
            entries; excludes ``batched``, which is 0 of them.

    ``dtype`` and ``space`` are None.

    Raises:
        SpecError: ``batched`` and ``feature_dims`` are both given, or there are fewer axes than the
            latter, or ``device`` is none, as an example is not that was passed in its place.

    Example:
        >>> from envkit import Composite, NonTensor
        >>> spec = Composite(text=NonTensor(example_data="hello"))
        >>> spec.zero()["text"]
        'hello'
    """

    _dtype: torch.dtype | None  # type: ignore[assignment]
    _takes_batch_axes = True
    _entry_ndim: int | None  # None: one entry for all axes there are

    def __init__(
        self,
        shape: Shape = (),
        device: Device | None = None,
        dtype: None = None,
        example_data: object = None,
        batched: bool | None = None,
        feature_dims: int | None = None,
    ):
        if batched is not None and feature_dims is not None:
            raise SpecError(
                f"NonTensor got batched={batched} and feature_dims={feature_dims}, which say the same thing. "
                "Pass one of them."
            )
        try:
            device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise SpecError(
                f"{device!r} is no device, which NonTensor expects after the shape. "
                f"Pass an example by name: NonTensor({shape!r}, example_data={device!r})."
            ) from error
        super().__init__(shape, device, dtype)  # type: ignore[arg-type]
        if feature_dims is not None and not 0 <= feature_dims <= self.ndim:
            raise SpecError(
                f"NonTensor of shape {tuple(self.shape)} got feature_dims={feature_dims}. Pass a number from 0 "
                f"to {self.ndim}."
            )
        self.example_data = example_data
        self._entry_ndim = 0 if batched else feature_dims

    @property
    def batched(self) -> bool:
        """Whether every element has its own entry."""
        return self._entry_ndim == 0

    @property
    def feature_dims(self) -> int:
        """Number of last axes that one entry covers."""
        return self.ndim if self._entry_ndim is None else self._entry_ndim

    def __eq__(self, other: object) -> bool:
        return (
            super().__eq__(other)
            and isinstance(other, NonTensor)
            and _same_object(self.example_data, other.example_data)
        )

    __hash__ = None  # type: ignore[assignment]

    def cast(self, dtype: torch.dtype) -> TensorSpec:
        return self._copy()

    def _facts(self) -> dict[str, Any]:
        return {"example_data": self.example_data}

    def _wrap(self, data: object, shape: Shape) -> Any:
        size = torch.Size((*lead(shape), *self._size))
        if self._entry_ndim is None:
            return NonTensorData(data, batch_size=size, device=self._device)
        rows = len(size) - self._entry_ndim
        entry: Any = NonTensorData(data, batch_size=size[rows:], device=self._device)
        if not self._entry_ndim:
            return entry.expand(size).maybe_to_stack()
        for count in reversed(size[:rows]):
            entry = lazy_stack([entry.clone() for _ in range(count)])
        return entry

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Value:
        return self._wrap(self.example_data, shape)

    def zero(self, shape: Shape = ()) -> Value:
        return self.rand(shape)

    def one(self, shape: Shape = ()) -> Value:
        return self.rand(shape)

    def is_in(self, value: object) -> bool:
        if isinstance(value, (NonTensorDataBase, NonTensorStack)):
            return self._fits(value.batch_size)
        return not isinstance(value, (Tensor, TensorDictBase))

    def _complaint(self, value: object) -> str:
        return f"got {type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))}"

    def project(self, value: object) -> Any:
        if self.is_in(value):
            return value
        raise SpecTypeError(
            f"{self._complaint(value)}, which no Python object is near to. "
            f"Pass an object, or non-tensor data of batch size {tuple(self.shape)}."
        )

    def type_check(self, value: object, key: Key | None = None) -> None:
        if isinstance(value, Tensor):
            raise SpecTypeError(
                f"{'value' if key is None else f'entry {key!r}'} is a tensor, but its spec is "
                "NonTensor. Declare a tensor spec, or pass a Python object."
            )

    def encode(self, raw: object, *, ignore_device: bool = False) -> Value:
        if isinstance(raw, (NonTensorDataBase, NonTensorStack)):
            return raw
        return self._wrap(raw, ())

    def to_numpy(self, value: object, safe: bool | None = None) -> Any:
        self._check_if_safe(value, safe)
        if isinstance(value, NonTensorStack):
            return value.tolist()
        return value.data if isinstance(value, NonTensorDataBase) else value

    def cardinality(self) -> int:
        raise NotEnumerableError(
            "the objects that NonTensor describes cannot be counted. Leave this entry out."
        )


class FixedObjects(NonTensor):
    """Describe one value: given Python objects, one for all elements or one for each.

    `Choice` makes its members of non-tensor data so. Inside, a value is a tensor of the numbers of
    its objects, so that shape operations, comparisons and draws are those of tensors.

    Args:
        numbers: int64, shape ``(*shape,)``: which object each element has.
        objects: all objects that a value may have, no two of them equal.
        batched: give each element its own entry.
    """

    _contents = ("_numbers",)
    _numbers: Tensor

    def __init__(self, numbers: Tensor, objects: tuple[Any, ...], batched: bool, device: object):
        LeafSpec.__init__(self, numbers.shape, device, None)  # type: ignore[arg-type]
        self._entry_ndim = 0 if batched else None
        self._numbers = numbers.to(self._device)
        self.objects = objects

    @classmethod
    def together(cls, values: Sequence[Any]) -> tuple[FixedObjects, ...]:
        """Make a spec of each value, with one numbering for the objects of all.

        Args:
            values: non-tensor data, or specs that this method made.
        """
        if all(isinstance(value, cls) and value.objects is values[0].objects for value in values):
            return tuple(values)
        data = [value.rand() if isinstance(value, cls) else value for value in values]
        batched = any(isinstance(item, NonTensorStack) for item in data)
        objects: list[Any] = []
        numbers = [_numbers_of(item, objects, add=True) for item in data]
        shared = tuple(objects)  # one tuple: that tells specs of one numbering
        return tuple(
            cls(places, shared, batched, item.device)
            for places, item in zip(numbers, data, strict=True)
        )

    @property
    def example_data(self) -> Any:  # type: ignore[override]
        if self.batched:
            return _nested(self._numbers.tolist(), self.objects)
        return self.objects[int(self._numbers.flatten()[0])] if self._numbers.numel() else None

    def numbers(self, shape: Shape = ()) -> Tensor:
        """The value as numbers of objects, int64, shape ``(*shape, *self.shape)``."""
        return self._numbers.expand((*lead(shape), *self._numbers.shape))

    def write(self, numbers: Tensor, entry_ndim: int) -> Any:
        """Make non-tensor data of numbers; an entry covers the last ``entry_ndim`` axes at most."""
        entry_ndim = min(entry_ndim, self.feature_dims)
        if numbers.ndim > entry_ndim and len(numbers):
            return lazy_stack([self.write(row, entry_ndim) for row in numbers])
        data = self.objects[int(numbers.flatten()[0])] if numbers.numel() else None
        return NonTensorData(data, batch_size=numbers.shape, device=self._device)

    def read(self, value: object) -> Tensor | None:
        """The numbers of the objects of a value; None where one is unknown or the shape is another."""
        if isinstance(value, (Tensor, TensorDictBase)) and not isinstance(value, NonTensorStack):
            return None
        if not isinstance(value, (NonTensorDataBase, NonTensorStack)):
            value = NonTensorData(value, batch_size=self._size)
        if not self._fits(value.batch_size):
            return None
        numbers = _numbers_of(value, list(self.objects), add=False).to(self._device)
        return None if bool((numbers < 0).any()) else numbers

    def _nearest(self, value: Tensor) -> Tensor:
        return self._numbers.expand_as(value)

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Value:
        return self.write(self.numbers(shape), self.feature_dims)

    def is_in(self, value: object) -> bool:
        numbers = self.read(value)
        return numbers is not None and torch.equal(numbers, self._nearest(numbers))

    def cardinality(self) -> int:
        return 1


def _numbers_of(value: Any, objects: list[Any], *, add: bool) -> Tensor:
    """Number the objects of non-tensor data by their place in a list, and add those not in it.

    Returns:
        int64, shape ``(*batch,)``; -1 for an object that is not in the list where none is added.
    """
    if isinstance(value, NonTensorStack):
        parts = [_numbers_of(part, objects, add=add) for part in value.tensordicts]
        return torch.stack(parts, value.stack_dim)
    place = next((i for i, item in enumerate(objects) if _same_object(item, value.data)), -1)
    if place < 0 and add:
        place = len(objects)
        objects.append(value.data)
    return torch.full(tuple(value.batch_size), place, dtype=torch.int64)


def _nested(numbers: Any, objects: Sequence[Any]) -> Any:
    if isinstance(numbers, list):
        return [_nested(row, objects) for row in numbers]
    return objects[numbers]


def _same_object(a: object, b: object) -> bool:
    """Compare two examples, which may be arrays."""
    if a is b:
        return True
    if isinstance(a, (np.ndarray, Tensor)) or isinstance(b, (np.ndarray, Tensor)):
        return type(a) is type(b) and bool(np.array_equal(np.asarray(a), np.asarray(b)))
    return bool(a == b)
