"""Positions of chess as text and as boards of python-chess, and what a game is worth.

Conventions
    fen  a position; it knows no move before, so that no position counts as repeated.
    pgn  a whole game, from its first position.
    san  a move, see `san_moves`; "<start>" where there was none.
"""

from __future__ import annotations

import io
from functools import cache
from typing import Any

from envkit.errors import ArgumentError, InputError
from envkit_bridges.libraries import require
from envkit_bridges.worlds.native.chess.san_moves import san_moves

__all__ = [
    "START",
    "board_of",
    "first_board",
    "index_of",
    "is_over",
    "last_san",
    "legal_indices",
    "pgn_of",
    "played",
    "worth",
]

START = "<start>"


def board_of(name: str, text: str) -> Any:
    """Give the board that a text says.

    Args:
        name: "fen" or "pgn".
        text: of that kind.

    Raises:
        ArgumentError: it says none.
    """
    if name == "fen":
        try:
            return require("chess").Board(text)
        except ValueError as error:
            raise ArgumentError(f"fen is {text!r}, which is no position: {error}.") from error
    game = require("chess.pgn").read_game(io.StringIO(text))
    if game is None or game.errors:
        fault = "it is empty" if game is None else str(game.errors[0])
        raise ArgumentError(f"pgn is {text!r}, which is no game: {fault}.")
    return game.end().board()


def first_board() -> Any:
    """Give the board a game begins with."""
    return require("chess").Board()


def pgn_of(board: Any) -> str:
    """Write a game down."""
    return str(require("chess.pgn").Game.from_board(board))


def last_san(board: Any) -> str:
    """Name the last move."""
    if not board.move_stack:
        return START
    before = board.copy()
    return before.san(before.pop())


def is_over(board: Any) -> bool:
    """Say whether a game has ended, the fifty-move rule included."""
    return board.is_game_over() or board.is_fifty_moves()


def worth(board: Any) -> float:
    """Give what the last move earned: 1 for mate, 0.5 for a draw, else 0."""
    if board.is_checkmate():
        return 1.0
    return 0.5 if is_over(board) else 0.0


@cache
def index_of() -> dict[str, int]:
    """Give the number of each move."""
    return {san: index for index, san in enumerate(san_moves())}


def legal_indices(board: Any) -> list[int]:
    """Number the legal moves, in the order of python-chess."""
    numbers = index_of()
    return [numbers[board.san(move)] for move in board.legal_moves]


def played(board: Any, action: int) -> str:
    """Make a move on a board, and name it.

    Raises:
        InputError: it is not legal there by exactly this name: python-chess would also read one that says check, mate
            or an origin which are not so, or need not be told.
    """
    named = san_moves()[action]
    try:
        move = board.parse_san(named)
    except ValueError:
        move = None
    if move is None or board.san(move) != named:
        legal = (
            ", ".join(board.san(move) for move in board.legal_moves) or "nothing, the game is over"
        )
        raise InputError(
            f"action {action} is {named!r}, but legal in {board.fen()!r} is "
            f"{legal}. Choose among env.all_actions(td), as env.rand_action(td) does."
        )
    board.push(move)
    return named
