"""Pools of the EnvPool library: how they are made, what they must be to be stepped by rows, and their spaces.

Conventions
    seed  of a row: what a chain of seeds holds, see `envkit.env.seeding`; the library takes int32.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import numpy as np

from envkit.data.arguments import refuse_unknown
from envkit.env.seeding import drawn_seed, seed_chain
from envkit.errors import ArgumentError, ArgumentTypeError
from envkit_bridges.libraries import require

__all__ = [
    "built_anew",
    "import_envpool",
    "make_pool",
    "require_keywords",
    "require_name",
    "require_pool",
    "spaces_of",
]


_OF_MATPLOTLIB = ("MPLBACKEND", "MPLCONFIGDIR")


def import_envpool() -> ModuleType:
    """Import the library.

    It sets environment variables by which matplotlib would show no picture any more, in notebooks above all: these
    are put back.

    Raises:
        MissingLibraryError: (an ImportError) it is not installed.
    """
    before = {name: os.environ.get(name) for name in _OF_MATPLOTLIB}
    try:
        return require("envpool")
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def make_pool(
    env_name: str, count: int, kwargs: Mapping[str, Any], *, batch_size: int | None = None
) -> Any:
    """Build a pool of ``count`` envs of the library, which gives results of ``batch_size`` (all) at a time.

    Raises:
        MissingLibraryError, ArgumentError, OptionError: see `MultiThreadedEnv`.
    """
    library = import_envpool()
    require_name(env_name)
    if not isinstance(kwargs, Mapping):
        raise ArgumentTypeError(
            f"create_env_kwargs are {kwargs!r}, of type {type(kwargs).__name__}, but must be a dict of what "
            "envpool.make_gymnasium takes, the same for all envs, as {'max_episode_steps': 100}."
        )
    with warnings.catch_warnings():  # of bounds that float32 cannot tell
        warnings.simplefilter("ignore")
        require_keywords(env_name, kwargs)
        seeds = _given_seeds(kwargs) or {"env_seed": _drawn_seeds(count)}
        sizes = {"num_envs": count, "batch_size": count if batch_size is None else batch_size}
        try:
            pool = library.make_gymnasium(env_name, **sizes, **{**kwargs, **seeds})
        except TypeError as error:
            raise _unfit(library, env_name, kwargs, error) from error
    spaces_of(pool)
    return pool


def _unfit(library: Any, name: str, given: Mapping[str, Any], error: TypeError) -> Exception:
    """Name the keyword whose value is of another kind than its default; ``error`` itself where that is none."""
    defaults = library.make_spec(name).config._asdict()
    for key, value in given.items():
        wanted = type(defaults.get(key, value))
        fits = isinstance(value, (int, float) if wanted is float else wanted)
        if not fits:
            return ArgumentTypeError(
                f"{key} of {name} is {value!r}, of type {type(value).__name__}, but EnvPool takes {wanted.__name__}: "
                f"{defaults[key]!r} by default. Pass one of that type."
            )
    return error


def require_keywords(env_name: str, kwargs: Mapping[str, Any]) -> None:
    """Check what an env of the library is made with; ``env_name`` is known to be there.

    Raises:
        OptionError: (a TypeError) it does not know a keyword.
    """
    with warnings.catch_warnings():  # of bounds that float32 cannot tell
        warnings.simplefilter("ignore")
        known = [*import_envpool().make_spec(env_name).config._fields, *_MAKE_OPTIONS]
    free = [name for name in known if name not in _NOT_CHOSEN]
    refuse_unknown(f"{env_name} of EnvPool", kwargs, free, _HINT)


def require_name(env_name: object) -> None:
    """Check that the library has an env of this name.

    Raises:
        MissingLibraryError: (an ImportError) EnvPool is not installed.
        ArgumentTypeError: it is no name.
        ArgumentError: it is the name of no env; the message gives those closest to it.
    """
    names = import_envpool().list_all_envs()
    if not isinstance(env_name, str):
        raise ArgumentTypeError(
            f"env_name is {env_name!r}, of type {type(env_name).__name__}, but must be the name of an env "
            "of EnvPool, as 'CartPole-v1'."
        )
    if env_name not in names:
        near = get_close_matches(env_name, names, 3)
        guess = (
            f"Did you mean {' or '.join(map(repr, near))}?"
            if near
            else "See MultiThreadedEnv.available_envs."
        )
        raise ArgumentError(f"EnvPool has no env called {env_name!r}. {guess}")


_MAKE_OPTIONS = (
    *("from_pixels", "render_mode", "render_env_id"),
    *("render_width", "render_height", "render_camera_id"),
)
_NOT_CHOSEN = ("num_envs", "batch_size", "base_path", "gym_reset_return_info")
_HINT = "The number of envs is num_workers, and all of them step together."


def _given_seeds(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Give the seeds among the keywords as the library takes them."""
    found = {name: kwargs[name] for name in ("seed", "env_seed") if name in kwargs}
    for name, seeds in found.items():
        if isinstance(seeds, int):
            found[name] = _as_int32(seeds)
        elif isinstance(seeds, list | tuple) and all(isinstance(seed, int) for seed in seeds):
            found[name] = [_as_int32(seed) for seed in seeds]
    return found


def _drawn_seeds(count: int) -> list[int]:
    return [_as_int32(seed) for seed in seed_chain(drawn_seed(), count)[0]]


def built_anew(pool: Any, seeds: Sequence[int]) -> Any:
    """Build a pool of the same configuration, row i with the i-th seed."""
    config = pool.spec.config._replace(seed=0, env_seed=[_as_int32(seed) for seed in seeds])
    twin = type(pool)(type(pool.spec)(config))
    vars(twin).update({name: value for name, value in vars(pool).items() if name in _RENDERING})
    spaces_of(twin)
    return twin


_RENDERING = frozenset(
    f"_render_{name}" for name in ("mode", "env_id", "width", "height", "camera_id")
)
"""What the library writes down on a pool that it has made."""


def _as_int32(seed: int) -> int:
    """Give what the library takes as a seed: from -(2**31) to 2**31 - 1 itself, up to 2**32 - 1 no two are the same."""
    if seed < -(2**31):
        seed = 2**64 - seed  # SeedSequence takes no negative number
    if seed >= 2**32:
        seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return seed - 2**32 if seed >= 2**31 else seed


def spaces_of(pool: Any) -> tuple[Any, Any]:
    """Give the spaces of observations and actions of one env.

    Where an env says nothing of bounds, the library gives the least positive and the greatest number; that is no
    bound.
    """
    with warnings.catch_warnings():  # of bounds that float32 cannot tell
        warnings.simplefilter("ignore")
        return tuple(map(_without_empty_bounds, (pool.observation_space, pool.action_space)))  # type: ignore[return-value]


def _without_empty_bounds(space: Any) -> Any:
    spaces = require("gymnasium.spaces")
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _without_empty_bounds(part) for name, part in space.items()})
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    numbers = np.finfo(space.dtype)
    unsaid = (space.low == numbers.tiny) & (space.high == numbers.max)
    low, high = np.where(unsaid, -np.inf, space.low), np.where(unsaid, np.inf, space.high)
    return spaces.Box(low, high, dtype=space.dtype) if unsaid.any() else space


def require_pool(env: Any) -> None:
    """Check that an object is a pool that can be stepped by rows.

    Raises:
        ArgumentTypeError: it is no pool that speaks gymnasium's API.
        ArgumentError: its envs do not step together, or have several players each.
    """
    config = getattr(env, "config", None)
    if (
        not isinstance(config, Mapping)
        or not hasattr(env, "recv")
        or not hasattr(env, "_state_keys")
    ):
        fix = f"MultiThreadedEnv(n, {env!r})" if isinstance(env, str) else "MultiThreadedEnv"
        raise ArgumentTypeError(
            f"MultiThreadedEnvWrapper was given {env!r}, of type {type(env).__name__}, but wraps a pool "
            f"of EnvPool. Pass what envpool.make_gymnasium gives, or let {fix} build it."
        )
    if not isinstance(env, require("gymnasium").Env | require("gymnasium").vector.VectorEnv):
        raise ArgumentTypeError(
            f"{type(env).__name__} speaks the API of dm_env. Make it with env_type='gymnasium'."
        )
    if config["batch_size"] not in (0, config["num_envs"]):
        raise ArgumentError(
            f"the pool has {config['num_envs']} envs and gives them in batches of {config['batch_size']}, but here "
            "they step together. Leave batch_size out, or use AsyncEnvPool(..., backend='envpool')."
        )
    if config.get("max_num_players", 1) > 1:
        raise ArgumentError(
            f"each env of this pool has up to {config['max_num_players']} players, whose number may change "
            "with every step. Only envs of one player have rows here."
        )
