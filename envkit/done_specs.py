"""Which done leaves an env has: what was declared, and the twins that every level needs.

Conventions
    level  a node of the spec that owns done leaves, named by its path: () is the root.
"""

from __future__ import annotations

import torch

from envkit import rules
from envkit.errors import SpecError, SpecTypeError
from envkit.specs import Categorical, Composite, TensorSpec

__all__ = ["complete_done_spec"]

Path = tuple[str, ...]


def _only_leaf(spec: Composite, ignore: tuple[tuple[str, ...], ...] = ()) -> TensorSpec:
    leaves = [path for path in leaf_paths(spec) if path not in ignore]
    return spec[as_key(leaves[0])] if len(leaves) == 1 else spec


def _complete_done_spec(spec: Composite) -> tuple[Composite, tuple[tuple[str, ...], ...]]:
    """Add the missing twins at every level; returns the spec and the paths that were added."""
    levels: dict[tuple[str, ...], dict[str, TensorSpec]] = {}
    for path in leaf_paths(spec):
        levels.setdefault(path[:-1], {})[path[-1]] = spec[as_key(path)]
    completed = Composite(shape=spec.shape, device=spec.device)
    added: list[tuple[str, ...]] = []
    if not levels:
        levels[()] = {
            "done": Categorical(2, shape=(*spec.shape, 1), dtype=torch.bool, device=spec.device)
        }
    for level, leaves in levels.items():
        shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        if len(set(shapes.values())) > 1:
            raise SpecError(
                f"the done leaves of level {level or 'root'} have different shapes: {shapes}. "
                "Give all of them one shape."
            )
        model = next(iter(leaves.values()))
        for name in rules.twins(leaves):
            if name not in leaves:
                added.append((*level, name))
            completed[as_key((*level, name))] = leaves.get(name, model).clone()
    return completed, tuple(added)
