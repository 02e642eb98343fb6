"""One task in two worlds: `Drift` stateless in JAX, `GymDrift` stateful in gymnasium.

Conventions
    A place in [0, 1) moves by the action, in [-1, 1]; the reward is the place; it ends beyond 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium import spaces, wrappers

from bridges.gymnasium import GymWrapper
from bridges.jax_env import JaxEnv
from envkit import ParallelEnv
from envkit.functional import Box, Timestep


@dataclass(frozen=True)
class Drift:
    action_space = Box(-1.0, 1.0, (1,))

    def reset(self, key):
        place = jax.random.uniform(key, (1,))
        return place, Timestep(place)

    def step(self, state, action):
        place = state + action
        return place, Timestep(place, place[0], place[0] > 2.0)


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


def jax_rows(count: int = 3, limit: int = 1000) -> JaxEnv:
    return JaxEnv(Drift(), batch_size=[count], device="cpu", episode_length=limit)


def gym_rows(count: int = 2, limit: int = 1000) -> ParallelEnv:
    return ParallelEnv(count, partial(make_gym, limit), num_processes=1)
