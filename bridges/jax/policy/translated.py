"""Torch modules as JAX functions.

This module computes the graph of an exported module with JAX arrays, and decides which values it is
called with: those of parameters and buffers are looked up on the live module at every call, and copied,
so that an optimiser may step as soon as the call has returned.

Conventions
    keys    an operator that draws gets ``fold_in(key, n)``, n counting the draws in the graph's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridges.dlpack import to_jax, to_jit
from bridges.jax.policy.library import JAX
from bridges.jax.policy.ops import TABLE
from bridges.policy.compiled import CompiledPolicy
from bridges.policy.errors import STEPWISE
from bridges.policy.exporting import Exported, Signature, tensors_by_name
from bridges.policy.graph import Graph, filled
from envkit.data.paths import Path
from envkit.errors import TranslationError

__all__ = ["Translation", "in_jax"]


@dataclass(frozen=True, eq=False)
class Translation:
    """A module as a pure function of arrays.

    Attributes:
        graph: what it computes.
        reads: entries it takes.
        writes: entries it gives, with the dtypes torch gives them.
        constants: NumPy arrays of the tensors that are no parameter and no buffer, by name. They belong to no
            trace, since one translation serves many programs.
    """

    graph: Graph
    reads: tuple[Path, ...]
    writes: dict[Path, torch.dtype]
    constants: Mapping[str, np.ndarray]

    def __call__(
        self, tensors: Any, entries: Mapping[Path, jax.Array], key: jax.Array
    ) -> dict[Path, jax.Array]:
        """Compute what the module writes, by path.

        Args:
            tensors: what `tensors` gave.
            entries: at least `reads`, each with the rows in front.
            key: one PRNG key for all that the module draws in this call.
        """
        graph = self.graph
        values: dict[str, Any] = {
            name: jnp.asarray(value) for name, value in self.constants.items()
        }
        values.update(zip(graph.tensors, tensors, strict=True))
        values.update(zip(graph.inputs, (entries[path] for path in self.reads), strict=True))
        for step in graph.steps:
            own = jax.random.fold_in(key, step.draw) if step.op.draws else None
            values[step.name] = step.apply(values, own)
        return dict(zip(self.writes, filled(list(graph.outputs), values), strict=True))

    def tensors(self, policy: CompiledPolicy, device: torch.device) -> list[Any]:
        """Read the parameters and buffers of the live module, as arguments of a jitted call.

        They are copied, so nothing that is written to them later is seen by a program that runs.
        """
        named = tensors_by_name(policy.module)
        values = (named[name].detach().to(device) for name in self.graph.tensors.values())
        owned = tuple(value.clone(memory_format=torch.contiguous_format) for value in values)
        return list(to_jit(owned, copy=False))


def in_jax(exported: Exported, signature: Signature, module: torch.nn.Module) -> Translation:
    """Make a JAX function of an exported module; see `CompiledPolicy.translation`.

    Raises:
        TranslationError: an operator is not covered, or a parameter has more bits than JAX computes with.
    """
    _refuse_doubles(module)
    reads = tuple(path for path, _, _ in signature.reads)
    graph = Graph(exported.program, [".".join(path) for path in reads], TABLE, JAX)
    with jax.ensure_compile_time_eval():  # this may be called while a program is traced
        constants = {
            name: np.asarray(to_jax(value, detach=True)) for name, value in graph.constants.items()
        }
    return Translation(graph, reads, dict(exported.writes), constants)


def _refuse_doubles(module: torch.nn.Module) -> None:
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return
    for name, value in tensors_by_name(module).items():
        if value.dtype in (torch.float64, torch.complex128):
            raise TranslationError(
                f"{name!r} is {value.dtype}, which JAX computes in 32 bits unless jax_enable_x64 is "
                f"set. Call module.float(), set it, or {STEPWISE}."
            )
