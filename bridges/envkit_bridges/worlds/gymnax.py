"""gymnax environments as stateless envs.

Conventions
    step    the library's ``step_env``: its own ``step`` resets what has ended by itself, and is not used.
    end     ``terminated`` is what ``step_env`` says; ``truncated`` is ``is_truncated``, unless the episode has
            terminated in the same step. No second counter.
    params  the numbers of an env (`EnvParams`). Programs take them as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Annotated, Any, ClassVar, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from envkit.data.arguments import as_bool
from envkit.data.keywords import Default
from envkit.errors import ArgumentError, ArgumentTypeError, SpecTypeError, UnsupportedError
from envkit.functional import Box, Discrete, Timestep
from envkit.specs.annotations import Device
from envkit_bridges.jax.options import JaxOptions
from envkit_bridges.jax.simulator import DrawingState, SimulatorCore, SimulatorEnv
from envkit_bridges.libraries import EnvNames, fetched, no_object_of, quietly, require, require_name
from envkit_bridges.offscreen import in_memory

__all__ = ["GymnaxCore", "GymnaxEnv", "GymnaxWrapper", "build", "env_names", "fetching_names"]


@dataclass(frozen=True)
class GymnaxCore(SimulatorCore):
    """A gymnax env as a `StatelessEnv`; what it gives as info are infos.

    ``params``: its model. ``action_space``: that of the params it was made with.
    """

    params: Any = None
    action_space: Any = None
    model_name: ClassVar[str] = "params"

    @property
    def model(self) -> Any:
        """The params it is stepped with."""
        return self.params

    @property
    def model_argument(self) -> Any:
        """The params: other ones compile nothing anew."""
        return self.params

    def with_model(self, model: Any) -> Self:
        """Give the same env with other params."""
        return replace(self, params=model)

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
"""What the visualizer draws, apart from MinAtar; of others its figure would stay empty."""


def _space_of(space: Any) -> Any:
    """Give an action space of gymnax as one of ours; a dict of spaces by name.

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


class GymnaxOptions(JaxOptions, total=False):
    """Keywords of gymnax's envs, those of every env over JAX (`envkit_bridges.jax.options.JaxOptions`) included.

    Args:
        params_per_row: put the params into the state of each row, as ("state", "params") where it is nested or
            unpacked. Each row is stepped with its own, and keeps them from episode to episode.
    """

    params_per_row: Annotated[bool, Default(False)]


class GymnaxWrapper(SimulatorEnv):
    """A gymnax env object behind the TensorDict interface; batch-unlocked.

    Args:
        env: an env of gymnax, without the library's wrappers.
        env_params: what it is stepped with; None takes ``env.default_params``. Can be assigned later as `params`.
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.worlds.gymnax.GymnaxOptions`.

    Unknown public attributes are looked up on the gymnax env.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no gymnax env, or ``env_params`` are not of its kind.
        SpecTypeError: its action is none that an env over JAX takes.
    """

    libname = "gymnax"
    _core: GymnaxCore

    def __init__(
        self,
        env: Any,
        *,
        env_params: Any = None,
        device: Device | None = None,
        _make: Callable[[], Any] | None = None,
        **options: Unpack[GymnaxOptions],
    ):
        _require_bare(env)
        given: dict[str, Any] = dict(options)
        if as_bool("params_per_row", given.pop("params_per_row", False)):
            given["randomize_at"] = given.get("randomize_at") or "construction"
            given["randomize"] = _of_every_leaf(given.get("randomize"))
        self._params = env.default_params
        if env_params is not None:
            _require_like(env_params, self._params, same_leaves=False)
            self._params = env_params
        space = _space_of(env.action_space(self._params))
        core = GymnaxCore(env, _make, self._params, space)
        super().__init__(core, device=device, **given)
        self._engine.settings.model = jax.tree.map(jnp.asarray, self._params)

    @property
    def params(self) -> Any:
        """What the env is stepped with.

        Others can be assigned, of the same structure; nothing is compiled anew. Rows with params of their own
        (``params_per_row``) keep them: assigned ones are for rows that begin without state.
        """
        return self._params

    @params.setter
    def params(self, params: object) -> None:
        _require_like(params, self._params, same_leaves=True)
        space = _space_of(self._env.action_space(params))
        if space != self._core.action_space:
            raise ArgumentError(
                f"the params would change the action space from {self._core.action_space} to {space}, which this "
                "env has declared. Make another env: GymnaxEnv(name, env_params=params)."
            )
        self._params = params
        self._engine.settings.model = jax.tree.map(jnp.asarray, params)


def _of_every_leaf(randomize: Callable[[jax.Array, Any], Any] | None) -> Callable[..., Any]:
    """Have rows keep every leaf of the params, also those that nobody draws."""

    def copied(key: jax.Array, params: object) -> Any:
        drawn = params if randomize is None else randomize(key, params)
        return jax.tree.map(jnp.copy, drawn)

    return copied


def _require_bare(env: object) -> None:
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


def _require_like(params: object, like: object, *, same_leaves: bool) -> None:
    """Check that params are those of an env; ``same_leaves``: in their shapes too.

    Raises:
        ArgumentTypeError: they are not.
    """
    given, wanted = jax.tree.structure(params), jax.tree.structure(like)
    if given != wanted:
        raise ArgumentTypeError(
            f"params are {given}, but this env has {wanted}. Pass env.params.replace(...)."
        )
    if not same_leaves:
        return
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(like), strict=True
    ):
        one, two = jnp.asarray(leaf), jnp.asarray(other)
        if one.shape != two.shape or one.dtype != two.dtype:
            raise ArgumentTypeError(
                f"params{jax.tree_util.keystr(path)} is {one.dtype}{list(one.shape)}, but was {two.dtype}"
                f"{list(two.shape)}. Pass one of the same shape and dtype, or make another env."
            )


_FETCHING = frozenset(("MNISTBandit-bsuite",))


def env_names() -> list[str]:
    """List the registered envs, those that somebody else registered included."""
    return sorted(_import_gymnax().registered_envs)


def fetching_names() -> frozenset[str]:
    """Name the envs that are made from the network: the bandit over MNIST."""
    return _FETCHING


def build(name: str, **kwargs: Any) -> GymnaxEnv:
    """Build one env by its name; see `GymnaxEnv` for keywords and errors."""
    return GymnaxEnv(name, **kwargs)


class GymnaxEnv(GymnaxWrapper):
    """A gymnax env by name; see `GymnaxWrapper`.

    Args:
        env_name: registered name, e.g. "CartPole-v1".
        env_params, device: of `GymnaxWrapper`.
        **options: see `envkit_bridges.worlds.gymnax.GymnaxOptions`.

    Raises:
        ArgumentError: (a ValueError) gymnax has no env of that name.
        FetchError: it needs something from the network that could not be had.
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self,
        env_name: str,
        *,
        env_params: object = None,
        device: Device | None = None,
        **options: Unpack[GymnaxOptions],
    ):
        require_name("gymnax", env_name, env_names())
        make = partial(_environment, env_name)
        super().__init__(make(), env_params=env_params, device=device, _make=make, **options)
        self.env_name = env_name


def _import_gymnax() -> ModuleType:
    with quietly():
        return require("gymnax")


def _environment(name: str) -> Any:
    with fetched("gymnax", name, _FETCHING), quietly():
        return _import_gymnax().make(name)[0]
