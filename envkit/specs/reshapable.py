"""The shape of a spec, and the operations on it that a tensor has too: indexing, `expand`, `view`, `unbind`.

`Reshapable` checks what is asked for and leaves the rest to `_map_shape`, by which a kind of spec applies
an operation to its shape and to everything it holds.

Conventions
    encoding   trailing axes that spell one value (a one-hot row); shape operations leave them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from envkit.errors import ArgumentTypeError, SpecAxisError
from envkit.specs import shapes
from envkit.specs.annotations import AxisIndex, Shape
from envkit.specs.shapes import Index, ShapeOp, as_shape, known

__all__ = ["Reshapable", "index_select", "squeeze", "unsqueeze"]


class Reshapable:
    """Something that has a shape and takes the shape operations of a tensor.

    Attributes:
        shape: sizes including the env's batch axes; -1 marks an axis of unknown size.
    """

    _shape: torch.Size
    _encoding_ndim: ClassVar[int] = 0

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def ndimension(self) -> int:
        """Count the axes."""
        return self.ndim

    def numel(self) -> int:
        """Count the elements of one value; an axis of unknown size counts as 1."""
        return known(self.shape).numel()

    @property
    def _free_shape(self) -> torch.Size:
        """The axes that shape operations may touch."""
        return self.shape[: self.ndim - self._encoding_ndim]

    # -- operations --------------------------------------------------------------------

    def _map_shape(self, op: ShapeOp) -> Self:
        """Apply an operation on leading axes to the shape and to everything the spec holds."""
        raise NotImplementedError

    def __getitem__(self, index: AxisIndex) -> Any:
        """Index the shape as a tensor would be.

        Raises:
            SpecAxisError: the index reaches into an encoding axis.
            SpecTypeError: the index is nothing that indexes axes.
            IndexError: the index is out of range.
        """
        items = shapes.split_index(index, self.ndim)
        if self._encoding_ndim:
            if not (isinstance(items[-1], slice) and items[-1] == slice(None)):
                raise self._encodes(f"index {index!r}")
            items = items[:-1]
        return self._map_shape(Index(items))

    def __iter__(self) -> Iterator[Any]:
        """Walk along the first axis, as over a tensor."""
        return iter(self.unbind(0))

    def _encodes(self, what: str) -> SpecAxisError:
        return SpecAxisError(
            f"{what} selects within the last axis of {type(self).__name__} of shape "
            f"{tuple(self.shape)}, which encodes one value. {self._free_advice()}"
        )

    def expand(self, *shape: Shape) -> Self:
        """Add leading axes and grow axes of size 1; a size of -1 keeps an axis, or adds a dynamic one.

        Raises:
            SpecError: a trailing size differs from the spec's.
        """
        return self._map_shape(shapes.expand_op(self._free_shape, self._without_encoding(shape)))

    def reshape(self, *shape: Shape) -> Self:
        """Reshape; a composite reshapes its batch axes and leaves keep their feature axes.

        Raises:
            SpecError: the number of elements differs.
        """
        return self._map_shape(shapes.reshape_op(self._free_shape, self._without_encoding(shape)))

    def view(self, *shape: Shape) -> Self:
        """Reshape; the same as `reshape`, since a spec holds no data."""
        return self.reshape(*shape)

    def squeeze(self, dim: int | None = None) -> Self:
        """Drop axis ``dim`` if its size is 1, or every axis of size 1."""
        if dim is not None:
            dim = self._free_axis(dim)
        return self._map_shape(shapes.squeeze_op(self._free_shape, dim))

    def unsqueeze(self, dim: int) -> Self:
        """Insert an axis of size 1; ``dim=-1`` appends it last."""
        return self._map_shape(shapes.unsqueeze_op(self._free_axis(dim, new=1)))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Merge the axes from ``start_dim`` to ``end_dim``, both included; at least one remains."""
        if not self.ndim:
            return self.reshape(1)
        start, end = self._free_axis(start_dim), self._free_axis(end_dim)
        return self._map_shape(shapes.flatten_op(self._free_shape, start, end))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Self:
        """Split axis ``dim`` into ``sizes``, one of which may be -1."""
        return self._map_shape(
            shapes.unflatten_op(self._free_shape, self._free_axis(dim), tuple(sizes))
        )

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Split along axis ``dim`` into one spec per index."""
        axis = self._free_axis(dim)
        return tuple(self[(slice(None),) * axis + (i,)] for i in range(self.shape[axis]))

    def make_neg_dim(self, dim: int) -> Self:
        """Mark axis ``dim`` as of unknown size (-1). Data made from the spec has size 1 there."""
        return self._with_dynamic(self._free_axis(dim))

    def _select(self, axis: int, index: Tensor) -> Self:
        """Select along an axis, with what ``torch.index_select`` takes."""
        if axis >= len(self._free_shape):
            raise self._encodes(f"index_select along axis {axis}")
        return self._map_shape(Index((*(slice(None),) * axis, index)))

    def _with_dynamic(self, axis: int) -> Self:
        raise NotImplementedError

    def _free_axis(self, dim: int, *, new: int = 0) -> int:
        """Normalise an axis and check that it is no encoding axis."""
        axis = shapes.axis_of(dim, self.ndim + new)
        if axis >= len(self._free_shape) + new:
            raise SpecAxisError(
                f"dim {dim} is the encoding axis of {type(self).__name__} of shape "
                f"{tuple(self.shape)}. {self._free_advice(new)}"
            )
        return axis

    def _free_advice(self, new: int = 0) -> str:
        count = len(self._free_shape) + new
        return f"Use the first {count} axes only." if count else "It has no other axis."

    def _without_encoding(self, sizes: Any) -> torch.Size:
        """Check that the sizes asked for end in the encoding axes, and drop these."""
        sizes = as_shape(sizes)
        encoding = self.shape[len(self._free_shape) :]
        cut = len(sizes) - len(encoding)
        if cut < 0 or any(n not in (o, -1) for n, o in zip(sizes[cut:], encoding, strict=True)):
            raise SpecAxisError(
                f"{type(self).__name__} of shape {tuple(self.shape)} cannot take the shape "
                f"{tuple(sizes)}: the last axis encodes a value. End the sizes in "
                f"{tuple(encoding)}."
            )
        return sizes[:cut]


def index_select(spec: Any, dim: int, index: Tensor) -> Any:
    """Select indices along an axis; this is what ``torch.index_select`` does with a spec.

    Args:
        spec: a leaf or a composite; a stack of unlike specs is indexed instead: ``stack[index]``.
        dim: an axis that does not encode values.
        index: integers from 0 on, of shape ``()`` or ``(count,)``.

    Returns:
        A spec of the same class whose axis has size ``count``, bounds and masks selected.

    Raises:
        ArgumentTypeError: ``index`` is no tensor of integers.
        SpecAxisError: there is no such axis, it encodes values, or an index is out of range.
        NotSelectableError: the spec is or holds a stack of unlike specs.
    """
    axis = shapes.axis_of(dim, spec.ndim)
    if not isinstance(index, Tensor) or index.dtype.is_floating_point or index.dtype == torch.bool:
        raise ArgumentTypeError(f"index is {index!r}. Pass a tensor of integers.")
    numbers, size = index.flatten().tolist(), spec.shape[axis]
    if index.ndim > 1 or any(not 0 <= number < abs(size) for number in numbers):
        raise SpecAxisError(
            f"index {index.tolist()} does not select from axis {axis} of shape {tuple(spec.shape)}. Pass "
            f"one axis of numbers from 0 to {size - 1}."
        )
    return spec._select(axis, index.flatten())


def squeeze(spec: Any, dim: int | None = None) -> Any:
    """Drop axes of size 1; this is what ``torch.squeeze`` does with a spec."""
    return spec.squeeze(dim)


def unsqueeze(spec: Any, dim: int) -> Any:
    """Insert an axis of size 1; this is what ``torch.unsqueeze`` does with a spec."""
    return spec.unsqueeze(dim)
