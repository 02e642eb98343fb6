"""gymnax environments as stateless envs.

Conventions
    step    the library's ``step_env``: its own ``step`` resets what has ended by itself, and is not used.
    end     ``terminated`` is what ``step_env`` says; ``truncated`` is ``is_truncated``, unless the episode has
            terminated in the same step. No second counter.
    params  the numbers of an env (`EnvParams`). Programs take them as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from envkit.errors import ArgumentError, SpecTypeError, UnsupportedError
from envkit.functional import Box, Discrete, Timestep
from envkit.specs.annotations import Device
from envkit_bridges.jax.simulator import DrawingState, ParamsCore, ParamsEnv, ParamsOptions
from envkit_bridges.libraries import (
    EnvNames,
    Simulator,
    fetched,
    no_object_of,
    quietly,
    require,
    require_name,
    require_quietly,
)
from envkit_bridges.offscreen import in_memory

if TYPE_CHECKING:
    from envkit.functional.spaces import SpaceTree
    from envkit.functional.structure import PyTree


@dataclass(frozen=True)
class GymnaxCore(ParamsCore):
    """A gymnax env as a `StatelessEnv`; what it gives as info are infos."""

    limit_name = "max_steps_in_episode"

    @staticmethod
    def require_bare(env: Simulator) -> None:
        """Check that something is an env object of gymnax, without the library's wrappers.

        Raises:
            ArgumentTypeError, ArgumentError: see `ParamsCore.of`.
        """
        kind = require("gymnax.environments.environment").Environment
        if isinstance(env, kind):
            return
        inner = getattr(env, "_env", None)
        if isinstance(inner, kind):
            raise ArgumentError(
                f"{type(env).__name__} is one of gymnax's wrappers, which step and reset by themselves. Pass the env "
                "that it wraps, and let transforms do what the wrapper does."
            )
        raise no_object_of(
            "an env object of gymnax, the first of what gymnax.make gives", "Gymnax", env
        )

    def space_of(self, params: PyTree) -> SpaceTree:
        """Read the library's action space."""
        return _space_of(self.env.action_space(params))

    def reset(self, key: jax.Array) -> tuple[DrawingState, Timestep]:
        """Reset by the library's ``reset_env``."""
        episode, draws = jax.random.split(key)
        observation, state = self.env.reset_env(episode, self.params)
        return DrawingState(state, draws, jnp.int32(0)), Timestep(observation)

    def step(self, state: DrawingState, action: jax.Array) -> tuple[DrawingState, Timestep]:
        """Step by the library's ``step_env``."""
        observation, inner, reward, terminated, info = self.env.step_env(
            state.key, state.inner, action, self.params
        )
        truncated = self.env.is_truncated(inner, self.params) & jnp.logical_not(terminated)
        return state.after(inner), Timestep(observation, reward, terminated, truncated, info)

    def render(self, states: Sequence[Any]) -> list[np.ndarray]:
        """Draw by gymnax's own visualizer, with matplotlib; classic control is drawn by Gymnasium and pygame.

        Raises:
            UnsupportedError: (a NotImplementedError) the visualizer does not know the env.
        """
        if self.env.name not in _DRAWN and not self.env.name.endswith("-MinAtar"):
            raise UnsupportedError(
                f"gymnax does not draw {self.env.name}; it draws those of MinAtar and {', '.join(_DRAWN)}. Plot "
                "what it observes instead."
            )
        frames = []
        for state in states:
            with in_memory() as frame, quietly():
                visualizer = require("gymnax.visualize.visualizer").Visualizer
                visualizer(self.env, self.params, [jax.tree.map(jnp.asarray, state)]).init()
                frames.append(frame())
        return frames


_DRAWN = (
    *("Acrobot-v1", "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0"),
    *("Catch-bsuite", "Pong-misc", "PointRobot-misc", "MetaMaze-misc", "FourRooms-misc"),
)
"""Envs that the visualizer draws, apart from MinAtar; of others its figure would stay empty."""


def _space_of(space: Any) -> SpaceTree:
    """Return an action space of gymnax as one of ours; a dict of spaces by name.

    Raises:
        SpecTypeError: it is none of a box, a discrete one and a dict of these.
    """
    spaces = require("gymnax.environments.spaces")
    if isinstance(space, spaces.Discrete):
        return Discrete(space.n)
    if isinstance(space, spaces.Box):
        return Box(space.low, space.high, tuple(space.shape), space.dtype)
    if isinstance(space, spaces.Dict):
        return {name: _space_of(member) for name, member in space.spaces.items()}
    raise SpecTypeError(
        f"the action space of this env of gymnax is {type(space).__name__}, but GymnaxEnv takes Discrete, Box and "
        "Dict spaces. Have the env take one of these."
    )


class GymnaxWrapper(ParamsEnv):
    """Give an env object of gymnax the TensorDict interface, for any batch size.

    Args:
        env: an env of gymnax, without the library's wrappers.
        env_params: what it is stepped with; None takes ``env.default_params``. Can be assigned later as `params`.
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.jax.simulator.ParamsOptions`.

    Unknown public attributes are looked up on the gymnax env.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no gymnax env, or ``env_params`` are not of its kind.
        SpecTypeError: its action is none that an env over JAX takes.

    Example:
        >>> import gymnax
        >>> from envkit import GymnaxWrapper
        >>> bare, params = gymnax.make("CartPole-v1")
        >>> env = GymnaxWrapper(bare, env_params=params, batch_size=[8])
        >>> env.reset()["observation"].shape
        torch.Size([8, 4])
    """

    libname = "gymnax"
    core_type = GymnaxCore


_FETCHING = frozenset(("MNISTBandit-bsuite",))


def env_names() -> list[str]:
    """List the registered envs, those that somebody else registered included."""
    return sorted(require_quietly("gymnax").registered_envs)


def fetching_names() -> frozenset[str]:
    """List the envs that are made from the network: the bandit over MNIST."""
    return _FETCHING


class GymnaxEnv(GymnaxWrapper):
    """Make an env of gymnax by name; see `GymnaxWrapper`.

    Args:
        env_name: registered name, e.g. "CartPole-v1".
        env_params: what it is stepped with; None takes those of the library. Can be assigned later as `params`.
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.jax.simulator.ParamsOptions`.

    Raises:
        ArgumentError: (a ValueError) gymnax has no env of that name.
        FetchError: it needs something from the network that could not be had.

    Example:
        >>> from envkit import GymnaxEnv
        >>> env = GymnaxEnv("CartPole-v1", batch_size=[8])
        >>> env.reset()["observation"].shape, env.action_spec.shape
        (torch.Size([8, 4]), torch.Size([8, 2]))
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self,
        env_name: str,
        *,
        env_params: object = None,
        device: Device | None = None,
        **options: Unpack[ParamsOptions],
    ):
        require_name("gymnax", env_name, env_names())
        self.env_name, self._maker = env_name, partial(_environment, env_name)
        super().__init__(self._maker(), env_params=env_params, device=device, **options)


def _environment(name: str) -> Simulator:
    with fetched("gymnax", name, _FETCHING), quietly():
        return require("gymnax").make(name)[0]
