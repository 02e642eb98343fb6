"""Envs of envkit as vector envs of Stable-Baselines3.

Source of the protocol: stable_baselines3.common.vec_env.VecEnv, version 2.9: a row that has ended shows the first
observation of its next episode, the last one is in its info.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from envkit.data.paths import Key, Path, nest
from envkit.env.base import EnvBase
from envkit.env.runs import Moment
from envkit.env.seeding import checked_seed
from envkit.errors import InputError
from envkit_bridges.exports.agent_rows import view_of
from envkit_bridges.exports.batch_view import BatchView, row_of


def to_sb3(env: EnvBase, *, agents: str | None = None, info_keys: Iterable[Key] = ()) -> SB3View:
    """Show an env of batch size ``(num_envs,)`` as a ``VecEnv`` of Stable-Baselines3.

    The state of a stateless env stays inside the adapter. Several observation entries are a dict, for
    ``MultiInputPolicy``. That library nests none: the parts of a nested name are joined by "_" (``agent_place``). A name
    that is then taken, or that ``torch.nn.ModuleDict`` refuses, such as "values", gets "_" behind.
    Around a pool of Gymnasium's environments, spaces and infos are those of the simulators.

    Args:
        env: with one reward, and done flags at its root. Several actions are a dict.
        agents: "rows" shows each agent of a game as a row, those of a game side by side, so that one policy learns from
            all of them; see `envkit_bridges.exports.agent_rows`.
        info_keys: observation entries that are infos beside those of the env, with all below them.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env.
        ArgumentError: (a ValueError) it has no such form.
        MissingKeyError: (a KeyError) ``info_keys`` names what is no observation.
        MissingLibraryError: (an ImportError) Stable-Baselines3 is not installed.

    Example:
        >>> from stable_baselines3 import PPO
        >>> from envkit import GymEnv, SerialEnv, to_sb3
        >>> envs = to_sb3(SerialEnv(2, lambda: GymEnv("CartPole-v1")))
        >>> model = PPO("MlpPolicy", envs, n_steps=8, batch_size=16, n_epochs=1)
        >>> model.learn(16).num_timesteps
        16
        >>> envs.close()
    """
    return SB3View(view_of(agents)(env, spaces, whose="to_sb3", info_keys=info_keys))


class SB3View(VecEnv):
    """An env of envkit as a ``VecEnv``; see `to_sb3`.

    Rewards are float32, as that library stores them. Attributes and methods are those of single envs where the rows are
    a pool of them. Where all rows are one object, as of Brax, they are those of the object, the same for each row.

    Attributes:
        envkit_env: the env itself.
    """

    def __init__(self, view: BatchView):
        self.view = view
        self.envkit_env = view.env
        self._actions: Any = None
        space = view.observation_space
        self._is_tuple = isinstance(space, spaces.Tuple)
        if self._is_tuple:  # that library's algorithms take none
            space = spaces.Dict(observation=space)
        self._names = _names(space) if isinstance(space, spaces.Dict) else None
        super().__init__(view.num_envs, self._flat_space(space), view.action_space)
        self.metadata = {**getattr(self, "metadata", {}), **view.metadata}

    def __repr__(self) -> str:
        return f"to_sb3({self.envkit_env!r})"

    def reset(self) -> Any:
        """Begin episodes in all rows, from the seed that `seed` was given."""
        seeds = None
        if self._seeds[0] is not None:
            self.envkit_env.set_seed(self._seeds[0])
            if self.view.pool is not None:
                seeds = {row: self._seeds[self.view.env_of(row)] for row in range(self.num_envs)}
        self._reset_seeds()
        root = self.view.reset(options=self._options, seeds=seeds)
        self._reset_options()
        every = np.ones(self.num_envs, bool)
        self.reset_infos = self._infos_of(root, self.view.reset_infos(every))
        return self._shown(root)

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Set the seed of the next `reset`; without one, NumPy draws it.

        The simulator of row i gets ``seed + i``, and ``set_seed`` of the env, from which transforms draw, ``seed``. Where
        all rows are one object, as those of a JAX env, ``set_seed`` decides about all of them.

        Raises:
            ArgumentError: (a ValueError) it is no integer, negative, or too large.
        """
        return super().seed(None if seed is None else checked_seed(seed))

    def step_async(self, actions: np.ndarray) -> None:
        """Store the actions of the step that `step_wait` makes: an array, or a list of one dict or tuple for each row."""
        kind = Mapping if isinstance(self.action_space, spaces.Dict) else tuple
        if isinstance(actions, list | tuple) and all(isinstance(one, kind) for one in actions):
            actions = _stacked(actions)
        self._actions = actions

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Advance every row, and reset those that end.

        Raises:
            NotResetError: (a RuntimeError) before the first `reset`, and after a step that failed.
            InputError: (a ValueError) `step_async` was not called before, or its actions have another shape.
        """
        if self._actions is None:
            raise InputError(
                "there are no actions to step with. Call step_async(actions) first, or step(actions)."
            )
        actions, self._actions = self._actions, None
        with self.view.held:
            return self._step(actions)

    def _step(self, actions: object) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        view = self.view
        following, root = view.advance(actions)
        terminated, truncated = view.flags(following)
        done = view.ended(following)
        infos = self._infos_of(following, view.step_infos(done))
        for info, cut in zip(infos, (truncated & ~terminated).tolist(), strict=True):
            info["TimeLimit.truncated"] = cut
        if done.any():
            last, begun = self._shown(following), self._infos_of(root, view.reset_infos(done))
            for row in np.flatnonzero(done).tolist():
                infos[row]["terminal_observation"] = row_of(last, row)
                self.reset_infos[row] = begun[row]
        return (self._shown(root), view.rewards(following).astype(np.float32), done, infos)

    def _flat_space(self, space: spaces.Space) -> spaces.Space:
        if self._names is None:
            return space
        leaves = _leaves(space)
        if isinstance(space, spaces.Dict) and all(
            path == (name,) for path, name in self._names.items()
        ):
            return space
        return spaces.Dict([(name, leaves[path]) for path, name in self._names.items()])

    def _shown(self, at: Moment) -> Any:
        """Return the observation of a moment, nested ones under their flat names."""
        tree = self.view.observations(at)
        if self._names is None:
            return tree
        if self._is_tuple:
            tree = {"observation": tree}
        return {name: _at(tree, path) for path, name in self._names.items()}

    def _infos_of(self, at: Moment, reported: Mapping[int, Any]) -> list[dict[str, Any]]:
        """Return the infos of each row: entries of the data, and what its simulator has returned."""
        entries = self.view.infos(at)
        each = [
            nest({path: value[row] for path, value in entries.items()})
            for row in range(self.num_envs)
        ]
        for row, info in reported.items():
            each[row] |= info
        return each

    def close(self) -> None:
        """Close the env."""
        self.envkit_env.close(raise_if_closed=False)

    # --------------------------------------------------------------------------------- attributes

    def get_attr(self, attr_name: str, indices: object = None) -> list[Any]:
        """Return an attribute of each of some rows: of its env, its wrappers or its simulator.

        Raises:
            AttributeError: there is none of this name.
        """
        return self.view.get_attr(attr_name, self._rows(indices))

    def set_attr(self, attr_name: str, value: object, indices: object = None) -> None:
        """Set an attribute of each of some rows, where it is: in the env, a wrapper or the simulator.

        Raises:
            AttributeError: all rows are one object, which has none of this name.
            UnsupportedError: (a NotImplementedError) all rows are one object, and some of them are named.
        """
        rows = self._rows(indices)
        self.view.owners.set_attr(attr_name, [value] * len(rows), rows)

    def env_method(
        self, method_name: str, *method_args: Any, indices: object = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each of some rows, and give what each call returned.

        Raises:
            AttributeError: there is none of this name.
            UnsupportedError: (a NotImplementedError) all rows are one object, and some of them are named.
        """
        rows = self._rows(indices)
        return self.view.call(method_name, *method_args, indices=rows, **method_kwargs)

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper], indices: object = None
    ) -> list[bool]:
        """Return for each of some rows whether a wrapper of this class is around its simulator."""
        return self.view.owners.is_wrapped(wrapper_class, self._rows(indices))

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Return a picture of each row."""
        return self.view.render() or []

    def _rows(self, indices: Any) -> list[int]:
        return list(self._get_indices(indices))


def _names(space: spaces.Space) -> dict[Path, str]:
    """Return the names of the leaves of a space as SB3's networks accept them: as they are, nested ones with "_" between the parts.

    A name that is taken, or that a ``torch.nn.ModuleDict`` refuses, gets "_" behind. The order is that of the space.
    """
    names: dict[Path, str] = {}
    refused = set(dir(torch.nn.ModuleDict()))
    leaves = _leaves(space)
    for path in sorted(leaves, key=lambda path: (len(path), path)):
        name = "_".join(path).replace(".", "_")
        while not name or name in refused or name in names.values():
            name += "_"
        names[path] = name
    return {path: names[path] for path in leaves}


def _leaves(space: spaces.Space) -> dict[Path, spaces.Space]:
    if isinstance(space, spaces.Tuple):
        parts: Any = {str(number): part for number, part in enumerate(space.spaces)}
    elif isinstance(space, spaces.Dict):
        parts = space.spaces
    else:
        return {(): space}
    return {
        (name, *path): leaf for name, part in parts.items() for path, leaf in _leaves(part).items()
    }


def _at(tree: Any, path: Path) -> Any:
    for name in path:
        tree = tree[int(name)] if isinstance(tree, tuple) else tree[name]
    return tree


def _stacked(actions: Sequence[Any]) -> Any:
    """Join one dict or tuple for each row into a dict or tuple of arrays."""
    if isinstance(actions[0], tuple):
        return tuple(_stacked(part) for part in zip(*actions, strict=True))
    if not isinstance(actions[0], Mapping):
        return np.stack(actions)
    return {name: _stacked([one[name] for one in actions]) for name in actions[0]}
