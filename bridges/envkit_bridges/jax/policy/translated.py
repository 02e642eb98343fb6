"""Torch modules as JAX functions.

This module computes the graph of an exported module with JAX arrays, and decides which values it is
called with: those of parameters and buffers are looked up on the live module at every call, and copied,
so that an optimiser may step as soon as the call has returned.

Conventions
    keys    an operator that draws gets ``fold_in(key, n)``, n counting the draws in the graph's order.
    wide    of a dtype with 64 bits in torch. Where JAX is set to 32 bits, steps that take or give such values are
            computed with JAX's 64 bits, and the values keep them. Only draws have 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.fx import Node

from envkit.arrays.elementwise import NARROWER
from envkit.data.paths import Path
from envkit.errors import TranslationError
from envkit_bridges.dlpack import to_jax, to_jit
from envkit_bridges.jax.policy.jax_library import JAX
from envkit_bridges.jax.policy.operators import TABLE
from envkit_bridges.policy.compiled import CompiledPolicy
from envkit_bridges.policy.errors import STEPWISE
from envkit_bridges.policy.exporting import Exported, Graph, Signature, Step, filled
from envkit_bridges.policy.side_effects import tensors_by_name

if TYPE_CHECKING:
    from envkit.functional.structure import PyTree


@dataclass(frozen=True, eq=False)
class Translation:
    """A module as a pure function of arrays.

    Attributes:
        graph: what it computes.
        reads: entries it takes.
        writes: entries it gives, with the dtypes torch gives them.
        constants: NumPy arrays of the tensors that are no parameter and no buffer, by name. They belong to no
            trace, since one translation serves many programs.
        doubles: names of the parameters and buffers of float64 that cross as their bits.
    """

    graph: Graph
    reads: tuple[Path, ...]
    writes: dict[Path, torch.dtype]
    constants: Mapping[str, np.ndarray]
    doubles: frozenset[str]

    def __call__(
        self, tensors: Sequence[jax.Array], entries: Mapping[Path, jax.Array], key: jax.Array
    ) -> dict[Path, jax.Array]:
        """Compute what the module writes, by path.

        Args:
            tensors: what `tensors` gave.
            entries: at least `reads`, each with the rows in front.
            key: one PRNG key for all that the module draws in this call.
        """
        graph = self.graph
        values: dict[str, Any] = {}
        with jax.enable_x64(True):
            for name, value in self.constants.items():
                values[name] = jnp.asarray(value)
        values.update(zip(graph.tensors, tensors, strict=True))
        with jax.enable_x64(True):
            for name in self.doubles:
                values[name] = jax.lax.bitcast_convert_type(values[name], jnp.float64)
        values.update(zip(graph.inputs, (entries[path] for path in self.reads), strict=True))
        for step in graph.steps:
            step_key = jax.random.fold_in(key, step.draw) if step.op.draws else None
            if has_64_bits() or not _is_wide(step.node, *step.node.all_input_nodes):
                values[step.name] = step.apply(values, step_key)
            else:
                values[step.name] = _applied_wide(step, values, step_key)
        return dict(zip(self.writes, filled(list(graph.outputs), values), strict=True))

    def tensors(self, policy: CompiledPolicy, device: torch.device) -> list[Any]:
        """Read the parameters and buffers of the live module, as arguments of a jitted call.

        They are copied, so nothing that is written to them later is seen by a program that runs. One of float64
        crosses as its bits, two words for each number.
        """
        named = tensors_by_name(policy.module)
        owned = []
        for name, own in self.graph.tensors.items():
            value = named[own].detach().to(device)
            value = value.clone(memory_format=torch.contiguous_format)
            owned.append(value[..., None].view(torch.int32) if name in self.doubles else value)
        return list(to_jit(tuple(owned), copy=False))


def in_jax(exported: Exported, signature: Signature, module: torch.nn.Module) -> Translation:
    """Make a JAX function of an exported module; see `CompiledPolicy.translation`.

    Raises:
        TranslationError: an operator is not covered, or a parameter is of complex128.
    """
    _refuse_complex(module)
    reads = tuple(path for path, _, _ in signature.reads)
    graph = Graph(exported.program, [".".join(path) for path in reads], TABLE, JAX)
    with jax.ensure_compile_time_eval():  # this may be called while a program is traced
        constants = {
            name: value.numpy(force=True)
            if value.dtype in WIDE
            else np.asarray(to_jax(value, detach=True))
            for name, value in graph.constants.items()
        }
    named = tensors_by_name(module)
    doubles = {
        name
        for name, own in graph.tensors.items()
        if named[own].dtype == torch.float64 and not has_64_bits()
    }
    return Translation(graph, reads, dict(exported.writes), constants, frozenset(doubles))


WIDE = frozenset(getattr(torch, name) for name in NARROWER)


def has_64_bits() -> bool:
    """Return whether JAX computes with 64 bits by itself."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def narrowed(value: jax.Array) -> jax.Array:
    """Cast to 32 bits what has 64 where JAX has none; an integer that does not fit becomes the nearest that does."""
    narrow = NARROWER.get(value.dtype.name)
    if narrow is None or has_64_bits():
        return value
    with jax.enable_x64(True):
        if jnp.issubdtype(value.dtype, jnp.integer):
            value = jnp.clip(value, jnp.iinfo(narrow).min, jnp.iinfo(narrow).max)
        return value.astype(narrow)


def _is_wide(*nodes: Node) -> bool:
    values = [node.meta.get("val") for node in nodes]
    return any(getattr(leaf, "dtype", None) in WIDE for leaf in jax.tree.leaves(values))


def _applied_wide(step: Step, values: Mapping[str, Any], key: jax.Array | None) -> PyTree:
    """Compute a step with 64 bits; what is drawn is drawn with 32 and widened."""
    nodes = step.node.all_input_nodes
    if step.op.draws:
        drawn = step.apply({n.name: jax.tree.map(narrowed, values[n.name]) for n in nodes}, key)
        with jax.enable_x64(True):
            return _as_in_torch(drawn, step.node)
    with jax.enable_x64(True):
        value = step.apply({n.name: _as_in_torch(values[n.name], n) for n in nodes}, key)
        return _as_in_torch(value, step.node)


def _as_in_torch(value: PyTree, node: Node) -> PyTree:
    """Cast the results of a node to the dtypes that torch has."""
    like = node.meta.get("val")
    if isinstance(like, tuple | list):
        return [_as_dtype(*pair) for pair in zip(value, like, strict=False)]
    return _as_dtype(value, like)


def _as_dtype(value: PyTree, like: object) -> PyTree:
    return value.astype(JAX.dtype_of(like.dtype)) if isinstance(like, torch.Tensor) else value


def _refuse_complex(module: torch.nn.Module) -> None:
    for name, value in tensors_by_name(module).items():
        if value.dtype == torch.complex128 and not has_64_bits():
            raise TranslationError(
                f"{name!r} is {value.dtype}, which crosses to JAX only if jax_enable_x64 is set. Set it, keep the "
                f"real and the imaginary part in two tensors, or {STEPWISE}."
            )
