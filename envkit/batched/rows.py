"""One sub-env bound to its rows of the shared buffers.

A row env reads its inputs from rows and writes what it makes into rows. `TensorDictRow` hosts any
`EnvBase`; an env with a `row_core` of its own (gymnasium) skips TensorDict altogether.

Conventions
    rows     this env's slice of each array of a region, see `buffers`.
    actions  one value per env, decoded for all envs of a host at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.base import EnvBase
from envkit.env_specs import as_key
from envkit.errors import WorkerError
from envkit.rules import STEP
from envkit.transition import empty_like

__all__ = ["RowEnv", "TensorDictRow", "action_reader", "bind_row", "row_core"]

Path = tuple[str, ...]
Regions = Mapping[str, Mapping[Path, torch.Tensor]]


class RowEnv(Protocol):
    """What a host asks of a sub-env."""

    def reset(self, **kwargs: Any) -> None:
        """Start an episode where the masks ask for it, and write the root row."""
        ...

    def step(self, action: Any) -> bool:
        """Step, write the next row, and say whether anything in it is done."""
        ...


def bind_row(env: EnvBase, row: int, regions: Regions) -> RowEnv:
    """Bind an env to row ``row`` of the buffers, by its own core where it has one."""
    core = row_core(env)
    if core is None:
        return TensorDictRow(env, row, regions)
    root, following = (
        {path: tensor[row].numpy() for path, tensor in regions[region].items()}
        for region in ("root", "next")
    )
    return core.bind(root, following)


def action_reader(
    envs: list[EnvBase], inputs: Mapping[Path, np.ndarray]
) -> Callable[[list[int] | slice], list[Any]]:
    """Give the function that decodes the actions of some rows, all of ``envs`` being alike.

    Envs without a core read their own inputs and get None.
    """
    core = row_core(envs[0])
    if core is None:
        return lambda rows: [None] * _count(rows)
    codec = core.action
    arrays = {path: inputs[path] for path in codec.leaves}
    return lambda rows: codec.read({path: array[rows] for path, array in arrays.items()})


def _count(rows: list[int] | slice) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def row_core(env: EnvBase) -> Any:
    """Give the core that steps an env on NumPy rows, or None when it has none."""
    make = getattr(type(env), "row_core", None)
    return None if make is None else make(env)


class TensorDictRow:
    """Any env behind its rows: builds the TensorDict of each call and copies what comes out.

    It remembers the env's current root, so that entries nobody sends (observations, a transform's
    counters) are there at the next step.
    """

    def __init__(self, env: EnvBase, row: int, regions: Regions):
        self.env = env
        self.root: TensorDictBase | None = None
        self._inputs, self._root, self._next, masks = (
            {path: tensor[row] for path, tensor in regions[region].items()}
            for region in ("in", "root", "next", "mask")
        )
        self._step_mask = masks.pop((STEP,))
        self._reset_masks = masks

    def reset(self, **kwargs: Any) -> None:
        root = self.root
        masks = {path: mask for path, mask in self._reset_masks.items() if not bool(mask.all())}
        if masks and root is not None:
            for path, mask in self._reset_masks.items():
                root.set(as_key(path), mask.clone())
        else:
            root = None if root is None else empty_like(root)
        self.root = self.env.reset(root, **kwargs)
        self._write(self._root, self.root)

    def step(self, action: Any) -> bool:
        """``action`` is ignored: this row reads its own inputs."""
        root = self.root
        if root is None:
            root = TensorDict({}, batch_size=self.env.batch_size, device=self.env.device)
        for path, tensor in self._inputs.items():
            root.set(as_key(path), tensor.clone())
        if not bool(self._step_mask.all()):
            root.set(STEP, self._step_mask.clone())
        td = self.env.step(root)
        following = td.get("next")
        self._write(self._next, following)
        self.root = self.env.step_mdp(td)
        ended = self.env.any_done(self.root)
        if ended:
            self._keep_masks(self.root)
        return ended

    def _keep_masks(self, root: TensorDictBase) -> None:
        """Leave the masks of a following reset where `reset` looks for them."""
        for path, mask in self._reset_masks.items():
            given = root.get(as_key(path), None)
            if given is not None:
                mask.copy_(given)
                root.del_(as_key(path))

    @staticmethod
    def _write(rows: Mapping[Path, torch.Tensor], values: TensorDictBase) -> None:
        for path, row in rows.items():
            value = values.get(as_key(path), None)
            if value is None:
                raise WorkerError(
                    f"the env returned no {as_key(path)!r}, but its specs declare it. "
                    "Run check_env_specs on one env first."
                )
            if value.shape != row.shape or value.dtype != row.dtype:
                raise WorkerError(
                    f"{as_key(path)!r} has shape {tuple(value.shape)} and dtype {value.dtype}, but "
                    f"its spec says {tuple(row.shape)} and {row.dtype}. "
                    "Run check_env_specs on one env first."
                )
            row.copy_(value)
