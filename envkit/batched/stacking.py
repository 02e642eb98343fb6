"""What the data of several sub-envs looks like as one TensorDict.

Sub-envs of one layout give dense TensorDicts. Others, or whose user asks for it, give a lazy stack:
one TensorDict per sub-env with keys and shapes of its own. This module decides which it is and
goes from one to the other; it does not know where the parts come from.

Conventions
    row   first batch axis, one entry per sub-env; a lazy stack has its stack axis there.
    mask  bool of the batch size, True where a row (or a part of it) was stepped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase

from envkit.batched.metadata import EnvMetaData
from envkit.data.paths import as_key
from envkit.data.transition import choose_leaf, leaves
from envkit.errors import ArgumentError

__all__ = [
    "by_row",
    "empty_rows",
    "has_own_rows",
    "keep_unstepped",
    "stack_rows",
    "with_objects_like",
]


def has_own_rows(metadata: Sequence[EnvMetaData], share_individual_td: bool | None) -> bool:
    """Say whether each sub-env has a TensorDict of its own in the results.

    Args:
        metadata: of each task.
        share_individual_td: what the user asked for; None leaves it to the layouts. Sizes that only
            data can tell may differ at any step, so such rows are their own then, too.

    Raises:
        ArgumentError: dense results were asked for and the layouts differ.
    """
    layouts = [found.layout() for found in metadata]
    alike = all(layout == layouts[0] for layout in layouts)
    if share_individual_td is False and not alike:
        raise ArgumentError(
            "share_individual_td=False asks for dense results, but the sub-envs differ in keys, "
            f"shapes or dtypes: {_difference(layouts)}. Pass share_individual_td=None (or True) to "
            "get lazy stacks."
        )
    if share_individual_td is not None:
        return share_individual_td
    return not alike or any(found.has_varying_sizes for found in metadata)


def _difference(layouts: Sequence[dict[str, dict[Any, Any]]]) -> str:
    """Name the first entry in which a layout differs from the first one."""
    first, other = layouts[0], next(layout for layout in layouts if layout != layouts[0])
    for kind, entries in first.items():
        for path in {**entries, **other[kind]}:
            left, right = entries.get(path), other[kind].get(path)
            if left != right:
                return (
                    f"{kind} {as_key(path)!r} is {_shown(left)} in one, {_shown(right)} in another"
                )
    raise AssertionError("the layouts are equal")


def _shown(entry: tuple[torch.Size, torch.dtype | None] | None) -> str:
    return "missing" if entry is None else f"{tuple(entry[0])} {entry[1]}"


def by_row(td: TensorDictBase) -> TensorDictBase:
    """Give the same data as a lazy stack of one TensorDict per row; a lazy stack as it is."""
    if isinstance(td, LazyStackedTensorDict):
        return td
    return LazyStackedTensorDict(*td.unbind(0), stack_dim=0)


def stack_rows(parts: Sequence[TensorDictBase], *, individual: bool) -> TensorDictBase:
    """Stack the parts of all rows, densely if they agree unless ``individual`` is set."""
    if individual:
        return LazyStackedTensorDict(*parts, stack_dim=0)
    return LazyStackedTensorDict.maybe_dense_stack(list(parts), 0)


def keep_unstepped(
    made: TensorDictBase, skipped: TensorDictBase, mask: torch.Tensor
) -> TensorDictBase:
    """Take ``next`` as it was made where a step was taken, and as if skipped elsewhere.

    Args:
        made: what the step made; where ``mask`` is False it may hold anything.
        skipped: ``next`` of an env that was not stepped; written to and returned.
        mask: shape of their batch size.
    """
    for path, value in leaves(made):
        kept = skipped.get(as_key(path), None)
        skipped.set(as_key(path), value if kept is None else choose_leaf(mask, value, kept))
    return skipped


def with_objects_like(skipped: TensorDictBase, stepped: TensorDictBase) -> TensorDictBase:
    """Give objects that are no tensors the shape that those of another row have, so that both can be stacked.

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
