"""The game of `tests.zoo.trail` in JAX. An episode begins with the last word of its key, modulo 23."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import torch
from tensordict import TensorDictBase

from envkit.functional import Box, Discrete, Timestep
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.policy.jax_policy import JaxPolicy
from tests.zoo import trail as rules
from tests.zoo.trail import Trail

ROWS = 3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrailState:
    start: jax.Array
    steps: jax.Array
    trail: jax.Array


@dataclass(frozen=True)
class JaxTrail:
    action_space: Any = Discrete(rules.CHOICES)

    def reset(self, key):
        start = (key[1] % rules.STARTS).astype(jnp.int32)
        state = TrailState(start, jnp.int32(0), jnp.int32(0))
        return state, Timestep(_shown(state))

    def step(self, state, action):
        choice = jnp.asarray(action).reshape(()).astype(jnp.int32)
        trail = rules.followed(state.start, state.trail, choice)
        state = TrailState(state.start, state.steps + 1, trail)
        return state, Timestep(
            _shown(state),
            rules.reward_of(trail),
            rules.is_terminated(trail),
            rules.is_truncated(state.start, state.steps),
        )


def _shown(state: TrailState) -> jax.Array:
    return jnp.stack([state.start, state.steps, state.trail]).astype(jnp.float32)


def jax_trail(rows: int | None = ROWS, *, box: bool = False, **options: Any) -> JaxEnv:
    space = Box(0.0, 3.0, (1,)) if box else Discrete(rules.CHOICES)
    batch = None if rows is None else [rows]
    return JaxEnv(JaxTrail(space), batch_size=batch, device="cpu", **options)


def _follow(params, observation, key):
    if isinstance(observation, dict):  # of an env that shows more
        observation = observation["observation"]
    _, steps, trail = jnp.moveaxis(observation, -1, 0).astype(jnp.int32)
    return rules.next_choice(steps, trail)


following = JaxPolicy(_follow)
"""The policy of `trail.next_choice`, for the one-hot and the categorical game."""


class KeyedTrail(Trail):
    """The game of a row, in plain Python but for the key from which its next episode is drawn."""

    def __init__(self, key: tuple[int, int], start: int):
        super().__init__()
        self.key, self.start = key, start

    def reset(self) -> None:
        self.key, self.start = beginnings(self.key)
        self.steps = self.trail = 0


@cache
def beginnings(key: tuple[int, int]) -> tuple[tuple[int, int], int]:
    """Give the key that a new episode carries on, and where it begins, from the key of its row."""
    carried, episode = jax.random.split(jnp.array(key, jnp.uint32)).tolist()
    return tuple(carried), episode[1] % rules.STARTS


def keys_in(state: TensorDictBase) -> torch.Tensor:
    """Give the key that each row of a state carries, as two numbers of 32 bits."""
    named = state if "key" in state.keys() else _reader().unpack(state)
    return named["key"].long() % 2**32


@cache
def _reader() -> JaxEnv:
    return jax_trail(None)
