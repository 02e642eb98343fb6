"""All moves of chess in standard algebraic notation, in a fixed order: the actions of `ChessEnv`.

A move is named by its piece, the square it goes to, and as much of the square it comes from as tells it from moves
of like pieces: nothing, the file, else the rank, else both. So a string is in the list if pieces can stand so
that it is a move's name; each is there plain, with check (+) and with mate (#). Source: PGN standard, 8.2.3.

Conventions
    square  (file, rank), each in range(8).
    order   short strings first, those of one length by their characters.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

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
