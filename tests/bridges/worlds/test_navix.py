"""`NavixEnv`: the same numbers as Navix stepped by hand, its events, its names, its errors."""

from __future__ import annotations

import pytest
import torch

from envkit import Categorical, OneHot
from envkit.env.checks import check_env_specs
from envkit.errors import ArgumentError
from tests.bridges.worlds.libraries import assert_equals_navix
from tests.test_readme import ROOT, blocks, execute

pytest.importorskip("navix", reason="needs the extra navix")

from envkit_bridges.worlds.navix import NavixEnv, NavixWrapper

ROWS = 4


@pytest.fixture(scope="module")
def grid():
    return NavixEnv(
        "Navix-Empty-5x5-v0", batch_size=[ROWS], categorical_action_encoding=True, metrics=True
    )


def test_a_grid_with_doors_equals_the_library_stepped_by_hand():
    doors = NavixEnv(
        "Navix-DoorKey-5x5-v0",
        max_steps=10,
        observation_fn="symbolic_first_person",
        batch_size=[ROWS],
        categorical_action_encoding=True,
    )

    ended = assert_equals_navix(doors, steps=40)

    assert ended >= 3 * ROWS


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["categorical", "categorical_first_person", "rgb"])
def test_what_is_observed_is_chosen_by_name(seen):
    env = NavixEnv(
        "Navix-Empty-5x5-v0",
        observation_fn=seen,
        batch_size=[ROWS],
        categorical_action_encoding=True,
    )

    assert_equals_navix(env, steps=5)


# ------------------------------------------------------------------------------------ what is declared


def test_a_grid_shows_its_symbols_and_takes_integers_or_one_hot(grid):
    assert grid.action_spec == Categorical(7, shape=(ROWS,))
    assert NavixEnv("Navix-Empty-5x5-v0").action_spec == OneHot(7, (7,), dtype=torch.int64)
    assert grid.observation_spec["observation"].shape == (ROWS, 5, 5, 3)
    assert grid.observation_spec["observation"].dtype == torch.uint8
    assert (grid.env_name, grid.libname, grid.height) == ("Navix-Empty-5x5-v0", "navix", 5)


def test_the_goal_terminates_with_its_event_and_the_time_limit_truncates(grid):
    right, forward = 1, 2
    grid.set_seed(0)
    td = grid.reset()
    for move in [forward] * 2 + [right] + [forward] * 2:
        td["action"] = torch.full((ROWS,), move)
        data = grid.step(td)
        td = grid.step_mdp(data)
    walked = data["next"]
    short = NavixEnv("Navix-Empty-5x5-v0", max_steps=3, batch_size=[2])
    cut = short.rollout(3, break_when_any_done=False)["next"]

    assert walked["terminated"].all() and not walked["truncated"].any()
    assert walked["metrics", "goal_reached"].all() and (walked["reward"] == 1).all()
    assert cut["truncated"].squeeze(-1).tolist() == [[False, False, True]] * 2
    assert not cut["terminated"].any()


def test_states_hold_pictures_only_where_they_are_observed(grid):
    pictures = NavixEnv("Navix-Empty-5x5-v0", observation_fn="rgb", batch_size=[1])

    words = [env.reset()["state", "words"].shape[-1] for env in (grid, pictures)]

    assert words[0] + 25 * 8 * 8 * 3 // 4 < words[1]


# ------------------------------------------------------------------------ what stateless envs can do


def test_a_stored_state_is_drawn(grid):
    grid.set_seed(0)
    td = grid.reset()
    td["action"] = torch.tensor([1, 2, 2, 2])
    after = grid.step(td)["next"]

    turned, went = grid.render(after, row=0), grid.render(after, row=1)

    assert turned.shape == (40, 40, 3) and turned.dtype == torch.uint8
    assert not torch.equal(turned, went)


@pytest.mark.slow
def test_the_page_and_the_contract_of_specs_hold():
    for code in blocks(ROOT / "docs" / "navix.md").values():
        execute(code)
    env = NavixEnv("Navix-Empty-5x5-v0", batch_size=[3], episode_length=5)

    check_env_specs(env, seed=0)


# --------------------------------------------------------------------------------- names and errors


def test_wrong_options_are_refused_and_an_object_is_taken():
    import navix

    with pytest.raises(ArgumentError, match="max_steps is 0, but must be"):
        NavixEnv("Navix-Empty-5x5-v0", max_steps=0)
    with pytest.raises(ArgumentError, match=r"observation_fn is 'pixels', but must be one of none"):
        NavixEnv("Navix-Empty-5x5-v0", observation_fn="pixels")
    wrapped = NavixWrapper(navix.make("Navix-Empty-5x5-v0"), batch_size=[2])
    assert wrapped.reset()["observation"].shape == (2, 5, 5, 3)
