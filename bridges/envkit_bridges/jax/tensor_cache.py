"""Objects made from a tensor, kept while it lives and torch has not written to it.

On a GPU, asking a tensor for a number lets the host wait for all that was begun. So what a step needs of one that
no step changes is asked once. This module knows tensors; it does not know what is kept of them.

Conventions
    unchanged  the same tensor in the same memory with the same ``_version``, which every write through torch
               counts, also those through tensors that share its memory; not those through ``.data``. Inference tensors
               count none, and nothing is kept of them.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

_NOTHING = None, 0, 0, None


class Unchanged:
    """Values by the tensor that they were made of; a copy of this is empty."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[torch.Tensor], int, int, Any]] = {}

    def keep(self, tensor: torch.Tensor, value: object) -> None:
        """Store what was made of a tensor, which ``value`` must not hold."""
        if tensor.is_inference():
            return
        key, kept = id(tensor), self._kept
        # called with the weak reference, which pop takes as its default
        forget = partial(kept.pop, key)
        reference = weakref.ref(tensor, forget)
        kept[key] = reference, tensor._version, tensor.data_ptr(), value

    def find(self, tensor: torch.Tensor) -> Any:
        """Return what is kept of a tensor; None if there is nothing, or the tensor was written to."""
        reference, version, place, value = self._kept.get(id(tensor), _NOTHING)
        if reference is None or reference() is not tensor or version != tensor._version:
            return None
        return value if place == tensor.data_ptr() else None

    def __len__(self) -> int:
        return len(self._kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return Unchanged, ()
