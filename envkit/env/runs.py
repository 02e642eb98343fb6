"""What an env may offer beside single resets and steps: whole runs at once, and steps that are read where they are made.

An env answers `Stepping._runs` with its `Runs`. Each method is an offer: without it, rollouts and fragments go step by
step and give the same.

Conventions
    run     many steps with one policy, from a root on.
    rows    the only batch axis of an env that offers `InPlace`.
    moment  entries of the root or of `next` by key: tensors or arrays, shape ``(rows, *leaf)``. They hold until the
            next call of the env.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tensordict import TensorDictBase

from envkit import rules
from envkit.data.paths import Key, Path

Moment = TensorDictBase | Mapping[Key, Any]


class InPlace(Protocol):
    """Steps of an env; the env may be used in any other way between them."""

    def is_current(self) -> bool:
        """Check whether these are still steps of the env, as it delivers its data; else ask it for others."""
        ...

    def root(self) -> TensorDictBase:
        """Return what is known now, as its own TensorDict."""
        ...

    def advance(
        self, actions: Mapping[Path, Any], mask: np.ndarray | None
    ) -> tuple[Moment, Moment]:
        """Step the rows that a mask selects, None all of them, and reset those that end.

        Args:
            actions: by path, of the batch size of the env; in rows that are not stepped they may hold anything.
            mask: bool, shape ``(rows,)``.

        Returns:
            The result of the step, and the root that follows it. Rows that are not stepped show in the former what
            their root holds, with reward 0.
        """
        ...


@dataclass
class Draws:
    """Key of a run that is made in pieces: step t draws from it and t, so it does not matter where pieces are cut.

    Attributes:
        key: raw PRNG key; None before the first piece.
        made: steps of the pieces so far.
    """

    key: np.ndarray | None = None
    made: int = 0

    def take(self, steps: int, new_key: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the words of the key, then the number of the first step of the next piece, uint32.

        ``new_key`` makes the key of the first piece.
        """
        if self.key is None:
            self.key = new_key()
        start, self.made = self.made, (self.made + steps) % 2**32
        return np.append(self.key, np.uint32(start))


@dataclass(frozen=True)
class Run:
    """Many steps that an env may make at once.

    Attributes:
        stop: when it ends.
        root: where to start, nothing in it done, unless `Runs.unbegun_root` gave it.
        steps: most steps.
        policy: what the user passed.
        act: the same as a callable from TensorDict to TensorDict.
        record_state: keep what `Facts.unrecorded` names.
        check_every: after how many steps the rule in ``stop`` is asked.
        draws: where programs draw from, if it goes on from an earlier run; None draws from a new key.
    """

    stop: rules.Stop
    root: TensorDictBase
    steps: int
    policy: Any
    act: Any
    record_state: bool = True
    check_every: int = 1
    draws: Draws | None = None


Record = TensorDictBase | list[TensorDictBase] | None
"""Transitions, stacked along a last axis of time or as a list; None: they are to be made step by step."""

Begun = Callable[[], tuple[TensorDictBase, TensorDictBase]]
"""Gives data and following root of steps that may still be under way."""


class Runs:
    """Offers of one env; this one offers nothing."""

    def expect(self, stop: rules.Stop, policy: Any) -> None:
        """Learn of a rollout of several steps before it resets, so that both may share what they need.

        Args:
            stop: when it will end.
            policy: what the user passed.
        """

    def unbegun_root(self, policy: Any) -> TensorDictBase | None:
        """Return a root whose rows are all done and hold what their first episodes are drawn from, or None.

        Where an env gives one, `record` begins them, to the same values as `reset`, and no reset comes before it: no
        separate program for a reset is compiled then. The run stops for nothing.
        """
        return None

    def record(self, run: Run) -> Record:
        """Make a whole rollout at once; `rollout` does the rest."""
        return None

    def record_behind(self, env: Any, run: Run) -> Record:
        """Make a whole rollout of ``env``, a `TransformedEnv` around this env, at once."""
        return None

    def is_program(self, policy: Any) -> bool:
        """Check whether many steps with this policy can be one program that runs by itself; see `begin`."""
        return False

    def begin(self, run: Run) -> Begun:
        """Begin many steps as one program, where `is_program` says so. It does not stop when rows are done."""
        raise NotImplementedError("this env steps one by one.")

    def in_place(self) -> InPlace | None:
        """Return steps whose outcome is read where it was made; None: there are only TensorDicts."""
        return None
