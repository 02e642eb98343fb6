"""Jumanji environments as stateless envs.

Conventions
    state   Jumanji's own, its PRNG key included. Steps draw from that key, so a stored state repeats itself.
    end     ``done`` is Jumanji's step type LAST. It is terminated where every discount is 0, else truncated:
            which of the two running out of time is, each env of the library decides by its discounts.
    agents  rewards and discounts of several agents keep their axis; the end of an episode is one flag.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from tensordict import TensorDict

from envkit.data.arguments import as_bool
from envkit.data.paths import tensordict_of
from envkit.errors import ArgumentError, SpecTypeError
from envkit.functional import Box, Discrete, MultiDiscrete, Timestep, name_of
from envkit.process_wide import no_warnings
from envkit.specs.annotations import Device
from envkit_bridges.dlpack import to_torch
from envkit_bridges.jax.fused_transforms import observation_leaves
from envkit_bridges.jax.options import JaxOptions
from envkit_bridges.jax.programs import Programs
from envkit_bridges.jax.simulator import NO_LIMIT, SimulatorCore, SimulatorEnv
from envkit_bridges.libraries import (
    EnvNames,
    Simulator,
    fetched,
    no_object_of,
    quietly,
    require,
    require_name,
)
from envkit_bridges.offscreen import in_memory

if TYPE_CHECKING:
    from envkit.functional.structure import PyTree


@dataclass(frozen=True)
class JumanjiCore(SimulatorCore):
    """A Jumanji env as a `StatelessEnv`; what it gives as extras, and its discounts, are infos."""

    def lasting(self, steps: int | None) -> Self:
        """Return the env made again with such a ``time_limit``, if it has one."""
        current = getattr(self.env, "time_limit", None)
        if current is None or (steps is not None and steps <= current):
            return self
        name = type(self.env.unwrapped).__name__
        if self.make is None:
            raise ArgumentError(
                f"episode_length is {-1 if steps is None else steps}, but {name} ends by itself after {current} steps. Make it "
                f"with time_limit={'2**31 - 1' if steps is None else steps}."
            )
        if steps is None and name == "MMST":
            raise ArgumentError(
                f"episode_length is -1, but {name} keeps an array with an entry for each step of its time limit. Pass the "
                "number of steps that an episode may have."
            )
        # one more, or a step that is to be truncated is terminated by the library
        limit: Any = {"time_limit": NO_LIMIT if steps is None else steps + 1}
        make = partial(self.make, **limit)
        return replace(self, env=make(), make=make)

    @property
    def action_space(self) -> Box | Discrete | MultiDiscrete:
        """The space of Jumanji's ``action_spec``."""
        return _space_of(self.env.action_spec)

    @property
    def reward_shape(self) -> tuple[int, ...]:
        """() of a single reward, ``(k,)`` of one for each of k agents."""
        return tuple(self.env.reward_spec.shape)

    def reset(self, key: jax.Array) -> tuple[Any, Timestep]:
        """Reset by Jumanji's own ``reset``."""
        with _known_warnings():
            state, timestep = self.env.reset(key)
        return state, _shown(timestep)

    def step(self, state: PyTree, action: jax.Array) -> tuple[Any, Timestep]:
        """Step by Jumanji's own ``step``."""
        with _known_warnings():
            state, timestep = self.env.step(state, action.astype(self.env.action_spec.dtype))
        return state, _shown(timestep)

    def render(self, states: Sequence[Any]) -> list[np.ndarray]:
        """Draw by Jumanji's own viewer, with matplotlib."""
        frames = []
        for state in states:
            with in_memory() as frame, quietly():
                self.env.render(jax.tree.map(jnp.asarray, state))
                frames.append(frame())
        return frames


def _known_warnings() -> AbstractContextManager[None]:
    """Suppress what JAX warns of when it traces some of Jumanji's envs, which cannot be changed here."""
    return no_warnings("scatter inputs have incompatible types", FutureWarning)


def _shown(timestep: PyTree) -> Timestep:
    is_last, is_over = timestep.last(), jnp.all(timestep.discount == 0)
    return Timestep(
        timestep.observation,
        timestep.reward,
        is_last & is_over,
        is_last & ~is_over,
        {"discount": timestep.discount, **(timestep.extras or {})},
    )


def _space_of(spec: Any) -> Box | Discrete | MultiDiscrete:
    """Return the space of an action spec.

    Raises:
        SpecTypeError: it describes no single array, or one without bounds.
    """
    specs = require("jumanji.specs")
    if isinstance(spec, specs.DiscreteArray):
        return Discrete(spec.num_values)
    if isinstance(spec, specs.MultiDiscreteArray) and len(spec.shape) == 1:
        return MultiDiscrete(tuple(spec.num_values.tolist()))
    if isinstance(spec, specs.BoundedArray):
        return Box(spec.minimum, spec.maximum, tuple(spec.shape), spec.dtype)
    raise SpecTypeError(
        f"the action of this env of Jumanji is {type(spec).__name__}, but JumanjiEnv takes discrete and bounded "
        "arrays. Wrap the env in one of jumanji.wrappers whose action is such an array."
    )


class JumanjiOptions(JaxOptions, total=False):
    """Keywords of Jumanji's envs, those of every env over JAX (`envkit_bridges.jax.options.JaxOptions`) included.

    Args:
        categorical_action_encoding: choices as integers, or one-hot.
        jit: compile what is run, see `JumanjiWrapper.jit`.
    """

    categorical_action_encoding: bool
    jit: bool


class JumanjiWrapper(SimulatorEnv):
    """Give an env object of Jumanji the TensorDict interface, for any batch size.

    Entries of the observation are under their names (``grid``, ``action_mask``, ...), nested as they are; an
    observation that is a single array is ``observation``. An action mask is data: random actions are uniform over
    all actions, as those of Jumanji's specs are, unless a transform applies it (`ActionMask`).

    Args:
        env: a `jumanji.env.Environment`; those of its wrappers that neither batch nor reset are fine.
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.worlds.jumanji.JumanjiOptions`.

    Unknown public attributes are looked up on the Jumanji env.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no Jumanji env.
        ArgumentError: it is a wrapper of Jumanji that batches or resets by itself.
        SpecTypeError: its action is no array of choices, nor a bounded one.

    Example:
        >>> import jumanji
        >>> from envkit import JumanjiWrapper
        >>> env = JumanjiWrapper(jumanji.make("Snake-v1"), batch_size=[8])
        >>> env.observation_spec["grid"].shape
        torch.Size([8, 12, 12, 5])
    """

    libname = "jumanji"

    def __init__(
        self, env: object, *, device: Device | None = None, **options: Unpack[JumanjiOptions]
    ):
        _require_bare(env)
        keywords: dict[str, Any] = {"categorical_action_encoding": True, **options}
        jit = as_bool("jit", keywords.pop("jit", True))
        super().__init__(JumanjiCore(env, self._maker), device=device, **keywords)
        self.jit = jit

    @property
    def jit(self) -> bool:
        """Whether what is run is compiled. If not, JAX computes operation by operation, which is slow, but shows
        errors where they arise; `unroll` and its fellows loop in Python then. Rounding may differ."""
        return self._engine.programs.compiled

    @jit.setter
    def jit(self, value: bool) -> None:
        if value != self.jit:
            before = self._engine.programs
            self._engine.programs = Programs(
                before.env, packed=before.packed, compiled=value, shards=before.shards
            )

    def read_state(self, state: object) -> TensorDict:
        """Return the leaves of a Jumanji state by name, of the env's batch size."""
        by_path = jax.tree_util.tree_flatten_with_path(state)[0]
        leaves = {name_of(path): to_torch(jnp.asarray(leaf)) for path, leaf in by_path}
        return tensordict_of(leaves, self.batch_size, self.device)

    def read_obs(self, observation: object) -> TensorDict:
        """Return the leaves of a Jumanji observation under the names that they have in the data."""
        leaves = observation_leaves(Timestep(jax.tree.map(jnp.asarray, observation)))
        return tensordict_of(to_torch(leaves), self.batch_size, self.device)


def _require_bare(env: object) -> None:
    kind = require("jumanji.env").Environment
    if not isinstance(env, kind):
        raise no_object_of("an env object of Jumanji", "Jumanji", env)
    wrappers = require("jumanji.wrappers")
    if isinstance(
        env, wrappers.VmapWrapper | wrappers.AutoResetWrapper | wrappers.VmapAutoResetWrapper
    ):
        raise ArgumentError(
            f"{type(env).__name__} is a wrapper of Jumanji that batches or resets episodes itself. Pass what it "
            "wraps: env.unwrapped."
        )


_FETCHING = frozenset(("Sokoban-v0",))


def env_names() -> list[str]:
    """List the registered envs, those that somebody else registered included."""
    return sorted(_import_jumanji().registered_environments())


def fetching_names() -> frozenset[str]:
    """List the envs that are made from the network: Sokoban's levels are a data set."""
    return _FETCHING


class JumanjiEnv(JumanjiWrapper):
    """Make an env of Jumanji by name; see `JumanjiWrapper` for its entries.

    Args:
        env_name: registered name, e.g. "Snake-v1".
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.worlds.jumanji.JumanjiOptions`.

    Raises:
        ArgumentError: (a ValueError) Jumanji has no env of that name.
        FetchError: it needs something from the network that could not be had.

    Example:
        >>> from envkit import JumanjiEnv
        >>> env = JumanjiEnv("Snake-v1", batch_size=[8])
        >>> env.observation_spec["grid"].shape, env.observation_spec["action_mask"].shape
        (torch.Size([8, 12, 12, 5]), torch.Size([8, 4]))
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self, env_name: str, *, device: Device | None = None, **options: Unpack[JumanjiOptions]
    ):
        require_name("Jumanji", env_name, env_names())
        self.env_name, self._maker = env_name, partial(_environment, env_name)
        super().__init__(self._maker(), device=device, **options)


def _import_jumanji() -> ModuleType:
    with quietly(), _no_notebook():
        return require("jumanji")


@contextlib.contextmanager
def _no_notebook() -> Iterator[None]:
    """Hide IPython, where Jumanji would change matplotlib's backend on import, to one that may not be installed."""
    names: Any = builtins
    shown = getattr(names, "__IPYTHON__", None)
    if shown is not None:
        del names.__IPYTHON__
    try:
        yield
    finally:
        if shown is not None:
            names.__IPYTHON__ = shown


def _environment(name: str, **kwargs: Any) -> Simulator:
    with fetched("Jumanji", name, _FETCHING), quietly():
        return _import_jumanji().make(name, **kwargs)
