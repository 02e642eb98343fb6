"""Agents of a game in groups: which share one, and that a moment lies in rows as it lies in a TensorDict."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from envkit.env.groups import complete_group_map
from envkit_bridges.gym.codecs import codec_of
from envkit_bridges.worlds.pettingzoo.games import game_of
from envkit_bridges.worlds.pettingzoo.groups import Agent, Group, Moment
from tests.zoo.pettingzoo_games import Fading, fading_in_turns

SEEN, ACTS = spaces.Box(-9.0, 9.0, (2,), np.float32), spaces.Discrete(3)


def group(*names: str) -> Group:
    codecs = (codec_of(SEEN, categorical=True, key="observation"),)
    acts = codec_of(ACTS, categorical=True, key="action")
    return Group("team", [Agent(name, *codecs, acts, False, {}, True) for name in names], True)


def moment(**seen: list[float] | None) -> Moment:
    alive = {name: np.array(value, np.float32) for name, value in seen.items() if value}
    ends = {name: (name not in alive, False) for name in seen}
    return Moment(alive, dict.fromkeys(alive, 2.0), ends, {}, [*alive])


@pytest.mark.parametrize("make", [Fading, fading_in_turns], ids=["parallel", "in turns"])
def test_agents_of_one_name_share_a_group_where_all_act_at_once(make):
    game = game_of(make((3, 3)))

    found = complete_group_map(game.names, None, takes_turns=not game.parallel)

    assert [*found.values()] == ([game.names] if game.parallel else [[name] for name in game.names])


def test_a_moment_lies_in_rows_as_in_a_tensordict():
    team, now = group("a", "b"), moment(a=[1.0, 2.0], b=None)
    td = team.tensordict(now, rewards=True)
    rows = {(key,): np.ones_like(value.numpy()) for key, value in td.items()}

    for seat in team.seats(rows):
        seat.write(now)

    for (key,), row in rows.items():
        assert torch.equal(torch.from_numpy(row), td[key]), key
    assert td["observation"].tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert td["done"].squeeze(-1).tolist() == td["terminated"].squeeze(-1).tolist() == [False, True]


def test_actions_side_by_side_are_those_of_each_agent():
    team = group("a", "b")

    read = dict(team.even_actions({("action",): np.array([2, 1])}))

    assert read == {"a": 2, "b": 1}
