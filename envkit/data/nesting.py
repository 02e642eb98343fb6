"""Entries by path as a tree, and as a TensorDict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from envkit.data.paths import Path

__all__ = ["nest", "tensordict_of"]


def nest(entries: Mapping[Path, Any]) -> dict[str, Any]:
    """Build nested dicts from entries by path."""
    tree: dict[str, Any] = {}
    for path, value in entries.items():
        if len(path) == 1:
            tree[path[0]] = value
            continue
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree


def tensordict_of(
    entries: Mapping[Path, Any], batch_size: torch.Size, device: torch.device | None
) -> TensorDict:
    """Build a (possibly nested) TensorDict of tensors by path that are known to fit."""

    def build(node: dict[str, Any]) -> TensorDict:
        for name, value in node.items():
            if isinstance(value, dict):
                node[name] = build(value)
        return TensorDict._new_unsafe(node, batch_size=batch_size, device=device)

    return build(nest(entries))
