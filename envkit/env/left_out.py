"""What rollouts leave out of their data, kept for the call that goes on from their last step.

Transforms keep the memory of an episode (the frames before the newest one, say) in the data, under names that
begin with an underscore. Rollouts do not show it. Whoever goes on from the last step of one has no memory in the
data; what was left out is put back then, if the data is that last step.

Conventions
    private  an observation that a transform has added for bookkeeping, with a name that begins with an underscore.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envkit.data.paths import Path, as_key
from envkit.data.transition import leaves

__all__ = ["held_back", "private", "put_back", "without"]


def private(books: Collection[Path]) -> list[Path]:
    """Give those of an env's bookkeeping entries that rollouts leave out."""
    return [path for path in books if path[-1].startswith("_")]


def without(data: TensorDictBase, paths: Collection[Path]) -> TensorDictBase:
    """Give transitions without some entries at root and next; the same ones where there are no such entries."""
    both = [as_key(path) for entry in paths for path in (entry, ("next", *entry))]
    return data.exclude(*both) if both else data


def held_back(following: TensorDictBase, paths: Collection[Path]) -> TensorDictBase:
    """Keep private entries of the last ``next`` of a rollout, and tensors beside them to know it by."""
    if isinstance(following, LazyStackedTensorDict):  # rows of unlike shapes
        parts = [held_back(part, paths) for part in following.tensordicts]
        return LazyStackedTensorDict(*parts, stack_dim=following.stack_dim)
    hidden = TensorDict({}, following.batch_size)
    shown = TensorDict({}, following.batch_size)
    for path, value in leaves(following):
        if isinstance(value, torch.Tensor):
            (hidden if path in paths else shown).set(as_key(path), value.clone())
    return TensorDict({"hidden": hidden, "shown": shown}, following.batch_size)


def put_back(held: TensorDictBase, td: TensorDictBase) -> None:
    """Write what was held back into a root, if that is the root which follows and has none of it."""
    if td.batch_size != held.batch_size:
        return
    if isinstance(td, LazyStackedTensorDict):
        for part, row in zip(held.unbind(td.stack_dim), td.tensordicts, strict=True):
            put_back(part, row)
        return
    if isinstance(held, LazyStackedTensorDict):
        return
    hidden, shown = held.get("hidden"), held.get("shown")
    present = {path: value for path, value in leaves(td) if path[0] != "next"}
    known = {path: value for path, value in leaves(shown) if path in present}
    is_next = known and all(_equal(present[path], value) for path, value in known.items())
    if is_next and not any(path in present for path, _ in leaves(hidden)):
        td.update(hidden.to(td.device) if td.device is not None else hidden)


def _equal(value: object, other: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or value.shape != other.shape:
        return False
    return torch.equal(value.to(other.device), other)
