"""The outcome of a step under ``next``, told apart from entries that a caller put there.

An env notes the tensors that its latest step gave out. Where data with a ``next`` is stepped, these are the outcome of an
earlier step. So is a ``next`` that looks like an outcome: one that was copied, or that another env wrote. All else is
the caller's. Values are never compared.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types)
from __future__ import annotations

import weakref
from collections.abc import Collection
from itertools import repeat
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envkit.data.paths import Path, as_key
from envkit.data.transition import leaves

Noted = tuple[tuple[Any, ...], list[int] | None]
"""Tensors, and how often each was written to so far, None for not at all. One that is written to later is the caller's.

One with a graph is referenced weakly, since the graph holds the env.
"""

_PLAIN = {torch.Tensor}


def noted(following: TensorDictBase, *, is_fresh: bool) -> Noted:
    """Return the tensors that a step gives out under ``next``; ``is_fresh`` says that none was written to."""
    if type(following) is TensorDict:
        tensors: tuple[Any, ...] = tuple(following.values())
        if {*map(type, tensors)} == _PLAIN:
            if is_fresh:
                return tensors, None
            try:
                counts = [tensor._version for tensor in tensors]
            except RuntimeError:  # of inference mode
                counts = [0] * len(tensors)
            return _held(tensors), counts
    rows = following.tensordicts if isinstance(following, LazyStackedTensorDict) else [following]
    tensors = tuple(leaf for row in rows for _, leaf in leaves(row))
    return _held(tensors), [_version(tensor) for tensor in tensors]


def _held(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        weakref.ref(one) if isinstance(one, torch.Tensor) and one.grad_fn is not None else one
        for one in tensors
    )


def callers_part(
    preset: TensorDictBase,
    outcome: TensorDictBase,
    latest: Noted,
    scalars: Collection[Path],
) -> tuple[TensorDictBase, bool]:
    """Return what of a given ``next`` the caller has put there, and whether the rest is an earlier outcome.

    Args:
        preset: what was under ``next`` before the step.
        outcome: what the step gives.
        latest: from the step before of the same env.
        scalars: rewards and flags. A ``next`` with all of them and another entry of the outcome looks like one.
    """
    held, counts = latest
    tensors = (one() if isinstance(one, weakref.ref) else one for one in held)
    versions = dict(zip(map(id, tensors), counts or repeat(0), strict=False))
    return _without_outcome(preset, outcome, versions, frozenset(scalars))


def _without_outcome(
    preset: TensorDictBase,
    outcome: TensorDictBase,
    versions: dict[int, int],
    scalars: frozenset[Path],
) -> tuple[TensorDictBase, bool]:
    if isinstance(preset, LazyStackedTensorDict) and isinstance(outcome, LazyStackedTensorDict):
        pairs = zip(preset.tensordicts, outcome.tensordicts, strict=True)
        parts = [_without_outcome(*pair, versions, scalars) for pair in pairs]
        rows = (part for part, _ in parts)
        return LazyStackedTensorDict(*rows, stack_dim=preset.stack_dim), any(
            old for _, old in parts
        )
    entries = dict(leaves(preset))
    earlier = [
        path for path, leaf in entries.items() if versions.get(id(leaf), -1) == _version(leaf)
    ]
    if not earlier:
        shared = entries.keys() & {path for path, _ in leaves(outcome)}
        earlier = list(shared) if shared > scalars else []
    return (preset.exclude(*map(as_key, earlier)) if earlier else preset), bool(earlier)


def _version(leaf: Any) -> int:
    """Return how often a tensor was written to; 0 where that is not counted."""
    try:
        return leaf._version if isinstance(leaf, torch.Tensor) else 0
    except RuntimeError:  # of inference mode
        return 0
