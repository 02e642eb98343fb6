"""envkit environments in the registry of a gym library: ``gymnasium.make("MyEnv-v0")``.

`register` writes an entry that builds the env and puts a `GymView` of it behind the library's own
``Env`` class.

Conventions
    library  a gym backend, see `gym_backend`.
    options  keywords of the library's ``register`` that say how it wraps the env.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from envkit.arrays.integers import as_int
from envkit.data.paths import Key, Path, as_key, leaf_paths, nest
from envkit.env.as_gym import GymView
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError, ArgumentTypeError, OptionError
from envkit.transforms.core.compose import Compose
from envkit.transforms.core.transform import Transform
from envkit.transforms.core.transformed_env import TransformedEnv
from envkit_bridges.exports.shown_spaces import Branch, Shown, part_of, require_whole, shown_as
from envkit_bridges.gym.backend import gym_library
from envkit_bridges.gym.codecs import Codec, Leaf, asked_space, codecs_of, shown_space
from envkit_bridges.gym.reports import RESET, STEP, Facts, listen

_OPTIONS = {
    "reward_threshold": None,
    "nondeterministic": False,
    "max_episode_steps": None,
    "order_enforce": True,
    "autoreset": False,
    "disable_env_checker": False,
    "apply_api_compatibility": False,
}
"""Options of ``register`` in any version of a gym library, with what they are when not given."""


def register_gym(
    env_class: Callable[..., EnvBase],
    id: str,
    *,
    entry_point: Callable[..., EnvBase] | str | None,
    backend: str | ModuleType | None,
    options: dict[str, Any],
    **kwargs: Any,
) -> None:
    """Do what `EnvBase.register_gym` documents."""
    if not isinstance(id, str):
        raise ArgumentTypeError(
            f"id is {id!r}, of type {type(id).__name__}, but must be a string: the name in the "
            "registry. Pass 'MyEnv-v0', for example."
        )
    if options["max_episode_steps"] is not None:
        meaning = "the length of the longest episode, or None for no limit"
        as_int("max_episode_steps", options["max_episode_steps"], least=1, meaning=meaning)
    library = gym_library(backend)
    make = env_class if entry_point is None else entry_point
    if inspect.isabstract(make):
        raise ArgumentError(
            f"{env_class.__name__} cannot be built: it does not write _reset, _step and _set_seed. "
            "Say what to build: entry_point=..."
        )
    library.register(
        id=id,
        entry_point=functools.partial(_build, library.__name__, make),
        kwargs=kwargs,
        **_accepted(library, options, to_numpy=kwargs["to_numpy"]),
    )


def _accepted(library: ModuleType, options: dict[str, Any], *, to_numpy: bool) -> dict[str, Any]:
    """Return the options that the library's ``register`` has.

    Its own checker looks at arrays, so it is left out where tensors are given.

    Raises:
        OptionError: another option was set.
    """
    known = inspect.signature(library.register).parameters
    refused = sorted(
        name for name, value in options.items() if name not in known and value != _OPTIONS[name]
    )
    if refused:
        raise OptionError(
            f"register of {library.__name__} {library.__version__} does not have {refused}. Leave "
            "them out; envs that reset by themselves and old interfaces are not supported there."
        )
    options = {**options, "disable_env_checker": options["disable_env_checker"] or not to_numpy}
    return {name: value for name, value in options.items() if name in known}


def _build(
    library_name: str,
    make: Callable[..., EnvBase] | str,
    *,
    transform: object = None,
    info_keys: Iterable[Key] | None = None,
    to_numpy: bool = False,
    **kwargs: Any,
) -> Any:
    """Build an env and show it to the library; called by its ``make``."""
    maker: Any = pkgutil.resolve_name(make) if isinstance(make, str) else make
    env = maker(**kwargs)
    if transform is not None:
        env = TransformedEnv(env, _own(transform))
    return gym_env_of(env, library_name, info_keys=info_keys, to_numpy=to_numpy)


def gym_env_of(
    env: EnvBase, library_name: str, *, info_keys: Iterable[Key] | None, to_numpy: bool
) -> Any:
    """Show an env as one of a gym library; see `GymView` for the arguments."""
    face = GymView(env, info_keys=info_keys, to_numpy=to_numpy)
    library = importlib.import_module(library_name)
    return _registered_class(library)(face, library.spaces)


def _own(transform: Any) -> Any:
    """Return a transform that belongs to no env yet; a list becomes a `Compose`."""
    if isinstance(transform, list | tuple):
        return Compose(*(_own(member) for member in transform))
    is_taken = isinstance(transform, Transform) and transform._owner is not None
    return transform.clone() if is_taken else transform


def _spaces_of(face: GymView, facts: Facts | None, spaces: ModuleType) -> tuple[Shown, Shown]:
    """Return what is observed and what is done; the first is a Dict."""
    observed, acted = face.observation_spec, face.env.full_action_spec
    specs = {path: observed[as_key(path)] for path in leaf_paths(observed)}
    actions = {path: acted[as_key(path)] for path in leaf_paths(acted)}
    codecs: tuple[Codec | None, Codec | None] = (None, None)
    if facts is not None and isinstance(facts.action_space, spaces.Space):
        codecs = codecs_of(
            facts.observation_space, facts.action_space, categorical=facts.categorical
        )
    names = {path: path for path in specs}
    shown = partial(shown_space, spaces=spaces)
    observation: Shown = Branch({}, spaces)
    if specs:
        observation = shown_as(codecs[0], specs, shown, spaces, names=names, root="observation")
    if not isinstance(observation.space, spaces.Dict):
        observation = Branch({observation.paths[0][0]: observation}, spaces)
    names = {path: path for path in actions} if len(actions) > 1 else dict.fromkeys(actions, ())
    asked = partial(asked_space, spaces=spaces)
    return observation, shown_as(codecs[1], actions, asked, spaces, names=names, root="action")


def _single(values: Any, *, to_numpy: bool) -> Any:
    """Return the value of the only row."""
    if isinstance(values, Mapping):
        return {name: _single(part, to_numpy=to_numpy) for name, part in values.items()}
    if isinstance(values, tuple):
        return tuple(_single(part, to_numpy=to_numpy) for part in values)
    if not to_numpy:
        return torch.as_tensor(values[0])
    is_number = values.ndim == 1 and values.dtype.kind in "iu"
    return int(values[0]) if is_number else values[0, ...]


@functools.cache
def _registered_class(library: ModuleType) -> type:
    return type("RegisteredEnv", (_Registered, library.Env), {"__doc__": _Registered.__doc__})


class _Registered:
    """An envkit environment as an env of a gym library.

    ``env.unwrapped.envkit_env`` is the environment itself.
    """

    def __init__(self, face: GymView, spaces: ModuleType):
        self.face = face
        self.envkit_env = env = face.env
        self.metadata = getattr(env, "metadata", {"render_modes": []})
        self.render_mode = getattr(env, "render_mode", None)
        facts, self._listener = listen(env)
        self._observation, self._action = _spaces_of(face, facts, spaces)
        if facts is not None:
            face.leave_out(facts.recorded)
        self.observation_space = self._observation.space
        self.action_space = self._action.space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start an episode; ``options`` are keywords of the env's own reset."""
        super().reset(seed=seed)  # type: ignore[misc]
        observation, info = self.face.reset(seed, **(options or {}))
        return self._shown(observation), self._with_infos(info, RESET)

    def step(self, action: Any) -> Any:
        """Advance by one step."""
        observation, reward, *flags, info = self.face.step(self._encoded(action))
        if isinstance(reward, float) and self._listener is not None:
            exact = self._listener.reward
            if isinstance(exact, float | int) and np.float32(exact) == np.float32(reward):
                reward = float(exact)  # the data holds it rounded
        return self._shown(observation), reward, *flags, self._with_infos(info, STEP)

    def _with_infos(self, info: dict[str, Any], call: int) -> dict[str, Any]:
        return info if self._listener is None else {**info, **self._listener.infos[call]}

    def _shown(self, observation: dict[str, Any]) -> Any:
        """Return an observation as its space has it."""
        if self._listener is None:
            return observation

        def read(path: Path) -> np.ndarray:
            value: Any = observation
            for name in path:
                value = value[name]
            return np.asarray(value)[None]

        return _single(self._observation.values(read), to_numpy=self.face.to_numpy)

    def _encoded(self, action: Any) -> Any:
        """Return an action as the specs have it; what they hold already is left."""
        if self._listener is None:
            return action
        encoded: dict[Path, Any] = {}

        def write(path: Path, value: Any, space: Any, leaf: Leaf | None) -> None:
            spec = self.envkit_env.full_action_spec[as_key(path)]
            is_held = not isinstance(value, tuple) and np.shape(value) == tuple(spec.shape)
            if (
                leaf is None
                or (is_held and np.shape(value) != space.shape)
                or (space.shape == tuple(spec.shape) and space.dtype.kind == "f")
            ):
                encoded[path] = value
            else:
                require_whole(value, as_key(path), space)
                encoded[path] = leaf.encode(value)

        self._action.write(action, write, part_of)
        return encoded[next(iter(encoded))] if len(encoded) == 1 else nest(encoded)

    def seed(self, seed: int | None = None) -> int | None:
        """Seed the env; the next reset starts from it."""
        return self.face.seed(seed)

    def render(self) -> Any:
        """Render the env, if it can be rendered."""
        return self.envkit_env.render()  # type: ignore[operator]

    def close(self) -> None:
        """Close the env."""
        self.envkit_env.close(raise_if_closed=False)
