"""One task in two worlds, the stateful side: `GymDrift` (stateless: `tests.zoo.jax_drift`).

Conventions
    A place in [0, 1) moves by the action, in [-1, 1]; the reward is the place; it ends beyond 2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers

from envkit import ParallelEnv
from envkit_bridges.gym.gym_wrapper import GymWrapper


class GymDrift(gymnasium.Env):
    """``low`` bounds the action."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,))

    def __init__(self, low: float = -1.0):
        self.action_space = spaces.Box(low, 1.0, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.random(1, np.float32)
        return self.place, {}

    def step(self, action):
        self.place = self.place + action
        return self.place, float(self.place[0]), bool(self.place[0] > 2.0), False, {}


def make_gym(limit: int = 1000, **options: Any) -> GymWrapper:
    return GymWrapper(wrappers.TimeLimit(GymDrift(**options), limit))


def gym_rows(count: int = 2, limit: int = 1000) -> ParallelEnv:
    return ParallelEnv(count, partial(make_gym, limit), num_processes=1)
