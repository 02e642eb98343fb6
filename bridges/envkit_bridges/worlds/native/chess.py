"""Chess by the rules of python-chess, with every move an action of one fixed list, and positions and moves as text.

The order of `san_moves` is that of the actions of `ChessEnv`. A move is named by its piece, the square it goes to, and as
much of its origin as is needed among like pieces: nothing, the file, else the rank, else both. So a
string is in the list if some position makes it a move's name; each is there plain, with check (+) and with mate
(#). Source: PGN standard, 8.2.3.

Conventions
    fen      a position; it knows no move before, so that no position counts as repeated.
    pgn      a whole game, from its first position.
    san      a move; "<start>" where there was none.
    square   (file, rank), each in range(8).
    order    of moves: short strings first, those of one length by their characters.
    action   int64, shape (*batch,): place in `san_moves`, the same for both colours.
    turn     bool, shape (*batch,): White is to move.
    text     an entry of strings, see `envkit_bridges.worlds.native.texts`: san, fen, pgn.
    picture  uint8, shape (3, 390, 390): squares of 45 pixels in a margin of 15, White at the bottom; rows from the
             top, columns from the left.
    glyph    15 rows of 15 characters, "#" where a piece is; each is drawn 3 x 3 pixels large.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, Unpack

import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.arguments import as_bool
from envkit.env.base import EnvBase
from envkit.env.facts import Facts
from envkit.env.options import EnvOptions
from envkit.envs.seeded_env import Undrawn
from envkit.errors import (
    ArgumentError,
    BatchSizeError,
    InputError,
    MissingKeyError,
    NotResetError,
    UnknownStateError,
)
from envkit.specs import Binary, Bounded, Categorical, Composite, NonTensor, Unbounded
from envkit.specs.annotations import Device, EnvData, require_memory
from envkit.specs.lasting import lasting
from envkit_bridges.libraries import require
from envkit_bridges.worlds.native.texts import Repertoire, strings_in, written

if TYPE_CHECKING:
    import chess

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
    for target in product(range(8), range(8)):
        plain.update(_of_pawns(target))
        plain.update(f"K{takes}{_name(target)}" for takes in ("", "x"))
        for piece, takes in product(_REACH, ("", "x")):
            plain.update(
                f"{piece}{origin}{takes}{_name(target)}" for origin in _origins(piece, target)
            )
    named = (move + end for move, end in product(plain, ("", "+", "#")))
    return tuple(sorted(named, key=lambda move: (len(move), move)))


def _of_pawns(target: Square) -> Iterator[str]:
    """List the pawn moves to a square, of both colours."""
    file, rank = target
    promoted = [""] if 0 < rank < 7 else [f"={piece}" for piece in "BNQR"]
    neighbours = [f"{_file(near)}x" for near in (file - 1, file + 1) if 0 <= near < 8]
    for origin, end in product(["", *neighbours], promoted):
        yield f"{origin}{_name(target)}{end}"


def _origins(piece: str, target: Square) -> Iterator[str]:
    """List the ways in which the origin of a move may have to be written."""
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
    """Yield the squares from which a piece reaches another, by direction: only the nearest piece of each can."""
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


def board_of(name: str, text: str) -> chess.Board:
    """Return the board that a text says.

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
            raise ArgumentError(
                f"fen is {text!r}, which is no position: {error}. Pass chess.STARTING_FEN, for example."
            ) from error
    game = require("chess.pgn").read_game(io.StringIO(text))
    if game is None or game.errors:
        fault = "it is empty" if game is None else str(game.errors[0])
        raise ArgumentError(
            f"pgn is {text!r}, which is no game: {fault}. Pass '1. e4 e5', for example."
        )
    return game.end().board()


def first_board() -> chess.Board:
    """Return the board a game begins with."""
    return require("chess").Board()


def pgn_of(board: object) -> str:
    """Write a game down."""
    return str(require("chess.pgn").Game.from_board(board))


def last_san(board: chess.Board) -> str:
    """Return the name of the last move."""
    if not board.move_stack:
        return START
    before = board.copy()
    return before.san(before.pop())


def is_over(board: chess.Board) -> bool:
    """Check whether a game has ended, the fifty-move rule included."""
    return board.is_game_over() or board.is_fifty_moves()


def worth(board: chess.Board) -> float:
    """Return what the last move earned: 1 for mate, 0.5 for a draw, else 0."""
    if board.is_checkmate():
        return 1.0
    return 0.5 if is_over(board) else 0.0


@cache
def index_of() -> dict[str, int]:
    """Return the number of each move."""
    return {san: index for index, san in enumerate(san_moves())}


def legal_indices(board: chess.Board) -> list[int]:
    """Number the legal moves, in the order of python-chess."""
    numbers = index_of()
    return [numbers[board.san(move)] for move in board.legal_moves]


def played(board: chess.Board, action: int) -> str:
    """Make a move on a board, and name it.

    Raises:
        InputError: it is not legal there by exactly this name: python-chess would also read one that says check, mate
            or an origin which are not so, or need not be written.
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


def picture(board: chess.Board) -> torch.Tensor:
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
@lasting()
def _empty_board() -> torch.Tensor:
    drawn = _colour(_FRAME).unsqueeze(-1).repeat(1, SIDE, SIDE)
    for rank in range(8):
        for file in range(8):
            top, left = (_MARGIN + _SQUARE * at for at in (rank, file))
            field = _colour(_LIGHT if (rank + file) % 2 == 0 else _DARK).unsqueeze(-1)
            drawn[:, top : top + _SQUARE, left : left + _SQUARE] = field
    return drawn


@cache
@lasting()
def _glyph(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels of a piece, and those of its edge, bool, shape (45, 45)."""
    cells = torch.zeros(15, 15, dtype=torch.bool, device="cpu")
    for first, last, half in _SHAPES[kind]:
        cells[first : last + 1, 7 - half : 8 + half] = True
    for row, column in _NOTCHES.get(kind, ()):
        cells[row, column] = False
    inside = cells.repeat_interleave(3, 0).repeat_interleave(3, 1)
    around = torch.nn.functional.max_pool2d((~inside)[None].float(), 3, 1, 1)[0].bool()
    return inside, inside & around


def _colour(rgb: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor(rgb, dtype=torch.uint8, device="cpu").unsqueeze(-1)


MOST_MOVES = 218
"""The most legal moves any position has that can be reached."""


class ChessEnv(Undrawn, EnvBase):
    """Play a game of chess, both colours of which the caller moves.

    Args:
        stateful: the env keeps the game, and is one game. False: each step reads its position from the data, so
            that any positions can be stepped in any order and any batch size; this needs ``include_fen`` or
            ``include_pgn``. A position read from ``fen`` alone remembers no move: nothing counts as repeated.
        include_san: show the last move as ``san``, "<start>" where there was none.
        include_fen: show the position as ``fen``.
        include_pgn: show the game so far as ``pgn``.
        include_legal_moves: show the actions that are legal as ``legal_moves``, int64, shape (218,), filled up
            with the number of actions.
        include_hash: show each text's hash too: ``fen_hash`` and so on, int64, shape ().
        include_hash_inv: remember texts by their hashes, so that a reset or a step may be given these alone.
        mask_actions: show which actions are legal as ``action_mask``, bool, a flag for each of all actions.
        pixels: show the board as ``pixels``, uint8, shape (3, 390, 390).
        device: where data is; games are played on the CPU.
        **options: see `envkit.env.options.EnvOptions`.

    A step earns 1 for mate and 0.5 for a draw, for either player. Draws are those that end a game by
    themselves, and fifty moves of each side without a capture or a pawn's move. Random actions are legal moves.
    A reset to data that holds ``fen``, ``pgn`` or their hashes begins there unless ``set_state`` is False.

    Raises:
        MissingLibraryError: (an ImportError) python-chess is not installed.
        UnknownStateError: (a RuntimeError) ``stateful`` is False, and there is neither fen nor pgn.
        ArgumentError: (a ValueError) ``include_hash_inv`` without ``include_hash``; a batch size of a stateful
            env; at a reset: the game that is given is over, or no game.
        InputError: (a ValueError) at a step: the move is not legal.

    Example:
        >>> import chess
        >>> from envkit import ChessEnv
        >>> env = ChessEnv(include_fen=True)
        >>> td = env.reset()
        >>> td["fen"]
        'rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1'
        >>> int(td["action_mask"].sum())
        20
        >>> td = env.step(env.rand_action(td))
        >>> td["next", "reward"]
        tensor([0.])
        >>> env.close()
    """

    shows = "ChessEnv(pixels=True) has the board in its data, as td['pixels']"
    _supports_set_state = True

    def __init__(
        self,
        *,
        stateful: bool = True,
        include_san: bool = False,
        include_fen: bool = False,
        include_pgn: bool = False,
        include_legal_moves: bool = False,
        include_hash: bool = False,
        include_hash_inv: bool = False,
        mask_actions: bool = True,
        pixels: bool = False,
        device: Device | None = None,
        **options: Unpack[EnvOptions],
    ):
        require("chess.pgn")  # or say now that it is missing
        super().__init__(device=device, **options)
        require_memory(self.device, type(self).__name__)
        shown = {"san": include_san, "fen": include_fen, "pgn": include_pgn}
        switches = {
            "stateful": stateful,
            **{f"include_{name}": switch for name, switch in shown.items()},
            "include_legal_moves": include_legal_moves,
            "include_hash": include_hash,
            "include_hash_inv": include_hash_inv,
            "mask_actions": mask_actions,
            "pixels": pixels,
        }
        for name, switch in switches.items():
            as_bool(name, switch)
        self._texts = [name for name, is_shown in shown.items() if is_shown]
        self._starts = [name for name in ("pgn", "fen") if name in self._texts]
        _require_options(stateful, self._starts, self.batch_size, include_hash, include_hash_inv)
        self.stateful, self._batch_locked = stateful, stateful
        self.mask_actions, self.pixels = mask_actions, pixels
        self.include_legal_moves, self.include_hash = include_legal_moves, include_hash
        self._repertoires = {
            name: Repertoire(include_hash_inv and name in self._starts)
            for name in self._texts
            if include_hash
        }
        self._board: Any = None
        self._declare()

    def _declare(self) -> None:
        count = len(san_moves())
        place: dict[str, Any] = {"device": self.device}
        shown: dict[str, Any] = {"turn": Categorical(2, (), dtype=torch.bool, **place)}
        start = first_board()
        examples = {"san": START, "fen": start.fen()}
        for name in self._texts:
            example = pgn_of(start) if name == "pgn" else examples[name]
            shown[name] = NonTensor(
                (), self.device, example_data=example, batched=None if self.stateful else True
            )
            if self.include_hash:
                shown[f"{name}_hash"] = Unbounded((), dtype=torch.int64, **place)
        state = {name: leaf.clone() for name, leaf in shown.items() if name in self._state_names()}
        if self.include_legal_moves:
            shown["legal_moves"] = Bounded(0, count, (MOST_MOVES,), dtype=torch.int64, **place)
        if self.mask_actions:
            shown["action_mask"] = Binary(count, dtype=torch.bool, **place)
        if self.pixels:
            shown["pixels"] = Bounded(0, 255, (3, SIDE, SIDE), dtype=torch.uint8, **place)
        self.observation_spec_unbatched = Composite(shown)
        self.state_spec_unbatched = Composite(state)
        self.action_spec_unbatched = Categorical(count, (), dtype=torch.int64, **place)
        self.reward_spec_unbatched = Unbounded((1,), dtype=torch.float32, **place)

    def _state_names(self) -> list[str]:
        """List the entries that say a position: texts, and hashes whose texts are remembered."""
        hashes = [f"{name}_hash" for name, seen in self._repertoires.items() if seen.remembers]
        return [*self._starts, *hashes]

    # ---------------------------------------------------------------------------- reset and step

    def _reset(self, td: TensorDictBase | None, *, set_state: bool) -> TensorDictBase:
        shape = self.batch_size if td is None else td.batch_size
        if set_state and td is not None:
            boards = self._boards_in(td)
            for board in boards:
                _require_open(board)
        else:
            boards = [first_board() for _ in range(shape.numel())]
        if self.stateful:
            self._board = boards[0]
        return TensorDict(self._shown(boards, shape), shape, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        boards = self._boards_at(td)
        chosen = self._action_inputs["action"].take(td.get("action", None), td.batch_size)
        actions = chosen.flatten().tolist()
        sans = [played(board, act) for board, act in zip(boards, actions, strict=True)]
        over = torch.tensor([is_over(board) for board in boards])
        reward = torch.tensor([worth(board) for board in boards], dtype=torch.float32)
        over, reward = (value.reshape(*td.batch_size, 1) for value in (over, reward))
        out = {**self._shown(boards, td.batch_size, sans), "reward": reward}
        flags = {"done": over, "terminated": over.clone()}
        return TensorDict({**out, **flags}, td.batch_size, device=self.device)

    def _shown(
        self, boards: list[Any], shape: torch.Size, sans: list[str] | None = None
    ) -> dict[str, Any]:
        """Return the observations of boards; ``sans`` are their last moves, where these are known."""
        turn = torch.tensor([board.turn for board in boards])
        out: dict[str, Any] = {"turn": turn.reshape(shape)}
        read: dict[str, Callable[[Any], str]] = {
            "san": last_san,
            "fen": lambda board: board.fen(),
            "pgn": pgn_of,
        }
        for name in self._texts:
            known = sans if name == "san" else None
            strings = [read[name](board) for board in boards] if known is None else known
            out[name] = written(strings, shape)
            if self.include_hash:
                out[f"{name}_hash"] = self._repertoires[name].hashed(strings, shape)
        if self.include_legal_moves or self.mask_actions:
            out.update(self._legal(boards, shape))
        if self.pixels:
            out["pixels"] = torch.stack([picture(board) for board in boards])
            out["pixels"] = out["pixels"].reshape(*shape, 3, SIDE, SIDE)
        return out

    def _legal(self, boards: list[Any], shape: torch.Size) -> dict[str, torch.Tensor]:
        count, out = len(san_moves()), {}
        numbers = torch.full((len(boards), MOST_MOVES), count)
        for row, board in enumerate(boards):
            legal = legal_indices(board)
            numbers[row, : len(legal)] = torch.tensor(legal, dtype=torch.int64)
        if self.include_legal_moves:
            out["legal_moves"] = numbers.reshape(*shape, MOST_MOVES)
        if self.mask_actions:
            mask = torch.zeros(len(boards), count + 1, dtype=torch.bool).scatter_(1, numbers, True)
            out["action_mask"] = mask[:, :count].reshape(*shape, count)
        return out

    # ------------------------------------------------------------------------------- legal moves

    def _find_facts(self) -> Facts:
        facts = super()._find_facts()
        if self.mask_actions:
            return replace(facts, action_masks=(("action", "action_mask"),))
        return replace(facts, draws_own_actions=True)  # it alone knows which are legal

    def _drawn_actions(
        self, td: TensorDictBase, generator: torch.Generator | None, part: Any = ()
    ) -> TensorDictBase:
        """Draw a legal move in each row, and any move where there is none."""
        rows: Any = td if part == () else td[part]
        drawn = []
        for legal in map(legal_indices, self._boards_at(rows)):
            at = torch.randint(max(len(legal), 1), (), generator=generator)
            drawn.append(legal[int(at)] if legal else 0)
        action = torch.tensor(drawn, dtype=torch.int64, device=self.device)
        action = action.reshape(rows.batch_size)
        return TensorDict({"action": action}, rows.batch_size, device=self.device)

    def all_actions(self, tensordict: TensorDictBase | None = None) -> EnvData:
        """List the legal actions of one game, batch size (n,).

        Raises:
            UnknownStateError: (a RuntimeError) actions are not masked.
            BatchSizeError: (a RuntimeError) the data is of several games.
        """
        if not self.mask_actions:
            raise UnknownStateError(
                "mask_actions=False was given, so that all_actions() cannot know which actions are legal. "
                "Build ChessEnv(mask_actions=True), or list all: env.full_action_spec.enumerate()."
            )
        legal = torch.tensor(legal_indices(self._one_board(tensordict)), device=self.device)
        return TensorDict({"action": legal.long()}, [len(legal)], device=self.device)

    def cardinality(self, tensordict: TensorDictBase | None = None) -> int:
        """Count the legal moves of one game."""
        return self._one_board(tensordict).legal_moves.count()

    def get_legal_moves(
        self, tensordict: TensorDictBase | None = None, uci: bool = False
    ) -> list[str]:
        """List the legal moves of one game, in the order of ``legal_moves``.

        Args:
            tensordict: where a stateless env reads the position.
            uci: as squares, "e2e4", instead of standard algebraic

        Raises:
            MissingKeyError: (a KeyError) a stateless env is given no position.
            BatchSizeError: (a RuntimeError) the data is of several games.

        Example:
            >>> import chess
            >>> from envkit import ChessEnv
            >>> env = ChessEnv()
            >>> td = env.reset()
            >>> len(env.get_legal_moves()), "e4" in env.get_legal_moves()
            (20, True)
            >>> env.close()
        """
        board = self._one_board(tensordict)
        return [move.uci() if uci else board.san(move) for move in board.legal_moves]

    # ------------------------------------------------------------------------------------ boards

    def _own_board(self) -> chess.Board:
        if self._board is None:
            raise NotResetError(
                "ChessEnv keeps its game itself, and has none before the first reset. Call env.reset() first."
            )
        return self._board

    def _boards_at(self, td: TensorDictBase) -> list[Any]:
        return [self._own_board()] if self.stateful else self._boards_in(td)

    def _one_board(self, td: TensorDictBase | None) -> chess.Board:
        boards = self._boards_at(TensorDict() if td is None else td)
        if len(boards) != 1:
            raise BatchSizeError(
                f"the data is of {len(boards)} games, which have different legal moves. Pass one: td[0]."
            )
        return boards[0]

    def _boards_in(self, td: TensorDictBase) -> list[Any]:
        """Read the positions of all rows.

        Raises:
            MissingKeyError: (a KeyError) there is no entry that says them.
        """
        for name in self._starts:
            if (strings := strings_in(td, name)) is not None:
                return [board_of(name, string) for string in strings]
        for name, seen in self._repertoires.items():
            if seen.remembers and (hashes := td.get(f"{name}_hash", None)) is not None:
                return [board_of(name, string) for string in seen.strings_of(hashes)]
        names = self._state_names() or ["nothing: pass include_fen=True"]
        raise MissingKeyError(
            f"the data says no position: it has {sorted(map(str, td.keys()))}, and this env reads "
            f"{', '.join(names)}. Pass what env.reset() or env.step(td) gave."
        )

    # ------------------------------------------------------------------------------------- state

    def _set_seed(self, seed: int) -> None:
        """Only actions are random in chess."""

    def _own_state(self) -> dict[str, Any]:
        """Add the game, and the texts that hashes stand for."""
        state, board = super()._own_state(), self._board
        if board is not None:
            state["game"] = [board.root().fen(), *(move.uci() for move in board.move_stack)]
        texts = {name: list(seen.strings.values()) for name, seen in self._repertoires.items()}
        return {**state, "texts": texts} if any(texts.values()) else state

    def _take_own_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        super()._take_own_state(state, strict=strict)
        fen, *moves = state.get("game") or [None]
        self._board = None if fen is None else board_of("fen", fen)
        for move in moves:
            self._board.push_uci(move)
        for name, strings in state.get("texts", {}).items():
            self._repertoires[name].hashed(strings, torch.Size([len(strings)]))


def _require_open(board: chess.Board) -> None:
    """Check that a game that is to begin is not over."""
    if is_over(board):
        raise ArgumentError(
            f"a reset was given a game that is over: {board.fen()!r}. Pass a position in which there is a move to "
            "make, or set_state=False to begin a game of chess."
        )


def _require_options(
    stateful: bool, starts: list[str], batch: torch.Size, has_hashes: bool, finds: bool
) -> None:
    """Check that options go together."""
    if not stateful and not starts:
        raise UnknownStateError(
            "stateful=False was given, but no entry that says the position. Pass include_fen=True or "
            "include_pgn=True."
        )
    if stateful and batch:
        raise ArgumentError(
            f"batch_size is {list(batch)}, but a stateful ChessEnv is one game. Pass stateful=False with "
            "include_fen=True, or build a SerialEnv or ParallelEnv of games."
        )
    if finds and not has_hashes:
        raise ArgumentError("include_hash_inv=True needs hashes. Pass include_hash=True too.")
