"""How a tree of specs is named and walked.

This module decides what is a key and in which order keys come. It knows only that a tree has
`_children()`, by name.

Conventions
    Nested keys are flat tuples of strings; a key of one part is a plain string.
    The entries of a nested tree come before its own key.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from envkit.errors import ArgumentError

__all__ = ["MISSING", "TreeItems", "TreeKeys", "TreeValues", "as_key", "is_key"]

MISSING: Any = object()  # neither found nor given


def is_key(index: Any) -> bool:
    """Tell whether an index names an entry rather than axes."""
    if isinstance(index, str):
        return True
    return isinstance(index, tuple) and len(index) > 0 and all(is_key(part) for part in index)


def as_key(key: Any) -> tuple[str, ...]:
    """Write a key as a flat tuple of its parts.

    Raises:
        ArgumentError: it is neither a string nor a tuple of strings.
    """
    if isinstance(key, str):
        return (key,)
    if not is_key(key):
        raise ArgumentError(f"{key!r} is no key. Use a string, or a tuple of strings.")
    return tuple(name for part in key for name in as_key(part))


class _TreeView:
    """A view of a tree that is walked anew on each use."""

    def __init__(self, tree: Any, include_nested: bool, leaves_only: bool):
        self._tree, self._nested, self._leaves = tree, include_nested, leaves_only

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        return _walk(self._tree, self._nested, self._leaves)

    def __len__(self) -> int:
        return sum(1 for _ in self._pairs())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"  # type: ignore[call-overload]


class TreeKeys(_TreeView, KeysView):
    """Keys of a tree."""

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._pairs())

    def __contains__(self, key: Any) -> bool:
        if not is_key(key):
            return False
        path = as_key(key)
        if len(path) > 1 and not self._nested:
            return False
        found = self._tree._lookup(path)
        return found is not MISSING and not (self._leaves and _is_tree(found))


class TreeItems(_TreeView, ItemsView):
    """Pairs of key and spec of a tree."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self._pairs()

    def __contains__(self, pair: Any) -> bool:
        return any(pair == mine for mine in self._pairs())


class TreeValues(_TreeView, ValuesView):
    """Specs of a tree."""

    def __iter__(self) -> Iterator[Any]:
        return (spec for _, spec in self._pairs())

    def __contains__(self, spec: Any) -> bool:
        return any(spec == mine for _, mine in self._pairs())


def _is_tree(spec: Any) -> bool:
    return hasattr(spec, "_children")


def _walk(tree: Any, nested: bool, leaves: bool) -> Iterator[tuple[Any, Any]]:
    for name, spec in tree._children().items():
        inner = _is_tree(spec)
        if inner and nested:
            for key, below in _walk(spec, nested, leaves):
                yield (name, *as_key(key)), below
        if not (inner and leaves):
            yield name, spec
