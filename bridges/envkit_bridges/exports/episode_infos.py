"""What wrappers inside an env say of an episode that has ended: the info "episode" of Gymnasium's and SB3's wrappers.

``RecordEpisodeStatistics`` of Gymnasium and ``Monitor`` of Stable-Baselines3 put it into the info of the last step.
It is asked for after that step, of the rows that have ended, so that steps cost nothing more.

Conventions
    rows  numbers of rows of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from envkit.batched.env import BatchedEnv
from envkit.batched.mixed import MixedEnv
from envkit.env.base import EnvBase
from envkit.transforms.core.env import TransformedEnv

__all__ = ["EpisodeInfos"]


class EpisodeInfos:
    """The infos "episode" of the rows of an env.

    Args:
        env: with one batch axis.

    A row that has told none at the end of its first episode is not asked again.
    """

    def __init__(self, env: EnvBase):
        self._env = env
        self._silent: set[int] = set()

    def of(self, ended: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Give the info "episode" of each of the rows whose episode has just ended, where there is one."""
        asked = [row for row in ended if row not in self._silent]
        if not asked:
            return {}
        found = {row: info for row, info in _told(self._env, asked) if isinstance(info, dict)}
        self._silent |= set(asked) - set(found)
        return found


def _told(env: EnvBase, rows: list[int]) -> Iterator[tuple[int, Any]]:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    if isinstance(env, MixedEnv):
        for member in env.members:
            first = member.rows.start
            own = [row - first for row in rows if first <= row < member.rows.stop]
            if own:
                yield from ((row + first, info) for row, info in _told(member.env, own))
    elif isinstance(env, BatchedEnv):
        yield from zip(rows, env._ask_rows(_of_one, rows), strict=True)
    else:
        all_rows = getattr(env, "_last_episode", None) or {}
        shown = {name: value for name, value in all_rows.items() if not name.startswith("_")}
        if shown:
            yield from (
                (
                    row,
                    {
                        name: value[row] if np.ndim(value) else value
                        for name, value in shown.items()
                    },
                )
                for row in rows
            )


def _of_one(env: Any) -> Any:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return getattr(env, "_last_episode", None)
