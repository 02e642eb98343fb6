"""The agents of games as rows: one policy for all of them, as in parameter sharing.

`AgentRows` decides which agents are rows, and what a row shows of a game that it shares with others. When games begin
again is up to the vector env that asks, as for other envs.

Conventions
    game      a row of the env.
    rows      the agents of game 0, those of game 1, and so on; within a game by group, in the order of the group.
    alive     bool, an info of each row: whether its agent acts in the next step.
    dead      rows that are not alive. They show what the env shows of their agents, zeros in games of PettingZoo, and
              their actions are ignored.
    episode   of a row: its game. All rows of a game end together, and each then says how its agent has ended; agents
              without flags are alive until their game ends.

Source of the idea: SuperSuit's ``pettingzoo_env_to_vec_env_v1``. There the row of a dead agent ends when it dies, and is
zero until the game ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from envkit.data.arguments import require_option
from envkit.data.paths import Key, Path, as_key, as_path, info_names, leaf_paths
from envkit.env.base import EnvBase
from envkit.env.runs import Moment
from envkit.errors import ArgumentError
from envkit.specs import Categorical, Composite, StackedComposite, TensorSpec
from envkit_bridges.exports.batch_view import BatchView, RowOwners, require_arrays, require_batch
from envkit_bridges.exports.shown_spaces import Shown, shown_and_infos, shown_as

_ALIVE: Path = ("alive",)
_FLAGS: tuple[Path, ...] = (("done",), ("terminated",), ("truncated",))
_MASK: Path = ("mask",)  # of the agents that act: `alive` says so


def view_of(agents: str | None) -> type[BatchView]:
    """Return the class of adapters for an option ``agents``.

    Raises:
        ArgumentError: (a ValueError) it is neither "rows" nor None.
    """
    fix = 'Pass "rows" for all agents as rows; group_map= of the env says which agents are in which group.'
    require_option("agents", agents, ["rows", None], fix=fix)
    return BatchView if agents is None else AgentRows


class AgentRows(BatchView):
    """The agents of games as arrays, see the module.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env.
        ArgumentError: (a ValueError) it has not one batch axis, or no groups of agents; agents take turns, or differ in
            what they observe or do.
    """

    def _find_rows(self, whose: str) -> None:
        env = self.env
        require_batch(env, whose)
        self._sizes = _group_sizes(env, whose)
        self._agents = sum(self._sizes.values())
        self.owners = RowOwners(env, self._agents)
        self._require_parallel(whose)
        self.num_envs = self.owners.num_envs * self._agents
        self._reward = ("reward",)
        self._simulators = []
        masks = dict(env._facts.action_masks)
        of_groups = {group: masks.get(as_key((*group, "action"))) for group in self._sizes}
        self._masked = {}
        if all(mask == as_key((*group, "action_mask")) for group, mask in of_groups.items()):
            self._masked = {("action",): ("action_mask",)}

    def _require_parallel(self, whose: str) -> None:
        try:
            is_parallel = all(self.owners.get_attr("parallel"))
        except AttributeError:  # only games of PettingZoo may have turns
            return
        if not is_parallel:
            raise ArgumentError(
                f"{whose} shows agents that act at the same time, but those of this {type(self.env).__name__} take turns. "
                "Make it with parallel=True."
            )

    def _found_spaces(
        self, spaces: ModuleType, whose: str, info_keys: Iterable[Key]
    ) -> tuple[Shown, Shown]:
        observed, acted = self._of_one_agent(whose)
        paths = [path for path in leaf_paths(observed) if path != _MASK]
        group = next(iter(self._sizes))
        own = {path[len(group) :] for path in self.env._facts.infos if path[: len(group)] == group}
        shown, infos = shown_and_infos(paths, own, info_keys)
        self._infos = info_names(infos)
        specs = {path: observed[as_key(path)] for path in shown}
        require_arrays(Composite({as_key(path): spec for path, spec in specs.items()}), whose)
        names = {path: path for path in shown} if len(shown) > 1 else {shown[0]: ()}
        observation = shown_as(None, specs, spaces, names=names, root="observation")
        actions = {path: acted[as_key(path)] for path in leaf_paths(acted)}
        self._action_specs = {as_key(path): spec for path, spec in actions.items()}
        names = {path: path[1:] for path in actions}
        return observation, shown_as(None, actions, spaces, names=names, root="action")

    def _of_one_agent(self, whose: str) -> tuple[Composite, Composite]:
        """Return the specs of what one agent observes and does.

        Raises:
            ArgumentError: (a ValueError) those of others differ.
        """
        first: tuple[str, Composite, Composite] | None = None
        for group, size in self._sizes.items():
            observed = self.env.single_full_observation_spec[as_key(group)]
            acted = self.env.single_full_action_spec[as_key(group)]
            for number in range(size):
                own_specs = _of_agent(observed, number), _of_agent(acted, number)
                one = f"agent {number} of group {as_key(group)!r}", *own_specs
                first = first or one
                for kind, own, other in zip(("observes", "acts"), one[1:], first[1:], strict=True):
                    if own != other:
                        raise ArgumentError(
                            f"{whose} shows agents that are alike as rows, but {first[0]} {kind} {_difference(other, own)}, and "
                            f"{one[0]} {kind} {_difference(own, other)}. Give all agents the same spaces with a wrapper of "
                            "the game, or train each group by itself with TorchRL."
                        )
        assert first is not None
        return first[1], first[2]

    # ------------------------------------------------------------------------------------------ rows

    def env_of(self, row: int) -> int:
        return row // self._agents

    def _of_envs(self, by_row: Mapping[int, Any]) -> Mapping[int, Any]:
        games: dict[int, Any] = {}
        for row, value in by_row.items():
            game = self.env_of(row)
            if not _are_equal(games.setdefault(game, value), value):
                raise ArgumentError(
                    f"agents of game {game} are given {games[game]!r} and {value!r}, but a game is reset as a whole. Pass "
                    f"the same for its rows, {game * self._agents} to {(game + 1) * self._agents - 1}."
                )
        return games

    def _envs_in(self, mask: np.ndarray) -> np.ndarray:
        games = mask.reshape(-1, self._agents)
        chosen = games.all(-1)
        if (games.any(-1) != chosen).any():
            raise ArgumentError(
                f"the mask of rows is {mask.tolist()}, but a game of {self._agents} agents is reset as a whole. Choose all "
                f"{self._agents} rows of a game, or none of them."
            )
        return np.asarray(chosen)

    def _acted(self, action: object, mask: np.ndarray | None = None) -> dict[Path, torch.Tensor]:
        of_groups: dict[Path, torch.Tensor] = {}
        for path, rows in super()._acted(action, mask).items():
            agents = rows.unflatten(0, (-1, self._agents))
            parts = agents.split([*self._sizes.values()], 1)
            for group, part in zip(self._sizes, parts, strict=True):
                of_groups[(*group, *path)] = part
        return of_groups

    def _action_spec(self, key: Key) -> TensorSpec:
        spec = self._action_specs[key]
        return spec.expand(self.num_envs, *spec.shape)

    # ---------------------------------------------------------------------------------------- values

    def _entry(self, at: Moment, path: Path) -> Any:
        parts = [self._of_group(at, group, path) for group in self._sizes]
        join: Any = np.concatenate if isinstance(parts[0], np.ndarray) else torch.cat
        joined = join(parts, 1)
        return joined.reshape(self.num_envs, *joined.shape[2:])

    def _of_group(self, at: Moment, group: Path, path: Path) -> Any:
        """Return an entry of the agents of a group; a flag of the game where the group has none."""
        if path not in _FLAGS or group in self.env.done_levels:
            return at.get(as_key((*group, *path)))
        flag: Any = at.get(as_key(path))
        shape = (len(flag), self._sizes[group], 1)
        wide = flag[:, None]
        return np.broadcast_to(wide, shape) if isinstance(flag, np.ndarray) else wide.expand(shape)

    def infos(self, at: Moment) -> dict[Path, Any]:
        """Return the infos that lie in the data, and which agents are alive."""
        return {**super().infos(at), _ALIVE: ~self._value(self._entry(at, ("done",)))[:, 0]}

    def flags(self, at: Moment) -> tuple[Any, Any]:
        """Return the ends of rows whose games are over: how the agent has ended, or the game if it was alive."""
        over = [np.repeat(_array(flag), self._agents) for flag in super().flags(at)]
        own = [_array(self._entry(at, (flag,)))[:, 0] for flag in ("terminated", "truncated")]
        is_over, has_ended = np.logical_or(*over), np.logical_or(*own)
        terminated, truncated = (
            np.where(has_ended, mine, game) & is_over for mine, game in zip(own, over, strict=True)
        )
        if self.to_numpy:
            return terminated, truncated
        device = self.env.device
        return torch.as_tensor(terminated, device=device), torch.as_tensor(truncated, device=device)

    def ended(self, at: Moment) -> np.ndarray:
        """Return the rows whose games have ended."""
        return np.repeat(super().ended(at), self._agents)

    def step_infos(self, ended: np.ndarray) -> dict[int, Mapping[str, Any]]:
        """Return nothing: infos of games lie in the data."""
        return {}

    def render(self) -> list[Any] | None:
        """Draw the game of each row."""
        drawn = super().render()
        return drawn and [picture for picture in drawn for _ in range(self._agents)]


def _array(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.numpy(force=True)


def _group_sizes(env: EnvBase, whose: str) -> dict[Path, int]:
    """Return the groups of an env by path, with their agents: nodes with a reward and an action of agents.

    Raises:
        ArgumentError: (a ValueError) there is none.
    """
    acted = {as_path(key)[:-1] for key in env.action_keys if as_path(key)[-1] == "action"}
    sizes = {
        path[:-1]: env.single_full_reward_spec[as_key(path)].shape[0]
        for path in map(as_path, env.reward_keys)
        if path[-1] == "reward" and path[:-1] and path[:-1] in acted
    }
    if not sizes or len(acted) != len(sizes) or () not in env.done_levels:
        raise ArgumentError(
            f"{whose} was given agents='rows', but this {type(env).__name__} has no groups of agents beside the flags of the "
            f"game: its rewards are {env.reward_keys}, its actions {env.action_keys}. Pass a game of several agents, e.g. "
            "PettingZooEnv, JaxMARLEnv or VmasEnv, or leave agents out."
        )
    return sizes


def _of_agent(specs: Any, number: int) -> Composite:
    """Return the specs of one agent of a group."""
    if isinstance(specs, StackedComposite):
        return specs[number]
    return Composite({as_key(path): specs[as_key(path)][number] for path in leaf_paths(specs)})


def _difference(spec: Composite, other: Composite) -> str:
    """Describe the entries of a spec that differ from those of another, in one line."""
    unlike = [
        path for path in leaf_paths(spec) if other.get(as_key(path), None) != spec[as_key(path)]
    ]
    told = []
    for path in unlike:
        leaf = spec[as_key(path)]
        options = f" of {leaf.n} options" if isinstance(leaf, Categorical) else ""
        told.append(f"{as_key(path)!r} of shape {tuple(leaf.shape)}, {leaf.dtype}{options}")
    return "; ".join(told) or f"nothing but {sorted(map(str, map(as_key, leaf_paths(spec))))}"


def _are_equal(one: Any, other: Any) -> bool:
    """Compare seeds or options, in which arrays may be."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(
            _are_equal(value, other[name]) for name, value in one.items()
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if hasattr(one, "shape") or hasattr(other, "shape"):
        return np.array_equal(one, other)  # type: ignore[arg-type]  # it makes arrays of both
    return bool(one == other)
