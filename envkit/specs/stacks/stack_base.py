"""What stacks of leaves and of composites have in common.

This module decides what a stack of unlike members reports of itself and how calls are spread over
the members. How their values are joined and split is decided by the kind of stack.

Conventions
    members     the stacked specs, in order, held by reference: an edit of a member shows.
    stack_dim   axis of the stack's shape along which they lie, not negative.
    -1          size of an axis on which the members disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Generator, Tensor

from envkit.errors import EncodingError, NotSelectableError, SpecError, SpecStackError
from envkit.specs.annotations import Key, Place, Shape, Value
from envkit.specs.base import TensorSpec
from envkit.specs.leaves.order import digits
from envkit.specs.shapes import ShapeOp, lead
from envkit.specs.stacks import restack
from envkit.specs.trees.walk import at_member

__all__ = ["Stack"]


class Stack(TensorSpec):
    """What stacks of leaves and of composites have in common."""

    _members: list[Any]
    _stack_dim: int

    def __init__(self, *specs: TensorSpec, dim: int = 0):
        kinds = {self._kind(spec) for spec in specs}
        if len(kinds) != 1:
            raise SpecStackError(
                f"cannot stack specs of these kinds: {', '.join(sorted(map(str, kinds))) or 'none'}. Stack "
                "specs of one class, dtype, device and number of axes; inside a stack of "
                "composites, take the member first: stack[i][key]."
            )
        self._set_members(specs, specs[0]._free_axis(dim, new=1))

    @staticmethod
    def _kind(spec: TensorSpec) -> tuple[Any, ...]:
        """What the members of a stack have in common; a stack counts as what it is made of."""
        leaf = spec
        while isinstance(leaf, Stack):
            leaf = leaf._members[0]
        return type(leaf).__name__, spec.dtype, str(spec.device), spec.ndim

    def _set_members(self, members: Sequence[Any], dim: int) -> None:
        self._members, self._stack_dim = list(members), dim
        self._dtype = members[0].dtype
        sizes = [
            column[0] if len(set(column)) == 1 else -1
            for column in zip(*(spec.shape for spec in members), strict=True)
        ]
        self._shape = torch.Size((*sizes[:dim], len(members), *sizes[dim:]))
        devices = {spec.device for spec in members}
        self._device = devices.pop() if len(devices) == 1 else None

    @property
    def members(self) -> tuple[Any, ...]:
        """The stacked specs, in order."""
        return tuple(self._members)

    @property
    def stack_dim(self) -> int:
        """The axis along which the members lie."""
        return self._stack_dim

    @property
    def dim(self) -> int:
        """Another name of ``stack_dim``."""
        return self._stack_dim

    def __len__(self) -> int:
        """Size of the first axis."""
        return self._shape[0]

    def __bool__(self) -> bool:
        return True

    @property
    def is_choice(self) -> bool:  # type: ignore[override]
        return all(spec.is_choice for spec in self._members)

    def _each(self, change: Callable[[Any], Any]) -> Self:
        """Make the stack of changed members."""
        return type(self)(*self._mapped_members(change), dim=self._stack_dim)

    def _mapped_members(self, change: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        """Call ``change`` with each member and its item of each column."""
        results = []
        for i, (spec, *items) in enumerate(zip(self._members, *columns, strict=True)):
            with at_member(i):
                results.append(change(spec, *items))
        return results

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, Stack)
            and self._stack_dim == other._stack_dim
            and self._members == other._members
        )

    __hash__ = None  # type: ignore[assignment]

    def _facts(self) -> dict[str, Any]:
        return {"stack_dim": self._stack_dim}

    def _shown(self) -> list[tuple[str, Any]]:
        return [(str(i), spec) for i, spec in enumerate(self._members)]

    def clone(self) -> Self:
        return self._each(lambda spec: spec.clone())

    def to(self, dest: Place | None) -> Self:
        return self if dest is None else self._each(lambda spec: spec.to(dest))

    def cast(self, dtype: torch.dtype) -> Self:
        return self._each(lambda spec: spec.cast(dtype))

    # -- shape -------------------------------------------------------------------------

    def _map_shape(self, op: ShapeOp) -> Any:
        return restack.mapped(self._members, self._stack_dim, self._free_shape, op)

    def _select(self, axis: int, index: Tensor) -> Any:
        raise NotSelectableError(
            "torch.index_select has no form for a stack of unlike specs. Index the stack: stack[index]."
        )

    def _with_dynamic(self, axis: int) -> Any:
        if axis == self._stack_dim:
            raise SpecStackError(
                f"axis {axis} is the stack axis and has {len(self._members)} members. "
                "Mark another axis as dynamic."
            )
        return self._each(lambda spec: spec._with_dynamic(axis - (axis > self._stack_dim)))

    # -- values ------------------------------------------------------------------------

    def _join(self, values: Sequence[Any], dim: int) -> Any:
        """Stack values of the members along axis ``dim``."""
        raise NotImplementedError

    def _split(self, value: Any) -> Sequence[Any] | None:
        """Split a value into those of the members; ``None`` if it is no stack of that many."""
        raise NotImplementedError

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Value:
        shape = lead(shape)
        return self._made(lambda spec: spec.rand(shape, generator), len(shape))

    def zero(self, shape: Shape = ()) -> Value:
        shape = lead(shape)
        return self._made(lambda spec: spec.zero(shape), len(shape))

    def one(self, shape: Shape = ()) -> Value:
        shape = lead(shape)
        return self._made(lambda spec: spec.one(shape), len(shape))

    def _made(self, make: Callable[[Any], Any], added: int) -> Any:
        """Join a value of each member, which has ``added`` axes in front."""
        return self._join(self._mapped_members(make), self._stack_dim + added)

    def enumerate(self, use_mask: bool = False) -> Value:
        lists = self._mapped_members(lambda spec: spec.enumerate(use_mask))
        pick = digits(torch.tensor([len(values) for values in lists], device="cpu"))
        picked = [v[column.to(v.device)] for v, column in zip(lists, pick.unbind(1), strict=True)]
        return self._join(picked, self._stack_dim + 1)

    def cardinality(self) -> float | int:
        return math.prod(spec.cardinality() for spec in self._members)

    def is_in(self, value: object) -> bool:
        parts = self._split(value)
        if parts is None:
            return False
        return all(spec.is_in(part) for spec, part in zip(self._members, parts, strict=True))

    def _complaint(self, value: Any) -> str:
        parts = self._split(value)
        if parts is None:
            return f"got {value!r}, which is no stack of {len(self._members)} values"
        pairs = enumerate(zip(self._members, parts, strict=True))
        i, spec, part = next((i, s, p) for i, (s, p) in pairs if not s.is_in(p))
        return f"in member {i}: {spec._complaint(part)}"

    def _mapped(self, value: Any, change: Callable[[Any, Any], Any]) -> Any:
        """Change the part of each member and join the results."""
        changed = self._mapped_members(change, self._parts(value))
        return self._join(changed, self._stack_dim + self._extra_axes(value))

    def _extra_axes(self, value: Any) -> int:
        return max(0, value.ndim - self.ndim) if hasattr(value, "ndim") else 0

    def _parts(self, value: Any) -> Sequence[Any]:
        parts = self._split(value)
        if parts is None:
            raise SpecError(
                f"{self._complaint(value)}. Pass one value for each member, along axis "
                f"{self._stack_dim}."
            )
        return parts

    def project(self, value: Value) -> Value:
        if self.is_in(value):
            return value
        return self._mapped(value, lambda spec, part: spec.project(part))

    def type_check(self, value: object, key: Key | None = None) -> None:
        self._mapped_members(lambda spec, part: spec.type_check(part, key), self._parts(value))

    # -- conversion --------------------------------------------------------------------

    def encode(self, raw: object, *, ignore_device: bool = False) -> Value:
        """Encode one raw value per member, given as a sequence or along the stack axis."""
        parts = self._raw_parts(raw)
        if len(parts) != len(self._members):
            raise EncodingError(
                f"got {len(parts)} raw values for a stack of {len(self._members)} specs. "
                "Pass one for each member."
            )
        values = self._mapped_members(
            lambda spec, part: spec.encode(part, ignore_device=ignore_device), parts
        )
        return self._join(values, self._stack_dim)

    def _raw_parts(self, raw: Any) -> Sequence[Any]:
        if isinstance(raw, Tensor) and raw.is_nested:
            return raw.unbind(0)
        if getattr(raw, "ndim", 0) > self._stack_dim:
            if isinstance(raw, np.ndarray):
                return list(np.moveaxis(raw, self._stack_dim, 0))
            return raw.unbind(self._stack_dim)
        if isinstance(raw, (list, tuple)):
            return raw
        raise EncodingError(
            f"got {raw!r} of type {type(raw).__name__} for a stack of {len(self._members)} specs. "
            f"Pass a list with a raw value for each member, or an array with axis {self._stack_dim}."
        )

    def memoize_encode(self, mode: bool = True) -> None:
        for spec in self._members:
            spec.memoize_encode(mode)

    def erase_memoize_cache(self) -> None:
        for spec in self._members:
            spec.erase_memoize_cache()

    def to_numpy(self, value: Value, safe: bool | None = None) -> Any:
        """Turn each member's part into NumPy data: one array if it can be, else a list."""
        self._check_if_safe(value, safe)
        parts = self._parts(value)
        arrays = self._mapped_members(lambda spec, part: spec.to_numpy(part, safe=False), parts)
        return self._join_numpy(arrays, self._stack_dim + self._extra_axes(value))

    def _join_numpy(self, arrays: Sequence[Any], dim: int) -> Any:
        """Stack the NumPy data of the members; a list of it where it has no common shape."""
        first = arrays[0]
        if all(isinstance(array, np.ndarray) and array.shape == first.shape for array in arrays):
            return np.stack(arrays, dim)
        return list(arrays)

    def to_one_hot(self, value: Value, safe: bool | None = None) -> Value:
        self._check_if_safe(value, safe)
        return self._mapped(value, lambda spec, part: spec.to_one_hot(part))

    def to_one_hot_spec(self) -> Self:
        return self._each(lambda spec: spec.to_one_hot_spec())

    def to_categorical(self, value: Value, safe: bool | None = None) -> Value:
        self._check_if_safe(value, safe)
        return self._mapped(value, lambda spec, part: spec.to_categorical(part))

    def to_categorical_spec(self) -> Self:
        return self._each(lambda spec: spec.to_categorical_spec())
