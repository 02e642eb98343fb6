"""A picture of a board of python-chess: squares of 45 pixels in a margin of 15, White at the bottom.

Conventions
    picture  uint8, shape (3, 390, 390): colours, rows from the top, columns from the left.
    glyph    15 rows of 15 characters, "#" where a piece is; each is drawn 3 x 3 pixels large.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ["SIDE", "picture"]

SIDE, _SQUARE, _MARGIN = 390, 45, 15
_LIGHT, _DARK, _FRAME = (240, 217, 181), (181, 136, 99), (33, 33, 33)
_WHITE, _BLACK, _EDGE = (255, 255, 255), (0, 0, 0), (110, 110, 110)

# The silhouette of each piece by rows from its top, as (first row, last row, half its width there).
_SHAPES = {
    "P": [(3, 6, 2), (7, 7, 1), (8, 9, 2), (10, 11, 3), (12, 13, 4)],
    "N": [(2, 3, 2), (4, 6, 4), (7, 7, 5), (8, 9, 2), (10, 11, 3), (12, 13, 5)],
    "B": [(1, 2, 1), (3, 4, 2), (5, 7, 3), (8, 8, 2), (9, 10, 1), (11, 11, 3), (12, 13, 5)],
    "R": [(2, 4, 4), (5, 9, 3), (10, 11, 4), (12, 13, 5)],
    "Q": [(1, 1, 5), (2, 3, 4), (4, 6, 3), (7, 9, 2), (10, 11, 4), (12, 13, 6)],
    "K": [(0, 0, 1), (1, 1, 2), (2, 2, 1), (3, 5, 5), (6, 9, 3), (10, 11, 4), (12, 13, 6)],
}
_NOTCHES = {  # (row, column) cells that are cut out of a silhouette, to tell like shapes apart
    "N": [(r, c) for r in range(2, 7) for c in (8, 9, 10, 11) if c - 8 >= r - 3],
    "R": [(2, 5), (2, 9), (3, 5), (3, 9)],
    "Q": [(1, 4), (1, 6), (1, 8), (1, 10), (2, 6), (2, 8)],
    "B": [(4, 7), (5, 7), (6, 7)],
}


def picture(board: Any) -> torch.Tensor:
    """Draw a board."""
    drawn = _empty_board().clone()
    for square, piece in board.piece_map().items():
        file, rank = square % 8, square // 8
        top, left = (_MARGIN + _SQUARE * at for at in (7 - rank, file))
        inside, edge = _glyph(piece.symbol().upper())
        field = drawn[:, top : top + _SQUARE, left : left + _SQUARE]
        field[:, inside] = _colour(_WHITE if piece.color else _BLACK)
        field[:, edge] = _colour(_EDGE)
    return drawn


@cache
def _empty_board() -> torch.Tensor:
    drawn = _colour(_FRAME).unsqueeze(-1).repeat(1, SIDE, SIDE)
    for rank in range(8):
        for file in range(8):
            top, left = (_MARGIN + _SQUARE * at for at in (rank, file))
            field = _colour(_LIGHT if (rank + file) % 2 == 0 else _DARK).unsqueeze(-1)
            drawn[:, top : top + _SQUARE, left : left + _SQUARE] = field
    return drawn


@cache
def _glyph(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the pixels of a piece, and those of its edge, bool, shape (45, 45)."""
    cells = torch.zeros(15, 15, dtype=torch.bool)
    for first, last, half in _SHAPES[kind]:
        cells[first : last + 1, 7 - half : 8 + half] = True
    for row, column in _NOTCHES.get(kind, ()):
        cells[row, column] = False
    inside = cells.repeat_interleave(3, 0).repeat_interleave(3, 1)
    around = torch.nn.functional.max_pool2d((~inside)[None].float(), 3, 1, 1)[0].bool()
    return inside, inside & around


def _colour(rgb: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor(rgb, dtype=torch.uint8).unsqueeze(-1)
