"""Small gymnasium envs with spaces and infos of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Sampler(gymnasium.Env):
    """Observes samples of a space, takes actions of another, and ends after 4 steps."""

    def __init__(self, observation_space: Any = None, action_space: Any = None):
        chosen = observation_space, action_space
        default = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
        self.observation_space, self.action_space = (
            standard if space is None else space
            for space, standard in zip(chosen, default, strict=True)
        )
        self.taken: list[Any] = []
        self.seen: list[Any] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.place = 0
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.taken.append(action)
        self.place += 1
        return self._observe(), float(self.place), self.place >= 4, False, {}

    def _observe(self):
        self.seen.append(self.observation_space.sample())
        return self.seen[-1]


class Informed(gymnasium.Env):
    """Counts to ``length`` and tells its count in the info of each step."""

    observation_space = spaces.Box(0, 99, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, info: Callable[[int], dict] | None = None, length: int = 5):
        self.info = info or (
            lambda count: {"x": float(count), "y": np.array([count, -count]), "_p": count}
        )
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        observation = np.full(1, self.count, np.float32)
        return observation, 1.0, self.count >= self.length, False, self.info(self.count)


class Telling(gymnasium.Env):
    """Counts to ``length``; its infos come at resets, in single steps and at the end, of all kinds and sizes."""

    observation_space = spaces.Box(0, 99, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 3):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {"start": seed or 0, "kind": "new"}

    def step(self, action):
        self.count += 1
        over = self.count >= self.length
        info = {"count": self.count, "arm": {"angle": self.count / 3}} if action == 0 else {}
        if over:
            picture = np.full((40, 40), self.count, np.int64)
            info |= {"is_success": True, "why": "goal", "picture": picture}
        return np.full(1, self.count, np.float32), 1.0, over, False, info


class LostLives(gymnasium.Wrapper):
    """Ends an episode after some steps, as lost lives do; the game inside goes on until it is over."""

    def __init__(self, env: gymnasium.Env, every: int):
        super().__init__(env)
        self.every, self.is_over = every, True

    def reset(self, **kwargs):
        self.count = 0
        if not self.is_over:
            return self.last, {}
        self.is_over = False
        return self.env.reset(**kwargs)

    def step(self, action):
        self.last, reward, terminated, truncated, info = self.env.step(action)
        self.count += 1
        self.is_over = terminated or truncated
        return self.last, reward, terminated or self.count == self.every, truncated, info


def same(left, right) -> bool:
    """Say whether two values of a space are equal, whatever number types they are made of."""
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[name], right[name]) for name in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return np.array_equal(left, right)


class Says(gymnasium.Env):
    """Observes and pays what it is told to, from its second step on; ends after 6 steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: Any = None, observation: Any = None, reward: Any = 0.0):
        self.observation_space = spaces.Box(-9.0, 9.0, (3,), np.float32) if space is None else space
        self.observation, self.reward = observation, reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(0)
        self.fitting = self.observation_space.sample()
        self.count = 0
        return self.fitting, {}

    def step(self, action):
        self.count += 1
        says_it = self.count > 1 and self.observation is not None
        observation = self.observation if says_it else self.fitting
        reward = self.reward if self.count > 1 else 0.5
        return observation, reward, self.count >= 6, False, {}


class Lives(gymnasium.Env):
    """A game of three lives, one of which each second step costs; ends with the last one."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    class Console:
        left = 3

        def lives(self) -> int:
            return self.left

    def __init__(self):
        self.ale = self.Console()
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ale.left, self.steps = 3, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        self.ale.left -= self.steps % 2 == 0
        return np.zeros(1, np.float32), 0.0, self.ale.left == 0, False, {}
