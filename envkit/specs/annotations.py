"""What the arguments of specs and envs may be, and what an env hands out: the names that annotations use.

tensordict ships no types that a checker can follow to the end: one base class of `TensorDictBase` stays
unknown, so any attribute of it passes, and it passes for any other class. `EnvData` names what only a
tensor has. At run time it is `TensorDictBase`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = [
    "AxisIndex",
    "BatchSize",
    "Destination",
    "Device",
    "EnvData",
    "Key",
    "Numbers",
    "Path",
    "Place",
    "Shape",
    "Value",
]

Path = tuple[str, ...]
"""A key, always as a tuple."""

Key = str | Path
"""The key of an entry: a string when it is not nested, else a tuple of strings."""

Device = torch.device | str | int
"""A device, its name, or the number of an accelerator."""

Place = Device | torch.dtype
"""What ``to`` takes: a device or a dtype."""

Destination = Device | torch.dtype | Tensor | bool | None
"""One of the arguments of ``to`` of a module or an env."""

BatchSize = Sequence[int]
"""The number of envs along each batch axis."""

Shape = int | Sequence[int]
"""Sizes of axes; an int is one axis."""

AxisIndex = int | slice | EllipsisType | Tensor | np.ndarray | Sequence[Any] | None
"""What selects along the axes of a tensor."""

Numbers = float | np.number | np.ndarray | Tensor | Sequence[Any]
"""A number, an array, a tensor, or lists of them: bounds, masks, counts."""

Value = Tensor | TensorDictBase
"""A value of a spec: a tensor of a leaf, a TensorDict of a composite."""


if TYPE_CHECKING:

    class EnvData(TensorDictBase):  # type: ignore[misc]
        """A TensorDict that an env gives or takes; its entries are the tensors: ``td["next", "reward"]``.

        An entry may be anything; what axes are indexed with gives the same kind of data. The other members
        are those of tensors that no TensorDict has; a checker reports their use.
        """

        @overload
        def __getitem__(self, index: Key) -> Any: ...
        @overload
        def __getitem__(self, index: AxisIndex) -> Self: ...
        def __getitem__(self, index: Any) -> Any: ...
        def get(self, key: Key, *default: Any, **options: Any) -> Any: ...

        argmax: None
        argmin: None
        argsort: None
        cumsum: None
        grad_fn: None
        index_select: None
        is_leaf: None
        item: None
        long: None
        matmul: None
        nonzero: None
        relu: None
        sort: None
        square: None
        topk: None

else:
    EnvData = TensorDictBase
