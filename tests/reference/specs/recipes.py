"""Specs written once and built with either library, and the calls that are made on them.

A `Recipe` is a text that builds a spec when it is given a library, so that a failing example reads as code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from tests.reference.compare import Library

__all__ = ["LEAF_KINDS", "Recipe", "choices", "composites", "leaves", "shapes", "specs", "stacks"]


@dataclass(frozen=True)
class Recipe:
    """Python source over ``n``, a library, and torch."""

    source: str

    def __call__(self, library: Library) -> Any:
        return eval(self.source, {"n": library, "torch": torch})

    def __repr__(self) -> str:
        return self.source


shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)

LEAF_KINDS = {
    "bounded": "n.Bounded(-1.0, {hi}, {shape})",
    "box": "n.Bounded(torch.zeros({shape}), torch.arange({count}.0).reshape({shape}) + 1, {shape})",
    "half-open": "n.Bounded(0.0, float('inf'), {shape}, dtype=torch.float64)",
    "bounded integers": "n.Bounded(0, {hi}, {shape}, dtype=torch.int64)",
    "unbounded": "n.Unbounded({shape})",
    "unbounded integers": "n.Unbounded({shape}, dtype=torch.int32)",
    "categorical": "n.Categorical({hi}, {shape})",
    "masked": "n.Categorical(3, {shape}, mask=torch.tensor([True, False, True]).expand({mask}))",
    "flag": "n.Categorical(2, {shape}, dtype=torch.bool)",
    "one-hot": "n.OneHot({hi}, {wide})",
    "masked one-hot": (
        "n.OneHot(3, {three}, mask=torch.tensor([True, False, True]).expand({mask}))"
    ),
    "multi-categorical": "n.MultiCategorical([2, {hi}], {pair})",
    "multi-one-hot": "n.MultiOneHot([2, {hi}], {pairs})",
    "binary": "n.Binary({hi}, {wide})",
    "object": "n.NonTensor({shape}, example_data='a')",
}


IN_TREES = sorted(set(LEAF_KINDS) - {"masked", "masked one-hot"})  # theirs lose masks


def leaf(kind: str, shape: tuple[int, ...], hi: int) -> Recipe:
    """Write a leaf whose batch axes are ``shape``."""
    return Recipe(
        LEAF_KINDS[kind].format(
            shape=shape,
            hi=hi,
            count=torch.Size(shape).numel(),
            mask=(*shape, 3),
            three=(*shape, 3),
            wide=(*shape, hi),
            pair=(*shape, 2),
            pairs=(*shape, 2 + hi),
        )
    )


def leaves(shape: Any = shapes, kinds: Any = None) -> st.SearchStrategy[Recipe]:
    """Draw a leaf of some kind."""
    kinds = sorted(LEAF_KINDS if kinds is None else kinds)
    return st.builds(leaf, st.sampled_from(kinds), shape, st.integers(2, 4))


@st.composite
def composites(draw: Any, shape: Any = shapes, depth: int = 2) -> Recipe:
    """Draw a tree of specs whose children have further axes or none."""
    batch = draw(shape)
    children = {}
    for name in draw(st.lists(st.sampled_from("abc"), unique=True, max_size=3)):
        further = draw(shapes.map(lambda more: (*batch, *more[:1])))
        if depth > 1 and draw(st.integers(0, 3)) == 0:
            children[name] = draw(composites(st.just(further), depth - 1))
        else:
            children[name] = draw(leaves(st.just(further), IN_TREES))
    inside = ", ".join(f"{name}={child}" for name, child in children.items())
    return Recipe(f"n.Composite({inside + ', ' if inside else ''}shape={batch})")


@st.composite
def stacks(draw: Any) -> Recipe:
    """Draw a stack of unlike leaves of one class, or of unlike composites."""
    kind = draw(st.sampled_from(("bounds", "shapes", "options", "keys", "trees")))
    dim = draw(st.sampled_from((0, -1)))
    pair = {
        "bounds": "n.Bounded(0.0, 1.0, (2,)), n.Bounded(0.0, 2.0, (2,))",
        "shapes": "n.Unbounded((2,)), n.Unbounded((3,))",
        "options": "n.Categorical(2, (2,)), n.Categorical(3, (2,))",
        "keys": "n.Composite(a=n.Unbounded((2,)), b=n.Categorical(2)), n.Composite(a=n.Unbounded((2,)))",
        "trees": (
            "n.Composite(x=n.Composite(a=n.Bounded(0.0, 1.0, (2,)))), "
            "n.Composite(x=n.Composite(a=n.Bounded(0.0, 2.0, (2,))))"
        ),
    }[kind]
    return Recipe(f"torch.stack([{pair}], {dim})")


@st.composite
def choices(draw: Any) -> Recipe:
    """Draw a choice between leaves of one kind."""
    kind = draw(st.sampled_from(("bounded", "categorical", "unbounded", "bounded integers")))
    shape = draw(shapes)
    members = [
        leaf(kind, shape, hi) for hi in draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    ]
    return Recipe(f"n.Choice({members})")


def specs() -> st.SearchStrategy[Recipe]:
    """Draw a spec of any kind."""
    return st.one_of(leaves(), composites(), stacks())
