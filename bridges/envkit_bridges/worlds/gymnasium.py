"""Gymnasium's registered envs as a world: which can be made here, and one by its name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import util
from typing import Any

from envkit.data.keywords import known_to
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError
from envkit_bridges.gym.backend import gym_backend
from envkit_bridges.gym.gym_env import GymEnv
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.gym.torch_vector import TorchVectorWrapper
from envkit_bridges.libraries import near_name


def env_names() -> list[str]:
    """List the registered ids whose module is there; Gymnasium keeps the names of what has left it, too."""
    return sorted(name for name, spec in gym_backend().registry.items() if _is_here(spec))


def _is_here(spec: Any) -> bool:
    made_by = spec.entry_point
    if not isinstance(made_by, str):
        return not getattr(made_by, "__module__", "").startswith("gymnasium.envs")
    top = made_by.partition(":")[0].partition(".")[0]
    if util.find_spec(top) is None:
        return False
    needed = next((name for part, name in _NEEDS.items() if f".{part}." in made_by), None)
    return needed is None or util.find_spec(needed) is not None


_NEEDS = {"box2d": "Box2D", "mujoco": "mujoco", "phys2d": "jax", "tabular": "jax"}
"""Family of Gymnasium's own envs to the library that it imports."""


def require_env(name: str) -> None:
    """Check that an env is registered by a name, or that the name says which module registers it.

    Raises:
        ArgumentError: (a ValueError) none is; the message gives those closest to it.
    """
    registry = gym_backend().registry
    if ":" not in name and name not in registry:
        guess = near_name(name, registry, "See gymnasium.registry.")
        raise ArgumentError(f"Gymnasium has no env called {name!r}. {guess}")


def require_keywords(name: str, keywords: Mapping[str, Any]) -> None:
    """Check the keywords of `build`, as far as that can be done without making an env.

    Raises:
        OptionError: (a TypeError) one is unknown, and the env is known not to take it.
    """
    GymEnv.require_keywords(name, **keywords)


def build(name: str, **kwargs: Any) -> EnvBase:
    """Make one `GymEnv`, or wrap a vector env that is registered without a single one.

    Raises:
        ArgumentError: (a ValueError) no env is registered by this name; the message gives those closest to it.
    """
    require_env(name)
    spec = gym_backend().registry.get(name)
    if kwargs.get("num_envs") and spec is not None and spec.entry_point is None:
        return _wrapped(name, kwargs)
    return GymEnv(name, **kwargs)


def _wrapped(name: str, kwargs: dict[str, Any]) -> EnvBase:
    """Make a vector env by its registered entry point, and wrap it: only then it is known whether its data is torch's."""
    own = {*(known_to(GymWrapper) or ()), *(known_to(TorchVectorWrapper) or ())}
    options = {key: value for key, value in kwargs.items() if key in own}
    made_with = {key: value for key, value in kwargs.items() if key not in own}
    return GymWrapper(gym_backend().make_vec(name, **made_with), **options)
