"""How often each row of a mixed batch was stepped or reset: what tells data that a simulator has left behind.

`Moments` counts, writes the counts into data and refuses data of an earlier moment. It knows rows and
neither envs nor steps.

Conventions
    moment   ``("state", "moment")``, int64 (rows, 1): how often a row of a stateful member was stepped or
             reset since it was seeded. 0 makes no claim; rows of stateless members hold it.
    mask     bool (rows,) on the CPU.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.batched.members import STATE
from envkit.errors import StaleDataError

__all__ = ["MOMENT", "Moments"]

MOMENT = (STATE, "moment")


class Moments:
    """The moments of all rows.

    Args:
        is_stateful: rows whose simulator cannot go back.
    """

    def __init__(self, is_stateful: torch.Tensor):
        self._is_stateful = is_stateful
        self.are_told = bool(is_stateful.any())
        self._now = torch.zeros(is_stateful.shape, dtype=torch.int64, device="cpu")

    def begin_anew(self) -> None:
        """Forget all: the simulators were seeded."""
        self._now = torch.zeros_like(self._now)

    def state(self) -> torch.Tensor:
        """Give all moments."""
        return self._now.clone()

    def take(self, moments: torch.Tensor) -> None:
        """Go on from what `state` gave."""
        self._now = moments.clone()

    def count(self, rows: torch.Tensor, within: slice = slice(None)) -> None:
        """Count a step or a reset of those of some rows that lie ``within`` a range."""
        now = self._now.clone()
        now[within] += (rows & self._is_stateful)[within]
        self._now = now

    def moving(self, td: TensorDictBase, mask: torch.Tensor | None) -> torch.Tensor:
        """Say which rows a step of ``mask`` (None: of all) from ``td`` moves for good.

        Raises:
            StaleDataError: the simulator of one has left that data behind.
        """
        moving = self._is_stateful if mask is None else self._is_stateful & mask
        given = td.get(MOMENT, None) if self.are_told else None
        if given is None:
            return moving
        given, newest = given.reshape(self._now.shape).cpu(), self._now
        stale = moving & (given != newest) & (given != 0) & (newest != 0)
        if bool(stale.any()):
            row = int(stale.nonzero()[0])
            raise StaleDataError(
                f"row {row} is to be stepped from moment {int(given[row])}, but its simulator is at "
                f"moment {int(newest[row])} and cannot go back. Go on from what the last step or reset "
                "gave: env.step_mdp(td), or begin anew: env.reset()."
            )
        return moving

    def tell(
        self,
        told: TensorDictBase,
        root: TensorDictBase | None = None,
        stepped: torch.Tensor | None = None,
    ) -> None:
        """Write the moments of all rows; those that were not ``stepped`` keep what ``root`` says."""
        if not self.are_told:
            return
        moments = self._now[:, None].to(told.device or "cpu", copy=True)
        given = None if root is None else root.get(MOMENT, None)
        if given is not None and stepped is not None:
            moments = rules.choose(stepped.to(moments.device), moments, given)
        told.set(MOMENT, moments)
