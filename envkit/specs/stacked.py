"""Stacks of specs: one spec for several envs that need not agree.

This module decides when specs can be stacked, what a stack of unlike members reports, and how
their values are joined. It asks the members for everything else.

Conventions
    members     the stacked specs, in order, held by reference: an edit of a member shows.
    stack_dim   axis of the stack's shape along which they lie, not negative.
    -1          size of an axis on which the members disagree.
    nested      ragged leaf values are a nested tensor; its first axis is always the member.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, is_tensor_collection
from torch import Generator, Tensor

from envkit.errors import EncodingError, SpecError, SpecStackError
from envkit.specs.base import Shape, TensorSpec
from envkit.specs.composite import Composite
from envkit.specs.shapes import Expand, Index, Reshape, ShapeOp, axis_of
from envkit.specs.spaces import BoxList
from envkit.specs.tree import as_key

__all__ = ["Stacked", "StackedComposite", "stack"]


def stack(specs: Sequence[Any], dim: int = 0, *, out: None = None) -> Any:
    """Stack specs along a new axis; this is what ``torch.stack`` does with them.

    Args:
        specs: at least one; composites with composites, leaves with leaves of the same class.
        dim: where the new axis goes.
        out: must be ``None``; there to have the signature of ``torch.stack``.

    Returns:
        An ordinary spec if all are equal, else a `Stacked` or `StackedComposite`.

    Raises:
        SpecStackError: the specs differ in class, dtype, device or number of axes.
    """
    specs = list(specs)
    if not specs or out is not None or not all(isinstance(spec, TensorSpec) for spec in specs):
        raise SpecStackError(
            f"cannot stack {[type(spec).__name__ for spec in specs]} into out={out!r}. "
            "Pass at least one spec and no `out`."
        )
    first = specs[0]
    axis = axis_of(dim, first.ndim + 1)
    if all(spec == first for spec in specs[1:]):
        single = first.unsqueeze(axis)
        return single.expand(*single.shape[:axis], len(specs), *single.shape[axis + 1 :])
    are_composites = all(isinstance(spec, Composite) for spec in specs)
    kinds = {_kind(spec, are_composites) for spec in specs}
    if len(kinds) > 1:
        raise SpecStackError(
            f"cannot stack specs of unlike kinds: {', '.join(sorted(map(str, kinds)))}. Stack "
            "specs of one class, dtype, device and number of axes; inside a stack of composites, "
            "take the member first: stack[i][key]."
        )
    return (StackedComposite if are_composites else Stacked)(specs, axis)


def _kind(spec: TensorSpec, is_composite: bool) -> tuple[Any, ...]:
    if is_composite:
        return Composite.__name__, spec.ndim
    return type(spec).__name__, spec.dtype, str(spec.device), spec.ndim


class _Stack(TensorSpec):
    """What stacks of leaves and of composites have in common."""

    _members: list[Any]
    _stack_dim: int

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
    def is_choice(self) -> bool:  # type: ignore[override]
        return all(spec.is_choice for spec in self._members)

    def _each(self, change: Callable[[Any], Any]) -> Any:
        """Make the stack of changed members."""
        new = self._copy()
        new._set_members([change(spec) for spec in self._members], self._stack_dim)
        return new

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, _Stack)
            and self._stack_dim == other._stack_dim
            and self._members == other._members
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        lines = [f"{i}: {spec!r}," for i, spec in enumerate(self._members)]
        lines.append(f"stack_dim={self._stack_dim},")
        lines.append(f"shape={tuple(self.shape)})")
        body = "\n".join(lines).replace("\n", "\n    ")
        return f"{type(self).__name__}(\n    {body}"

    def clone(self) -> Any:
        return self._each(lambda spec: spec.clone())

    def to(self, dest: Any) -> Any:
        return self._each(lambda spec: spec.to(dest))

    # -- shape -------------------------------------------------------------------------

    def _map_shape(self, op: ShapeOp) -> Any:
        dim = self._stack_dim
        if isinstance(op, Index):
            return self._indexed(op)
        if isinstance(op, (Expand, Reshape)) and op.ndim <= dim:  # all axes before the stack's
            return self._restack(op, dim + len(op.sizes) - op.ndim)
        if isinstance(op, Expand):
            new = dim + len(op.sizes) - op.ndim
            sizes = (*op.sizes[:new], *op.sizes[new + 1 :])
            copies = op.sizes[new] if len(self._members) == 1 and op.sizes[new] != -1 else 1
            return self._restack(Expand(op.ndim - 1, sizes), new, self._members * copies)
        raise SpecStackError(
            f"a stack of unlike specs along axis {dim} cannot be reshaped across that axis. "
            "Reshape the members instead, and stack them again."
        )

    def _restack(self, op: ShapeOp, dim: int, members: Sequence[Any] | None = None) -> Any:
        chosen = self._members if members is None else members
        return stack([spec._map_shape(op) for spec in chosen], dim)

    def _indexed(self, op: Index) -> Any:
        """Index the members with all items but the one for the stack axis."""
        axis, new_dim, chosen = 0, 0, slice(None)
        rest, dim = [], None
        for item in op.items:
            if axis == self._stack_dim and item is not None and dim is None:
                chosen, dim = item, new_dim
                axis += 1
                continue
            if isinstance(item, Tensor) and item.dtype == torch.bool and item.ndim > 1:
                raise SpecStackError(
                    f"a stack of unlike specs cannot be indexed with a mask of {item.ndim} axes. "
                    "Index one axis at a time."
                )
            rest.append(item)
            axis += item is not None
            new_dim += not _drops_axis(item)
        dim = new_dim + self._stack_dim - axis if dim is None else dim
        inner = Index(tuple(rest))
        if _drops_axis(chosen):
            return self._members[int(chosen)]._map_shape(inner)  # type: ignore[arg-type]
        return self._restack(inner, dim, _chosen(self._members, chosen))

    def _set_dynamic(self, axis: int) -> None:
        if axis == self._stack_dim:
            raise SpecStackError(
                f"axis {axis} is the stack axis and has {len(self._members)} members. "
                "Mark another axis as dynamic."
            )
        for spec in self._members:
            spec._set_dynamic(axis - (axis > self._stack_dim))
        self._set_members(self._members, self._stack_dim)

    # -- values ------------------------------------------------------------------------

    def _join(self, values: Sequence[Any], dim: int) -> Any:
        """Stack values of the members along axis ``dim``."""
        raise NotImplementedError

    def _split(self, value: Any) -> Sequence[Any] | None:
        """Split a value into those of the members; ``None`` if it is no stack of that many."""
        raise NotImplementedError

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Any:
        values = [spec.rand(shape, generator) for spec in self._members]
        return self._join(values, self._stack_dim + len(shape))

    def zero(self, shape: Shape = ()) -> Any:
        values = [spec.zero(shape) for spec in self._members]
        return self._join(values, self._stack_dim + len(shape))

    def one(self, shape: Shape = ()) -> Any:
        values = [spec.one(shape) for spec in self._members]
        return self._join(values, self._stack_dim + len(shape))

    def enumerate(self, use_mask: bool = False) -> Any:
        return TensorSpec.enumerate(self, use_mask)

    def cardinality(self) -> float | int:
        return math.prod(spec.cardinality() for spec in self._members)

    def is_in(self, value: Any) -> bool:
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
        parts = self._parts(value)
        changed = [change(spec, part) for spec, part in zip(self._members, parts, strict=True)]
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

    def project(self, value: Any) -> Any:
        if self.is_in(value):
            return value
        return self._mapped(value, lambda spec, part: spec.project(part))

    def type_check(self, value: Any, key: Any = None) -> None:
        for spec, part in zip(self._members, self._parts(value), strict=True):
            spec.type_check(part, key)

    # -- conversion --------------------------------------------------------------------

    def encode(self, raw: Any, *, ignore_device: bool = False) -> Any:
        """Encode one raw value per member, given as a sequence or along the stack axis."""
        parts = self._raw_parts(raw)
        if len(parts) != len(self._members):
            raise EncodingError(
                f"got {len(parts)} raw values for a stack of {len(self._members)} specs. "
                "Pass one for each member."
            )
        values = [
            spec.encode(part, ignore_device=ignore_device)
            for spec, part in zip(self._members, parts, strict=True)
        ]
        return self._join(values, self._stack_dim)

    def _raw_parts(self, raw: Any) -> Sequence[Any]:
        if isinstance(raw, Mapping):
            return [{key: item[i] for key, item in raw.items()} for i in range(len(self._members))]
        if isinstance(raw, Tensor) or is_tensor_collection(raw):
            return raw.unbind(self._stack_dim)
        if isinstance(raw, np.ndarray):
            return list(np.moveaxis(raw, self._stack_dim, 0))
        return list(raw)

    def memoize_encode(self, mode: bool = True) -> None:
        for spec in self._members:
            spec.memoize_encode(mode)

    def erase_memoize_cache(self) -> None:
        for spec in self._members:
            spec.erase_memoize_cache()

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Turn each member's part into NumPy data: one array if it can be, else a list."""
        self._check_if_safe(value, safe)
        pairs = zip(self._members, self._parts(value), strict=True)
        arrays = [spec.to_numpy(part, safe=False) for spec, part in pairs]
        return self._join_numpy(arrays, self._stack_dim + self._extra_axes(value))

    def _join_numpy(self, arrays: list[Any], dim: int) -> Any:
        return arrays

    def to_one_hot(self, value: Any, safe: bool | None = None) -> Any:
        self._check_if_safe(value, safe)
        return self._mapped(value, lambda spec, part: spec.to_one_hot(part))

    def to_one_hot_spec(self) -> Any:
        return self._each(lambda spec: spec.to_one_hot_spec())

    def to_categorical(self, value: Any, safe: bool | None = None) -> Any:
        self._check_if_safe(value, safe)
        return self._mapped(value, lambda spec, part: spec.to_categorical(part))

    def to_categorical_spec(self) -> Any:
        return self._each(lambda spec: spec.to_categorical_spec())


class Stacked(_Stack):
    """Describe a stack of leaves of one class whose domains or shapes differ.

    Made by ``torch.stack``. Indexing the stack axis gives the member back. Values are ordinary
    tensors if the members' shapes agree, else nested tensors with the member as first axis.
    """

    def __init__(self, specs: Sequence[TensorSpec], dim: int = 0):
        self._set_members(specs, axis_of(dim, specs[0].ndim + 1))

    @property
    def _encoding_ndim(self) -> int:  # type: ignore[override]
        return self._members[0]._encoding_ndim

    @property
    def domain(self) -> str | None:  # type: ignore[override]
        return self._members[0].domain

    @property
    def space(self) -> BoxList:
        return BoxList(tuple(spec.space for spec in self._members))

    def _join(self, values: Sequence[Any], dim: int) -> Any:
        if len({tuple(value.shape) for value in values}) == 1:
            return torch.stack(list(values), dim)
        with warnings.catch_warnings():  # torch announces that nested tensors are a prototype
            warnings.simplefilter("ignore", UserWarning)
            return torch.nested.as_nested_tensor(list(values))

    def _split(self, value: Any) -> Sequence[Any] | None:
        if isinstance(value, (list, tuple)):
            parts: Sequence[Any] = value
        elif isinstance(value, Tensor) and value.is_nested:
            parts = value.unbind(0)
        elif hasattr(value, "unbind") and value.ndim >= self.ndim:
            parts = value.unbind(self._stack_dim - self.ndim + value.ndim)
        else:
            return None
        return parts if len(parts) == len(self._members) else None

    def _extra_axes(self, value: Any) -> int:
        if isinstance(value, Tensor) and value.is_nested:
            return 0
        return super()._extra_axes(value)

    def _join_numpy(self, arrays: list[Any], dim: int) -> Any:
        return np.stack(arrays, dim) if len({array.shape for array in arrays}) == 1 else arrays

    def update_mask(self, mask: Any) -> None:
        """Give each member its part of a mask, taken along the stack axis; ``None`` allows all."""
        parts = [None] * len(self._members) if mask is None else mask.unbind(self._stack_dim)
        for spec, part in zip(self._members, parts, strict=True):
            spec.update_mask(part)


class _SharedChildren(Mapping):
    """The children that all members of a stack have, stacked when asked for."""

    def __init__(self, members: Sequence[Composite], dim: int):
        self._members, self._dim = members, dim

    def __iter__(self) -> Iterator[str]:
        first, *others = (spec._children() for spec in self._members)
        return (name for name in first if all(name in other for other in others))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return all(name in spec._children() for spec in self._members)

    def __getitem__(self, name: str) -> Any:
        children = [spec._children()[name] for spec in self._members]
        if all(child is None for child in children):
            return None
        child = stack(children, self._dim)
        if isinstance(child, Composite) and not isinstance(child, StackedComposite):
            child.lock_()  # a copy: an edit of it would be lost
        return child


class StackedComposite(_Stack, Composite):
    """Describe a stack of composites that differ.

    Made by ``torch.stack``. Its keys are those that all members share; ``stack[i]`` is member ``i``
    with all its own keys. Values are lazily stacked TensorDicts.
    """

    def __init__(self, specs: Sequence[Composite], dim: int = 0):
        self._locked, self._lock_parents, self._names = False, [], None
        self.data_cls = None
        self._set_members(specs, axis_of(dim, specs[0].ndim + 1))

    def _children(self) -> Mapping[str, TensorSpec | None]:
        return _SharedChildren(self._members, self._stack_dim)

    def _is_tree(self, name: str) -> bool:
        return all(spec._is_tree(name) for spec in self._members)

    def _lockables(self) -> Iterator[Composite]:
        return iter(self._members)

    def _each(self, change: Callable[[Any], Any]) -> Any:
        return StackedComposite([change(spec) for spec in self._members], self._stack_dim)

    def clone(self, recurse: bool = True) -> Any:
        return self._each(lambda spec: spec.clone(recurse))

    def empty(self) -> Composite:
        return stack([spec.empty() for spec in self._members], self._stack_dim)

    def _assign_shape(self, shape: torch.Size) -> None:
        raise SpecStackError(
            f"the shape of a stack of unlike specs cannot be assigned, got {tuple(shape)}. "
            "Assign the shapes of the members before stacking."
        )

    def set(self, key: Any, spec: Any) -> Any:
        """Split a spec along the stack axis and give each member its part.

        Returns:
            This composite.
        """
        self._check_unlocked(f"set {key!r}")
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=self._shape)
        spec = self._checked(str(key), spec)
        parts = [None] * len(self._members) if spec is None else spec.unbind(self._stack_dim)
        for member, part in zip(self._members, parts, strict=True):
            member.set(key, part)
        return self

    def __delitem__(self, key: Any) -> None:
        path = as_key(key)
        self.get(path)
        self._check_unlocked(f"delete {key!r}")
        for member in self._members:
            del member[path]

    def update(self, other: Mapping[Any, Any] | Composite) -> Any:
        if isinstance(other, StackedComposite) and other.stack_dim == self._stack_dim:
            self._check_unlocked("update it")
            for mine, its in zip(self._members, other._members, strict=True):
                mine.update(its)
            return self
        return super().update(other)

    def _join(self, values: Sequence[Any], dim: int) -> Any:
        return LazyStackedTensorDict(*values, stack_dim=dim)

    def _split(self, value: Any) -> Sequence[Any] | None:
        if not is_tensor_collection(value) or value.ndim < self.ndim:
            return None
        parts = value.unbind(self._stack_dim + value.ndim - self.ndim)
        return parts if len(parts) == len(self._members) else None

    def type_check(self, value: Any, key: Any = None) -> None:
        if key is not None:
            self.get(key).type_check(value)
            return
        super().type_check(value)


def _drops_axis(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.ndim == 0 and item.dtype != torch.bool
    return isinstance(item, (int, np.integer))


def _chosen(members: list[Any], item: Any) -> list[Any]:
    """Select members with a slice, a mask or numbers."""
    if isinstance(item, slice):
        return members[item]
    if item.dtype == torch.bool:
        return [spec for spec, keep in zip(members, item.tolist(), strict=True) if keep]
    return [members[i] for i in item.tolist()]
