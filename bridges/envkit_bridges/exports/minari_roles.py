"""Which entries of recorded data are what Minari calls observations, actions, rewards and infos, and their spaces.

Conventions
    carried  entries that are under ``next`` as well: a step's is the next root's. They have a row more than steps.
    choice   one-hot codes, held as indices, as users of gym write actions.
    start    the first option of a discrete space of Gymnasium. Data counts options from 0, a dataset from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from envkit.data.paths import Path, as_key, infos_in, leaf_paths, nest
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError, MissingKeyError
from envkit.specs import Categorical, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from envkit_bridges.exports.columns import TEXT, Column, Layout
from envkit_bridges.exports.gym_spaces import asked_space, shown_space
from envkit_bridges.exports.hdf5 import quoted
from envkit_bridges.exports.recovered import spaces_inside
from envkit_bridges.gym.codecs import codec_of

__all__ = ["Choice", "Roles", "kept_layout", "roles_of", "spaces_of"]

_FLAGS = {("done",), ("terminated",), ("truncated",)}


@dataclass(frozen=True)
class Choice:
    """One-hot codes, one or several side by side.

    Attributes:
        sizes: of each.
        is_single: whether there is one, whose index has no axis of its own.
    """

    sizes: tuple[int, ...]
    is_single: bool

    def indices(self, codes: np.ndarray, path: Path) -> np.ndarray:
        """Give the index of each code.

        Raises:
            ArgumentError: (a ValueError) a code has not one entry that is set.
        """
        parts = np.split(codes, np.cumsum(self.sizes)[:-1], -1)
        if not all(((part != 0).sum(-1) == 1).all() for part in parts):
            raise ArgumentError(
                f"the entry {as_key(path)!r} holds codes that are not one-hot. Pass data as the env took it."
            )
        found = np.stack([part.argmax(-1) for part in parts], -1)
        return found[..., 0] if self.is_single else found

    def codes(self, indices: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Undo `indices`."""
        indices = indices[..., None] if self.is_single else indices
        parts = [np.eye(size, dtype=dtype)[indices[..., at]] for at, size in enumerate(self.sizes)]
        return np.concatenate(parts, -1)


@dataclass(frozen=True)
class Roles:
    """Paths of entries by what they are to Minari; what is under ``next`` as well stands here without that.

    Attributes:
        observations: carried entries that are observations.
        actions: entries that are actions.
        reward: the entry under ``next``.
        infos: carried entries that are no observations.
        alone: entries that are not carried, ``next`` included.
        choices: paths of one-hot codes.
        starts: paths of options that are not counted from 0 in the dataset, with the first option of each.
    """

    observations: tuple[Path, ...]
    actions: tuple[Path, ...]
    reward: Path
    infos: tuple[Path, ...]
    alone: tuple[Path, ...]
    choices: Mapping[Path, Choice]
    starts: Mapping[Path, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Write the roles down as lists and text."""
        choices = [[path, one.sizes, one.is_single] for path, one in self.choices.items()]
        starts = [[path, np.asarray(one).tolist()] for path, one in self.starts.items()]
        return {**vars(self), "choices": choices, "starts": starts}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Roles:
        """Read what `to_dict` wrote."""
        choices = {
            tuple(path): Choice(tuple(sizes), is_single)
            for path, sizes, is_single in told["choices"]
        }
        paths = {
            name: tuple(map(tuple, told[name]))
            for name in ("observations", "actions", "infos", "alone")
        }
        starts = {tuple(path): np.array(start) for path, start in told.get("starts", ())}
        return cls(**paths, reward=tuple(told["reward"]), choices=choices, starts=starts)

    def held(self, path: Path, values: np.ndarray) -> np.ndarray:
        """Write values as the dataset holds them: options as numbers, counted as Gymnasium counts them."""
        if path in self.choices:
            values = self.choices[path].indices(values, path)
        return values + self.starts[path] if path in self.starts else values

    def coded(self, path: Path, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Undo `held`."""
        if path in self.starts:
            values = values - self.starts[path]
        return self.choices[path].codes(values, dtype) if path in self.choices else values


def roles_of(layout: Layout, env: EnvBase | None) -> Roles:
    """Say what each entry is: as the env declares it, or without one as it is named and carried.

    Raises:
        MissingKeyError: (a KeyError) the data lacks an observation, an action, a reward or a done flag.
        ArgumentError: (a ValueError) there are several rewards, entries without elements, or such as the env does
            not give.
    """
    columns = {column.path: column for column in layout.columns}
    root = {path for path in columns if path[0] != "next"}
    following = {path[1:] for path in columns if path[0] == "next"}
    carried = {path for path in root & following if path not in _FLAGS and path[0] != "state"}
    if env is None:
        flags = {path for path in carried if path[-1:] in _FLAGS}  # of agents
        known = carried - flags - infos_in(carried)
        observations = {path for path in known if path[0] != "collector"}
        actions = {path for path in root - following if path[-1] == "action"}
        reward: Path = ("reward",)
    else:
        hidden = {path for path in leaf_paths(env.full_state_spec) if path[0] == "state"}
        observations = set(leaf_paths(env.full_observation_spec)) - hidden - env._infos
        actions = set(leaf_paths(env.full_action_spec))
        rewards = leaf_paths(env.full_reward_spec)
        if len(rewards) != 1:
            raise ArgumentError(f"Minari holds one reward, but the env has {rewards}. Sum them.")
        reward = rewards[0]
    _require("observations", observations, carried)
    _require("actions", actions, root)
    _require("reward", {reward}, following)
    _require("flags", {("done",)}, following)
    if env is not None:
        shown = {*observations, *(("next", *path) for path in observations)}
        _require_of_env(env, [columns[path] for path in sorted({*shown, *actions})])
    left = {path for path in columns if path[0] == "state" or path[:2] == ("next", "state")}
    left |= {*_FLAGS, *(("next", *path) for path in {*_FLAGS, *carried, reward})}
    kept = {path: column for path, column in columns.items() if path not in left}
    for column in kept.values():
        _require_elements(column)
    return Roles(
        observations=tuple(sorted(observations)),
        actions=tuple(sorted(actions)),
        reward=reward,
        infos=tuple(sorted(carried - observations)),
        alone=tuple(sorted(set(kept) - carried - actions)),
        choices={} if env is None else _choices(env, observations | actions),
        starts={} if env is None else _starts(env, observations, actions),
    )


def _require(kind: str, wanted: set[Path], there: set[Path]) -> None:
    missing = wanted - there
    if missing or not wanted:
        raise MissingKeyError(
            f"{kind} that Minari needs are not in the data: {sorted(map(str, map(as_key, missing))) or 'none is found'}. "
            f"There are {sorted(map(str, map(as_key, there)))}. Pass env=..., the one whose data this is, with its transforms."
        )


def _require_of_env(env: EnvBase, found: Iterable[Column]) -> None:
    """Check that observations and actions have the shapes and dtypes that the env declares."""
    for column in found:
        spec = _spec_of(env, column.path[column.path[0] == "next" :])
        sizes = tuple(spec.shape)
        is_alike = len(sizes) == len(column.shape) and all(
            wanted in (-1, size) for wanted, size in zip(sizes, column.shape, strict=True)
        )
        if spec.dtype is not None and not (is_alike and column.dtype == _name(spec.dtype)):
            raise ArgumentError(
                f"the entry {as_key(column.path)!r} is {column.dtype} of shape {column.shape}, but env gives "
                f"{_name(spec.dtype)} of shape {sizes}. {_fix(column, spec, is_alike)}"
            )


def _fix(column: Column, spec: TensorSpec, is_alike: bool) -> str:
    key = as_key(column.path)
    if is_alike and column.path[0] != "next" and spec.dtype is not None:
        return (
            f"Convert it, as the env did when it took it: data[{key!r}] = data[{key!r}].to({spec.dtype}). Or pass the env "
            "whose data this is, with its transforms."
        )
    return "Pass the env whose data this is, with its transforms."


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _require_elements(column: Column) -> None:
    if 0 in column.held_shape or (column.dtype == TEXT and column.shape):
        raise ArgumentError(
            f"the entry {as_key(column.path)!r} is {column.dtype} of shape {column.shape}, which Minari cannot hold. "
            f"Leave it out: data.exclude({as_key(column.path)!r})."
        )


def _choices(env: EnvBase, paths: Iterable[Path]) -> dict[Path, Choice]:
    found = {}
    for path in paths:
        spec = _spec_of(env, path)
        if isinstance(spec, OneHot):
            found[path] = Choice((spec.n,), True)
        elif isinstance(spec, MultiOneHot):
            found[path] = Choice(tuple(int(size) for size in spec.nvec), False)
    return found


def _starts(env: EnvBase, observations: set[Path], actions: set[Path]) -> dict[Path, Any]:
    """Give the first option of each entry whose space in Gymnasium does not count from 0."""
    inside = spaces_inside(env)
    found = {}
    for space, key, paths in zip(
        inside or (), ("observation", "action"), (observations, actions), strict=False
    ):
        for path, (leaf, _) in codec_of(space, categorical=True, key=key).leaves.items():
            if path in paths and isinstance(leaf.spec, Categorical | MultiCategorical):
                start = np.asarray(leaf.decode(leaf.spec.zero())).reshape(tuple(leaf.spec.shape))
                if start.any():
                    found[path] = start
    return found


def _spec_of(env: EnvBase, path: Path) -> TensorSpec:
    is_shown = path in leaf_paths(env.full_observation_spec)
    specs = env.single_full_observation_spec if is_shown else env.single_full_action_spec
    return specs[as_key(path)]


def kept_layout(layout: Layout, roles: Roles) -> Layout:
    """Give the layout of what Minari holds: one row, without what is left out."""
    carried = {*roles.observations, *roles.infos}
    kept = {*carried, *(("next", *path) for path in carried), *roles.actions, *roles.alone}
    kept |= {("next", *roles.reward), *_FLAGS, *(("next", *path) for path in _FLAGS)}
    gone = {("state",), ("next", "state")}
    return replace(
        layout,
        rows=(),
        names=("time",),
        columns=tuple(column for column in layout.columns if column.path in kept),
        nodes=tuple(
            node for node in layout.nodes if not any(node[0][: len(at)] == at for at in gone)
        ),
    )


# ---------------------------------------------------------------------------------------- spaces


def spaces_of(layout: Layout, roles: Roles, env: EnvBase | None, spaces: Any) -> tuple[Any, Any]:
    """Give the spaces of observations and of actions, which contain what is written."""
    columns = {column.path: column for column in layout.columns}

    def space(path: Path) -> Any:
        spec = None if env is None else _spec_of(env, path)
        if path in roles.starts:
            return _from(roles.starts[path], asked_space(spec, spaces), spaces)
        if spec is not None and path in roles.choices:
            return asked_space(spec, spaces)
        column = columns[path]
        if spec is not None and column.dtype == str(column.held_dtype):
            return shown_space(spec, spaces)
        return _space_of_data(column, spaces)

    return tuple(
        _tree({path: space(path) for path in paths}, spaces)
        for paths in (roles.observations, roles.actions)
    )  # type: ignore[return-value]


def _from(start: np.ndarray, counted: Any, spaces: Any) -> Any:
    """Give a space of options that counts from ``start`` instead of 0."""
    if isinstance(counted, spaces.Discrete):
        return spaces.Discrete(int(counted.n), start=int(start.reshape(-1)[0]))
    return spaces.MultiDiscrete(
        counted.nvec, counted.dtype, start=np.broadcast_to(start, counted.nvec.shape)
    )


def _tree(members: Mapping[Path, Any], spaces: Any) -> Any:
    """One space stands for itself, several are a Dict, nested as the entries are."""
    if len(members) == 1:
        return next(iter(members.values()))

    def build(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return spaces.Dict({name: build(part) for name, part in sorted(tree.items())})

    return build(nest({quoted(path): space for path, space in members.items()}))


def _space_of_data(column: Column, spaces: Any) -> Any:
    """Give the space of all values that a column can have."""
    if column.dtype == TEXT:
        return spaces.Text(max_length=4096)
    dtype, shape = column.held_dtype, column.held_shape
    if dtype == bool:
        return spaces.MultiBinary(shape) if shape else spaces.Discrete(2)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype)
    bounds = np.iinfo(dtype)
    return spaces.Box(bounds.min, bounds.max, shape, dtype)
