"""Torch modules as functions of NumPy rows: which memory they read, and how long they hold.

Conventions
    rows   arrays with the rows in front, one for each entry that is read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from envkit.data.paths import Path
from envkit.env.policy import exploration_type
from envkit.errors import TranslationError
from envkit_bridges.policy.cache_key import few_values, own_classes
from envkit_bridges.policy.exporting import Exported, Signature
from envkit_bridges.policy.graph import Graph
from envkit_bridges.policy.library import NUMPY, table_for
from envkit_bridges.policy.side_effects import tensors_by_name
from envkit_bridges.policy.straight import Program, straightened

__all__ = ["Evaluation", "Unchanged", "in_numpy"]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A module as a function of NumPy rows.

    Attributes:
        graph: what it computes.
        reads: entries it is called with.
        writes: entries it gives.
        agreed: batch sizes of data for which it gave what the module gives.
    """

    graph: Graph
    reads: tuple[Path, ...]
    writes: tuple[Path, ...]
    agreed: set[torch.Size] = field(default_factory=set)
    _programs: dict[int, tuple[list[Any], Program]] = field(default_factory=dict)

    def program(self, module: torch.nn.Module, inputs: Sequence[np.ndarray]) -> Program:
        """Give the function for as many rows as ``inputs`` have; see `straightened`.

        It reads the memory of the parameters as they are now: what is written there in place is seen,
        and where they lie elsewhere, another function is made.

        Raises:
            TranslationError: an operator is used in a way that is not covered.
        """
        rows = len(inputs[0])
        named = tensors_by_name(module)
        tensors = {name: named[own].detach() for name, own in self.graph.tensors.items()}
        places = [_place(tensor) for tensor in tensors.values()]
        known, program = self._programs.get(rows, (None, None))
        if program is None or known != places:
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
            program = straightened(self.graph, arrays, inputs)
            self._programs[rows] = places, program
        return program


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Say where a tensor lies, and how."""
    return tensor.data_ptr(), tensor.stride(), tensor.dtype


def in_numpy(exported: Exported, signature: Signature, module: torch.nn.Module) -> Evaluation:
    """Make a function of NumPy rows of an exported module; see `CompiledPolicy.translation`.

    Raises:
        TranslationError: an operator is not covered, or a tensor lies where NumPy does not see it.
    """
    for name, tensor in tensors_by_name(module).items():
        if tensor.device.type != "cpu" or not _has_dtype(tensor.dtype):
            raise TranslationError(f"{name!r} is {tensor.dtype} on {tensor.device}")
    reads = tuple(path for path, _, _ in signature.reads)
    names = [".".join(path) for path in reads]
    table = table_for(exported.program.graph.nodes)
    graph = Graph(exported.program, names, table, NUMPY)
    writes = tuple(path for path, _ in exported.writes)
    return Evaluation(graph, reads, writes)


def _has_dtype(dtype: torch.dtype) -> bool:
    try:
        NUMPY.dtype_of(dtype)
    except NotImplementedError:
        return False
    return True


_SCRIPTED = "the module is scripted"


def _obstacle(parts: Sequence[torch.nn.Module], tensors: Sequence[torch.Tensor]) -> str:
    """Say what keeps a module from being evaluated elsewhere; empty if nothing does."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        return _SCRIPTED
    if any(is_lazy(tensor) for tensor in tensors):
        return "a parameter is not initialised yet"
    if any(part._forward_hooks or part._forward_pre_hooks for part in parts) or any(
        _global_hooks()
    ):
        return "the module has hooks"
    return ""


def _global_hooks() -> tuple[Any, ...]:
    """Give the hooks that torch calls for every module."""
    of_all = torch.nn.modules.module
    return of_all._global_forward_hooks, of_all._global_forward_pre_hooks


class Unchanged:
    """Whether a module is what it was: attributes and parts by identity, tensors by their memory.

    This is asked at every call, so it looks only into tensors and arrays of few values that an attribute holds:
    `cache_key` looks into the others when a policy is bound.

    Attributes:
        obstacle: what keeps the module from being evaluated in NumPy; empty if nothing does.
        size: number of parameters, 0 if there is an obstacle.
    """

    def __init__(self, module: torch.nn.Module):
        self._exploration = exploration_type()
        parts = list(module.modules())
        tensors = [*module.parameters(), *module.buffers()]
        self.obstacle = _obstacle(parts, tensors)
        held: list[dict[str, Any]] = [part.__dict__ for part in parts]
        for part in () if self.obstacle == _SCRIPTED else parts:
            held += [part._parameters, part._buffers, part._modules]  # type: ignore[list-item]
            held += [part._forward_hooks, part._forward_pre_hooks]  # type: ignore[list-item]
        if self.obstacle != _SCRIPTED:
            held += [
                *_global_hooks(),
                *(cls.__dict__ for part in parts for cls in own_classes(part)),
            ]
        self._empty = [values for values in held if not values]
        self._held = [(values, tuple(values.values())) for values in held if values]
        known = [] if self.obstacle else tensors
        self._tensors = [(tensor, _place(tensor)) for tensor in known]
        few = [
            value
            for part in parts
            for value in part.__dict__.values()
            if few_values(value) is not None
        ]
        self._constants = [(value, few_values(value)) for value in few]
        self.size = sum(tensor.numel() for tensor in known)

    def __bool__(self) -> bool:
        if any(self._empty):
            return False
        for values, seen in self._held:
            if len(values) != len(seen) or not all(map(is_, values.values(), seen)):
                return False
        for tensor, place in self._tensors:
            if _place(tensor) != place:
                return False
        for value, seen in self._constants:
            if few_values(value) != seen:
                return False
        return exploration_type() is self._exploration

    @property
    def learns(self) -> bool:
        """Whether a gradient would flow to a parameter."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor, _ in self._tensors)
