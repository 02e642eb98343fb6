"""What a shape operation makes of a stack of unlike specs.

This module decides which members an operation touches, and how they are stacked again. It knows
that specs have shapes and can be indexed, reshaped and stacked with ``torch.stack``.

Conventions
    members  specs whose shapes are that of the stack without axis ``dim``.
    shape    sizes of the stack; -1 where the members disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envkit.errors import SpecAxisError, SpecStackError
from envkit.specs.shapes import Expand, Index, Reshape, ShapeOp

__all__ = ["mapped"]

Members = Sequence[Any]


def mapped(members: Members, dim: int, shape: torch.Size, op: ShapeOp) -> Any:
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


def _drops_axis(item: Any) -> bool:
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
