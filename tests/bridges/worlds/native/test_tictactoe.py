"""`TicTacToeEnv` beside a tic-tac-toe of another make: sets of cells, and all games there are."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from envkit import SerialEnv, StepCounter, TicTacToeEnv, TransformedEnv, check_env_specs
from envkit.errors import InputError

LINES = [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {0, 3, 6}, {1, 4, 7}, {2, 5, 8}, {0, 4, 8}, {2, 4, 6}]


def has_line(cells):
    return any(line <= set(cells) for line in LINES)


def positions():
    """List all positions before the end of a game, each once, as (cells of who moves, cells of the other)."""
    seen, new = set(), {(frozenset(), frozenset())}
    while new:
        seen |= new
        new = {
            (other, own | {cell})
            for own, other in new
            for cell in set(range(9)) - own - other
            if not has_line(own | {cell}) and len(own) + len(other) < 8
        }
    return sorted(seen, key=lambda pair: (sorted(pair[0]), sorted(pair[1])))


def written(mine, other):
    """Write a position as the env does."""
    cells = [1 if cell in mine else 0 if cell in other else -1 for cell in range(9)]
    return torch.tensor(cells, dtype=torch.int32).reshape(3, 3)


def test_every_move_in_every_position_is_that_of_the_rules():
    moves = [
        (mine, other, cell)
        for mine, other in positions()
        for cell in sorted(set(range(9)) - mine - other)
    ]
    turns = torch.tensor([[(len(mine) + len(other)) % 2] for mine, other, _ in moves])
    boards = torch.stack([written(mine, other) for mine, other, _ in moves])
    root = TensorDict({"board": boards, "turn": turns.int()}, [len(moves)])

    following = TicTacToeEnv().step(root.set("action", torch.tensor([m[2] for m in moves])))["next"]

    wins = torch.tensor([[has_line(mine | {cell})] for mine, _, cell in moves])
    full = torch.tensor([[len(mine) + len(other) == 8] for mine, other, _ in moves])
    after = torch.stack([written(other, mine | {cell}) for mine, other, cell in moves])
    assert len(moves) > 16_000
    assert following["board"].equal(after) and following["turn"].equal(1 - turns.int())
    assert following["mask"].equal((after == -1).flatten(1))
    assert following["done"].equal(wins | full) and following["terminated"].equal(wins | full)
    assert not following["truncated"].any()
    for player in (0, 1):
        earned = (wins & (turns == player)).float()
        assert following[f"player{player}", "reward"].equal(earned)


@pytest.mark.parametrize("single_player", [False, True])
@pytest.mark.parametrize("batch_size", [[], [3]], ids=str)
def test_a_game_does_what_its_specs_say(single_player, batch_size):
    check_env_specs(TicTacToeEnv(single_player=single_player, batch_size=batch_size), seed=0)


def test_random_games_take_five_to_nine_moves_on_free_cells():
    env = TicTacToeEnv()
    env.set_seed(0)
    lengths = {len(env.rollout(9)) for _ in range(60)}

    assert lengths == {5, 6, 7, 8, 9}


def test_random_games_of_a_batch_go_on_until_all_are_over():
    env = TicTacToeEnv()
    env.set_seed(0)

    data = env.rollout(20, break_when_all_done=True, tensordict=TensorDict(batch_size=[64]))

    ended = data["next", "done"].squeeze(-1)
    assert data.shape == (64, 9) and ended[:, -1].all() and not ended[:, :4].any()
    won = data["next", "player0", "reward"].sum(1) + data["next", "player1", "reward"].sum(1)
    full = ~data["next", "mask"][:, -1].any(-1, keepdim=True)
    assert (won <= 1).all() and ((won == 1) | full).all()


def test_a_random_opponent_replies_within_the_step_while_the_game_goes_on():
    env = TicTacToeEnv(single_player=True)
    env.set_seed(0)

    data = env.rollout(60, tensordict=TensorDict(batch_size=[200]), break_when_any_done=False)

    following, done = data["next"], data["next", "done"].squeeze(-1)
    first, second = (following[f"player{i}", "reward"].squeeze(-1) for i in (0, 1))
    empty = (data["board"] == -1).flatten(2).sum(-1)
    left = (following["board"] == -1).flatten(2).sum(-1)
    assert (data["turn"] == 0).all()
    assert ((empty - left)[~done] == 2).all() and (first + second)[~done].sum() == 0
    assert (first + second <= 1).all()
    assert ((empty - left)[first == 1] == 1).all() and ((empty - left)[second == 1] == 2).all()
    share = [won.sum() / done.sum() for won in (first, second)]
    assert (
        0.5 < share[0] < 0.67 and 0.2 < share[1] < 0.37
    )  # of random games 58.5 % and 28.8 % are won


def test_replies_come_from_the_seed():
    def play(seed):
        env = TicTacToeEnv(single_player=True)
        env.set_seed(seed)
        return env.rollout(4, tensordict=TensorDict(batch_size=[50]), break_when_all_done=True)

    one, same, other = play(3), play(3), play(4)

    assert one["next", "board"].equal(same["next", "board"])
    assert not one["next", "board"].equal(other["next", "board"])


def test_a_cell_that_is_taken_or_not_there_is_refused():
    env = TicTacToeEnv()
    root = env.reset(TensorDict(batch_size=[2])).set("action", torch.tensor([4, 4]))
    root = env.step_mdp(env.step(root))

    with pytest.raises(
        InputError, match=r"of row 1 is cell 4, but the free cells are \[0, 1, 2, 3, 5"
    ):
        env.step(root.clone().set("action", torch.tensor([0, 4])))
    with pytest.raises(InputError, match="'action' is 9, but"):
        env.step(env.reset().set("action", torch.tensor(9)))


def test_games_not_stepped_or_reset_stay():
    env = TicTacToeEnv()
    root = env.reset(TensorDict(batch_size=[3])).set("action", torch.tensor([0, 0, 0]))
    mask = torch.tensor([True, False, True])

    root = env.step_mdp(env.step(root.set("_step", mask)))
    assert (root["board"] != -1).flatten(1).any(1).equal(mask)

    again = env.reset(root.set("_reset", torch.tensor([True, True, False])))
    assert (again["board"] != -1).flatten(1).any(1).tolist() == [False, False, True]


def test_rows_of_a_serial_env_draw_free_cells_and_begin_anew():
    env = TransformedEnv(SerialEnv(2, TicTacToeEnv), StepCounter())
    check_env_specs(env, seed=0)

    data = env.rollout(40, break_when_any_done=False)

    assert data.shape == (2, 40) and data["next", "step_count"].max() <= 9
    assert data["next", "done"].sum() >= 8


def test_specs_hold_whatever_options_the_last_random_action_left():
    env = TicTacToeEnv(batch_size=[20])
    env.set_seed(0)
    td = env.reset()
    for _ in range(4):
        td = env.step_mdp(env.rand_step(td))
    left = env.action_spec.mask.clone()

    check_env_specs(env, strict=True)

    assert not left.all()
