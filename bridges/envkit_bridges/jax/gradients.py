"""Gradients through compiled programs: torch's autograd outside, JAX's VJPs inside.

This module decides what is kept between a program and its backward pass, and which entries carry
gradients. It knows programs over rows and trees of tensors; it does not know environments.

Conventions
    inputs     trees of tensors over rows, the first arguments of a program. Gradients flow into those of
               floating dtype; ``rest`` is what follows them, and gets none.
    outputs    tree of arrays over rows. Those of floating dtype carry gradients; integers and flags
               do not.
    cotangent  gradient of the loss with respect to an output.

Decided here: the backward pass computes the program once more from its inputs. So a step keeps its
inputs, which the data holds anyway, and nothing of JAX; and one backward program serves all steps.
Gradients of gradients are refused where they are asked for.
Rows whose cotangents are all zero (padding, rows that a mask left out) get gradients of zero, also where
the derivative is no number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import torch

from envkit.errors import GradientError
from envkit.functional.core import choose_rows
from envkit.functional.structure import PyTree
from envkit_bridges.dlpack import to_jit, to_torch

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

Pull = Callable[[tuple[torch.Tensor, ...], list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Differentiable:
    """A jitted program and its backward pass, also jitted.

    Attributes:
        run: ``(*inputs, *rest) -> outputs``.
        vjp: what `vjp_of` made of it.
    """

    run: Callable[..., PyTree]
    vjp: Callable[..., list[jax.Array]]


def vjp_of(function: Callable[..., PyTree]) -> Callable[..., list[jax.Array]]:
    """Make the backward pass of ``function(*inputs, *rest)``.

    Returns:
        A function of ``inputs``, ``rest`` and a list of cotangents, one for each floating leaf of the
        outputs. It gives one gradient for each floating leaf of the inputs, both in the order of
        `jax.tree.leaves`.

    Raises:
        GradientError: (while tracing) JAX cannot differentiate the function in reverse.
    """

    def pull_back(inputs: PyTree, rest: PyTree, cotangents: list[jax.Array]) -> list[jax.Array]:
        leaves, treedef = jax.tree.flatten(inputs)
        places = [place for place, leaf in enumerate(leaves) if _is_floating(leaf)]

        def floating_outputs(values: list[jax.Array]) -> list[jax.Array]:
            filled = list(leaves)
            for place, value in zip(places, values, strict=True):
                filled[place] = value
            outputs = function(*jax.tree.unflatten(treedef, filled), *rest)
            return [leaf for leaf in jax.tree.leaves(outputs) if _is_floating(leaf)]

        try:
            _, pull = jax.vjp(floating_outputs, [leaves[place] for place in places])
            (gradients,) = pull(cotangents)
        except ValueError as error:
            raise GradientError(
                f"JAX cannot differentiate the step of this env: {error} Write its loops with a fixed "
                "number of rounds (jax.lax.scan), choose another physics backend, or step under "
                "torch.no_grad()."
            ) from error
        used = _rows_with_any(cotangents)
        return choose_rows(used, gradients, jax.tree.map(jnp.zeros_like, gradients))

    return pull_back


def _is_floating(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _rows_with_any(cotangents: list[jax.Array]) -> jax.Array:
    """Mark the rows in which some cotangent is not zero, bool (rows,)."""
    marks = [(leaf != 0).reshape(leaf.shape[0], -1).any(-1) for leaf in cotangents]
    return jnp.stack(marks).any(0)


# -------------------------------------------------------------------------------------- torch's side


@dataclass(frozen=True)
class Running:
    """A program that was called, and whose results torch has not seen yet.

    ``lent`` is what it was given, kept as long as it may be read.
    """

    outputs: PyTree
    lent: PyTree
    sources: tuple[torch.Tensor, ...] = ()
    pull: Pull | None = None

    def result(self) -> PyTree:
        """Wait for the outputs, and give them as tensors; with a graph if gradients are wanted."""
        if self.pull is None:
            return to_torch(self.outputs)
        leaves, treedef = jax.tree.flatten(self.outputs)
        return jax.tree.unflatten(treedef, _Border.apply(leaves, self.pull, *self.sources))


def is_wanted(tree: PyTree) -> bool:
    """Check whether autograd records, and some tensor of a tree requires grad."""
    return torch.is_grad_enabled() and any(leaf.requires_grad for leaf in jax.tree.leaves(tree))


def start(
    program: Differentiable,
    inputs: tuple[PyTree, ...],
    rest: tuple[Any, ...] = (),
    *,
    requires_grad: bool,
    holders: tuple[Any, ...] = (),
) -> Running:
    """Call a program with tensors, which it borrows until its result is taken.

    Args:
        program: what is called.
        inputs: its tensors.
        rest: its other arguments.
        requires_grad: let gradients flow into ``inputs``, if any of them asks for one. Otherwise their
            values alone are used.
        holders: what the program knows weakly. The graph keeps it, since the backward pass may be traced when
            the caller has let go of it.
    """
    lent = to_jit(inputs, copy=False, detach=True)
    outputs = program.run(*lent, *rest)
    if not (requires_grad and is_wanted(inputs)):
        return Running(outputs, (lent, rest))
    sources, treedef = jax.tree.flatten(inputs)

    pull = _Pull(program, treedef, rest, holders)
    return Running(outputs, (lent, rest), tuple(sources), pull)


@dataclass(frozen=True)
class _Pull:
    """The backward pass of one call; see `start`."""

    program: Differentiable
    treedef: Any
    rest: tuple[Any, ...]
    holders: tuple[Any, ...]

    def __call__(
        self, saved: tuple[torch.Tensor, ...], cotangents: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        leaves = [to_jit(tensor, copy=False, detach=True) for tensor in saved]
        given = jax.tree.unflatten(self.treedef, leaves)
        back = to_jit(cotangents, copy=False, detach=True)
        return to_torch(self.program.vjp(given, self.rest, back))


class _Border(torch.autograd.Function):
    """Outputs of a program as functions of its inputs."""

    @staticmethod
    def forward(
        ctx: Any, leaves: list[jax.Array], pull: Pull, *sources: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = to_torch(leaves)
        ctx.pull = pull
        ctx.save_for_backward(*sources)
        ctx.mark_non_differentiable(*(leaf for leaf in outputs if not leaf.is_floating_point()))
        ctx.floating = [leaf.is_floating_point() for leaf in outputs]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        wanted = [
            leaf for leaf, is_floating in zip(cotangents, ctx.floating, strict=True) if is_floating
        ]
        with torch.no_grad():
            pulled = ctx.pull(saved, wanted)
        if torch.is_grad_enabled():  # create_graph=True
            pulled = _NotTwice.apply(*(leaf.requires_grad_() for leaf in pulled))
        found = iter(pulled)
        gradients = [next(found) if leaf.is_floating_point() else None for leaf in saved]
        return None, None, *gradients


class _NotTwice(torch.autograd.Function):
    """Gradients as they are, which cannot be differentiated again and say so."""

    @staticmethod
    def forward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(leaf.view_as(leaf) for leaf in gradients)

    @staticmethod
    def backward(ctx: FunctionCtx, *cotangents: torch.Tensor) -> NoReturn:
        raise GradientError(
            "gradients of gradients through a step of this env are not computed. Leave create_graph=True "
            "out, or detach the gradients before you compute with them."
        )
