"""One env of this process, stepped on a row of memory of its own.

`OneRow` is for envs whose simulator writes into rows (`row_core`): no TensorDict is made but the one that is given out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.batched.exchange.memory import SLOT, BufferPlan, Rings, RowMemory
from envkit.batched.metadata import EnvLeaves
from envkit.data.paths import Path, as_path
from envkit.env.base import EnvBase
from envkit.specs.inputs import ActionInput
from envkit.transport import Layout

__all__ = ["OneRow"]

_ROW = [0]


class OneRow(RowMemory):
    """The row of one env; an env with batch axes has them in its leaves.

    Args:
        env: whose specs it has; all that a step takes is actions.
        core: steps it, see `envkit.batched.host_rows.row_core`.
        rules: what its actions may be, by key.
    """

    def __init__(self, env: EnvBase, core: Any, rules: dict[Any, ActionInput]):
        plan = BufferPlan.of(EnvLeaves(env), 1)
        arrays = Layout(tuple(plan.fields()), 1, {}, SLOT.name).zeros()
        regions = {name: plan.tensors(arrays, name) for name in ("in", "root", "next", "mask")}
        of_row = (
            {path: ring[:, 0] for path, ring in regions[name].items()}
            for name in ("in", "root", "next")
        )
        super().__init__(Rings(*of_row), arrays[SLOT.name], env.batch_size, {}, env.device)
        shown = {
            region: {path: tensor.numpy() for path, tensor in tensors.items()}
            for region, tensors in regions.items()
        }
        self._rows = core.bind([core], range(1), shown, arrays[SLOT.name])
        self._slot = self.slots.data
        self.has_large_rows = plan.has_large_rows
        nexts, roots = (
            [{path: leaf.numpy() for path, leaf in moment.items()} for moment in moments]
            for moments in (self.nexts, self.roots)
        )
        self._made = nexts
        self._followed = [
            [(root, made[path]) for path, root in after.items()]
            for made, after in zip(nexts, roots[1:], strict=True)
        ]
        by_path = {as_path(key): rule for key, rule in rules.items()}
        shapes = {path: (*env.batch_size, *rule.shape) for path, rule in by_path.items()}
        self._filled: list[list[tuple[Path, ActionInput, tuple[int, ...], np.ndarray]]] = [
            [(path, by_path[path], shapes[path], rows.numpy()) for path, rows in inputs.items()]
            for inputs in self.inputs
        ]

    def fill(self, given: TensorDictBase | Mapping[Path, Any], mask: None, slot: int) -> None:
        """Write actions into a slot, converted or refused as their specs say."""
        for path, rule, shape, memory in self._filled[slot]:
            value = given.get(path, None)
            found = rule.values_of(value, shape)
            if found is None:
                value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                found = rule.take(value, self.batch_size).numpy(force=True)
            np.copyto(memory, found.reshape(memory.shape))

    def check_actions(self, rows: Mapping[Path, np.ndarray]) -> None:
        """Check, and convert, actions that were written into a slot, which are shown with an axis of rows."""
        for path, rule, shape, _ in self._filled[0]:
            action = rows[path] if self.batch_size else rows[path][0, ...]
            if rule.values_of(action, shape) is None:
                action[...] = rule.take(torch.from_numpy(action), self.batch_size).numpy()

    def any_done(self, slot: int, flags: Sequence[Path]) -> bool:
        made = self._made[slot]
        return any(b"\1" in made[path].tobytes() for path in flags)  # faster than NumPy's `any`

    def follow(self, slot: int) -> None:
        for root, made in self._followed[slot]:
            root[...] = made

    def select_all(self) -> None:
        """Have a run that is under way leave the slots."""
        self.hand_over()

    def wake(self, root: Any, rows: None, *, advance: bool, slot: int) -> None:
        """Step with what lies in a slot, and reset what ends with ``advance``."""
        self._slot[0] = slot
        self._rows.step(_ROW, advance=advance)

    def wait(self, sent: None) -> None:
        """Nothing: the step was made."""

    def step(self, given: TensorDictBase) -> TensorDict:
        """Step with actions, and give the ``next``."""
        if self._leave is not None:
            self.hand_over()
        self.fill(given, None, 0)
        self._slot[0] = 0
        self._rows.step(_ROW, advance=False)
        return self.deliver(self.nexts[0])

    def reset(self, **kwargs: Any) -> TensorDict:
        """Begin an episode, and give its root."""
        self.hand_over()
        self.slots[0] = 0
        self._rows.reset(0, (), **kwargs)
        return self.deliver(self.roots[1])
