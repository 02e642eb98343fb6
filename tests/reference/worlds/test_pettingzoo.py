"""Games of PettingZoo give the same specs, names and data in both libraries, but where the page says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.reference.compare import Library, check_same, check_works_alike, differs
from tests.zoo.pettingzoo_by_hand import make_bare
from tests.zoo.pettingzoo_games import Fading, fading_in_turns

Make = Callable[[Library], Any]


def game(
    task: str, parallel: bool = True, *, wrapped: dict[str, Any] | None = None, **kwargs
) -> Make:
    def make(library: Library) -> Any:
        return library.PettingZooWrapper(make_bare(task, parallel, **kwargs), **(wrapped or {}))

    return make


def with_map(task: str, kind: str) -> Make:
    def make(library: Library) -> Any:
        group_map = library.MarlGroupMapType[kind]
        return library.PettingZooWrapper(make_bare(task, True), group_map=group_map)

    return make


def wrapping(make: Callable[[], Any], **kwargs: Any) -> Make:
    return lambda library: library.PettingZooWrapper(make(), **kwargs)


NUMBERLESS = ("weight",)
GAMES = {
    "spread": game("mpe/simple_spread_v3", max_cycles=5),
    "one-hot": game("mpe/simple_spread_v3", wrapped={"categorical_actions": False}),
    "masks and a state": game(
        "mpe/simple_adversary_v3", max_cycles=5, wrapped={"use_mask": True, "return_state": True}
    ),
    "alone": with_map("mpe/simple_adversary_v3", "ONE_GROUP_PER_AGENT"),
    "in one group": with_map("classic/rps_v2", "ALL_IN_ONE_GROUP"),
    "groups by name": game(
        "classic/rps_v2", wrapped={"group_map": {"players": ["player_0", "player_1"]}}
    ),
    "until all are done": game("classic/rps_v2", wrapped={"done_on_any": False}),
    "boxes": game("sisl/multiwalker_v9"),
    "noughts and crosses": game("classic/tictactoe_v3", False, wrapped={"use_mask": True}),
    "four in a row": game("classic/connect_four_v3", False, wrapped={"use_mask": True}),
    "one-hot observations": game("classic/rps_v2"),
    "knights": game("butterfly/knights_archers_zombies_v11", wrapped={"use_mask": True}),
    "in turns": game("mpe/simple_spread_v3", False, max_cycles=3, wrapped={"use_mask": True}),
    "infos": wrapping(lambda: Fading((3, 3), NUMBERLESS)),
    "until the first dies": wrapping(lambda: Fading((2, 3, 5), NUMBERLESS), use_mask=True),
}
games = pytest.mark.parametrize("make", GAMES.values(), ids=GAMES)


@games
def test_specs_are_the_same(make):
    names = ("full_observation_spec", "full_action_spec", "full_reward_spec", "full_done_spec")

    check_works_alike(lambda library: [getattr(make(library), name) for name in names])


@games
def test_names_are_the_same(make):
    names = (
        *("group_map", "done_on_any", "use_mask", "parallel", "categorical_actions"),
        *(
            "return_state",
            "has_action_mask",
            "action_keys",
            "reward_keys",
            "done_keys",
            "reset_keys",
        ),
    )

    check_works_alike(lambda library: [getattr(make(library), name) for name in names])


@games
def test_games_are_the_same(make):
    check_works_alike(lambda library: played(make(library), steps=12))


def played(env: Any, steps: int) -> list[Any]:
    """Step with the first option that is allowed, or with zeros; keep all data."""
    env.set_seed(0)
    td = env.reset()
    seen = [td.clone()]
    for _ in range(steps):
        td.update(env.full_action_spec.zero())
        for group in env.group_map:
            allowed = td.get((group, "action_mask"), None)
            action = td.get((group, "action"))
            if allowed is not None:
                td.set((group, "action"), allowed.int().argmax(-1))
            elif action.dtype == torch.int64 and action.ndim > 1:
                td.set(
                    (group, "action"), torch.nn.functional.one_hot(action[:, 0], action.shape[-1])
                )
        td = env.step(td)
        seen.append(td.clone())
        td = env.step_mdp(td)
        if td["done"].any():
            td = env.reset()
            seen.append(td.clone())
    return seen


@pytest.mark.parametrize(
    "make",
    [
        game("classic/tictactoe_v3", False),
        game("classic/tictactoe_v3", False, wrapped={"use_mask": True, "return_state": True}),
        game("mpe/simple_v3", wrapped={"group_map": {"all": ["nobody"]}}),
        game("mpe/simple_v3", wrapped={"group_map": {}}),
        game("mpe/simple_v3", wrapped={"batch_size": [2]}),
        wrapping(lambda: "pong"),
        lambda library: library.PettingZooEnv(parallel=True),
    ],
)
def test_the_same_mistakes_are_refused(make):
    check_same(make)


def test_a_mask_of_the_root_that_is_not_set_is_refused():
    def reset(library: Library) -> Any:
        env = GAMES["spread"](library)
        return env.reset(env.reset().set("_reset", torch.tensor([False])))

    check_same(reset)


def test_an_agent_that_dies_without_a_mask_is_refused():
    env = wrapping(lambda: Fading((1, 3), NUMBERLESS), done_on_any=False)

    check_same(lambda library: played(env(library), 3))


# ------------------------------------------------------------------------------------------ otherwise


def test_flags_of_dead_agents_stay_as_they_were():
    env = wrapping(lambda: Fading((1, 4), NUMBERLESS), use_mask=True, done_on_any=False)

    differs("agents", lambda library: played(env(library), 3)[-1])


def test_turns_of_dead_agents_are_no_steps_here():
    env = wrapping(lambda: fading_in_turns((1, 4), NUMBERLESS), use_mask=True, done_on_any=False)

    found = differs("agents", lambda library: played(env(library), 4))

    assert "torchrl" in found


def test_infos_have_dtypes_of_their_own():
    env = wrapping(lambda: Fading((3, 3), ("age",)))

    differs("agents", lambda library: env(library).reset())
    differs("agents", lambda library: wrapping(lambda: Fading((3, 3), ("said",)))(library).reset())


def test_a_game_that_is_over_forbids_nothing():
    def draw(library: Library) -> Any:
        env = GAMES["noughts and crosses"](library)
        td = env.reset()
        for turn, move in enumerate((0, 1, 2, 4, 3, 5, 7, 6, 8)):
            td.update(env.full_action_spec.zero())
            td[f"player_{turn % 2 + 1}", "action"] = torch.tensor([move])
            td = env.step_mdp(env.step(td))
        return [td[player, "action_mask"] for player in ("player_1", "player_2")]

    differs("agents", draw)
