"""Compiled policies step by step: in NumPy where that is the same and faster, otherwise as the torch module.

NumPy acts on CPU data of few rows: a call of the module costs more than its arithmetic then. The module
itself acts where a gradient is recorded, under autocast, where it has hooks, and where products of matrices are large.
It also acts where a translation is not covered or gave another result for the first data. Random numbers come from
torch's generator, the same as the module would draw: torch's own operator is called on the memory of the arrays. So is
what NumPy has no function for. An index out of range raises, as in torch.

For few rows every call counts, so the graph is walked once, with the arrays of one call, and what it did
is written down as the source of a function: one call an operator, and nothing beside it. Values that follow from sizes
    and
constants is computed then. Parameters are used in their own memory, so that the writes of an optimiser are seen.
Operands and results are cast only where NumPy would give another dtype than torch.

Conventions
    rows    the flattened batch, in front of every array: one array for each entry that is read or written.
    fixed   values that no later call changes: constants, sizes, and the memory of parameters.
    slot    global name in the written function that holds a fixed value or an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch.fx import Node
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_any, tree_map

from envkit.data.paths import Path, as_key, as_path
from envkit.data.transition import leaves
from envkit.env.bound_policy import BoundPolicy, LeavesPolicy, RowsPolicy, bind_policy
from envkit.env.policy import exploration_type
from envkit.env.stepping import Stepping
from envkit.errors import MissingKeyError, TranslationError
from envkit_bridges.policy.cache_key import few_values, own_classes
from envkit_bridges.policy.core_aten import RULES, STORAGE, Library, Op, bound, in_range, namespace
from envkit_bridges.policy.exporting import Exported, Graph, Signature, Step, filled, signature_for
from envkit_bridges.policy.side_effects import tensors_by_name
from envkit_bridges.policy.stacked import StackedPolicies


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
        """Return the function for as many rows as ``inputs`` have; see `straightened`.

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
    """Return where a tensor lies, and how."""
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
    """Return what keeps a module from being evaluated elsewhere; empty if nothing does."""
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
    """Return the hooks that torch calls for every module."""
    of_all = torch.nn.modules.module
    return of_all._global_forward_hooks, of_all._global_forward_pre_hooks


class Unchanged:
    """Whether a module is what it was: attributes and parts by identity, tensors by their memory.

    This is asked at every call, so it looks only into tensors and arrays of few values that an attribute holds:
    `cache_key` looks into the others when a policy is bound.

    Attributes:
        obstacle: what keeps the module from being evaluated in NumPy; empty if nothing does.
        largest: elements of its largest parameter, 0 if there is none or an obstacle.
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
        watched = [] if self.obstacle else tensors
        self._tensors = [(tensor, _place(tensor)) for tensor in watched]
        few = [
            value
            for part in parts
            for value in part.__dict__.values()
            if few_values(value) is not None
        ]
        self._constants = [(value, few_values(value)) for value in few]
        self.largest = max((tensor.numel() for tensor in watched), default=0)

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


LARGE_PRODUCT = 2**18
"""Multiply-adds of a product of matrices from which torch acts: rows times elements of the largest parameter.

NumPy's OpenBLAS uses threads for larger ones. They wait for each other, spinning, as those of torch do (see
`envkit.env.torch_threads`), and NumPy has no function that sets their number.
"""

_TOLERANCE = (
    1e-3  # of what is compared once; errors of a translation are larger, rounding is smaller
)


@dataclass(frozen=True)
class _Plan:
    """How a module acts on data of one form; without a program, torch does.

    Attributes:
        keys: of the root, where the module may look at all of them.
        batch: size of the data.
        forms: shape and dtype of the entries that are read.
        why: why torch acts.
    """

    unchanged: Unchanged
    keys: tuple[str, ...] | None
    batch: torch.Size
    forms: tuple[tuple[Any, torch.Size, torch.dtype], ...] = ()
    program: Program | None = None
    writes: tuple[Path, ...] = ()
    why: str = ""

    def inputs(self, td: TensorDictBase) -> list[np.ndarray] | None:
        """Read the rows of a root; None if it has another form."""
        if td.batch_size != self.batch:
            return None
        if self.keys is not None and tuple(td.keys()) != self.keys:
            return None
        inputs = []
        for key, shape, dtype in self.forms:
            value = td.get(key, None)
            if value is None or value.shape != shape or value.dtype != dtype:
                return None
            if value.requires_grad and torch.is_grad_enabled():
                return None
            inputs.append(_as_rows(value, td.batch_dims))
        return inputs


class Translated(Protocol):
    """A module and its translations, see `compile_policy`."""

    module: torch.nn.Module

    @property
    def sees_root(self) -> bool: ...

    def attempt(self, signature: Signature, rows: int, make: Any) -> Any:
        """Translate the module, or say why that cannot be."""


class Stepwise(BoundPolicy):
    """The function that acts step by step in an env for a compiled policy.

    Args:
        env: names what a plain module reads and writes.
        policy: a module, and its translations.

    Attributes:
        evaluated_with: what computed the last call, "NumPy" or "torch"; None before the first.
        why: why that was torch; empty if it was not.
    """

    def __init__(self, env: Stepping, policy: Translated):
        self._as_torch = bind_policy(env, policy.module)
        super().__init__(self._as_torch)
        self.evaluated_with: str | None = None
        self.why = ""
        self._env, self._policy = env, policy
        self._plan: _Plan | None = None

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Act on a root; see `envkit.env.policy`."""
        plan = self._plan
        if plan is None or not plan.unchanged:
            plan = self._plan = self._planned(td)
        why = plan.why or self._refusal(plan.unchanged)
        inputs = None if why else plan.inputs(td)
        if not why and inputs is None:
            plan = self._plan = self._planned(td)
            inputs = plan.inputs(td)
            why = plan.why or ("" if inputs is not None else "a gradient flows to what it reads")
        self.why = why
        if why or inputs is None:
            self.evaluated_with = "torch"
            return self._as_torch(td)
        self.evaluated_with = "NumPy"
        return _written(td, plan, inputs)

    def for_run(self, root: TensorDictBase) -> LeavesPolicy | RowsPolicy | None:
        rows, plan = root if root.batch_dims else root.unsqueeze(0), self._plan
        if plan is None or not plan.unchanged:
            plan = self._plan = self._planned(rows)
        self.why = plan.why or self._refusal(plan.unchanged)
        if self.why:
            self.evaluated_with = "torch"
            return self._as_torch.for_run(root)
        if rows.batch_dims != 1 or plan.inputs(rows) is None:
            return None
        self.evaluated_with = "NumPy"
        return _on_rows(plan)

    # -------------------------------------------------------------------------------- deciding

    @staticmethod
    def _refusal(unchanged: Unchanged) -> str:
        """Return why torch acts now, whatever was planned; empty if nothing speaks against NumPy."""
        if unchanged.learns:
            return "a gradient is recorded; act under torch.no_grad()"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        return ""

    def _planned(self, td: TensorDictBase) -> _Plan:
        """Decide how to act on data of this form."""
        module, sees_root = self._policy.module, self._policy.sees_root
        if isinstance(module, StackedPolicies):
            module.require_all_rows(td, self._env.batch_size.numel())
        unchanged = Unchanged(module)
        is_free = sees_root and not isinstance(module, TensorDictModuleBase)
        keys = tuple(td.keys()) if is_free else None
        if why := self._refusal(unchanged) or self._obstacle(td, unchanged):
            return _Plan(unchanged, keys, td.batch_size, why=why)
        try:
            signature = signature_for(self._env, module, self._readable(td), sees_root=sees_root)
        except MissingKeyError as error:  # the module says it in its own way
            return _Plan(unchanged, keys, td.batch_size, why=str(error))
        translation = self._policy.attempt(signature, td.numel(), in_numpy)
        if isinstance(translation, str):
            return _Plan(unchanged, keys, td.batch_size, why=translation)
        forms = [
            (as_key(path), torch.Size((*td.batch_size, *shape)), dtype)
            for path, shape, dtype in signature.reads
        ]
        inputs = [_as_rows(td.get(key), td.batch_dims) for key, _, _ in forms]
        try:
            program = translation.program(module, inputs)
        except TranslationError as error:
            return _Plan(unchanged, keys, td.batch_size, why=str(error))
        forms = [forms[at] for at in program.reads]
        inputs = [inputs[at] for at in program.reads]
        plan = _Plan(unchanged, keys, td.batch_size, tuple(forms), program, translation.writes)
        if td.batch_size not in translation.agreed:
            if why := self._difference(td, plan, inputs):
                return _Plan(unchanged, keys, td.batch_size, why=why)
            translation.agreed.add(td.batch_size)
        return plan

    def _obstacle(self, td: TensorDictBase, unchanged: Unchanged) -> str:
        if unchanged.obstacle:
            return unchanged.obstacle
        rows, largest, module = td.numel(), unchanged.largest, self._policy.module
        if isinstance(module, StackedPolicies):  # a product of matrices for each policy
            rows, largest = rows // module.num_policies, largest // module.num_policies
        if not rows or rows * largest >= LARGE_PRODUCT:
            return f"{rows} rows times {largest} elements of the largest parameter"
        if isinstance(td, LazyStackedTensorDict):
            return "the data is a lazy stack"
        for path, value in leaves(td):
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                return f"{as_key(path)!r} is on {value.device}"
        return ""

    def _readable(self, td: TensorDictBase) -> dict[Path, tuple[torch.Size, torch.dtype]]:
        """List what a policy may read of a root."""
        actions = {as_path(key) for key in self._env.action_keys}
        return {
            path: (value.shape[td.batch_dims :], value.dtype)
            for path, value in leaves(td)
            if isinstance(value, torch.Tensor)
            and path not in actions
            and path[0] != "next"
            and not path[-1].startswith("_")
        }

    def _difference(self, td: TensorDictBase, plan: _Plan, inputs: list[np.ndarray]) -> str:
        """Return in what NumPy and the module differ on some data, from the same random numbers."""
        with torch.no_grad():
            with torch.random.fork_rng(devices=[]):
                wanted = self._as_torch(td.copy())
            with torch.random.fork_rng(devices=[]):
                got = _written(td.copy(), plan, inputs)
        for path, value in leaves(wanted):
            other = got.get(as_key(path), None)
            # text is no outcome of a program
            if other is value or not isinstance(value, torch.Tensor):
                continue
            if other is None or other.dtype != value.dtype or not _is_close(other, value):
                return f"NumPy gives another {as_key(path)!r} than the module"
        return ""


def _on_rows(plan: _Plan) -> RowsPolicy:
    """Build the function that computes a plan on rows in memory of others."""
    assert plan.program is not None
    evaluate, reads = plan.program.evaluate, tuple(as_path(key) for key, _, _ in plan.forms)

    def act(rows: Mapping[Path, np.ndarray], out: Mapping[Path, np.ndarray]) -> None:
        for path, value in zip(plan.writes, evaluate(*[rows[path] for path in reads]), strict=True):
            out[path][...] = value

    return RowsPolicy(reads, dict(zip(plan.writes, plan.program.outputs, strict=True)), act)


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def _as_rows(value: torch.Tensor, batch_dims: int) -> np.ndarray:
    array = value.numpy(force=True)
    return array if batch_dims == 1 else array.reshape(-1, *array.shape[batch_dims:])


def _written(td: TensorDictBase, plan: _Plan, inputs: list[np.ndarray]) -> TensorDictBase:
    """Evaluate, and write what comes out into a root."""
    assert plan.program is not None
    for path, value in zip(plan.writes, plan.program.evaluate(*inputs), strict=True):
        own = torch.from_numpy(np.array(value, order="C"))  # it may be the memory of a parameter
        if td.batch_dims != 1:
            own = own.reshape((*td.batch_size, *own.shape[1:]))
        td.set(as_key(path), own)
    return td


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
        inputs: of one call. Its draws leave torch's generator as it was.

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

    def _is_fixed(self, step: Step, value: object) -> bool:
        """Check whether no later call gives another value; a view of parameters may have other numbers."""
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

    def _is_view(self, value: object) -> bool:
        return isinstance(value, np.ndarray) and any(
            np.may_share_memory(value, held) for held in self._held
        )

    def _call(self, function: str, args: Any, kwargs: Mapping[str, Any], dtype: Any) -> str:
        given = [self._written(value, dtype) for value in args]
        given += [f"{name}={self._written(value, dtype)}" for name, value in kwargs.items()]
        return f"{function}({', '.join(given)})"

    def _written(self, value: object, dtype: object) -> str:
        """Write an argument, cast to ``dtype`` unless that is None or its own."""
        if isinstance(value, Node):
            constant = self._values[value.name]
            is_open = value.name in self._open
            self._read.add(value.name)
            if not _is_other(constant, dtype):
                return value.name if is_open else self._slot(constant)
            if is_open or value.name in self._moving:
                name = value.name if is_open else self._slot(constant)
                return f"{name}.astype({self._slot(dtype)})"
            return self._slot(constant.astype(dtype))
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._written(item, dtype) for item in value)}]"
        return self._slot(value)

    def _slot(self, value: object) -> str:
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


def _cast(tree: object, dtype: object) -> Any:
    return tree_map(lambda leaf: leaf.astype(dtype) if _is_other(leaf, dtype) else leaf, tree)


def _is_other(value: object, dtype: object) -> bool:
    return dtype is not None and isinstance(value, np.ndarray | np.generic) and value.dtype != dtype


def _forms(like: object, dtype_of: Callable[[torch.dtype], Any]) -> Any:
    """Return the dtypes of what an operator gave torch; None for what is no tensor."""
    if isinstance(like, tuple | list):
        return [_forms(one, dtype_of) for one in like]
    return dtype_of(like.dtype) if isinstance(like, torch.Tensor) else None


def _conformed(value: Any, forms: Any) -> Any:
    """Convert results into dtypes of torch; what has one is returned as it is."""
    if isinstance(forms, list):
        return [_conformed(*pair) for pair in zip(value, forms, strict=False)]
    if forms is None or (isinstance(value, np.ndarray) and value.dtype == forms):
        return value
    return np.asarray(value, forms)


def _is_same(computed: Any, conformed: Any) -> bool:
    if isinstance(conformed, list):
        return all(one is other for one, other in zip(computed, conformed, strict=True))
    return computed is conformed


def _by_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: function(torch.from_numpy(np.asarray(x, order="C"))).numpy()


def _argsort(x: Any, axis: int, descending: bool) -> Any:
    if not descending:
        return np.argsort(x, axis, kind="stable")
    back = np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
    return x.shape[axis] - 1 - back


def _picked(x: Any, index: Any, axis: int) -> Any:
    return np.take(x, in_range(np, index, x.shape[axis]), axis)


def _gathered(x: Any, index: Any, axis: int) -> Any:
    return np.take_along_axis(x, in_range(np, index, x.shape[axis]), axis)


_IN_PLACE = {"add": np.add, "multiply": np.multiply, "max": np.maximum, "min": np.minimum}


def _put(x: object, places: tuple[Any, ...], values: object, how: str) -> Any:
    out = np.array(x)
    if how == "set":
        out[places] = values
    else:
        _IN_PLACE[how].at(out, places, values)
    return out


def _dtype_of(dtype: torch.dtype) -> Any:
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError as error:
        raise NotImplementedError(f"NumPy has no {dtype}") from error


NUMPY = Library(
    "NumPy",
    namespace(
        np,
        rsqrt=lambda x: 1 / np.sqrt(x),
        sigmoid=lambda x: 1 / (1 + np.exp(-x)),
        erf=_by_torch(torch.erf),
        erfinv=_by_torch(torch.erfinv),
        lgamma=_by_torch(torch.lgamma),
        digamma=_by_torch(torch.digamma),
        argsort=_argsort,
        cummax=np.maximum.accumulate,
        cummin=np.minimum.accumulate,
        logcumsumexp=np.logaddexp.accumulate,
        picked=_picked,
        gathered=_gathered,
        indexed=lambda x, places: x[places],
        put=_put,
    ),
    (np.ndarray, np.generic),
    _dtype_of,
)

_COVERED = bound(RULES, NUMPY)


def table_for(nodes: Iterable[Node]) -> dict[str, Op]:
    """Return the operators that are covered: those of every library, and what draws among ``nodes``."""
    drawing = {
        str(node.target).removeprefix("aten."): Op(_drawn_by(node.target), NUMPY, draws=True)
        for node in nodes
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    }
    return {**_COVERED, **drawing}


def _drawn_by(operator: Any) -> Callable[..., Any]:
    """Make a function of arrays of an operator that draws from torch's generator."""

    def drawn(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(given, torch.Generator) for given in (*args, *kwargs.values())):
            raise NotImplementedError(
                "a generator of the module's own is not covered; leave it out"
            )
        args, kwargs = tree_map(_as_tensor, (args, kwargs))
        return tree_map(_as_array, operator(*args, **kwargs))

    return drawn


def _as_tensor(value: object) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    return value


def _as_array(value: object) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else value
