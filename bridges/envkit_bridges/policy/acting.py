"""Compiled policies step by step: in NumPy where that is the same and faster, otherwise as the torch module.

NumPy acts on CPU data of few rows: a call of the module costs more than its arithmetic then. The module
itself acts where a gradient is recorded, under autocast, where it has hooks, where rows times parameters
are many, and where a translation is not covered or did not give what the module gave for the first data.
What is drawn comes from torch's generator, the same numbers as the module would draw.

Conventions
    rows   the flattened batch, in front of every array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from envkit.data.paths import Path, as_key, as_path
from envkit.data.transition import leaves
from envkit.env.policy import RowsPolicy, as_policy, takes_tensordict
from envkit.env.stepping import Stepping
from envkit.errors import MissingKeyError, TranslationError
from envkit_bridges.policy.evaluation import Evaluation, Unchanged, in_numpy
from envkit_bridges.policy.exporting import Signature, signature_for
from envkit_bridges.policy.straight import Program

__all__ = ["MOST_WORK", "Stepwise"]

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
