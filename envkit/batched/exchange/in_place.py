"""Steps through shared rows whose outcome is read where the sub-envs wrote it: no TensorDict is made.

For callers that look at a few entries of a step and keep none of them, as views of an env for other libraries
do. They step on through `BatchedEnv` at any time: both ways share one exchange, which knows what is newest.

Conventions
    moment  entries of the root or of `next` by key, as arrays of shape (rows, *leaf), which the next call
            overwrites: whoever keeps a value copies it.
    idle    rows that were not stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from tensordict import TensorDict

from envkit.batched.exchange.rows import BufferExchange
from envkit.data.paths import Key, Path, as_key

__all__ = ["RowsInPlace"]

Moment = dict[Key, np.ndarray]


class RowsInPlace:
    """Advance the rows of a pool; see `envkit.env.runs`.

    Args:
        exchange: what steps the rows.
        is_current: says whether the env still delivers what ``exchange`` holds, on the CPU.
        may_lose: rows may be lost, and are told then by what was known of them before the step.
    """

    def __init__(self, exchange: BufferExchange, is_current: Callable[[], bool], *, may_lose: bool):
        self._exchange, self._may_lose = exchange, may_lose
        self.is_current = is_current
        self._moments: dict[int, tuple[Moment, Moment]] = {}

    @staticmethod
    def can_show(exchange: BufferExchange) -> bool:
        """Say whether NumPy knows the dtypes of all entries."""
        regions = (*exchange.inputs, *exchange.roots, *exchange.nexts)
        return all(rows.dtype != torch.bfloat16 for region in regions for rows in region.values())

    def root(self) -> TensorDict:
        """Give what is known now, as a TensorDict of its own."""
        return self._exchange.newest()

    def advance(
        self, actions: Mapping[Path, torch.Tensor | np.ndarray], mask: np.ndarray | None
    ) -> tuple[Moment, Moment]:
        """Step the rows of a mask (None: all), and reset those that end; gives `next` and the root that follows.

        Idle rows show in `next` what their root holds, with reward 0. Their values in ``actions`` may be anything.

        Raises:
            InputError: (a ValueError) an action is none of the spec; nothing has moved then.
            WorkerError: a worker failed, and may not be restarted.
        """
        exchange = self._exchange
        if mask is not None and mask.all():
            mask = None
        root = self.root() if self._may_lose or exchange.has_lost else None
        rows = exchange.fill(actions, None if mask is None else torch.from_numpy(mask))
        exchange.wait(exchange.wake(root, rows, advance=True))
        following, fresh = self._at(exchange.slot)
        if mask is not None:
            self._keep_idle(following, fresh, np.flatnonzero(~mask))
        return following, fresh

    def _keep_idle(self, following: Moment, root: Moment, idle: np.ndarray) -> None:
        # Where `next` is newest already, it holds what the root would.
        at_root = idle[~self._exchange.newest_is_next[idle]]
        for key, made in following.items():
            if key in root:
                made[at_root] = root[key][at_root]
            else:
                made[idle] = 0  # rewards

    def _at(self, slot: int) -> tuple[Moment, Moment]:
        if slot not in self._moments:
            exchange = self._exchange
            self._moments[slot] = _arrays(exchange.nexts[slot]), _arrays(exchange.roots[slot + 1])
        return self._moments[slot]


def _arrays(region: Mapping[Path, torch.Tensor]) -> Moment:
    return {as_key(path): rows.numpy() for path, rows in region.items()}
