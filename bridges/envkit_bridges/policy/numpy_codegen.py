"""A graph as straight-line Python over NumPy arrays: one call an operator, and nothing beside it.

For few rows every call counts, so the graph is walked once, with the arrays of one call, and what it did
is written down as the source of a function. What follows from sizes and constants is computed then. Views
of parameters stay views of their memory, so that what an optimiser writes there is seen. Operands and
results are cast only where NumPy would give another dtype than torch.

Conventions
    fixed   values that no later call changes: constants, sizes, and views of parameters.
    slot    global name in the written function that holds a fixed value or an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node
from torch.utils._pytree import tree_any, tree_map

from envkit_bridges.policy.core_aten import STORAGE
from envkit_bridges.policy.graph import Graph, Step, filled

__all__ = ["Program", "straightened"]


@dataclass(frozen=True)
class Program:
    """A graph as a function of arrays.

    Attributes:
        reads: places of the inputs whose numbers matter.
        evaluate: takes these, and gives the outputs, which may share memory with inputs and parameters.
            NumPy warns of nothing in it.
        outputs: shape and dtype of each output.
    """

    reads: tuple[int, ...]
    evaluate: Callable[..., tuple[np.ndarray, ...]]
    outputs: tuple[tuple[tuple[int, ...], np.dtype], ...]


def straightened(
    graph: Graph, tensors: Mapping[str, np.ndarray], inputs: Sequence[np.ndarray]
) -> Program:
    """Write a graph as a function of arrays of these shapes and dtypes.

    Args:
        graph: in NumPy.
        tensors: memory of the parameters and buffers, by the names of `Graph.tensors`. It is read at
            every call.
        inputs: of one call. What is drawn for it leaves torch's generator as it was.

    Raises:
        TranslationError: an operator is used in a way that is not covered.
    """
    writer = _Writer(graph, tensors, inputs)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), np.errstate(all="ignore"):
        for step in graph.steps:
            writer.add(step)
    return writer.program()


class _Writer:
    """Walks a graph with values, and writes down the steps whose results are not fixed."""

    def __init__(
        self, graph: Graph, tensors: Mapping[str, np.ndarray], inputs: Sequence[np.ndarray]
    ):
        self._outputs = graph.outputs
        self._inputs = graph.inputs
        constants = {name: value.numpy(force=True) for name, value in graph.constants.items()}
        self._held = list(tensors.values())
        self._values: dict[str, Any] = {**constants, **tensors}
        self._values.update(zip(graph.inputs, inputs, strict=True))
        self._open = set(graph.inputs)  # names of values that are not fixed
        self._moving = set(tensors)  # names of fixed ones whose numbers may change
        self._slots: dict[str, Any] = {}
        self._lines: list[str] = []
        self._read: set[str] = set()

    def add(self, step: Step) -> None:
        """Compute a step, and write it down unless its result is fixed."""
        node, op = step.node, step.op
        like = node.meta.get("val")
        args, kwargs = node.args, node.kwargs
        if not op.draws:
            kwargs = {name: value for name, value in kwargs.items() if name not in STORAGE}
        with step.blamed():
            dtype = op.operand_dtype(like)
            given = _cast(filled((args, kwargs), self._values), dtype)
            computed = op.compute(*given[0], **given[1])
            forms = _forms(like, op.library.dtype_of)
            value = self._values[step.name] = _conformed(computed, forms)
        if self._is_fixed(step, value):
            return
        self._open.add(step.name)
        call = self._call(self._slot(op.compute), args, kwargs, dtype)
        if not _is_same(computed, value):
            call = f"{self._slot(_conformed)}({call}, {self._slot(forms)})"
        self._lines.append(f"{step.name} = {call}")

    def _is_fixed(self, step: Step, value: Any) -> bool:
        """Say whether no later call gives another value; a view of parameters may have other numbers."""
        if step.op.draws:
            return False
        if not tree_any(lambda leaf: isinstance(leaf, np.ndarray | np.generic), value):
            return True  # numbers follow from sizes
        if step.reads & self._open:
            return False
        if step.reads & self._moving:
            self._moving.add(step.name)
            return not tree_any(lambda leaf: not self._is_view(leaf), value)
        return True

    def _is_view(self, value: Any) -> bool:
        return isinstance(value, np.ndarray) and any(
            np.may_share_memory(value, held) for held in self._held
        )

    def _call(self, function: str, args: Any, kwargs: Mapping[str, Any], dtype: Any) -> str:
        given = [self._written(value, dtype) for value in args]
        given += [f"{name}={self._written(value, dtype)}" for name, value in kwargs.items()]
        return f"{function}({', '.join(given)})"

    def _written(self, value: Any, dtype: Any) -> str:
        """Write an argument, cast to ``dtype`` unless that is None or its own."""
        if isinstance(value, Node):
            found = self._values[value.name]
            is_open = value.name in self._open
            self._read.add(value.name)
            if not _is_other(found, dtype):
                return value.name if is_open else self._slot(found)
            if is_open or value.name in self._moving:
                name = value.name if is_open else self._slot(found)
                return f"{name}.astype({self._slot(dtype)})"
            return self._slot(found.astype(dtype))
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._written(item, dtype) for item in value)}]"
        return self._slot(value)

    def _slot(self, value: Any) -> str:
        for name, held in self._slots.items():
            if held is value:
                return name
        name = f"_{len(self._slots)}"
        self._slots[name] = value
        return name

    def program(self) -> Program:
        """Compile what was written."""
        outputs = "".join(f"{self._written(value, None)}, " for value in self._outputs)
        body = "".join(f"    {line}\n" for line in self._lines)
        reads = [at for at, name in enumerate(self._inputs) if name in self._read]
        given = ", ".join(self._inputs[at] for at in reads)
        source = f"def evaluate({given}):\n{body}    return ({outputs})\n"
        scope = dict(self._slots)
        exec(compile(source, "<a policy in NumPy>", "exec"), scope)
        values = [np.asarray(value) for value in filled(list(self._outputs), self._values)]
        forms = tuple((value.shape, value.dtype) for value in values)
        return Program(tuple(reads), np.errstate(all="ignore")(scope["evaluate"]), forms)


def _cast(tree: Any, dtype: Any) -> Any:
    return tree_map(lambda leaf: leaf.astype(dtype) if _is_other(leaf, dtype) else leaf, tree)


def _is_other(value: Any, dtype: Any) -> bool:
    return dtype is not None and isinstance(value, np.ndarray | np.generic) and value.dtype != dtype


def _forms(like: Any, dtype_of: Callable[[torch.dtype], Any]) -> Any:
    """Give the dtypes of what an operator gave torch; None for what is no tensor."""
    if isinstance(like, tuple | list):
        return [_forms(one, dtype_of) for one in like]
    return dtype_of(like.dtype) if isinstance(like, torch.Tensor) else None


def _conformed(value: Any, forms: Any) -> Any:
    """Bring results into dtypes of torch's; what has them stays itself."""
    if isinstance(forms, list):
        return [_conformed(*pair) for pair in zip(value, forms, strict=False)]
    if forms is None or (isinstance(value, np.ndarray) and value.dtype == forms):
        return value
    return np.asarray(value, forms)


def _is_same(computed: Any, conformed: Any) -> bool:
    if isinstance(conformed, list):
        return all(one is other for one, other in zip(computed, conformed, strict=True))
    return computed is conformed
