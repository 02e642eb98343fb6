"""Small stateless environments in pure JAX that the bridge tests share.

Conventions
    Pendulum  the shortest env worth the name: one Box action, one array observed.
    Walker    a point in the plane that ends beyond distance 3, with a state of many dtypes, noise
              from a key of its own, dicts of observations and infos.
    Chooser   Discrete action; Steered a dict of actions.
    Lottery   ends with the first high action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from envkit.functional import Box, Discrete, Timestep
from tests.zoo.half import HALF


def unlike_any(kind: type) -> Any:
    """Make an env that equals no other, so that nobody has compiled its programs."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__})()


class Pendulum:
    """Swing up; never ends by itself."""

    action_space = Box(-2.0, 2.0, (1,))

    def reset(self, key):
        state = jax.random.uniform(key, (2,), minval=-1.0, maxval=1.0)  # angle, speed
        return state, self.shown(state)

    def step(self, state, action):
        angle, speed = state
        cost = angle**2 + 0.1 * speed**2 + 0.001 * action[0] ** 2
        speed = jnp.clip(speed + 0.05 * (15.0 * jnp.sin(angle) + 3.0 * action[0]), -8.0, 8.0)
        state = jnp.stack([angle + 0.05 * speed, speed])
        return state, self.shown(state, -cost)

    def shown(self, state, reward=0.0):
        return Timestep(jnp.array([jnp.cos(state[0]), jnp.sin(state[0]), state[1]]), reward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WalkerState:
    place: jax.Array  # float32 (2,)
    steps: jax.Array  # int32 ""
    lamps: jax.Array  # bool (3,)
    level: jax.Array  # uint8 ""
    noise: jax.Array  # typed key ""
    parts: dict[str, Any]  # {"half": HALF (2, 2), "empty": float32 (0,)}
    extra: None = None


@dataclass(frozen=True)
class Walker:
    """Walk with ``action``, pushed by noise; ends farther than 3 from the origin."""

    push: float = 0.01
    action_space: Any = Box(-1.0, 1.0, (2,))

    def reset(self, key):
        state = WalkerState(
            place=jax.random.uniform(key, (2,)),
            steps=jnp.int32(0),
            lamps=jnp.array([True, False, True]),
            level=jnp.uint8(200),
            noise=jax.random.wrap_key_data(key),
            parts={"half": jnp.ones((2, 2), HALF), "empty": jnp.zeros((0,))},
        )
        return state, self.shown(state, 0.0)

    def step(self, state, action):
        noise, now = jax.random.split(state.noise)
        place = state.place + action + self.push * jax.random.uniform(now, (2,))
        state = WalkerState(
            place=place,
            steps=state.steps + 1,
            lamps=jnp.roll(state.lamps, 1),
            level=state.level + jnp.uint8(1),
            noise=noise,
            parts={"half": state.parts["half"] * 0.5, "empty": state.parts["empty"]},
        )
        return state, self.shown(state, -jnp.abs(place).sum())

    def shown(self, state, reward):
        return Timestep(
            {"place": state.place, "sight": {"lamps": state.lamps, "level": state.level}},
            reward,
            terminated=jnp.linalg.norm(state.place) > 3.0,
            info={"steps": state.steps},
        )


@dataclass(frozen=True)
class Chooser:
    """Choose the number shown; the reward says whether it was."""

    action_space: Any = Discrete(3)

    def reset(self, key):
        return (jnp.int32(0), jnp.int32(-1)), Timestep(jnp.zeros(3))

    def step(self, state, action):
        steps, _ = state
        state = (steps + 1, jnp.asarray(action, jnp.int32))
        return state, Timestep(jax.nn.one_hot(state[1], 3), (action == steps % 3) * 1.0)


@dataclass(frozen=True)
class Lottery:
    """Ends with the first action above 0.9; shows how many there were."""

    action_space: Any = Box(0.0, 1.0, (1,))

    def reset(self, key):
        return jnp.float32(0), Timestep(jnp.zeros(1))

    def step(self, state, action):
        return state + 1, Timestep(state[None] + 1, terminated=action[0] > 0.9)


@dataclass(frozen=True)
class Steered:
    """Two actions by name; shows their weighted sum."""

    def __post_init__(self):
        space = {"wheel": Box(-1.0, 1.0, (2,)), "gear": Discrete(4)}
        object.__setattr__(self, "action_space", space)

    def reset(self, key):
        return jnp.float32(0), Timestep(jnp.zeros(1))

    def step(self, state, action):
        state = state + action["wheel"].sum() + 10.0 * action["gear"]
        return state, Timestep(state[None], state)


@dataclass(frozen=True)
class Shifting:
    """Add a leaf called "late" to the state at the first step: not allowed."""

    action_space: Any = Box(-1.0, 1.0, (1,))

    def reset(self, key):
        return {"early": jnp.zeros(1)}, Timestep(jnp.zeros(1))

    def step(self, state, action):
        return {"early": state["early"], "late": action}, Timestep(action)
