"""How the agents of an env are put into groups, each a node of its data.

Conventions
    group map   dict from the name of a group to the names of its agents, in their order in the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from envkit.errors import ArgumentError, ArgumentTypeError


class MarlGroupMapType(Enum):
    """List the group maps that follow from the names of the agents alone.

    Attributes:
        ALL_IN_ONE_GROUP: one group, "agents".
        ONE_GROUP_PER_AGENT: a group for each agent, of its name.

    Example:
        >>> from envkit import MarlGroupMapType
        >>> agents = ["wolf_0", "wolf_1", "sheep_0"]
        >>> MarlGroupMapType.ALL_IN_ONE_GROUP.get_group_map(agents)
        {'agents': ['wolf_0', 'wolf_1', 'sheep_0']}
        >>> MarlGroupMapType.ONE_GROUP_PER_AGENT.get_group_map(agents)
        {'wolf_0': ['wolf_0'], 'wolf_1': ['wolf_1'], 'sheep_0': ['sheep_0']}
    """

    ALL_IN_ONE_GROUP = 1
    ONE_GROUP_PER_AGENT = 2

    def get_group_map(self, agent_names: Sequence[str]) -> dict[str, list[str]]:
        """Return the group map of these agents: one group "agents", or one for each, of its name.

        Example:
            >>> from envkit import MarlGroupMapType
            >>> MarlGroupMapType.ALL_IN_ONE_GROUP.get_group_map(["wolf_0", "sheep_0"])
            {'agents': ['wolf_0', 'sheep_0']}
        """
        if self is MarlGroupMapType.ALL_IN_ONE_GROUP:
            return {"agents": list(agent_names)}
        return {name: [name] for name in agent_names}


def check_marl_grouping(group_map: Mapping[str, Sequence[str]], agent_names: Sequence[str]) -> None:
    """Check that each agent is in exactly one group, and that no group is empty.

    Args:
        group_map: names of agents by group.
        agent_names: of all agents of the env.

    Raises:
        ArgumentError: (a ValueError) names are missing, unknown or there twice, or a group has no agent.

    Example:
        >>> from envkit import check_marl_grouping
        >>> agents = ["wolf_0", "wolf_1", "sheep_0"]
        >>> check_marl_grouping({"wolves": agents[:2], "sheep": agents[2:]}, agents)
    """
    if not agent_names:
        raise ArgumentError("agent_names is empty. Pass the name of each agent of the env.")
    if twice := [name for name, count in Counter(agent_names).items() if count > 1]:
        raise ArgumentError(
            f"agent_names has {twice} more than once. Give each agent its own name."
        )
    for group, members in group_map.items():
        if not members:
            raise ArgumentError(f"group {group!r} has no agents. Leave it out.")
    grouped = Counter(name for members in group_map.values() for name in members)
    for name in grouped:
        if name not in agent_names:
            raise ArgumentError(
                f"the group map has the agent {name!r}, but the env has {list(agent_names)}. Correct its name."
            )
    for name in agent_names:
        if grouped[name] != 1:
            raise ArgumentError(
                f"agent {name!r} is in {grouped[name]} groups of {dict(group_map)}. Put it into one."
            )


GroupMap = MarlGroupMapType | Mapping[str, Sequence[str]]


def complete_group_map(
    names: Sequence[str], group_map: GroupMap | None, *, takes_turns: bool = False
) -> dict[str, list[str]]:
    """Complete and check a group map.

    Args:
        names: of all agents.
        group_map: None for groups by name: ``name_<int>`` is in the group ``name``.
        takes_turns: agents are alone where no map is given.

    Raises:
        ArgumentTypeError: it is no group map.
        ArgumentError: see `check_marl_grouping`.
    """
    if group_map is None:
        each_alone = MarlGroupMapType.ONE_GROUP_PER_AGENT
        complete = each_alone.get_group_map(names) if takes_turns else _by_name(names)
    elif isinstance(group_map, MarlGroupMapType):
        complete = group_map.get_group_map(names)
    elif isinstance(group_map, Mapping):
        complete = {group: _agents_of(group, agents) for group, agents in group_map.items()}
    else:
        raise ArgumentTypeError(
            f"group_map is {group_map!r}, of type {type(group_map).__name__}, but must be a dict of groups to the names of "
            "their agents, or a MarlGroupMapType. Leave it out for groups by name."
        )
    check_marl_grouping(complete, names)
    return complete


def _agents_of(group: str, agents: Any) -> list[str]:
    """Return the agents of a group as a list; a string is no list of its letters."""
    if isinstance(agents, str) or not isinstance(agents, Iterable):
        raise ArgumentTypeError(
            f"group_map has {agents!r} for the group {group!r}, but must have a list of agents. Pass [{agents!r}]."
        )
    return list(agents)


def _by_name(names: Sequence[str]) -> dict[str, list[str]]:
    """Put agents called ``name_<int>`` into the group ``name``, others into their own groups."""
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
