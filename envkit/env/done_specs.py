"""Which done leaves an env has: those that were declared, and the twins that every level needs.

Conventions
    level  a node that owns done leaves, named by its path: () is the root. A node without any entry is
           a level too, which has only twins.
"""

from __future__ import annotations

import torch

from envkit import rules
from envkit.data.paths import Path, leaf_paths
from envkit.errors import SpecError, SpecTypeError
from envkit.specs import Categorical, Composite, TensorSpec

__all__ = ["complete_done_spec", "with_truncated"]


def complete_done_spec(spec: Composite) -> tuple[Composite, tuple[Path, ...]]:
    """Add the missing twins at every level.

    Returns:
        The completed spec, a copy, and the paths that were added.

    Raises:
        SpecError: the leaves of a level differ in shape.
        SpecTypeError: a leaf is not boolean.
    """
    added: list[Path] = []
    return _completed(spec, (), added), tuple(added)


def _completed(node: Composite, path: Path, added: list[Path]) -> Composite:
    completed = Composite(shape=node.shape, device=node.device)
    leaves = {name: leaf for name, leaf in node.items() if not isinstance(leaf, Composite)}
    if leaves or node.is_empty():
        _check_flags(path, leaves)
        blank = Categorical(2, shape=(*node.shape, 1), dtype=torch.bool, device=node.device)
        model = next(iter(leaves.values()), blank)
        for name in rules.twins(leaves):
            if name not in leaves:
                added.append((*path, name))
            completed[name] = leaves.get(name, model).clone()
    for name, below in node.items():
        if isinstance(below, Composite):
            completed[name] = _completed(below, (*path, name), added)
    return completed


def _check_flags(level: Path, leaves: dict[str, TensorSpec]) -> None:
    place = f"level {'.'.join(level)!r}" if level else "the root"
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    if len(set(shapes.values())) > 1:
        raise SpecError(
            f"the done leaves of {place} have different shapes: {shapes}. Give all of them one shape."
        )
    others = {name: leaf.dtype for name, leaf in leaves.items() if leaf.dtype != torch.bool}
    if others:
        raise SpecTypeError(
            f"the done leaves of {place} must be boolean, but have dtypes {others}. "
            "Declare them as Categorical(2, shape=..., dtype=torch.bool)."
        )


def with_truncated(spec: Composite) -> Composite:
    """Give a done spec in which every level has ``truncated``; a copy, completed."""
    spec, _ = complete_done_spec(spec)
    paths = leaf_paths(spec)
    for level in {path[:-1] for path in paths}:
        if (*level, "truncated") not in paths:
            spec[(*level, "truncated")] = spec[(*level, "done")].clone()
    return spec
