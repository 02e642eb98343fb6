"""Stacks of specs: one spec for several envs that need not agree.

This module decides when specs can be stacked, what a stack of unlike members reports of itself, what a shape
operation makes of it, and how the values of its members are joined and split. It asks the members for everything else.

Conventions
    members     the stacked specs, in order, held by reference: an edit of a member shows.
    stack_dim   axis of the stack's shape along which they lie, not negative.
    -1          size of an axis on which the members disagree.
    nested      ragged leaf values are a nested tensor; its first axis is always the member.
    keys        a stack of composites has those that all members share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Self

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, is_tensor_collection, is_tensorclass, lazy_stack
from torch import Generator, Tensor

from envkit.errors import (
    EncodingError,
    NotSelectableError,
    SpecAxisError,
    SpecError,
    SpecStackError,
)
from envkit.process_wide import no_warnings
from envkit.specs.annotations import Key, Numbers, Place, Shape, Value
from envkit.specs.composite import Composite
from envkit.specs.leaves.leaf import BoxList, digits
from envkit.specs.shapes import Expand, Index, Reshape, ShapeOp, lead, names_after
from envkit.specs.tensor_spec import TensorSpec
from envkit.specs.trees import Branch, Child, as_path, at_member, is_key

Members = Sequence[Any]


def _operated(members: Members, dim: int, shape: torch.Size, op: ShapeOp) -> Any:
    """Apply a shape operation to a stack.

    Args:
        members: what is stacked.
        dim: axis along which they lie, not negative.
        shape: sizes of the stack, of which the operation acts on the first axes.
        op: one of the operations of `shapes`.

    Returns:
        The very member if the operation picks one, so that an edit of it shows in the stack; else a spec
        that ``torch.stack`` makes.

    Raises:
        SpecStackError: the result is no stack.
        SpecError: the operation does not fit a member.
    """
    if isinstance(op, Index):
        return _indexed(members, dim, op)
    if isinstance(op, Expand):
        return _expanded(members, dim, op)
    if isinstance(op, Reshape):
        if op.ndim <= dim:  # all axes before that of the stack
            return _stacked(
                [spec._map_shape(op) for spec in members], dim + len(op.sizes) - op.ndim
            )
        return _reshaped(members, dim, shape[: op.ndim], torch.Size(op.sizes))
    raise TypeError(f"{op!r} is no operation on shapes.")


def _stacked(specs: Members, dim: int) -> Any:
    if not specs:
        raise SpecStackError(
            "the index selects no member of a stack of unlike specs, and nothing is no spec. "
            "Select at least one member."
        )
    return torch.stack(list(specs), dim)


# -- index -----------------------------------------------------------------------------


def _indexed(members: Members, dim: int, op: Index) -> Any:
    """Index the members with all items but the one for the stack axis."""
    arrays = [item for item in op.items if isinstance(item, Tensor) and not _drops_axis(item)]
    if len(arrays) > 1 or any(item.ndim != 1 for item in arrays):
        raise SpecStackError(
            f"a stack of unlike specs cannot be indexed with {len(arrays)} arrays of "
            f"{[item.ndim for item in arrays]} axes. Index one axis at a time, with one flat list, "
            "mask or tensor."
        )
    axis, new_axis = 0, 0  # next axis of the stack, and of the result
    chosen, chosen_axis = slice(None), None
    rest = []
    for item in op.items:
        if axis == dim and item is not None and chosen_axis is None:
            chosen, chosen_axis = item, new_axis
            axis += 1
            continue
        rest.append(item)
        axis += item is not None
        new_axis += not _drops_axis(item)
    inner = Index(tuple(rest))
    if _drops_axis(chosen):
        [member] = _chosen(members, [int(chosen)])  # type: ignore[arg-type]
        whole = all(isinstance(item, slice) and item == slice(None) for item in rest)
        return member if whole else member._map_shape(inner)
    if chosen_axis is None:  # the stack axis comes after all items
        chosen_axis = new_axis + dim - axis
    picked = [spec._map_shape(inner) for spec in _chosen(members, chosen)]
    return _stacked(picked, chosen_axis)


def _drops_axis(item: object) -> bool:
    if isinstance(item, Tensor):
        return item.ndim == 0 and item.dtype != torch.bool
    return isinstance(item, (int, np.integer))


def _chosen(members: Members, item: Any) -> list[Any]:
    """Select members with a slice, a mask or numbers."""
    if isinstance(item, slice):
        return list(members[item])
    if isinstance(item, Tensor) and item.dtype == torch.bool:
        if len(item) != len(members):
            raise SpecAxisError(
                f"a mask of {len(item)} flags does not fit a stack of {len(members)} members. "
                "Pass one flag for each member."
            )
        item = item.nonzero().flatten()
    numbers = [int(number) for number in item]
    if any(not -len(members) <= number < len(members) for number in numbers):
        raise SpecAxisError(
            f"index {numbers} is out of range for a stack of {len(members)} members. "
            f"Pass numbers from {-len(members)} to {len(members) - 1}."
        )
    return [members[number] for number in numbers]


# -- expand, reshape -------------------------------------------------------------------


def _expanded(members: Members, dim: int, op: Expand) -> Any:
    added = len(op.sizes) - op.ndim
    if op.ndim <= dim:
        return _stacked([spec._map_shape(op) for spec in members], dim + added)
    axis = dim + added
    inner = Expand(op.ndim - 1, (*op.sizes[:axis], *op.sizes[axis + 1 :]))
    copies = op.sizes[axis] if len(members) == 1 and op.sizes[axis] != -1 else 1
    return _stacked([spec._map_shape(inner) for spec in members] * copies, axis)


def _reshaped(members: Members, dim: int, shape: torch.Size, sizes: torch.Size) -> Any:
    """Reshape across the stack axis.

    The axes that are merged with that of the stack, or split from it, form a block: it is taken
    apart element by element and stacked again. Before and after it each member is reshaped.
    """
    start, new_start = _matching_start(shape, sizes, dim)
    stop, new_stop = _matching_stop(shape, sizes, dim, new_start)
    block, new_block = shape[start:stop], sizes[new_start:new_stop]
    if -1 in block or -1 in new_block or math.prod(block) != math.prod(new_block):
        raise SpecStackError(
            f"a stack of unlike specs of shape {tuple(shape)} along axis {dim} cannot become "
            f"{tuple(sizes)}: that merges the members with an axis on which they disagree. "
            "Reshape the members instead, and stack them again."
        )
    within = (*block[: dim - start], *block[dim - start + 1 :])  # the block in each member
    if shape[stop:] == sizes[new_stop:]:
        op = Reshape(stop - 1, (*sizes[:new_start], *within))
    else:
        op = Reshape(len(shape) - 1, (*sizes[:new_start], *within, *sizes[new_stop:]))
    reshaped = [spec._map_shape(op) for spec in members]
    elements = []
    for numbers in product(*map(range, block)):
        inner = (*numbers[: dim - start], *numbers[dim - start + 1 :])
        index = Index((*(slice(None),) * new_start, *inner))
        elements.append(reshaped[numbers[dim - start]]._map_shape(index))
    return _stacked_block(elements, new_block, new_start)


def _stacked_block(elements: Members, sizes: Sequence[int], dim: int) -> Any:
    """Stack elements, in row-major order, to new axes of these sizes from ``dim`` on."""
    if not sizes:
        return elements[0]
    count = len(elements) // sizes[0]
    rows = [elements[i * count : (i + 1) * count] for i in range(sizes[0])]
    return _stacked([_stacked_block(row, sizes[1:], dim) for row in rows], dim)


def _matching_start(shape: torch.Size, sizes: torch.Size, dim: int) -> tuple[int, int]:
    """Find how many axes before ``dim`` keep to themselves, and what they become."""
    for start in range(dim, 0, -1):
        if shape[:start] == sizes[:start]:
            return start, start
        for new in range(len(sizes) + 1):
            if _same_count(shape[:start], sizes[:new]):
                return start, new
    return 0, 0


def _matching_stop(shape: torch.Size, sizes: torch.Size, dim: int, low: int) -> tuple[int, int]:
    """Find from which axis after ``dim`` on all keep to themselves, and what they become."""
    for stop in range(dim + 1, len(shape)):
        new = len(sizes) - (len(shape) - stop)
        if new >= low and shape[stop:] == sizes[new:]:
            return stop, new
        for new in range(len(sizes), low - 1, -1):
            if _same_count(shape[stop:], sizes[new:]):
                return stop, new
    return len(shape), len(sizes)


def _same_count(a: torch.Size, b: torch.Size) -> bool:
    return -1 not in a and -1 not in b and math.prod(a) == math.prod(b)


class Stack(TensorSpec):
    """Base of stacks of leaves and of stacks of composites."""

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
        """The common kind of the members of a stack; a stack counts as what it is made of."""
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
    def is_choice(self) -> bool:
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
        return _operated(self._members, self._stack_dim, self._free_shape, op)

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

    def _split(self, value: object) -> Sequence[Any] | None:
        """Split a value into those of the members; ``None`` if it is no stack of that many."""
        raise NotImplementedError

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Value:
        shape = lead(shape)
        return self._joined(lambda spec: spec.rand(shape, generator), len(shape))

    def zero(self, shape: Shape = ()) -> Value:
        shape = lead(shape)
        return self._joined(lambda spec: spec.zero(shape), len(shape))

    def one(self, shape: Shape = ()) -> Value:
        shape = lead(shape)
        return self._joined(lambda spec: spec.one(shape), len(shape))

    def _joined(self, make: Callable[[Any], Any], added: int) -> Any:
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

    def _complaint(self, value: object) -> str:
        parts = self._split(value)
        if parts is None:
            return f"got {value!r}, which is no stack of {len(self._members)} values"
        pairs = enumerate(zip(self._members, parts, strict=True))
        i, spec, part = next((i, s, p) for i, (s, p) in pairs if not s.is_in(p))
        return f"in member {i}: {spec._complaint(part)}"

    def _mapped(self, value: object, change: Callable[[Any, Any], Any]) -> Any:
        """Change the part of each member and join the results."""
        changed = self._mapped_members(change, self._parts(value))
        return self._join(changed, self._stack_dim + self._extra_axes(value))

    def _extra_axes(self, value: Any) -> int:
        return max(0, value.ndim - self.ndim) if hasattr(value, "ndim") else 0

    def _parts(self, value: object) -> Sequence[Any]:
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

    Example:
        >>> import torch
        >>> from envkit import Bounded
        >>> spec = torch.stack([Bounded(0.0, 1.0, (2,)), Bounded(0.0, 5.0, (2,))])
        >>> type(spec).__name__, spec.shape
        ('Stacked', torch.Size([2, 2]))
        >>> spec[1].space.high
        tensor([5., 5.])
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
        # torch announces that nested tensors are a prototype
        with no_warnings(category=UserWarning):
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

    def _extra_axes(self, value: object) -> int:
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
        """Update the mask of each member by its part.

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

    Example:
        >>> import torch
        >>> from envkit import Composite, Unbounded
        >>> walker = Composite(legs=Unbounded((4,)), head=Unbounded((2,)))
        >>> wheeled = Composite(head=Unbounded((2,)))
        >>> spec = torch.stack([walker, wheeled])
        >>> type(spec).__name__, list(spec.keys()), sorted(spec[0].keys())
        ('StackedComposite', ['head'], ['head', 'legs'])
    """

    _stack_name: str | None = None

    def __init__(self, *specs: TensorSpec, dim: int = 0):
        super().__init__(*specs, dim=dim)
        self._locked, self._lock_parents = False, []
        self.data_cls = None  # each member's values have that member's class

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
                "member, e.g. stack[i][key] = spec, or stack again."
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

    def update(self, other: Mapping[Any, Any] | Branch) -> Self:
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

    def _raw_parts(self, raw: object) -> Sequence[Any]:
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


def refuse_ragged(specs: Composite, kind: str, holder: str) -> None:
    """Check that the members of every leaf that is a stack have one shape, so that its values are tensors.

    Args:
        specs: of an env.
        kind: which, for messages: "observation".
        holder: what is to hold the values, for messages.

    Raises:
        SpecStackError: (a RuntimeError) those of one differ, as of a Tuple space of Gymnasium.
    """
    for path, spec in _ragged(specs):
        shapes = [tuple(member.shape) for member in spec.unbind(spec.stack_dim)]
        name = path[0] if len(path) == 1 else path
        raise SpecStackError(
            f"{name!r} in the {kind} spec stacks the unlike shapes {shapes}, which {holder} cannot hold. Turn the "
            "Tuple space that it comes from into a Dict, or one of observations into an array: "
            "GymWrapper(gymnasium.wrappers.FlattenObservation(env))."
        )


def _ragged(
    node: Composite, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Stacked]]:
    """Yield the leaves that stack unlike shapes; below a stack of nodes each row has its own leaf."""
    if isinstance(node, StackedComposite):
        return
    for name, spec in node.items():
        if isinstance(spec, Composite):
            yield from _ragged(spec, (*path, name))
        elif isinstance(spec, Stacked) and -1 in spec.shape:
            yield (*path, name), spec
