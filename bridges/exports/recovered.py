"""What a dataset says of the env it came from, so that Gymnasium builds one like it.

Conventions
    spec  Gymnasium's ``EnvSpec``; it is written as JSON, so its entry point is a name and its keywords are numbers,
          text, lists and dicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridges.catalogue.making import made_by, make
from bridges.exports.gym_registry import gym_env_of
from bridges.libraries import require
from envkit.env.base import EnvBase
from envkit.transforms.core.env import TransformedEnv

__all__ = ["env_spec_of", "recovered_env"]


def recovered_env(id: str, **kwargs: Any) -> Any:
    """Make one env of envkit by id, as an env of Gymnasium; its state, if its data holds that, is among the infos.

    Args:
        id: see `make`.
        **kwargs: see `make`.

    Returns:
        An env whose observation is that of the dataset: an array where there is one entry, else a dict.
    """
    env = make(id, **kwargs)
    states = sorted({"state"} & set(env.full_state_spec.keys()))
    return _only_entry(gym_env_of(env, "gymnasium", info_keys=states, to_numpy=True))


def _only_entry(env: Any) -> Any:
    wrappers = require("gymnasium.wrappers")
    while hasattr(env.observation_space, "spaces") and len(env.observation_space.spaces) == 1:
        [(name, space)] = env.observation_space.spaces.items()
        env = wrappers.TransformObservation(env, lambda values, name=name: values[name], space)
    return env


def env_spec_of(env: EnvBase, observation_space: Any, action_space: Any) -> Any:
    """Give the spec by which Gymnasium makes an env with these spaces; None where there is none.

    There is one for envs of Gymnasium, single or in a pool, and for what `make` made, unless transforms stand
    between them and the data.
    """
    for spec in _candidates(env):
        try:
            spec.to_json()
        except (TypeError, ValueError):  # it holds functions or objects
            continue
        made = require("gymnasium").make(spec)
        fits = _alike(made.observation_space, observation_space)
        fits &= _alike(made.action_space, action_space)
        made.close()
        if fits:
            return spec
    return None


def _candidates(env: EnvBase) -> Iterator[Any]:
    kind = require("gymnasium.envs.registration").EnvSpec
    if not isinstance(env, TransformedEnv):
        found = getattr(env, "spec", None)  # of a pool, those of its envs
        specs = [found] if found is None or isinstance(found, kind) else list(found)
        if isinstance(specs[0], kind) and all(spec == specs[0] for spec in specs):
            yield specs[0]
    told = made_by(env)
    if told is not None:
        name = "".join(sign if sign.isalnum() else "-" for sign in told["id"])
        yield kind(
            id=f"envkit/{name}-v0",
            entry_point=f"{__name__}:{recovered_env.__name__}",
            kwargs=dict(told),
            disable_env_checker=True,
        )


def _alike(one: Any, other: Any) -> bool:
    """Say whether values of two spaces have the same structure, shapes and dtypes."""
    if type(one).__name__ != type(other).__name__:
        return False
    if hasattr(one, "spaces"):
        return set(one.spaces) == set(other.spaces) and all(
            _alike(one.spaces[name], other.spaces[name]) for name in one.spaces
        )
    return one.shape == other.shape and one.dtype == other.dtype
