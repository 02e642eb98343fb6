"""The entries of one moment by path, and changes to them.

Arguments and results of hooks over arrays, inside a program and outside of it. Knows neither
torch, nor JAX, nor TensorDicts.

Conventions
    path     tuple of names.
    leaf     array of any namespace, batch axes in front.
    changes  leaves by path, new or changed; None takes an entry away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str, ...]
Changes = Mapping[Path, Any]


class Leaves(Mapping[Path, Any]):
    """The entries of one moment by path, read-only.

    Attributes:
        batch_dims: number of batch axes.
    """

    def __init__(self, entries: Mapping[Path, Any], batch_dims: int):
        self._entries = entries
        self.batch_dims = batch_dims

    def __getitem__(self, path: Path) -> Any:
        return self._entries[path]

    def __iter__(self) -> Iterator[Path]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def with_changes(leaves: Mapping[Path, Any], changes: Changes) -> dict[Path, Any]:
    """Return ``leaves`` with ``changes`` made."""
    merged = {**leaves, **changes}
    return {path: leaf for path, leaf in merged.items() if leaf is not None}


def nest(entries: Mapping[Path, Any]) -> dict[str, Any]:
    """Build nested dicts from entries by path."""
    tree: dict[str, Any] = {}
    for path, value in entries.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree
