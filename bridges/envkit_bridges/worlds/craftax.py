"""Craftax and Craftax-Classic as stateless envs, observed as symbols or as pixels.

Conventions
    step    the library's ``step_env``: its own ``step`` resets what has ended, where the env does so at all, and is not
            used.
    end     ``done`` of ``step_env``. It is truncated where it comes of ``params.max_timesteps`` alone, else terminated.
    params  the numbers of an env, ``EnvParams``. Programs take them as an argument. Sizes of the map and numbers of mobs
            (``StaticEnvParams``) belong to the env object.
    infos   the achievements of an episode in its last step, 100 for each that was reached, under the library's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from envkit.arrays.integers import as_int
from envkit.errors import ArgumentError
from envkit.functional import Discrete, Timestep
from envkit.specs.annotations import Device
from envkit_bridges.jax.simulator import DrawingState, ParamsCore, ParamsEnv, ParamsOptions
from envkit_bridges.libraries import (
    EnvNames,
    Simulator,
    no_object_of,
    quietly,
    require,
    require_name,
)

if TYPE_CHECKING:
    from envkit.functional.structure import PyTree


@dataclass(frozen=True)
class CraftaxCore(ParamsCore):
    """A game of Craftax as a `StatelessEnv`; what it gives as info are infos."""

    limit_name = "max_timesteps"

    @staticmethod
    def require_bare(env: Simulator) -> None:
        """Check that something is an env object of Craftax.

        Raises:
            ArgumentTypeError, ArgumentError: see `ParamsCore.of`.
        """
        bases = require("craftax.environment_base.environment_bases")
        if not isinstance(env, bases.EnvironmentAutoReset | bases.EnvironmentNoAutoReset):
            raise no_object_of("an env object of Craftax", "Craftax", env)

    def space_of(self, params: PyTree) -> Discrete:
        """Count the library's actions."""
        return Discrete(self.env.action_space(params).n)

    def reset(self, key: jax.Array) -> tuple[DrawingState, Timestep]:
        """Reset by the library's ``reset_env``."""
        episode, draws = jax.random.split(key)
        observation, state = self.env.reset_env(episode, self.params)
        return DrawingState(state, draws, jnp.int32(0)), Timestep(observation)

    def step(self, state: DrawingState, action: jax.Array) -> tuple[DrawingState, Timestep]:
        """Step by the library's ``step_env``."""
        observation, inner, reward, done, info = self.env.step_env(
            state.key, state.inner, action, self.params
        )
        endless = self.params.replace(max_timesteps=inner.timestep + 1)
        terminated = self.env.is_terminal(inner, endless)
        ends = terminated, jnp.logical_and(done, jnp.logical_not(terminated))
        return state.after(inner), Timestep(observation, reward, *ends, info)

    def render(self, states: Sequence[Any], *, block_pixel_size: int = 16) -> list[np.ndarray]:
        """Draw what the player sees by the library's own renderer.

        Args:
            states: of one env.
            block_pixel_size: pixels of a block of the map, one of the sizes that the library has textures for: 16, 64,
                and that of its pixel observations (7 in Craftax-Classic, 10 in Craftax).

        Raises:
            ArgumentError: (a ValueError) there are no textures of that size.
        """
        folder = type(self.env).__module__.partition(".envs.")[0]  # of the game that it is of
        constants = require(f"{folder}.constants")
        with quietly():
            sizes = sorted(constants.load_all_textures())
        size = as_int(
            "block_pixel_size", block_pixel_size, least=1, meaning="the pixels of a block"
        )
        if size not in sizes:
            raise ArgumentError(
                f"block_pixel_size is {size}; expected one of {', '.join(map(str, sizes))}. Pass one of these."
            )
        draw = jax.jit(require(f"{folder}.renderer").make_craftax_pixel_renderer(size))
        frames = [np.asarray(draw(jax.tree.map(jnp.asarray, state))) for state in states]
        return [np.clip(frame, 0, 255).astype(np.uint8) for frame in frames]


class CraftaxWrapper(ParamsEnv):
    """Give a game of Craftax the TensorDict interface, for any batch size.

    Args:
        env: an env object of Craftax or Craftax-Classic, with or without auto-reset.
        env_params: what it is stepped with; None takes ``env.default_params``. Can be assigned later as `params`.
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.jax.simulator.ParamsOptions`.

    Unknown public attributes are looked up on the env object.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no game of Craftax, or ``env_params`` are not of its kind.

    Example:
        >>> from craftax.craftax_env import make_craftax_env_from_name
        >>> from envkit import CraftaxWrapper
        >>> bare = make_craftax_env_from_name(
        ...     "Craftax-Classic-Symbolic-v1", auto_reset=False
        ... )
        >>> env = CraftaxWrapper(bare, batch_size=[8])
        >>> env.observation_spec["observation"].shape
        torch.Size([8, 1345])
    """

    libname = "craftax"
    core_type = CraftaxCore


_NAMES = (
    *("Craftax-Classic-Pixels-v1", "Craftax-Classic-Symbolic-v1"),
    *("Craftax-Pixels-v1", "Craftax-Symbolic-v1"),
)


def env_names() -> list[str]:
    """List the games that the library makes by name."""
    require("craftax")
    return list(_NAMES)


class CraftaxEnv(CraftaxWrapper):
    """Make a game of Craftax by name; see `CraftaxWrapper`.

    Args:
        env_name: e.g. "Craftax-Classic-Symbolic-v1".
        env_params: what it is stepped with; None takes those of the library. Can be assigned later as `params`.
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.jax.simulator.ParamsOptions`.

    Raises:
        ArgumentError: (a ValueError) Craftax has no env of that name.

    Example:
        >>> from envkit import CraftaxEnv
        >>> env = CraftaxEnv("Craftax-Classic-Symbolic-v1", batch_size=[8])
        >>> env.observation_spec["observation"].shape, env.action_spec.shape
        (torch.Size([8, 1345]), torch.Size([8, 17]))
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self,
        env_name: str,
        *,
        env_params: PyTree = None,
        device: Device | None = None,
        **options: Unpack[ParamsOptions],
    ):
        require_name("Craftax", env_name, env_names())
        self.env_name, self._maker = env_name, partial(_environment, env_name)
        super().__init__(self._maker(), env_params=env_params, device=device, **options)


def _environment(name: str) -> Simulator:
    with quietly():
        return require("craftax.craftax_env").make_craftax_env_from_name(name, auto_reset=False)
