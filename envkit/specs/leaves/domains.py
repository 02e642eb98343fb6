"""The domain of a leaf spec, described for readers.

This module decides how a domain is named and compared. It knows no spec: a box is what
`spec.space` returns, built from the spec's own tensors, and nothing is sampled from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from envkit.specs.annotations import Place

__all__ = ["BinaryBox", "BoxList", "CategoricalBox", "ContinuousBox", "DiscreteBox"]


class ContinuousBox:
    """Hold the bounds of a closed box; ``low`` and ``high`` have the shape of the spec.

    Args:
        low: lower bounds.
        high: upper bounds.
        assigned: called with the box when another bound is assigned to it.
    """

    def __init__(
        self, low: Tensor, high: Tensor, assigned: Callable[[ContinuousBox], Any] | None = None
    ):
        self._low, self._high, self._assigned = low, high, assigned

    @property
    def low(self) -> Tensor:
        return self._low

    @low.setter
    def low(self, low: Tensor) -> None:
        self._assign(low, self._high)

    @property
    def high(self) -> Tensor:
        return self._high

    @high.setter
    def high(self, high: Tensor) -> None:
        self._assign(self._low, high)

    def _assign(self, low: Tensor, high: Tensor) -> None:
        if self._assigned is not None:
            self._assigned(ContinuousBox(low, high))
        self._low, self._high = low, high

    def __repr__(self) -> str:
        return f"ContinuousBox(low={self._low}, high={self._high})"

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.low, self.high))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ContinuousBox)
            and torch.equal(self.low, other.low)
            and torch.equal(self.high, other.high)
        )

    def to(self, destination: Place) -> ContinuousBox:
        """Move or cast both bounds."""
        return ContinuousBox(self.low.to(destination), self.high.to(destination))

    def clone(self) -> ContinuousBox:
        """Copy both bounds."""
        return ContinuousBox(self.low.clone(), self.high.clone())


class _Counted:
    """A box that holds numbers only: it is nowhere, and its copy is itself."""

    def to(self, destination: Place) -> Self:
        """Give the box itself; there is nothing to move."""
        return self

    def clone(self) -> Self:
        """Give the box itself; it cannot be changed."""
        return self


@dataclass(frozen=True)
class CategoricalBox(_Counted):
    """Hold the number of options of one choice."""

    n: int


DiscreteBox = CategoricalBox


@dataclass(frozen=True)
class BinaryBox(_Counted):
    """Hold the number of 0/1 entries."""

    n: int


@dataclass(frozen=True)
class BoxList:
    """Hold one box per sub-action, or per member of a stack."""

    boxes: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.boxes)

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: int) -> Any:
        return self.boxes[index]

    @staticmethod
    def from_nvec(nvec: int | Sequence[Any] | Tensor) -> BoxList | CategoricalBox:
        """Make a box of each number of options, nested as the numbers are.

        Args:
            nvec: a number, or a tensor or (nested) list of numbers.
        """
        numbers = nvec.tolist() if isinstance(nvec, Tensor) else nvec
        if isinstance(numbers, int):
            return CategoricalBox(numbers)
        return BoxList(tuple(BoxList.from_nvec(number) for number in numbers))

    def to(self, destination: Place) -> BoxList:
        """Move or cast all boxes."""
        return BoxList(tuple(box.to(destination) for box in self.boxes))

    def clone(self) -> BoxList:
        """Copy all boxes."""
        return BoxList(tuple(box.clone() for box in self.boxes))
