"""Compiled policies step by step: in NumPy where that is the same and faster, otherwise as the torch module.

NumPy acts on CPU data of few rows: a call of the module costs more than its arithmetic then. The module
itself acts where a gradient is recorded, under autocast, where it has hooks, where rows times parameters
are many, and where a translation is not covered or did not give what the module gave for the first data.
What is drawn comes from torch's generator, the same numbers as the module would draw.

Conventions
    rows   the flattened batch, in front of every array: one array for each entry that is read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch.nn.parameter import is_lazy

from envkit.data.paths import Path, as_key, as_path
from envkit.data.transition import leaves
from envkit.env.policy import RowsPolicy, as_policy, exploration_type, takes_tensordict
from envkit.env.stepping import Stepping
from envkit.errors import MissingKeyError, TranslationError
from envkit_bridges.policy.cache_key import few_values, own_classes
from envkit_bridges.policy.exporting import Exported, Signature, signature_for
from envkit_bridges.policy.graph import Graph
from envkit_bridges.policy.numpy_codegen import Program, straightened
from envkit_bridges.policy.numpy_library import NUMPY, table_for
from envkit_bridges.policy.side_effects import tensors_by_name

__all__ = ["Evaluation", "Stepwise"]


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


MOST_WORK = 2_000_000
"""Rows times parameters up to which NumPy acts; measured by bench/policy_rows.py."""

_TOLERANCE = (
    1e-3  # of what is compared once; errors of a translation are larger, rounding is smaller
)

Attempt = Callable[[Signature, int, Any], "Evaluation | str"]


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
        found = []
        for key, shape, dtype in self.forms:
            value = td.get(key, None)
            if value is None or value.shape != shape or value.dtype != dtype:
                return None
            if value.requires_grad and torch.is_grad_enabled():
                return None
            found.append(_as_rows(value, td.batch_dims))
        return found


class Stepwise:
    """What acts step by step in an env for a compiled policy.

    Args:
        env: names what a plain module reads and writes.
        module: the policy.
        attempt: translates it, or says why not.

    Attributes:
        evaluated_with: what computed the last call, "NumPy" or "torch"; None before the first.
        why: why that was torch; empty if it was not.
    """

    def __init__(self, env: Stepping, module: torch.nn.Module, attempt: Attempt):
        self.evaluated_with: str | None = None
        self.why = ""
        self._env, self._module, self._attempt = env, module, attempt
        self._act = as_policy(env, module)
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
            return self._act(td)
        self.evaluated_with = "NumPy"
        return _written(td, plan, inputs)

    def on_rows(self, root: TensorDictBase) -> RowsPolicy | None:
        """Give what acts on NumPy rows; see `envkit.env.policy.ActsOnRows`."""
        plan = self._plan
        if plan is None or not plan.unchanged:
            plan = self._plan = self._planned(root)
        self.why = plan.why or self._refusal(plan.unchanged)
        if self.why or root.batch_dims != 1 or plan.inputs(root) is None:
            return None
        self.evaluated_with = "NumPy"
        return _OnRows(plan)

    # -------------------------------------------------------------------------------- deciding

    @staticmethod
    def _refusal(unchanged: Unchanged) -> str:
        """Say why torch acts now, whatever was planned; empty if nothing speaks against NumPy."""
        if unchanged.learns:
            return "a gradient is recorded; act under torch.no_grad()"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        return ""

    def _planned(self, td: TensorDictBase) -> _Plan:
        """Decide how to act on data of this form."""
        unchanged = Unchanged(self._module)
        sees_root = takes_tensordict(self._module)
        is_free = sees_root and not isinstance(self._module, TensorDictModuleBase)
        keys = tuple(td.keys()) if is_free else None
        if why := self._refusal(unchanged) or self._obstacle(td, unchanged):
            return _Plan(unchanged, keys, td.batch_size, why=why)
        try:
            signature = signature_for(self._env, self._module, self._given(td), sees_root=sees_root)
        except MissingKeyError as error:  # the module says it in its own way
            return _Plan(unchanged, keys, td.batch_size, why=str(error))
        found = self._attempt(signature, td.numel(), in_numpy)
        if isinstance(found, str):
            return _Plan(unchanged, keys, td.batch_size, why=found)
        forms = [
            (as_key(path), torch.Size((*td.batch_size, *shape)), dtype)
            for path, shape, dtype in signature.reads
        ]
        inputs = [_as_rows(td.get(key), td.batch_dims) for key, _, _ in forms]
        try:
            program = found.program(self._module, inputs)
        except TranslationError as error:
            return _Plan(unchanged, keys, td.batch_size, why=str(error))
        forms, inputs = ([whole[at] for at in program.reads] for whole in (forms, inputs))
        plan = _Plan(unchanged, keys, td.batch_size, tuple(forms), program, found.writes)
        if td.batch_size not in found.agreed:
            if why := self._difference(td, plan, inputs):
                return _Plan(unchanged, keys, td.batch_size, why=why)
            found.agreed.add(td.batch_size)
        return plan

    def _obstacle(self, td: TensorDictBase, unchanged: Unchanged) -> str:
        if unchanged.obstacle:
            return unchanged.obstacle
        rows = td.numel()
        if not rows or rows * unchanged.size > MOST_WORK:
            return f"{rows} rows times {unchanged.size} parameters"
        if isinstance(td, LazyStackedTensorDict):
            return "the data is a lazy stack"
        for path, value in leaves(td):
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                return f"{as_key(path)!r} is on {value.device}"
        return ""

    def _given(self, td: TensorDictBase) -> dict[Path, tuple[torch.Size, torch.dtype]]:
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
        """Say in what NumPy and the module differ on some data, from the same random numbers."""
        with torch.no_grad():
            with torch.random.fork_rng(devices=[]):
                wanted = self._act(td.copy())
            with torch.random.fork_rng(devices=[]):
                got = _written(td.copy(), plan, inputs)
        for path, value in leaves(wanted):
            other = got.get(as_key(path), None)
            if other is value or not isinstance(
                value, torch.Tensor
            ):  # text is no outcome of a program
                continue
            if other is None or other.dtype != value.dtype or not _is_close(other, value):
                return f"NumPy gives another {as_key(path)!r} than the module"
        return ""


class _OnRows:
    """A plan on rows in memory that others own."""

    def __init__(self, plan: _Plan):
        assert plan.program is not None
        self.reads = tuple(as_path(key) for key, _, _ in plan.forms)
        self.writes: Mapping[Path, tuple[tuple[int, ...], np.dtype]] = dict(
            zip(plan.writes, plan.program.outputs, strict=True)
        )
        self._evaluate = plan.program.evaluate

    def __call__(self, rows: Mapping[Path, np.ndarray], out: Mapping[Path, np.ndarray]) -> None:
        values = self._evaluate(*[rows[path] for path in self.reads])
        for path, value in zip(self.writes, values, strict=True):
            out[path][...] = value


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
