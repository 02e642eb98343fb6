"""Stateless envs through gymnax's interface.

Source of the protocol: gymnax.environments.environment.Environment, version 1.0, whose own ``step`` resets what has ended
and shows the last observation as ``info["final_observation"]``.

Conventions
    key     of a step: gymnax's ``step`` draws the next episode from it. A step of an env of envkit draws from its state.
    params  the model that the env is stepped with, where its library hands that over at each call, as gymnax does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from envkit.arrays.leaves import nest
from envkit.data.paths import Key, as_key, leaf_paths
from envkit.env.base import EnvBase
from envkit.functional import Box, Discrete, MultiDiscrete, Timestep
from envkit.functional.spaces import SpaceTree
from envkit.functional.structure import PyTree
from envkit.specs import Bounded, Categorical, Composite, TensorSpec
from envkit_bridges.exports.stateless import PureEnv, part_at, to_stateless
from envkit_bridges.libraries import quietly

with quietly():  # it warns of libraries that it imports
    from flax import struct
    from gymnax.environments import environment, spaces

NO_LIMIT = 2**31 - 1


def to_gymnax(env: EnvBase, *, info_keys: Iterable[Key] = ()) -> GymnaxView:
    """Show a stateless env as an environment of gymnax, for programs written for that library.

    It is a ``gymnax.environments.environment.Environment``: ``reset``, ``step``, ``reset_env``, ``step_env``, spaces and
    ``default_params``. Programs for gymnax before 1.0, whose ``step`` gives five values, take
    ``gymnax.wrappers.LegacyStepAPIWrapper(to_gymnax(env))``.

    Args:
        env: a `JaxEnv`, with or without transforms that run inside its programs; see `to_stateless`. It has one reward.
        info_keys: observation entries that are infos beside those of the env, with all below them.

    Params have an effect where the library of the env takes some at each step, as gymnax does. Of others,
    ``max_steps_in_episode`` shows the limit of the env: change it where the env is made.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env.
        ArgumentError: (a ValueError) it is not stateless, has several rewards, or see `to_stateless`.
        MissingKeyError: (a KeyError) ``info_keys`` names what is no observation.
        MissingLibraryError: (an ImportError) gymnax is not installed.

    Example:
        >>> import jax
        >>> from envkit import make, to_gymnax
        >>> env = to_gymnax(make("brax/fast"))
        >>> params = env.default_params
        >>> key = jax.random.key(0)
        >>> observation, state = env.reset(key, params)
        >>> action = env.action_space(params).sample(key)
        >>> observation, state, reward, terminated, truncated, info = env.step(
        ...     key, state, action, params
        ... )
        >>> observation.shape, reward.shape, bool(truncated)
        ((2,), (), False)
    """
    pure = to_stateless(env, info_keys=info_keys, whose="to_gymnax")
    pure.require_one_reward("to_gymnax")
    name = getattr(env, "env_name", None) or pure.name
    return GymnaxView(pure, name, getattr(env, "episode_length", None))


@struct.dataclass
class GymnaxState(environment.EnvState):
    """State of an env, what it shows, and how its last step has ended it; ``time``: steps of the episode."""

    env: Any
    observation: Any
    terminated: jax.Array
    truncated: jax.Array


class GymnaxView(environment.Environment):
    """A stateless env as one of gymnax; see `to_gymnax`.

    Attributes:
        pure: the env as pure functions.
    """

    def __init__(self, pure: PureEnv, name: str, limit: int | None):
        self.pure = pure
        self._name = name
        self._limit = limit

    def __repr__(self) -> str:
        return f"to_gymnax({self.name})"

    @property
    def name(self) -> str:
        """The name that the env was made by, or that of its class."""
        return self._name

    @property
    def default_params(self) -> Any:
        """The params of the library, where it has some; else the limit of steps alone, which is fixed."""
        model = self.pure.model_argument
        if model is not None:
            return model
        return environment.EnvParams(max_steps_in_episode=self._limit or NO_LIMIT)

    def _env_of(self, params: PyTree) -> PureEnv:
        is_model = params is not None and self.pure.model_argument is not None
        return self.pure.with_model(params) if is_model else self.pure

    def reset_env(self, key: jax.Array, params: Any) -> tuple[Any, GymnaxState]:
        """Begin an episode."""
        state, timestep = self._env_of(params).reset(key)
        return timestep.observation, _state(jnp.int32(0), state, timestep)

    def step_env(
        self, key: jax.Array, state: GymnaxState, action: PyTree, params: Any
    ) -> tuple[Any, GymnaxState, jax.Array, jax.Array, dict[Any, Any]]:
        """Advance by one action, and reset nothing; ``key`` is not used.

        Returns:
            Observation, state, reward, whether the episode is terminated, and infos.
        """
        inner, timestep = self._env_of(params).step(state.env, action)
        after = _state(jnp.asarray(state.time + 1), inner, timestep)
        return timestep.observation, after, timestep.reward, timestep.terminated, timestep.info

    def get_obs(self, state: GymnaxState, params: Any = None, key: jax.Array | None = None) -> Any:
        """Return the observation of a state, as `reset` or `step` gave it."""
        return state.observation

    def is_terminated(self, state: GymnaxState, params: Any) -> jax.Array:
        """Return whether the last step has terminated the episode."""
        return state.terminated

    def is_truncated(self, state: GymnaxState, params: Any) -> jax.Array:
        """Return whether the last step has truncated the episode."""
        return state.truncated

    @property
    def num_actions(self) -> int:
        """The number of options of a choice, of several choices together, or of numbers in an array."""
        sizes = [
            sum(space.nvec)
            if isinstance(space, MultiDiscrete)
            else space.n
            if isinstance(space, Discrete)
            else int(np.prod(space.shape))
            for space in jax.tree.leaves(self.pure.action_space, is_leaf=_is_space)
        ]
        return sum(sizes)

    def action_space(self, params: Any = None) -> Any:
        """Return the action space as one of gymnax."""
        return _space(self.pure.action_space)

    def observation_space(self, params: Any = None) -> Any:
        """Return the space of observations: of the only entry, or a Dict."""
        return _observed(self.pure.observation_like, self.pure.observation_specs)


def _state(time: jax.Array, state: PyTree, timestep: Timestep) -> GymnaxState:
    return GymnaxState(
        time=cast(int, time),
        env=state,
        observation=timestep.observation,
        terminated=timestep.terminated,
        truncated=timestep.truncated,
    )


def _is_space(node: object) -> bool:
    return hasattr(node, "sample")


class Choices(spaces.Space):
    """Several choices side by side, which gymnax has no space for.

    Args:
        space: entry i is from 0 to ``nvec[i] - 1``.
    """

    def __init__(self, space: MultiDiscrete):
        self.nvec, self.shape, self.dtype = np.array(space.nvec), space.shape, jnp.dtype(jnp.int32)
        self._space = space

    def sample(self, key: jax.Array) -> jax.Array:
        """Draw every choice by itself."""
        return self._space.sample(key)

    def contains(self, x: jax.Array) -> jax.Array:
        """Check whether each choice has such an option."""
        return jnp.all((x >= 0) & (x < self.nvec))


def _space(space: SpaceTree) -> Any:
    if isinstance(space, Mapping):
        return spaces.Dict({name: _space(member) for name, member in space.items()})
    if isinstance(space, tuple | list):
        return spaces.Tuple(tuple(_space(member) for member in space))
    if isinstance(space, MultiDiscrete):
        return Choices(space)
    if isinstance(space, Box):
        return spaces.Box(space.low, space.high, space.shape, space.dtype)
    return spaces.Discrete(space.n)


def _observed(like: PyTree, specs: Composite) -> Any:
    """Return the space of observations of this form, with the bounds that their specs say."""
    paths = leaf_paths(specs)
    leaves = [like] if len(paths) == 1 else [part_at(like, path) for path in paths]
    boxes = [
        spaces.Box(*_bounds(specs[as_key(path)], leaf.dtype), leaf.shape, leaf.dtype)
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    return boxes[0] if len(boxes) == 1 else _dict(nest(dict(zip(paths, boxes, strict=True))))


def _bounds(spec: TensorSpec, dtype: Any) -> tuple[Any, Any]:
    """Return the bounds of a spec that numbers of a dtype can have: JAX may count in fewer bits than the spec."""
    if isinstance(spec, Categorical):
        return 0, spec.n - 1
    if isinstance(spec, Bounded):
        low, high = spec.space.low.numpy(force=True), spec.space.high.numpy(force=True)
        if jnp.issubdtype(dtype, jnp.integer):
            least, greatest = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
            low, high = (np.clip(bound, least, greatest).astype(dtype) for bound in (low, high))
        return low, high
    return -np.inf, np.inf


def _dict(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return spaces.Dict({name: _dict(part) for name, part in tree.items()})
