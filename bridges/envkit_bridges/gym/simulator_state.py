"""How a simulator is copied, and how its state is saved and restored: by its own methods, or by playing its episode again.

`EpisodeLog` takes the place of an env: it hands resets and steps on, and keeps the generator at the last reset, the
reset's keywords, the actions since, and a digest of all that came out. Another env of the same kind plays that again, and
is where the first one was if the same comes out. `saved` and `restored` decide which of the two ways is taken.
A copy continues from the state of the original, independently; what plain means do not copy is refused, or reset
first: nothing is restarted silently.

Conventions
    offered   the bare env has ``get_state()`` and ``set_state(state)``, and all of its wrappers are known. Then
              nothing need be written down.
    fresh     never reset, as wrappers of gymnasium say; every env that was made by name has one that does.
    digest    CRC-32 over the bytes of every observation, reward, flag and number in the infos since the last
              reset, in order: 32 bits tell an episode that goes another way but for one in four billion.
    carried   what wrappers hold across episodes, as it was before the last reset.
    chain     an env and what is in it: wrappers first, the bare env last.
    attribute path from a wrapper, e.g. "obs_rms.mean".
    rebuilt   of a simulator: it is pickled, and so copied, as the arguments it was made with
              (``gymnasium.utils.EzPickle``; MuJoCo's and Box2D's are). Its copy has begun no episode, so it
              must be reset first, and keeps the generator of random numbers.
"""

from __future__ import annotations

import copy
import pickle
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from zlib import crc32

import numpy as np
import torch

from envkit.data.plain import from_plain, plain
from envkit.errors import CopyError, ResumeError
from envkit.transport import by_value
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

_REFUSED = {"RecordVideo": "it writes the video of an episode while that is played"}

_LIBRARIES = ("gymnasium", "gym")


def chain_of(env: Simulator) -> list[Any]:
    """List an env and what its wrappers hold, outermost first."""
    chain = [env]
    while hasattr(type(chain[-1]), "unwrapped") and "env" in vars(chain[-1]):
        chain.append(chain[-1].env)
    return chain


_FRESH = {"_has_reset": False, "_elapsed_steps": None}
"""Values that wrappers of gymnasium hold before the first reset of their env."""


def is_fresh(env: Simulator) -> bool:
    """Check whether an env was never reset, as its wrappers tell."""
    told = [vars(wrapper) for wrapper in chain_of(env)]
    return any(name in own and own[name] is value for own in told for name, value in _FRESH.items())


def begin_nothing(env: Simulator) -> None:
    """Have wrappers of gymnasium wait for a reset, as those of an env that was never reset."""
    for wrapper in chain_of(env):
        for name in _FRESH.keys() & vars(wrapper).keys():
            vars(wrapper)[name] = _FRESH[name]


def _kinds_of(wrapper: Simulator) -> Iterator[str]:
    """Name the classes of a gym library that a wrapper is of."""
    for cls in type(wrapper).__mro__:
        if cls.__module__.partition(".")[0] in _LIBRARIES:
            yield cls.__name__


class Carried:
    """Attributes of wrappers, read and written together.

    Args:
        places: each wrapper with the path of one of its attributes.
    """

    def __init__(self, places: list[tuple[Any, str]]):
        self._places = places

    def read(self) -> list[Any]:
        """Copy the values."""
        return [_read(attrgetter(path)(wrapper)) for wrapper, path in self._places]

    def write(self, values: list[Any]) -> None:
        """Put back what `read` gave.

        Raises:
            ResumeError: it was read from other wrappers.
        """
        if len(values) != len(self._places):
            raise ResumeError(
                f"what is loaded holds {len(values)} values of wrappers, but the wrappers here keep "
                f"{len(self._places)}: {[f'{type(w).__name__}.{path}' for w, path in self._places]}. Build the "
                "env with the same wrappers."
            )
        for (wrapper, path), value in zip(self._places, values, strict=True):
            owner, _, name = path.rpartition(".")
            holder = attrgetter(owner)(wrapper) if owner else wrapper
            before = getattr(holder, name)
            value = deque(value, before.maxlen) if isinstance(before, deque) else copy.copy(value)
            setattr(holder, name, value)


def _read(value: Any) -> Any:
    return list(value) if isinstance(value, deque) else copy.copy(value)


def carried_by(env: Simulator) -> Carried:
    """Name what the wrappers of an env hold across episodes.

    Raises:
        ResumeError: one of them holds what cannot be saved.
    """
    places = []
    for wrapper in chain_of(env):
        for kind in _kinds_of(wrapper):
            if kind in _REFUSED:
                raise ResumeError(
                    f"{kind} around {env.unwrapped} cannot be saved: {_REFUSED[kind]}. Leave it out of envs "
                    "that are to be resumed."
                )
            places += [(wrapper, path) for path in _ACROSS_EPISODES.get(kind, ())]
    return Carried(places)


def held_in_episodes(env: Simulator) -> Carried | None:
    """Name all that the wrappers of an env know of an episode; None where one may know more."""
    places = []
    for wrapper in chain_of(env)[:-1]:
        known = [kind for kind in _kinds_of(wrapper) if kind in _IN_EPISODES]
        if not known or type(wrapper).__name__ != known[0]:
            return None
        places += [(wrapper, path) for path in _IN_EPISODES[known[0]]]
    return Carried(places)


def clock_entries(env: Simulator) -> list[tuple[str, str]]:
    """Name the entries of infos that say how long something took, each in an info of that name."""
    return [
        (wrapper._stats_key, "t")
        for wrapper in chain_of(env)
        if "RecordEpisodeStatistics" in _kinds_of(wrapper)
    ]


class Generator:
    """The random numbers of an env, whichever of NumPy's kinds its generators are.

    Args:
        numbers: the generators, nearly always one.
    """

    def __init__(self, *numbers: np.random.Generator | np.random.RandomState):
        self._numbers = numbers

    @property
    def state(self) -> Any:
        """Where it is, of several a list; assignable."""
        states = [_state_of(numbers) for numbers in self._numbers]
        return states[0] if len(states) == 1 else states

    @state.setter
    def state(self, state: Any) -> None:
        states = [state] if len(self._numbers) == 1 else state
        try:
            for numbers, own in zip(self._numbers, states, strict=True):
                if isinstance(numbers, np.random.RandomState):
                    numbers.set_state(own)
                else:
                    numbers.bit_generator.state = own
        except (TypeError, ValueError, KeyError) as error:
            kinds = ", ".join(type(numbers).__name__ for numbers in self._numbers)
            raise ResumeError(
                f"the generator of this env ({kinds}) cannot go on from what is loaded ({error}). "
                "Build the same env as the one that was saved."
            ) from error


def _state_of(numbers: np.random.Generator | np.random.RandomState) -> Any:
    if isinstance(numbers, np.random.RandomState):
        return numbers.get_state(legacy=False)  # with the normal number it keeps for later
    return numbers.bit_generator.state


def generator_in(env: Simulator) -> Generator:
    """Return the random numbers of an env: its ``np_random``, a generator of NumPy's or a tuple of some.

    Raises:
        ResumeError: it has none that is known.
    """
    bare = getattr(env, "unwrapped", env)
    found = getattr(bare, "np_random", None)
    several: tuple[Any, ...] = found if isinstance(found, tuple) and found else (found,)
    if not all(isinstance(one, np.random.Generator | np.random.RandomState) for one in several):
        raise ResumeError(
            f"{bare} has no np_random (it is {found!r}), so where its random numbers come from is not known, and "
            "its episodes cannot be played again. Draw from self.np_random of gymnasium.Env, or give the env "
            "get_state() and set_state(state)."
        )
    return Generator(*several)


class _Start(NamedTuple):
    """What an episode begins from: state of the generator, what wrappers carry, keywords of the reset."""

    generator: Any
    carried: Any
    keywords: dict[str, Any]


class EpisodeLog:
    """An env that writes down its episode; all that is not a reset or a step is the env's own.

    Args:
        env: a gymnasium env that has a ``np_random``.
        gap: why the episode under way, if any, cannot be restored; None where none is.
    """

    def __init__(self, env: Simulator, gap: str | None = None):
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
        result = self.env.reset(**kwargs)
        observation, info = reset_answer(result)
        self._start, self.gap, self._actions = start, None, []
        self._digest = digest_of(observation, 0)
        if info:
            self._digest = digest_of(self._timeless(info), self._digest)
        return result

    def step(self, action: SpaceValue) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the env, and write it down."""
        if self._start is None:
            self.gap = self.gap or "it was stepped without a reset before"
        kept = action if type(action) in _FIXED else _copied(action)
        try:
            result = step_answer(self.env.step(action))
        except BaseException:
            self.forget("a step of its episode raised")
            raise
        observation, reward, terminated, truncated, info = result
        self._actions.append(kept)
        if type(observation) is np.ndarray and observation.dtype in _NUMBERS:
            whole = observation if observation.flags.c_contiguous else observation.copy("C")
            digest = crc32(whole.data, self._digest)
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
        """Return the log in plain form, see `envkit.data.plain`.

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
        return crc32(np.ascontiguousarray(value).data, digest)
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


def _copied(action: SpaceValue) -> SpaceValue:
    """Keep an action as it is now: its array may be written into."""
    if isinstance(action, np.ndarray):
        return action.copy()
    if isinstance(action, int | float | str | np.generic):
        return action
    return action.detach().clone() if isinstance(action, torch.Tensor) else copy.deepcopy(action)


def _packed(actions: list[Any]) -> Any:
    """Return actions in plain form, those of one kind as one tensor."""
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


def _equal(one: object, other: object) -> bool:
    return digest_of(from_plain(one), 0) == digest_of(from_plain(other), 0)


def _differs(env: Simulator, what: str) -> str:
    return (
        f"the episode of {env} was played again from its last reset, but {what}: it is not where it was. It "
        "draws from another generator than its np_random, keeps values across episodes, or is another version. "
        "Load with strict=False to begin a new episode, the old one truncated, or give the env get_state() "
        "and set_state(state)."
    )


def bare(env: Simulator) -> Simulator:
    """Return the env itself where a log may be in its place."""
    return env.env if isinstance(env, EpisodeLog) else env


def recorded(env: Simulator, mode: bool) -> Simulator:
    """Return what takes the resets and steps of an env: a log of it, or with ``mode`` False the env itself.

    An env that cannot be saved, or needs no log for that, is given as it is; `saved` tells.
    """
    own = bare(env)
    if not mode or _held_if_offered(own) is not None:
        return own
    if isinstance(env, EpisodeLog):
        return env
    try:
        generator_in(own)
        return EpisodeLog(own, _gap(own, "it began before record_for_resume() was called"))
    except ResumeError:
        return own


def saved(env: Simulator) -> dict[str, Any]:
    """Return the state of an env, in plain form.

    Raises:
        ResumeError: it cannot be restored exactly, or was not written down.
    """
    own = bare(env)
    held = _held_if_offered(own)
    if held is None:
        generator_in(own)  # or say first that it has none
        log = env if own is not env else EpisodeLog(own, _gap(own, "it was not written down"))
        return log.state()
    state = plain(chain_of(own)[-1].get_state(), f"what get_state() of {own} gave")
    return {"offered": state, "held": plain(held.read()), "generator": _generator_if_any(own)}


def restored(env: Simulator, state: Mapping[str, Any]) -> Simulator:
    """Bring an env to where the one was that `saved` was asked for; give what takes its steps from now on.

    Raises:
        ResumeError: it did not get there.
    """
    own = bare(env)
    if "offered" not in state:
        log = recorded(env, True)
        log = log if isinstance(log, EpisodeLog) else EpisodeLog(own)
        log.play(state)
        return recorded(log, True)
    held, simulator = _held_if_offered(own), chain_of(own)[-1]
    if held is None:
        raise ResumeError(
            f"what is loaded was read by get_state(), but {own} has no get_state() and set_state(state), or "
            "has other wrappers. Build the same env as the one that was saved."
        )
    simulator.set_state(from_plain(state["offered"]))
    held.write(from_plain(state["held"]))
    if state["generator"] is not None:
        generator_in(own).state = from_plain(state["generator"])
    again = plain(simulator.get_state(), f"what get_state() of {own} gave")
    if digest_of(again, 0) != digest_of(state["offered"], 0):
        raise ResumeError(
            f"set_state of {simulator} was given what get_state gave, and get_state now gives something else: "
            "one of them leaves something out."
        )
    return own


def _held_if_offered(env: Simulator) -> Carried | None:
    simulator = chain_of(env)[-1]
    offers = all(callable(getattr(simulator, name, None)) for name in ("get_state", "set_state"))
    return held_in_episodes(env) if offers else None


def _generator_if_any(env: Simulator) -> Any:
    try:
        return plain(generator_in(env).state)
    except ResumeError:
        return None


def _gap(env: Simulator, reason: str) -> str | None:
    return None if is_fresh(env) else reason


# ------------------------------------------------------------------------------ copies and pickles

_KEPT = ("spec", "_np_random", "_np_random_seed")


class HoldsSimulator(Protocol):
    """An env around a simulator."""

    _env: Any

    def __getstate__(self) -> Any:
        """Return what a copy starts from."""
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


def unpack(cls: bytes, packed: bytes) -> HoldsSimulator:
    """Undo `pack`; ``cls`` is the pickled class of the env."""
    twin = object.__new__(pickle.loads(cls))
    return _revived(twin, *by_value.loads_parts(packed, twin))


def _revived(twin: Any, state: Any, kept: list[dict[str, Any]]) -> HoldsSimulator:
    twin.__setstate__(state)
    for chain, found in zip(_rebuilt(twin._env), kept, strict=True):
        vars(chain[-1]).update(found)
        _order_enforcing(chain)._has_reset = False
        for log in (chain[0], vars(twin).get("_log")):
            if isinstance(log, EpisodeLog):
                log.forget(None)
    return twin


def _kept(simulator: Simulator) -> list[dict[str, Any]]:
    """Return what a copy keeps of each simulator that is rebuilt."""
    inner = [vars(chain[-1]) for chain in _rebuilt(simulator)]
    return [{name: own[name] for name in _KEPT if name in own} for own in inner]


def _rebuilt(simulator: Simulator) -> Iterator[list[Any]]:
    """Yield each simulator that is rebuilt, its wrappers before it in a list."""
    for env in getattr(simulator, "envs", None) or [simulator]:
        chain = [env]
        while not _is_easy(chain[-1]) and (inner := _inside(chain[-1])) is not None:
            chain.append(inner)
        if _is_easy(chain[-1]):
            yield chain


def _inside(wrapper: Simulator) -> Simulator:
    """Return the env in a wrapper; those of PettingZoo that change the API call it otherwise."""
    inner = getattr(wrapper, "env", None)
    return getattr(wrapper, "aec_env", None) if inner is None else inner


def _is_easy(env: Simulator) -> bool:
    get_state = getattr(type(env), "__getstate__", None)
    return getattr(get_state, "__qualname__", "") == "EzPickle.__getstate__"


def _order_enforcing(chain: list[Any]) -> Simulator:
    """Return the wrapper that refuses a step before the first reset; None where there is none."""
    return next((wrapper for wrapper in chain if "_has_reset" in vars(wrapper)), None)


def _require_copyable(env: HoldsSimulator) -> None:
    simulator = env._env
    classes = type(getattr(simulator, "unwrapped", simulator)).__mro__
    if any(base.__name__ == "AsyncVectorEnv" for base in classes):  # its pipes would be copied
        raise _refusal(env, "it has its own processes")
    if any(_order_enforcing(chain) is None for chain in _rebuilt(simulator)):
        raise _refusal(
            env, "it would be built again, and nothing would notice that it must be reset first"
        )


def _refusal(env: HoldsSimulator, reason: str) -> CopyError:
    return CopyError(
        f"this {type(env).__name__} can be neither copied nor pickled with its simulator {env._env} "
        f"({reason}). Build one where it is needed: pass a function, `lambda: env_cls(...)`, or an "
        "`EnvCreator` instead of the env."
    )
