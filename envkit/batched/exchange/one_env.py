"""One env of this process, stepped on its own row of memory.

`OneRow` is for envs whose simulator writes into rows (`row_core`): no TensorDict is made but the one that is given out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.batched.exchange.memory import SLOT, BufferPlan, Rings, RowMemory
from envkit.batched.exchange.recording import recorded
from envkit.batched.metadata import EnvLeaves
from envkit.data.paths import Path, as_key, as_path
from envkit.env.base import EnvBase
from envkit.env.runs import Run
from envkit.rules import RESET
from envkit.specs.inputs import ActionInput, require_input
from envkit.transport import Layout

_ROW = [0]


class OneRow(RowMemory):
    """The row of one env; an env with batch axes has them in its leaves.

    Args:
        env: whose specs it has.
        core: steps it, see `envkit.batched.bound_envs.row_core`.
    """

    def __init__(self, env: EnvBase, core: Any):
        leaves = EnvLeaves(env)
        plan = BufferPlan.of(leaves, 1)
        arrays = Layout(tuple(plan.fields()), 1, {}, SLOT.name).zeros()
        regions = {name: plan.tensors(arrays, name) for name in ("in", "root", "next", "mask")}
        of_row = (
            {path: ring[:, 0] for path, ring in regions[name].items()}
            for name in ("in", "root", "next")
        )
        rings, actions = Rings(*of_row), leaves.paths("action")
        super().__init__(rings, actions, arrays[SLOT.name], env.batch_size, {}, env.device)
        shown = {
            region: {path: tensor.numpy() for path, tensor in tensors.items()}
            for region, tensors in regions.items()
        }
        self._rows = core.bind([core], range(1), shown, arrays[SLOT.name])
        self._slot = self.slots.data
        self._flags = list(leaves.paths("done"))
        self._masks = [mask for path, mask in shown["mask"].items() if path[-1] == RESET]
        self.has_large_rows = plan.has_large_rows
        nexts, roots = (
            [{path: leaf.numpy() for path, leaf in moment.items()} for moment in moments]
            for moments in (self.nexts, self.roots)
        )
        self._following = nexts
        self._followed = [
            [(root, made[path]) for path, root in after.items()]
            for made, after in zip(nexts, roots[1:], strict=True)
        ]
        known = {as_path(key): rule for key, rule in env._action_inputs.items()}
        rules = {
            path: known[path] if path in actions else _State(path, leaf)
            for path, leaf in self.inputs[0].items()
        }
        self._filled: list[list[tuple[Path, ActionInput | _State, torch.Size, np.ndarray]]] = [
            [(path, rules[path], leaf.shape, leaf.numpy()) for path, leaf in inputs.items()]
            for inputs in self.inputs
        ]
        self._states = [
            (path, rule, shape) for path, rule, shape, _ in self._filled[0] if path not in actions
        ]

    def fits(self, inputs: TensorDictBase) -> bool:
        """Check whether a row holds all of a step: memory is as transforms wrote it. Actions are converted or refused."""
        for path, rule, shape in self._states:
            if rule.values_of(inputs.get(path, None), shape) is None:
                return False
        return True

    def fill(self, inputs: TensorDictBase | Mapping[Path, Any], mask: None, slot: int) -> None:
        """Write the inputs of a step into a slot, actions converted or refused as their specs say."""
        for path, rule, shape, memory in self._filled[slot]:
            value = inputs.get(path, None)
            array = rule.values_of(value, shape)
            if array is None:
                value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                array = rule.take(value, self.batch_size).numpy(force=True)
            np.copyto(memory, array.reshape(memory.shape))

    def check_actions(self, rows: Mapping[Path, np.ndarray]) -> None:
        """Check, and convert, actions that were written into a slot, which are shown with an axis of rows."""
        for path, rule, shape, _ in self._filled[0]:
            if path not in rows:
                continue
            action = rows[path] if self.batch_size else rows[path][0, ...]
            if rule.values_of(action, shape) is None:
                action[...] = rule.take(torch.from_numpy(action), self.batch_size).numpy()

    def any_done(self, slot: int, flags: Sequence[Path]) -> bool:
        following = self._following[slot]
        return any(
            b"\1" in following[path].tobytes() for path in flags
        )  # faster than NumPy's `any`

    def follow(self, slot: int) -> None:
        for root, made in self._followed[slot]:
            root[...] = made

    def select_all(self) -> None:
        """End the use of the slots by a run that is under way."""
        self.hand_over()

    def wake(self, root: Any, rows: None, *, advance: bool, slot: int) -> None:
        """Step with what lies in a slot, and reset what ends with ``advance``."""
        self._slot[0] = slot
        self._rows.step(_ROW, advance=advance)

    def wait(self, sent: None) -> None:
        """Do nothing: the step was made."""

    def check(self, inputs: TensorDictBase) -> None:
        """Refuse what a step would refuse, whose inputs are written again when it is made."""
        if self._leave is not None:
            self.hand_over()
        self.fill(inputs, None, 0)

    def step(self, inputs: TensorDictBase, *, advance: bool = False) -> TensorDict:
        """Step with actions, and memory that `fits`, and return the ``next``; with ``advance`` reset what has ended."""
        self.check(inputs)
        self._slot[0] = 0
        self._rows.step(_ROW, advance=advance)
        return self.deliver(self.nexts[0])

    def fresh_root(self) -> TensorDict | None:
        """Return the root that follows the last step, made with ``advance``; None where no episode has ended."""
        return self.deliver(self.roots[1]) if self.any_done(0, self._flags) else None

    def record(self, env: Any, run: Run) -> TensorDictBase | list[TensorDictBase] | None:
        """Make a rollout as `Runs.record` promises; None where rows cannot hold it."""
        return recorded(env, self, run, ended=lambda following: {})

    def reset(self, mask: torch.Tensor | None, **kwargs: Any) -> TensorDict:
        """Begin an episode, and return its root; of an env with batch axes, where a mask selects them (None: all)."""
        self.hand_over()
        if self.batch_size:
            for selected in self._masks:
                selected[...] = True if mask is None else mask.reshape(selected.shape).cpu()
        self.slots[0] = 0
        self._rows.reset(0, (), **kwargs)
        return self.deliver(self.roots[1])


class _State:
    """Value that a transform wrote at a root for its next step; as `ActionInput`, but never converted."""

    def __init__(self, path: Path, leaf: torch.Tensor):
        self._key, self._form = as_key(path), (leaf.shape, leaf.dtype)

    def values_of(self, value: Any, shape: torch.Size) -> np.ndarray | None:
        is_plain = type(value) is torch.Tensor and value.is_cpu and not value.requires_grad
        return value.numpy() if is_plain and (value.shape, value.dtype) == self._form else None

    def take(self, value: Any, lead: torch.Size) -> torch.Tensor:
        require_input(self._key, value, *self._form)
        return value.detach()
