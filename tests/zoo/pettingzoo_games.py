"""Small games of PettingZoo with agents that die, infos, and a state of the whole game."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils import EzPickle
from pettingzoo import ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec

INFOS = ("age", "weight", "said")


class Fading(ParallelEnv):
    """Agent i sees (i, its age) and dies at age ``lives[i]``; the reward is its age, noise drawn at resets on top.

    Agents whose lives are odd are terminated, others truncated; with 0 they are dead from the beginning.
    """

    metadata = {"name": "fading"}  # noqa: RUF012
    render_mode = None

    def __init__(self, lives: tuple[int, ...] = (2, 3, 5), infos: tuple[str, ...] = INFOS):
        self.lives = dict(zip((f"agent_{i}" for i in range(len(lives))), lives, strict=True))
        self.possible_agents = list(self.lives)
        self.info_keys = infos
        self.np_random = np.random.default_rng()
        self.taken: list[dict[str, Any]] = []
        self.state_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.np_random = np.random.default_rng(seed)
        self.noise, self.age = self.np_random.random(), 0
        self.agents = [name for name, lives in self.lives.items() if lives]
        return self._shown(self.agents), self._infos(self.agents)

    def step(self, actions):
        self.taken.append(actions)
        self.age += 1
        lived = self.agents
        over = {name: self.age >= self.lives[name] for name in lived}
        self.agents = [name for name in lived if not over[name]]
        terminated = {name: over[name] and self.lives[name] % 2 == 1 for name in lived}
        truncated = {name: over[name] and not terminated[name] for name in lived}
        rewards = dict.fromkeys(lived, self.age + self.noise)
        return self._shown(lived), rewards, terminated, truncated, self._infos(lived)

    def state(self):
        return np.array([self.age], np.float32)

    def _shown(self, names):
        at = self.possible_agents.index
        return {name: np.array([at(name), self.age], np.float32) for name in names}

    def _infos(self, names):
        infos = {"age": self.age, "weight": 0.5, "said": "nothing"}
        return {name: {key: infos[key] for key in self.info_keys} for name in names}


class Rebuilt(Fading, EzPickle):
    """Is pickled as the arguments that it was made with, as most envs of the library are."""

    def __init__(self, *args):
        EzPickle.__init__(self, *args)
        super().__init__(*args)


def fading_in_turns(*args: Any) -> Any:
    """Give the same game with agents that take turns."""
    return parallel_to_aec(Fading(*args))


class Signals(ParallelEnv):
    """A speaker sees one of three signs and says one of three words; the listener hears it a step later, and guesses.

    Both are paid 1 for each right guess; a game has ``steps`` steps, and one guess fewer.
    """

    metadata = {"name": "signals"}  # noqa: RUF012
    render_mode = None
    possible_agents = ("speaker_0", "listener_0")

    def __init__(self, steps: int = 9):
        self.steps = steps
        self.possible_agents = list(self.possible_agents)
        self.np_random = np.random.default_rng()

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 1, (3,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.np_random = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        self.meant, self.sign = None, self.np_random.integers(3)
        return self._shown(None), {name: {} for name in self.agents}

    def step(self, actions):
        paid = float(actions["listener_0"] == self.meant)
        self.meant, self.sign = self.sign, self.np_random.integers(3)
        self.time += 1
        over = dict.fromkeys(self.agents, self.time == self.steps)
        infos = {name: {} for name in self.agents}
        result = (
            self._shown(actions["speaker_0"]),
            dict.fromkeys(self.agents, paid),
            dict.fromkeys(self.agents, False),
            over,
            infos,
        )
        self.agents = [] if self.time == self.steps else self.agents
        return result

    def _shown(self, word):
        signs = np.eye(3, dtype=np.float32)
        heard = np.zeros(3, np.float32) if word is None else signs[word]
        return {"speaker_0": signs[self.sign], "listener_0": heard}
