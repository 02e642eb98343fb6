"""Leaves that stack tensors of unlike shapes: which specs have them, and what is said where nothing can hold them."""

from __future__ import annotations

from collections.abc import Iterator

from envkit.errors import SpecStackError
from envkit.specs.stacks.stacked import Stacked, StackedComposite
from envkit.specs.trees.composite import Composite

__all__ = ["refuse_ragged"]


def refuse_ragged(specs: Composite, kind: str, holder: str) -> None:
    """Check that the members of every leaf that is a stack have one shape, so that its values are tensors.

    Args:
        specs: of an env.
        kind: which, for messages: "observation".
        holder: what is to hold the values, for messages.

    Raises:
        SpecStackError: (a RuntimeError) those of one differ, as of a Tuple space of Gymnasium.
    """
    for path, spec in _ragged(specs):
        shapes = [tuple(member.shape) for member in spec.unbind(spec.stack_dim)]
        name = path[0] if len(path) == 1 else path
        raise SpecStackError(
            f"{name!r} in the {kind} spec stacks the unlike shapes {shapes}, which {holder} cannot hold. Turn the "
            "Tuple space that it comes from into a Dict, or one of observations into an array: "
            "GymWrapper(gymnasium.wrappers.FlattenObservation(env))."
        )


def _ragged(
    node: Composite, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Stacked]]:
    """Give the leaves that stack unlike shapes; below a stack of nodes each row has a leaf of its own."""
    if isinstance(node, StackedComposite):
        return
    for name, spec in node.items():
        if isinstance(spec, Composite):
            yield from _ragged(spec, (*path, name))
        elif isinstance(spec, Stacked) and -1 in spec.shape:
            yield (*path, name), spec
