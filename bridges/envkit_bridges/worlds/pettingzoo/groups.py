"""Agents of a game as groups of data: which there are, what a group declares, and how a moment of the game is written.

Agents whose specs are equal lie side by side in arrays; others are stacked lazily, each in its own
TensorDict. Infos that are numbers and the state of the whole game are described here too.

Conventions
    rows     arrays of one agent by path below the group, as ("observation",); all leaves have fixed shapes.
    options  what an agent may choose among, in the order of its action mask.
    dead     agents of which a moment holds no observation: theirs and infos are zero, and the reward after the
             step in which they died.
    infos    of agents, as the library gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envkit.data.paths import Path, as_path, nest
from envkit.errors import (
    ArgumentError,
    EncodingError,
    SpecError,
    UnsupportedError,
)
from envkit.specs import Categorical, Composite, StackedComposite, TensorSpec, Unbounded
from envkit.specs.stacks import stack
from envkit_bridges.gym.codecs import Codec, codec_at, holds_numbers, numpy_dtype
from envkit_bridges.worlds.pettingzoo.games import Game


def numbers_in(infos: Sequence[Mapping[str, Any]]) -> dict[str, TensorSpec]:
    """Describe the infos of some agents that are numbers, of one form in all that have them."""
    forms: dict[str, set[tuple[Any, ...]]] = {}
    for info in infos:
        for key, value in info.items():
            if key != "action_mask":
                forms.setdefault(key, set()).add(_form(value))
    return {
        key: Unbounded(shape, dtype=dtype)
        for key, found in forms.items()
        if len(found) == 1
        for shape, dtype in found
        if dtype is not None
    }


def _form(value: object) -> tuple[Any, Any]:
    """Return shape and dtype that a number or an array has as a tensor; no dtype where it has none."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return (), None
    return tuple(tensor.shape), tensor.dtype


def state_codec(game: Game) -> Codec | None:
    """Return the codec of the state of the whole game; None where no space describes it."""
    space = getattr(game, "state_space", None)
    return None if space is None else codec_at(space, ("state",), categorical=False)


def state_spec(game: Game, codec: Codec | None) -> TensorSpec:
    """Describe the state of the whole game, by its space or by what it is now."""
    if codec is not None:
        return codec.spec()["state"]
    try:
        state = np.asarray(game.state())
    except (NotImplementedError, TypeError, AttributeError) as error:
        raise UnsupportedError(
            f"return_state is True, but {game} has no state of the whole game ({type(error).__name__}: {error}). "
            "Leave it out."
        ) from error
    return Unbounded(state.shape, dtype=torch.from_numpy(state.copy()).dtype)


FLAGS = ("done", "terminated", "truncated")
_ALLOWED = "action_mask"

Rows = Mapping[Path, np.ndarray]


class Moment(NamedTuple):
    """Data after a reset or a step, by agent."""

    observations: Mapping[str, Any]
    rewards: Mapping[str, Any]
    ends: Mapping[str, tuple[bool, bool]]
    infos: Mapping[str, Mapping[str, Any]]
    acting: Sequence[str]


def flag_spec(*shape: int) -> Categorical:
    """Describe flags."""
    return Categorical(2, shape=shape, dtype=torch.bool)


@dataclass(frozen=True)
class Agent:
    """One agent and its codecs.

    Args:
        name: of the agent.
        observation: its leaves lie below ("observation",), without the mask of actions.
        action: its leaves lie below ("action",).
        has_options: the library says at each moment which actions are allowed.
        infos: specs of the numbers in its infos.
        use_mask: say at each moment whether it acts.
    """

    name: str
    observation: Codec
    action: Codec
    has_options: bool
    infos: Mapping[str, TensorSpec]
    use_mask: bool

    def observation_spec(self) -> Composite:
        """Describe what it observes, one agent alone."""
        spec = self.observation.spec()
        if self.has_options:
            spec[_ALLOWED] = flag_spec(self._num_options())
        if self.use_mask:
            spec["mask"] = flag_spec()
        if self.infos:
            spec["info"] = Composite(dict(self.infos))
        return spec

    def _num_options(self) -> int:
        leaf = self.action.spec()["action"]
        if isinstance(leaf, Composite) or not hasattr(leaf, "to_one_hot_spec"):
            raise SpecError(
                f"agent {self.name!r} is given an action mask, but its actions {self.action.space} are no choice "
                "among options. Leave the mask out with a wrapper of PettingZoo."
            )
        return leaf.to_one_hot_spec().shape[-1]

    def seat(self, rows: Rows) -> Seat:
        """Bind it to its rows."""
        observed = {path: rows[path] for path in self.observation.leaves}
        return Seat(self, rows, self.observation.writer(observed))


@dataclass(frozen=True)
class Seat:
    """An agent bound to the rows that it writes."""

    agent: Agent
    rows: Rows
    put: Callable[[Any], None]

    def write(self, moment: Moment) -> None:
        """Write what a moment holds of this agent."""
        agent, rows, name = self.agent, self.rows, self.agent.name
        observation = moment.observations.get(name)
        is_alive = observation is not None
        if is_alive:
            self.put(observation)
        else:
            for path in agent.observation.leaves:
                rows[path][...] = 0
        if agent.use_mask:
            rows[("mask",)][...] = name in moment.acting
        if agent.has_options:
            rows[(_ALLOWED,)][...] = _allowed(moment, name)
        for key in agent.infos:
            value = moment.infos.get(name, {}).get(key) if is_alive else None
            _put(rows[("info", key)], 0 if value is None else value, key)
        terminated, truncated = moment.ends[name]
        for (flag,), value in zip(
            _FLAG_PATHS, (terminated or truncated, terminated, truncated), strict=True
        ):
            rows[(flag,)][0] = value
        if (reward := rows.get(("reward",))) is not None:
            _pay(reward, moment.rewards.get(name, 0), name)


def _pay(row: np.ndarray, reward: object, name: str) -> None:
    array = np.asarray(reward)
    if array.size != 1 or not holds_numbers(array, row.dtype):
        raise EncodingError(
            f"the reward of {name!r} is {reward!r}, but must be a number. Correct the env, or add up its parts with "
            "a wrapper of PettingZoo."
        )
    try:
        row[0] = array.item()
    except OverflowError as error:
        raise EncodingError(
            f"the reward of {name!r} is a whole number too large for {row.dtype}. Correct the env, or scale its "
            "rewards with a wrapper of PettingZoo."
        ) from error


_FLAG_PATHS = tuple((flag,) for flag in FLAGS)


def _allowed(moment: Moment, name: str) -> Any:
    """Return which options an agent has: all of them where it does not act, or where its game is over."""
    if name not in moment.acting:
        return True
    for told in (moment.observations.get(name), moment.infos.get(name)):
        if isinstance(told, Mapping) and _ALLOWED in told:
            allowed = np.asarray(told[_ALLOWED], bool)
            return allowed if allowed.any() else True
    return True


def _put(row: np.ndarray, value: Any, key: str) -> None:
    """Write an info, a number for an array of one element too."""
    try:
        row[...] = np.reshape(value, row.shape) if np.size(value) == row.size else value
    except (OverflowError, TypeError, ValueError) as error:
        raise EncodingError(
            f"the info {key!r} is {value!r}, but was of shape {row.shape} after the first reset. Give it one "
            "shape, or leave it out with a wrapper of PettingZoo."
        ) from error


@dataclass
class Group:
    """Agents that share a node.

    Args:
        name: of the node.
        agents: in their order in the data.
        use_mask: some may be dead.

    Raises:
        SpecError: unlike agents have options, or an observation or action has no array form of fixed shape.
    """

    name: str
    agents: Sequence[Agent]
    use_mask: bool
    observation_spec: Composite = field(init=False)
    action_spec: Composite = field(init=False)

    def __post_init__(self) -> None:
        for agent in self.agents:
            for codec in (agent.observation, agent.action):
                if not codec.has_rows:
                    raise SpecError(
                        f"{codec.space} of agent {agent.name!r} holds values without an array form of fixed "
                        "shape. Turn them into arrays with a wrapper of PettingZoo."
                    )
        self.observation_spec = stack([agent.observation_spec() for agent in self.agents])
        self.action_spec = stack([agent.action.spec() for agent in self.agents])
        self.has_options = any(agent.has_options for agent in self.agents)
        self.is_even = not any(
            isinstance(spec, StackedComposite) for spec in (self.observation_spec, self.action_spec)
        )
        if self.has_options and not self.is_even:
            raise SpecError(
                f"the agents of group {self.name!r} are unlike, and some of them are given action masks, which "
                "cannot be stacked. Put them into their own groups."
            )
        self._reads_at_once = self.is_even and all(
            agent.action.space == self.agents[0].action.space for agent in self.agents
        )

    def reward_spec(self) -> Composite:
        """Describe rewards: float32 of shape (agents, 1)."""
        count = len(self.agents)
        return Composite(reward=Unbounded((count, 1), dtype=torch.float32), shape=(count,))

    def done_spec(self) -> Composite:
        """Describe end flags: bool of shape (agents, 1)."""
        count = len(self.agents)
        return Composite({flag: flag_spec(count, 1) for flag in FLAGS}, shape=(count,))

    # -------------------------------------------------------------------------------------- written

    def tensordict(self, moment: Moment, *, rewards: bool) -> TensorDictBase:
        """Write a moment into new memory, batch size (agents,)."""
        self.require_alive(moment)
        count = torch.Size((len(self.agents),))
        if self.is_even:
            arrays = {
                path: np.empty((*count, *shape), dtype)
                for path, (shape, dtype) in self._forms(0, rewards).items()
            }
            for seat in self.seats(arrays):
                seat.write(moment)
            return _tensordict(arrays, count)
        parts = []
        for index, agent in enumerate(self.agents):
            forms = self._forms(index, rewards).items()
            rows = {path: np.empty(shape, dtype) for path, (shape, dtype) in forms}
            agent.seat(rows).write(moment)
            parts.append(_tensordict(rows, torch.Size(())))
        return LazyStackedTensorDict(*parts, stack_dim=0)

    def seats(self, arrays: Rows) -> list[Seat]:
        """Bind even agents to arrays that hold all of them."""
        return [agent.seat(row_of(arrays, index)) for index, agent in enumerate(self.agents)]

    def require_alive(self, moment: Moment) -> None:
        """Check that all agents are alive, where nothing says which of them are dead.

        Raises:
            ArgumentError: (a ValueError) one is not.
        """
        if self.use_mask or len(moment.observations) == len(moment.ends):
            return
        dead = [agent.name for agent in self.agents if agent.name not in moment.observations]
        if dead:
            raise ArgumentError(
                f"the agents {dead} of group {self.name!r} are dead while others live on, and nothing in the data "
                "would tell. Pass use_mask=True."
            )

    def _forms(self, index: int, rewards: bool) -> dict[Path, tuple[tuple[int, ...], np.dtype]]:
        """Return shape and dtype of each row of an agent."""
        if (index, rewards) not in self._known_forms:
            spec = self.agents[index].observation_spec()
            forms = {
                as_path(key): (tuple(leaf.shape), numpy_dtype(leaf.dtype))
                for key, leaf in spec.items(True, True)
            }
            forms.update(dict.fromkeys(_FLAG_PATHS, ((1,), np.dtype(bool))))
            if rewards:
                forms[("reward",)] = (1,), np.dtype(np.float32)
            self._known_forms[index, rewards] = forms
        return self._known_forms[index, rewards]

    _known_forms: dict[Any, Any] = field(init=False, default_factory=dict)

    # ----------------------------------------------------------------------------------------- read

    def actions(self, arrays: Sequence[Rows]) -> Iterator[tuple[str, Any]]:
        """Turn the actions of each agent, arrays by path, into values of its space."""
        for agent, rows in zip(self.agents, arrays, strict=True):
            (value,) = agent.action.read({path: row[None] for path, row in rows.items()})
            yield agent.name, value

    def even_actions(self, arrays: Rows) -> Iterator[tuple[str, Any]]:
        """The same for agents that lie side by side in arrays."""
        if self._reads_at_once:
            names = [agent.name for agent in self.agents]
            return zip(names, self.agents[0].action.read(arrays), strict=True)
        return self.actions([row_of(arrays, index) for index in range(len(self.agents))])


def row_of(arrays: Rows, index: int) -> Rows:
    """Return one row of arrays, as arrays that share their memory."""
    return {path: array[index, ...] for path, array in arrays.items()}


def _tensordict(arrays: Rows, batch_size: torch.Size) -> TensorDict:
    tensors = nest({path: torch.from_numpy(array) for path, array in arrays.items()})
    return TensorDict._new_unsafe(tensors, batch_size=batch_size, device=torch.device("cpu"))
