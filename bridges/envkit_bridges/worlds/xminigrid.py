"""Grids of XLand-MiniGrid as stateless envs.

Conventions
    state    the library's ``State``; what its ``TimeStep`` has beside it is what a step shows.
    end      a step of type LAST is terminated where its discount is 0, else truncated: the library's time limit,
             ``params.max_steps``.
    params   sizes and limits, which programs are made for, and of XLand the ruleset: arrays, which programs take as an
             argument. A row keeps the ruleset of its episode in its state.
    ruleset  goal, production rules and objects of a task, ``xminigrid.types.RuleSet``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from envkit.errors import ArgumentError, ArgumentTypeError, OptionError, UnknownEnvError
from envkit.functional import Discrete, Timestep
from envkit.specs.annotations import Device
from envkit_bridges.jax.simulator import ParamsCore, ParamsEnv, ParamsOptions
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

if TYPE_CHECKING:
    from envkit.functional.structure import PyTree


@dataclass(frozen=True)
class XMiniGridCore(ParamsCore):
    """A grid as a `StatelessEnv`; its discount is its info."""

    limit_name = "max_steps"

    @staticmethod
    def require_bare(env: Simulator) -> None:
        """Check that something is an env object of the library, without wrappers that reset episodes.

        Raises:
            ArgumentTypeError, ArgumentError: see `ParamsCore.of`.
        """
        if not isinstance(env, require("xminigrid.environment").Environment):
            raise no_object_of(
                "an env object of XLand-MiniGrid, the first of what xminigrid.make gives",
                "XMiniGrid",
                env,
            )
        wrappers = require("xminigrid.wrappers")
        inside = env
        while isinstance(inside, wrappers.Wrapper):
            if isinstance(inside, wrappers.GymAutoResetWrapper | wrappers.DmEnvAutoResetWrapper):
                raise ArgumentError(
                    f"{type(inside).__name__} is a wrapper of XLand-MiniGrid that resets episodes itself. Pass the env "
                    "without it."
                )
            inside = inside._env

    @staticmethod
    def default_params(env: Simulator) -> PyTree:
        """Return what the library's method of that name gives."""
        return env.default_params()

    def space_of(self, params: PyTree) -> Discrete:
        """Count the library's actions."""
        return Discrete(self.env.num_actions(params))

    def reset(self, key: jax.Array) -> tuple[Any, Timestep]:
        """Reset by the library's ``reset``."""
        return _shown(self.env.reset(self.params, key))

    def step(self, state: PyTree, action: jax.Array) -> tuple[Any, Timestep]:
        """Step by the library's ``step``."""
        return _shown(self.env.step(self.params, _moment_of(state), action))

    def render(self, states: Sequence[Any]) -> list[np.ndarray]:
        """Draw the whole grid by the library's own renderer; what the agent sees is lighter.

        Raises:
            ArgumentError: ``params.render_mode`` asks for text.
        """
        if self.params.render_mode != "rgb_array":
            raise ArgumentError(
                f"params.render_mode is {self.params.render_mode!r}; expected 'rgb_array', which gives pictures. Pass "
                "env_params=env.params.replace(render_mode='rgb_array')."
            )
        return [self.env.render(self.params, _moment_of(state)) for state in states]


def _moment_of(state: PyTree) -> PyTree:
    """Put a state where the library's ``step`` reads it."""
    types = require("xminigrid.types")
    return types.TimeStep(
        state=state,
        step_type=types.StepType.MID,
        reward=jnp.float32(0),
        discount=jnp.float32(1),
        observation=None,
    )


def _shown(moment: PyTree) -> tuple[Any, Timestep]:
    is_last, is_over = moment.last(), moment.discount == 0
    info = {"discount": moment.discount}
    ends = is_last & is_over, is_last & ~is_over
    return moment.state, Timestep(moment.observation, moment.reward, *ends, info)


class XMiniGridWrapper(ParamsEnv):
    """Give a grid of XLand-MiniGrid the TensorDict interface, for any batch size.

    Args:
        env: a ``xminigrid.environment.Environment``; those of its wrappers that change what is observed are fine.
        env_params: what it is stepped with; None takes ``env.default_params()``. Others of the same sizes can be
            assigned later as `params`.
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.jax.simulator.ParamsOptions`.

    Unknown public attributes are looked up on the env object.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env of the library, or ``env_params`` are not of its kind.
        ArgumentError: (a ValueError) it is a wrapper that resets episodes by itself.

    Example:
        >>> import xminigrid
        >>> from envkit import XMiniGridWrapper
        >>> bare, params = xminigrid.make("MiniGrid-Empty-5x5")
        >>> env = XMiniGridWrapper(bare, env_params=params, batch_size=[8])
        >>> env.observation_spec["observation"].shape
        torch.Size([8, 7, 7, 2])
    """

    libname = "xminigrid"
    core_type = XMiniGridCore


def env_names() -> list[str]:
    """List the registered envs, those that somebody else registered included."""
    return sorted(require_quietly("xminigrid").registered_environments())


class XMiniGridEnv(XMiniGridWrapper):
    """Make a grid of XLand-MiniGrid by name; see `XMiniGridWrapper`.

    Args:
        env_name: registered name, e.g. "MiniGrid-Empty-8x8" or "XLand-MiniGrid-R4-13x13".
        env_params: what it is stepped with; None takes those that the name stands for. Others of the same sizes can be
            assigned later as `params`.
        benchmark: rulesets of which every episode of a row draws one, a ``xminigrid.benchmarks.Benchmark`` or the name
            of one of the library's, e.g. "trivial-21k". The library fetches those that are not on this machine yet.
            For envs of XLand alone.
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.jax.simulator.ParamsOptions`.

    Raises:
        ArgumentError: (a ValueError) the library has no env or benchmark of that name, or the env has no rulesets.
        ArgumentTypeError: (a TypeError) ``benchmark`` is none.
        OptionError: (a TypeError) ``benchmark`` and ``randomize`` are both given.
        FetchError: (an OSError) the benchmark is not here and could not be had from the network.

    Example:
        >>> from envkit import XMiniGridEnv
        >>> env = XMiniGridEnv("MiniGrid-Empty-8x8", batch_size=[8])
        >>> env.observation_spec["observation"].shape, env.action_spec.shape
        (torch.Size([8, 7, 7, 2]), torch.Size([8, 6]))
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self,
        env_name: str,
        *,
        env_params: PyTree = None,
        benchmark: Any = None,
        device: Device | None = None,
        **options: Unpack[ParamsOptions],
    ):
        require_name("XLand-MiniGrid", env_name, env_names())
        self.env_name, self._maker = env_name, partial(_environment, env_name)
        if env_params is None:
            env_params = _library_env(env_name)[1]
        if benchmark is not None:
            env_params, options = _with_tasks(env_name, env_params, benchmark, options)
        super().__init__(self._maker(), env_params=env_params, device=device, **options)


def _with_tasks(
    env_name: str, params: PyTree, benchmark: Any, options: ParamsOptions
) -> tuple[Any, ParamsOptions]:
    """Return params with the first ruleset of a benchmark, and the options by which episodes draw theirs from it."""
    if not hasattr(params, "ruleset"):
        raise ArgumentError(
            f"benchmark is given, but {env_name!r} has a fixed task. Leave benchmark out, or make an env whose "
            "name begins with 'XLand'."
        )
    if options.get("randomize") is not None:
        raise OptionError(
            "benchmark and randomize both say how params are drawn. Pass one of them; your own function can call benchmark.sample_ruleset(key)."
        )
    tasks = _benchmark(benchmark)
    drawing = _Drawing(tasks, benchmark if isinstance(benchmark, str) else object())
    return params.replace(ruleset=tasks.get_ruleset(0)), {**options, "randomize": drawing}


@dataclass(frozen=True)
class _Drawing:
    """Draw a ruleset of a benchmark; those of one ``name`` are equal."""

    tasks: Any = field(compare=False)
    name: Hashable

    def __call__(self, key: jax.Array, params: PyTree) -> PyTree:
        return params.replace(ruleset=self.tasks.sample_ruleset(key))


def _benchmark(benchmark: Any) -> Any:
    library = require("xminigrid.benchmarks")
    if isinstance(benchmark, library.Benchmark):
        return benchmark
    if not isinstance(benchmark, str):
        raise ArgumentTypeError(
            f"benchmark is {benchmark!r}, of type {type(benchmark).__name__}, but must be a Benchmark of XLand-MiniGrid or the "
            f"name of one. Pass one of {', '.join(library.registered_benchmarks())}."
        )
    names = library.registered_benchmarks()
    if benchmark not in names:
        raise UnknownEnvError(
            f"XLand-MiniGrid has no benchmark called {benchmark!r}. Choose one of: {', '.join(names)}."
        )
    with fetched("XLand-MiniGrid", benchmark, names), quietly():
        return library.load_benchmark(benchmark)


def _library_env(name: str) -> tuple[Any, Any]:
    with quietly():
        return require("xminigrid").make(name)


def _environment(name: str) -> Simulator:
    return _library_env(name)[0]
