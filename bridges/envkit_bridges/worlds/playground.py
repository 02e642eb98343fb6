"""Environments of MuJoCo Playground as stateless envs.

Conventions
    The env is the library's bare one: none of its wrappers for training. Its ``done`` is read as termination; the
    time limit is the ``episode_length`` of its config, which envkit counts, and truncates.
    menagerie  the repository of robot models that envs of locomotion and manipulation are made from. The library
               clones it with git, into its own folder, when the first of them is built.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

import jax
import numpy as np

from envkit.data.arguments import require_option
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BrokenLibraryError,
    FetchError,
    UnsupportedError,
)
from envkit.functional import Randomizer
from envkit.process_wide import no_output, variables_kept, warn
from envkit.specs.annotations import Device
from envkit_bridges import offscreen
from envkit_bridges.jax.options import JaxOptions
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

if TYPE_CHECKING:
    from envkit.functional.structure import PyTree

_MENAGERIE_URL = "https://github.com/deepmind/mujoco_menagerie.git"
_REACHED_WITHIN_S = 30
_STALLED_AFTER_S = 60


@dataclass(frozen=True)
class PlaygroundCore(ModelledCore):
    """A bare env of MuJoCo Playground as a `StatelessEnv`; its state is the library's ``State``."""

    attribute = "_mjx_model"

    def render(self, states: Sequence[Any], **options: Any) -> Sequence[np.ndarray]:
        """Draw by the library's own ``render``: ``height``, ``width``, ``camera``, ``scene_option``.

        It draws the model that the env was made with: sizes that were drawn at random do not show.

        Raises:
            OptionError, ArgumentTypeError, ArgumentError: see `require_drawable`.
        """
        require_drawable(type(self.env).__name__, self.env.render, self.env.mj_model, options)
        offscreen.prepare()
        with no_output("stderr"):  # its progress bar
            return self.env.render(list(states), **options)


class PlaygroundWrapper(SimulatorEnv):
    """Give an env object of MuJoCo Playground the TensorDict interface, for any batch size.

    Args:
        env: a bare `mujoco_playground.MjxEnv`, without the library's wrappers for training.
        device: where data and simulation are; None takes the CPU.
        episode_length: truncate episodes after this many steps; left out, it is that of the env's config.
        **options: see `envkit_bridges.jax.options.JaxOptions`.

    The model that ``randomize`` is given is ``env.mjx_model``.

    Unknown public attributes are looked up on the env object.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env of Playground.
        ArgumentError: it is one of the library's own wrappers.

    Example:
        >>> from mujoco_playground import registry
        >>> from envkit import PlaygroundWrapper
        >>> bare = registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
        >>> env = PlaygroundWrapper(bare, batch_size=[8], device="cpu")
        >>> env.action_spec.shape
        torch.Size([8, 1])
    """

    libname = "mujoco_playground"

    def __init__(
        self, env: Simulator, *, device: Device | None = None, **options: Unpack[JaxOptions]
    ):
        if not isinstance(env, _library().MjxEnv):
            raise no_object_of("an env object of mujoco_playground", "Playground", env)
        if env.unwrapped is not env:
            raise ArgumentError(
                f"{type(env).__name__} is one of Playground's wrappers, which batch, limit or reset episodes "
                "themselves. Pass the bare env: env.unwrapped."
            )
        if "episode_length" not in options:
            options["episode_length"] = env._config.get("episode_length")
        super().__init__(PlaygroundCore(env, self._maker), device=device, **options)


def env_names() -> list[str]:
    """List the registered envs, those that somebody else registered included."""
    return sorted(_library().registry.ALL_ENVS)


def fetching_names() -> frozenset[str]:
    """List the envs that are made from the menagerie, while that is not here."""
    library = _library()
    if _menagerie().MENAGERIE_PATH.exists():
        return frozenset()
    return frozenset((*library.locomotion.ALL_ENVS, *library.manipulation.ALL_ENVS))


class PlaygroundEnv(PlaygroundWrapper):
    """Make an env of MuJoCo Playground by name; see `PlaygroundWrapper`.

    Args:
        env_name: registered name, e.g. "CartpoleBalance".
        config: a config of the library in place of the env's default; it is copied.
        config_overrides: values in that config, by dotted names, e.g. ``{"sim_dt": 0.005}``.
        impl: what computes the physics: "jax" (MJX), or "warp", the library's default, which builds kernels
            for a while and wants a GPU. It wins over that of ``config``.
        device: where data and simulation are; None takes the CPU.
        episode_length: truncate episodes after this many steps; left out, it is that of the config.
        **options: see `envkit_bridges.jax.options.JaxOptions`.

    Raises:
        UnknownEnvError: (a ValueError) Playground has no env of that name.
        ArgumentError: (a ValueError) the config has no such value.
        FetchError: (an OSError) the env is made from the menagerie, which could not be fetched.
        BrokenLibraryError: (an ImportError) the library itself fails to build the env with the mujoco installed.

    Example:
        >>> from envkit import PlaygroundEnv
        >>> env = PlaygroundEnv("CartpoleBalance", batch_size=[8], device="cpu")
        >>> env.observation_spec["observation"].shape, env.action_spec.shape
        (torch.Size([8, 5]), torch.Size([8, 1]))
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self,
        env_name: str,
        *,
        config: object = None,
        config_overrides: Mapping[str, Any] | None = None,
        impl: Literal["jax", "warp"] = "jax",
        device: Device | None = None,
        **options: Unpack[JaxOptions],
    ):
        require_name("MuJoCo Playground", env_name, env_names())
        chosen = _config(env_name, config, config_overrides, impl)
        self.env_name, self._maker = env_name, partial(_environment, env_name, chosen)
        self._made_with = {"impl": impl, **(config_overrides or {})}
        super().__init__(self._maker(), device=device, **options)

    @staticmethod
    def randomizer(env_name: str) -> Randomizer:
        """Return the library's own domain randomisation of an env, for ``randomize``.

        Raises:
            UnsupportedError: (a NotImplementedError) the library has none for it.
        """
        require_name("MuJoCo Playground", env_name, env_names())
        with quietly():
            theirs = _library().registry.get_domain_randomizer(env_name)
        if theirs is None:
            raise UnsupportedError(
                f"MuJoCo Playground has no domain randomisation for {env_name!r}. Write a function "
                "(key, model) -> model, e.g. model.replace(body_mass=...)."
            )
        return _Randomizer(theirs)


@dataclass(frozen=True)
class _Randomizer:
    """Draws one model by a function of the library, which draws a batch."""

    theirs: Callable[..., Any]

    def __call__(self, key: jax.Array, model: PyTree) -> PyTree:
        many, _ = self.theirs(model, key[None])
        return jax.tree.map(
            lambda leaf, original: (
                leaf if leaf is original or leaf.shape == original.shape else leaf[0]
            ),
            many,
            model,
        )


MujocoPlaygroundEnv = PlaygroundEnv
MujocoPlaygroundWrapper = PlaygroundWrapper


def _library() -> ModuleType:
    with quietly():
        return require("mujoco_playground")


def _menagerie() -> ModuleType:
    """The module of the library that knows where the menagerie is, and fetches it."""
    return require("mujoco_playground._src.mjx_env")


def _config(name: str, config_passed: Any, overrides: Mapping[str, Any] | None, impl: str) -> Any:
    require_option("impl", impl, ("jax", "warp"), fix="Leave it out for 'jax'.")
    config = (
        _library().registry.get_default_config(name) if config_passed is None else config_passed
    )
    if not hasattr(config, "copy_and_resolve_references"):
        raise ArgumentTypeError(
            f"config is {config!r}, of type {type(config).__name__}, but must be a ConfigDict, as "
            f"mujoco_playground.registry.get_default_config({name!r}) gives. Single values go to config_overrides."
        )
    config = config.copy_and_resolve_references()
    if "impl" in config:
        config.impl = impl
    try:
        config.lock().update_from_flattened_dict(dict(overrides or {}))
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"config_overrides={overrides!r} does not fit the config of {name!r}: {str(error)[:80]}... It has: "
            f"{', '.join(sorted(config.keys()))}; one inside another is called by a dotted name."
        ) from error
    return require("ml_collections").FrozenConfigDict(config)  # which can be compared


def _environment(name: str, config: Any) -> Simulator:
    if name in fetching_names():
        _require_menagerie(name)
    try:
        with quietly():
            return _library().registry.load(name, config=config.as_configdict())
    except AttributeError as error:
        raise BrokenLibraryError(
            f"MuJoCo Playground fails to build {name!r} with the mujoco that is installed: {error}. Install the "
            "version of mujoco that it was written for, or choose another env.",
            name="mujoco_playground",
        ) from error


def _require_menagerie(name: str) -> None:
    """Fetch the menagerie as the library does, and say so; not before it is known that it can be reached.

    Raises:
        FetchError: (an OSError) it cannot, or git is missing.
    """
    home = _menagerie()
    stalled = {
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_HTTP_LOW_SPEED_LIMIT": "1000",
        "GIT_HTTP_LOW_SPEED_TIME": str(_STALLED_AFTER_S),
    }
    with variables_kept(*stalled):
        os.environ.update(stalled)  # the library's clone would wait forever
        try:
            subprocess.run(
                ["git", "ls-remote", "--exit-code", _MENAGERIE_URL, "HEAD"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=_REACHED_WITHIN_S,
            )
            warn(
                f"{name!r} is made from robot models that are not here: cloning {_MENAGERIE_URL} (more than a "
                f"gigabyte) into {home.MENAGERIE_PATH}. This happens once.",
            )
            with no_output("stderr"), quietly():
                home.ensure_menagerie_exists()
        except (OSError, subprocess.SubprocessError) as error:
            free = sorted(set(env_names()) - fetching_names())
            raise FetchError(
                f"{name!r} is made from robot models that MuJoCo Playground clones from {_MENAGERIE_URL}, which "
                f"failed ({_reason_of(error)}). Where there is a network, clone it to {home.MENAGERIE_PATH} and check out "
                f"{home.MENAGERIE_COMMIT_SHA}. Envs that need none of it: {', '.join(free)}."
            ) from error


def _reason_of(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {error.timeout:.0f} s"
    stderr = getattr(error, "stderr", None) or b""
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else str(error)
