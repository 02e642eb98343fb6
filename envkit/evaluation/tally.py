"""Count the episodes of rows that are stepped side by side: each row's first ones, however long they take.

To take the episodes that end first would count short ones more often. It knows data, and no env.

Conventions
    rows   the flattened batch of an env.
    quota  episodes that each row contributes.
    stale  of a row: ``max_steps`` has ended its episode, and no new one has begun yet.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase

__all__ = ["Tally"]


class Tally:
    """The episodes of some rows so far.

    Args:
        rows: how many.
        quota: see the module.
        max_steps: of an episode; None for no limit.
    """

    def __init__(self, rows: int, quota: int, max_steps: int | None):
        self.quota, self.max_steps = quota, max_steps
        self.counted = torch.zeros(rows, dtype=torch.int64)
        self.elapsed = torch.zeros(rows, dtype=torch.int64)
        self.paid = torch.zeros(rows, dtype=torch.float64)
        self.stale = torch.zeros(rows, dtype=torch.bool)
        self.returns = torch.zeros(rows, quota, dtype=torch.float64)
        self.lengths = torch.zeros(rows, quota, dtype=torch.int64)
        self.terminated = torch.zeros(rows, quota, dtype=torch.bool)
        self.is_cut = torch.zeros(rows, quota, dtype=torch.bool)
        self._ends: list[tuple[torch.Tensor, TensorDictBase]] = []

    @property
    def open_rows(self) -> torch.Tensor:
        """Rows that have episodes to play."""
        return self.counted < self.quota

    def steps_left(self) -> int | None:
        """How many steps may be taken before ``max_steps`` ends an episode that counts; None for any number."""
        if self.max_steps is None:
            return None
        return self.max_steps - int(self.elapsed[self.open_rows].max())

    def add(
        self,
        reward: torch.Tensor,
        ended: torch.Tensor,
        terminated: torch.Tensor,
        following: TensorDictBase,
    ) -> None:
        """Count some steps.

        Args:
            reward: float64, shape ``(rows, steps)``.
            ended, terminated: bool, of that shape.
            following: what the steps led to, of that batch size.
        """
        begun, steps = 0, reward.shape[1]
        while begun < steps and bool((self.open_rows & ~self.stale).any()):
            stop = self._next_end(ended, begun)
            counts = self.open_rows & ~self.stale
            self.paid += reward[:, begun:stop].sum(1).where(counts, 0.0)  # elsewhere, it may be NaN
            self.elapsed += (stop - begun) * counts
            self._end(counts, ended[:, stop - 1], terminated[:, stop - 1], following[:, stop - 1])
            begun = stop

    def begin_stale(self) -> None:
        """Learn that new episodes have begun in rows that were stale."""
        self.stale[:] = False

    def _next_end(self, ended: torch.Tensor, begun: int) -> int:
        """Give the number of the step after the next one at which an episode that counts ends, or the last."""
        counts = self.open_rows & ~self.stale
        ends = ended[counts, begun:].any(0).nonzero()
        stop = begun + int(ends[0]) + 1 if len(ends) else ended.shape[1]
        if self.max_steps is not None:
            stop = min(stop, begun + self.max_steps - int(self.elapsed[counts].max()))
        return stop

    def _end(
        self,
        counts: torch.Tensor,
        ended: torch.Tensor,
        terminated: torch.Tensor,
        following: TensorDictBase,
    ) -> None:
        cut = torch.zeros_like(ended)
        if self.max_steps is not None:
            cut = counts & ~ended & (self.elapsed >= self.max_steps)
        over = (counts & ended) | cut
        if not bool(over.any()):
            return
        place = over, self.counted[over]
        self.returns[place] = self.paid[over]
        self.lengths[place] = self.elapsed[over]
        self.terminated[place] = terminated[over] & ended[over]
        self.is_cut[place] = cut[over]
        numbers = over.nonzero()[:, 0] * self.quota + self.counted[over]
        self._ends.append((numbers, following[over].clone()))
        self.counted[over] += 1
        self.elapsed[over] = 0
        self.paid[over] = 0.0
        self.stale |= cut

    def last(self) -> TensorDictBase:
        """Give what each episode led to, batch size ``(rows * quota,)``."""
        order = torch.cat([numbers for numbers, _ in self._ends]).argsort()
        ends = [TensorDict(dict(end.items()), end.batch_size) for _, end in self._ends]
        return torch.cat(ends)[order]  # type: ignore[arg-type]
