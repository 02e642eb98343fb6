"""An EnvPool by rows: each is stepped and reset when it is told to be, and at no other time.

The library resets a row that has ended in its next step, whose action it ignores. `RowPool` refuses such a step, so
that resets are asked for, of those rows alone. It knows arrays, and no TensorDict.

Conventions
    row    number of an env of the pool, which the library calls its id.
    rows   int32 array of row numbers; None stands for all.
    ended  rows that are in no episode: before their first reset, and after a last step.
    sent   a step that was handed to the library's threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from envkit.errors import NotResetError, StaleDataError, StepMaskError
from envkit_bridges.worlds.envpool.library import built_anew

__all__ = ["RowPool", "Rows", "Sent", "Stepped"]

Rows = np.ndarray | None
Stepped = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]
"""Observations, rewards, terminated, truncated and infos of the rows that were stepped."""


@dataclass(frozen=True, eq=False)
class Sent:
    """A step of some rows, and its actions."""

    rows: Rows
    actions: Any


class RowPool:
    """An EnvPool whose rows are reset when they are told to be, and at no other time.

    Args:
        pool: made by ``envpool.make_gymnasium``, all of whose envs step together.
        frame_skip: steps of the library per step, rewards summed; a row stops where its episode ends.
    """

    def __init__(self, pool: Any, frame_skip: int = 1):
        self.pool, self.frame_skip = pool, frame_skip
        self.count = int(pool.config["num_envs"])
        self._is_new = np.ones(self.count, bool)
        self._ended = np.ones(self.count, bool)
        self._sent: Sent | None = None

    def send(self, actions: Any, rows: Rows = None) -> Sent:
        """Have rows step, and return at once what `recv` gives the outcome for.

        Args:
            actions: one for each of the rows, as the library takes them.
            rows: those that step.

        Raises:
            NotResetError: a row was never reset.
            StepMaskError: the episode of a row has ended.
        """
        self.finish()
        ended = np.flatnonzero(self._ended) if rows is None else rows[self._ended[rows]]
        if len(ended):
            self._refuse(ended)
        self.pool.send(actions, rows)
        self._sent = Sent(rows, actions)
        return self._sent

    def _refuse(self, ended: np.ndarray) -> NoReturn:
        if len(new := ended[self._is_new[ended]]):
            raise NotResetError(
                f"rows {new.tolist()} were stepped before their first reset, so they are in no episode. "
                "Call reset() first, and step from what it returns."
            )
        raise StepMaskError(
            f"the episodes of rows {ended.tolist()} have ended. Reset them first, with "
            "env.step_and_maybe_reset or env.maybe_reset, or leave them out with a '_step' mask."
        )

    def recv(self, sent: Sent) -> Stepped:
        """Wait for a step: observations, rewards, terminated, truncated, infos.

        Raises:
            StaleDataError: the env was stepped or reset meanwhile.
        """
        if sent is not self._sent:
            raise StaleDataError(
                "this step was not received before its env was stepped or reset again, and its outcome is lost. "
                "Receive a step before the next one."
            )
        self._sent = None
        made = self.pool.recv(reset=False)
        if self.frame_skip > 1:
            made = self._with_more_frames(sent, made)
        over = made[2] | made[3]
        if sent.rows is None:
            self._ended = over
            return made
        self._ended[sent.rows] = over
        return made

    def _with_more_frames(self, sent: Sent, made: Stepped) -> Stepped:
        """Step again what goes on, with the same actions."""
        for _ in range(self.frame_skip - 1):
            going = np.flatnonzero(~(made[2] | made[3])).astype(np.int32)
            if not len(going):
                break
            self.pool.send(
                _picked(sent.actions, going), going if sent.rows is None else sent.rows[going]
            )
            more = self.pool.recv(reset=False)
            more[1][:] += made[1][going]
            _put(more, going, made)
        return made

    def finish(self) -> None:
        """Wait for a step that nobody has received, and drop what it gives."""
        if self._sent is not None:
            self.recv(self._sent)

    def step(self, actions: Any) -> Stepped:
        """Step all rows."""
        return self.recv(self.send(actions))

    def reset(self, rows: Rows = None) -> tuple[Any, dict[str, Any]]:
        """Start new episodes, and give the observations and infos of these rows."""
        self.finish()
        made = self.pool.reset(rows)
        chosen = slice(None) if rows is None else rows
        self._ended[chosen] = self._is_new[chosen] = False
        return made

    def spread(self, values: Any, rows: Rows) -> Any:
        """Put what was given for some rows among zeros for the others."""
        if rows is None:
            return values
        if isinstance(values, tuple):
            return tuple(self.spread(part, rows) for part in values)
        if isinstance(values, dict):
            return {name: self.spread(value, rows) for name, value in values.items()}
        full = np.zeros((self.count, *values.shape[1:]), values.dtype)
        full[rows] = values
        return full

    def seeded(self, seeds: Sequence[int]) -> RowPool:
        """Build the same pool anew, row i with the i-th seed; this one is closed."""
        pool = built_anew(self.pool, seeds)
        self.close()
        return RowPool(pool, self.frame_skip)

    def close(self) -> None:
        """Wait for what is under way, and close the pool."""
        self.finish()
        self.pool.close()


def _picked(values: Any, index: np.ndarray) -> Any:
    if isinstance(values, dict):
        return {name: _picked(value, index) for name, value in values.items()}
    return values[index]


def _put(values: Any, index: np.ndarray, into: Any) -> None:
    """Write arrays into rows of others, which may be nested."""
    if isinstance(into, np.ndarray):
        into[index] = values
        return
    names = into if isinstance(into, dict) else range(len(into))
    for name in names:
        _put(values[name], index, into[name])
