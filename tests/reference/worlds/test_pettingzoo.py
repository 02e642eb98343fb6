"""PettingZoo's games, wrapped: keys, groups, specs and data of the reference's wrapper."""

from __future__ import annotations

import importlib

import pytest

from tests.reference.compare import check_same, check_works_alike

pytest.importorskip("pettingzoo")

GAMES = {  # the module, whether all move at once, options of the game, keywords of the wrapper
    "all move": ("classic.rps_v2", True, {}, {}),
    "one group": ("classic.rps_v2", True, {}, {"group_map": "ALL_IN_ONE_GROUP"}),
    "groups of one": ("classic.rps_v2", True, {}, {"group_map": "ONE_GROUP_PER_AGENT"}),
    "groups by name": ("classic.rps_v2", True, {}, {"group_map": {"x": ["player_0", "player_1"]}}),
    "one-hot actions": ("classic.rps_v2", True, {}, {"categorical_actions": False}),
    "until all are done": ("classic.rps_v2", True, {}, {"done_on_any": False}),
    "in turn": ("classic.rps_v2", False, {}, {"use_mask": True}),
    "in turn, masked": ("classic.tictactoe_v3", False, {}, {"use_mask": True}),
    "a state": (
        "butterfly.pistonball_v6",
        True,
        {"n_pistons": 3},
        {"return_state": True},
    ),
    "agents that die": (
        "sisl.multiwalker_v9",
        True,
        {"terminate_on_fall": False},
        {"use_mask": True},
    ),
}
HEAVY = {"a state", "agents that die"}
cases = pytest.mark.parametrize(
    "game", [pytest.param(game, marks=pytest.mark.slow if game in HEAVY else ()) for game in GAMES]
)


def wrapped(lib, game):
    name, at_once, options, keywords = GAMES[game]
    module = importlib.import_module(f"pettingzoo.{name}")
    keywords = dict(keywords)
    if isinstance(keywords.get("group_map"), str):
        keywords["group_map"] = getattr(lib.MarlGroupMapType, keywords["group_map"])
    make = module.parallel_env if at_once else module.env
    return lib.PettingZooWrapper(make(**options), seed=0, **keywords)


@cases
def test_a_game_declares_what_the_reference_declares(game):
    def declared(lib):
        env = wrapped(lib, game)
        leaves = {
            str(key): (type(leaf).__name__, leaf.shape, leaf.dtype)
            for key, leaf in env.specs.items(True, True)
        }
        keys = env.action_keys, env.reward_keys, env.done_keys
        return leaves, env.group_map, [sorted(map(str, some)) for some in keys]

    check_same(declared)


@cases
def test_a_game_shows_what_the_reference_shows(game):
    def played(lib):
        env = wrapped(lib, game)

        def first_allowed(td):
            for key in env.action_keys:
                spec, mask = env.full_action_spec[key], td.get((*key[:-1], "action_mask"), None)
                action = spec.zero() if mask is None else mask.int().argmax(-1)
                if game == "one-hot actions":
                    action[..., 0] = 1
                td[key] = action.to(spec.dtype).reshape(spec.shape)
            return td

        return env.rollout(6, first_allowed)

    check_works_alike(played)
