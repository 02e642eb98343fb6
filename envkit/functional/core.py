"""What a stateless environment is, and what it returns.

This module decides the interface of ONE environment written as pure JAX functions. It does not
know batches, resets at the end of an episode, or torch.

Conventions
    state        any pytree of arrays; the whole truth about an episode.
    observation  array, or dict (any pytree) of arrays.
    reward       float32, shape ().
    terminated   bool, shape (): the task itself ended the episode.
    truncated    bool, shape (): something outside the task, such as a time limit, cut it short.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp

from envkit import rules
from envkit.errors import StateStructureError
from envkit.functional.structure import strong

__all__ = ["StatelessEnv", "Timestep", "WrapperState", "done_of", "normalize"]

S = TypeVar("S")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Timestep:
    """What an environment shows after a reset or a step.

    An env may leave out what it does not have and may write Python numbers; `normalize` turns them
    into arrays of the dtypes above. After a reset, ``Timestep(observation)`` is enough.
    """

    observation: Any
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    info: dict[str, Any] = field(default_factory=dict)


class StatelessEnv(Protocol):
    """One environment as two pure functions. It holds no episode; the caller holds the state.

    It may also have an ``observation_space``.
    """

    @property
    def action_space(self) -> Any:
        """A `Box`, a `Discrete`, or a dict or tuple of them."""
        ...

    def reset(self, key: jax.Array, /) -> tuple[Any, Timestep]:
        """Start an episode drawn from ``key``."""
        ...

    def step(self, state: Any, action: Any, /) -> tuple[Any, Timestep]:
        """Advance by one action. Structure and shapes are those that `reset` returned."""
        ...


@dataclass(frozen=True)
class WrapperState(Generic[S]):
    """Base of the states of envkit's wrappers.

    ``inner`` is transparent when leaves are named: the fields of a wrapper stand beside those of
    the environment it wraps (see `StatePacking`).
    """

    inner: S


def done_of(timestep: Timestep) -> jax.Array:
    """Say whether the episode is over for any reason, bool of the shape of ``terminated``."""
    return rules.done_from(timestep.terminated, timestep.truncated)


def normalize(timestep: Timestep) -> Timestep:
    """Give every field of one environment's ``timestep`` its fixed dtype and shape.

    Raises:
        StateStructureError: reward, terminated or truncated is not a scalar (one element counts).
    """
    return replace(
        timestep,
        observation=jax.tree.map(strong, timestep.observation),
        reward=_scalar(timestep.reward, jnp.float32, "reward"),
        terminated=_scalar(timestep.terminated, jnp.bool_, "terminated"),
        truncated=_scalar(timestep.truncated, jnp.bool_, "truncated"),
        info=jax.tree.map(strong, timestep.info),
    )


def _scalar(value: Any, dtype: Any, name: str) -> jax.Array:
    array = jnp.asarray(value)
    if array.size != 1:
        raise StateStructureError(
            f"{name} has shape {array.shape}, but one environment has one {name}. Write reset and "
            "step for a single environment and return a scalar; envkit adds the batch."
        )
    return strong(array.reshape(())).astype(dtype)
