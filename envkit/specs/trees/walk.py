"""How a tree of specs is named and walked.

This module decides what is a key, in which order keys come, and how an error says where in the
tree it arose. It knows only that a tree has `_children()`, by name, and tells which of them are
trees.

Conventions
    Nested keys are flat tuples of strings; a key of one part is a plain string.
    The entries of a nested tree come before its own key.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from envkit.errors import ArgumentTypeError, EnvkitError

__all__ = [
    "MISSING",
    "IsLeaf",
    "TreeItems",
    "TreeKeys",
    "TreeValues",
    "as_path",
    "at_entry",
    "at_member",
    "is_key",
]

MISSING: Any = object()  # neither found nor given
IsLeaf = Callable[[type], bool] | None


def is_key(index: Any) -> bool:
    """Tell whether an index names an entry rather than axes."""
    if isinstance(index, str):
        return True
    return isinstance(index, tuple) and len(index) > 0 and all(is_key(part) for part in index)


def as_path(key: Any) -> tuple[str, ...]:
    """Write a key as a flat tuple of its parts.

    Raises:
        ArgumentTypeError: it is neither a string nor a tuple of strings.
    """
    if isinstance(key, str):
        return (key,)
    if type(key) is tuple and all(type(part) is str for part in key):
        return key
    if not is_key(key):
        raise ArgumentTypeError(f"{key!r} is no key. Use a string, or a tuple of strings.")
    return tuple(name for part in key for name in as_path(part))


class at_entry:
    """Within this context an envkit error says at which entry of a tree it arose."""

    def __init__(self, name: Any):
        self._name = name

    def _where(self) -> str:
        return f"at entry {self._name!r}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, EnvkitError):
            raise type(error)(f"{self._where()}: {error}") from None


class at_member(at_entry):
    """Within this context an envkit error says in which member of a stack it arose."""

    def _where(self) -> str:
        return f"in member {self._name}"


class _TreeView:
    """A view of a tree that is walked anew on each use."""

    def __init__(self, tree: Any, include_nested: bool, leaves_only: bool, is_leaf: IsLeaf = None):
        self._tree, self._nested, self._leaves = tree, include_nested, leaves_only
        self._is_leaf = is_leaf

    def _keys(self) -> Iterator[Any]:
        """Walk without making children: a stack could fail to make one."""
        return _walk_keys(self._tree, self._nested, self._leaves, self._is_leaf)

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        return ((key, self._tree.get(key)) for key in self._keys())

    def __len__(self) -> int:
        return sum(1 for _ in self._keys())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"  # type: ignore[call-overload]


class TreeKeys(_TreeView, KeysView):
    """Keys of a tree."""

    def __iter__(self) -> Iterator[Any]:
        return self._keys()

    def __contains__(self, key: Any) -> bool:
        if not is_key(key):
            return False
        if self._leaves and self._is_leaf is not None:
            return as_path(key) in map(as_path, self._keys())
        *path, name = as_path(key)
        if path and not self._nested:
            return False
        parent = self._tree._lookup(tuple(path))
        children = parent._children() if hasattr(parent, "_children") else ()
        return name in children and not (self._leaves and parent._is_tree(name))


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


def _walk_keys(tree: Any, nested: bool, leaves: bool, is_leaf: IsLeaf) -> Iterator[Any]:
    for name in tree._children():
        inner = tree._is_tree(name)
        if inner and nested:
            for key in _walk_keys(tree._children()[name], nested, leaves, is_leaf):
                yield (name, *as_path(key))
        is_kept = not leaves or (not inner if is_leaf is None else is_leaf(type(tree.get(name))))
        if is_kept:
            yield name
