"""Env objects of PettingZoo in one form: a reset and a step over dicts by agent, dead agents included.

`ParallelGame` and `TurnGame` decide what the two APIs of the library mean here; what records their episodes can be in
their place (`envkit_bridges.gym.resume`). They know no TensorDict.

Conventions
    alive   of an agent: the library gives observations of it.
    acting  agents whose actions count: all that live (parallel), or the one whose turn it is (AEC).
    ends    (terminated, truncated) of every possible agent; those of a dead one stay as they were when it died.
    played  agents that have been alive in this episode: the others say nothing about its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from envkit.errors import ArgumentError, NotResetError, OutputShapeError
from envkit.process_wide import no_warnings
from envkit_bridges.gym.simulator_rows import flags_of
from envkit_bridges.libraries import Simulator, no_object_of, require

if TYPE_CHECKING:
    from envkit_bridges.gym.backend import SpaceValue

ByAgent = Mapping[str, Any]


def game_of(env: Simulator) -> Game:
    """Wrap an env object of the library as a game.

    Raises:
        ArgumentTypeError: (a TypeError) it is none of PettingZoo's.
        ArgumentError: (a ValueError) it does not say which agents there may be.
    """
    library = require("pettingzoo")
    if not isinstance(env, library.ParallelEnv | library.AECEnv):
        raise no_object_of("a ParallelEnv or an AECEnv of PettingZoo", "PettingZoo", env)
    if not getattr(env, "possible_agents", None):
        raise ArgumentError(
            f"{env} has no possible_agents, so which agents there may be is not known, and data has no place for "
            "them. Set them in its __init__, all that may ever appear."
        )
    return ParallelGame(env) if isinstance(env, library.ParallelEnv) else TurnGame(env)


class Game(ABC):
    """An env of PettingZoo; all that is not a reset or a step is the env's own.

    Args:
        env: the object of the library.
    """

    parallel: ClassVar[bool]

    def __init__(self, env: Simulator):
        self.env = env
        self.names: list[str] = list(env.possible_agents)
        self.ends: dict[str, tuple[bool, bool]] = {}
        self.played: set[str] = set()
        self._has_reset = False
        self._calling = (
            _hushed if "cooperative_pong" in type(env.unwrapped).__module__ else nullcontext
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "env" not in vars(self):
            raise AttributeError(name)
        return getattr(self.env, name)

    def __str__(self) -> str:
        return str(self.env)

    @property
    def unwrapped(self) -> Game:
        """This game: where its random numbers come from is known here."""
        return self

    # ----------------------------------------------------------------------------- resets and steps

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ByAgent, ByAgent]:
        """Begin an episode: observations and infos of the agents that are alive."""
        with self._calling():
            observations, infos, dead = self._begin(seed, options)
        self._has_reset = True
        self.played = set(observations)
        self.ends = {
            name: (False, False) if name in observations else dead.get(name, (True, False))
            for name in self.names
        }
        return observations, infos

    def step(self, action: SpaceValue) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """Step: observations, rewards and infos of the agents that lived before, end flags of all.

        Raises:
            NotResetError: no episode is under way, or all agents are dead.
        """
        if not self._has_reset:
            raise NotResetError(
                f"{self} was not reset since it was made or copied. Call reset() first."
            )
        before = set(self.env.agents)
        with self._calling():
            observations, rewards, terminated, truncated, infos = self._advance(action)
        self._require_all(before, observations, rewards, terminated, truncated)
        self._end(observations, terminated, truncated)
        self.played.update(observations)
        paid = {name: rewards[name] for name in rewards if name in before or name in observations}
        ended = {name: end[0] for name, end in self.ends.items()}
        return observations, paid, ended, {n: end[1] for n, end in self.ends.items()}, infos

    def _require_all(self, before: set[str], observations: ByAgent, *others: ByAgent) -> None:
        """Check that a step tells all of the agents that were alive ``before`` and are now, and knows no others."""
        living = set(self.env.agents)
        if unknown := {*observations, *living}.difference(self.names):
            raise OutputShapeError(
                f"{self} has the agents {sorted(unknown)}, which are none of its possible_agents {self.names}. "
                "Correct the env: they name all that may ever appear."
            )
        named = ("rewards", "terminations", "truncations")
        for what, by_agent in (("observations", observations), *zip(named, others, strict=True)):
            due = living if by_agent is observations else living & before
            if missing := due.difference(by_agent):
                raise OutputShapeError(
                    f"{sorted(missing)} are among the agents of {self}, but the {what} of its step hold only "
                    f"{sorted(by_agent)}. Correct the env: agents that are dead leave env.agents, and the others appear in each result."
                )

    def _end(self, observations: ByAgent, terminated: ByAgent, truncated: ByAgent) -> None:
        """Store the flags of a step: those of an agent that is gone stay as they were when it went."""
        living = self.env.agents
        for name in self.names:
            flags = flags_of(terminated.get(name, False), truncated.get(name, False))
            if name in living:
                self.ends[name] = flags
            elif not any(self.ends[name]) and (name in self.played or name in observations):
                self.ends[name] = flags if any(flags) else (True, False)  # gone silently

    def _over(self) -> NotResetError:
        return NotResetError(f"the game of {self} is over: no agent can act. Reset it first.")

    @abstractmethod
    def acting(self) -> list[str]:
        """List the agents whose actions the next step takes."""

    @abstractmethod
    def _begin(
        self, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[ByAgent, ByAgent, Mapping[str, tuple[bool, bool]]]:
        """Reset: observations and infos of the living, the ends of others as far as they are known."""

    @abstractmethod
    def _advance(self, action: SpaceValue) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """Step as the library does."""

    # ----------------------------------------------------------------------------- random numbers, copies

    @property
    def np_random(self) -> Any:
        """The generator of the env, a tuple where it has several; None where none is known."""
        generators = _generators_in(self.env.unwrapped)
        if not generators and type(self.env.unwrapped).__module__.startswith(_WITHOUT_CHANCE):
            return np.random.default_rng(0)
        if len(generators) > 1:
            return tuple(generators)
        return generators[0] if generators else None

    def __getstate__(self) -> dict[str, Any]:
        """Add where the generators are: the library rebuilds most envs that are copied."""
        numbers = [_bits(found).state for found in _generators_in(self.env.unwrapped)]
        return {**vars(self), "numbers": numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        numbers = state.pop("numbers")
        vars(self).update(state)
        for generator, numbers_of_one in zip(
            _generators_in(self.env.unwrapped), numbers, strict=False
        ):
            _bits(generator).state = numbers_of_one


class ParallelGame(Game):
    """Agents that act at the same time."""

    parallel = True

    def acting(self) -> list[str]:
        return list(self.env.agents)

    def _begin(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        result = self.env.reset(seed=seed, options=options)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise OutputShapeError(
                f"reset of {self} gave {type(result).__name__}, but must give (observations, infos), two dicts "
                "by agent. Correct the env."
            )
        observations, infos = result
        return observations, infos, {}

    def _advance(self, action: ByAgent) -> Any:
        if not self.env.agents:
            raise self._over()
        return self.env.step({name: action[name] for name in self.env.agents})


class TurnGame(Game):
    """Agents that take turns (AEC); agents that are dead take theirs, which does nothing, at once."""

    parallel = False

    def acting(self) -> list[str]:
        return [self.env.agent_selection]

    def _begin(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        env = self.env
        env.reset(seed=seed, options=options)
        ends = {name: self._ends_of(name) for name in env.agents}
        dead = {name: end for name, end in ends.items() if any(end)}
        observations = {name: env.observe(name) for name in env.agents if name not in dead}
        infos = dict(env.infos)
        self._bury()
        return observations, infos, dead

    def _advance(self, action: SpaceValue) -> Any:
        env = self.env
        if not self._is_alive(env.agent_selection):
            raise self._over()
        env.step(action)
        observations = {name: env.observe(name) for name in env.agents}
        parts = [dict(part) for part in (env.rewards, env.terminations, env.truncations, env.infos)]
        self._bury()
        return observations, *parts

    def _is_alive(self, name: str) -> bool:
        return name in self.env.agents and not any(self._ends_of(name))

    def _ends_of(self, name: str) -> tuple[bool, bool]:
        return flags_of(self.env.terminations[name], self.env.truncations[name])

    def _bury(self) -> None:
        """Pass the turn to an agent that is alive, if there is one."""
        if any(map(self._is_alive, self.env.agents)):
            while not self._is_alive(self.env.agent_selection):
                self.env.step(None)


# ------------------------------------------------------------------------------- what the library hides

_WITHOUT_CHANCE = tuple(
    f"pettingzoo.classic.{name}." for name in ("chess", "connect_four", "go", "rps", "tictactoe")
)
"""Packages of games that draw no random numbers."""

_DEPTH = 3


def _generators_in(env: Simulator) -> list[Any]:
    """Find the generators of random numbers that an env holds, itself or in its parts."""
    generators: dict[int, Any] = {}
    for value in _parts_of(env, _DEPTH, set()):
        if isinstance(value, np.random.Generator | np.random.RandomState):
            generators[id(value)] = value
    return list(generators.values())


def _parts_of(value: object, depth: int, seen: set[int]) -> Iterator[Any]:
    for part in list(getattr(value, "__dict__", {}).values()):
        if id(part) in seen or isinstance(part, type):
            continue
        seen.add(id(part))
        yield part
        if depth > 1:
            yield from _parts_of(part, depth - 1, seen)


def _bits(generator: Any) -> Any:
    return getattr(generator, "bit_generator", None) or generator._bit_generator


def _hushed() -> AbstractContextManager[None]:
    """Suppress what Cooperative Pong warns of at each step: that it shows nothing, which it was not asked to."""
    return no_warnings(".*without specifying any render mode")
