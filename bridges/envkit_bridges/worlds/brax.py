"""Brax environments as stateless envs.

Conventions
    The simulator is Brax's bare env: no episode wrapper, no auto-reset. Its ``done`` is
    read as termination; time limits are envkit's and truncate.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, Literal, Unpack

import numpy as np

from envkit.data.keywords import refuse_unknown
from envkit.errors import ArgumentError, UnsupportedError
from envkit.functional import RandomizeAt, Randomizer, ResetMode
from envkit.process_wide import warn
from envkit.specs.annotations import BatchSize, Device
from envkit_bridges import offscreen
from envkit_bridges.jax.options import JaxOptions, ResetRows
from envkit_bridges.jax.rendering import require_drawable
from envkit_bridges.jax.simulator import ModelledCore, SimulatorEnv
from envkit_bridges.libraries import (
    EnvNames,
    Simulator,
    no_object_of,
    quietly,
    require,
    require_name,
)

_LENGTH = 1000
"""Steps of an episode where `build` is not told: the default of ``brax.envs.create``."""
BraxOption = float | str | tuple[Any, ...] | Mapping[str, Any] | Callable[..., Any] | None
"""What options of Brax's envs are. None is a list: a misspelt ``batch_size=[4]`` is found by type checkers."""


@dataclass(frozen=True)
class BraxCore(ModelledCore):
    """A bare Brax env as a `StatelessEnv`; its state is Brax's ``State``, its model Brax's ``System``."""

    attribute = "sys"

    def render(self, states: Sequence[Any], **options: Any) -> Sequence[np.ndarray]:
        """Draw by Brax's own ``render``, with MuJoCo: ``height``, ``width``, ``camera``.

        It draws the system that the env was made with: sizes that were drawn at random do not show.

        Raises:
            UnsupportedError: (a NotImplementedError) the env has no system, as "fast".
            OptionError, ArgumentTypeError, ArgumentError: see `require_drawable`.
        """
        if not hasattr(self.env, "sys"):
            raise UnsupportedError(
                f"Brax's {type(self.env).__name__} has no system of bodies that could be drawn."
            )
        require_drawable(type(self.env).__name__, self.env.render, self.env.sys.mj_model, options)
        offscreen.prepare()
        return self.env.render([state.pipeline_state for state in states], **options)


class BraxWrapper(SimulatorEnv):
    """Give an env object of Brax the TensorDict interface, for any batch size.

    Args:
        env: a bare `brax.envs.Env`, without Brax's training wrappers.
        device: where data and simulation are; without it and ``devices``, warns and takes the CPU.
        from_pixels: not supported.
        **options: see `envkit_bridges.jax.options.JaxOptions`.

    Unknown public attributes are looked up on the Brax env.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no Brax env.
        ArgumentError: it is one of Brax's own wrappers.

    Example:
        >>> import brax.envs
        >>> from envkit import BraxWrapper
        >>> bare = brax.envs.get_environment("inverted_pendulum")
        >>> env = BraxWrapper(bare, batch_size=[8], device="cpu")
        >>> env.observation_spec["observation"].shape
        torch.Size([8, 4])
    """

    libname = "brax"

    def __init__(
        self,
        env: object,
        *,
        device: Device | None = None,
        from_pixels: bool = False,
        **options: Unpack[JaxOptions],
    ):
        if from_pixels:
            raise UnsupportedError(
                "Brax envs give no pixels here. Draw stored states with env.render(td) instead."
            )
        if not hasattr(env, "action_size"):
            raise no_object_of("an env object of Brax", "Brax", env)
        if device is None and options.get("devices") is None:
            warn(
                "no device was given to a Brax env: torch data and JAX arrays stay on the CPU. "
                "Say device='cpu' (or 'cuda').",
            )
        if getattr(env, "unwrapped", env) is not env:
            raise ArgumentError(
                f"{type(env).__name__} is one of Brax's wrappers, which batch, limit or reset "
                "episodes themselves. Pass the bare env: env.unwrapped."
            )
        super().__init__(BraxCore(env, self._maker), device=device, **options)


def env_names() -> list[str]:
    """List the registered envs, those that somebody else registered included."""
    return sorted(import_brax()._envs)


def build(name: str, **kwargs: Any) -> BraxEnv:
    """Build one env by its name; see `BraxEnv` for keywords and errors.

    Episodes are truncated after 1000 steps, as those of ``brax.envs.create``, unless ``episode_length`` says otherwise.
    """
    return BraxEnv(name, **{"episode_length": _LENGTH, **kwargs})


class BraxEnv(BraxWrapper):
    """Make an env of Brax by name; see `BraxWrapper`. The model that ``randomize`` changes is ``env.sys``.

    Args:
        env_name: registered name, e.g. "ant".
        device: where data and simulation are; without it and ``devices``, warns and takes the CPU.
        batch_size, devices, requires_grad, episode_length, reset_mode, pool_size, reset_rows, cache_clear_frequency: see
            `envkit_bridges.jax.options.JaxOptions`.
        state_layout, categorical_action_encoding, metrics, action_repeat, randomize, randomize_at: see there.
        run_type_checks, allow_done_after_reset: see there.
        from_pixels: not supported.
        **brax_kwargs: go to Brax, e.g. ``backend="spring"``.

    Raises:
        ArgumentError: (a ValueError) Brax has no env of that name, or no such ``backend``.
        OptionError: (a TypeError) neither this class nor that env of Brax knows a keyword.

    Example:
        >>> from envkit import BraxEnv
        >>> env = BraxEnv("inverted_pendulum", batch_size=[8], device="cpu")
        >>> env.observation_spec["observation"].shape, env.action_spec.shape
        (torch.Size([8, 4]), torch.Size([8, 1]))
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self,
        env_name: str,
        *,
        batch_size: BatchSize | None = None,
        device: Device | None = None,
        devices: Sequence[Any] | None = None,
        requires_grad: bool = False,
        episode_length: int | None = None,
        reset_mode: ResetMode = "fresh",
        pool_size: int = 64,
        reset_rows: ResetRows = "done",
        cache_clear_frequency: int | bool = False,
        state_layout: Literal["packed", "nested"] = "packed",
        categorical_action_encoding: bool = False,
        metrics: bool = False,
        action_repeat: int = 1,
        randomize: Randomizer | None = None,
        randomize_at: RandomizeAt | None = None,
        from_pixels: bool = False,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
        **brax_kwargs: BraxOption,
    ):
        envs = import_brax()
        require_name("Brax", env_name, envs._envs)
        _refuse_unknown(envs._envs[env_name], brax_kwargs)
        if envs._envs[env_name].__module__.startswith("brax."):  # others have what they will
            _require_backend(env_name, brax_kwargs.get("backend"))
        self.env_name, self._made_with = env_name, brax_kwargs
        self._maker = partial(_environment, env_name, **brax_kwargs)
        super().__init__(
            self._maker(),
            batch_size=batch_size,
            device=device,
            devices=devices,
            from_pixels=from_pixels,
            requires_grad=requires_grad,
            episode_length=episode_length,
            reset_mode=reset_mode,
            pool_size=pool_size,
            reset_rows=reset_rows,
            cache_clear_frequency=cache_clear_frequency,
            state_layout=state_layout,
            categorical_action_encoding=categorical_action_encoding,
            metrics=metrics,
            action_repeat=action_repeat,
            randomize=randomize,
            randomize_at=randomize_at,
            run_type_checks=run_type_checks,
            allow_done_after_reset=allow_done_after_reset,
        )


def _refuse_unknown(kind: type, keywords: Mapping[str, Any]) -> None:
    """Check that an env of Brax takes some keywords; most accept any.

    An env that somebody else has registered decides for itself.

    Raises:
        OptionError: (a TypeError) neither it nor `BraxEnv` knows one of them.
    """
    if kind.__module__.partition(".")[0] != "brax":
        return
    parameters = _parameters(BraxEnv)
    for base in kind.__mro__:
        parameters |= {} if base is object else _parameters(base)
    names = [
        name
        for name, parameter in parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    refuse_unknown(f"BraxEnv of {kind.__name__}", keywords, names, meant=_BATCHES)


def _require_backend(env_name: str, backend: object) -> None:
    """Check that Brax has a physics of this name.

    Raises:
        ArgumentError: (a ValueError) it has not.
    """
    if backend not in (None, *_BACKENDS):
        raise ArgumentError(
            f"backend of {env_name!r} is {backend!r}, but in Brax it names the physics: "
            f"{', '.join(map(repr, _BACKENDS))}. Pass one of these, or leave it out; many rows need no pool, "
            "batch_size=[...] (num_envs of make) makes them."
        )


_BACKENDS = ("generalized", "mjx", "positional", "spring")
_BATCHES: dict[str, str] = dict.fromkeys(("num_envs", "num_workers", "n_envs"), "batch_size")


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    own = vars(kind).get("__init__")
    return {} if own is None else dict([*inspect.signature(own).parameters.items()][1:])


def import_brax() -> ModuleType:
    """Import `brax.envs` without the lines it prints about optional libraries."""
    with quietly():
        return require("brax.envs")


def _environment(name: str, **kwargs: Any) -> Simulator:
    with quietly():  # it warns of being little maintained
        return import_brax().get_environment(name, **kwargs)
