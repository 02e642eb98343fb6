"""Small stateless environments that tests share.

Conventions
    Countdown(start)  observation float32 (): what is left; reward 1, terminated at 0. No randomness.
    NoisyWalk()       starts at a random place in a dict observation; terminated outside [-2, 2].
    Nim(stones)       two players take one to three stones in turn, the last stone wins. It masks its actions, and pays
                      who moved ("reward") and each player ("paid", "player"). Too many taken lose the game.
    Pendulum()        the classic one in 15 lines; never ends.
    Team(end)         two agents choose of 3 and of 2; each is paid what it chose, every step. Terminated at ``end``.
    Sled(model)       pushed along a line; its model holds mass, friction of two runners, and the steps of an episode.
                      It reports its "work" after a step only.
    Zoo()             a state with a leaf of every awkward kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from envkit.functional import Box, Discrete, MultiDiscrete, Timestep
from tests.zoo.half import HALF


@dataclass(frozen=True)
class Countdown:
    start: int
    action_space = Discrete(2)

    def reset(self, key):
        left = jnp.int32(self.start)
        return left, Timestep(left.astype(jnp.float32))

    def step(self, state, action):
        left = state - 1
        return left, Timestep(left.astype(jnp.float32), 1.0, left <= 0)


@dataclass(frozen=True)
class NoisyWalk:
    action_space = Box(-1.0, 1.0, (2,))

    def reset(self, key):
        place = jax.random.uniform(key, (2,), minval=-1.0, maxval=1.0)
        return {"place": place, "moves": jnp.int32(0)}, Timestep({"place": place, "far": False})

    def step(self, state, action):
        place = state["place"] + 0.5 * action
        far = jnp.abs(place).max() > 2.0
        after = {"place": place, "moves": state["moves"] + 1}
        return after, Timestep({"place": place, "far": far}, -jnp.abs(place).sum(), far)


class Pendulum:
    action_space = Box(-2.0, 2.0, (1,))

    def reset(self, key):
        state = jax.random.uniform(key, (2,), minval=-1.0) * jnp.array([jnp.pi, 1.0])
        return state, Timestep(self.observe(state))

    def step(self, state, action):
        (angle, speed), torque = state, action[0]
        cost = ((angle + jnp.pi) % (2 * jnp.pi) - jnp.pi) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
        speed = jnp.clip(speed + 0.05 * (15 * jnp.sin(angle) + 3 * torque), -8, 8)
        state = jnp.stack([angle + 0.05 * speed, speed])
        return state, Timestep(self.observe(state), -cost)

    def observe(self, state):
        return jnp.stack([jnp.cos(state[0]), jnp.sin(state[0]), state[1]])


@dataclass(frozen=True)
class Team:
    end: int
    action_space = MultiDiscrete((3, 2))
    reward_shape = (2,)

    def reset(self, key):
        start = jax.random.randint(key, (), 0, self.end - 1)
        return start, Timestep(start.astype(jnp.float32))

    def step(self, state, action):
        state = state + 1
        return state, Timestep(state.astype(jnp.float32), action, state >= self.end)


@dataclass(frozen=True)
class Nim:
    stones: int
    action_space = Discrete(3)
    reward_shape: ClassVar = {"reward": (), "paid": {"player": (2,)}}
    action_masks = (((), ("allowed", "takes")),)

    def reset(self, key):
        state = {"left": jnp.int32(self.stones), "turn": jax.random.randint(key, (), 0, 2)}
        return state, Timestep(self.observe(state))

    def step(self, state, action):
        left, turn = state["left"] - action - 1, state["turn"]
        state = {"left": jnp.maximum(left, 0), "turn": 1 - turn}
        paid = jnp.where(left > 0, 0.0, jnp.where(left == 0, 1.0, -1.0))
        reward = {"reward": paid, "paid": {"player": jnp.full(2, -paid).at[turn].set(paid)}}
        return state, Timestep(self.observe(state), reward, left <= 0)

    def observe(self, state):
        left = state["left"]
        return {"left": left, "allowed": {"takes": jnp.arange(1, 4) <= left}}


@dataclass(frozen=True)
class Sled:
    model: dict = field(default_factory=lambda: {"mass": 2.0, "friction": (0.5, 0.25), "steps": 4})
    action_space = Box(-1.0, 1.0, (1,))

    def with_model(self, model):
        return replace(self, model=model)

    def reset(self, key):
        speed = jax.random.uniform(key, ())
        return {"speed": speed, "moves": jnp.int32(0)}, Timestep(jnp.stack([speed, speed]))

    def step(self, state, action):
        drag = sum(self.model["friction"]) * state["speed"]
        speed = state["speed"] + 0.1 * (action[0] - drag) / self.model["mass"]
        moves = state["moves"] + 1
        shown = jnp.stack([speed, state["speed"]])
        info = {"work": action[0] * speed}
        return {"speed": speed, "moves": moves}, Timestep(
            shown, speed, moves >= self.model["steps"], info=info
        )


class Inventory(NamedTuple):
    small: Any
    flag: Any
    nothing: Any


@dataclass(frozen=True)
class Zoo:
    action_space = Discrete(3)

    def reset(self, key):
        words, noise = jax.random.bits(key, (5,)), jax.random.normal(key, (5,))
        state = {
            "half": noise[:4].reshape(2, 2).astype(HALF),
            "brain": noise[:3].astype(jnp.bfloat16),
            "float": noise[4],
            "empty": jnp.zeros((0, 3)),
            "words": words,
            "typed": jax.random.split(jax.random.wrap_key_data(key), 2),
            "kit": Inventory(words.astype(jnp.uint8), words % 2 == 1, None),
            "list": [words.astype(jnp.int16), words.astype(jnp.uint16), words.astype(jnp.int8)],
            "nibble": jnp.arange(-8, 8, dtype=jnp.int4),
        }
        return state, Timestep(state["float"])

    def step(self, state, action):
        return state, Timestep(state["float"], 0.0)
