"""Entries by path as a tree, and as a TensorDict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

__all__ = ["nest", "tensordict_of"]

Path = tuple[str, ...]


def nest(named: Mapping[Path, Any]) -> dict[str, Any]:
    """Build nested dicts from entries by path."""
    tree: dict[str, Any] = {}
    for path, leaf in named.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree


def tensordict_of(tree: Mapping[str, Any], shape: torch.Size, device: Any) -> TensorDict:
    """Make a TensorDict of nested dicts of tensors, which are known to fit."""
    made = {
        name: tensordict_of(value, shape, device) if isinstance(value, dict) else value
        for name, value in tree.items()
    }
    return TensorDict._new_unsafe(made, batch_size=shape, device=device)
