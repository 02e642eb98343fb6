"""Positions and moves of chess as text, and boards of python-chess; every move there is, in a fixed order.

The order of `san_moves` is that of the actions of `ChessEnv`. A move is named by its piece, the square it goes to, and as
much of the square it comes from as tells it from moves of like pieces: nothing, the file, else the rank, else both. So a
string is in the list if pieces can stand so that it is a move's name; each is there plain, with check (+) and with mate
(#). Source: PGN standard, 8.2.3.

Conventions
    fen     a position; it knows no move before, so that no position counts as repeated.
    pgn     a whole game, from its first position.
    san     a move; "<start>" where there was none.
    square  (file, rank), each in range(8).
    order   of moves: short strings first, those of one length by their characters.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

from envkit.errors import ArgumentError, InputError
from envkit_bridges.libraries import require

__all__ = ["san_moves"]

Square = tuple[int, int]

_STRAIGHT = [(1, 0), (-1, 0), (0, 1), (0, -1)]
_SLANTED = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
_JUMPS = [(a, b) for a, b in product((-2, -1, 1, 2), repeat=2) if abs(a) != abs(b)]
_REACH = {  # piece: directions, and how many steps it takes in each
    "B": (_SLANTED, 7),
    "N": (_JUMPS, 1),
    "Q": (_STRAIGHT + _SLANTED, 7),
    "R": (_STRAIGHT, 7),
}


@cache
def san_moves() -> tuple[str, ...]:
    """List them all, 29274 strings."""
    plain = {"O-O", "O-O-O"}
    for target in product(range(8), repeat=2):
        plain.update(_of_pawns(target))
        plain.update(f"K{takes}{_name(target)}" for takes in ("", "x"))
        for piece, takes in product(_REACH, ("", "x")):
            plain.update(
                f"{piece}{origin}{takes}{_name(target)}" for origin in _origins(piece, target)
            )
    named = (move + end for move, end in product(plain, ("", "+", "#")))
    return tuple(sorted(named, key=lambda move: (len(move), move)))


def _of_pawns(target: Square) -> Iterator[str]:
    """Name the pawn moves to a square, of both colours."""
    file, rank = target
    promoted = [""] if 0 < rank < 7 else [f"={piece}" for piece in "BNQR"]
    neighbours = [f"{_file(near)}x" for near in (file - 1, file + 1) if 0 <= near < 8]
    for origin, end in product(["", *neighbours], promoted):
        yield f"{origin}{_name(target)}{end}"


def _origins(piece: str, target: Square) -> Iterator[str]:
    """Say in which ways the origin of a move may have to be told."""
    lines = list(_lines_to(piece, target))
    yield ""
    for index, line in enumerate(lines):
        others = [square for other in lines[:index] + lines[index + 1 :] for square in other]
        for file, rank in line:
            shares_file = any(other[0] == file for other in others)
            shares_rank = any(other[1] == rank for other in others)
            if any(other[0] != file for other in others):
                yield _file(file)
            if shares_file:
                yield _rank(rank)
            if shares_file and shares_rank:
                yield _name((file, rank))


def _lines_to(piece: str, target: Square) -> Iterator[list[Square]]:
    """Give the squares from which a piece reaches another, by direction: only the nearest piece of each can."""
    directions, steps = _REACH[piece]
    for across, up in directions:
        line = [(target[0] + across * n, target[1] + up * n) for n in range(1, steps + 1)]
        yield [square for square in line if min(square) >= 0 and max(square) < 8]


def _file(file: int) -> str:
    return "abcdefgh"[file]


def _rank(rank: int) -> str:
    return str(rank + 1)


def _name(square: Square) -> str:
    return _file(square[0]) + _rank(square[1])


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
