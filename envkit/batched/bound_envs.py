"""Sub-envs bound to their rows of the shared buffers.

Row envs read their inputs from rows and write what they make into rows. `TensorDictRows` hosts any
`EnvBase`; envs with their own `row_core` (gymnasium) skip TensorDict altogether.

Conventions
    rows     global row numbers; a group owns a consecutive range of them.
    regions  arrays over all slots and rows of the pool by region and path, see `exchange.memory`.
    slot     number of the moment that the parent has written into the shared slot array.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.forms import require_form
from envkit.data.paths import Path, as_key
from envkit.env.base import EnvBase
from envkit.rules import STEP

Regions = Mapping[str, Mapping[Path, torch.Tensor]]


class RowEnvs(Protocol):
    """Calls of a host to its sub-envs. Errors are raised as `envkit.transport.Host.run` says."""

    def reset(self, row: int, states: Collection[Path] = (), /, **kwargs: Any) -> None:
        """Start an episode where the row's masks ask for it, and write the following root row.

        ``states`` are the inputs that lie in the row and that the reset is to start from.
        """
        ...

    def step(self, rows: Sequence[int], *, advance: bool) -> None:
        """Step some rows and write their next rows.

        With ``advance`` reset what is done then, and write the following root rows as well.
        """
        ...

    def replace(self, row: int, env: EnvBase) -> None:
        """Put another env, made by the same function, in the place of a row's env."""
        ...


def bind_rows(envs: list[EnvBase], rows: range, regions: Regions, slot: np.ndarray) -> RowEnvs:
    """Bind envs to their rows: by their own core where all have one of a kind.

    ``slot`` is the shared array that says which slot comes next, the same number in all rows.
    """
    cores = [row_core(env) for env in envs]
    if all(core is not None and core.is_like(cores[0]) for core in cores):
        arrays = {
            region: {path: tensor.numpy() for path, tensor in regions[region].items()}
            for region in ("in", "root", "next", "mask")
        }
        return cores[0].bind(cores, rows, arrays, slot)
    return TensorDictRows(envs, rows, regions, slot)


def row_core(env: EnvBase) -> Any:
    """Return the core that steps an env on NumPy rows, or None when it has none."""
    make = getattr(type(env), "row_core", None)
    return None if make is None else make(env)


class TensorDictRows:
    """Any envs behind their rows."""

    def __init__(self, envs: list[EnvBase], rows: range, regions: Regions, slot: np.ndarray):
        self._regions, self._slot, self._first = regions, slot, rows.start
        self._envs: dict[int, TensorDictRow] = {}
        for row, env in zip(rows, envs, strict=True):
            self.replace(row, env)

    def replace(self, row: int, env: EnvBase) -> None:
        self._envs[row] = TensorDictRow(env, row, self._regions)

    def reset(self, row: int, states: Collection[Path] = (), /, **kwargs: Any) -> None:
        self._envs[row].reset(int(self._slot[row]), states, **kwargs)

    def step(self, rows: Sequence[int], *, advance: bool) -> None:
        slot = int(self._slot[self._first])
        for row in rows:
            env = self._envs[row]
            if advance:
                env.advance(slot)
            else:
                env.step(slot)

    def roots(self) -> dict[int, TensorDictBase | None]:
        """Return the current root of every row; None before the first reset."""
        return {row: env.root for row, env in self._envs.items()}

    def put_root(self, row: int, root: TensorDictBase | None) -> None:
        """Set the root from which a row continues."""
        self._envs[row].root = root

    def to(self, device: torch.device) -> None:
        """Follow the envs, which were moved to another device."""
        for env in self._envs.values():
            env.root = None if env.root is None else env.root.to(device)


class TensorDictRow:
    """One env behind its row: builds the TensorDict of each call and copies what comes out.

    It remembers the env's current root, so that entries that are not sent (observations, a transform's
    counters) are there at the next step. No gradients: rows are written in place.
    """

    def __init__(self, env: EnvBase, row: int, regions: Regions):
        self.env = env
        self.root: TensorDictBase | None = None
        self._inputs, self._roots, self._nexts = (
            {path: tensor[:, row].unbind(0) for path, tensor in regions[region].items()}
            for region in ("in", "root", "next")
        )
        masks = {path: tensor[row] for path, tensor in regions["mask"].items()}
        self._step_mask = masks.pop((STEP,))
        self._reset_masks = masks

    @torch.no_grad()
    def reset(self, slot: int, states: Collection[Path], /, **kwargs: Any) -> None:
        """Start an episode where the masks ask for it, and write the root row that follows ``slot``."""
        is_whole = all(bool(mask.all()) for mask in self._reset_masks.values())
        root = self._blank() if self.root is None or is_whole else self.root.copy()
        for path in states:
            root.set(as_key(path), self._inputs[path][slot].clone())
        if not is_whole and self.root is not None:
            for path, mask in self._reset_masks.items():
                # a full one says no more than none, but to the levels below it
                if not bool(mask.all()):
                    root.set(as_key(path), mask.clone())
        self.root = self.env.reset(root, **kwargs)
        self._write(self._roots, slot + 1, self.root)

    @torch.no_grad()
    def step(self, slot: int) -> None:
        """Step from and into the rows of ``slot``."""
        td = self.env.step(self._input(slot))
        self._write(self._nexts, slot, td.get("next"))
        self.root = self.env.step_mdp(td)

    @torch.no_grad()
    def advance(self, slot: int) -> None:
        """The same, then reset what is done, and write the root row that follows ``slot``."""
        td, self.root = self.env.step_and_maybe_reset(self._input(slot))
        self._write(self._nexts, slot, td.get("next"))
        self._write(self._roots, slot + 1, self.root)

    def _input(self, slot: int) -> TensorDictBase:
        """Return the current root with the inputs of ``slot``, which later ones do not overwrite."""
        root = self._blank() if self.root is None else self.root
        for path, tensors in self._inputs.items():
            root.set(as_key(path), tensors[slot].clone())
        if not bool(self._step_mask.all()):
            root.set(STEP, self._step_mask.clone())
        return root

    def _blank(self) -> TensorDict:
        return TensorDict({}, batch_size=self.env.batch_size, device=self.env.device)

    @staticmethod
    def _write(
        rows: Mapping[Path, Sequence[torch.Tensor]], slot: int, values: TensorDictBase
    ) -> None:
        for path, slots in rows.items():
            row, key = slots[slot], as_key(path)
            value = values.get(key, None)
            require_form(key, value, row.shape, row.dtype)
            row.copy_(value)
