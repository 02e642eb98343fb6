"""A choice among specs: the values of any of several leaves.

This module decides which member a value belongs to. How a member samples, tests and repairs is
its own business.

Conventions
    value axes  the axes of the members as they were given: a value along them belongs to one member.
    row axes    what is in front of them, or was put between them by `expand`, `unsqueeze` or
                ``torch.stack``: each row belongs to its own member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from tensordict import NonTensorDataBase, NonTensorStack
from torch import Generator, Tensor

from envkit.errors import SpecError, SpecTypeError
from envkit.specs.annotations import Key, Place, Shape, Value
from envkit.specs.leaves.leaf import BoxList, LeafSpec
from envkit.specs.leaves.objects import FixedObjects, NonTensor
from envkit.specs.shapes import Index, Reshape, ShapeOp, lead, names_after

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Of the same bits: ``torch.where`` of torch 2.11 and older takes no unsigned integers of more than one byte."""


class Choice(LeafSpec):
    """Describe the values of any of several leaves.

    Each value of a sample comes from one member, drawn uniformly. When the spec is expanded or
    stacked, each of its rows remains its own value.

    Args:
        choices: the members, leaf specs of one shape, dtype and device. Where all are non-tensor data
            (`NonTensorData` or `NonTensorStack`), each is one value: they are counted, listed and told
            apart. Beside a `NonTensor`, whose values are any objects, a `NonTensorData` is an example.

    Raises:
        SpecTypeError: a member is no leaf spec, or the members are of several classes.
        SpecError: no member, or members that differ in shape, dtype or device.

    Example:
        >>> import torch
        >>> from envkit import Bounded, Choice
        >>> spec = Choice([Bounded(0.0, 1.0, (1,)), Bounded(5.0, 6.0, (1,))])
        >>> spec.is_in(torch.tensor([5.5])), spec.is_in(torch.tensor([3.0]))
        (True, False)
    """

    _choices: tuple[Any, ...]
    _axes: tuple[str | None, ...]  # "value", or None for a row axis

    def __init__(self, choices: Sequence[Any]):
        self._choices = _as_leaves(choices)
        if not self._choices:
            raise SpecError("a Choice got no members. Pass at least one spec.")
        first = self._choices[0]
        kinds = {type(spec) for spec in self._choices}
        if len(kinds) > 1:
            raise SpecTypeError(
                f"the members of a Choice are of several classes: {sorted(kind.__name__ for kind in kinds)}. "
                "Pass specs of one class."
            )
        for what in ("shape", "dtype", "device"):
            found = [getattr(spec, what) for spec in self._choices]
            if any(other != found[0] for other in found):
                said = [tuple(other) if what == "shape" else str(other) for other in found]
                raise SpecError(
                    f"the members of a Choice differ in {what}: {said}. Pass specs of the same kind: of "
                    "one shape, dtype and device."
                )
        super().__init__(first.shape, first.device, first.dtype)
        self._axes = ("value",) * self.ndim

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

    def _make_space(self) -> BoxList:
        return BoxList(tuple(spec.space for spec in self._choices))

    @property
    def is_choice(self) -> bool:
        if not all(spec.is_choice for spec in self._choices):
            return False
        return len({spec.n for spec in self._choices}) == 1  # else one-hot rows have no one width

    @property
    def _encoding_ndim(self) -> int:  # type: ignore[override]
        return max(spec._encoding_ndim for spec in self._choices)

    # -- copies, shape, device, dtype --------------------------------------------------

    def _each(self, change: Callable[[Any], Any]) -> Self:
        """Make the choice among changed members."""
        new = type(self)([change(spec) for spec in self._choices])
        new._axes = (*self._axes, "value")[: new.ndim]  # an encoding axis may come or go
        return new

    def _map_shape(self, op: ShapeOp) -> Self:
        new = self._each(lambda spec: spec._map_shape(op))
        new._axes = self._axes_after(op)
        return new

    def _axes_after(self, op: ShapeOp) -> tuple[str | None, ...]:
        axes = names_after(op, self._axes, self._shape)
        if not isinstance(op, Reshape):
            return axes
        touched, rest = self._axes[: op.ndim], self._axes[op.ndim :]
        if None not in touched:
            return (*("value",) * len(op.sizes), *rest)
        if axes.count("value") != self._axes.count("value"):
            raise SpecError(
                f"a Choice of shape {tuple(self._shape)} cannot take the shape {tuple(op.sizes)}: "
                "that merges rows with the values in them. Reshape the members instead."
            )
        return axes

    def _of_shape(self, shape: torch.Size) -> Self:
        new = self._each(lambda spec: spec._of_shape(shape))
        added = (None,) * (len(shape) - self.ndim)
        new._axes = (*added, *self._axes)[-len(shape) :] if shape else ()
        return new

    def _with_dynamic(self, axis: int) -> Self:
        return self._each(lambda spec: spec._with_dynamic(axis))

    def clone(self) -> Self:
        return self._each(lambda spec: spec.clone())

    def to(self, dest: Place | None) -> Self:
        return self._each(lambda spec: spec.to(dest))

    def cast(self, dtype: torch.dtype) -> Self:
        return self._each(lambda spec: spec.cast(dtype))

    def _signature(self) -> tuple[Any, ...]:
        return type(self), self._axes, self._choices

    def _shown(self) -> list[tuple[str, Any]]:
        return [(str(i), spec) for i, spec in enumerate(self._choices)]

    # -- values ------------------------------------------------------------------------

    @property
    def _objects(self) -> FixedObjects | None:
        """The first member, where all are given objects and values are numbers of them inside."""
        return self._choices[0] if isinstance(self._choices[0], FixedObjects) else None

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Value:
        shape = lead(shape)
        objects = self._objects
        if objects is None:
            draws = [spec.rand(shape, generator) for spec in self._choices]
        else:
            draws = [spec.numbers(shape) for spec in self._choices]
        rows = self._rows if self._dtype is not None or objects is not None else ()
        device = None if generator is None else generator.device
        size = (*shape, *rows)
        member = torch.randint(len(draws), size, generator=generator, device=device)
        return self._written(self._pick(member, draws))

    def _written(self, value: Any) -> Any:
        """Put objects in the place of their numbers; a row has its own entry."""
        if self._objects is None:
            return value
        last_row = max((i for i, axis in enumerate(self._axes) if axis is None), default=-1)
        return self._objects.write(value, self.ndim - last_row - 1)

    @property
    def _rows(self) -> tuple[int, ...]:
        """Sizes of the row axes, and 1 for each value axis."""
        pairs = zip(self._axes, self._size, strict=True)
        return tuple(1 if axis == "value" else size for axis, size in pairs)

    def _pick(self, member: Tensor, values: Sequence[Any]) -> Any:
        """Take each value from the member whose number is there."""
        if isinstance(values[0], Tensor):
            member = member.to(values[0].device)
            signed = _SIGNED.get(dtype := values[0].dtype, dtype)
            picked = values[0].view(signed)
            for i, value in enumerate(values[1:], 1):
                picked = torch.where(member == i, value.view(signed), picked)
            return picked.view(dtype)
        if not member.ndim:
            return values[int(member)]
        rows = ([value[i] for value in values] for i in range(len(member)))
        return torch.stack([self._pick(i, row) for i, row in zip(member, rows, strict=True)])

    def zero(self, shape: Shape = ()) -> Value:
        return self._choices[0].zero(shape)

    def one(self, shape: Shape = ()) -> Value:
        return self._choices[0].one(shape)

    def is_in(self, value: object) -> bool:
        if self._objects is not None:
            numbers = self._objects.read(value)
            return numbers is not None and torch.equal(numbers, self._nearest(numbers))
        if self._dtype is None:  # objects have no domain that could tell members apart
            return self._choices[0].is_in(value)
        return super().is_in(value)

    def _nearest(self, value: Tensor) -> Tensor:
        nearest = [spec._nearest(value) for spec in self._choices]
        distances = torch.stack([self._distance(value, other) for other in nearest])
        return self._pick(distances.argmin(0), nearest)

    def _distance(self, value: Tensor, other: Tensor) -> Tensor:
        """Add up the differences within each value; -1 where there is none at all."""
        wide = torch.complex128 if value.is_complex() else torch.float64
        equal = value == other
        gaps = torch.where(equal, 0, (value.to(wide) - other.to(wide)).abs())
        axes = [i - self.ndim for i, axis in enumerate(self._axes) if axis == "value"]
        if axes:
            equal, gaps = equal.all(axes, keepdim=True), gaps.sum(axes, keepdim=True)
        return torch.where(equal, -1, gaps)

    def project(self, value: Value) -> Value:
        if self._objects is not None:
            if self.is_in(value):
                return value
            raise SpecTypeError(
                f"{value!r} is none of the options of this Choice, and no object is near to another. "
                "Pass one of those that enumerate() lists."
            )
        return self._choices[0].project(value) if self._dtype is None else super().project(value)

    def type_check(self, value: object, key: Key | None = None) -> None:
        self._choices[0].type_check(value, key)

    def enumerate(self, use_mask: bool = False) -> Value:
        """List all values, each once, those of the first member in front.

        Objects are listed as non-tensor data with the same new first axis.

        Raises:
            NotEnumerableError: the values of a member cannot be listed.
        """
        values = self._listed(use_mask)
        rows = (None if axis is None else slice(None) for axis in self._axes)
        values = values[(slice(None), *rows)].expand(len(values), *self._size).contiguous()
        return self._written(values)

    def cardinality(self) -> float | int:
        """Count the values that `enumerate` lists: one that several members have counts once.

        Raises:
            NotEnumerableError: the values of a member are too many to be compared.
        """
        members = self._one_row()
        if len(members) == 1:
            return members[0].cardinality()
        if self._objects is None and float("inf") in {spec.cardinality() for spec in members}:
            return float("inf")
        return len(self._listed(use_mask=False))

    def _listed(self, use_mask: bool) -> Tensor:
        """The values of one row, shape ``(values, *value axes)``; objects as their numbers."""
        members = self._one_row()
        if self._objects is not None:
            return _distinct(torch.stack([spec.numbers() for spec in members]))
        return _distinct(torch.cat([spec.enumerate(use_mask) for spec in members]))

    def _one_row(self) -> list[Any]:
        """The members without their row axes, along which they are all the same."""
        items = tuple(0 if axis is None else slice(None) for axis in self._axes)
        index = Index(items[: len(self._free_shape)])
        return [spec._map_shape(index) for spec in self._choices]

    # -- conversion --------------------------------------------------------------------

    def _member_of(self, value: object) -> Any:
        """The first member that has all of a value, else the first one."""
        return next((spec for spec in self._choices if spec.is_in(value)), self._choices[0])

    def encode(self, raw: object, *, ignore_device: bool = False) -> Value:
        return self._choices[0].encode(raw, ignore_device=ignore_device)

    def memoize_encode(self, mode: bool = True) -> None:
        self._choices[0].memoize_encode(mode)

    def erase_memoize_cache(self) -> None:
        self._choices[0].erase_memoize_cache()

    def to_numpy(self, value: Value, safe: bool | None = None) -> Any:
        self._check_if_safe(value, safe)
        return self._member_of(value).to_numpy(value, safe=False)

    def index(self, index: Value, tensor: Tensor) -> Tensor:
        return self._member_of(index).index(index, tensor)

    def to_one_hot(self, value: Value, safe: bool | None = None) -> Value:
        self._check_if_safe(value, safe)
        return self._member_of(value).to_one_hot(value, safe=False)

    def to_one_hot_spec(self) -> Self:
        if not self.is_choice:
            raise self._no_choices()
        return self._each(lambda spec: spec.to_one_hot_spec())

    def to_categorical(self, value: Value, safe: bool | None = None) -> Value:
        self._check_if_safe(value, safe)
        return self._member_of(value).to_categorical(value, safe=False)

    def to_categorical_spec(self) -> Self:
        if not self.is_choice:
            raise self._no_choices()
        return self._each(lambda spec: spec.to_categorical_spec())


def _distinct(values: Tensor) -> Tensor:
    """Return the first of equal entries along the first axis, in their order."""
    rows = values.reshape(len(values), -1)
    keys = rows if rows.is_floating_point() else rows.to(torch.int64)
    inverse = torch.unique(keys, dim=0, return_inverse=True)[1]
    place = torch.arange(len(values), device=values.device)
    first = torch.full_like(place, len(values)).scatter_reduce(0, inverse, place, "amin")
    return values[first[first < len(values)].sort().values]


def _as_leaves(choices: Sequence[Any]) -> tuple[Any, ...]:
    """Make specs of non-tensor data: objects that are numbered together, or examples."""
    given = (FixedObjects, NonTensorDataBase, NonTensorStack)
    if choices and all(isinstance(choice, given) for choice in choices):
        return FixedObjects.together(choices)
    return tuple(_as_leaf(choice) for choice in choices)


def _as_leaf(choice: object) -> LeafSpec:
    if isinstance(choice, NonTensorDataBase):
        return NonTensor(choice.batch_size, example_data=choice.data)
    if isinstance(choice, LeafSpec):
        return choice
    raise SpecTypeError(
        f"a member of a Choice is {choice!r} of type {type(choice).__name__}. Pass leaf specs, and "
        "put the Choice inside a Composite."
    )
