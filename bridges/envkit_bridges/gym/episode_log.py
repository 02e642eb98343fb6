"""What it takes to play the episode of a gymnasium env again, written down while the env is used.

`EpisodeLog` stands in the place of an env: it hands resets and steps on, and keeps the generator at the last
reset, the reset's keywords, the actions since, and a digest of all that came out. Another env of the same kind
plays that again, and is where the first one was if the same comes out. The log knows nothing of data, and not
what is done where the two differ.

Conventions
    digest   CRC-32 over the bytes of every observation, reward, flag and number in the infos since the last
             reset, in order: 32 bits tell an episode that goes another way but for one in four billion.
    carried  what wrappers hold across episodes, as it was before the last reset; see `wrapper_states`.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from envkit.data.plain import from_plain, plain
from envkit.errors import ResumeError
from envkit_bridges.gym.wrapper_states import (
    Carried,
    begin_nothing,
    carried_by,
    clock_entries,
    generator_in,
)

__all__ = ["EpisodeLog", "digest_of"]


class _Start(NamedTuple):
    """What an episode begins from: state of the generator, what wrappers carry, keywords of the reset."""

    generator: Any
    carried: Any
    keywords: dict[str, Any]


class EpisodeLog:
    """An env that writes down its episode; all that is not a reset or a step is the env's own.

    Args:
        env: a gymnasium env that has a ``np_random``.
        gap: why the episode under way, if any, cannot be told; None where none is.
    """

    def __init__(self, env: Any, gap: str | None = None):
        self.env = env
        self.gap = gap
        self._carried: Carried = carried_by(env)
        self._clocks = clock_entries(env)
        self._start: _Start | None = None
        self._actions: list[Any] = []
        self._digest = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "env" not in vars(self):
            raise AttributeError(name)
        return getattr(self.env, name)

    # ----------------------------------------------------------------------------------- writing down

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the env, and begin a new log."""
        generator = generator_in(self.env)
        start = _Start(
            generator.state, self._carried.read(), copy.deepcopy(kwargs) if kwargs else {}
        )
        self.forget("its last reset raised")
        observation, info = result = self.env.reset(**kwargs)
        self._start, self.gap, self._actions = start, None, []
        self._digest = digest_of(observation, 0)
        if info:
            self._digest = digest_of(self._timeless(info), self._digest)
        return result

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the env, and write it down."""
        if self._start is None:
            self.gap = self.gap or "it was stepped without a reset before"
        kept = action if type(action) in _FIXED else _copied(action)
        try:
            result = self.env.step(action)
        except BaseException:
            self.forget("a step of its episode raised")
            raise
        observation, reward, terminated, truncated, info = result
        self._actions.append(kept)
        if type(observation) is np.ndarray and observation.dtype in _NUMBERS:
            digest = crc32(
                observation if observation.flags.c_contiguous else observation.copy("C"),
                self._digest,
            )
        else:
            digest = digest_of(observation, self._digest)
        if type(reward) in _FLOATS:
            digest = crc32(_OUTCOME(reward, terminated, truncated), digest)
        else:
            digest = digest_of((reward, terminated, truncated), digest)
        self._digest = digest_of(self._timeless(info), digest) if info else digest
        return result

    def forget(self, gap: str | None) -> None:
        """Drop what was written down; see `EpisodeLog` for ``gap``."""
        self._start, self._actions, self._digest, self.gap = None, [], 0, gap

    def _timeless(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave the times out that wrappers measure by the clock."""
        for name, entry in self._clocks:
            if isinstance(found := info.get(name), Mapping):
                others = {key: value for key, value in found.items() if key != entry}
                info = {**info, name: others}
        return info

    # ------------------------------------------------------------------------------- saved and played

    def state(self) -> dict[str, Any]:
        """Give the log in plain form, see `envkit.data.plain`.

        Raises:
            ResumeError: the episode under way was not written down from its beginning, or something in the
                log has no plain form.
        """
        if self.gap is not None:
            raise ResumeError(
                f"the episode of {self.env} cannot be saved: {self.gap}. Call record_for_resume() before "
                "the first reset, and save after a reset that follows."
            )
        now, start = plain(generator_in(self.env).state), self._start
        if start is None:
            return {"generator": now, "carried": plain(self._carried.read(), "what wrappers hold")}
        return {
            "start": {
                "generator": plain(start.generator),
                "carried": plain(start.carried, "what wrappers hold"),
                "keywords": plain(start.keywords, "the keywords of the last reset"),
            },
            "actions": _packed(self._actions),
            "digest": self._digest,
            "generator": now,
        }

    def play(self, state: Mapping[str, Any]) -> None:
        """Bring the env to where the one was that gave ``state``.

        Raises:
            ResumeError: it could not be played, or something else came out; the env is then in some episode.
        """
        generator = generator_in(self.env)
        if "start" not in state:
            self.forget(None)
            begin_nothing(self.env)
            self._carried.write(from_plain(state["carried"]))
            generator.state = from_plain(state["generator"])
            return
        start, actions = state["start"], _unpacked(state["actions"])
        self.forget("it was to be resumed and could not be")
        self._carried.write(from_plain(start["carried"]))
        generator.state = from_plain(start["generator"])
        try:
            self.reset(**from_plain(start["keywords"]))
            for action in actions:
                self.step(action)
        except Exception as error:
            self.forget("it was to be resumed and could not be")
            raise ResumeError(
                _differs(self.env, f"it raised {type(error).__name__}: {error}")
            ) from error
        same = plain(generator_in(self.env).state)
        if self._digest != state["digest"] or not _equal(same, state["generator"]):
            self.forget("it was to be resumed and could not be")
            raise ResumeError(
                _differs(self.env, f"after {len(actions)} steps something else came out")
            )


_NUMBERS = frozenset(map(np.dtype, ("f4", "f8", "u1", "i4", "i8", "?")))
_FIXED = frozenset((int, np.int64))
_FLOATS = frozenset((float, np.float64, int))
_OUTCOME = struct.Struct("<d??").pack
_NUMBER = struct.Struct("<d").pack


def digest_of(value: Any, digest: int) -> int:
    """Continue a digest with all numbers, texts and arrays in a value; what else there is counts nothing."""
    kind = type(value)
    if kind is np.ndarray:
        if value.dtype.kind in "OMm":
            return digest_of(value.tolist(), digest)
        return crc32(np.ascontiguousarray(value), digest)
    if kind is float:
        return crc32(_NUMBER(value), digest)
    if isinstance(value, np.number):
        return crc32(value.tobytes(), digest)
    if kind is dict:
        names, told = _in_order(tuple(value))
        digest = crc32(told, digest)
        for name in names:
            part = value[name]
            is_plain = type(part) is float or type(part) is np.float64
            digest = crc32(_NUMBER(part), digest) if is_plain else digest_of(part, digest)
        return digest
    if value is None:
        return digest
    if isinstance(value, str):
        return crc32(value.encode(), crc32(b"text", digest))
    if isinstance(value, bytes | int):  # flags among them
        return crc32(repr(value).encode(), digest)
    if isinstance(value, float | complex | np.generic):
        return crc32(np.asarray(value).tobytes(), digest)
    if isinstance(value, Mapping):
        return digest_of(dict(value), digest)
    if isinstance(value, list | tuple):
        for part in value:
            digest = digest_of(part, digest)
        return digest
    if isinstance(value, torch.Tensor):
        return digest_of(value.detach().cpu().numpy(), digest)
    return digest_of(np.asarray(value), digest) if hasattr(value, "__array__") else digest


@lru_cache(maxsize=256)
def _in_order(names: tuple[Any, ...]) -> tuple[tuple[Any, ...], bytes]:
    """Sort the names of a dict by what they say, and give them as bytes too."""
    ordered = tuple(sorted(names, key=str))
    return ordered, "\0".join(map(str, ordered)).encode()


def _copied(action: Any) -> Any:
    """Keep an action as it is now: its array may be written into."""
    if isinstance(action, np.ndarray):
        return action.copy()
    if isinstance(action, int | float | str | np.generic):
        return action
    return action.detach().clone() if isinstance(action, torch.Tensor) else copy.deepcopy(action)


def _packed(actions: list[Any]) -> Any:
    """Give actions in plain form, those of one kind as one tensor."""
    kinds = {type(action) for action in actions}
    if kinds == {int} and all(abs(action) < 2**63 for action in actions):
        return {"ints": torch.tensor(actions, dtype=torch.int64)}
    if len(kinds) == 1 and issubclass(next(iter(kinds)), np.ndarray | np.generic):
        forms = {(action.shape, action.dtype) for action in actions}
        if len(forms) == 1 and actions[0].dtype.kind in "biufc":
            form = "arrays" if kinds == {np.ndarray} else "scalars"
            return {form: plain(np.stack(actions), "the actions")}
    return {"each": plain(actions, "the actions")}


def _unpacked(packed: Mapping[str, Any]) -> list[Any]:
    ((form, values),) = packed.items()
    if form == "ints":
        return values.tolist()
    return list(from_plain(values))


def _equal(one: Any, other: Any) -> bool:
    return digest_of(from_plain(one), 0) == digest_of(from_plain(other), 0)


def _differs(env: Any, what: str) -> str:
    return (
        f"the episode of {env} was played again from its last reset, but {what}: it is not where it was. It "
        "draws from another generator than its np_random, keeps values across episodes, or is another version. "
        "Load with strict=False to begin a new episode, the old one truncated, or give the env get_state() "
        "and set_state(state)."
    )
