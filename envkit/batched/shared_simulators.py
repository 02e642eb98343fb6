"""Refuse rows of a batch that share an env or a simulator: a step of one would move the other."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from envkit.env.base import EnvBase
from envkit.errors import SharedEnvError


class SimulatorOwners:
    """The envs and simulators that rows of this process have, by identity; a copy of this is empty."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[int, weakref.ref[object]]] = {}
        self._lock = threading.Lock()  # threads make their envs at the same time

    def require(self, what: str, row: int, env: EnvBase) -> None:
        """Check that nothing that steps of ``env`` change belongs to another row.

        Args:
            what: the field's word for a row, for the message.
            row: its number.
            env: the env of the row.

        Raises:
            SharedEnvError: (a ValueError) another row has the env, or its simulator.
        """
        with self._lock:
            self._require(what, row, env)

    def _require(self, what: str, row: int, env: EnvBase) -> None:
        for moved in env._movable_objects():
            other, reference = self._owners.get(id(moved), (row, None))
            if other != row and reference is not None and reference() is moved:
                kind = "env" if isinstance(moved, EnvBase) else "simulator"
                raise SharedEnvError(
                    f"{what} {row} has the same {kind} as {what} {other}, one {type(moved).__name__}, so each would "
                    f"move the other. Make a new {kind} at each call: lambda: GymEnv(...), with the env built inside "
                    "of the function."
                )
            self._owners[id(moved)] = row, _reference(moved)

    def __reduce__(self) -> tuple[Any, ...]:
        return SimulatorOwners, ()


def _reference(moved: object) -> Any:
    try:
        return weakref.ref(moved)
    except TypeError:  # one that cannot be referred to weakly is kept
        return lambda: moved
