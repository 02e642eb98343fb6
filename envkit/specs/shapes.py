"""Shape operations as values: what indexing, `expand` and `reshape` do to any tensor of a spec.

This module decides how a user's arguments become one of three operations, each of which acts on
the *leading* axes of any tensor, and what becomes of the names of axes. A leaf applies it to its
bounds and mask, a composite to all its leaves, whatever follows those axes. It knows no spec.

Conventions
    ndim   number of leading axes the operation was written for.
    -1     a size that is not known in advance (dynamic).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envkit.errors import AxisNameError, SpecAxisError, SpecError, SpecTypeError

_UNKNOWN = 1_000_003  # stands for -1 while a shape is traced through torch; no real axis is as long

ShapeOp = Callable[[Tensor], Tensor]
Names = tuple[str | None, ...]


@dataclass(frozen=True)
class Index:
    """Index the leading axes; ``items`` holds no ellipsis."""

    items: tuple[Any, ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor[self.items]


@dataclass(frozen=True)
class Expand:
    """Expand the ``ndim`` leading axes to ``sizes``, which may be longer.

    A size of -1 keeps an axis, and is a new axis of unknown size in front of those.
    """

    ndim: int
    sizes: tuple[int, ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        added = data_shape(self.sizes[: len(self.sizes) - self.ndim])
        kept = self.sizes[len(added) :]
        return tensor.expand((*added, *kept, *tensor.shape[self.ndim :]))


@dataclass(frozen=True)
class Reshape:
    """Reshape the ``ndim`` leading axes to ``sizes``."""

    ndim: int
    sizes: tuple[int, ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.reshape((*self.sizes, *tensor.shape[self.ndim :]))


def as_shape(shape: Any) -> torch.Size:
    """Turn an int, a sequence of ints or one sequence in a tuple (``f(*shape)``) into a Size."""
    if isinstance(shape, torch.Size):
        return shape
    if isinstance(shape, int):
        return torch.Size((shape,))
    shape = tuple(shape)
    if len(shape) == 1 and isinstance(shape[0], Iterable):
        shape = tuple(shape[0])
    return torch.Size(int(size) for size in shape)


def lead(shape: object) -> tuple[int, ...]:
    """Return the axes that a caller puts in front of those of a spec; an int is one axis, ``None`` none.

    Raises:
        SpecTypeError: they are neither an int nor a sequence of ints.
    """
    if isinstance(shape, tuple):
        return shape
    if shape is None:
        return ()
    if isinstance(shape, (int, np.integer)):
        return (int(shape),)
    if isinstance(shape, Sequence) and not isinstance(shape, str):
        return tuple(shape)
    raise SpecTypeError(
        f"shape is {shape!r} of type {type(shape).__name__}. Pass the axes to put in front of those of "
        "the spec, e.g. spec.rand((3,))."
    )


def data_shape(shape: Iterable[int]) -> torch.Size:
    """Return the shape that data gets: a dynamic axis has size 1."""
    return torch.Size(1 if size == -1 else size for size in shape)


def with_dynamic(shape: torch.Size, axis: int) -> torch.Size:
    """Return the shape with a dynamic axis."""
    return torch.Size((*shape[:axis], -1, *shape[axis + 1 :]))


def shape_after(op: ShapeOp, shape: torch.Size) -> torch.Size:
    """Return the shape of ``op(tensor)`` for a tensor of ``shape``, dynamic axes included."""
    probe = torch.empty((), dtype=torch.bool, device="cpu")
    if -1 in shape:
        probed = op(probe.expand([_UNKNOWN if size == -1 else size for size in shape])).shape
        result = torch.Size(-1 if size > _UNKNOWN // 2 else size for size in probed)
    else:
        result = op(probe.expand(shape)).shape
    if isinstance(op, Expand):  # new axes may be dynamic
        added = op.sizes[: len(op.sizes) - op.ndim]
        result = torch.Size((*added, *result[len(added) :]))
    return result


def refined_names(names: Sequence[str | None], renamed: Sequence[Any]) -> list[str | None]:
    """Fill in the names of axes without one; ``...`` keeps those of the axes in between.

    Raises:
        AxisNameError: an axis has another name already.
    """
    renamed = list(renamed)
    if ... in renamed:
        dots = renamed.index(...)
        renamed[dots : dots + 1] = names[dots : dots + len(names) - len(renamed) + 1]
    if len(renamed) != len(names):
        return renamed
    clash = [old for new, old in zip(renamed, names, strict=True) if old not in (None, new)]
    if clash:
        raise AxisNameError(
            f"axis {clash[0]!r} has a name already. Repeat it, or assign `spec.names` to rename it."
        )
    return renamed


def names_after(op: ShapeOp, names: Names, shape: torch.Size) -> Names:
    """Return the names of the axes of ``op(tensor)``, ``None`` for axes that the operation makes.

    Args:
        op: one of the three operations.
        names: names of the axes of the tensor; the operation may act on the first of them only.
        shape: sizes of these axes.
    """
    if isinstance(op, Index):
        return _names_indexed(op.items, names)
    if isinstance(op, Expand):
        return (None,) * (len(op.sizes) - op.ndim) + names
    if isinstance(op, Reshape):
        first = _equal_run(shape[: op.ndim], op.sizes)
        last = _equal_run(shape[first : op.ndim][::-1], op.sizes[first:][::-1])
        made = (None,) * (len(op.sizes) - first - last)
        return names[:first] + made + names[op.ndim - last :]
    return names


def _equal_run(sizes: Sequence[int], others: Sequence[int]) -> int:
    """Count the equal sizes at the beginning."""
    pairs = zip(sizes, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(sizes), len(others)))


def _names_indexed(items: Sequence[Any], names: Names) -> Names:
    """Return the names of the axes of an indexed tensor; lists and masks are placed as torch places them."""
    axes: list[Any] = []  # a name or None per axis, and each array at its place
    left = list(names)
    for item in items:
        taken, left = left[: _axes_taken(item)], left[_axes_taken(item) :]
        if item is None:
            axes.append(None)
        elif isinstance(item, slice):
            axes += taken
        elif isinstance(item, Tensor):
            axes.append((item, taken))
    arrays = [i for i, axis in enumerate(axes) if isinstance(axis, tuple)]
    if not arrays:
        return tuple(axes + left)
    item, taken = axes[arrays[0]]
    if len(arrays) == 1 and item.ndim == 1:
        named = list(taken)
    else:
        indices = [axes[i][0] for i in arrays]
        named = [None] * max(1 if i.dtype == torch.bool else i.ndim for i in indices)
    side_by_side = arrays[-1] - arrays[0] + 1 == len(arrays)
    at = arrays[0] if side_by_side else 0
    rest = [axis for i, axis in enumerate(axes) if i not in arrays]
    return tuple(rest[:at] + named + rest[at:] + left)


def axis_of(dim: int, ndim: int) -> int:
    """Normalise a possibly negative axis.

    Raises:
        SpecAxisError: there is no such axis.
    """
    if not -ndim <= dim < ndim:
        expected = f"Pass a number from {-ndim} to {ndim - 1}." if ndim else "Add axes first."
        raise SpecAxisError(f"dim {dim} does not exist among {ndim} axes. {expected}")
    return dim % ndim


def split_index(index: object, ndim: int) -> tuple[Any, ...]:
    """Write an index as a tuple of items with no ellipsis, padded to all ``ndim`` axes.

    Lists, ranges and arrays become tensors. Too long an index is returned as it is: torch
    itself refuses it.

    Raises:
        SpecTypeError: an item is nothing that indexes axes.
    """
    items = tuple(_index_item(item) for item in (index if isinstance(index, tuple) else (index,)))
    spans = [_axes_taken(item) for item in items]
    missing = (slice(None),) * max(0, ndim - sum(spans))
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if not dots:
        return items + missing
    return items[: dots[0]] + missing + items[dots[0] + 1 :]


def _index_item(item: object) -> Any:
    if isinstance(item, bool):
        return torch.tensor(item, device="cpu")
    if isinstance(item, (list, tuple, range, np.ndarray)):
        return torch.as_tensor(np.asarray(item))
    if item is None or isinstance(item, (int, np.integer, slice, EllipsisType, Tensor)):
        return item
    raise SpecTypeError(
        f"{item!r} of type {type(item).__name__} does not index axes. Pass numbers, slices, lists "
        "or masks; only a Composite has keys."
    )


def _axes_taken(item: object) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype == torch.bool:
        return item.ndim
    return 1


def expand_op(shape: torch.Size, sizes: torch.Size) -> Expand:
    """Expand ``shape`` to ``sizes``: new leading axes, and growth of axes of size 1.

    Raises:
        SpecError: a trailing axis of another size than the spec's.
    """
    tail = sizes[len(sizes) - len(shape) :] if len(sizes) >= len(shape) else None
    if tail is None or any(n not in (o, -1) and o != 1 for n, o in zip(tail, shape, strict=True)):
        raise SpecError(
            f"a spec of shape {tuple(shape)} cannot be expanded to {tuple(sizes)}: the trailing "
            "axes must match, only axes of size 1 grow. Put new axes in front, for example "
            f"expand({', '.join(map(str, (2, *shape)))})."
        )
    return Expand(len(shape), tuple(sizes))


def reshape_op(shape: torch.Size, sizes: torch.Size) -> Reshape:
    """Reshape ``shape`` to ``sizes``; one size may be -1 and is inferred.

    Raises:
        SpecError: the number of elements differs.
    """
    if -1 not in shape:
        count, rest = math.prod(shape), math.prod(size for size in sizes if size != -1)
        fits = rest != 0 and count % rest == 0 if -1 in sizes else rest == count
        if not fits:
            raise SpecError(
                f"a spec of shape {tuple(shape)} has {count} elements and cannot be reshaped to "
                f"{tuple(sizes)}. Pass sizes whose product is {count}."
            )
        sizes = torch.Size(count // rest if size == -1 else size for size in sizes)
    return Reshape(len(shape), tuple(sizes))


def flatten_op(shape: torch.Size, start: int, end: int) -> Reshape:
    """Merge axes ``start`` to ``end``, both included and not negative.

    Raises:
        SpecError: ``end`` comes before ``start``.
    """
    if end < start:
        raise SpecError(
            f"flatten got start {start} after end {end}. Pass an end that is not before the start."
        )
    merged = shape[start : end + 1]
    size = -1 if -1 in merged else math.prod(merged)
    return Reshape(len(shape), (*shape[:start], size, *shape[end + 1 :]))


def unflatten_op(shape: torch.Size, dim: int, sizes: Sequence[int]) -> Reshape:
    """Split axis ``dim``, not negative, into ``sizes``."""
    inner = reshape_op(shape[dim : dim + 1], as_shape(sizes))
    return Reshape(len(shape), (*shape[:dim], *inner.sizes, *shape[dim + 1 :]))


def squeeze_op(shape: torch.Size, dim: int | None) -> Index:
    """Drop axis ``dim`` if its size is 1, or all such axes for ``None``."""
    dropped = range(len(shape)) if dim is None else (dim,)
    return Index(
        tuple(0 if i in dropped and size == 1 else slice(None) for i, size in enumerate(shape))
    )


def unsqueeze_op(dim: int) -> Index:
    """Insert an axis of size 1 at ``dim``, which is not negative."""
    return Index((slice(None),) * dim + (None,))
