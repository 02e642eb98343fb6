"""Which trajectory each collected step belongs to.

Conventions
    rows    the flattened batch of an env.
    number  int64; every trajectory of a collector has one of its own. Worker w of n counts w, w + n, w + 2n, ...,
            so that workers need not talk about it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

__all__ = ["TrajectoryNumbers", "abandoned"]


class TrajectoryNumbers:
    """Number the trajectories of some rows in the order in which they begin: by time, then by row.

    Args:
        rows: how many go on side by side.
        first: the first number.
        stride: difference between one number and the next.
    """

    def __init__(self, rows: int, *, first: int = 0, stride: int = 1):
        self.stride = stride
        self.current = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self.restart(first)

    def count(self, ended: torch.Tensor) -> torch.Tensor:
        """Number steps, of which some are the last ones of their trajectory.

        Args:
            ended: bool, shape ``(rows, steps)``: a new trajectory begins after this step.

        Returns:
            int64 of that shape.
        """
        begun = ended.T.reshape(-1).cumsum(0).reshape(ended.T.shape).T  # by time, then by row
        numbers = torch.where(ended, self.following + (begun - 1) * self.stride, -1)
        numbers = torch.cat([self.current[:, None], numbers], 1).cummax(1).values  # they only grow
        self.following += int(ended.sum()) * self.stride
        self.current = numbers[:, -1].clone()
        self._is_unused = ended[:, -1].clone()
        return numbers[:, :-1]

    def begin_anew(self, rows: torch.Tensor) -> list[int]:
        """Give a new number to the rows that a bool mask names, unless theirs was not used yet.

        Returns:
            The numbers that nobody goes on with.
        """
        renewed = rows & ~self._is_unused
        count = int(renewed.sum())
        ended = self.current[renewed].tolist()
        self.current[renewed] = self.following + torch.arange(count, device="cpu") * self.stride
        self.following += count * self.stride
        self._is_unused |= renewed
        return ended

    def restart(self, first: int) -> None:
        """Number all rows anew, from ``first`` on."""
        rows = len(self.current)
        self.current = first + torch.arange(rows, device="cpu") * self.stride
        self.following = first + rows * self.stride
        """The number of the next trajectory that begins."""
        self._is_unused = torch.ones(rows, dtype=torch.bool, device="cpu")

    def state_dict(self) -> dict[str, Any]:
        """Give what the next numbers depend on."""
        return {
            "following": self.following,
            "current": self.current.clone(),
            "is_unused": self._is_unused.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as whoever gave ``state`` would have."""
        self.following = int(state["following"])
        self.current = state["current"].clone()
        self._is_unused = state["is_unused"].clone()


def abandoned(
    known: Collection[int], collected: Collection[int], following: Collection[int], stride: int
) -> list[int]:
    """Give the trajectories that nobody goes on with although no step says so: a reset or a fault came between.

    Args:
        known: numbers of trajectories that have not ended.
        collected: numbers in the newest batch of some rows.
        following: numbers that these rows go on with.
        stride: see `TrajectoryNumbers`.
    """
    workers = {number % stride for number in following}
    alive = {*collected, *following}
    return sorted(number for number in known if number % stride in workers and number not in alive)
