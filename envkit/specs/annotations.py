"""What the arguments of specs and envs may be: the names that their annotations use."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = [
    "AxisIndex",
    "BatchSize",
    "Destination",
    "Device",
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
