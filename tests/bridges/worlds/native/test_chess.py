"""`ChessEnv` beside python-chess: the same games, whoever keeps the position; every move has a number."""

from __future__ import annotations

import random
import re

import chess
import pytest
import torch
from tensordict import TensorDict

from envkit import SerialEnv, StepCounter, TransformedEnv, check_env_specs
from envkit.errors import (
    ArgumentError,
    BatchSizeError,
    InputError,
    MissingKeyError,
    NotResetError,
    UnknownStateError,
    UnsupportedError,
)
from envkit_bridges.worlds.native.chess import ChessEnv, san_moves

NUMBER = {san: index for index, san in enumerate(san_moves())}
EVERYTHING = dict.fromkeys(
    [
        *("include_san", "include_fen", "include_pgn", "include_legal_moves"),
        *("include_hash", "include_hash_inv", "pixels"),
    ],
    True,
)
MATED = "R1k5/8/2K5/8/8/8/8/8 b - - 0 1"
MATE_IN_ONE = "2k5/R7/2K5/8/8/8/8/8 w - - 0 1"
STALE_IN_ONE = "7k/8/5K2/8/8/8/8/6Q1 w - - 0 1"
FIFTY_IN_ONE = "4k3/8/8/8/8/8/r7/4K2R w - - 99 80"


def of(san):
    return torch.tensor(NUMBER[san])


def at(fen, **entries):
    return TensorDict({"fen": fen, **entries})


# -- numbers of moves ------------------------------------------------------------------


def test_moves_are_listed_once_short_ones_first():
    moves = list(san_moves())

    assert len(set(moves)) == len(moves) == 29274
    assert moves == sorted(moves, key=lambda move: (len(move), move))
    assert moves[0] == "a2" and moves[-1] == "hxg8=R+"


def crowded(chance):
    """Give a position with many like pieces, as promotions can make it."""
    board = chess.Board(None)
    squares = chance.sample(range(64), 10)
    for square, kind in zip(squares, [chess.KING, *chance.choices(range(2, 6), k=7)], strict=False):
        board.set_piece_at(square, chess.Piece(kind, chess.WHITE))
    board.set_piece_at(squares[8], chess.Piece(chess.KING, chess.BLACK))
    board.set_piece_at(squares[9], chess.Piece(chess.ROOK, chess.BLACK))
    return board


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_every_legal_move_has_a_number_of_its_own(count):
    chance, seen = random.Random(0), 0
    for board in (crowded(chance) for _ in range(count)):
        if not board.was_into_check():
            numbers = [NUMBER[board.san(move)] for move in board.legal_moves]
            seen += len(numbers)
            assert len(set(numbers)) == len(numbers)

    assert seen > 10 * count


# -- games -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"include_fen": True}, 300),
        ({"stateful": False, "include_fen": True}, 300),
        (
            {"stateful": False, "include_pgn": True, "include_fen": True},
            100,
        ),  # each step reads the game
    ],
    ids=["kept by the env", "in the data as fen", "in the data as pgn"],
)
def test_random_games_are_those_of_python_chess(options, most):
    env = ChessEnv(include_san=True, include_legal_moves=True, **options)
    chance, steps = random.Random(0), 0
    for _ in range(2):
        board, root, done = chess.Board(), env.reset(), False
        while not done and steps < most:
            legal = [NUMBER[board.san(move)] for move in board.legal_moves]
            assert root["fen"] == board.fen() and bool(root["turn"]) == board.turn
            assert root["legal_moves"].tolist() == legal + [29274] * (218 - len(legal))
            assert root["action_mask"].nonzero().flatten().tolist() == sorted(legal)

            move = chance.choice(list(board.legal_moves))
            san = board.san(move)
            board.push(move)
            td = env.step(root.set("action", of(san)))

            done, steps = bool(td["next", "done"]), steps + 1
            assert done == (board.is_game_over() or board.is_fifty_moves())
            worth = 1.0 if board.is_checkmate() else 0.5 if done else 0.0
            assert td["next", "reward"].item() == worth and td["next", "san"] == san
            root = env.step_mdp(td)

    assert steps >= min(200, most)


@pytest.mark.parametrize(
    ("fen", "move", "reward"),
    [
        (MATE_IN_ONE, "Ra8#", 1.0),
        (STALE_IN_ONE, "Qg6", 0.5),
        (FIFTY_IN_ONE, "Rh2", 0.5),
        ("8/8/8/8/8/1k6/7q/K7 b - - 0 1", "Qa2#", 1.0),
    ],
)
@pytest.mark.parametrize("stateful", [True, False])
def test_mate_earns_one_and_a_draw_a_half(fen, move, reward, stateful):
    env = ChessEnv(stateful=stateful, include_fen=True)

    following = env.step(env.reset(at(fen), set_state=True).set("action", of(move)))["next"]

    assert following["reward"].item() == reward
    assert following["done"].item() and following["terminated"].item()


def test_any_positions_step_in_any_order_and_batch():
    env = ChessEnv(stateful=False, include_fen=True)
    first = env.reset()
    second = env.step_mdp(env.step(first.clone().set("action", of("e4"))))
    third = env.step_mdp(env.step(second.clone().set("action", of("e5"))))

    rows = torch.stack([third, first, second]).set(
        "action", torch.stack([of("Nf3"), of("d4"), of("c5")])
    )
    following = env.step(rows)["next"]

    boards = [chess.Board() for _ in range(3)]
    for board, moves in zip(boards, (["e4", "e5", "Nf3"], ["d4"], ["e4", "c5"]), strict=True):
        for move in moves:
            board.push_san(move)
    assert following.get("fen").tolist() == [board.fen() for board in boards]
    assert following["turn"].tolist() == [False, False, True]


def test_rows_that_are_not_stepped_or_reset_keep_their_games():
    env = ChessEnv(stateful=False, include_fen=True)
    root = env.reset(TensorDict(batch_size=[2])).set("action", torch.stack([of("e4"), of("d4")]))
    start = chess.STARTING_FEN

    root = env.step_mdp(env.step(root.set("_step", torch.tensor([True, False]))))
    assert [fen == start for fen in root.get("fen").tolist()] == [False, True]

    both = env.step_mdp(env.step(root.set("action", torch.stack([of("e5"), of("d4")]))))
    again = env.reset(both.set("_reset", torch.tensor([True, False])), set_state=False)
    assert [fen == start for fen in again.get("fen").tolist()] == [True, False]


@pytest.mark.parametrize(
    "options",
    [
        {"mask_actions": False},
        EVERYTHING,
        {"stateful": False, **EVERYTHING},
        {"stateful": False, "include_pgn": True, "batch_size": [2]},
    ],
    ids=["bare", "all", "stateless", "rows"],
)
def test_chess_does_what_its_specs_say(options):
    check_env_specs(ChessEnv(**options), seed=0)


def test_random_actions_are_legal_and_come_from_the_seed():
    def play(seed, **options):
        env = ChessEnv(include_fen=True, **options)
        env.set_seed(seed)
        return list(env.rollout(20)["next"].get("fen").tolist())

    assert play(0) == play(0, stateful=False) == play(0, mask_actions=False)
    assert play(0) != play(1)


def test_games_work_as_rows_and_under_transforms():
    env = TransformedEnv(SerialEnv(2, lambda: ChessEnv(include_fen=True)), StepCounter(6))
    check_env_specs(env, seed=0)

    data = env.rollout(14, break_when_any_done=False)

    assert data.shape == (2, 14) and data["next", "truncated"].sum() == 4


# -- legal moves -----------------------------------------------------------------------


def test_the_first_move_is_one_of_twenty():
    env = ChessEnv(stateful=False, include_fen=True)
    root = env.reset()

    actions = env.all_actions(root)

    assert env.cardinality(root) == 20 and actions.shape == (20,)
    assert [san_moves()[action] for action in actions["action"].tolist()] == env.get_legal_moves(
        root
    )
    assert {"e2e4", "g1f3"} <= set(env.get_legal_moves(root, uci=True))
    assert env.step(root.set("action", actions["action"][3]))["next", "turn"].item() is False


def test_what_cannot_be_asked_is_told():
    unmasked = ChessEnv(mask_actions=False)
    with pytest.raises(UnknownStateError, match="mask_actions=False was given"):
        unmasked.all_actions(unmasked.reset())
    with pytest.raises(UnknownStateError, match="include_fen=True or include_pgn=True"):
        ChessEnv(stateful=False)
    with pytest.raises(ArgumentError, match="include_hash_inv=True needs hashes"):
        ChessEnv(include_fen=True, include_hash_inv=True)
    with pytest.raises(ArgumentError, match="a stateful ChessEnv is one game"):
        ChessEnv(batch_size=[2])
    with pytest.raises(NotResetError, match=r"Call env\.reset\(\) first"):
        ChessEnv().cardinality()
    with pytest.raises(TypeError, match="include_san is 'no', but must be a bool"):
        ChessEnv(include_san="no")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"ChessEnv\(pixels=True\) has the board"):
        unmasked.render()
    env = ChessEnv(stateful=False, include_fen=True)
    with pytest.raises(MissingKeyError, match="this env reads fen"):
        env.get_legal_moves()
    with pytest.raises(BatchSizeError, match=r"Pass one: td\[0\]"):
        env.cardinality(env.reset(TensorDict(batch_size=[2])))


def test_moves_that_are_not_legal_are_refused():
    env = ChessEnv()
    root = env.reset()

    with pytest.raises(InputError, match=r"is 'e5', but legal in 'rnbqkbnr/.* is Nh3, Nf3"):
        env.step(root.clone().set("action", of("e5")))
    with pytest.raises(InputError, match="'action' is 29274, but"):
        env.step(root.clone().set("action", torch.tensor(29274)))


@pytest.mark.parametrize("other_name", ["e4#", "e4+", "Ngf3"])
def test_a_legal_move_by_another_name_is_refused_and_nothing_is_played(other_name):
    env = ChessEnv()
    root = env.reset()
    action = of(other_name)
    assert not root["action_mask"][action]

    with pytest.raises(InputError, match=f"is '{re.escape(other_name)}', but legal in"):
        env.step(root.set("action", action))

    assert env.cardinality() == 20 and env.get_legal_moves()[0] == "Nh3"


# -- where a game begins ---------------------------------------------------------------


def test_a_reset_begins_where_the_data_says():
    env = ChessEnv(include_fen=True, include_pgn=True, include_san=True)
    env.set_seed(0)
    game = env.rollout(5)[-1]["next"]

    assert env.reset(game.select("pgn"))["fen"] == game["fen"]
    assert env.get_legal_moves() == env.get_legal_moves(game)
    assert env.reset(game.select("pgn"))["san"] == game["san"]
    assert env.reset(at(MATE_IN_ONE))["fen"] == MATE_IN_ONE
    assert env.reset(at(MATE_IN_ONE), set_state=False)["fen"] == chess.STARTING_FEN
    assert "Ra8#" not in env.get_legal_moves()


@pytest.mark.parametrize(
    ("entry", "text", "message"),
    [
        ("fen", MATED, "a game that is over"),
        ("fen", "4k3/8/8/8/8/8/8/4K2R w - - 100 80", "a game that is over"),
        ("fen", "nonsense", "no position: expected 8 rows"),
        ("pgn", "1. e4 e4 *", "no game: illegal san: 'e4'"),
    ],
)
def test_a_reset_to_what_is_no_beginning_is_refused(entry, text, message):
    env = ChessEnv(include_fen=True, include_pgn=True)

    with pytest.raises(ArgumentError, match=message):
        env.reset(TensorDict({entry: text}), set_state=True)


@pytest.mark.parametrize("stateful", [True, False])
def test_hashes_alone_say_a_position_that_was_seen(stateful):
    env = ChessEnv(stateful=stateful, include_fen=True, include_hash=True, include_hash_inv=True)
    env.set_seed(0)
    seen = env.rollout(5)[3]

    again = env.reset(TensorDict({"fen_hash": seen["fen_hash"]}))

    assert again["fen"] == seen["fen"] and again["fen_hash"] == seen["fen_hash"]
    assert seen["fen_hash"].dtype == torch.int64 and seen["fen_hash"].shape == ()
    assert (
        ChessEnv(include_fen=True, include_hash=True).reset()["fen_hash"] == env.reset()["fen_hash"]
    )
    with pytest.raises(MissingKeyError, match="no string with the hash 5"):
        env.reset(TensorDict({"fen_hash": torch.tensor(5)}))


def test_a_game_goes_on_from_a_state_dict():
    one, other = (ChessEnv(include_pgn=True) for _ in range(2))
    one.set_seed(0)
    root = one.step_mdp(one.rollout(6)[-1])

    other.load_state_dict(one.state_dict())

    ends = [env.step(env.rand_action(root.clone()))["next"] for env in (one, other)]
    assert ends[0]["pgn"] == ends[1]["pgn"] and "4. " in ends[0]["pgn"]


def test_a_move_changes_two_squares_of_the_picture():
    env = ChessEnv(pixels=True)
    before = env.reset()

    after = env.step(before.clone().set("action", of("e4")))["next", "pixels"]

    changed = (before["pixels"] != after).any(0)[15:375, 15:375]
    squares = changed.unflatten(0, (8, 45)).unflatten(2, (8, 45)).any(3).any(1)
    assert before["pixels"].shape == (3, 390, 390) and before["pixels"].dtype == torch.uint8
    assert squares.nonzero().tolist() == [[4, 4], [6, 4]]
    assert after[:, 0, 0].tolist() == [33, 33, 33]
