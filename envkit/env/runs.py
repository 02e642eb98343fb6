"""What an env may offer beside single resets and steps: whole runs at once, and steps that are read where they are made.

Each is an offer: without it, rollouts and fragments go step by step and give the same. This module knows what is
promised, and no env that keeps the promise.

Conventions
    run   many steps with one policy, from a root on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from envkit import rules
from envkit.env.in_place import InPlace

__all__ = ["Run", "WholeRuns"]


@dataclass(frozen=True)
class Run:
    """Many steps that an env may make at once.

    Attributes:
        stop: when it ends.
        root: where to start, nothing in it done.
        steps: most steps.
        policy: what the user passed.
        act: the same as a callable from TensorDict to TensorDict.
        record_state: keep what `_unrecorded` names.
        check_every: after how many steps the rule in ``stop`` is asked.
    """

    stop: rules.Stop
    root: TensorDictBase
    steps: int
    policy: Any
    act: Any
    record_state: bool = True
    check_every: int = 1


class WholeRuns:
    """The part of an environment that does more than a step at once; most do not."""

    def _fast_rollout(self, run: Run) -> TensorDictBase | list[TensorDictBase] | None:
        """Do a whole rollout at once, or None to leave it to the loop of steps.

        Returns:
            The transitions, stacked along a last axis of time or as a list; `rollout` does the rest.
        """
        return None

    def _runs_at_once(self, policy: Any) -> bool:
        """Say whether many steps with this policy can be one program that runs by itself; see `_begin_run`."""
        return False

    def _begin_run(self, run: Run) -> Callable[[], tuple[TensorDictBase, TensorDictBase]]:
        """Begin many steps as one program, where `_runs_at_once` says so; see `fragments`.

        The result gives the transitions, and the root that follows them. It stops for nobody.
        """
        raise NotImplementedError(f"{type(self).__name__} steps one by one.")

    def _in_place(self) -> InPlace | None:
        """Offer steps whose outcome is read where it was made; None: there are only TensorDicts."""
        return None

    @property
    def _cannot_drop_steps(self) -> str | None:
        """Name what, here or inside, changes something else than data when it steps; None: steps may be dropped."""
        return type(self).__name__

    _unrecorded: tuple[str, ...] = ()
    """Nodes at root and next that a fragment leaves out unless it is told to record them."""

    def _expect_run(self, stop: rules.Stop, policy: Any) -> None:
        """Learn of a rollout of several steps before it resets, so that both may share what they need.

        Args:
            stop: when it will end.
            policy: what the user passed.
        """
