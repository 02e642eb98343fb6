"""Envs of JAX libraries behind the TensorDict interface: found by name, looked into, rebuilt in other processes.

What all such worlds have in common. A world adds how one of its envs resets and steps (a `SimulatorCore`), and
how the library makes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import jax

from envkit.env.wrapper_hints import called_here
from envkit.functional import Box, Timestep, WithoutInfo, WrapperState
from envkit.specs.annotations import Device
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.options import JaxOptions
from envkit_bridges.libraries import EnvNames, quietly, require_name

__all__ = [
    "DrawingState",
    "EnvNames",
    "ModelledCore",
    "SimulatorCore",
    "SimulatorEnv",
    "quietly",
    "require_name",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DrawingState(WrapperState[Any]):
    """A library's own state, and what the random numbers of its steps come from, where the library takes a key a step.

    ``draws``: raw PRNG key of the episode. ``moves``: steps taken, int32; that of step i is drawn from both. So XLA
    drops the draw where an env ignores it.
    """

    draws: jax.Array
    moves: jax.Array

    @property
    def key(self) -> jax.Array:
        """The key of the next step."""
        return jax.random.fold_in(self.draws, self.moves)

    def after(self, inner: Any) -> DrawingState:
        """Give the state one step later."""
        return DrawingState(inner, self.draws, self.moves + 1)


@dataclass(frozen=True)
class SimulatorCore:
    """Base of the `StatelessEnv` around an env object of a library.

    ``make`` makes the object again: most can be built, but not pickled.
    """

    env: Any
    make: Callable[[], Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # nothing in it ever changes

    def __reduce__(self) -> tuple[Any, ...]:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.make is not None:
            del given["env"]
        return _core_of, (type(self), given)


def _core_of(kind: type[SimulatorCore], given: dict[str, Any]) -> SimulatorCore:
    """Build what another process pickled."""
    return kind(**given) if "env" in given else kind(given["make"](), **given)


@dataclass(frozen=True)
class ModelledCore(SimulatorCore):
    """Core of an env object of Brax's interface, which keeps the model it steps with in an attribute.

    ``other``: the model that it is reset and stepped with in place of that one.
    """

    other: Any = None
    attribute: ClassVar[str]

    @property
    def model(self) -> Any:
        """The model that it steps with."""
        return getattr(self.env, self.attribute) if self.other is None else self.other

    def with_model(self, model: object) -> Self:
        """Step the same env object with ``model``."""
        return dataclasses.replace(self, other=model)

    @contextlib.contextmanager
    def modelled(self) -> Iterator[Any]:
        """Give the env object with the model in its place, as the libraries' own wrappers put it, and put it back.

        A copy of the object would not do: its own methods, kept in attributes, would read the original.
        """
        if self.other is None:
            yield self.env
            return
        with _PUTTING:
            own = getattr(self.env, self.attribute)
            setattr(self.env, self.attribute, self.other)
            try:
                yield self.env
            finally:
                setattr(self.env, self.attribute, own)

    @property
    def action_space(self) -> Box:
        """Actions between -1 and 1."""
        return Box(-1.0, 1.0, (self.env.action_size,))

    def reset(self, key: jax.Array) -> tuple[Any, Timestep]:
        """Reset the env object; its metrics are the info."""
        with self.modelled() as env:
            state = env.reset(key)
        return state, Timestep(state.obs, info=dict(state.metrics))

    def step(self, state: Any, action: jax.Array) -> tuple[Any, Timestep]:
        """Step the env object; ``done`` ends an episode for good."""
        with self.modelled() as env:
            state = env.step(state, action)
        info = dict(state.metrics)
        return state, Timestep(state.obs, state.reward, state.done > 0.5, info=info)


_PUTTING = threading.RLock()


class SimulatorEnv(JaxEnv):
    """An env object of a library as a `JaxEnv`; unknown public attributes are looked up on the object.

    Args:
        core: how it resets and steps.
        device, **options: of `JaxEnv`.

    Attributes:
        env_name: what it was made by, if by name; with the keywords that were given to the library.
    """

    libname: ClassVar[str]
    env_name: str | None = None
    _made_with: Mapping[str, Any] = {}

    def __init__(
        self, core: SimulatorCore, *, device: Device | None = None, **options: Unpack[JaxOptions]
    ):
        self._core = core
        env: Any = core if options.get("metrics") else WithoutInfo(core)
        super().__init__(env, device=device, **options)

    @property
    def _env(self) -> Any:
        return self._core.env

    def _told_first(self) -> list[str]:
        if self.env_name is None:
            return super()._told_first()
        return [
            repr(self.env_name),
            *(f"{key}={value!r}" for key, value in self._made_with.items()),
        ]

    if not TYPE_CHECKING:  # a misspelt name would pass

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                core = vars(self).get("_core")
                if name.startswith("_") or core is None:
                    raise
            try:
                return getattr(core.env, name)
            except AttributeError as error:  # names a class that the user has never heard of
                raise AttributeError(  # without a full stop: Python puts the nearest name behind
                    f"neither {type(self).__name__} nor its simulator {type(core.env).__name__} has an "
                    f"attribute {name!r}{called_here(name)}"
                ) from error
