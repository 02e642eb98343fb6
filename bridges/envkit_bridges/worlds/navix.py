"""Grids of Navix as stateless envs.

Conventions
    state    the library's own, and the steps since the reset, which its time limit counts. The pictures of empty tiles
             that the library keeps in each state (12 kB for a grid of 8 x 8) stay only where the observation reads them.
    end      step type TERMINATION is terminated, TRUNCATION truncated: the library's time limit, ``max_steps``.
    events   what happened in a step, e.g. ``goal_reached``, is the info.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from envkit.arrays.integers import as_int
from envkit.errors import ArgumentError
from envkit.functional import Discrete, Timestep
from envkit.specs.annotations import Device
from envkit_bridges.jax.options import JaxOptions
from envkit_bridges.jax.simulator import NO_LIMIT, SimulatorCore, SimulatorEnv
from envkit_bridges.libraries import (
    EnvNames,
    Simulator,
    no_object_of,
    quietly,
    require,
    require_name,
    require_quietly,
)

if TYPE_CHECKING:
    from envkit.functional.structure import PyTree

_OF_SYMBOLS = (
    "none",
    "categorical",
    "categorical_first_person",
    "symbolic",
    "symbolic_first_person",
)
"""Functions of the library that observe a state without its pictures."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Moment:
    """A state of the library, and the steps since the reset, int32."""

    state: Any
    t: jax.Array


@dataclass(frozen=True)
class NavixCore(SimulatorCore):
    """A grid as a `StatelessEnv`; its events are its info."""

    def lasting(self, steps: int | None) -> Self:
        """Refuse a limit that is beyond the library's own."""
        current = int(self.env.max_steps)
        if steps is not None and steps <= current:
            return self
        raise ArgumentError(
            f"episode_length is {-1 if steps is None else steps}, but this env of Navix ends by itself after {current} steps. "
            f"Pass max_steps={NO_LIMIT if steps is None else steps} to NavixEnv or make."
        )

    @property
    def action_space(self) -> Discrete:
        """Count the functions of the library's action set."""
        return Discrete(len(self.env.action_set))

    def reset(self, key: jax.Array) -> tuple[Any, Timestep]:
        """Reset by the library's ``reset``."""
        return self._shown(self.env.reset(key))

    def step(self, state: PyTree, action: jax.Array) -> tuple[Any, Timestep]:
        """Step by the library's ``_step``: its ``step`` begins the next episode itself."""
        types = require("navix.environments.environment")
        before = types.Timestep(
            t=state.t,
            observation=None,
            action=action,
            reward=jnp.float32(0),
            step_type=types.StepType.TRANSITION,
            state=state.state,
        )
        return self._shown(self.env._step(before, action))

    def render(self, states: Sequence[Any]) -> list[np.ndarray]:
        """Draw the whole grid by the library's own tiles."""
        return [np.asarray(_picture(jax.tree.map(jnp.asarray, moment.state))) for moment in states]

    def _shown(self, moment: PyTree) -> tuple[Any, Timestep]:
        state = moment.state
        observations = require("navix.observations")
        if self.env.observation_fn in [getattr(observations, name) for name in _OF_SYMBOLS]:
            state = state.replace(cache=None)
        ends = moment.is_termination(), moment.is_truncation()
        events = {name: event.happened for name, event in vars(state.events).items()}
        timestep = Timestep(moment.observation, moment.reward, *ends, info=events)
        return _Moment(state, moment.t), timestep


@jax.jit
def _picture(state: PyTree) -> jax.Array:
    empty = require("navix.rendering.cache").RenderingCache.init(state.grid)
    return require("navix.observations").rgb(state.replace(cache=empty))


class NavixWrapper(SimulatorEnv):
    """A grid of Navix behind the TensorDict interface; batch-unlocked.

    Args:
        env: a ``navix.Environment``, e.g. what ``navix.make`` gives.
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.jax.options.JaxOptions`.

    Unknown public attributes are looked up on the env object.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env of the library.

    Example:
        >>> import navix
        >>> env = NavixWrapper(navix.make("Navix-Empty-5x5-v0"), batch_size=[2])
        >>> env.reset()["observation"].shape
        torch.Size([2, 5, 5, 3])
    """

    libname = "navix"

    def __init__(
        self, env: Simulator, *, device: Device | None = None, **options: Unpack[JaxOptions]
    ):
        if not isinstance(env, require_quietly("navix").Environment):
            raise no_object_of("an env object of Navix, which navix.make gives", "Navix", env)
        super().__init__(NavixCore(env, self._maker), device=device, **options)


def env_names() -> list[str]:
    """List the registered envs, those that somebody else registered included."""
    return sorted(require_quietly("navix").registry())


class NavixEnv(NavixWrapper):
    """A grid of Navix by name; see `NavixWrapper`.

    Args:
        env_name: registered name, e.g. "Navix-Empty-8x8-v0".
        max_steps: steps after which the library truncates an episode.
        observation_fn: name of a function of ``navix.observations``, e.g. "symbolic", "symbolic_first_person",
            "categorical" or "rgb"; None takes that of the env, which is "symbolic" for those of the library.
        device: of `NavixWrapper`.
        **options: see `envkit_bridges.jax.options.JaxOptions`.

    Raises:
        ArgumentError: (a ValueError) the library has no env or observation of that name.

    Example:
        >>> import navix
        >>> env = NavixEnv("Navix-Empty-5x5-v0", observation_fn="rgb", batch_size=[2])
        >>> env.reset()["observation"].shape
        torch.Size([2, 40, 40, 3])
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self,
        env_name: str,
        *,
        max_steps: int = 100,
        observation_fn: str | None = None,
        device: Device | None = None,
        **options: Unpack[JaxOptions],
    ):
        require_name("Navix", env_name, env_names())
        as_int(
            "max_steps", max_steps, least=1, meaning="the steps after which an episode is truncated"
        )
        self.env_name = env_name
        self._maker = partial(_environment, env_name, max_steps, observation_fn)
        super().__init__(self._maker(), device=device, **options)


def _environment(name: str, max_steps: int, observation_fn: str | None) -> Simulator:
    navix = require_quietly("navix")
    keywords: dict[str, Any] = {"max_steps": max_steps}
    if observation_fn is not None:
        choices = [*_OF_SYMBOLS, "rgb", "rgb_first_person"]
        if observation_fn not in choices:
            raise ArgumentError(
                f"observation_fn is {observation_fn!r}, but must be one of {', '.join(choices)}. For a function of your "
                "own, pass NavixWrapper(navix.make(..., observation_fn=..., observation_space=...))."
            )
        keywords["observation_fn"] = getattr(navix.observations, observation_fn)
    with quietly():
        return navix.make(name, **keywords)
