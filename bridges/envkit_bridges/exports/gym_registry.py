"""envkit environments in the registry of a gym library: ``gymnasium.make("MyEnv-v0")``.

`register_gym` writes an entry that builds the env and shows it as the library's own ``Env`` class: a reset that gives
two values, a step that gives five. Which entries are observations is decided in `shown_spaces`, as for vector envs.

Conventions
    library  a gym backend, see `gym_backend`.
    options  keywords of the library's ``register`` that say how it wraps the env.
    tree     nested dict with sorted keys; leaves are tensors, or arrays with ``to_numpy``: copies, so that a caller who
             changes them does not change what the env reads at its next step.
    flags    those of the root where it has some, else those that all levels agree on.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor

from envkit.arrays.integers import as_int
from envkit.data.paths import Key, Path, as_key, as_path, info_names, leaf_paths, nest
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError, ArgumentTypeError, MissingKeyError, OptionError
from envkit.transforms.core.compose import Compose
from envkit.transforms.core.transform import Transform
from envkit.transforms.core.transformed_env import TransformedEnv
from envkit_bridges.exports.shown_spaces import (
    Branch,
    Shown,
    as_tensor,
    part_of,
    private_entries,
    require_whole,
    shown_and_infos,
    shown_as,
    spelled,
)
from envkit_bridges.gym.backend import gym_library
from envkit_bridges.gym.codecs import Codec, Leaf, codecs_of
from envkit_bridges.gym.reports import RESET, STEP, SpacesOfEnv, listen


def register_gym(
    env_class: Callable[..., EnvBase],
    id: str,
    *,
    entry_point: Callable[..., EnvBase] | str | None,
    backend: str | ModuleType | None,
    options: dict[str, Any],
    **kwargs: Any,
) -> None:
    """Register an env as `EnvBase.register_gym` documents."""
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
    accepted = inspect.signature(library.register).parameters
    ours = inspect.signature(EnvBase.register_gym).parameters
    refused = sorted(
        name
        for name, value in options.items()
        if name not in accepted and value != ours[name].default
    )
    if refused:
        raise OptionError(
            f"register of {library.__name__} {library.__version__} does not have {refused}. Leave "
            "them out; envs that reset by themselves and old interfaces are not supported there."
        )
    options = {**options, "disable_env_checker": options["disable_env_checker"] or not to_numpy}
    return {name: value for name, value in options.items() if name in accepted}


def _build(
    library_name: str,
    make: Callable[..., EnvBase] | str,
    *,
    transform: object = None,
    info_keys: Iterable[Key] | None = None,
    observation_key: Key | None = None,
    to_numpy: bool = False,
    **kwargs: Any,
) -> Any:
    """Build an env and show it to the library; called by its ``make``."""
    build: Any = pkgutil.resolve_name(make) if isinstance(make, str) else make
    env = build(**kwargs)
    if transform is not None:
        env = TransformedEnv(env, _unowned(transform))
    return gym_env_of(
        env, library_name, info_keys=info_keys, observation_key=observation_key, to_numpy=to_numpy
    )


def _unowned(transform: Any) -> Any:
    """Return a transform that belongs to no env yet; a list becomes a `Compose`."""
    if isinstance(transform, list | tuple):
        return Compose(*(_unowned(member) for member in transform))
    is_taken = isinstance(transform, Transform) and transform._owner is not None
    return transform.clone() if is_taken else transform


def gym_env_of(
    env: EnvBase,
    library_name: str,
    *,
    info_keys: Iterable[Key] | None,
    observation_key: Key | None = None,
    to_numpy: bool,
) -> Any:
    """Show an env as one of a gym library.

    Args:
        env: any environment; a batch of several shows values with its batch axes.
        library_name: module of the library.
        info_keys: see `shown_and_infos`.
        observation_key: the entry that is shown as it is; None shows all, in a dict.
        to_numpy: give arrays instead of tensors, and Python numbers for integers without axes and
            for the rewards and end flags of a single env.

    Raises:
        ArgumentTypeError, MissingKeyError: see `shown_and_infos`.
        MissingKeyError: no entry that is shown is called ``observation_key``.
    """
    library = importlib.import_module(library_name)
    return _registered_class(library)(env, library.spaces, info_keys, observation_key, to_numpy)


@functools.cache
def _registered_class(library: ModuleType) -> type:
    return type("RegisteredEnv", (_Registered, library.Env), {"__doc__": _Registered.__doc__})


class _Registered:
    """An envkit environment as an env of a gym library.

    ``env.unwrapped.envkit_env`` is the environment itself.
    """

    def __init__(
        self,
        env: EnvBase,
        spaces: ModuleType,
        info_keys: Iterable[Key] | None,
        observation_key: Key | None,
        to_numpy: bool,
    ):
        self.envkit_env, self._to_numpy = env, to_numpy
        self.metadata = getattr(env, "metadata", {"render_modes": []})
        self.render_mode = getattr(env, "render_mode", None)
        self._root: TensorDictBase | None = None
        paths = leaf_paths(env.full_observation_spec)
        shown, infos = shown_and_infos(paths, env._facts.infos, info_keys)
        self._paths = [path for path in shown if path not in private_entries(env)]
        facts, self._listener = listen(env)
        recorded = frozenset() if facts is None else facts.recorded
        self._infos = {
            path: name for path, name in info_names(infos).items() if path not in recorded
        }
        self._observation, self._action = self._spaces(facts, spaces)
        self._observation_path = () if observation_key is None else as_path(observation_key)
        self.observation_space = self._observation.space
        for name in self._observation_path:
            inside = self.observation_space
            if not isinstance(inside, spaces.Dict) or name not in inside.spaces:
                raise MissingKeyError(
                    f"observation_key is {observation_key!r}, but the observation is {self._observation.space}. "
                    "Pass the name of one of its entries."
                )
            self.observation_space = inside[name]
        self.action_space = self._action.space

    def _spaces(self, facts: SpacesOfEnv | None, spaces: ModuleType) -> tuple[Shown, Shown]:
        """Return what is observed and what is done; the first is a Dict."""
        observed, acted = self.envkit_env.full_observation_spec, self.envkit_env.full_action_spec
        specs = {path: observed[as_key(path)] for path in self._paths}
        actions = {path: acted[as_key(path)] for path in leaf_paths(acted)}
        codecs: tuple[Codec | None, Codec | None] = (None, None)
        if facts is not None and isinstance(facts.action_space, spaces.Space):
            codecs = codecs_of(
                facts.observation_space, facts.action_space, categorical=facts.categorical
            )
        names = {path: path for path in specs}
        observation: Shown = Branch({}, spaces)
        if specs:
            observation = shown_as(codecs[0], specs, spaces, names=names, root="observation")
        if not isinstance(observation.space, spaces.Dict):
            observation = Branch({observation.paths[0][0]: observation}, spaces)
        names = {path: path for path in actions} if len(actions) > 1 else dict.fromkeys(actions, ())
        return observation, shown_as(codecs[1], actions, spaces, names=names, root="action")

    # ------------------------------------------------------------------------------------- calls

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start an episode; ``options`` are those of the simulator in an env of Gymnasium, else keywords of the env's reset."""
        super().reset(seed=seed)  # type: ignore[misc]
        if seed is not None:
            self.seed(seed)
        keywords: Any = options or {}
        if keywords and self._listener is not None:
            keywords = {"options": keywords}
        self._root = self.envkit_env.reset(**keywords)
        return self._observed(self._root), self._informed(self._root, RESET)

    def step(self, action: Any) -> Any:
        """Advance by one step, and give observation, reward, terminated, truncated and infos.

        Args:
            action: a value of the action space, or what the specs hold.

        Raises:
            ArgumentError: `reset` was not called before.
            ArgumentTypeError: the action is neither number nor array.
        """
        if self._root is None:
            raise ArgumentError("step was called before reset: call reset first.")
        env = self.envkit_env
        for path, value in self._acted(action).items():
            key = as_key(path)
            spec = env.full_action_spec[key]
            self._root.set(key, spelled(as_tensor(value, key, spec), key, spec))
        data = env.step(self._root)
        following = data.get("next")
        self._root = env.step_mdp(data)
        flags = self._flag(following, "terminated"), self._flag(following, "truncated")
        infos = self._informed(following, STEP)
        return self._observed(following), self._rewards(following), *flags, infos

    def seed(self, seed: int | None = None) -> int | None:
        """Seed the env; the next reset starts from it."""
        return self.envkit_env.set_seed(seed)

    def render(self) -> Any:
        """Render the env, if it can be rendered."""
        return self.envkit_env.render()  # type: ignore[operator]

    def close(self) -> None:
        """Close the env."""
        self.envkit_env.close(raise_if_closed=False)

    # ------------------------------------------------------------------------------------ values

    def _acted(self, action: Any) -> dict[Path, Any]:
        """Return the value of each action; what the specs hold already is left as it is."""
        env = self.envkit_env
        if self._listener is None:
            return {as_path(key): self._picked(action, key) for key in env.action_keys}
        encoded: dict[Path, Any] = {}

        def write(path: Path, value: Any, space: Any, leaf: Leaf | None) -> None:
            spec = env.full_action_spec[as_key(path)]
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
        return encoded

    def _picked(self, action: Any, key: Key) -> Any:
        """Return the value of one action from those that the user passed."""
        keys = self.envkit_env.action_keys
        if not isinstance(action, Mapping) and len(keys) == 1:
            return action
        for name in as_path(key):
            if not isinstance(action, Mapping) or name not in action:
                given = sorted(action) if isinstance(action, Mapping) else type(action).__name__
                raise MissingKeyError(
                    f"the action has no {key!r}, it holds {given}. Pass a nested dict with the "
                    f"entries {keys}."
                )
            action = action[name]
        return action

    def _observed(self, td: TensorDictBase) -> Any:
        """Return an observation as its space has it."""
        observed = self._all_observed(td)
        for name in self._observation_path:
            observed = observed[name]
        return observed

    def _all_observed(self, td: TensorDictBase) -> Any:
        """Return all entries that are shown, in a dict."""
        if self._listener is None:
            return self._tree(td, {path: path for path in self._paths})

        def read(path: Path) -> np.ndarray:
            return np.asarray(self._value(td.get(as_key(path))))[None]

        return _single(self._observation.values(read), to_numpy=self._to_numpy)

    def _informed(self, td: TensorDictBase, call: int) -> dict[str, Any]:
        infos = self._tree(td, self._infos)
        return infos if self._listener is None else {**infos, **self._listener.infos[call]}

    def _rewards(self, following: TensorDictBase) -> Any:
        paths = sorted(as_path(key) for key in self.envkit_env.reward_keys)
        if len(paths) > 1:
            return self._tree(following, {path: path for path in paths})
        reward = self._scalar(following.get(as_key(paths[0])))
        if isinstance(reward, float) and self._listener is not None:
            exact = self._listener.reward
            if isinstance(exact, float | int) and np.float32(exact) == np.float32(reward):
                return float(exact)  # the data holds it rounded
        return reward

    def _flag(self, following: TensorDictBase, name: str) -> Any:
        levels = self.envkit_env.done_levels
        flags = None
        for level in [()] if () in levels else levels:
            held = name if name in levels[level] else "done"
            flag = following.get(as_key((*level, held)))
            flag = flag if held == name else torch.zeros_like(flag)
            if () not in levels:
                flag = flag.flatten(self.envkit_env.batch_dims).all(-1, keepdim=True)
            flags = flag if flags is None else flags & flag
        assert flags is not None  # every env has a done level
        return self._scalar(flags)

    def _scalar(self, value: torch.Tensor) -> Any:
        if self._to_numpy and not self.envkit_env.batch_dims and value.numel() == 1:
            return value.item()
        return self._value(value)

    def _tree(self, td: TensorDictBase, names: Mapping[Path, Path]) -> dict[str, Any]:
        return nest({name: self._value(td.get(as_key(path))) for path, name in names.items()})

    def _value(self, value: Any) -> Any:
        if is_non_tensor(value):
            return value.tolist() if value.batch_size else value.data
        if not self._to_numpy:
            return value.clone()
        if value.ndim == 0 and not value.is_floating_point():
            return value.item()  # one of several: gym libraries want an int
        return np.array(value.numpy(force=True))


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
