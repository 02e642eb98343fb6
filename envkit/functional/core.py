"""What a stateless environment is: pure functions of a state, for ONE environment.

This module fixes the protocol and the record a step gives. It knows JAX, no batch and no torch.

Conventions
    key      a typed PRNG key, `jax.random.key`.
    state    any pytree of arrays; its structure, shapes and dtypes never change.
    scalar   reward float32 "", terminated and truncated bool "".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

__all__ = ["Space", "StatelessEnv", "Timestep", "normalized"]

Space = Any
"""A `Box`, a `Discrete`, or a dict of spaces."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Timestep:
    """What a reset or a step shows.

    Args:
        observation: array, or dict of arrays.
        reward: scalar; 0 after a reset.
        terminated: the task ended here.
        truncated: something else ended the episode here, a time limit say.
        info: dict of arrays that are neither.
    """

    observation: Any
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    info: dict[str, Any] = field(default_factory=dict)


class StatelessEnv(Protocol):
    """Two pure functions and the space of actions. Write it for one environment.

    ``observation_space`` is optional; without it observations are unbounded.
    """

    @property
    def action_space(self) -> Space:
        """The actions `step` takes."""
        ...

    def reset(self, key: jax.Array) -> tuple[Any, Timestep]:
        """Start an episode; all randomness comes from ``key``."""
        ...

    def step(self, state: Any, action: Any) -> tuple[Any, Timestep]:
        """Advance by one step; ``state`` is not changed."""
        ...


def normalized(timestep: Timestep) -> Timestep:
    """Give a timestep whose scalars have the fixed shapes and dtypes, whatever an env returned."""
    return replace(
        timestep,
        observation=jax.tree.map(jnp.asarray, timestep.observation),
        reward=jnp.asarray(timestep.reward, jnp.float32).reshape(()),
        terminated=jnp.asarray(timestep.terminated, bool).reshape(()),
        truncated=jnp.asarray(timestep.truncated, bool).reshape(()),
        info=jax.tree.map(jnp.asarray, timestep.info),
    )
