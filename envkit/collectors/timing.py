"""How long a policy acts, of the time in which a batch is made, and how long batches and weights travel.

Conventions
    seconds  spent in "envs", in the "policy", and in "transfer"; what a policy takes is counted away from the envs,
             whose time is that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.data.paths import Path
from envkit.env.on_leaves import ActsOnLeaves, LeavesPolicy
from envkit.env.policy import ActsOnRows, Policy, RowsPolicy

__all__ = ["Seconds", "timed"]


class Seconds(dict[str, float]):
    """Seconds by what they were spent in."""

    def __init__(self) -> None:
        super().__init__(envs=0.0, policy=0.0, transfer=0.0)

    @contextmanager
    def transferring(self) -> Iterator[None]:
        """Count what is done within as "transfer"."""
        began = perf_counter()
        try:
            yield
        finally:
            self["transfer"] += perf_counter() - began

    def acted(self, began: float) -> None:
        """Count what a policy took from a moment of ``perf_counter`` until now."""
        spent = perf_counter() - began
        self["policy"] += spent
        self["envs"] -= spent


def timed(act: Policy, seconds: Seconds) -> Policy:
    """Give a policy that does what ``act`` does, in every way it can, and counts how long it takes."""
    if isinstance(act, ActsOnLeaves):
        return _TimedOnLeaves(act, seconds)
    return _TimedOnRows(act, seconds) if isinstance(act, ActsOnRows) else _Timed(act, seconds)


class _Timed:
    def __init__(self, act: Policy, seconds: Seconds):
        self._act, self._seconds = act, seconds

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        began = perf_counter()
        acted = self._act(td)
        self._seconds.acted(began)
        return acted


class _TimedOnLeaves(_Timed):
    _act: ActsOnLeaves  # type: ignore[assignment]

    def on_leaves(self, root: TensorDictBase) -> LeavesPolicy | None:
        found = self._act.on_leaves(root)
        if found is None:
            return None
        act, seconds = found.act, self._seconds

        def timed_act(given: Sequence[torch.Tensor]) -> Mapping[Path, Any]:
            began = perf_counter()
            written = act(given)
            seconds.acted(began)
            return written

        return replace(found, act=timed_act)


class _TimedOnRows(_Timed):
    _act: ActsOnRows  # type: ignore[assignment]

    def on_rows(self, root: TensorDictBase) -> RowsPolicy | None:
        found = self._act.on_rows(root)
        return None if found is None else _TimedRows(found, self._seconds)


class _TimedRows:
    def __init__(self, act: RowsPolicy, seconds: Seconds):
        self.reads, self.writes = act.reads, act.writes
        self._act, self._seconds = act, seconds

    def __call__(self, rows: Mapping[Path, np.ndarray], out: Mapping[Path, np.ndarray]) -> None:
        began = perf_counter()
        self._act(rows, out)
        self._seconds.acted(began)
