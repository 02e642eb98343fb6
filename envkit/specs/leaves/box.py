"""A closed box, elementwise: how its bounds are held, changed, counted and drawn between.

Bounds are stored as coordinates (see `order`), expanded to the spec's shape, so that every shape
operation applies to them. A complex box bounds real and imaginary parts, each on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from envkit.specs.annotations import Shape
from envkit.specs.leaves.bounds import is_constant, summary
from envkit.specs.leaves.leaf import LeafSpec
from envkit.specs.leaves.order import (
    coordinates,
    digits,
    from_coordinates,
    uniform_integers,
)
from envkit.specs.leaves.spaces import BinaryBox, ContinuousBox
from envkit.specs.shapes import lead

__all__ = ["Box", "IntegerBox"]


class Box(LeafSpec):
    """A closed box, elementwise."""

    _contents = ("_low", "_high")
    _caches = (*LeafSpec._caches, "_sampler", "_owns_bounds")

    _low: Tensor
    _high: Tensor
    _sampler: tuple[Any, Any] | None = None  # for how many writes into the bounds, and what
    _owns_bounds: bool = False

    @property
    def low(self) -> Tensor:
        """Lower bounds, of the spec's shape; writing into them changes the spec."""
        return self._handed_out()[0]

    @property
    def high(self) -> Tensor:
        """Upper bounds, of the spec's shape; writing into them changes the spec."""
        return self._handed_out()[1]

    def _make_space(self) -> ContinuousBox | BinaryBox:
        return ContinuousBox(*self._handed_out(), self._take_space)

    def _take_space(self, space: ContinuousBox) -> None:
        self.space = space

    def _bounds(self) -> tuple[Tensor, Tensor]:
        """The bounds, to be read only: entries may share memory."""
        low, high = self._low, self._high
        return from_coordinates(low, self._dtype), from_coordinates(high, self._dtype)

    def _handed_out(self) -> tuple[Tensor, Tensor]:
        """The bounds in memory of this spec's own, so that writing changes one entry of one spec.

        Those of dtypes that have coordinates of their own are copies (bool, unsigned beyond a byte).
        """
        if not self._owns_bounds:
            self._low, self._high = self._low.clone(), self._high.clone()
            self._owns_bounds, self._sampler = True, None
        return self._bounds()

    def _prepared(self, make: Callable[[], Any]) -> Any:
        """What drawing needs of the bounds, made anew once someone has written into them."""
        written = _writes_into(self._low), _writes_into(self._high)
        if self._sampler is None or self._sampler[0] != written:
            self._sampler = written, make()
        return self._sampler[1]

    def _facts(self) -> dict[str, Any]:
        low, high = self._bounds()
        return {"low": summary(low), "high": summary(high)}

    def _nearest(self, value: Tensor) -> Tensor:
        return from_coordinates(coordinates(value).clamp(self._low, self._high), self._dtype)


class IntegerBox(Box):
    """A closed box of integers, which can be counted."""

    domain = "discrete"

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        sampler = self._prepared(self._make_sampler)
        return sampler((*lead(shape), *self._size), generator)

    def _make_sampler(self) -> Callable[[tuple[int, ...], Generator | None], Tensor]:
        """Prepare uniform integers: from two numbers if the box is a cube, else from counts."""
        if is_constant(self._low) and is_constant(self._high):
            [low], [high] = (end.flatten()[:1].tolist() or [0] for end in self._bounds())
            return lambda size, generator: uniform_integers(
                low, high, size, dtype=self._dtype, device=self._device, generator=generator
            )
        least = self._low.to(torch.int64)
        counts = self._counts()

        def draw(size: tuple[int, ...], generator: Generator | None) -> Tensor:
            number = torch.empty(size, dtype=torch.int64, device=self._device)
            offset = number.random_(generator=generator) % counts
            return from_coordinates(least + offset, self._dtype)

        return draw

    def _counts(self) -> Tensor:
        """Count the integers of each entry; 2**63 and more count as one less than that."""
        counts = self._high.to(torch.int64) - self._low.to(torch.int64) + 1
        return torch.where(counts > 0, counts, torch.iinfo(torch.int64).max)

    def enumerate(self, use_mask: bool = False) -> Tensor:
        return from_coordinates(digits(self._counts()) + self._low.to(torch.int64), self._dtype)

    def cardinality(self) -> int:
        pairs = zip(*(end.flatten().tolist() for end in self._bounds()), strict=True)
        return math.prod(int(high) - int(low) + 1 for low, high in pairs)


def _writes_into(bound: Tensor) -> int:
    """Count the writes into a tensor; those of inference mode are not counted by torch."""
    return 0 if bound.is_inference() else bound._version
