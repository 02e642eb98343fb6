"""Mistakes with games of PettingZoo are refused as in the reference; dead agents, infos and ends differ as the page says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.reference.compare import Library, check_same, differs
from tests.zoo.pettingzoo_by_hand import make_bare
from tests.zoo.pettingzoo_games import Fading, fading_in_turns

Make = Callable[[Library], Any]


def game(
    task: str, parallel: bool = True, *, wrapped: dict[str, Any] | None = None, **kwargs
) -> Make:
    def make(library: Library) -> Any:
        return library.PettingZooWrapper(make_bare(task, parallel, **kwargs), **(wrapped or {}))

    return make


def wrapping(make: Callable[[], Any], **kwargs: Any) -> Make:
    return lambda library: library.PettingZooWrapper(make(), **kwargs)


NUMBERLESS = ("weight",)
GAMES = {
    "spread": game("mpe/simple_spread_v3", max_cycles=5),
    "noughts and crosses": game("classic/tictactoe_v3", False, wrapped={"use_mask": True}),
}


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
