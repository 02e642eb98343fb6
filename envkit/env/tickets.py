"""A step that is under way: made, begun and received, each once, by the holder of its ticket.

An env keeps nothing of a step between its begin and its end: the ticket does. So steps of several envs may be held at
once and received in any order.

Conventions
    made      `Stepping._make_step` has refused what would spoil data. The env has not moved.
    begun     `Stepping._begin_step` has handed the work out, where somebody else does it.
    received  the outcome is in the data.
"""

# pyright: reportUnknownMemberType=false
# (tensordict ships no types)
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from tensordict import TensorDictBase

from envkit.errors import StaleDataError


@dataclass(slots=True, eq=False)
class Ticket:
    """A step of ``env`` with ``td``.

    Attributes:
        env: what is stepped.
        td: root with the action; the outcome is written into it.
        advance: what ends is reset too: the outcome is that of `EnvBase.step_and_maybe_reset`.
        mask: what is stepped, bool of the batch size; None: all.
        restarts: the work itself begins new episodes, so that no reset follows.
        row: the memory it is made on; None: it is made with TensorDicts.
        work: what the env remembers for itself between making and receiving a step.
        following: what was written under ``next``, once the step was received.
    """

    env: Any
    td: TensorDictBase
    advance: bool
    mask: torch.Tensor | None = None
    restarts: bool = False
    row: Any = None
    work: Any = None
    following: Any = field(default=None, init=False)
    _is_received: bool = field(default=False, init=False)

    def begin(self) -> Self:
        """Set the step going; other work fits in until `recv`. Gives the ticket itself."""
        self.env._begin_step(self)
        return self

    def recv(self) -> Any:
        """Wait for the outcome.

        Returns:
            The same as `EnvBase.step`, or with ``advance`` as `EnvBase.step_and_maybe_reset`.

        Raises:
            StaleDataError: it was received before.
        """
        if self._is_received:
            raise StaleDataError(
                f"this step of {self.env} was received before, and a step is made once. Its outcome is "
                "in the data that recv() gave; begin another one."
            )
        self._is_received = True
        return self._received()

    def _received(self) -> Any:
        return self.env._stepped_and_reset(self) if self.advance else self.env._stepped(self)


@dataclass(slots=True, eq=False)
class OverriddenTicket(Ticket):
    """A step that a subclass makes in its own way, when it is received: only the subclass can begin any of it."""

    def begin(self) -> Self:
        """Do nothing: `recv` does all of it."""
        return self

    def _received(self) -> Any:
        env = self.env
        return env.step_and_maybe_reset(self.td) if self.advance else env.step(self.td)
