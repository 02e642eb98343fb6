"""From a torch module to a graph: what it is called with, what it writes, how it is exported, and the steps of the graph.

This module decides how a policy is run once on tensors without values. Each step of a graph applies one operator of a
table; what one operator computes is in `core_aten`. That every operator is covered is checked when a graph is read, not
while it is computed. It knows torch and TensorDict; it does not know JAX.

Conventions
    path   tuple of names of an entry of a TensorDict.
    rows   first axis of every entry. It is left open where the module allows, fixed otherwise.
    draw    number of an operator that draws, in the graph's order.
    sizes   a size that torch left open is that of the arrays that are computed with.
"""

from __future__ import annotations

import builtins
import copy
import linecache
import logging
import operator
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch._higher_order_ops.effects import with_effects
from torch.distributions import Distribution
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from envkit.data.paths import Path, as_key, as_path
from envkit.data.transition import leaves
from envkit.env.policy import HOW_CALLED, observation_inputs
from envkit.env.stepping import Stepping
from envkit.errors import MissingKeyError, TranslationError
from envkit.process_wide import alone, no_warnings
from envkit_bridges.policy.core_aten import Library, Op
from envkit_bridges.policy.errors import STEPWISE, is_own, refusal
from envkit_bridges.policy.side_effects import python_kept, python_state, require_pure

_EXAMPLE_ROWS = 7  # while the number is left open
_ONE_AT_A_TIME = threading.RLock()  # torch.export keeps its modes for the whole process


@dataclass(frozen=True)
class Signature:
    """Arguments of a call of a module.

    Attributes:
        reads: entries it gets, with the shape of one row and the dtype.
        writes: entries that the values it returns are; None if it takes and gives a TensorDict.
    """

    reads: tuple[tuple[Path, torch.Size, torch.dtype], ...]
    writes: tuple[Path, ...] | None


def signature_for(
    env: Stepping,
    module: torch.nn.Module,
    readable: Mapping[Path, tuple[torch.Size, torch.dtype]],
    *,
    sees_root: bool,
) -> Signature:
    """Return what a policy is called with in an env.

    Args:
        env: names what a plain module reads and writes.
        module: the policy.
        readable: all that it may read, with the shape of one row.
        sees_root: it `takes_tensordict`.

    Raises:
        MissingKeyError: (a KeyError) it reads something else.
    """
    writes = None
    if isinstance(module, TensorDictModuleBase):
        reads = [as_path(key) for key in module.in_keys]
    elif sees_root:
        reads = list(readable)
    else:
        reads = [as_path(key) for key in observation_inputs(env)]
        writes = tuple(as_path(key) for key in env.action_keys)
    missing = [as_key(path) for path in reads if path not in readable]
    if missing:
        raise MissingKeyError(
            f"the policy reads {missing}, but a root has {list(map(as_key, readable))}. Give what it "
            "remembers a first value: pass it in the TensorDict, or append a TensorDictPrimer. Values that it "
            f"reads of 'state' is not there in a program; {STEPWISE}."
        )
    return Signature(tuple((path, *readable[path]) for path in dict.fromkeys(reads)), writes)


@dataclass(frozen=True)
class Exported:
    """A program of core ATen operators.

    Attributes:
        program: inputs are the entries of `Signature.reads`; parameters are named as in the module.
        writes: entries that its outputs are, with their dtypes.
        rows: the number it was exported for; None serves any number above 1.
    """

    program: torch.export.ExportedProgram
    writes: tuple[tuple[Path, torch.dtype], ...]
    rows: int | None


def export(module: torch.nn.Module, signature: Signature, *, rows: int) -> Exported:
    """Run a module on tensors without values and keep what it did.

    Args:
        module: is not changed; a copy on the CPU stands in for one on another device.
        signature: what it is called with.
        rows: how many. For more than one, the number is left open if the module does not depend on it.

    Raises:
        TranslationError: torch cannot export the module, or it returns something else than tensors
            with one entry a row.
    """
    if any(tensor.device.type != "cpu" for tensor in (*module.parameters(), *module.buffers())):
        module = copy.deepcopy(module).cpu()
    failure: Exception | None = None
    with _ONE_AT_A_TIME, _tracing(), python_kept(module):
        for number in (None, rows) if rows > 1 else (rows,):
            try:
                return _export(module, signature, number)
            except TranslationError:
                raise
            except Exception as error:  # at the first try, most often a size that must be known
                failure = error
    if isinstance(failure, _ForwardError):
        reads = {".".join(path): shape for path, shape, _ in signature.reads}
        sees_root = signature.writes is None
        raise refusal(failure.args[0], module, reads, sees_root=sees_root) from failure.args[0]
    said = (str(failure).strip() or type(failure).__name__).splitlines()[0].rstrip(".")
    raise TranslationError(
        f"torch.export cannot follow {type(module).__name__}: {said}. Change that, or {STEPWISE}."
    ) from failure


def _export(module: torch.nn.Module, signature: Signature, rows: int | None) -> Exported:
    written: dict[Path, torch.dtype] = {}
    by_path = _ByPath(module, signature, written.update)
    examples = [
        torch.zeros(rows or _EXAMPLE_ROWS, *shape, dtype=dtype, device="cpu")
        for _, shape, dtype in signature.reads
    ]
    axis = torch.export.Dim("rows")
    shapes = None if rows else ([{0: axis}] * len(examples),)
    program = torch.export.export(by_path, (examples,), dynamic_shapes=shapes, strict=False)
    program = program.run_decompositions()
    return Exported(program, tuple(written.items()), rows)


class _ForwardError(Exception):
    """The error that the forward of a module raised, apart from all that export itself may raise."""


class _ByPath(torch.nn.Module):
    """A module as a function of leaves; notes which entries it writes.

    Export puts back what a forward does to attributes, containers included, but calls what it calls.
    """

    def __init__(self, module: torch.nn.Module, signature: Signature, note: Callable[..., None]):
        super().__init__()
        self.module = module
        self.signature = signature
        self.note = note

    def forward(self, entries: list[torch.Tensor]) -> list[torch.Tensor]:
        before = python_state(self.module)
        try:
            written = self._written(entries)
        except TranslationError:
            raise
        except Exception as error:
            raise _ForwardError(error) from error
        require_pure(self.module, before, python_state(self.module))
        for path, value in written.items():
            self._check(path, value, entries[0].shape[0])
        self.note({path: value.dtype for path, value in written.items()})
        return list(written.values())

    def _written(self, entries: list[torch.Tensor]) -> dict[Path, Any]:
        if self.signature.writes is not None:
            return self._returned(entries, self.signature.writes)
        paths = [path for path, _, _ in self.signature.reads]
        return self._through_tensordict(dict(zip(paths, entries, strict=True)))

    def _returned(self, entries: list[torch.Tensor], writes: Sequence[Path]) -> dict[Path, Any]:
        values = self.module(*entries)
        values = values if isinstance(values, tuple) else (values,)
        if len(values) != len(writes):
            raise TranslationError(
                f"{type(self.module).__name__} returned {len(values)} values, but the env has the "
                f"actions {['.'.join(path) for path in writes]}. Return one tensor for each."
            )
        return dict(zip(writes, values, strict=True))

    def _through_tensordict(self, inputs: Mapping[Path, torch.Tensor]) -> dict[Path, Any]:
        rows = next(iter(inputs.values())).shape[0]
        td = TensorDict({}, batch_size=[rows])
        for path, value in inputs.items():
            td.set(path, value)
        out = self.module(td)
        if not isinstance(out, TensorDictBase):
            raise TranslationError(
                f"{type(self.module).__name__} returned {type(out).__name__}, but was called with a TensorDict and must "
                f"return one. Write the action into it. {HOW_CALLED}"
            )
        return {path: value for path, value in leaves(out) if not _is_same(value, inputs.get(path))}

    def _check(self, path: Path, value: object, rows: object) -> None:
        if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] != rows:
            kind = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise TranslationError(
                f"the module writes {'.'.join(path)!r} as {kind}, but a compiled policy writes tensors "
                f"with one entry for each row. Change that, or {STEPWISE}."
            )


def _is_same(value: object, original: torch.Tensor | None) -> bool:
    """Check whether a value is what was given, if only after it was reshaped to and fro."""
    if not isinstance(value, torch.Tensor) or original is None:
        return False
    return value is original or _layout(value) == _layout(original)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


@contextmanager
def _tracing() -> Iterator[None]:
    """Make torch traceable while a module is exported, and put everything back after it.

    Fused attention has no decomposition on every device. The log of torch about a failure is raised, and so not printed too,
    unless TORCH_LOGS asks for it.
    """
    with ExitStack() as stack:
        stack.enter_context(values_unread())
        stack.enter_context(no_warnings())
        stack.enter_context(torch.no_grad())
        stack.enter_context(sdpa_kernel([SDPBackend.MATH]))
        if "TORCH_LOGS" not in os.environ:
            stack.enter_context(_without_logs())
        yield


@contextmanager
def values_unread() -> Iterator[None]:
    """Let modules run where tensors have no values to look at, in a trace and under `torch.func.vmap`.

    Distributions check their arguments by looking at values.
    """
    with ExitStack() as stack:
        stack.enter_context(alone())
        stack.callback(Distribution.set_default_validate_args, Distribution._validate_args)
        stack.enter_context(_Answering())
        stack.enter_context(_without_refusal_of_safe_tanh())
        Distribution.set_default_validate_args(False)
        yield


@contextmanager
def _without_logs() -> Iterator[None]:
    """Switch off all loggers of torch."""
    known = list(logging.root.manager.loggerDict.items())
    speaking = [
        logger
        for name, logger in known
        if name.partition(".")[0] == "torch"
        and isinstance(logger, logging.Logger)
        and not logger.disabled
    ]
    for logger in speaking:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in speaking:
            logger.disabled = False


# Code that a trace cannot follow, though its result is known. Some modules of TorchRL ask whether any row has a property
# before they treat the rows that have it, or check arguments by their values. For each such line the table says what a trace
# is given there, so that every row gets what it gets in torch, whatever the values are. A line is known by its text: if
# TorchRL changes it, the module is refused until this table knows the new one. ``x.data`` is ``x.detach()`` where nothing
# has a gradient, and a trace sees what is written to the latter.
# (function, line): what `bool` of a tensor gives there, or what it is iterated as (for `tolist`).
_ANSWERS: Mapping[tuple[str, str], Any] = {
    # Rows that begin an episode get a hidden state of zeros by torch.where, which changes no other row.
    (
        "GRUModule.forward",
        "if not self.recurrent_mode and is_init.any() and hidden is not None:",
    ): True,
    # Actions out of bounds get the log-probability -inf by masked_fill, which changes no other.
    ("TruncatedNormal.log_prob", "if above_or_below.any():"): True,
    # Checks of arguments, which a compiled policy leaves out, see `_tracing`.
    ("TruncatedStandardNormal.__init__", ".tolist()"): (),
    ("TruncatedNormal.__init__", "if not (high > low).all():"): True,
    ("TanhDelta.__init__", "assert (high > low).all()"): True,
}
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_CONTINUOUS = "torchrl.modules.distributions.continuous"


class _Answering(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.Tensor.__bool__, torch.Tensor.unbind):
            place = _place(sys._getframe(1))
            if place is not None and place in _ANSWERS:
                return _ANSWERS[place]
        if func == _DATA:  # a new object at every look
            return args[0].detach()
        return func(*args, **(kwargs or {}))


def _place(frame: FrameType | None) -> tuple[str, str] | None:
    """Find the line of TorchRL that called, and the function it is in."""
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None or not str(frame.f_globals.get("__name__")).startswith("torchrl."):
        return None
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return frame.f_code.co_qualname, line.strip()


@contextmanager
def _without_refusal_of_safe_tanh() -> Iterator[None]:
    """Remove, for a while, the refusal of TanhDelta with its default: the fault of torch was mended in 2.6."""
    module = sys.modules.get(_CONTINUOUS)
    refusal = getattr(module, "_err_compile_safetanh", None)
    if module is None or refusal is None:
        yield
        return
    module._err_compile_safetanh = lambda: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module._err_compile_safetanh = refusal  # type: ignore[attr-defined]


# Their checks hold by construction, or is the caller's to keep, as for any compiled function; of a
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
                constant = program.constants[target]
                assert isinstance(constant, torch.Tensor)
                self.constants[name] = constant
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

    def apply(self, values: Mapping[str, Any], source: object) -> Any:
        """Compute it; ``source`` is what it draws from, if it does."""
        node = self.node
        args, kwargs = filled(node.args, values), filled(node.kwargs, values)
        with self.blamed():
            return self.op.apply(args, kwargs, node.meta.get("val"), source)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Add the line of the module to what is raised meanwhile, as a TranslationError."""
        try:
            yield
        except (TypeError, ValueError, IndexError, NotImplementedError, OverflowError) as error:
            raise TranslationError(
                f"{self.node.target} cannot be translated as it is used {_placeholder_of(self.node)}: {error}. "
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
        f"{target} has no translation to {library.name}. The module uses it {_placeholder_of(node)}. Write that line with "
        f"other operators (the guide to compiled policies lists those covered), or {STEPWISE}."
    )


def _operator_of(node: Node) -> Any:
    """Return what is called; an operator that raises for some values comes behind a token of its order."""
    return node.args[1] if node.target is with_effects else node.target


def _name_of(target: object) -> str:
    """Return the name of an operator of ATen as the table does; anything else has no name there."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return f"{target._schema.name.removeprefix('aten::')}.{target._overloadname}"
    return ""


def _placeholder_of(node: Node) -> str:
    """Return which line of the user's code a node comes from, and in which submodule."""
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
    """Return the name of a part as the policy has it; it was exported as the member ``module`` of another one."""
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
    """Replace nodes by their values."""
    return torch.fx.map_arg(tree, lambda node: values[node.name])
