"""Env objects of PettingZoo as envkit environments: agents in groups, each a node of the data.

`PettingZooWrapper` decides which agents are in which group, when the whole game has ended, and what a reset may
select; `GameCore` is a game on rows. How a game is stepped is known to `games`, how a moment of it becomes data to `groups`.

Conventions
    root   flags of the whole game, which alone decide about resets; they supersede those of groups.
    group  node of some agents, batch size (agents,).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.data.arguments import as_batch_size, as_bool
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.env.base import EnvBase
from envkit.env.facts import Facts
from envkit.env.groups import GroupMap, complete_group_map
from envkit.env.options import EnvOptionsWithoutSeed
from envkit.errors import (
    ArgumentError,
    BatchSizeError,
    MissingKeyError,
    ResetMaskError,
    UnsupportedError,
)
from envkit.specs import Composite, TensorSpec
from envkit.specs.annotations import Device
from envkit.specs.inputs import ActionInput
from envkit_bridges.gym.codecs import codec_at
from envkit_bridges.gym.like import GymLikeEnv
from envkit_bridges.gym.simulator_rows import DONE, SimulatorRows
from envkit_bridges.libraries import Simulator, require
from envkit_bridges.worlds.pettingzoo.games import Game, game_of
from envkit_bridges.worlds.pettingzoo.groups import (
    FLAGS,
    Agent,
    Group,
    Moment,
    Rows,
    flag_spec,
    numbers_in,
    row_of,
    state_codec,
    state_spec,
)

if TYPE_CHECKING:
    from envkit_bridges.gym.backend import SpaceValue


class PettingZooWrapper(GymLikeEnv):
    """Give an env object of PettingZoo, parallel or turn-based (AEC), the TensorDict interface; unbatched, batch-locked.

    The leading axis of each entry of a group are its agents. Entries are ``observation``, ``action``, ``reward``
    (float32), the flags ``done``, ``terminated`` and ``truncated``, and ``mask`` with ``use_mask``. There is an
    ``action_mask`` where the library says which actions are allowed (random actions obey it), and ``("info", name)``
    for numbers in the infos of the first reset. The flags of the root say when the whole game has ended.

    Args:
        env: a ``pettingzoo.ParallelEnv``, whose agents all act in each step, or a ``pettingzoo.AECEnv``, in which
            one agent acts in each step. Turns of dead agents are no steps here: they are taken at once.
        return_state: add the state of the whole game as ``state``.
        group_map: names of agents by group, or a `MarlGroupMapType`. By default agents called ``name_<int>`` of
            a parallel env share the group ``name``; those of an AEC env are alone.
        use_mask: add the flags ``mask``: which agents act in the next step. Needed where agents take turns,
            or die while others live on: entries of dead ones are zero, their flags stay set.
        categorical_actions: integers for discrete actions; False spells them one-hot.
        seed: of the first reset, which is made here, and of random actions.
        done_on_any: the game ends with its first agent; False: with its last. By default True for parallel
            envs, False for AEC envs.
        device: where data is delivered, "cpu" by default.
        allow_done_after_reset: taken as in TorchRL, without effect: agents may be done right after a reset.
        **options: of every env, see `envkit.env.options.EnvOptions`.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env object of PettingZoo.
        ArgumentError: (a ValueError) an AEC env without ``use_mask``; a group map that does not hold each agent
            once; no possible agents.
        UnsupportedError: (a NotImplementedError) a state is asked for that there is not.
        BatchSizeError: a batch size is given.
        SpecError: (a ValueError) spaces without array form of fixed shape.

    Methods that read values of a gym-style simulator (``read_obs``, ...) are not called.

    Example:
        >>> import pettingzoo
        >>> from envkit import PettingZooWrapper
        >>> game = pettingzoo.make("aec", "classic/tictactoe-v3")
        >>> env = PettingZooWrapper(game, use_mask=True)
        >>> td = env.reset()
        >>> td["player_1", "mask"], td["player_2", "mask"]
        (tensor([True]), tensor([False]))
        >>> env.close()
    """

    libname = "pettingzoo"
    _completes_outputs = True
    _fast_path_bypasses = EnvBase._fast_path_bypasses | {
        "_step",
        "_reset",
        "_reset_simulator",
        "_shown",
    }
    _env: Game

    def __init__(
        self,
        env: Simulator = None,
        return_state: bool = False,
        group_map: GroupMap | None = None,
        use_mask: bool = False,
        categorical_actions: bool = True,
        seed: int | None = None,
        done_on_any: bool | None = None,
        *,
        device: Device | None = "cpu",
        **options: Unpack[EnvOptionsWithoutSeed],
    ):
        game = game_of(env)
        _require_no_batch(options.pop("batch_size", None))
        options["allow_done_after_reset"] = True
        super().__init__(game, device=device, **options)
        self.parallel = game.parallel
        self.return_state = as_bool("return_state", return_state)
        self.use_mask = as_bool("use_mask", use_mask)
        self.categorical_actions = as_bool("categorical_actions", categorical_actions)
        self.done_on_any = (
            game.parallel if done_on_any is None else as_bool("done_on_any", done_on_any)
        )
        if not game.parallel and not use_mask:
            raise ArgumentError(
                f"the agents of {game} take turns, and nothing in the data would tell whose turn it is. Pass "
                "use_mask=True."
            )
        self.group_map = complete_group_map(game.names, group_map, takes_turns=not game.parallel)
        _, infos = game.reset(seed=seed)
        self._groups = [self._group(name, agents, infos) for name, agents in self.group_map.items()]
        self._group_of = {
            name: group for group in self._groups for name in self.group_map[group.name]
        }
        self.has_action_mask = {group.name: group.has_options for group in self._groups}
        self._state_codec = state_codec(game) if return_state else None
        self._declare()
        game._has_reset = False  # what was reset was looked at alone
        self.seed = seed
        if seed is not None:
            self._seed_actions(seed)

    def _find_facts(self) -> Facts:
        masks = (
            ((name, "action"), (name, "action_mask"))
            for name, has_options in self.has_action_mask.items()
            if has_options
        )
        return replace(super()._find_facts(), action_masks=tuple(masks))

    def _group(
        self, name: str, agents: Sequence[str], infos: Mapping[str, Mapping[str, Any]]
    ) -> Group:
        found = numbers_in([infos.get(agent, {}) for agent in agents])
        return Group(name, [self._agent(agent, infos, found) for agent in agents], self.use_mask)

    def _agent(
        self,
        name: str,
        infos: Mapping[str, Mapping[str, Any]],
        numbers: Mapping[str, TensorSpec],
    ) -> Agent:
        observed, acts = self._env.observation_space(name), self._env.action_space(name)
        spaces = require("gymnasium.spaces")
        has_options = "action_mask" in infos.get(name, {})
        if isinstance(observed, spaces.Dict) and "action_mask" in observed.spaces:
            has_options = True
            others = {key: part for key, part in observed.items() if key != "action_mask"}
            observed = spaces.Dict(others)
        return Agent(
            name,
            codec_at(observed, ("observation",), categorical=False),
            codec_at(acts, ("action",), categorical=self.categorical_actions),
            has_options,
            numbers,
            self.use_mask,
        )

    def _declare(self) -> None:
        device, groups = self.device, self._groups
        observed = Composite({group.name: group.observation_spec for group in groups})
        if self.return_state:
            observed["state"] = state_spec(self._env, self._state_codec)
        done = Composite({flag: flag_spec(1) for flag in FLAGS})
        for group in groups:
            done[group.name] = group.done_spec()
        acts = Composite({group.name: group.action_spec for group in groups})
        paid = Composite({group.name: group.reward_spec() for group in groups})
        self.observation_spec, self.action_spec, self.reward_spec, self.done_spec = (
            spec if device is None else spec.to(device) for spec in (observed, acts, paid, done)
        )

    def _repr_arguments(self) -> list[str]:
        return [str(self._env)]

    @property
    def unwrapped(self) -> Simulator:
        """The innermost env object of PettingZoo."""
        return self._env.env.unwrapped

    # ----------------------------------------------------------------------------- resets and steps

    def _reset_simulator(self, mask: torch.Tensor | None, **kwargs: object) -> Moment:
        return self._moment(super()._reset_simulator(mask, **kwargs))

    def _reset(self, td: TensorDictBase | None, **kwargs: object) -> TensorDictBase:
        mask = None if td is None else td.get(rules.RESET, None)
        if td is not None and mask is None:
            for name in self.group_map:  # without one at the root, these would count
                if (of_group := td.get((name, rules.RESET), None)) is not None:
                    self._require_whole((name,), of_group.numpy(force=True))
        return self._shown(self._reset_simulator(mask, **kwargs), rewards=False)

    def _require_whole(self, level: Path, mask: np.ndarray) -> None:
        """Refuse a mask that selects some agents only."""
        if not mask.all():
            raise ResetMaskError(
                f"the reset mask of {as_key(level) if level else 'the root'!r} is {mask.ravel().tolist()}, but a "
                "game cannot be reset in part. Write '_reset' at the root, all of it, or leave the masks out."
            )

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return self._shown(self._advanced(self._actions_in(td)), rewards=True)

    def _advanced(self, actions: SpaceValue) -> Moment:
        observations, rewards, *_, infos = self._simulator.step(actions)
        return self._moment((observations, infos), rewards)

    def _check_inputs(self, td: TensorDictBase) -> None:
        if bool(td.get(rules.STEP, torch.ones(())).all()):
            self._actions_in(td)

    def _moment(self, result: Any, rewards: Mapping[str, Any] | None = None) -> Moment:
        game, (observations, infos) = self._env, result
        return Moment(observations, rewards or {}, game.ends, infos, game.acting())

    def _shown(self, moment: Moment, *, rewards: bool) -> TensorDictBase:
        """Write a moment of the game down as data."""
        entries: dict[str, Any] = {
            group.name: group.tensordict(moment, rewards=rewards) for group in self._groups
        }
        if self.return_state:
            entries["state"] = self._state_read()
        ended = self._game_end(is_start=not rewards)
        entries.update(zip(FLAGS, (torch.tensor([flag]) for flag in ended), strict=True))
        for action, mask in self._facts.action_masks:
            self.full_action_spec[action].update_mask(entries[mask[0]].get(mask[1]))
        td = TensorDict._new_unsafe(entries, batch_size=torch.Size(()), device=torch.device("cpu"))
        return td if self._device is None or self._device.type == "cpu" else td.to(self._device)

    def _state_read(self) -> Any:
        """Return the state of the whole game as data."""
        state = self._env.state()
        if self._state_codec is None:
            return torch.from_numpy(np.array(state))
        return self._state_codec.encode_nested(state)["state"]

    def _game_end(self, *, is_start: bool) -> tuple[bool, bool, bool]:
        """Return whether the whole game is done, terminated, truncated."""
        game = self._env
        ends = [game.ends[name] for name in game.played]
        if is_start or not ends:
            over = not ends
            return over, over, False
        if self.done_on_any:
            terminated, truncated = (any(flags) for flags in zip(*ends, strict=True))
            return terminated or truncated, terminated, truncated
        if not all(map(any, ends)):
            return False, False, False
        terminated, truncated = (all(flags) for flags in zip(*ends, strict=True))
        return True, terminated, truncated or not terminated

    # -------------------------------------------------------------------------------------- actions

    def _actions_in(self, td: TensorDictBase) -> SpaceValue:
        """Return the actions in a root: of all agents by name, or that of the one whose turn it is."""
        if self.parallel:
            return dict(item for group in self._groups for item in self._actions_of(group, td))
        (turn,) = self._env.acting()
        return dict(self._actions_of(self._group_of[turn], td))[turn]

    def _actions_of(self, group: Group, td: TensorDictBase) -> Any:
        if group.is_even:
            return group.even_actions(self._taken(td, (group.name,), self._action_inputs, ()))
        node = td.get(group.name, None)
        if node is None:
            raise _missing((group.name, "action"), td)
        rules_of = self._declared.cached("uneven", self._uneven_inputs)[group.name]
        parts = zip(node.unbind(0), rules_of, strict=True)
        return group.actions(
            [self._taken(part, (), inputs, (group.name,)) for part, inputs in parts]
        )

    def _uneven_inputs(self) -> dict[str, list[dict[Key, ActionInput]]]:
        """Return the rule of each action of agents whose specs differ."""
        return {
            group.name: [
                {
                    as_key(path): ActionInput(leaf.spec, (agent.name, *path))
                    for path, (leaf, _) in agent.action.leaves.items()
                }
                for agent in group.agents
            ]
            for group in self._groups
            if not group.is_even
        }

    @staticmethod
    def _taken(
        td: TensorDictBase, node: Path, inputs: Mapping[Key, ActionInput], prefix: Path
    ) -> dict[Path, np.ndarray]:
        """Return the actions below a node, checked, as arrays by path below it."""
        taken = {}
        for key, rule in inputs.items():
            path = as_path(key)
            if path[: len(node)] == node:
                value = td.get(key, None)
                if value is None:
                    raise _missing((*prefix, *path), td)
                taken[path[len(node) :]] = rule.take(value).numpy(force=True)
        return taken

    # ----------------------------------------------------------------------------------- on rows

    def row_core(self) -> GameCore | None:
        """Return the core that steps this game on NumPy rows.

        None where it does not make all of a step: unlike agents in a group, data that goes to another device, or
        a subclass that changes how a step is made.
        """
        is_plain = (
            all(group.is_even for group in self._groups)
            and not self.return_state
            and not self.run_type_checks
            and self._steps_by_itself
            and (self.device is None or self.device.type == "cpu")
        )
        return GameCore(self) if is_plain else None

    def _reset_on_row(self, **kwargs: object) -> Moment:
        return self._whole(self._moment(self._simulator.reset(**kwargs)))

    def _step_on_row(self, inputs: Rows) -> Moment:
        """Step with actions as they lie in rows, trusted."""
        actions: dict[str, Any] = {}
        turn = None if self.parallel else self._env.acting()[0]
        for group in self._groups if turn is None else [self._group_of[turn]]:
            own = {path[1:]: row for path, row in inputs.items() if path[0] == group.name}
            actions.update(group.even_actions(own))
        return self._whole(self._advanced(actions if turn is None else actions[turn]))

    def _whole(self, moment: Moment) -> Moment:
        for group in self._groups:
            group.require_alive(moment)
        return moment

    # ----------------------------------------------------------------------------------------- rest

    def set_info_dict_reader(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused: infos of agents are entries already.

        Raises:
            UnsupportedError: (a NotImplementedError) always.
        """
        raise UnsupportedError(
            "infos of PettingZoo are by agent, and numbers that the first reset gives are entries of each group: "
            "td[group, 'info', name]. Put others into observations, with a wrapper of PettingZoo."
        )


class GameCore:
    """Step one game, writing what comes out into rows; see `SimulatorCore`.

    The contents of the rows equal the TensorDicts of the env (`tests/bridges/worlds/test_pettingzoo.py` compares both).

    Args:
        env: around the game.
    """

    writes_flags = True  # of a game without players
    bind = staticmethod(SimulatorRows)

    def __init__(self, env: PettingZooWrapper):
        self.env = env

    def is_like(self, other: object) -> bool:
        """Check whether another core takes its actions, and writes its moments, in the same form."""
        return isinstance(other, GameCore) and self.env.specs == other.env.specs

    def read(self, inputs: Rows) -> list[Rows]:
        """Return the actions of all agents of each row: whose turn it is shows when it steps."""
        count = len(next(iter(inputs.values())))
        return [row_of(inputs, index) for index in range(count)]

    def resetter(self, masks: Rows) -> Callable[..., tuple[Moment, Any]]:
        """Return the reset of the game, which refuses masks of some agents only."""

        def reset(**kwargs: Any) -> tuple[Moment, Any]:
            for path, mask in masks.items():
                self.env._require_whole(path[:-1], mask)
            return self.env._reset_on_row(**kwargs), self.env._game_end(is_start=True)

        return reset

    def step(self, inputs: Rows) -> tuple[Moment, float, bool, bool, None]:
        """Step the game; the rewards are in the moment."""
        moment = self.env._step_on_row(inputs)
        _, terminated, truncated = self.env._game_end(is_start=False)
        return moment, 0.0, terminated, truncated, None

    def writer(self, rows: Rows) -> Callable[[Moment, Any], None]:
        """Return the function that writes a moment, and at roots the flags of the game."""
        seats = [
            seat
            for group in self.env._groups
            for seat in group.seats(
                {path[1:]: array for path, array in rows.items() if path[0] == group.name}
            )
        ]
        flags = [rows[path] for path in DONE if path in rows]

        def write(moment: Moment, ended: Any) -> None:
            for seat in seats:
                seat.write(moment)
            for row, flag in zip(flags, ended or (), strict=True):
                row[0] = flag

        return write

    def end(self, info: object) -> None:
        """Do nothing: infos are in the moment."""


def _require_no_batch(batch_size: Any) -> None:
    if batch_size is not None and len(as_batch_size(batch_size)):
        raise BatchSizeError(
            f"batch_size is {tuple(as_batch_size(batch_size))}, but a game of PettingZoo is one env. Leave it out; "
            "SerialEnv and ParallelEnv make batches."
        )


def _missing(path: Path, td: TensorDictBase) -> MissingKeyError:
    return MissingKeyError(
        f"the TensorDict has no {as_key(path)!r}; it has {sorted(map(str, td.keys(True)))}. Write the action "
        "first, e.g. with env.rand_action(td)."
    )
