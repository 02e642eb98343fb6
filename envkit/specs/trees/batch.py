"""The batch axes of a tree of specs: their sizes and names, which can be assigned.

This module decides how far an assignment reaches into a tree. It knows nothing of the data a tree describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, Self

import torch

from envkit.errors import SpecError
from envkit.specs import shapes
from envkit.specs.annotations import Shape
from envkit.specs.shapes import Names, as_shape
from envkit.specs.trees.branch import Branch

__all__ = ["Batched"]


class Batched(Branch):
    """A tree of specs with names for its batch axes."""

    _names: Names | None

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @shape.setter
    def shape(self, shape: Shape) -> None:
        self._check_unlocked("assign its shape")
        shape = as_shape(shape)
        for key, leaf in self.items(include_nested=True, leaves_only=True):
            if leaf is not None and leaf._free_shape[: len(shape)] != shape:
                raise SpecError(
                    f"shape {tuple(shape)} is not the beginning of the shape {tuple(leaf.shape)} "
                    f"of entry {key!r}. Expand the spec instead, or pass a prefix."
                )
        self._assign_shape(shape)

    def _assign_shape(self, shape: torch.Size) -> None:
        if shape != self._shape:
            self._shape, self._names = shape, None
        for child in self._specs.values():
            if isinstance(child, Batched) and child.shape[: len(shape)] != shape:
                child._assign_shape(shape)

    @property
    def batch_size(self) -> torch.Size:
        """Another name of ``shape``."""
        return self.shape

    @batch_size.setter
    def batch_size(self, shape: Shape) -> None:
        self.shape = shape

    @property
    def names(self) -> list[str | None]:
        """Names of the batch axes, ``None`` where there is none.

        Assigned, they reach all nested composites, whose further axes keep theirs. A locked spec
        takes names too, which are no entries.
        """
        return [None] * self.ndim if self._names is None else list(self._names)

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        self._names = self._checked_names(names)
        if names is not None:
            for child in self._lockables():
                assert isinstance(child, Batched)
                child.names = [*names, *child.names[self.ndim :]]

    def _checked_names(self, names: Sequence[str | None] | None) -> Names | None:
        """Complete names to be assigned; ``None`` if no axis has one."""
        if names is not None and len(names) != self.ndim:
            raise SpecError(
                f"names {list(names)} do not fit shape {tuple(self.shape)}. "
                f"Pass {self.ndim} of them."
            )
        return tuple(names) if names is not None and any(names) else None

    def refine_names(self, *names: str | EllipsisType | None) -> Self:
        """Name batch axes that have no name, in place; ``...`` keeps the names in between.

        Returns:
            This composite.

        Raises:
            SpecError: the number of names differs.
            AxisNameError: an axis has another name already.
        """
        self.names = shapes.refined_names(self.names, names)
        return self

    def _facts(self) -> dict[str, Any]:
        return {} if self._names is None else {"names": self.names}
