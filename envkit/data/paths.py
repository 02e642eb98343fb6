"""Keys of entries, the specs that declare them, and data built from entries by path.

Conventions
    key   a string when it is not nested, else a tuple of strings.
    path  the same, always a tuple of strings.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types, and what is given is not known)
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from envkit.arrays.leaves import nest
from envkit.specs import Composite
from envkit.specs.annotations import Key, Path
from envkit.specs.trees import as_path

Axes = tuple[int, ...]


def as_key(path: Iterable[str]) -> Key:
    """Write a path as a plain string when it has one part."""
    path = tuple(path)
    return path[0] if len(path) == 1 else path


def leaf_paths(spec: Composite) -> list[Path]:
    """List the leaves of a composite by depth, then name."""
    paths = [as_path(key) for key in spec.keys(True, True)]
    return sorted(paths, key=lambda path: (len(path), ".".join(path)))


def infos_in(paths: Iterable[Path]) -> frozenset[Path]:
    """Return the entries that are infos by their place: below a node "info", but not in a stateless env's state."""
    return frozenset(path for path in paths if "info" in path[:-1] and path[0] != "state")


def info_names(paths: Iterable[Path]) -> dict[Path, Path]:
    """Return names of infos for an info dict: without "info", which says what they are; whole where two would be called alike.

    Example:
        >>> info_names([("info", "fuel"), ("lives",)])
        {('info', 'fuel'): ('fuel',), ('lives',): ('lives',)}
    """
    paths = list(paths)
    short = {
        path: tuple(name for name in path[:-1] if name != "info") + path[-1:] for path in paths
    }
    is_clear = all(
        one[: len(other)] != other
        for here, one in short.items()
        for there, other in short.items()
        if here != there
    )
    return short if is_clear else {path: path for path in paths}


def nodes(spec: Composite, path: Path = ()) -> list[tuple[Path, Composite]]:
    """List a composite and all composites below it, with their paths."""
    below = [(name, node) for name, node in spec.items() if isinstance(node, Composite)]
    return [(path, spec), *(found for name, node in below for found in nodes(node, (*path, name)))]


def node_of(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the node of nested dicts that holds the entry at ``path``; make it if it is missing."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    return tree


def tensordict_of(
    entries: Mapping[Path, Any],
    batch_size: torch.Size,
    device: torch.device | None,
    axes: Mapping[Path, Axes] | None = None,
) -> TensorDict:
    """Build a (possibly nested) TensorDict of tensors by path that are known to fit.

    Args:
        axes: see `shaped`.
    """
    made = TensorDict._new_unsafe(nest(entries), batch_size=batch_size, device=device)  # pyright: ignore[reportPrivateUsage]
    return shaped(made, axes) if axes else made


def has_entry(td: TensorDictBase, key: Key) -> bool:
    """Check whether there is an entry; there is none below what is no TensorDict."""
    *above, _ = path = as_path(key)
    node: Any = td
    for name in above:
        node = node.get(name, None)
        if not isinstance(node, TensorDictBase):
            return False
    return node.get(path[-1], None) is not None


def take_out(tree: Any, path: Path) -> None:
    """Delete an entry of a TensorDict or Composite, and the nodes it leaves empty."""
    del tree[path]
    for end in range(len(path) - 1, 0, -1):
        if len(list(tree.get(path[:end]).keys())):
            return
        del tree[path[:end]]


def node_axes(td: TensorDictBase) -> dict[Path, Axes]:
    """List the nested TensorDicts that have batch axes beyond those of ``td``, as groups of agents do."""
    axes: dict[Path, Axes] = {}
    for key, node in td.items(True, False):
        if isinstance(node, TensorDictBase) and len(node.batch_size) > td.batch_dims:
            axes[as_path(key)] = tuple(node.batch_size[td.batch_dims :])
    return axes


def shaped(td: TensorDict, axes: Mapping[Path, Axes]) -> TensorDict:
    """Set the batch axes of the nested TensorDicts of ``td``, in place.

    Args:
        axes: by path, what each has beyond the batch axes of ``td``; paths that are not in it are passed over.
    """
    for path, more in axes.items():
        node = td.get(as_key(path), None)
        if node is not None:
            node.batch_size = torch.Size((*td.batch_size, *more))
    return td
