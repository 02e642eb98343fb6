"""What the data of a game holds: which agents stand in which group, which infos are numbers, the state of the whole.

Conventions
    infos  of agents, as the library gives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from envkit.env.groups import MarlGroupMapType, check_marl_grouping
from envkit.errors import ArgumentTypeError, UnsupportedError
from envkit.specs import TensorSpec, Unbounded
from envkit_bridges.gym.codecs import Codec, codec_at
from envkit_bridges.worlds.pettingzoo.games import Game

__all__ = ["GroupMap", "complete_group_map", "numbers_in", "state_codec", "state_spec"]

GroupMap = MarlGroupMapType | Mapping[str, Sequence[str]]


def complete_group_map(game: Game, given: GroupMap | None) -> dict[str, list[str]]:
    """Complete and check a group map.

    Raises:
        ArgumentTypeError: it is no group map.
    """
    if given is None:
        each_alone = MarlGroupMapType.ONE_GROUP_PER_AGENT
        found = _by_name(game.names) if game.parallel else each_alone.get_group_map(game.names)
    elif isinstance(given, MarlGroupMapType):
        found = given.get_group_map(game.names)
    elif isinstance(given, Mapping):
        found = {group: _agents_of(group, agents) for group, agents in given.items()}
    else:
        raise ArgumentTypeError(
            f"group_map is {given!r}, of type {type(given).__name__}, but must be a dict of groups to the names of "
            "their agents, or a MarlGroupMapType. Leave it out for groups by name."
        )
    check_marl_grouping(found, game.names)
    return found


def _agents_of(group: str, agents: Any) -> list[str]:
    """Give the agents of a group as a list; a string is no list of its letters."""
    if isinstance(agents, str) or not isinstance(agents, Iterable):
        raise ArgumentTypeError(
            f"group_map has {agents!r} for the group {group!r}, but must have a list of agents. Pass [{agents!r}]."
        )
    return list(agents)


def _by_name(names: Sequence[str]) -> dict[str, list[str]]:
    """Put agents called ``name_<int>`` into the group ``name``, others into groups of their own."""
    groups: dict[str, list[str]] = {}
    for name in names:
        stem, _, number = name.rpartition("_")
        groups.setdefault(stem if stem and _is_int(number) else name, []).append(name)
    return groups


def _is_int(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


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


def _form(value: Any) -> tuple[Any, Any]:
    """Give shape and dtype that a number or an array has as a tensor; no dtype where it has none."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return (), None
    return tuple(tensor.shape), tensor.dtype


def state_codec(game: Game) -> Codec | None:
    """Give the codec of the state of the whole game; None where no space describes it."""
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
