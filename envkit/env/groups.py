"""How the agents of an env are put into groups, each a node of its data.

Conventions
    group map   dict from the name of a group to the names of its agents, in their order in the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum

from envkit.errors import ArgumentError

__all__ = ["MarlGroupMapType", "check_marl_grouping"]


class MarlGroupMapType(Enum):
    """Group maps that follow from the names of the agents alone."""

    ALL_IN_ONE_GROUP = 1
    ONE_GROUP_PER_AGENT = 2

    def get_group_map(self, agent_names: Sequence[str]) -> dict[str, list[str]]:
        """Give the group map of these agents: one group "agents", or one for each, of its name."""
        if self is MarlGroupMapType.ALL_IN_ONE_GROUP:
            return {"agents": list(agent_names)}
        return {name: [name] for name in agent_names}


def check_marl_grouping(group_map: Mapping[str, Sequence[str]], agent_names: Sequence[str]) -> None:
    """Check that each agent is in exactly one group, and that no group is empty.

    Raises:
        ArgumentError: (a ValueError) names are missing, unknown or there twice, or a group has no agent.
    """
    if not agent_names:
        raise ArgumentError("agent_names is empty. Pass the name of each agent of the env.")
    if twice := [name for name, count in Counter(agent_names).items() if count > 1]:
        raise ArgumentError(
            f"agent_names has {twice} more than once. Give each agent a name of its own."
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
