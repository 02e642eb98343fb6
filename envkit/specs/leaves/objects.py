"""Leaves that are no tensors: Python objects.

This module decides how an object travels in a TensorDict. It knows nothing of the object.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorData, NonTensorDataBase, NonTensorStack, TensorDictBase
from torch import Generator, Tensor

from envkit.errors import NotEnumerableError, SpecError, SpecTypeError
from envkit.specs.annotations import Device, Key, Shape, Value
from envkit.specs.base import TensorSpec
from envkit.specs.leaves.leaf import LeafSpec
from envkit.specs.shapes import lead

__all__ = ["NonTensor"]


class NonTensor(LeafSpec):
    """Describe any Python object, carried as non-tensor data of the batch size.

    Args:
        shape: batch size of the data.
        device: device the data reports, ``cpu`` by default; objects do not move.
        example_data: the object that `rand`, `zero` and `one` give.
        batched: give every element of the batch its own entry (`NonTensorStack`), instead of one
            object for all.

    ``dtype`` and ``space`` are None. Two specs are equal whatever their examples are.

    Raises:
        SpecError: ``device`` is none, as an example is not that was passed in its place.
    """

    _dtype: torch.dtype | None  # type: ignore[assignment]

    def __init__(
        self,
        shape: Shape = (),
        device: Device | None = None,
        dtype: None = None,
        example_data: object = None,
        batched: bool = False,
    ):
        try:
            device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise SpecError(
                f"{device!r} is no device, which NonTensor expects after the shape. "
                f"Pass an example by name: NonTensor({shape!r}, example_data={device!r})."
            ) from error
        super().__init__(shape, device, dtype)  # type: ignore[arg-type]
        self.example_data = example_data
        self.batched = batched

    def cast(self, dtype: torch.dtype) -> TensorSpec:
        return self._copy()

    def _facts(self) -> dict[str, Any]:
        return {"example_data": self.example_data}

    def _wrap(self, data: Any, shape: Shape) -> Any:
        wrapped = NonTensorData(
            data, batch_size=torch.Size((*lead(shape), *self._size)), device=self._device
        )
        return wrapped.maybe_to_stack() if self.batched else wrapped  # type: ignore[attr-defined]

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

    def _complaint(self, value: Any) -> str:
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
