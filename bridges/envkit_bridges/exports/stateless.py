"""Stateless envs as pure functions: one environment, for programs of the caller.

`to_stateless` decides what of an env over JAX is part of these functions: its library, its time limit and repeated
actions, and the transforms that run inside its programs. When an episode begins again, and how many there are, is up to
the caller's own ``jit``, ``vmap`` and ``scan``.

Conventions
    one     an environment without a batch axis.
    shown   observation entries that are neither state nor infos nor private memory of transforms, see `shown_spaces`.
    memory  what transforms read at the root of a step; it is part of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self, cast

import jax
import jax.numpy as jnp

from envkit.arrays.leaves import nest
from envkit.data.paths import Key, Path, as_key, as_path, info_names, leaf_paths
from envkit.env.base import EnvBase
from envkit.env.wrapper_hints import require_env
from envkit.errors import ArgumentError
from envkit.functional import Timestep, groups_of
from envkit.functional.core import (
    RewardShape,
    action_masks_of,
    in_form_of_reset,
    in_form_of_step,
    reward_shape_of,
)
from envkit.functional.spaces import SpaceTree
from envkit.functional.structure import PyTree, is_typed_key
from envkit.rules import DONE_LEAVES
from envkit.specs import Composite, TensorSpec
from envkit.transforms.core.fusable import FusableTransform
from envkit.transforms.core.transform import Transform
from envkit.transforms.core.transformed_env import TransformedEnv
from envkit_bridges.exports.shown_spaces import private_entries, shown_and_infos
from envkit_bridges.jax.fused_transforms import NamedRows, RowState
from envkit_bridges.jax.jax_env import JaxEnv

_REWARD: Path = ("reward",)


def to_stateless(
    env: EnvBase, *, info_keys: Iterable[Key] = (), whose: str = "to_stateless"
) -> PureEnv:
    """Return an env over JAX as two pure functions of one environment, for your own ``jit``, ``vmap`` and ``scan``.

    ``reset(key)`` and ``step(state, action)`` are those of a `StatelessEnv`. Time limits, repeated actions and transforms
    that run inside programs are part of them; their numbers are those of now. The batch size and the seed of ``env`` are
    not. A typed key is taken for its raw one, which libraries are given by ``env``, too.

    Args:
        env: a `JaxEnv`, e.g. ``make("gymnax/CartPole-v1")``, with or without transforms.
        info_keys: observation entries that are infos beside those of the env, with all below them.
        whose: name of the function that is called, for messages.

    Returns:
        The env. Its observation is the only entry that is shown, or a dict by name; its infos are `Timestep.info`. Its
        reward is a number, or a dict where the env has several. Choices are integers. An action that a mask does not allow
        does what the library does with it.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env.
        ArgumentError: (a ValueError) it is not stateless, or overrides how it steps; a transform does not run inside
            programs, or learns from all rows; or it keeps where episodes begin (``reset_mode``).
        MissingKeyError: (a KeyError) ``info_keys`` names what is no observation.

    Example:
        >>> import jax
        >>> from envkit import make, to_stateless
        >>> env = to_stateless(make("gymnax/CartPole-v1"))
        >>> def episode(key):
        ...     begin, key = jax.random.split(key)
        ...     def step(state, key):
        ...         state, timestep = env.step(state, env.action_space.sample(key))
        ...         return state, timestep.reward
        ...     return jax.lax.scan(step, env.reset(begin)[0], jax.random.split(key, 10))[1]
        >>> jax.jit(jax.vmap(episode))(jax.random.split(jax.random.key(0), 5)).shape
        (5, 10)
    """
    rows, transforms, constants = _over_jax(env, whose).program_parts()
    if learning := [type(one).__name__ for one in transforms if one.state()]:
        raise ArgumentError(
            f"{whose} shows one environment, but {', '.join(learning)} of this env learns from all rows together. Leave it "
            "out, and let the trainer normalise."
        )
    if rows.env.reset_mode != "fresh":
        raise ArgumentError(
            f"{whose} begins each episode from the key that it is given, but this env was made with reset_mode="
            f"{rows.env.reset_mode!r}. Make it with reset_mode='fresh'."
        )
    # with its own model, a row remembers what was drawn
    one = rows.env.env if rows.env.randomization is None else rows.env
    paths = [
        path for path in leaf_paths(env.full_observation_spec) if path not in private_entries(env)
    ]
    shown, infos = shown_and_infos(paths, env._facts.infos, info_keys)
    spec = env.single_full_observation_spec
    return PureEnv(
        _RowOfOne.of(one),
        tuple(transforms),
        tuple(constants),
        shown=tuple(shown),
        infos=info_names(infos),
        rewards={
            as_path(key): _shape_of(env.single_full_reward_spec[key]) for key in env.reward_keys
        },
        observation_specs=Composite({as_key(path): spec[as_key(path)] for path in shown}),
        source=env,
    )


def _shape_of(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a reward as a `StatelessEnv` declares it: () for a number."""
    return () if spec.shape == (1,) else tuple(spec.shape)


def _over_jax(env: EnvBase, whose: str) -> JaxEnv:
    """Find the env whose programs are all that a stateless env does, with its transforms.

    Raises:
        ArgumentTypeError, ArgumentError: see `to_stateless`.
    """
    require_env("env", env, "Pass envkit.make('gymnax/CartPole-v1'), for example.")
    inner = _innermost(env)
    if not isinstance(inner, JaxEnv):
        raise ArgumentError(
            f"{whose} takes stateless envs over JAX, but {type(inner).__name__} is no JaxEnv. Pass one, e.g. make('brax/ant')."
        )
    if not inner._steps_by_itself:
        raise ArgumentError(
            f"{whose} steps the env by its program, but {type(inner).__name__} overrides its step or its reset. Write "
            "them in JAX: JaxEnv(MyEnv())."
        )
    stepper = env if isinstance(env, JaxEnv) else env._fuse([])[0]
    if not isinstance(stepper, JaxEnv):
        raise ArgumentError(
            f"{whose} takes transforms that run inside the programs of the env, but {_told_outside(env)} do not. Leave them "
            "out (the guide to transforms lists which do; all before them must)."
        )
    return stepper


def _innermost(env: EnvBase) -> EnvBase:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def _told_outside(env: EnvBase) -> str:
    """Return the names of transforms that do not run inside programs; of all where it is not known which."""
    leaves: list[Transform] = []
    while isinstance(env, TransformedEnv):
        leaves = [*env.transform.flat(), *leaves]
        env = env.base_env
    outside = [leaf for leaf in leaves if not (isinstance(leaf, FusableTransform) and leaf.fuses)]
    return ", ".join(type(leaf).__name__ for leaf in outside or leaves)


@dataclass(frozen=True, eq=False)
class _RowOfOne:
    """An environment as a batch of one row, of which only what it shows has a batch axis.

    So it computes what it computes alone, to the last bit.
    """

    env: Any
    template: tuple[Any, Timestep]

    @classmethod
    def of(cls, env: Any) -> _RowOfOne:
        key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
        reset = jax.eval_shape(
            lambda key: in_form_of_reset(env.reset(key), reward_shape_of(env)), key
        )
        return cls(env, reset)

    def reset(self, key: jax.Array) -> tuple[Any, Timestep]:
        state, timestep = in_form_of_reset(self.env.reset(key), reward_shape_of(self.env))
        return state, _in_batch(timestep)

    def step(self, state: PyTree, action: PyTree) -> tuple[Any, Timestep]:
        outcome = self.env.step(state, action)
        state, timestep = in_form_of_step(outcome, self.template, reward_shape_of(self.env))
        return state, _in_batch(timestep)

    def with_model(self, model: PyTree) -> _RowOfOne:
        return replace(self, env=self.env.with_model(model))


@dataclass(frozen=True, eq=False)
class PureEnv:
    """A `StatelessEnv`; see `to_stateless`.

    Attributes:
        observation_specs: of what is shown, by name.
        source: the env that it was made of. Transforms ask it, and hold it weakly.
    """

    row: _RowOfOne
    transforms: Sequence[FusableTransform]
    constants: Sequence[Mapping[str, Any]]
    shown: Sequence[Path]
    infos: Mapping[Path, Path]
    rewards: Mapping[Path, tuple[int, ...]]
    observation_specs: Composite = field(repr=False)
    source: EnvBase = field(repr=False)

    @property
    def action_space(self) -> SpaceTree:
        """A space, or a dict of them; choices are integers."""
        return self.row.env.action_space

    @property
    def reward_shape(self) -> RewardShape:
        """The shape of the reward, or of several by name."""
        return self.rewards[_REWARD] if {*self.rewards} == {_REWARD} else nest(self.rewards)

    @property
    def groups(self) -> Mapping[str, int]:
        """The number of agents by group; empty where there are none."""
        return groups_of(self.row.env)

    @property
    def action_masks(self) -> tuple[tuple[Path, Path], ...]:
        """Actions with the observation that is their mask."""
        masks = action_masks_of(self.row.env)
        return tuple((action, mask) for action, mask in masks if mask in self.shown)

    def masks_in(self, timestep: Timestep) -> dict[Path, jax.Array]:
        """Return the masks of actions, by the path of the action: those that are observed, and those that are infos."""
        masks = {}
        for action, mask in action_masks_of(self.row.env):
            if mask in self.shown:
                masks[action] = part_at(timestep.observation, mask if len(self.shown) > 1 else ())
            elif mask in self.infos:
                masks[action] = part_at(timestep.info, self.infos[mask])
        return masks

    @property
    def model(self) -> PyTree:
        """The model that it steps with; see `ModelledEnv`."""
        return self.row.env.model

    @property
    def model_argument(self) -> PyTree:
        """The model where the library hands it over at each call, as gymnax's params; None where it does not."""
        return getattr(self.row.env, "model_argument", None)

    def with_model(self, model: PyTree) -> Self:
        """Return the same env with another model of the same structure, whose leaves may be traced."""
        return replace(self, row=self.row.with_model(model))

    def require_one_reward(self, whose: str) -> None:
        """Check that there is one number as reward, as other libraries have.

        Raises:
            ArgumentError: (a ValueError) there are several.
        """
        if self.reward_shape == ():
            return
        others = [as_key(path) for path in self.rewards if path != _REWARD]
        raise ArgumentError(
            f"{whose} knows one number as reward, but this env has {dict(self.rewards)}. Leave others out with "
            f"transforms=[ExcludeTransform({others[0]!r})], or join them with a transform."
            if others
            else f"{whose} takes one number as reward, but that of this env has shape {self.reward_shape}. Add its parts up "
            "with LineariseRewards."
        )

    @property
    def name(self) -> str:
        """The name of the env's class in its library."""
        env = self.row.env
        while hasattr(env, "env"):
            env = env.env
        return type(env).__name__

    @cached_property
    def observation_like(self) -> PyTree:
        """Shapes and dtypes of what is observed."""
        key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
        return jax.eval_shape(self.reset, key)[1].observation

    def reset(self, key: jax.Array, /) -> tuple[RowState, Timestep]:
        """Begin an episode drawn from ``key``."""
        raw = jax.random.key_data(key) if is_typed_key(key.dtype) else key
        expected = jax.eval_shape(lambda: jax.random.PRNGKey(0))
        if raw.shape != expected.shape:
            raise ArgumentError(
                f"key is {key.dtype} of shape {key.shape}; expected one key of JAX's default kind. Pass jax.random.key(0), for "
                "example, and several under jax.vmap."
            )
        return self._one(*self._rows.begun(*self.row.reset(raw)))

    def step(self, state: RowState, action: PyTree, /) -> tuple[RowState, Timestep]:
        """Advance by one action."""
        memory = _in_batch(state.memory)
        begun = self._rows.begin(state.inner, memory)
        return self._one(*self._rows.step(begun, action))

    @cached_property
    def _rows(self) -> NamedRows:
        return NamedRows(cast(Any, self.row), self.transforms, self.constants)

    def _one(self, state: RowState, moment: Timestep) -> tuple[RowState, Timestep]:
        """Take the batch axis off, and divide what is shown from infos."""
        leaves = {path: leaf[0] for path, leaf in moment.observation.items()}
        paid = {path: leaf[0] for path, leaf in moment.reward.items()}
        observed = {path: leaves[path] for path in [*self.shown, *self._flags_of_groups(leaves)]}
        rewards = {
            path: paid[path].reshape(shape) if paid else jnp.zeros(shape)  # a reset pays nothing
            for path, shape in self.rewards.items()
        }
        reward: Any = rewards[_REWARD] if {*rewards} == {_REWARD} else nest(rewards)
        timestep = Timestep(
            observed[self.shown[0]] if len(observed) == 1 else nest(observed),
            reward,
            moment.terminated[0],
            moment.truncated[0],
            nest({name: leaves[path] for path, name in self.infos.items()}),
        )
        memory = {path: leaf[0] for path, leaf in state.memory.items()}
        return RowState(state.inner, memory), timestep

    def _flags_of_groups(self, leaves: Mapping[Path, Any]) -> list[Path]:
        flags = [(group, flag) for group in self.groups for flag in DONE_LEAVES]
        return [path for path in flags if path in leaves]


def part_at(tree: PyTree, path: Path) -> Any:
    """Return the part of a tree of dicts at a path."""
    for name in path:
        tree = tree[name]
    return tree


def _in_batch(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)
