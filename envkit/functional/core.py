"""The interface of a stateless environment, and its results.

This module decides the interface of ONE environment written as pure JAX functions. It does not
know batches, resets at the end of an episode, or torch.

Conventions
    state        any pytree of arrays; the whole truth about an episode.
    observation  array, or dict (any pytree) of arrays.
    reward       float32, shape (), or (k,) where the env declares k components, or a dict of these by name.
    terminated   bool, shape (): the task itself ended the episode.
    truncated    bool, shape (): something outside the task, such as a time limit, cut it short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp

from envkit import rules
from envkit.errors import StateStructureError
from envkit.functional.spaces import SpaceTree, as_space
from envkit.functional.structure import PyTree, conform, strong

if TYPE_CHECKING:
    from jax.typing import ArrayLike, DTypeLike

S = TypeVar("S")
Path = tuple[str, ...]
RewardShape = tuple[int, ...] | Mapping[str, "RewardShape"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Timestep:
    """Hold the result of a reset or a step of an environment.

    An env may leave out what it does not have and may write Python numbers; `normalize` turns them
    into arrays of these dtypes. After a reset, ``Timestep(observation)`` is enough.

    Attributes:
        observation: array, or dict (any pytree) of arrays.
        reward: float32, shape (), or (k,) where the env declares k components, or a dict of these by name.
        terminated: bool, shape (): the task itself ended the episode.
        truncated: bool, shape (): something outside the task, such as a time limit, cut it short.
        info: what is worth recording beside the observation, arrays by name. A `JaxEnv` gives them as entries below
            "info", which policies do not observe.

    Example:
        >>> import jax.numpy as jnp
        >>> from envkit import Timestep
        >>> timestep = Timestep(jnp.zeros(2), reward=1.0, terminated=True)
        >>> timestep.observation.shape, timestep.reward, timestep.truncated
        ((2,), 1.0, False)
    """

    observation: Any
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    info: dict[str, Any] = field(default_factory=dict)


class StatelessEnv(Protocol):
    """Protocol of an environment that is two pure functions; the caller holds the state of its episode.

    It may also have an ``observation_space``, and three more:

    - ``reward_shape``: () where it is left out; ``(k,)`` for k components, e.g. one for each agent; or a dict of
      shapes by name, which are the entries that a `JaxEnv` gives, e.g. ``{"reward": (), "player_reward": (2,)}``.
    - ``action_masks``: pairs of paths, an action and the observation that says which of its options are allowed: one
      flag for each, those of a `MultiDiscrete` side by side. Random actions are drawn from these. The path of an action
      is () where the action space is a single one, e.g. ``(((), ("action_mask",)),)``.
    - ``groups``: for an env of several agents, the number of agents by the name of their group. Observation, action space and
      reward are dicts by group then, whose leaves have an axis for the agents in front: ``{"agent": {"observation":
      (3, 18)}}``, ``{"agent": {"action": AgentsDiscrete.of(5, 3)}}``, ``{"agent": {"reward": (3, 1)}}``. See `GroupEnds` for
      the flags of agents.

    Example:
        >>> import jax.numpy as jnp
        >>> from envkit import Discrete, JaxEnv, Timestep
        >>> class Countdown:
        ...     action_space = Discrete(2)
        ...
        ...     def reset(self, key):
        ...         left = jnp.int32(3)
        ...         return left, Timestep(left)
        ...
        ...     def step(self, state, action):
        ...         left = state - 1
        ...         return left, Timestep(left, reward=1.0, terminated=left <= 0)
        >>> JaxEnv(Countdown()).rollout(10)["next", "observation"]
        tensor([2, 1, 0], dtype=torch.int32)
    """

    @property
    def action_space(self) -> SpaceTree:
        """A `Box`, a `Discrete`, a `MultiDiscrete`, or a dict or tuple of them; Gymnasium's are taken, too."""
        ...

    def reset(self, key: jax.Array, /) -> tuple[Any, Timestep]:
        """Start an episode drawn from ``key``."""
        ...

    def step(self, state: PyTree, action: PyTree, /) -> tuple[Any, Timestep]:
        """Advance by one action. Structure and shapes are those that `reset` returned."""
        ...


class ModelledEnv(StatelessEnv, Protocol):
    """An environment that can be stepped with another physical model: masses, frictions, parameters.

    It is what domain randomisation asks for, see `Randomization`.

    It may also have a ``model_argument``: the model, where programs are to take it as an argument at every call. Then
    another one of the same structure compiles nothing again. None or left out, it is a constant of theirs.
    ``model_name`` is what a row's own model is called in its state, "model" where it is left out.
    """

    @property
    def model(self) -> PyTree:
        """The model it steps with, any pytree of numbers and arrays."""
        ...

    def with_model(self, model: PyTree) -> Self:
        """Return the same environment with ``model``, whose leaves may be traced; this one stays as it is."""
        ...


@dataclass(frozen=True)
class EnvWrapper:
    """Base of envkit's wrappers: an environment that contains another, of the same spaces and model."""

    env: Any

    @property
    def action_space(self) -> SpaceTree:
        return as_space(self.env.action_space)

    @property
    def observation_space(self) -> SpaceTree:
        return getattr(self.env, "observation_space", None)

    @property
    def reward_shape(self) -> RewardShape:
        return reward_shape_of(self.env)

    @property
    def action_masks(self) -> tuple[tuple[Path, Path], ...]:
        return action_masks_of(self.env)

    @property
    def groups(self) -> Mapping[str, int]:
        return groups_of(self.env)

    @property
    def model(self) -> PyTree:
        return self.env.model

    @property
    def model_argument(self) -> PyTree:
        return getattr(self.env, "model_argument", None)

    @property
    def model_name(self) -> str:
        return getattr(self.env, "model_name", "model")

    def with_model(self, model: PyTree) -> Self:
        """Return the same wrapper around the env with ``model``."""
        return replace(self, env=self.env.with_model(model))


@dataclass(frozen=True)
class WrapperState(Generic[S]):
    """Base of the states of envkit's wrappers.

    ``inner`` is transparent when leaves are named: the fields of a wrapper are beside those of
    the environment it wraps (see `StatePacking`).
    """

    inner: S


def outcome_of(outcome: Any, method: str) -> tuple[Any, Timestep]:
    """Check that what a ``reset`` or ``step`` returned is a state and a `Timestep`.

    Raises:
        StateStructureError: it is something else.
    """
    is_pair = isinstance(outcome, tuple) and len(outcome) == 2
    if is_pair and hasattr(outcome[1], "observation"):
        return outcome
    kind = type(outcome).__name__
    if isinstance(outcome, tuple):
        kind = f"a tuple of {', '.join(type(part).__name__ for part in outcome)}"
    raise StateStructureError(
        f"{method} of the environment returned {kind}, but must return two things, its state and a Timestep. "
        "Return (state, Timestep(observation, reward, terminated, truncated)), from envkit.functional."
    )


def choose_rows(mask: jax.Array, fresh: PyTree, kept: PyTree) -> PyTree:
    """Take the rows of ``mask`` from one tree and the others from another of the same form, see `rules.choose`."""
    return jax.tree.map(lambda new, old: rules.choose(mask, new, old), fresh, kept)


def done_of(timestep: Timestep) -> jax.Array:
    """Return whether the episode is over for any reason, bool of the shape of ``terminated``."""
    return rules.done_from(timestep.terminated, timestep.truncated)


def reward_shape_of(env: object) -> RewardShape:
    """Return the shape of the rewards of an env, () if it declares none."""
    shape = getattr(env, "reward_shape", ())
    return shape if isinstance(shape, Mapping) else tuple(shape)


def action_masks_of(env: object) -> tuple[tuple[Path, Path], ...]:
    """Return the actions of an env that have a mask, each with the path of that mask; none if it declares none."""
    return tuple(getattr(env, "action_masks", ()))


def groups_of(env: object) -> Mapping[str, int]:
    """Return the number of agents in each group of an env; empty where it has none."""
    return getattr(env, "groups", {})


def normalize(timestep: Timestep, reward_shape: RewardShape = ()) -> Timestep:
    """Cast every field of one environment's ``timestep`` to its fixed dtype and shape.

    A reward that is a single number counts for every component, and for every name.

    Raises:
        StateStructureError: terminated or truncated is not a scalar (one element counts), or the reward is
            neither that nor of shape ``reward_shape``.
    """
    return replace(
        timestep,
        observation=jax.tree.map(strong, timestep.observation),
        reward=_reward(timestep.reward, reward_shape),
        terminated=_scalar(timestep.terminated, jnp.bool_, "terminated"),
        truncated=_scalar(timestep.truncated, jnp.bool_, "truncated"),
        info=jax.tree.map(strong, timestep.info),
    )


def in_form_of_reset(
    outcome: tuple[S, Timestep], reward_shape: RewardShape = ()
) -> tuple[S, Timestep]:
    """Return what a reset of one environment gave, as arrays of fixed dtypes: the form that steps must keep."""
    state, timestep = outcome_of(outcome, "reset")
    return jax.tree.map(strong, state), normalize(timestep, reward_shape)


def in_form_of_step(
    outcome: tuple[S, Timestep], like: tuple[S, Timestep], reward_shape: RewardShape = ()
) -> tuple[S, Timestep]:
    """Return what a step of one environment gave in the form of its reset.

    Args:
        outcome: the state and the timestep.
        like: shapes and dtypes of what `in_form_of_reset` gave.
        reward_shape: as the environment declares it.

    Raises:
        StateStructureError: state or timestep differ from those of the reset in structure or shape.
    """
    state, timestep = outcome_of(outcome, "step")
    return (
        conform(state, like[0], what="state"),
        conform(normalize(timestep, reward_shape), like[1], what="timestep"),
    )


def _reward(value: PyTree, shape: RewardShape) -> PyTree:
    if isinstance(shape, Mapping):
        return _named_rewards(value, shape)
    array = jnp.asarray(value)
    if not shape:
        return _scalar(array, jnp.float32, "reward")
    if array.ndim and array.shape != shape:
        raise StateStructureError(
            f"reward has shape {array.shape}, but the environment declares reward_shape={shape}. Return "
            "that, or one number for all components."
        )
    return jnp.broadcast_to(strong(array), shape).astype(jnp.float32)


def _named_rewards(value: PyTree, shapes: Mapping[str, RewardShape]) -> dict[str, Any]:
    rewards = value if isinstance(value, Mapping) else dict.fromkeys(shapes, value)
    if set(rewards) != set(shapes):
        raise StateStructureError(
            f"the rewards are {sorted(rewards)}, but the environment declares reward_shape={dict(shapes)}. Return "
            "one for each of its names, or one number for all."
        )
    return {name: _reward(rewards[name], shape) for name, shape in shapes.items()}


def _scalar(value: ArrayLike, dtype: DTypeLike, name: str) -> jax.Array:
    array = jnp.asarray(value)
    if array.size != 1:
        raise StateStructureError(
            f"{name} has shape {array.shape}, but one environment has one {name}. Write reset and "
            "step for a single environment and return a scalar; envkit adds the batch."
            f"{_SEVERAL if name == 'reward' else ''}"
        )
    return strong(array.reshape(())).astype(dtype)


_SEVERAL = " An env whose rewards have k components says so: reward_shape = (k,)."
