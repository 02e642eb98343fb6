"""An exported torch graph as steps, each of which applies one operator of a table.

This module reads the graph; what one operator computes is in `core_aten`. That every operator is covered
is checked when a graph is read, not while it is computed.

Conventions
    draw    number of an operator that draws, in the graph's order.
    sizes   a size that torch left open is that of the arrays that are computed with.
"""

from __future__ import annotations

import builtins
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._higher_order_ops.effects import with_effects
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from envkit.errors import TranslationError
from envkit_bridges.policy.core_aten import Library, Op
from envkit_bridges.policy.errors import STEPWISE, is_own

__all__ = ["Graph", "Step", "filled", "packet_of"]

# What they check holds by construction, or is the caller's to keep, as for any compiled function; of a
# matrix, NaN tells what torch would have raised.
_CHECKS = {
    "_linalg_check_errors.default",
    "_assert_async.msg",
    "_assert_scalar.default",
    "_assert_tensor_metadata.default",
    "sym_constrain_range.default",
    "sym_constrain_range_for_size.default",
}
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n\s+([^\n]+))?')


class Graph:
    """A graph of core ATen operators, in one array library.

    Args:
        program: exported and decomposed, from a module that holds the policy as its member ``module``.
        reads: names of the entries that its inputs are.
        table: the operators that are covered.
        library: what they compute with.

    Attributes:
        steps: in the order they are taken.
        outputs: what it gives, in terms of the nodes; see `filled`.
        inputs: names of the values it is called with, in the order it was exported with.
        tensors: names of the values that are parameters and buffers, and their names in the policy.
        constants: other tensors, by name of the value.

    Raises:
        TranslationError: an operator is not covered, or the module changes its buffers or inputs.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        reads: Sequence[str],
        table: Mapping[str, Op],
        library: Library,
    ):
        _refuse_writes(program, reads)
        self.steps, self.outputs = _read(program, table, library)
        self.constants: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, str] = {}
        self.inputs: list[str] = []
        for spec in program.graph_signature.input_specs:
            name, target = spec.arg.name, spec.target or ""  # type: ignore[union-attr]
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                self.tensors[name] = _own_name(target)
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                self.constants[name] = program.constants[target]
            elif spec.kind is InputKind.USER_INPUT:
                self.inputs.append(name)
            elif spec.kind is not InputKind.TOKEN:  # which orders checks, and they are left out
                raise TranslationError(
                    f"the module holds {target!r}, an object that is no tensor. Keep it out of "
                    f"forward, or {STEPWISE}."
                )


class Step:
    """One node: which operator is applied to which earlier values."""

    def __init__(self, node: Node, op: Op, draw: int):
        self.name = node.name
        self.node = node
        self.op = op
        self.draw = draw

    @property
    def reads(self) -> set[str]:
        """Names of the values it takes."""
        return {node.name for node in self.node.all_input_nodes}

    def apply(self, values: Mapping[str, Any], source: Any) -> Any:
        """Compute it; ``source`` is what it draws from, if it does."""
        node = self.node
        args, kwargs = filled(node.args, values), filled(node.kwargs, values)
        with self.blamed():
            return self.op.apply(args, kwargs, node.meta.get("val"), source)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Name the line of the module in what is raised meanwhile, as a TranslationError."""
        try:
            yield
        except (TypeError, ValueError, IndexError, NotImplementedError, OverflowError) as error:
            raise TranslationError(
                f"{self.node.target} cannot be translated as it is used {_place(self.node)}: {error}. "
                f"Change it there, or {STEPWISE}."
            ) from error


def _read(
    program: torch.export.ExportedProgram, table: Mapping[str, Op], library: Library
) -> tuple[list[Step], Sequence[Any]]:
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    steps: list[Step] = []
    outputs: Sequence[Any] = ()
    draws = 0
    for node in program.graph.nodes:
        if node.op == "output":
            pairs = zip(node.args[0], kinds, strict=True)
            outputs = [value for value, kind in pairs if kind is not OutputKind.TOKEN]
        elif node.op == "call_function" and _name_of(_operator_of(node)) not in _CHECKS:
            op = _op_of(node, table, library)
            steps.append(Step(node, op, draws))
            draws += op.draws
    return _needed(steps, outputs), outputs


def _needed(steps: list[Step], outputs: Sequence[Any]) -> list[Step]:
    """Drop steps that nothing reads; what a check looked at is among them."""
    wanted: set[str] = set()
    torch.fx.map_arg(outputs, lambda node: wanted.add(node.name))  # type: ignore[arg-type]
    kept = []
    for step in reversed(steps):
        if step.name in wanted:
            kept.append(step)
            wanted |= step.reads
    return kept[::-1]


# --------------------------------------------------------------------------------------- operators


def _op_of(node: Node, table: Mapping[str, Op], library: Library) -> Op:
    target = _operator_of(node)
    found = table.get(_name_of(target))
    if found is not None:
        return found
    if getattr(target, "__module__", None) in (operator.__name__, "_operator", "math"):
        return Op(target, library)  # type: ignore[arg-type]  # arithmetic of sizes, and tuples taken apart
    if getattr(builtins, getattr(target, "__name__", ""), None) is target:
        return Op(target, library)  # type: ignore[arg-type]
    raise TranslationError(
        f"{target} has no translation to {library.name}. The module uses it {_place(node)}. Write that line with "
        f"other operators (docs/compiled_policies.md lists those covered), or {STEPWISE}."
    )


def _operator_of(node: Node) -> Any:
    """Give what is called; an operator that raises for some values stands behind a token of its order."""
    return node.args[1] if node.target is with_effects else node.target


def packet_of(node: Node) -> str:
    """Name the operator of a node without its overload: that of ATen, or a function of Python's."""
    target = _operator_of(node)
    return _name_of(target).partition(".")[0] or getattr(target, "__name__", "")


def _name_of(target: Any) -> str:
    """Name an operator of ATen as the table does; anything else has no name there."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return f"{target._schema.name.removeprefix('aten::')}.{target._overloadname}"
    return ""


def _place(node: Node) -> str:
    """Say which line of the user's code a node comes from, and in which submodule."""
    said = ""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = _own_name(stack[-1][0]) if stack else ""
    if path:
        said = f"in submodule {path!r} "
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if is_own(frame[0])]
    if not frames:
        return f"{said}(torch kept no line)".strip()
    file, line, code = (own or frames)[-1]
    return f"{said}at {file}:{line}: `{code.strip()}`"


def _own_name(name: str) -> str:
    """Name a part as the policy does; it was exported as the member ``module`` of another one."""
    return name.removeprefix("module").removeprefix(".")


def _refuse_writes(program: torch.export.ExportedProgram, reads: Sequence[str]) -> None:
    inputs = program.graph_signature.user_inputs
    names = dict(zip(inputs, reads, strict=True))
    for spec in program.graph_signature.output_specs:
        name = _own_name(spec.target or "")
        if spec.kind is OutputKind.BUFFER_MUTATION:
            raise TranslationError(
                f"the module changes its buffer {name!r} when it is called, as batch norm does while it "
                f"trains. Call module.eval() first, or {STEPWISE}."
            )
        if spec.kind is OutputKind.PARAMETER_MUTATION:
            raise TranslationError(
                f"the module changes its parameter {name!r} when it is called. Let an optimiser do that, "
                f"or {STEPWISE}."
            )
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            raise TranslationError(
                f"the module writes into its input {names[spec.target or '']!r} in place. Let it compute on a clone, or "
                f"{STEPWISE}."
            )


# ------------------------------------------------------------------------------------------ values


def filled(tree: Any, values: Mapping[str, Any]) -> Any:
    """Put values in the place of nodes."""
    return torch.fx.map_arg(tree, lambda node: values[node.name])
