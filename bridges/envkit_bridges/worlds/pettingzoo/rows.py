"""Games on plain NumPy rows: how a batched env steps them without any TensorDict.

`GameCore` is one game; `GameRows` are several bound to their rows of a pool's memory. Taken where all agents of each
group are alike, no state is returned, and nothing is overridden (`PettingZooWrapper.row_core`). What lies in the rows is what
`PettingZooWrapper` gives, bit for bit (`tests/bridges/worlds/test_pettingzoo.py` compares both).

Conventions
    rows    global row numbers; slots and regions as in `envkit.batched.exchange.buffers`.
    place   the arrays of one moment of one row, with all that writes into them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from envkit.data.paths import Path
from envkit.rules import RESET
from envkit_bridges.worlds.pettingzoo.groups import FLAGS, Group, Moment, Seat

__all__ = ["GameCore", "GameRows"]

Rows = Mapping[Path, np.ndarray]


class PlaysOnRows(Protocol):
    """What rows ask of an env around a game; see `PettingZooWrapper`."""

    specs: Any
    _groups: Sequence[Group]

    def _begun(self, **kwargs: Any) -> Moment: ...
    def _moved(self, inputs: Rows) -> Moment: ...
    def _game_end(self, *, is_start: bool) -> tuple[bool, bool, bool]: ...
    def _require_whole(self, level: Path, mask: np.ndarray) -> None: ...


class GameCore:
    """Step one game, writing what comes out into rows.

    Args:
        env: the game and its groups.
    """

    def __init__(self, env: PlaysOnRows):
        self.env = env

    def is_like(self, other: object) -> bool:
        """Say whether another core takes its actions, and writes its moments, in the same form."""
        return isinstance(other, GameCore) and self.env.specs == other.env.specs

    def bind(
        self, cores: list[GameCore], rows: range, arrays: Mapping[str, Rows], slot: np.ndarray
    ) -> GameRows:
        """Fix the rows of some cores that are alike; see `envkit.batched.host_rows.bind_rows`."""
        return GameRows(cores, rows, arrays, slot)

    def place(self, arrays: Rows) -> _Place:
        """Bind the game to the arrays of one moment."""
        seats = [
            seat
            for group in self.env._groups
            for seat in group.seats(
                {path[1:]: array for path, array in arrays.items() if path[0] == group.name}
            )
        ]
        flags = [arrays[(flag,)] for flag in FLAGS]
        return _Place(seats, flags)


class _Place:
    """The arrays of one moment."""

    def __init__(self, seats: Sequence[Seat], flags: Sequence[np.ndarray]):
        self._seats, self._flags = seats, flags

    def write(self, moment: Moment, ended: tuple[bool, bool, bool]) -> None:
        """Write a moment of the game."""
        for seat in self._seats:
            seat.write(moment)
        for row, flag in zip(self._flags, ended, strict=True):
            row[0] = flag


class GameRows:
    """Games bound to their rows; see `envkit.batched.host_rows.RowEnvs`."""

    def __init__(
        self, cores: list[GameCore], rows: range, arrays: Mapping[str, Rows], slot: np.ndarray
    ):
        self._cores, self._first, self._slot = list(cores), rows.start, slot
        own = slice(rows.start, rows.stop)
        self._inputs, self._roots, self._nexts = (
            {path: array[:, own] for path, array in arrays[region].items()}
            for region in ("in", "root", "next")
        )
        self._masks = {
            path: array[own] for path, array in arrays["mask"].items() if path[-1] == RESET
        }
        self._places: dict[tuple[str, int, int], _Place] = {}

    def replace(self, row: int, env: PlaysOnRows) -> None:
        """Put another env, made by the same function, in the place of a row's env."""
        self._cores[row - self._first] = GameCore(env)
        self._places.clear()

    def reset(self, row: int, given: Collection[Path] = (), /, **kwargs: Any) -> None:
        """Start an episode and write the root row; a game takes no ``given`` inputs for that."""
        index = row - self._first
        for path, masks in self._masks.items():
            self._cores[index].env._require_whole(path[:-1], masks[index])
        self._begin(index, int(self._slot[row]) + 1, kwargs)

    def _begin(self, index: int, slot: int, kwargs: Mapping[str, Any]) -> None:
        env = self._cores[index].env
        moment = env._begun(**kwargs)
        self._place("root", slot, index).write(moment, env._game_end(is_start=True))

    def step(self, rows: Sequence[int], *, advance: bool) -> None:
        """Step some rows and write their next rows; with ``advance`` also their next roots."""
        slot = int(self._slot[self._first])
        for row in rows:
            index = row - self._first
            env = self._cores[index].env
            inputs = {path: array[slot, index, ...] for path, array in self._inputs.items()}
            moment, ended = env._moved(inputs), env._game_end(is_start=False)
            self._place("next", slot, index).write(moment, ended)
            if advance and any(ended):
                self._begin(index, slot + 1, {})
            elif advance:
                for path, root in self._roots.items():
                    root[slot + 1, index] = self._nexts[path][slot, index]

    def _place(self, region: str, slot: int, index: int) -> _Place:
        """Give the place of a moment, made when it is first written."""
        known = self._places.get((region, slot, index))
        if known is None:
            arrays = self._roots if region == "root" else self._nexts
            own = {path: array[slot, index, ...] for path, array in arrays.items()}
            known = self._places[region, slot, index] = self._cores[index].place(own)
        return known
