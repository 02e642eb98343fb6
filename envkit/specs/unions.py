"""A choice among specs: the values of any of several leaves.

This module decides which member a value belongs to. How a member samples, tests and repairs is
its own business.

Conventions
    A value is what has the shape of the spec: in a sample with leading axes each row is drawn from
    a member of its own, and each row may belong to another member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from tensordict import NonTensorData
from torch import Generator, Tensor

from envkit.errors import SpecError, SpecTypeError
from envkit.specs.base import Shape
from envkit.specs.leaf import LeafSpec
from envkit.specs.objects import NonTensor
from envkit.specs.shapes import ShapeOp
from envkit.specs.spaces import BoxList

__all__ = ["Choice"]


class Choice(LeafSpec):
    """Describe the values of any of several leaves.

    Each value of a sample comes from one member, drawn uniformly.

    Args:
        choices: the members, leaf specs of one shape, dtype and device; a `NonTensorData` stands
            for the `NonTensor` that makes it.

    Raises:
        SpecTypeError: a member is no leaf spec.
        SpecError: no member, or members that differ in shape, dtype or device.
    """

    _choices: tuple[Any, ...]

    def __init__(self, choices: Sequence[Any]):
        self._choices = tuple(_as_leaf(choice) for choice in choices)
        kinds = {(tuple(spec.shape), spec.dtype, spec.device) for spec in self._choices}
        if len(kinds) != 1:
            raise SpecError(
                "the members of a Choice have unlike shapes, dtypes or devices: "
                f"{sorted(map(str, kinds))}. Pass at least one spec, all of the same kind."
            )
        first = self._choices[0]
        super().__init__(first.shape, first.device, first.dtype)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The members."""
        return self._choices

    @property
    def num_choices(self) -> int:
        """Number of members."""
        return len(self._choices)

    @property
    def domain(self) -> str | None:  # type: ignore[override]
        domains = {spec.domain for spec in self._choices}
        return domains.pop() if len(domains) == 1 else None

    @property
    def space(self) -> BoxList:
        return BoxList(tuple(spec.space for spec in self._choices))

    @property
    def is_choice(self) -> bool:  # type: ignore[override]
        return all(spec.is_choice for spec in self._choices)

    @property
    def _encoding_ndim(self) -> int:  # type: ignore[override]
        return max(spec._encoding_ndim for spec in self._choices)

    # -- copies, shape, device, dtype --------------------------------------------------

    def _each(self, change: Callable[[Any], Any]) -> Self:
        """Make the choice among changed members."""
        return type(self)([change(spec) for spec in self._choices])

    def _map_shape(self, op: ShapeOp) -> Self:
        return self._each(lambda spec: spec._map_shape(op))

    def _set_dynamic(self, axis: int) -> None:
        super()._set_dynamic(axis)
        for spec in self._choices:
            spec._set_dynamic(axis)

    def clone(self) -> Self:
        return self._each(lambda spec: spec.clone())

    def to(self, dest: Any) -> Self:
        return self._each(lambda spec: spec.to(dest))

    def cast(self, dtype: torch.dtype) -> Self:
        return self._each(lambda spec: spec.cast(dtype))

    def _signature(self) -> tuple[Any, ...]:
        return type(self), self._choices

    def _shown(self) -> list[tuple[str, Any]]:
        return [(str(i), spec) for i, spec in enumerate(self._choices)]

    # -- values ------------------------------------------------------------------------

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Any:
        draws = [spec.rand(shape, generator) for spec in self._choices]
        device = None if generator is None else generator.device
        member = torch.randint(len(draws), tuple(shape), generator=generator, device=device)
        return self._pick(member, draws)

    def _pick(self, member: Tensor, values: Sequence[Any]) -> Any:
        """Take each value from the member whose number stands there."""
        if isinstance(values[0], Tensor):
            member = member.to(values[0].device).reshape(*member.shape, *(1,) * self.ndim)
            picked = values[0]
            for i, value in enumerate(values[1:], 1):
                picked = torch.where(member == i, value, picked)
            return picked
        if not member.ndim:
            return values[int(member)]
        rows = ([value[i] for value in values] for i in range(len(member)))
        return torch.stack([self._pick(i, row) for i, row in zip(member, rows, strict=True)])

    def zero(self, shape: Shape = ()) -> Any:
        return self._choices[0].zero(shape)

    def one(self, shape: Shape = ()) -> Any:
        return self._choices[0].one(shape)

    def is_in(self, value: Any) -> bool:
        if self._dtype is None:  # objects have no domain that could tell members apart
            return self._choices[0].is_in(value)
        return super().is_in(value)

    def _nearest(self, value: Tensor) -> Tensor:
        nearest = [spec._nearest(value) for spec in self._choices]
        distances = torch.stack([self._distance(value, other) for other in nearest])
        return self._pick(distances.argmin(0), nearest)

    def _distance(self, value: Tensor, other: Tensor) -> Tensor:
        """Add up the differences of each value; -1 where there is none at all."""
        wide = torch.complex128 if value.is_complex() else torch.float64
        gaps = torch.where(value == other, 0, (value.to(wide) - other.to(wide)).abs())
        axes = tuple(range(-self.ndim, 0))
        if not axes:
            return torch.where(value == other, -1, gaps)
        return torch.where((value == other).all(axes), -1, gaps.sum(axes))

    def project(self, value: Any) -> Any:
        return self._choices[0].project(value) if self._dtype is None else super().project(value)

    def type_check(self, value: Any, key: Any = None) -> None:
        self._choices[0].type_check(value, key)

    def enumerate(self, use_mask: bool = False) -> Any:
        return torch.cat([spec.enumerate(use_mask) for spec in self._choices])

    def cardinality(self) -> float | int:
        return sum(spec.cardinality() for spec in self._choices)

    # -- conversion --------------------------------------------------------------------

    def _member_of(self, value: Any) -> Any:
        """The first member that has all of a value, else the first one."""
        return next((spec for spec in self._choices if spec.is_in(value)), self._choices[0])

    def encode(self, raw: Any, *, ignore_device: bool = False) -> Any:
        return self._choices[0].encode(raw, ignore_device=ignore_device)

    def memoize_encode(self, mode: bool = True) -> None:
        self._choices[0].memoize_encode(mode)

    def erase_memoize_cache(self) -> None:
        self._choices[0].erase_memoize_cache()

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        self._check_if_safe(value, safe)
        return self._member_of(value).to_numpy(value, safe=False)

    def index(self, index: Any, tensor: Tensor) -> Tensor:
        return self._member_of(index).index(index, tensor)

    def to_one_hot(self, value: Any, safe: bool | None = None) -> Any:
        self._check_if_safe(value, safe)
        return self._member_of(value).to_one_hot(value, safe=False)

    def to_one_hot_spec(self) -> Self:
        return self._each(lambda spec: spec.to_one_hot_spec())

    def to_categorical(self, value: Any, safe: bool | None = None) -> Any:
        self._check_if_safe(value, safe)
        return self._member_of(value).to_categorical(value, safe=False)

    def to_categorical_spec(self) -> Self:
        return self._each(lambda spec: spec.to_categorical_spec())


def _as_leaf(choice: Any) -> LeafSpec:
    if isinstance(choice, NonTensorData):
        return NonTensor(choice.batch_size, example_data=choice.data)
    if isinstance(choice, LeafSpec):
        return choice
    raise SpecTypeError(
        f"a member of a Choice is {choice!r} of type {type(choice).__name__}. Pass leaf specs, and "
        "put the Choice inside a Composite."
    )
