"""How the state of a simulator is saved and restored: by its own methods, by playing its episode again, or without it.

`Recorded` takes the place of a simulator: it hands resets and steps on, and keeps the generator at the last reset, the
reset's keywords and the actions since. Another simulator of the same kind plays that again, and is where the first one
was if it ends with the same results and the same generator. `saved` and `restored` decide which of the ways is taken.

Conventions
    offered   the bare env has ``get_state()`` and ``set_state(state)``, and all of its wrappers are known. Then
              no episode need be recorded.
    fresh     in no episode that has begun, as wrappers of Gymnasium say; every env that was made by name has one
              that does.
    carried   what wrappers hold across episodes. The path leads from a wrapper to one value, e.g. "obs_rms.mean".
    chain     an env and what is in it: wrappers first, the bare env last.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch

from envkit.data.plain import from_plain, plain
from envkit.errors import ResumeError
from envkit_bridges.gym.answers import reset_answer, step_answer

if TYPE_CHECKING:
    from envkit_bridges.gym.backend import SpaceValue
    from envkit_bridges.libraries import Simulator

_ACROSS_EPISODES = {
    "NormalizeObservation": (
        "obs_rms.mean",
        "obs_rms.var",
        "obs_rms.count",
        "_update_running_mean",
    ),
    "NormalizeReward": (
        *("return_rms.mean", "return_rms.var", "return_rms.count"),
        *("discounted_reward", "_update_running_mean"),
    ),
    "RecordEpisodeStatistics": ("episode_count", "time_queue", "return_queue", "length_queue"),
}

_IN_EPISODES = {
    "OrderEnforcing": ("_has_reset",),
    "PassiveEnvChecker": (),
    "TimeLimit": ("_elapsed_steps",),
}

_FRESH = {"_has_reset": False, "_elapsed_steps": None}
"""Values that wrappers of Gymnasium hold before the first reset of their env."""


class Recorded:
    """A simulator whose episode is recorded; all that is not a reset or a step is the simulator's own.

    Args:
        env: a simulator that has a ``np_random``, see `generators_of`.
    """

    def __init__(self, env: Simulator):
        self.env = env
        self._forget("it began before record_for_resume() was called")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "env" not in vars(self):
            raise AttributeError(name)
        return getattr(self.env, name)

    def _forget(self, reason: str) -> None:
        """Drop what was recorded; ``reason`` is why the episode under way cannot be saved."""
        self._start: dict[str, Any] | None = None
        self._actions: list[Any] = []
        self._last: tuple[Any, ...] = ()
        self._reason = reason

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the simulator, and begin a new record."""
        start = {**_between_episodes(self.env), "keywords": copy.deepcopy(kwargs) if kwargs else {}}
        self._forget("its last reset raised")
        result = self.env.reset(**kwargs)
        self._start, self._last = start, reset_answer(result)
        return result

    def step(self, action: SpaceValue) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the simulator, and record the action."""
        kept = action if type(action) in _FIXED else _copied(action)
        try:
            result = step_answer(self.env.step(action))
        except BaseException:
            self._forget("a step of its episode raised")
            raise
        self._actions.append(kept)
        self._last = result
        return result

    def state(self) -> dict[str, Any]:
        """Return the record in plain form, see `envkit.data.plain`.

        Raises:
            ResumeError: the episode under way was not recorded from its beginning, or something in the
                record has no plain form.
        """
        if self._start is None:
            raise ResumeError(
                f"the episode of {self.env} cannot be saved: {self._reason}. Call record_for_resume() before "
                "the first reset, and save after a reset that follows."
            )
        return {
            "start": plain(self._start, "the start of the episode"),
            "actions": _packed(self._actions),
            "end": self._end(),
        }

    def _end(self) -> int:
        results = self._last[:-1]  # without infos, which may hold times
        return digest_of([results, _generator_states(self.env)])

    def play(self, state: Mapping[str, Any]) -> None:
        """Restore the simulator to where the one was that gave ``state``.

        Raises:
            ResumeError: it could not be played, or something else came out; the simulator is then in some episode.
        """
        start = from_plain(state["start"])
        (actions,) = from_plain(state["actions"]).values()
        self._forget("it was to be resumed and could not be")
        _begin_between_episodes(self.env, start)
        try:
            self.reset(**start["keywords"])
            for action in actions:
                self.step(action)
        except Exception as error:
            raise self._differs(f"it raised {type(error).__name__}: {error}") from error
        if self._end() != state["end"]:
            raise self._differs(f"after {len(actions)} steps something else came out")

    def _differs(self, difference: str) -> ResumeError:
        self._forget("it was to be resumed and could not be")
        begin_nothing(self.env)
        return ResumeError(
            f"the episode of {self.env} was played again from its last reset, but {difference}: it is not where it "
            "was. It draws from another generator than its np_random, keeps values across episodes, or is another "
            "version. Load with strict=False to begin a new episode, the old one truncated, or give the env "
            "get_state() and set_state(state)."
        )


def recorded(env: Simulator, mode: bool) -> Simulator:
    """Return what takes the resets and steps of a simulator: its `Recorded`, or with ``mode`` False itself.

    A simulator that cannot be recorded, or offers its state, is returned as it is.
    """
    own = bare(env)
    if not mode or _held_if_offered(own) is not None or not generators_of(own):
        return own
    return env if isinstance(env, Recorded) else Recorded(own)


def bare(env: Simulator) -> Simulator:
    """Return the simulator itself where its `Recorded` may be in its place."""
    return env.env if isinstance(env, Recorded) else env


# ------------------------------------------------------------------------------- saved and restored


def saved(env: Simulator, *, exact: bool) -> dict[str, Any]:
    """Return the state of a simulator, in plain form.

    Args:
        env: a simulator, or its `Recorded`.
        exact: its episode must be part of it. Else, where that was not recorded, its generator and what wrappers
            hold across episodes are all there is; see `is_without_episode`.

    Raises:
        ResumeError: the episode is asked for, and cannot be restored exactly.
    """
    simulator = bare(env)
    held = _held_if_offered(simulator)
    if held is not None:
        state = plain(chain_of(simulator)[-1].get_state(), f"what get_state() of {simulator} gave")
        values = plain(_read_all(held))
        return {"offered": state, "held": values, "generator": plain(_generator_states(simulator))}
    if exact:
        _require_exact(simulator)
    if is_fresh(simulator) or not exact:
        return {"between": plain(_between_episodes(simulator)), "is_fresh": is_fresh(simulator)}
    return (env if isinstance(env, Recorded) else Recorded(simulator)).state()


def is_without_episode(state: Mapping[str, Any]) -> bool:
    """Check whether `saved` has left out an episode that was under way."""
    return not state.get("is_fresh", True)


def restored(env: Simulator, state: Mapping[str, Any]) -> Simulator:
    """Restore a simulator to where the one was that `saved` was called with; return what takes its steps from now on.

    Raises:
        ResumeError: it did not get there.
    """
    simulator = bare(env)
    if "between" in state:
        begin_nothing(simulator)
        _begin_between_episodes(simulator, from_plain(state["between"]))
        return recorded(simulator, env is not simulator)
    if "offered" in state:
        _offer(simulator, state)
        return simulator
    _require_exact(simulator)
    log = env if isinstance(env, Recorded) else Recorded(simulator)
    log.play(state)
    return log


def _offer(env: Simulator, state: Mapping[str, Any]) -> None:
    """Load into a simulator what its ``get_state`` returned.

    Raises:
        ResumeError: it has no ``set_state``, or that leaves something out.
    """
    held, simulator = _held_if_offered(env), chain_of(env)[-1]
    if held is None:
        raise ResumeError(
            f"what is loaded was read by get_state(), but {env} has no get_state() and set_state(state), or "
            "has other wrappers. Build the same env as the one that was saved."
        )
    simulator.set_state(from_plain(state["offered"]))
    _write_all(held, from_plain(state["held"]))
    _set_generators(env, from_plain(state["generator"]))
    again = plain(simulator.get_state(), f"what get_state() of {env} gave")
    if digest_of(again) != digest_of(state["offered"]):
        raise ResumeError(
            f"set_state of {simulator} was given what get_state gave, and get_state now gives something else: "
            "one of them leaves something out."
        )


def _require_exact(env: Simulator) -> None:
    """Check that the episodes of a simulator can be played again.

    Raises:
        ResumeError: it has no generator that is known, or writes a video of what is played.
    """
    if not generators_of(env):
        raise _without_generator(env)
    if any("RecordVideo" in _kinds_of(type(wrapper)) for wrapper in chain_of(env)):
        raise ResumeError(
            f"RecordVideo around {env.unwrapped} cannot be saved: it writes the video of an episode while that is "
            "played. Leave it out of envs that are to be resumed."
        )


def _without_generator(env: Simulator) -> ResumeError:
    numbers = getattr(getattr(env, "unwrapped", env), "np_random", None)
    return ResumeError(
        f"{env} has no np_random (it is {numbers!r}), so where its random numbers come from is not known, and "
        "its episodes cannot be played again. Draw from self.np_random of gymnasium.Env, or give the env "
        "get_state() and set_state(state)."
    )


# ------------------------------------------------------------------------------------ between episodes


def _between_episodes(env: Simulator) -> dict[str, Any]:
    """Return what the next episode depends on before it is reset."""
    return {"generator": _generator_states(env), "carried": _read_all(_carried_by(env))}


def _begin_between_episodes(env: Simulator, state: Mapping[str, Any]) -> None:
    """Write what `_between_episodes` gave.

    Raises:
        ResumeError: it was read from an env with other wrappers, or another generator.
    """
    _write_all(_carried_by(env), state["carried"])
    _set_generators(env, state["generator"])


def generators_of(env: Simulator) -> list[np.random.Generator | np.random.RandomState]:
    """List the generators of an env: its ``np_random``, one of NumPy's or a tuple of some; empty where others are."""
    numbers = getattr(getattr(env, "unwrapped", env), "np_random", None)
    several: list[Any] = list(numbers) if isinstance(numbers, tuple) else [numbers]
    is_numpy = all(isinstance(one, np.random.Generator | np.random.RandomState) for one in several)
    return several if is_numpy else []


def _generator_states(env: Simulator) -> list[Any]:
    return [
        # of the older kind with the normal number it keeps for later
        one.get_state(legacy=False)
        if isinstance(one, np.random.RandomState)
        else one.bit_generator.state
        for one in generators_of(env)
    ]


def _set_generators(env: Simulator, states: list[Any]) -> None:
    generators = generators_of(env)
    try:
        for one, state in zip(generators, states, strict=True):
            if isinstance(one, np.random.RandomState):
                one.set_state(state)
            else:
                one.bit_generator.state = state
    except (TypeError, ValueError, KeyError) as error:
        kinds = ", ".join(type(one).__name__ for one in generators)
        raise ResumeError(
            f"the generator of {env} ({kinds}) cannot go on from what is loaded ({error}). "
            "Build the same env as the one that was saved."
        ) from error


# --------------------------------------------------------------------------------------- wrappers


def chain_of(env: Simulator) -> list[Any]:
    """List an env and what its wrappers hold, outermost first."""
    chain = [env]
    while hasattr(type(chain[-1]), "unwrapped") and "env" in vars(chain[-1]):
        chain.append(chain[-1].env)
    return chain


def is_fresh(env: Simulator) -> bool:
    """Check whether no episode of an env has begun, as its wrappers say."""
    held = [vars(wrapper) for wrapper in chain_of(env)]
    return any(name in own and own[name] is value for own in held for name, value in _FRESH.items())


def begin_nothing(env: Simulator) -> None:
    """Set wrappers of Gymnasium to wait for a reset, as those of an env that was not reset yet."""
    for wrapper in chain_of(env):
        for name in _FRESH.keys() & vars(wrapper).keys():
            vars(wrapper)[name] = _FRESH[name]


@cache
def _kinds_of(cls: type) -> list[str]:
    """Return the names of the classes of a gym library that a class of wrappers is."""
    return [
        one.__name__
        for one in cls.__mro__
        if one.__module__.partition(".")[0] in ("gymnasium", "gym")
    ]


_Places = list[tuple[Any, str]]
"""Wrappers, each with the path of one of its attributes."""


def _carried_by(env: Simulator) -> _Places:
    return [
        (wrapper, path)
        for wrapper in chain_of(env)
        for kind in _kinds_of(type(wrapper))
        for path in _ACROSS_EPISODES.get(kind, ())
    ]


def _held_if_offered(env: Simulator) -> _Places | None:
    """Return all that wrappers hold of an episode; None where one may hold more, or the bare env offers no state."""
    *around, simulator = chain_of(env)
    if not all(callable(getattr(simulator, name, None)) for name in ("get_state", "set_state")):
        return None
    places: _Places = []
    for wrapper in around:
        kind = next((kind for kind in _kinds_of(type(wrapper)) if kind in _IN_EPISODES), None)
        if kind is None or type(wrapper).__name__ != kind:
            return None
        places += [(wrapper, path) for path in _IN_EPISODES[kind]]
    return places


def _read_all(places: _Places) -> list[Any]:
    values = [attrgetter(path)(wrapper) for wrapper, path in places]
    return [list(one) if isinstance(one, deque) else copy.copy(one) for one in values]


def _write_all(places: _Places, values: list[Any]) -> None:
    if len(values) != len(places):
        raise ResumeError(
            f"what is loaded holds {len(values)} values of wrappers, but the wrappers here keep "
            f"{len(places)}: {[f'{type(wrapper).__name__}.{path}' for wrapper, path in places]}. Build the "
            "env with the same wrappers."
        )
    for (wrapper, path), value in zip(places, values, strict=True):
        owner, _, name = path.rpartition(".")
        holder = attrgetter(owner)(wrapper) if owner else wrapper
        before = getattr(holder, name)
        setattr(holder, name, deque(value, before.maxlen) if isinstance(before, deque) else value)


# ----------------------------------------------------------------------------- actions and digests


def digest_of(value: Any, digest: int = 0) -> int:
    """Compute a checksum of all numbers, texts and arrays in a value; what else there is counts nothing."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            digest = digest_of(value[name], crc32(str(name).encode(), digest))
    elif isinstance(value, list | tuple):
        for part in value:
            digest = digest_of(part, digest)
    elif isinstance(value, int | float | complex | str | bytes | np.generic):
        digest = crc32(repr(value).encode(), digest)
    elif isinstance(value, torch.Tensor):
        digest = digest_of(value.numpy(force=True), digest)
    elif isinstance(value, np.ndarray) and value.dtype.kind == "O":
        digest = digest_of(value.tolist(), digest)
    elif hasattr(value, "__array__"):
        digest = crc32(np.asarray(value).tobytes(), digest)
    return digest


_FIXED = frozenset((int, np.int64))
"""Classes of actions that cannot be written into."""


def _copied(action: SpaceValue) -> SpaceValue:
    return action.detach().clone() if isinstance(action, torch.Tensor) else copy.deepcopy(action)


def _packed(actions: list[Any]) -> Any:
    """Return actions in plain form, arrays and numbers of one kind as one array."""
    forms = {(type(one), getattr(one, "shape", ()), getattr(one, "dtype", None)) for one in actions}
    is_even = len(forms) == 1 and isinstance(actions[0], np.generic | np.ndarray)
    return plain({"even": np.stack(actions)} if is_even else {"each": actions}, "the actions")
