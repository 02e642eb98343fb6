"""Keys of entries, and the walk over the specs that declare them.

Conventions
    key   a string when it is not nested, else a tuple of strings.
    path  the same, always a tuple of strings.
"""

from __future__ import annotations

from collections.abc import Iterable

from envkit.specs import Composite

__all__ = ["Key", "Path", "as_key", "as_path", "leaf_paths", "nodes"]

Path = tuple[str, ...]
Key = str | Path


def as_path(key: Key) -> Path:
    """Write a key as a tuple of strings."""
    return (key,) if isinstance(key, str) else tuple(key)


def as_key(path: Iterable[str]) -> Key:
    """Write a path as a plain string when it has one part."""
    path = tuple(path)
    return path[0] if len(path) == 1 else path


def leaf_paths(spec: Composite) -> list[Path]:
    """List the leaves of a composite by depth, then name."""
    paths = [as_path(key) for key in spec.keys(True, True)]
    return sorted(paths, key=lambda path: (len(path), ".".join(path)))


def nodes(spec: Composite, path: Path = ()) -> list[tuple[Path, Composite]]:
    """List a composite and all composites below it, with their paths."""
    below = [(name, node) for name, node in spec.items() if isinstance(node, Composite)]
    return [(path, spec), *(found for name, node in below for found in nodes(node, (*path, name)))]
