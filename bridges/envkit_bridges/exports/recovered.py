"""The description in a dataset of its env, from which Gymnasium builds one like it.

Conventions
    spec  Gymnasium's ``EnvSpec``; it is written as JSON, so its entry point is a name and its keywords are numbers,
          text, lists and dicts.
"""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

from envkit.batched.batched_env import BatchedEnv
from envkit.data.paths import as_key, leaf_paths
from envkit.env.base import EnvBase
from envkit.specs import Composite
from envkit_bridges.catalogue.making import made_by, make
from envkit_bridges.exports.gym_registry import gym_env_of
from envkit_bridges.exports.shown_spaces import private_entries
from envkit_bridges.gym.codecs import NO_SPACE, asked_space, shown_space
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.libraries import require


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


def spaces_inside(env: EnvBase) -> tuple[Any, Any] | None:
    """Return the spaces of the Gymnasium env in an env, or in each env of a pool; None where there is none.

    No transforms may be between both.
    """
    if isinstance(env, GymWrapper):
        inside = env._env
        if hasattr(inside, "single_observation_space"):
            return inside.single_observation_space, inside.single_action_space
        return inside.observation_space, inside.action_space
    if (
        isinstance(env, BatchedEnv)
        and not env.is_closed
        and all(env._ask_rows(_is_around_one, None))
    ):
        names = "observation_space", "action_space"
        pairs = list(zip(*map(env.get_attr, names), strict=True))
        return pairs[0] if all(pair == pairs[0] for pair in pairs) else None
    return None


def _is_around_one(env: EnvBase) -> bool:
    return isinstance(env, GymWrapper) and not env.batch_size


def env_spec_of(env: EnvBase, observation_space: object, action_space: object) -> Any:
    """Return the spec from which Gymnasium makes an env with these spaces; None where there is none.

    There is one for envs of Gymnasium, single or in a pool, and for what `make` made, unless transforms are
    between them and the data. No second env is made to find out: there may be room for one alone.
    """
    kind = require("gymnasium.envs.registration").EnvSpec
    spaces = observation_space, action_space
    inside, keywords = spaces_inside(env), made_by(env)
    if inside is not None and all(map(_alike, inside, spaces)):
        spec = getattr(env, "spec", None)  # of a pool, those of its envs
        specs = [spec] if spec is None or isinstance(spec, kind) else list(spec)
        is_one = isinstance(specs[0], kind) and all(spec == specs[0] for spec in specs)
        if is_one and _can_be_made(specs[0]):
            return specs[0]
    dtypes = {leaf.dtype for _, leaf in env.full_observation_spec.items(True, True)}
    if keywords is None or dtypes & {*NO_SPACE}:
        return None
    if all(map(_alike, _spaces_of_recovered(env), spaces)):
        name = "".join(sign if sign.isalnum() else "-" for sign in keywords["id"])
        spec = kind(
            id=f"envkit/{name}-v0",
            entry_point=f"{__name__}:{recovered_env.__name__}",
            kwargs=dict(keywords),
            disable_env_checker=True,
        )
        return spec if _can_be_made(spec) else None
    return None


def _can_be_made(spec: Any) -> bool:
    """Check whether a spec can be written as JSON, and its wrappers take the arguments that it keeps of them."""
    try:
        spec.to_json()
        for wrapper in spec.additional_wrappers:
            if wrapper.kwargs is None:  # Gymnasium kept none
                return False
            inspect.signature(pkgutil.resolve_name(wrapper.entry_point)).bind(
                env=None, **wrapper.kwargs
            )
    except (AttributeError, ImportError, TypeError, ValueError):  # functions, objects, others
        return False
    return True


def _spaces_of_recovered(env: EnvBase) -> tuple[Any, Any]:
    """Return the spaces of the env that `recovered_env` makes, from one that `make` has made in the same way."""
    spaces = require("gymnasium.spaces")
    hidden = env._facts.infos | private_entries(env)
    shown = Composite()
    for path in leaf_paths(env.full_observation_spec):
        if path not in hidden:
            shown[as_key(path)] = env.single_full_observation_spec[as_key(path)]
    observation, action = shown_space(shown, spaces), env.single_full_action_spec
    while hasattr(observation, "spaces") and len(observation.spaces) == 1:
        [observation] = observation.spaces.values()
    one = env.action_keys[0] if len(env.action_keys) == 1 else None
    return observation, asked_space(action if one is None else action[one], spaces)


def _alike(one: Any, other: Any) -> bool:
    """Check whether values of two spaces have the same structure, shapes and dtypes."""
    if type(one).__name__ != type(other).__name__:
        return False
    if hasattr(one, "spaces"):
        return set(one.spaces) == set(other.spaces) and all(
            _alike(one.spaces[name], other.spaces[name]) for name in one.spaces
        )
    return one.shape == other.shape and one.dtype == other.dtype
