"""Environments that contain another environment.

Each wrapper is written for one environment: no batch axis and no ``vmap``. It owns its fields in
its own state, forwards explicitly, and mutates nothing.

Conventions
    limit, frames  counted in steps of the wrapped environment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from envkit import rules
from envkit.arrays.integers import as_int
from envkit.arrays.leaves import nest
from envkit.errors import KeyCollisionError
from envkit.functional.core import (
    EnvWrapper,
    Timestep,
    WrapperState,
    choose_rows,
    done_of,
    normalize,
    outcome_of,
)
from envkit.functional.spaces import sample_space
from envkit.functional.structure import PyTree, conform, name_of, strong

S = TypeVar("S")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TimeLimitState(WrapperState[S]):
    """``elapsed``: steps since the last reset, int32, shape ()."""

    elapsed: jax.Array


@dataclass(frozen=True)
class TimeLimit(EnvWrapper):
    """End every episode after ``limit`` steps by truncation, never by termination.

    Args:
        env: a `StatelessEnv`.
        limit: steps of an episode, at least 1; None counts the steps and ends nothing.

    Raises:
        ArgumentError: (a ValueError) ``limit`` is below 1.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from envkit import Discrete, TimeLimit, Timestep
        >>> class Endless:
        ...     action_space = Discrete(2)
        ...
        ...     def reset(self, key):
        ...         return jnp.int32(0), Timestep(jnp.int32(0))
        ...
        ...     def step(self, state, action):
        ...         return state + action, Timestep(state + action, reward=1.0)
        >>> env = TimeLimit(Endless(), limit=2)
        >>> state, timestep = env.reset(jax.random.key(0))
        >>> state, timestep = env.step(state, 1)
        >>> bool(timestep.truncated)
        False
        >>> state, timestep = env.step(state, 1)
        >>> bool(timestep.truncated)
        True
    """

    limit: int | None

    def __post_init__(self) -> None:
        if self.limit is not None:
            meaning = "the steps of an episode, or None for no limit"
            limit = as_int("limit of TimeLimit", self.limit, least=1, meaning=meaning)
            object.__setattr__(self, "limit", limit)

    def reset(self, key: jax.Array, /) -> tuple[TimeLimitState, Timestep]:
        """Start an episode with no step elapsed."""
        inner, timestep = outcome_of(self.env.reset(key), "reset")
        return TimeLimitState(inner, jnp.int32(0)), timestep

    def step(self, state: TimeLimitState, action: PyTree, /) -> tuple[TimeLimitState, Timestep]:
        """Advance, and truncate when the limit is reached."""
        inner, timestep = outcome_of(self.env.step(state.inner, action), "step")
        elapsed = state.elapsed + 1
        if self.limit is None:
            return TimeLimitState(inner, elapsed), timestep
        # An episode that ends by itself on its last step is terminated, not cut short.
        cut = (elapsed >= self.limit) & jnp.logical_not(timestep.terminated)
        truncated = jnp.logical_or(timestep.truncated, cut)
        return TimeLimitState(inner, elapsed), replace(timestep, truncated=truncated)


@dataclass(frozen=True)
class FrameSkip(EnvWrapper):
    """Repeat each action for ``frames`` steps, sum the rewards, and stop where the episode ends.

    It adds no state.

    Args:
        env: a `StatelessEnv`.
        frames: steps of ``env`` in one step, at least 1.

    Raises:
        ArgumentError: (a ValueError) ``frames`` is below 1.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from envkit import Discrete, FrameSkip, Timestep
        >>> class Endless:
        ...     action_space = Discrete(2)
        ...
        ...     def reset(self, key):
        ...         return jnp.int32(0), Timestep(jnp.int32(0))
        ...
        ...     def step(self, state, action):
        ...         return state + action, Timestep(state + action, reward=1.0)
        >>> env = FrameSkip(Endless(), frames=4)
        >>> state, timestep = env.reset(jax.random.key(0))
        >>> state, timestep = env.step(state, 1)
        >>> int(timestep.observation), float(timestep.reward)
        (4, 4.0)
    """

    frames: int

    def __post_init__(self) -> None:
        meaning = "action_repeat=1 for no repetition"
        frames = as_int("frames of FrameSkip", self.frames, least=1, meaning=meaning)
        object.__setattr__(self, "frames", frames)

    def reset(self, key: jax.Array, /) -> tuple[Any, Timestep]:
        """Start an episode; no frame is skipped."""
        return outcome_of(self.env.reset(key), "reset")

    def step(self, state: PyTree, action: PyTree, /) -> tuple[Any, Timestep]:
        """Advance by ``frames`` frames, or to the end of the episode if that comes first."""
        first = self._frame(state, action)
        template = jax.eval_shape(lambda: first)

        def advance(carry: tuple[Any, Timestep], _: None) -> tuple[tuple[Any, Timestep], None]:
            state, timestep = carry
            after, new = conform(self._frame(state, action), template, what="")
            over = done_of(timestep)
            paid = jax.tree.map(jnp.add, timestep.reward, new.reward)
            new = replace(new, reward=paid)
            return choose_rows(over, carry, (after, new)), None

        return jax.lax.scan(advance, first, None, length=self.frames - 1)[0]

    def _frame(self, state: PyTree, action: PyTree) -> tuple[Any, Timestep]:
        state, timestep = outcome_of(self.env.step(state, action), "step")
        return jax.tree.map(strong, state), normalize(timestep, self.reward_shape)


@dataclass(frozen=True)
class GroupEnds(EnvWrapper):
    """Show which agents have ended, of an env with ``groups``: an agent's episode ends with the game at the latest.

    The env observes below each group ``terminated`` and ``truncated`` of its agents, bool (agents, 1); those that it
    leaves out are not set. They come out beside ``done``: set too for agents that live when the game ends, in the way
    in which the game does. ``mask``, where the env observes it, becomes True for agents that go on.
    """

    def reset(self, key: jax.Array, /) -> tuple[Any, Timestep]:
        """Start an episode."""
        state, timestep = outcome_of(self.env.reset(key), "reset")
        return state, self._shown(timestep)

    def step(self, state: PyTree, action: PyTree, /) -> tuple[Any, Timestep]:
        """Advance."""
        state, timestep = outcome_of(self.env.step(state, action), "step")
        return state, self._shown(timestep)

    def _shown(self, timestep: Timestep) -> Timestep:
        observed = dict(timestep.observation)
        for group, agents in self.groups.items():
            entries = dict(observed[group])
            terminated, truncated = (
                jnp.broadcast_to(jnp.asarray(entries.get(flag, False), bool), (agents, 1))
                for flag in ("terminated", "truncated")
            )
            living = ~(terminated | truncated)
            over = jnp.asarray(timestep.terminated, bool).reshape(())
            terminated |= living & over
            truncated |= living & ~over & jnp.asarray(timestep.truncated, bool).reshape(())
            done = rules.done_from(terminated, truncated)
            entries |= {"done": done, "terminated": terminated, "truncated": truncated}
            if "mask" in entries:
                entries["mask"] = ~done[:, 0]
            observed[group] = entries
        return replace(timestep, observation=observed)


@dataclass(frozen=True)
class Metrics(EnvWrapper):
    """Show what the env gives as ``Timestep.info`` among the observations, as "metrics".

    The observation becomes a dict by name; a bare array is "observation" in it. Entries that only a step gives are zero
    after a reset.

    Raises:
        KeyCollisionError: while tracing, if there is an observation "metrics" already.
    """

    def reset(self, key: jax.Array, /) -> tuple[Any, Timestep]:
        """Start an episode; infos that reset does not give are zero."""
        state, timestep = outcome_of(self.env.reset(key), "reset")
        action = sample_space(self.action_space, jax.random.PRNGKey(0))
        # The state is an argument, so that a step that writes into its dicts writes into copies.
        stepped = jax.eval_shape(
            lambda state: jax.tree.map(
                strong, outcome_of(self.env.step(state, action), "step")[1].info
            ),
            state,
        )
        zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), stepped)
        return state, self._shown(replace(timestep, info={**zeros, **timestep.info}))

    def step(self, state: PyTree, action: PyTree, /) -> tuple[Any, Timestep]:
        """Advance."""
        state, timestep = outcome_of(self.env.step(state, action), "step")
        return state, self._shown(timestep)

    def _shown(self, timestep: Timestep) -> Timestep:
        paths = jax.tree_util.tree_flatten_with_path(timestep.observation)[0]
        observed = nest({name_of(path) or ("observation",): leaf for path, leaf in paths})
        if "metrics" in observed:
            raise KeyCollisionError(
                "the env observes 'metrics', and metrics=True shows what it reports under that name. Give that "
                "observation another name, or leave metrics out."
            )
        return replace(timestep, observation={**observed, "metrics": timestep.info}, info={})


@dataclass(frozen=True)
class WithoutInfo(EnvWrapper):
    """Leave out what the env gives as ``Timestep.info``."""

    def reset(self, key: jax.Array, /) -> tuple[Any, Timestep]:
        """Start an episode."""
        state, timestep = outcome_of(self.env.reset(key), "reset")
        return state, replace(timestep, info={})

    def step(self, state: PyTree, action: PyTree, /) -> tuple[Any, Timestep]:
        """Advance."""
        state, timestep = outcome_of(self.env.step(state, action), "step")
        return state, replace(timestep, info={})
