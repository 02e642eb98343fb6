"""Data of several sub-envs as one TensorDict: dense, or as a lazy stack.

A lazy stack holds one TensorDict per sub-env, each with its own keys and shapes; `batch_layout` decides where it is
used. This module goes from one form to the other; it does not know where the parts come from.

Conventions
    row   first batch axis, one entry per sub-env; a lazy stack has its stack axis there.
    mask  bool of the batch size, True where a row (or a part of it) was stepped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase

from envkit.data.paths import as_key
from envkit.data.transition import leaves


def by_row(td: TensorDictBase) -> TensorDictBase:
    """Return the same data as a lazy stack of one TensorDict per row; a lazy stack as it is."""
    if isinstance(td, LazyStackedTensorDict):
        return td
    return LazyStackedTensorDict(*td.unbind(0), stack_dim=0)


def stack_rows(parts: Sequence[TensorDictBase], *, individual: bool) -> TensorDictBase:
    """Stack the parts of all rows, densely if they agree unless ``individual`` is set."""
    if individual:
        return LazyStackedTensorDict(*parts, stack_dim=0)
    return LazyStackedTensorDict.maybe_dense_stack(list(parts), 0)


def with_objects_like(skipped: TensorDictBase, stepped: TensorDictBase) -> TensorDictBase:
    """Expand objects that are no tensors to the shape that those of another row have, so that both can be stacked.

    A spec of shape (1,) takes an object without axes too; which of both a sub-env gives is known from its steps.

    Args:
        skipped: ``next`` of an env that was not stepped; written to and returned.
        stepped: ``next`` of one that was.
    """
    for path, value in leaves(skipped):
        model = stepped.get(as_key(path), None)
        if isinstance(value, NonTensorData) and isinstance(model, NonTensorData):
            size, device = model.batch_size, model.device
            skipped.set(as_key(path), NonTensorData(value.data, batch_size=size, device=device))
    return skipped


def empty_rows(count: int, batch_size: torch.Size, device: Any) -> TensorDictBase:
    """Make a lazy stack of ``count`` TensorDicts without entries."""
    parts = [TensorDict({}, batch_size=batch_size, device=device) for _ in range(count)]
    return cast(TensorDictBase, LazyStackedTensorDict(*parts, stack_dim=0))
