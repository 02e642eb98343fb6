"""An environment seen through gym's protocol: a reset that gives two values, a step that gives five.

`GymView` decides which entries are observations and which are infos, and keeps between calls what the
env reads back: a stateless env's state, what transforms count. It knows no gym library; `envkit_bridges`
puts it behind an env class of the one that is asked for.

Conventions
    shown   observation entries that are neither private, nor infos of the env, nor moved to them.
    tree    nested dict with sorted keys; leaves are tensors, or arrays with ``to_numpy``: copies, so that a caller who
            changes them does not change what the env reads at its next step.
    flags   those of the root where it has some, else those that all levels agree on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor

from envkit.data.paths import Key, Path, as_key, as_path, info_names, leaf_paths, nest
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError, ArgumentTypeError, InputError, MissingKeyError
from envkit.specs import (
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
)


class GymView:
    """The attributes and calls of a gym env object, for an env.

    Args:
        env: any environment; a batch of several shows values with its batch axes.
        info_keys: observation entries that go to the info dictionary instead, or the name of one;
            the name of a node moves all that is below it.
        to_numpy: give arrays instead of tensors, and Python numbers for integers without axes and
            for the rewards and end flags of a single env.

    Raises:
        ArgumentTypeError: ``info_keys`` are no keys.
        MissingKeyError: the env has no observation of that name.
    """

    def __init__(self, env: EnvBase, *, info_keys: Iterable[Key] | None, to_numpy: bool):
        self.env = env
        self.to_numpy = to_numpy
        self._root: TensorDictBase | None = None
        paths = leaf_paths(env.full_observation_spec)
        self._shown, infos = shown_and_infos(paths, env._facts.infos, info_keys)
        hidden = private_entries(env)
        self._shown = [path for path in self._shown if path not in hidden]
        self._infos = info_names(infos)

    def leave_out(self, infos: Collection[Path]) -> None:
        """Do not show some infos."""
        self._infos = {path: name for path, name in self._infos.items() if path not in infos}

    @property
    def observation_spec(self) -> Composite:
        """The observations that are shown, keys sorted."""
        spec = self.env.full_observation_spec
        shown = Composite(shape=spec.shape, device=spec.device)
        for path in self._shown:
            shown[as_key(path)] = spec[as_key(path)].clone()
        return shown

    @property
    def action_spec(self) -> TensorSpec:
        """The action leaf, or a Composite of several."""
        return self.env.action_spec

    # ------------------------------------------------------------------------------------- calls

    def reset(self, seed: int | None, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode, and give its first observation and infos; ``kwargs`` go to the env."""
        if seed is not None:
            self.seed(seed)
        self._root = self.env.reset(**kwargs)
        return self._tree(self._root, self._shown), self._told(self._root)

    def step(self, action: Any) -> tuple[dict[str, Any], Any, Any, Any, dict[str, Any]]:
        """Advance by one step, and give observation, reward, terminated, truncated and infos.

        Args:
            action: value of the action leaf, or a tree of several; what a spec encodes (e.g. an index
                for a one-hot action) is accepted as well as what it holds.

        Raises:
            ArgumentError: `reset` was not called before.
            ArgumentTypeError: the action is neither number nor array.
        """
        if self._root is None:
            raise ArgumentError("step was called before reset: call reset first.")
        self._act(self._root, action)
        data = self.env.step(self._root)
        following = data.get("next")
        self._root = self.env.step_mdp(data)
        return (
            self._tree(following, self._shown),
            self._rewards(following),
            self._flag(following, "terminated"),
            self._flag(following, "truncated"),
            self._told(following),
        )

    def seed(self, seed: int | None) -> int | None:
        """Seed the env; the next reset starts from it."""
        return self.env.set_seed(seed)

    # ------------------------------------------------------------------------------------ values

    def _act(self, root: TensorDictBase, action: Any) -> None:
        for key in self.env.action_keys:
            spec, value = self.env.full_action_spec[key], self._picked(action, key)
            root.set(key, spelled(as_tensor(value, key, spec), key, spec))

    def _picked(self, action: Any, key: Key) -> Any:
        """Take the value of one action out of what the user gave."""
        if not isinstance(action, Mapping) and len(self.env.action_keys) == 1:
            return action
        for name in as_path(key):
            if not isinstance(action, Mapping) or name not in action:
                given = sorted(action) if isinstance(action, Mapping) else type(action).__name__
                raise MissingKeyError(
                    f"the action has no {key!r}, it holds {given}. Pass a nested dict with the "
                    f"entries {self.env.action_keys}."
                )
            action = action[name]
        return action

    def _rewards(self, following: TensorDictBase) -> Any:
        paths = [as_path(key) for key in self.env.reward_keys]
        if len(paths) > 1:
            return self._tree(following, sorted(paths))
        return self._scalar(following.get(as_key(paths[0])))

    def _flag(self, following: TensorDictBase, name: str) -> Any:
        levels = self.env.done_levels
        flags = None
        for level in [()] if () in levels else levels:
            held = name if name in levels[level] else "done"
            flag = following.get(as_key((*level, held)))
            flag = flag if held == name else torch.zeros_like(flag)
            flag = flag if () in levels else flag.flatten(self.env.batch_dims).all(-1, keepdim=True)
            flags = flag if flags is None else flags & flag
        assert flags is not None  # every env has a done level
        return self._scalar(flags)

    def _scalar(self, value: torch.Tensor) -> Any:
        if self.to_numpy and not self.env.batch_dims and value.numel() == 1:
            return value.item()
        return self._value(value)

    def _tree(self, td: TensorDictBase, paths: list[Path]) -> dict[str, Any]:
        return nest({path: self._value(td.get(as_key(path))) for path in paths})

    def _told(self, td: TensorDictBase) -> dict[str, Any]:
        return nest({name: self._value(td.get(as_key(path))) for path, name in self._infos.items()})

    def _value(self, value: Any) -> Any:
        if is_non_tensor(value):
            return value.tolist() if value.batch_size else value.data
        if not self.to_numpy:
            return value.clone()
        if value.ndim == 0 and not value.is_floating_point():
            return value.item()  # one of several: gym libraries want an int
        return np.array(value.numpy(force=True))


def private_entries(env: EnvBase) -> frozenset[Path]:
    """Return the observations that no adapter shows: the state of a stateless env, and private memory of transforms."""
    state = {path for path in leaf_paths(env.full_state_spec) if path[0] == "state"}
    memory = {path for path in env._facts.bookkeeping if any(name.startswith("_") for name in path)}
    return frozenset(state | memory)


def shown_and_infos(
    paths: Collection[Path], own: Set[Path], info_keys: Iterable[Key] | str | None
) -> tuple[list[Path], list[Path]]:
    """Divide observation entries into those that are shown and those that are infos, both sorted.

    Args:
        paths: the entries.
        own: those that are infos of the env; others are passed over.
        info_keys: see `GymView`.

    Raises:
        ArgumentTypeError: ``info_keys`` are no keys.
        MissingKeyError: there is no observation of that name.
    """
    moved = [as_path(key) for key in _listed(info_keys)]
    for path in moved:
        if not any(_is_below(known, path) for known in paths):
            raise MissingKeyError(
                f"info_keys names {as_key(path)!r}, but the observations of the env are "
                f"{[as_key(known) for known in paths]}. Name one of them, or a node above."
            )
    infos = sorted(
        path for path in paths if path in own or any(_is_below(path, above) for above in moved)
    )
    return sorted(set(paths) - set(infos)), infos


def as_tensor(value: Any, key: Key, spec: TensorSpec) -> torch.Tensor:
    """Return an action of numbers, an array or a tensor as a tensor.

    Raises:
        ArgumentTypeError: it is none of these.
    """
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:  # no numbers, or rows of unlike lengths
        raise ArgumentTypeError(
            f"{key!r} is {value!r}, of type {type(value).__name__}, but its spec is {spec}. Pass "
            "numbers, an array or a tensor."
        ) from error


def spelled(value: torch.Tensor, key: Key, spec: TensorSpec) -> torch.Tensor:
    """Return an action as its spec spells it; of what has its shape, the env decides whether it is one.

    Args:
        value: of the shape of the spec, or what it encodes: e.g. an index for a one-hot action.
        key, spec: of the action.

    Raises:
        InputError: numbers of options are no integers.
    """
    is_whole = not (value.is_floating_point() or value.is_complex())
    if value.shape == spec.shape:
        takes_floats = spec.dtype is not None and spec.dtype.is_floating_point
        return value.to(spec.device, spec.dtype if is_whole and takes_floats else value.dtype)
    if not is_whole and isinstance(spec, Categorical | OneHot | MultiOneHot | MultiCategorical):
        raise InputError(
            f"{key!r} has dtype {value.dtype}, but numbers options of {spec}. Pass integers."
        )
    return spec.encode(value)


def _listed(keys: Iterable[Key] | str | None) -> list[Key]:
    if keys is None:
        return []
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, Iterable):
        raise ArgumentTypeError(
            f"info_keys is {keys!r}, of type {type(keys).__name__}, but must be a list of keys. Pass "
            'the observations that are infos: info_keys=["step_count"].'
        )
    return list(keys)


def _is_below(path: Path, above: Path) -> bool:
    return path[: len(above)] == above
