"""Merge data by masks of rows: the result of a step or a reset with the values that the other rows keep.

TensorDicts are merged by `merge_rows`, NumPy arrays in dicts and tuples by `choose_arrays`, and trees of JAX arrays by
`choose_rows` in `envkit.functional.core`. `rules.choose` decides; each of them only visits leaves.

Conventions
    masks     dict level -> bool mask without trailing singleton, as `collect_reset_masks` gives it;
              ``{(): mask}`` for rows of the whole batch.
    fresh     what was made; where no mask selects it, it may hold anything.
    kept      what rows hold that are not selected.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types, and what is given is not known)
from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDictBase, is_non_tensor

from envkit import rules
from envkit.data.paths import Path, as_key
from envkit.data.transition import drop_private, is_object, is_uneven, leaves

Masks = Mapping[Path, torch.Tensor]


def merge_rows(
    kept: TensorDictBase, fresh: TensorDictBase, masks: Masks, *, keeps_last: bool = True
) -> TensorDictBase:
    """Write ``fresh`` into ``kept`` where the masks select it, in place.

    Args:
        kept: entries that ``fresh`` lacks stay.
        fresh: its `_reset` entries are left out.
        masks: an entry that is at no level of them, or below one, is written whole.
        keeps_last: ``fresh`` holds the last values of rows that are not selected, which
            serve where ``kept`` lacks the key. Otherwise zeros do.

    Returns:
        ``kept``; a lazy stack of its rows where those of ``fresh`` differ, also where rows are themselves stacks.
    """
    if isinstance(fresh, LazyStackedTensorDict) and not fresh.stack_dim:
        is_stack = isinstance(kept, LazyStackedTensorDict) and not kept.stack_dim
        if is_stack or is_uneven(fresh):
            parts = [
                merge_rows(part, new, _row_of(masks, row), keeps_last=keeps_last)
                for row, (part, new) in enumerate(zip(kept.unbind(0), fresh.unbind(0), strict=True))
            ]
            if is_stack and all(map(operator.is_, parts, kept.tensordicts)):
                return kept
            return LazyStackedTensorDict(*parts, stack_dim=0)
    batch_dims = kept.batch_dims
    for path, value in leaves(fresh):
        if path[-1] == rules.RESET:
            continue
        level = rules.governing_level(path[:-1], masks)
        mask = None if level is None else masks[level]
        before = kept.get(as_key(path), None)
        if isinstance(value, LazyStackedTensorDict) and not is_non_tensor(value):
            value = _merged_parts(before, value, mask, batch_dims, keeps_last)
        elif mask is not None:
            value = _merged_leaf(before, value, mask, batch_dims, keeps_last)
        if len(path) > 1:
            _make_nodes(kept, fresh, path)
        kept.set(as_key(path), value)
    return kept


def merge_reset(
    td: TensorDictBase, fresh: TensorDictBase, masks: Masks, *, keeps_last: bool
) -> TensorDictBase:
    """Merge the output of a reset into ``td``, in place, as `merge_rows` does; `_reset` entries go."""
    return drop_private(merge_rows(td, fresh, masks, keeps_last=keeps_last), rules.RESET)


def spread_rows(td: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
    """Return a batch in which the rows of ``mask`` are those of ``td``, in order; the others hold any of them."""
    places = (mask.flatten().cumsum(0) - 1).clamp(min=0)
    return cast(TensorDictBase, td[places.reshape(mask.shape)])


def choose_leaf(mask: torch.Tensor, fresh: Any, kept: Any) -> Any:
    """Do what `rules.choose` does, for leaves that are no tensors as well, and for a mask on another device."""
    are_tensors = isinstance(fresh, torch.Tensor) and isinstance(kept, torch.Tensor)
    if are_tensors and (mask.ndim or _is_alike(fresh, kept)):
        return rules.choose(mask.to(fresh.device), fresh, kept)
    if mask.ndim == 0:
        return fresh if bool(mask) else kept
    if is_object(fresh):
        return cast(Any, fresh).apply(partial(choose_leaf, mask), kept)
    rows = zip(mask.unbind(0), fresh.unbind(0), kept.unbind(0), strict=True)
    return NonTensorStack(*(choose_leaf(*row) for row in rows))  # type: ignore[abstract]


def choose_arrays(mask: np.ndarray, fresh: Any, kept: Any) -> Any:
    """Take the rows of ``mask`` from ``fresh`` and the others from ``kept``, see `rules.choose`.

    Both are NumPy arrays, in dicts and tuples. An array that one of them lacks is zero there. A value
    that is no array belongs to all rows; ``kept`` goes before.
    """
    value = fresh if kept is None else kept
    if isinstance(value, dict):
        fresh, kept = fresh or {}, kept or {}
        names = {**kept, **fresh}
        return {name: choose_arrays(mask, fresh.get(name), kept.get(name)) for name in names}
    if isinstance(fresh, tuple) and isinstance(kept, tuple) and len(fresh) == len(kept):
        return tuple(choose_arrays(mask, *pair) for pair in zip(fresh, kept, strict=True))
    if not isinstance(value, np.ndarray):
        return value
    zeros = np.zeros_like(value)
    return rules.choose(mask, zeros if fresh is None else fresh, zeros if kept is None else kept)


def _merged_leaf(
    kept: Any, fresh: Any, mask: torch.Tensor, batch_dims: int, keeps_last: bool
) -> Any:
    if kept is None:
        if keeps_last or is_non_tensor(fresh):
            return fresh
        kept = torch.zeros_like(fresh)
    if not batch_dims and isinstance(fresh, torch.Tensor) and not _is_alike(fresh, kept):
        return fresh if bool(mask.any()) else kept  # one env, and an entry that changes its shape
    return choose_leaf(rules.reduce_mask(mask, fresh.shape, batch_dims), fresh, kept)


def _merged_parts(
    kept: TensorDictBase | None,
    fresh: LazyStackedTensorDict,
    mask: torch.Tensor | None,
    batch_dims: int,
    keeps_last: bool,
) -> LazyStackedTensorDict:
    """Merge an uneven stack part by part into what is kept of it; without a mask all is fresh."""
    if kept is None:
        return fresh
    parts = kept.unbind(fresh.stack_dim)
    for part, new in zip(parts, fresh.tensordicts, strict=True):
        for path, value in leaves(new):
            if mask is not None:
                value = _merged_leaf(
                    part.get(as_key(path), None), value, mask, batch_dims, keeps_last
                )
            part.set(as_key(path), value)
    return LazyStackedTensorDict(*parts, stack_dim=fresh.stack_dim)


def _row_of(masks: Masks, row: int) -> Masks:
    return {level: mask[row] for level, mask in masks.items()}


def _make_nodes(td: TensorDictBase, fresh: TensorDictBase, path: Path) -> None:
    """Make the nodes above an entry that ``td`` lacks, with the batch axes that they have in ``fresh``."""
    for name in path[:-1]:
        fresh = fresh.get(name)
        if td.get(name, None) is None:
            td.set(name, fresh.empty())
        td = td.get(name)


def _is_alike(fresh: torch.Tensor, kept: object) -> bool:
    """Check whether two tensors have one shape; nested ones have none."""
    if not isinstance(kept, torch.Tensor) or fresh.is_nested or kept.is_nested:
        return False
    return fresh.shape == kept.shape
