"""One step of an env as a value: made, checked, begun and received by whoever holds it.

An env keeps nothing of a step between its begin and its end, so steps of several envs may be held at once
and received in any order. Kinds of envs that work elsewhere, in programs or in processes, derive from
`Pending` and begin that work; the others make the whole step when it is received. This module knows
when something happens, and not what.

Conventions
    made      `EnvBase._make_step` has refused what would spoil data. Nothing has moved.
    checked   what the simulator itself would refuse was refused too: others may begin meanwhile.
    begun     the work was handed out.
    received  the outcome is in the data.
    advance   what is done is reset after the step: the outcome is that of `step_and_maybe_reset`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Self

from tensordict import TensorDictBase

from envkit.errors import StaleDataError

__all__ = ["LocalStep", "OverriddenStep", "Pending"]


@dataclass(slots=True, eq=False)
class Pending(ABC):
    """A step of ``env`` with ``td``: `check` it, `begin` it, receive its outcome, each once.

    Args:
        env: what is stepped.
        td: root with the action; the outcome is written into it.
        advance: also reset what is done.
    """

    env: Any
    td: TensorDictBase
    advance: bool
    _is_received: bool = field(default=False, init=False)

    def check(self) -> Self:
        """Refuse now what the env would refuse once it is begun; gives the step itself."""
        return self

    def begin(self) -> Self:
        """Set the step going; other work fits in until `recv`. Gives the step itself."""
        return self

    def recv(self) -> Any:
        """Wait for the outcome.

        Returns:
            What `EnvBase.step` does, or with ``advance`` what `EnvBase.step_and_maybe_reset` does.

        Raises:
            StaleDataError: it was received before.
        """
        if self._is_received:
            raise StaleDataError(
                f"this step of {self.env} was received before, and a step is made once. Its outcome is "
                "in the data that recv() gave; begin another one."
            )
        self._is_received = True
        return self.with_root() if self.advance else self.stepped()

    @abstractmethod
    def stepped(self) -> TensorDictBase:
        """Wait, and give the data with the outcome of the step under ``next``."""

    def with_root(self) -> tuple[TensorDictBase, TensorDictBase]:
        """Give the same and the root that follows, in which what was done is reset."""
        data = self.stepped()
        return data, self.env.maybe_reset(self.env.step_mdp(data))


@dataclass(slots=True, eq=False)
class LocalStep(Pending):
    """A step that is made when it is received, in the order of its env: step, then reset what is done."""

    def check(self) -> Self:
        """Refuse actions that the simulator would refuse."""
        self.env._check_inputs(self.td)
        return self

    def stepped(self) -> TensorDictBase:
        return self.env._stepped(self.td)


@dataclass(slots=True, eq=False)
class OverriddenStep(Pending):
    """A step that a subclass makes in its own way: nobody but it can check or begin any of it."""

    def stepped(self) -> TensorDictBase:
        return self.env.step(self.td)

    def with_root(self) -> tuple[TensorDictBase, TensorDictBase]:
        return self.env.step_and_maybe_reset(self.td)
