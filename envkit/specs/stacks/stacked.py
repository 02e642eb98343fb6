"""Stacks of specs: one spec for several envs that need not agree.

This module decides when specs can be stacked, and how the values of the members of a stack are
joined and split. It asks the members for everything else.

Conventions
    nested   ragged leaf values are a nested tensor; its first axis is always the member.
    keys     a stack of composites has those that all members share.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, is_tensor_collection, is_tensorclass, lazy_stack
from torch import Tensor

from envkit.errors import SpecStackError
from envkit.specs.annotations import Key, Numbers, Value
from envkit.specs.base import TensorSpec
from envkit.specs.leaves.spaces import BoxList
from envkit.specs.shapes import ShapeOp, names_after
from envkit.specs.stacks.stack_base import Stack
from envkit.specs.trees.branch import Child
from envkit.specs.trees.composite import Composite
from envkit.specs.trees.walk import as_path, is_key

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
    axis = first._free_axis(dim, new=1)
    if all(spec == first for spec in specs[1:]):
        single = first.unsqueeze(axis)
        return single.expand(*single.shape[:axis], len(specs), *single.shape[axis + 1 :])
    kind = StackedComposite if isinstance(first, Composite) else Stacked
    return kind(*specs, dim=axis)


class Stacked(Stack):
    """Describe a stack of leaves of one class whose domains or shapes differ.

    Made by ``torch.stack``. Indexing the stack axis gives the member back. Values are ordinary
    tensors if the members' shapes agree, else nested tensors with the member as first axis.

    Args:
        *specs: the members, leaves of one class, dtype, device and number of axes.
        dim: axis along which they lie.

    Raises:
        SpecStackError: the members differ in more than domain and sizes.
    """

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
        if not isinstance(values[0], Tensor):  # objects
            return lazy_stack(list(values), dim)
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

    def type_check(self, value: object, key: Key | None = None) -> None:
        if isinstance(value, Tensor):  # the members share the dtype, whatever the shape
            TensorSpec.type_check(self, value, key)
        else:
            super().type_check(value, key)

    def index(self, index: Value, tensor: Tensor | Sequence[Tensor]) -> Tensor:
        """Pick for each member what its part of a value points at.

        Args:
            index: a value of this spec.
            tensor: numbers for all options, with the members along the stack axis; a list or
                nested tensor of one tensor for each member if they have unlike options.
        """
        if isinstance(tensor, Tensor) and not tensor.is_nested:
            tensors = tensor.unbind(self._stack_dim + tensor.ndim - 1 - len(self._free_shape))
        else:
            tensors = list(tensor)
        picked = self._mapped_members(
            lambda spec, part, options: spec.index(part, options), self._parts(index), tensors
        )
        return self._join(picked, self._stack_dim + self._extra_axes(index))

    def update_mask(self, mask: Tensor | Sequence[Numbers] | None) -> None:
        """Give each member its part of a mask.

        Args:
            mask: bool, the members along the stack axis; a list of masks if they have unlike
                options; ``None`` allows all.
        """
        if mask is None:
            parts = [None] * len(self._members)
        else:
            parts = mask.unbind(self._stack_dim) if isinstance(mask, Tensor) else mask
        self._mapped_members(lambda spec, part: spec.update_mask(part), parts)


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
        if None in children:
            raise SpecStackError(
                f"entry {name!r} has no spec in member {children.index(None)}. Take the member "
                "first: stack[i][key]."
            )
        child = stack(children, self._dim)
        if isinstance(child, Composite) and not isinstance(child, StackedComposite):
            child.lock_()  # a copy: an edit of it would be lost
        return child


class StackedComposite(Stack, Composite):
    """Describe a stack of composites that differ.

    Made by ``torch.stack``. Its keys are those that all members share; ``stack[i]`` is member ``i``
    with all its own keys. Values are lazily stacked TensorDicts.

    Args:
        *specs: the members, composites with one number of batch axes.
        dim: axis along which they lie.

    Raises:
        SpecStackError: a member is no composite, or has another number of axes.
    """

    _stack_name: str | None = None

    def __init__(self, *specs: TensorSpec, dim: int = 0):
        super().__init__(*specs, dim=dim)
        self._locked, self._lock_parents = False, []
        self.data_cls = None  # each member's values are of its own class

    @staticmethod
    def _kind(spec: TensorSpec) -> tuple[Any, ...]:
        return ("Composite" if isinstance(spec, Composite) else type(spec).__name__), spec.ndim

    @property
    def names(self) -> list[str | None]:
        """Names of the batch axes, ``None`` where there is none or the members disagree."""
        columns = zip(*(spec.names for spec in self._members), strict=True)
        names = [column[0] if len(set(column)) == 1 else None for column in columns]
        return [*names[: self._stack_dim], self._stack_name, *names[self._stack_dim :]]

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        names = self._checked_names(names) or (None,) * self.ndim
        self._stack_name = names[self._stack_dim]
        for spec in self._members:
            spec.names = [*names[: self._stack_dim], *names[self._stack_dim + 1 :]]

    def _map_shape(self, op: ShapeOp) -> Any:
        new = super()._map_shape(op)
        names = names_after(op, tuple(self.names), self._shape)
        if isinstance(new, Composite) and any(names):
            new.names = names
        return new

    def _facts(self) -> dict[str, Any]:
        return {"names": self.names} | super()._facts() if any(self.names) else super()._facts()

    def _children(self) -> Mapping[str, TensorSpec | None]:
        return _SharedChildren(self._members, self._stack_dim)

    def _is_tree(self, name: str) -> bool:
        return all(spec._is_tree(name) for spec in self._members)

    def _lockables(self) -> Iterator[Composite]:
        return iter(self._members)

    def _each(self, change: Any) -> Self:
        new = super()._each(change)
        new._stack_name = self._stack_name
        return new

    def clone(self, recurse: bool = True) -> Self:
        return self._each(lambda spec: spec.clone(recurse))

    def empty(self) -> Composite:
        return stack([spec.empty() for spec in self._members], self._stack_dim)

    def is_empty(self, recurse: bool = False) -> bool:
        return all(spec.is_empty(recurse) for spec in self._members)

    def _assign_shape(self, shape: torch.Size) -> None:
        raise SpecStackError(
            f"the shape of a stack of unlike specs cannot be assigned, got {tuple(shape)}. "
            "Assign the shapes of the members before stacking."
        )

    def set(self, key: Key, spec: Child) -> Self:
        """Split a spec along the stack axis and give each member its part.

        Returns:
            This composite.
        """
        self._check_unlocked(f"set {key!r}")
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=self._shape)
        spec = self._checked(str(key), spec)
        parts = [None] * len(self._members) if spec is None else spec.unbind(self._stack_dim)
        self._mapped_members(lambda member, part: member.set(key, part), parts)
        return self

    def __setitem__(self, key: Key, spec: Child) -> None:
        if not is_key(key):
            raise SpecStackError(
                f"a member of a stack of composites cannot be exchanged, got the index {key!r}. Edit the "
                "member, e.g. stack[i][key] = spec, or stack anew."
            )
        super().__setitem__(key, spec)

    def __delitem__(self, key: Key) -> None:
        """Delete an entry from all members that have it."""
        path = as_path(key)
        owners = [member for member in self._members if path in member.keys(include_nested=True)]
        if not owners:
            raise self._no_such_key(key)
        self._check_unlocked(f"delete {key!r}")
        for member in owners:
            del member[path]

    def update(self, other: Mapping[Any, Any] | Composite) -> Self:
        if isinstance(other, StackedComposite) and other.stack_dim == self._stack_dim:
            self._check_unlocked("update it")
            self._mapped_members(lambda mine, its: mine.update(its), other._members)
            return self
        return super().update(other)

    def _join_numpy(self, arrays: Sequence[Any], dim: int) -> dict[str, Any]:
        names = dict.fromkeys(name for entries in arrays for name in entries)
        columns = {name: [entries.get(name) for entries in arrays] for name in names}
        return {name: self._join_column(column, dim) for name, column in columns.items()}

    def _join_column(self, column: list[Any], dim: int) -> Any:
        if all(isinstance(entry, dict) for entry in column):
            return self._join_numpy(column, dim)
        return super()._join_numpy(column, dim)

    def to_numpy(self, value: Value, safe: bool | None = None) -> dict[str, Any]:
        """Turn each entry into one array if it can be, else into a list with an item for each member.

        An entry that a member lacks is None there.
        """
        return super().to_numpy(value, safe)

    def _raw_parts(self, raw: Any) -> Sequence[Any]:
        if not isinstance(raw, Mapping):
            return super()._raw_parts(raw)
        columns = {key: self._raw_parts(item) for key, item in raw.items()}
        rows = zip(*columns.values(), strict=True)
        parts = [dict(zip(columns, row, strict=True)) for row in rows]
        return [
            {k: v for k, v in part.items() if v is not None or k in spec}
            for spec, part in zip(self._members, parts, strict=True)
        ]

    def _join(self, values: Sequence[Any], dim: int) -> Any:
        if any(is_tensorclass(value) for value in values):
            return lazy_stack(list(values), dim)
        return LazyStackedTensorDict(*values, stack_dim=dim, stack_dim_name=self._stack_name)

    def _split(self, value: Any) -> Sequence[Any] | None:
        if not is_tensor_collection(value) or value.ndim < self.ndim:
            return None
        parts = value.unbind(self._stack_dim + value.ndim - self.ndim)
        return parts if len(parts) == len(self._members) else None

    def type_check(self, value: object, key: Key | None = None) -> None:
        if key is not None:
            self.get(key).type_check(value, key)
            return
        super().type_check(value)
