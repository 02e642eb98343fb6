"""What simulators return beside observations, for adapters: rewards in full, and infos as they come.

A `Listener` in a sub-environment notes them at each step and reset, and `Reports` reads them where an adapter shows
them. Without an adapter there is no listener, and a step costs nothing more.

Conventions
    call   STEP or RESET: where an info comes from. The newest of each is kept.
    board  memory in which listeners in worker processes write; None where they share none with the adapter, as on
           another machine. Then the adapter asks for all of it after each call.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from envkit.batched.batched_env import BatchedEnv
from envkit.batched.shared_state import SharedState
from envkit.data.paths import Path, leaf_paths
from envkit.errors import WorkerError
from envkit.transforms.core.transformed_env import TransformedEnv
from envkit.transport.pool import call_by_row
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.gym.info import default_info_dict_reader

STEP, RESET = 0, 1
_ROOM_BYTES = 4096
_ASK = -1
"""Size of an info that the board cannot hold: the adapter asks for it."""

Info = Mapping[str, Any]


class SpacesOfEnv(NamedTuple):
    """The spaces of one sub-environment of Gymnasium, and the entries that its readers of infos record.

    Attributes:
        observation_space, action_space: of its simulator; the former is None where observations are left out.
        categorical: the encoding of its discrete spaces, see `codecs_of`.
        recorded: entries that readers of infos copy from the infos as they come.
    """

    observation_space: Any
    action_space: Any
    categorical: bool
    recorded: frozenset[Path]


class Noted(NamedTuple):
    """The attributes of a listener in another process."""

    reward: Any
    infos: list[Info]


class Listener:
    """Note what one simulator returns.

    Attributes:
        reward: of the newest step.
        infos: of the newest step and reset.
    """

    def __init__(self) -> None:
        self.reward: Any = np.nan
        self.infos: list[Info] = [{}, {}]
        self._rewards: Any = None

    def attach(self, board: SharedState, row: int) -> None:
        """Write into a board from now on."""
        arrays = {name: tensor.numpy() for name, tensor in board.tensors.items()}
        self._messages = [memoryview(arrays["messages"][call, row].data) for call in (STEP, RESET)]
        self._sizes, self._row = arrays["sizes"], row
        self._rewards = arrays["rewards"]
        self._rewards[row] = np.nan
        for call in (STEP, RESET):
            self._write(call, self.infos[call])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a new listener: no adapter shows a copy of an env."""
        return vars(Listener())

    def step(self, step: Callable[[Any], Any], action: Any) -> Any:
        """Call a step, and note its reward and its info."""
        result = step(action)
        if isinstance(result, tuple) and len(result) == 5:  # others are refused by who reads them
            self.note_step(result[1], result[4])
        return result

    def reset(self, reset: Callable[..., Any], **kwargs: Any) -> Any:
        """Call a reset, and note its info."""
        result = reset(**kwargs)
        if isinstance(result, tuple) and len(result) == 2:
            self.note_reset(result[1])
        return result

    def note_step(self, reward: Any, info: Info | None) -> None:
        """Record the results of a step."""
        self.reward = reward
        if self._rewards is not None:
            self._rewards[self._row] = _number(reward)
        self._note(STEP, info)

    def note_reset(self, info: Info | None) -> None:
        """Record the info of a reset."""
        self._note(RESET, info)

    def _note(self, call: int, info: Info | None) -> None:
        noted = info or _NOTHING
        if self._rewards is None:
            noted = copied(noted) if info else noted
        elif not (noted is self.infos[call] is _NOTHING):  # nothing again needs no note
            self._write(call, noted)
        self.infos[call] = noted

    def _write(self, call: int, info: Info) -> None:
        message = b""
        try:
            if info:
                message = pickle.dumps(info, pickle.HIGHEST_PROTOCOL)
            size = len(message) if len(message) <= _ROOM_BYTES else _ASK
        except Exception:  # of a class that only this process knows, for example
            size = _ASK
        if size > 0:
            self._messages[call][:size] = message
        self._sizes[call, self._row] = size


_NOTHING: Info = {}


def copied(value: Any) -> Any:
    """Copy dicts, lists and arrays, which a simulator may fill again; other objects are kept."""
    if isinstance(value, dict):
        return {name: copied(part) for name, part in value.items()}
    if isinstance(value, list):
        return [copied(part) for part in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def _number(reward: Any) -> float:
    """Convert a reward to a number; NaN if it is none."""
    try:
        return float(reward)
    except (TypeError, ValueError, OverflowError):
        return np.nan


class Reports:
    """Read what the simulators of a pool have returned in their newest step and reset.

    Args:
        env: the pool.

    Attributes:
        facts: of each row; None of a row that is no environment of Gymnasium, which reports nothing.
    """

    def __init__(self, env: BatchedEnv):
        self._env = weakref.ref(env)
        self._heard: tuple[Any, int] = (None, 0)
        self.facts: list[SpacesOfEnv | None] = []
        self.refresh(starts=True)

    def refresh(self, *, starts: bool = False) -> None:
        """Put listeners where there are none yet: at the beginning, and in rows that were built again.

        With ``starts`` a pool that was closed is started.
        """
        env = self._env()
        assert env is not None
        pool = env._started() if starts else env._pool
        if pool is None:
            return
        now = (pool, env._recovery.restarts)
        if now[0] is self._heard[0] and now[1] == self._heard[1]:
            return
        rows = range(env.num_workers)
        answers = call_by_row(pool, "change", dict.fromkeys(rows, partial(_listen, os.getpid())))
        self.facts = [answers[row][0] for row in rows]
        self._rows = [row for row in rows if self.facts[row] is not None]
        local = [answers[row][1] for row in self._rows]
        self._listeners: list[Listener] | None = None
        self._board: SharedState | None = None
        if all(isinstance(listener, Listener) for listener in local):
            self._listeners = local
        else:
            self._attach(pool, len(rows))
        self._heard = now

    def _attach(self, pool: Any, count: int) -> None:
        board = SharedState(
            {
                "rewards": torch.full((count,), torch.nan, dtype=torch.float64),
                "sizes": torch.zeros((2, count), dtype=torch.int64),
                "messages": torch.zeros((2, count, _ROOM_BYTES), dtype=torch.uint8),
            }
        )
        asked = {row: partial(_attached, board, row) for row in self._rows}
        try:
            call_by_row(pool, "apply", asked)
        except WorkerError:  # the rows are on another machine
            return
        self._board = board
        self._rewards, self._sizes, self._messages = (
            board.tensors[name].numpy() for name in ("rewards", "sizes", "messages")
        )

    def rewards(self) -> np.ndarray:
        """Return the rewards of the newest steps, float64; NaN where one is not known."""
        if self._board is not None:
            return self._rewards.copy()
        rewards = np.full(len(self.facts), np.nan)
        for row, listener in self._all():
            rewards[row] = _number(listener.reward)
        return rewards

    def infos(self, call: int, mask: np.ndarray | None = None) -> dict[int, Info]:
        """Return the infos that rows of a mask, None for all, gave last in a call, those that hold anything."""
        if self._board is not None:
            if not (has_any := self._sizes[call] != 0).any():
                return {}
            chosen = np.flatnonzero(has_any if mask is None else has_any & mask).tolist()
            return {row: self._read(call, row, int(self._sizes[call, row])) for row in chosen}
        return {
            row: listener.infos[call]
            for row, listener in self._all()
            if listener.infos[call] and (mask is None or mask[row])
        }

    def _read(self, call: int, row: int, size: int) -> Info:
        if size == _ASK:
            env = self._env()
            assert env is not None
            [noted] = env._ask_rows(_noted, [row])
            return noted.infos[call]
        return pickle.loads(self._messages[call, row, :size].data)

    def _all(self) -> Iterable[tuple[int, Listener | Noted]]:
        noted: Sequence[Listener | Noted] | None = self._listeners
        if noted is None:
            env = self._env()
            assert env is not None
            noted = env._ask_rows(_noted, self._rows)
        return zip(self._rows, noted, strict=True)


_REPORTS: weakref.WeakKeyDictionary[BatchedEnv, Reports] = weakref.WeakKeyDictionary()


def reports_of(env: BatchedEnv) -> Reports:
    """Return the reports of a pool, which all its adapters share."""
    if env not in _REPORTS:
        _REPORTS[env] = Reports(env)
    return _REPORTS[env]


def _gymnasium_in(env: Any) -> GymWrapper | None:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env if isinstance(env, GymWrapper) and not env.batch_size else None


def listen(env: Any) -> tuple[SpacesOfEnv | None, Listener | None]:
    """Put a listener into an env, and return it and facts of the env; None where it is none of Gymnasium."""
    inside = _gymnasium_in(env)
    if inside is None:
        return None, None
    core = inside.core
    if core.listener is None:
        core.listener = Listener()
        core.take(core.env)
    recorded = {
        path
        for reader in inside.info_dict_reader
        if isinstance(reader, default_info_dict_reader)
        for path in leaf_paths(reader.info_spec)
    }
    facts = SpacesOfEnv(
        None if core.observation is None else inside._env.observation_space,
        inside._env.action_space,
        inside.categorical_action_encoding,
        frozenset(recorded),
    )
    return facts, core.listener


def _listen(asking_pid: int, env: Any) -> tuple[SpacesOfEnv | None, Listener | None]:
    """Register a listener as `listen` does; a listener stays in its process."""
    facts, listener = listen(env)
    return facts, listener if os.getpid() == asking_pid else None


def _listener_of(env: Any) -> Any:
    inside = _gymnasium_in(env)
    return None if inside is None else inside.core.listener


def _noted(env: Any) -> Noted:
    listener = _listener_of(env)
    return Noted(listener.reward, listener.infos)


def _attached(board: SharedState, row: int, env: Any) -> None:
    _listener_of(env).attach(board, row)
