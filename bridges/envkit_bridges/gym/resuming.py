"""Copies, pickles and resumed envs of those that hold a simulator.

A copy, and an env that loads a state dict, goes on where the original stands, by itself. This module decides what that
takes where a simulator is not copied by plain means, what is refused, and what a load that fails leaves behind: nothing
is restarted without a word. How a simulator's state is read and restored is known to `simulator_state`.

Conventions
    rebuilt   of a simulator: it is pickled, and so copied, as the arguments it was made with
              (``gymnasium.utils.EzPickle``; MuJoCo's and Box2D's are). Its copy has begun no episode, so it
              must be reset first, and keeps the generator of random numbers.
    given up  of an episode: what was loaded does not go on as it did, and the load was not strict. The next step
              tells it, truncated, with what was known before; the reset that follows begins another one.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

import torch
from tensordict import TensorDictBase

from envkit.data.arguments import as_bool
from envkit.data.paths import as_path
from envkit.errors import CopyError, ResumeError
from envkit.transport import by_value
from envkit_bridges.gym.info import InfoReading
from envkit_bridges.gym.simulator_state import EpisodeLog, recorded, restored, saved

__all__ = ["ResumableEnv", "deep_copy", "pack", "unpack"]

_KEPT = ("spec", "_np_random", "_np_random_seed")


class HoldsSimulator(Protocol):
    """An env around a simulator."""

    _env: Any

    def __getstate__(self) -> Any:
        """Give what a copy starts from."""
        ...


def deep_copy(env: HoldsSimulator, memo: dict[int, Any]) -> Any:
    """Copy an env with its simulator, as `copy.deepcopy` does.

    Raises:
        CopyError: the simulator cannot be copied.
    """
    _require_copyable(env)
    twin = memo[id(env)] = object.__new__(type(env))
    try:
        state, kept = copy.deepcopy((env.__getstate__(), _kept(env._env)), memo)
    except Exception as error:
        raise _refusal(env, f"{type(error).__name__}: {error}") from error
    return _revived(twin, state, kept)


def pack(env: HoldsSimulator) -> tuple[bytes, bytes]:
    """Pickle the class of an env, and an env with its simulator, by value where other processes could not import it.

    Raises:
        CopyError: the simulator cannot be pickled.
    """
    _require_copyable(env)
    try:
        parts = env.__getstate__(), _kept(env._env)
        return by_value.dumps(type(env)), by_value.dumps_parts(parts, env)
    except Exception as error:
        raise _refusal(env, f"{type(error).__name__}: {error}") from error


def unpack(cls: bytes, packed: bytes) -> Any:
    """Undo `pack`; ``cls`` is the pickled class of the env."""
    twin = object.__new__(pickle.loads(cls))
    return _revived(twin, *by_value.loads_parts(packed, twin))


def _revived(twin: Any, state: Any, kept: list[dict[str, Any]]) -> Any:
    twin.__setstate__(state)
    for chain, found in zip(_rebuilt(twin._env), kept, strict=True):
        vars(chain[-1]).update(found)
        _order_enforcing(chain)._has_reset = False
        for log in (chain[0], vars(twin).get("_log")):
            if isinstance(log, EpisodeLog):
                log.forget(None)
    return twin


def _kept(simulator: Any) -> list[dict[str, Any]]:
    """Give what a copy keeps of each simulator that is rebuilt."""
    inner = [vars(chain[-1]) for chain in _rebuilt(simulator)]
    return [{name: own[name] for name in _KEPT if name in own} for own in inner]


def _rebuilt(simulator: Any) -> Iterator[list[Any]]:
    """Give each simulator that is rebuilt, its wrappers before it in a list."""
    for env in getattr(simulator, "envs", None) or [simulator]:
        chain = [env]
        while not _is_easy(chain[-1]) and (inner := _inside(chain[-1])) is not None:
            chain.append(inner)
        if _is_easy(chain[-1]):
            yield chain


def _inside(wrapper: Any) -> Any:
    """Give the env in a wrapper; those of PettingZoo that change the API call it otherwise."""
    inner = getattr(wrapper, "env", None)
    return getattr(wrapper, "aec_env", None) if inner is None else inner


def _is_easy(env: Any) -> bool:
    get_state = getattr(type(env), "__getstate__", None)
    return getattr(get_state, "__qualname__", "") == "EzPickle.__getstate__"


def _order_enforcing(chain: list[Any]) -> Any:
    """Give the wrapper that refuses a step before the first reset; None where there is none."""
    return next((wrapper for wrapper in chain if "_has_reset" in vars(wrapper)), None)


def _require_copyable(env: HoldsSimulator) -> None:
    simulator = env._env
    classes = type(getattr(simulator, "unwrapped", simulator)).__mro__
    if any(base.__name__ == "AsyncVectorEnv" for base in classes):  # its pipes would be copied
        raise _refusal(env, "it has processes of its own")
    if any(_order_enforcing(chain) is None for chain in _rebuilt(simulator)):
        raise _refusal(
            env, "it would be built anew, and nothing would notice that it must be reset first"
        )


def _refusal(env: HoldsSimulator, reason: str) -> CopyError:
    return CopyError(
        f"this {type(env).__name__} can be neither copied nor pickled with its simulator {env._env} "
        f"({reason}). Build one where it is needed: pass a function, `lambda: env_cls(...)`, or an "
        "`EnvCreator` instead of the env."
    )


_ASKED = frozenset(
    ("_reset", "_step", "_reset_simulator", "_repeated_step", "_set_seed", "_simulator")
)


class ResumableEnv(InfoReading):
    """The part of an env on a gym-style simulator that saves it, and goes on from what was saved."""

    _own_state_is_needed = True
    _log: EpisodeLog | None = None
    """What takes the resets and steps of the simulator and writes them down; None where nothing does."""

    @property
    def _keeps_state(self) -> str | None:
        return type(self).__name__

    @property
    def _writes_down(self) -> bool:
        return self._log is not None

    def record_for_resume(self, mode: bool = True) -> Self:
        """Write down episodes from the next reset on, see `EnvBase.record_for_resume`."""
        self._take_log(recorded(self._simulator, as_bool("mode", mode)))
        return self

    def _take_log(self, env: Any) -> None:
        self._log = env if isinstance(env, EpisodeLog) else None

    def _own_state(self) -> dict[str, Any]:
        """Add the state of the simulator.

        Raises:
            ResumeError: it cannot be saved so that it could be restored exactly.
        """
        if self._overrides(_ASKED):
            raise ResumeError(
                f"{type(self).__name__} overrides one of {sorted(_ASKED)}, so what its simulator was asked for is "
                "not known, and cannot be asked for again. Put the change into a gymnasium wrapper."
            )
        return {
            **super()._own_state(),
            "simulator": self._simulator_state(),
            "gave_up": self._gave_up,
        }

    def _simulator_state(self) -> Any:
        return saved(self._simulator)

    def _take_own_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        super()._take_own_state(state, strict=strict)
        try:
            self._restore_simulator(state["simulator"])
            self._gave_up = state["gave_up"]
        except ResumeError:
            if strict:
                raise
            self._begin_log()
            self._gave_up = True

    def _restore_simulator(self, state: Any) -> None:
        self._take_log(restored(self._simulator, state))

    def _begin_log(self) -> None:
        """Write down the episode that begins next, whatever was before."""
        self.record_for_resume()
        if self._log is not None:
            self._log.forget(None)

    def _has_told(self) -> None:
        if self._gave_up:
            self._gave_up = False

    def _truncated_next(self, td: TensorDictBase) -> TensorDictBase:
        """Tell that an episode was given up: what was known, truncated."""
        self._has_told()
        following = self._skipped_next(td)
        for key in self.done_keys:
            if as_path(key)[-1] in ("done", "truncated"):
                following.set(key, torch.ones_like(following.get(key)))
        return following
