"""Stateless envs through Brax's interface.

Source of the protocol: brax.envs.base.Env, version 0.14, and the wrappers that brax.training puts around it.

Conventions
    done    termination alone, as in Brax's own envs: Brax's ``EpisodeWrapper`` truncates, and overwrites "truncation".
    action  an array of numbers between -1 and 1, or scores: as policies of brax.training give it.
    scores  one for each option of a choice, of several choices one after the other; the highest is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envkit.data.paths import Key, Path
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError
from envkit.functional import Box, Discrete, MultiDiscrete, Timestep, name_of
from envkit.functional.spaces import SpaceTree
from envkit.functional.structure import PyTree
from envkit_bridges.exports.stateless import PureEnv, to_stateless
from envkit_bridges.libraries import quietly

with quietly():  # it warns of libraries that it imports
    from brax.envs.base import Env, State


def to_brax(env: EnvBase, *, info_keys: Iterable[Key] = ()) -> BraxView:
    """Show a stateless env as an environment of Brax, for brax.training and programs written for that library.

    It is a bare ``brax.envs.Env``: limits of episodes and the resets after them are those of Brax's training wrappers.
    ``State.done`` is 1 where the env has terminated. Its own time limit is ``info["truncation"]``, which Brax's wrapper
    overwrites: pass the same limit as ``episode_length`` of ``train``.

    Actions are arrays of numbers between -1 and 1. They are scaled to the bounds of a `Box`, if it has some. For a
    `Discrete` of n options, or several, they are n scores, of which the highest is chosen among the options that an
    action mask allows.

    Args:
        env: a `JaxEnv`, with or without transforms that run inside its programs; see `to_stateless`. It has one reward.
            brax.training asks for observations that are one array of one axis: transforms can make others so.
        info_keys: observation entries that are infos beside those of the env, with all below them.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env.
        ArgumentError: (a ValueError) it is not stateless, has several rewards, or see `to_stateless`.
        MissingKeyError: (a KeyError) ``info_keys`` names what is no observation.
        MissingLibraryError: (an ImportError) Brax is not installed.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from envkit import make, to_brax
        >>> env = to_brax(make("gymnax/CartPole-v1"))
        >>> env.observation_size, env.action_size
        (4, 2)
        >>> state = jax.jit(env.reset)(jax.random.key(0))
        >>> state = jax.jit(env.step)(state, jnp.array([0.1, 0.7]))
        >>> float(state.reward), float(state.done)
        (1.0, 0.0)
    """
    pure = to_stateless(env, info_keys=info_keys, whose="to_brax")
    pure.require_one_reward("to_brax")
    backend = getattr(env, "backend", None)
    return BraxView(pure, backend if isinstance(backend, str) else "envkit")


class BraxView(Env):
    """A stateless env as one of Brax; see `to_brax`.

    Attributes:
        pure: the env as pure functions.
    """

    def __init__(self, pure: PureEnv, backend: str):
        self.pure = pure
        self._backend = backend
        self._sizes = {
            name_of(path): _size(space, name_of(path))
            for path, space in jax.tree_util.tree_leaves_with_path(
                pure.action_space, is_leaf=_is_space
            )
        }

    def __repr__(self) -> str:
        return f"to_brax({self.pure.name})"

    def reset(self, rng: jax.Array) -> State:
        """Begin an episode drawn from ``rng``."""
        state, timestep = self.pure.reset(rng)
        zero = jnp.float32(0)
        pipeline_state: Any = (state, self.pure.masks_in(timestep))
        return State(pipeline_state, timestep.observation, zero, zero, {}, _infos(timestep))

    def step(self, state: State, action: jax.Array) -> State:
        """Advance by one action, and reset nothing."""
        inner, masks = state.pipeline_state  # type: ignore[misc] # what `reset` put there
        after, timestep = self.pure.step(inner, self.decode(action, masks))
        return state.replace(  # type: ignore[attr-defined] # of flax
            pipeline_state=(after, self.pure.masks_in(timestep)),
            obs=timestep.observation,
            reward=timestep.reward,
            done=timestep.terminated.astype(jnp.float32),
            info={**state.info, **_infos(timestep)},
        )

    def decode(self, action: jax.Array, masks: Mapping[Path, jax.Array] | None = None) -> PyTree:
        """Return an action of brax.training as the env takes it.

        Args:
            action: shape ``(action_size,)``.
            masks: of actions, by their path, one flag for each option.
        """
        ends = np.cumsum([*self._sizes.values()])[:-1]
        parts = dict(zip(self._sizes, jnp.split(action, ends), strict=True))

        def decoded(path: Any, space: SpaceTree) -> jax.Array:
            name = name_of(path)
            return _decoded(space, parts[name], (masks or {}).get(name))

        return jax.tree_util.tree_map_with_path(decoded, self.pure.action_space, is_leaf=_is_space)

    @property
    def observation_size(self) -> Any:
        """The size of an observation of one axis; the shapes of others, by name."""
        like = self.pure.observation_like
        if isinstance(like, Mapping):
            return jax.tree.map(lambda leaf: leaf.shape, like)
        return like.shape[-1] if like.shape else 1

    @property
    def action_size(self) -> int:
        """Numbers of an action, and scores of its choices."""
        return sum(self._sizes.values())

    @property
    def backend(self) -> str:
        """The physics backend of an env of Brax; "envkit" for others."""
        return self._backend


def _is_space(node: object) -> bool:
    return hasattr(node, "sample")


def _size(space: SpaceTree, path: Path) -> int:
    if isinstance(space, MultiDiscrete):
        return sum(space.nvec)
    if isinstance(space, Discrete):
        return space.n
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        return int(np.prod(space.low.shape))
    raise ArgumentError(
        f"the action {'.'.join(path) or 'space'} is {space}, but to_brax takes float Boxes, Discrete and MultiDiscrete "
        "actions. Have the env take one of these."
    )


def _decoded(space: SpaceTree, values: jax.Array, mask: jax.Array | None) -> jax.Array:
    if isinstance(space, Box):
        low, high = space.low, space.high
        is_bounded = np.isfinite(low) & np.isfinite(high)
        is_scaled = is_bounded & ((low != -1) | (high != 1))
        values = values.reshape(low.shape)
        if not is_scaled.any():  # of Brax's own envs: no bit changes
            return values.astype(space.dtype)
        low, high = np.where(is_bounded, low, -1), np.where(is_bounded, high, 1)
        scaled = jnp.clip(low + (values + 1) * (0.5 * high - 0.5 * low), low, high)
        return jnp.where(is_scaled, scaled, values).astype(space.dtype)
    scores = values if mask is None else jnp.where(mask.reshape(-1) != 0, values, -jnp.inf)
    if isinstance(space, Discrete):
        return jnp.argmax(scores).astype(space.dtype)
    parts = jnp.split(scores, np.cumsum(space.nvec)[:-1])
    return jnp.stack([jnp.argmax(part) for part in parts]).astype(space.dtype)


def _infos(timestep: Timestep) -> dict[str, Any]:
    ends = {"terminated": timestep.terminated, "truncated": timestep.truncated}
    truncation = jnp.asarray(timestep.truncated, jnp.float32)
    return {**timestep.info, **ends, "truncation": truncation}
