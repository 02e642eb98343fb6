"""What a gymnasium env and its wrappers hold beside the episode: generators, running means, counts of episodes.

This module knows the classes of gymnasium's wrappers by name, and which of their attributes outlive an episode,
or are all that they know of one. What is saved when is decided by `episode_log` and `simulator_state`.

Conventions
    chain      an env and what is in it: wrappers first, the bare env last.
    attribute  path from a wrapper, "obs_rms.mean", say.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import numpy as np

from envkit.errors import ResumeError

__all__ = [
    "Carried",
    "Generator",
    "begin_nothing",
    "carried_by",
    "chain_of",
    "clock_entries",
    "generator_in",
    "held_in_episodes",
    "is_fresh",
]

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


def chain_of(env: Any) -> list[Any]:
    """List an env and what its wrappers hold, outermost first."""
    chain = [env]
    while hasattr(type(chain[-1]), "unwrapped") and "env" in vars(chain[-1]):
        chain.append(chain[-1].env)
    return chain


_FRESH = {"_has_reset": False, "_elapsed_steps": None}
"""What wrappers of gymnasium hold while their env was never reset."""


def is_fresh(env: Any) -> bool:
    """Say whether an env was never reset, as its wrappers tell."""
    told = [vars(wrapper) for wrapper in chain_of(env)]
    return any(name in own and own[name] is value for own in told for name, value in _FRESH.items())


def begin_nothing(env: Any) -> None:
    """Have wrappers of gymnasium wait for a reset, as those of an env that was never reset."""
    for wrapper in chain_of(env):
        for name in _FRESH.keys() & vars(wrapper).keys():
            vars(wrapper)[name] = _FRESH[name]


def _kinds_of(wrapper: Any) -> Iterator[str]:
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


def carried_by(env: Any) -> Carried:
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


def held_in_episodes(env: Any) -> Carried | None:
    """Name all that the wrappers of an env know of an episode; None where one may know more."""
    places = []
    for wrapper in chain_of(env)[:-1]:
        known = [kind for kind in _kinds_of(wrapper) if kind in _IN_EPISODES]
        if not known or type(wrapper).__name__ != known[0]:
            return None
        places += [(wrapper, path) for path in _IN_EPISODES[known[0]]]
    return Carried(places)


def clock_entries(env: Any) -> list[tuple[str, str]]:
    """Name the entries of infos that say how long something took, each in an info of its own name."""
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


def generator_in(env: Any) -> Generator:
    """Give the random numbers of an env: its ``np_random``, a generator of NumPy's or a tuple of some.

    Raises:
        ResumeError: it has none that is known.
    """
    bare = getattr(env, "unwrapped", env)
    found = getattr(bare, "np_random", None)
    several = found if isinstance(found, tuple) and found else (found,)
    if not all(isinstance(one, np.random.Generator | np.random.RandomState) for one in several):
        raise ResumeError(
            f"{bare} has no np_random (it is {found!r}), so where its random numbers come from is not known, and "
            "its episodes cannot be played again. Draw from self.np_random of gymnasium.Env, or give the env "
            "get_state() and set_state(state)."
        )
    return Generator(*several)
