"""The stateless side of the task of `tests.zoo.drift`, apart from it so that workers import no JAX."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from envkit.functional import Box, Timestep
from envkit_bridges.jax.jax_env import JaxEnv


@dataclass(frozen=True)
class Drift:
    action_space = Box(-1.0, 1.0, (1,))

    def reset(self, key):
        place = jax.random.uniform(key, (1,))
        return place, Timestep(place)

    def step(self, state, action):
        place = state + action
        return place, Timestep(place, place[0], place[0] > 2.0)


def jax_rows(count: int = 3, limit: int = 1000, device: str = "cpu") -> JaxEnv:
    return JaxEnv(Drift(), batch_size=[count], device=device, episode_length=limit)
