"""Leaves without a domain of their own: Python objects, and a choice among specs.

This module decides how an object travels in a TensorDict and what a union of specs accepts.
It knows nothing of how the members of a union sample or test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from tensordict import NonTensorData, NonTensorDataBase, NonTensorStack, TensorDictBase
from torch import Generator, Tensor

from envkit.errors import NotEnumerableError, SpecError, SpecTypeError
from envkit.specs.base import Shape, TensorSpec
from envkit.specs.leaf import LeafSpec
from envkit.specs.shapes import ShapeOp

__all__ = ["Choice", "NonTensor"]


class NonTensor(LeafSpec):
    """Describe any Python object, carried as non-tensor data of the batch size.

    Args:
        shape: batch size of the data.
        device: device the data reports, ``cpu`` by default; objects do not move.
        example_data: the object that `rand`, `zero` and `one` give.
        batched: give every element of the batch its own entry (`NonTensorStack`), instead of one
            object for all.
    """

    _dtype: torch.dtype | None  # type: ignore[assignment]

    def __init__(
        self,
        shape: Any = (),
        device: Any = None,
        dtype: None = None,
        *,
        example_data: Any = None,
        batched: bool = False,
    ):
        super().__init__(shape, device, dtype)  # type: ignore[arg-type]
        self.example_data = example_data
        self.batched = batched

    def _cast(self, dtype: torch.dtype) -> TensorSpec:
        return self._copy()

    def _facts(self) -> dict[str, Any]:
        return {"example_data": self.example_data}

    def _wrap(self, data: Any, shape: Shape) -> Any:
        wrapped = NonTensorData(
            data, batch_size=torch.Size((*shape, *self._size)), device=self._device
        )
        return wrapped.maybe_to_stack() if self.batched else wrapped  # type: ignore[attr-defined]

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Any:
        return self._wrap(self.example_data, shape)

    def zero(self, shape: Shape = ()) -> Any:
        return self.rand(shape)

    def one(self, shape: Shape = ()) -> Any:
        return self.rand(shape)

    def is_in(self, value: Any) -> bool:
        if isinstance(value, (NonTensorDataBase, NonTensorStack)):
            return self._fits(value.batch_size)
        return not isinstance(value, (Tensor, TensorDictBase))

    def _complaint(self, value: Any) -> str:
        return f"got {type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))}"

    def project(self, value: Any) -> Any:
        if self.is_in(value):
            return value
        raise SpecTypeError(
            f"{self._complaint(value)}, which no Python object is near to. "
            f"Pass an object, or non-tensor data of batch size {tuple(self.shape)}."
        )

    def type_check(self, value: Any, key: Any = None) -> None:
        if isinstance(value, Tensor):
            raise SpecTypeError(
                f"{'value' if key is None else f'entry {key!r}'} is a tensor, but its spec is "
                "NonTensor. Declare a tensor spec, or pass a Python object."
            )

    def encode(self, raw: Any, *, ignore_device: bool = False) -> Any:
        if isinstance(raw, (NonTensorDataBase, NonTensorStack)):
            return raw
        return self._wrap(raw, ())

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        self._check_if_safe(value, safe)
        if isinstance(value, NonTensorStack):
            return value.tolist()
        return value.data if isinstance(value, NonTensorDataBase) else value

    def cardinality(self) -> int:
        raise NotEnumerableError(
            "the objects that NonTensor describes cannot be counted. Leave this entry out."
        )


class Choice(LeafSpec):
    """Describe the values of any of several specs.

    A sample comes from one member, drawn uniformly.

    Args:
        choices: the members; they share one shape, dtype and device.

    Raises:
        SpecError: no member, or members that differ in shape, dtype or device.
    """

    _choices: tuple[Any, ...]

    def __init__(self, choices: Sequence[TensorSpec]):
        self._choices = tuple(choices)
        kinds = {(tuple(spec.shape), spec.dtype, spec.device) for spec in self._choices}
        if len(kinds) != 1:
            raise SpecError(
                "the members of a Choice have unlike shapes, dtypes or devices: "
                f"{sorted(map(str, kinds))}. Pass at least one spec, all of the same kind."
            )
        first = self._choices[0]
        super().__init__(first.shape, first.device, first.dtype)  # type: ignore[arg-type]

    @property
    def choices(self) -> tuple[TensorSpec, ...]:
        """The members."""
        return self._choices

    @property
    def _encoding_ndim(self) -> int:  # type: ignore[override]
        return max(spec._encoding_ndim for spec in self._choices)

    def _with(self, choices: Sequence[TensorSpec]) -> Self:
        return type(self)(choices)

    def _map_shape(self, op: ShapeOp) -> Self:
        return self._with([spec._map_shape(op) for spec in self._choices])

    def _set_dynamic(self, axis: int) -> None:
        super()._set_dynamic(axis)
        for spec in self._choices:
            spec._set_dynamic(axis)

    def clone(self) -> Self:
        return self._with([spec.clone() for spec in self._choices])

    def to(self, dest: Any) -> Self:
        return self._with([spec.to(dest) for spec in self._choices])

    def _signature(self) -> tuple[Any, ...]:
        return type(self), self._choices

    def _facts(self) -> dict[str, Any]:
        return {"choices": list(self._choices)}

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Any:
        chosen = int(torch.randint(len(self._choices), (), generator=generator))
        return self._choices[chosen].rand(shape, generator)

    def zero(self, shape: Shape = ()) -> Any:
        return self._choices[0].zero(shape)

    def one(self, shape: Shape = ()) -> Any:
        return self._choices[0].one(shape)

    def is_in(self, value: Any) -> bool:
        return any(spec.is_in(value) for spec in self._choices)

    def project(self, value: Any) -> Any:
        return value if self.is_in(value) else self._choices[0].project(value)

    def encode(self, raw: Any, *, ignore_device: bool = False) -> Any:
        return self._choices[0].encode(raw, ignore_device=ignore_device)

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        self._check_if_safe(value, safe)
        return self._choices[0].to_numpy(value)

    def enumerate(self, use_mask: bool = False) -> Any:
        return torch.cat([spec.enumerate(use_mask) for spec in self._choices])

    def cardinality(self) -> float | int:
        return sum(spec.cardinality() for spec in self._choices)
