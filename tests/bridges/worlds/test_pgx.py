"""`PgxEnv`: the same games as pgx stepped by hand, whose turn it is and who is paid, illegal actions, self-play, errors."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from envkit import (
    Categorical,
    Collector,
    ExcludeTransform,
    JaxPolicy,
    OneHot,
    StepCounter,
    TransformedEnv,
    compile_policy,
    evaluate,
)
from envkit.env.checks import check_env_specs
from envkit.errors import ArgumentError, InputError
from envkit_bridges.worlds.pgx import PgxEnv, PgxWrapper
from tests.bridges.compare import assert_same
from tests.bridges.worlds.bare import own_states
from tests.bridges.worlds.libraries import assert_equals_pgx

ROWS = 4


@pytest.fixture(scope="module")
def tictactoe():
    return PgxEnv("tic_tac_toe", batch_size=[ROWS])


@pytest.fixture(scope="module")
def by_the_library():
    return PgxEnv("tic_tac_toe", batch_size=[ROWS], illegal="library")


@pytest.mark.slow
def test_leduc_holdem_equals_pgx_stepped_by_hand():
    ended = assert_equals_pgx(PgxEnv("leduc_holdem", batch_size=[ROWS]), steps=20)

    assert ended > 5


# ----------------------------------------------------------------------------------- what is declared


def test_a_game_shows_whose_turn_it_is_what_is_legal_and_pays_each_player(tictactoe):
    tictactoe.set_seed(0)
    td = tictactoe.reset()
    step = tictactoe.rand_step(td.clone())

    free = PgxEnv("tic_tac_toe", batch_size=[ROWS]).action_spec

    assert free == Categorical(9, shape=(ROWS,))
    assert tictactoe.observation_spec["current_player"] == Categorical(2, shape=(ROWS,))
    assert set(tictactoe.reward_keys) == {"reward", "player_reward"}
    assert td["observation"].shape == (ROWS, 3, 3, 2)
    assert td["action_mask"].dtype == torch.bool and td["action_mask"].all()
    assert td["current_player"].dtype == step["next", "current_player"].dtype == torch.int64
    assert torch.equal(step["next", "current_player"], 1 - td["current_player"])
    assert step["next", "reward"].shape == (ROWS, 1)
    assert step["next", "player_reward"].shape == (ROWS, 2)
    assert "player_reward" not in td and "reward" not in td
    names = (tictactoe.env_name, tictactoe.libname, tictactoe.num_players)
    assert names == ("tic_tac_toe", "pgx", 2)


def test_the_state_is_that_of_pgx_without_the_observation(tictactoe):
    fields = {field.name for field in tictactoe._engine.programs.env.packing.fields}

    assert {("rewards",), ("legal_action_mask",), ("draws",), ("moves",)} <= fields
    assert ("observation",) not in fields


def test_moves_are_one_hot_where_asked_for():
    env = PgxEnv("tic_tac_toe", batch_size=[2], categorical_action_encoding=False)
    assert env.action_spec == OneHot(9, (2, 9), dtype=torch.int64)

    step = env.rand_step(env.reset())

    assert torch.equal(step["action"].bool(), step["action_mask"] & ~step["next", "action_mask"])


# ----------------------------------------------------------------------- turns, and who is paid for them


def played(env, td, moves):
    """Let every row make the same moves; gives the steps."""
    steps = []
    for move in moves:
        step, td = env.step_and_maybe_reset(td.set("action", torch.full((ROWS,), move)))
        steps.append(step)
    return torch.stack(steps, -1)


def test_a_player_who_loses_on_the_sixth_ply_is_paid_at_the_move_of_the_other(tictactoe):
    tictactoe.set_seed(0)
    root = tictactoe.reset()
    first = root["current_player"]
    assert set(first.tolist()) == {0, 1}  # in some rows player 0 begins, in others player 1

    data = played(tictactoe, root, [0, 3, 1, 4, 8, 5])  # first: 0 1 8; second: 3 4 5, a row

    second = 1 - first
    movers = torch.stack([first, second] * 3, -1)
    assert torch.equal(data["current_player"], movers)
    assert data["next", "done"].squeeze(-1).tolist() == [[False] * 5 + [True]] * ROWS
    assert data["next", "reward"].squeeze(-1).tolist() == [[0.0] * 5 + [1.0]] * ROWS
    paid = data["next", "player_reward"]
    assert (paid[:, :5] == 0).all()
    rows = torch.arange(ROWS)
    assert (paid[rows, 5, second] == 1).all() and (paid[rows, 5, first] == -1).all()
    legal = data["action_mask"].sum(-1)
    assert legal.tolist() == [[9, 8, 7, 6, 5, 4]] * ROWS
    assert data["next", "action_mask"][:, -1].all()


def test_a_game_that_is_over_stays_as_it_is_whatever_is_played(tictactoe):
    tictactoe.set_seed(0)
    root = tictactoe.reset()
    over = played(tictactoe, root, [0, 3, 1, 4, 8, 5])[:, -1]["next"]

    with pytest.warns(UserWarning, match="is stepped after its episode has ended"):
        again = tictactoe.step(over.clone().set("action", torch.full((ROWS,), 5)))["next"]

    assert again["terminated"].all() and again["action_mask"].all()
    assert (again["reward"] == 0).all() and (again["player_reward"] == 0).all()
    assert not again["illegal_action"].any()
    for name in ("observation", "current_player"):
        assert torch.equal(again[name], over[name])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.sweep
def test_dice_are_drawn_from_the_state_and_a_player_may_move_several_times():
    env = PgxEnv("backgammon", batch_size=[8])
    env.set_seed(0)

    data = env.rollout(60, break_when_any_done=False)

    assert_equals_pgx(env, steps=20)
    dice = env.unpack(data["state"])["_dice"]
    assert len(dice.reshape(-1, 2).unique(dim=0)) > 20
    stays = data["current_player"] == data["next", "current_player"]
    assert stays.any() and not stays.all()
    stored = data[:, 20].select("state", "action").clone()
    assert_same(env.step(stored)["next"], data["next"][:, 20])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "players"), [("2048", 1), ("sparrow_mahjong", 3)])
def test_one_or_three_players_take_their_turns(name, players):
    env = PgxEnv(name, batch_size=[2])
    env.set_seed(0)

    data = env.rollout(30, break_when_any_done=False)

    assert data["next", "player_reward"].shape == (2, 30, players)
    assert set(data["current_player"].flatten().tolist()) == set(range(players))
    mover = data["current_player"][..., None]
    assert torch.equal(data["next", "player_reward"].gather(-1, mover), data["next", "reward"])


# --------------------------------------------------------------------------------------- illegal actions


corner = JaxPolicy(lambda params, observation, key: jnp.zeros(ROWS, jnp.int32))


def take_corner(td):
    return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))


def test_an_illegal_action_of_a_single_step_is_an_error(tictactoe):
    _, td = tictactoe.step_and_maybe_reset(take_corner(tictactoe.reset()))
    td = tictactoe.rand_action(td)
    td["action"][2] = 0

    with pytest.raises(
        InputError, match=r"'action' of row 2 is 0, which is illegal; legal are \[1, 2, 3.*rand_act"
    ):
        tictactoe.step(td)
    with pytest.raises(InputError, match=r"'action' of row 2 is 0"):
        tictactoe.step_and_maybe_reset(td)
    one = tictactoe.step(td[1])
    td["_step"] = torch.tensor([1, 1, 0, 1], dtype=torch.bool)
    step = tictactoe.step(td)

    assert "illegal_action" in one["next"] and not step["next", "illegal_action"].any()


@pytest.mark.slow
def test_a_run_with_an_illegal_action_is_an_error_after_it(tictactoe):
    message = (
        r"'action' of row 0 at step 1 is 0, which is illegal; legal are \[1.*illegal='library'"
    )

    with pytest.raises(InputError, match=message):
        tictactoe.unroll(tictactoe.reset(), 4, corner)
    with pytest.raises(InputError, match=message):
        tictactoe.rollout(4, corner, break_when_any_done=False)
    with pytest.raises(InputError, match="'action' of row 0 is 0"):
        tictactoe.rollout(4, take_corner)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_so_it_is_until_an_end_in_evaluations_and_in_collectors(tictactoe):
    message = r"'action' of row 0 at step 1 is 0, which is illegal; legal are \[1"

    with pytest.raises(InputError, match=message):
        tictactoe.rollout(4, corner)
    with pytest.raises(InputError, match=message):
        evaluate(tictactoe, corner, episodes=4, reward_key="reward")
    with pytest.raises(ArgumentError, match=r"Name one: reward_key='reward'\."):
        evaluate(tictactoe, corner, episodes=4)
    with pytest.raises(InputError, match=message):
        next(iter(Collector(tictactoe, corner, frames_per_batch=16, total_frames=16)))


def test_the_library_ends_the_game_and_fines_the_player_where_that_is_asked_for(by_the_library):
    by_the_library.set_seed(0)
    root = by_the_library.reset()

    data, _ = by_the_library.unroll(root.clone(), 4, corner)
    stepped = played(by_the_library, root, [0, 0, 0, 0])

    flags = [[False, True, False, True]] * ROWS
    assert data["next", "illegal_action"].squeeze(-1).tolist() == flags
    assert data["next", "done"].squeeze(-1).tolist() == flags
    assert data["next", "reward"].squeeze(-1).tolist() == [[0, -1, 0, -1]] * ROWS
    assert (data["next", "player_reward"].sum(-1) == 0).all()
    assert not data["illegal_action"].any()
    assert_same(data, stepped.exclude("state", ("next", "state")))


@pytest.mark.slow
def test_a_transform_that_hides_the_flag_hides_no_illegal_action(tictactoe):
    blind = TransformedEnv(tictactoe, ExcludeTransform("illegal_action"))
    counted = TransformedEnv(tictactoe, StepCounter())

    with pytest.raises(InputError, match="is illegal"):
        blind.rollout(4, corner, break_when_any_done=False)
    with pytest.raises(InputError, match="at step 1 is 0, which is illegal"):
        counted.rollout(4, corner, break_when_any_done=False)


def test_random_actions_of_a_program_are_legal(tictactoe):
    tictactoe.set_seed(0)

    data = tictactoe.rollout(40, break_when_any_done=False)

    chosen = data["action_mask"].gather(-1, data["action"][..., None])
    assert chosen.all() and data["next", "done"].sum() > 10


@pytest.mark.slow
def test_random_games_of_another_batch_size_are_played_to_their_end(tictactoe):
    tictactoe.set_seed(0)

    data = tictactoe.rollout(9, tensordict=TensorDict(batch_size=[2]), break_when_all_done=True)

    assert data.batch_size[0] == 2 and data["next", "done"][:, -1].all()


# --------------------------------------------------------------------------------------------- self-play


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Linear(18, 9)

    def forward(self, observation, action_mask):
        scores = self.scores(observation.flatten(-3).float())
        return torch.where(action_mask, scores, -torch.inf).argmax(-1)


class Seats(torch.nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, observation, action_mask, current_player):
        moves = [net(observation, action_mask) for net in (self.first, self.second)]
        return torch.where(current_player == 0, *moves)


@pytest.mark.slow
def test_one_or_two_torch_policies_play_both_sides_in_a_program(tictactoe):
    torch.manual_seed(0)
    one, other = Net(), Net()
    keys = ["observation", "action_mask"]
    alone = TensorDictModule(one, keys, ["action"])
    both = TensorDictModule(Seats(one, other), [*keys, "current_player"], ["action"])

    for policy in (alone, both):
        with torch.no_grad():
            tictactoe.set_seed(0)
            data = tictactoe.rollout(12, compile_policy(policy), break_when_any_done=False)
            tictactoe.set_seed(0)
            stepped = tictactoe.rollout(12, policy, break_when_any_done=False)
        assert_same(data, stepped)
    assert tictactoe.traces["unroll"] >= 2
    moves = [net(*(data[key] for key in keys)) for net in (one, other)]
    assert not torch.equal(*moves)
    assert torch.equal(data["action"], torch.where(data["current_player"] == 0, *moves))


# ------------------------------------------------------------------- what every stateless env can do


def test_specs_hold(tictactoe):
    check_env_specs(tictactoe, seed=0)


def test_a_state_names_the_fields_of_the_library(tictactoe):
    td = tictactoe.reset()
    state, _ = own_states(tictactoe, td)

    assert torch.equal(tictactoe.unpack(td["state"])["current_player"].long(), td["current_player"])
    assert type(state.inner).__name__ == "State"


def test_a_stored_state_is_drawn(tictactoe):
    tictactoe.set_seed(0)
    root = tictactoe.reset()
    data = played(tictactoe, root.clone(), [0, 3])

    empty, marked = tictactoe.render(root), tictactoe.render(data[:, 1])

    assert empty.shape == (240, 240, 3) and empty.dtype == torch.uint8
    changed = (empty != marked).any(-1)
    assert changed[:, :100].any() and not changed[:, 100:].any()
    assert tictactoe.render_rollout(data).shape == (2, 3, 240, 240)


def test_letters_and_pictures_in_a_drawing_are_drawn():
    poker = PgxEnv("kuhn_poker", batch_size=[8])
    poker.set_seed(0)
    hands = poker.render_rollout(poker.reset()[None])

    assert (
        len({hand.numpy().tobytes() for hand in hands}) > 1
    )  # cards differ in their letters alone


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chess", "minatar-breakout", "sparrow_mahjong"])
def test_drawings_within_drawings_are_drawn(name):
    env = PgxEnv(name)

    frame = env.render(env.reset())

    assert frame.shape[-1] == 3 and len(frame.flatten(0, 1).unique(dim=0)) > 2


# --------------------------------------------------------------------------------- names and errors


def test_wrong_options_are_told(tictactoe):
    with pytest.raises(ArgumentError, match=r"illegal is 'ignore'.*'library' for what pgx does"):
        PgxEnv("tic_tac_toe", illegal="ignore")
    with pytest.raises(ArgumentError, match=r"action_repeat is 2, but the 2 players"):
        PgxWrapper(tictactoe._env, action_repeat=2)
