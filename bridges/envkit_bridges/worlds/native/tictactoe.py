"""Tic-tac-toe for two players who take turns, or for one against random replies; the whole game is in the data.

Conventions
    board   int32, shape (*batch, 3, 3): -1 empty, 1 a stone of the player to move, 0 one of the other's. So
            both players see the game alike.
    turn    int32, shape (*batch, 1): 0 or 1, who is to move.
    mask    bool, shape (*batch, 9): free cells, row by row.
    action  int64, shape (*batch,): a cell, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.arguments import as_bool
from envkit.env.facts import Facts
from envkit.env.options import EnvOptions
from envkit.envs.seeded_env import SeededEnv
from envkit.errors import InputError
from envkit.specs import Categorical, Composite, Unbounded
from envkit.specs.annotations import Device, require_memory

_LINES = (
    *((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    *((0, 3, 6), (1, 4, 7), (2, 5, 8)),
    *((0, 4, 8), (2, 4, 6)),
)
EMPTY, OTHER, OWN = -1, 0, 1


class TicTacToeEnv(SeededEnv):
    """Play tic-tac-toe; who completes a line of three earns 1, under ``("player0", "reward")`` or ``("player1", "reward")``.

    Args:
        single_player: the moves of player 1 are drawn from the free cells, within the step of player 0.
        device: where data is.
        batch_size: what a reset without data produces; any other size is accepted too.
        **options: see `envkit.env.options.EnvOptions`.

    Random actions are drawn from the free cells of the ``mask`` in the data.

    Raises:
        InputError: (a ValueError) at a step: the cell is taken, or the action is no cell.

    Example:
        >>> import torch
        >>> from envkit import TicTacToeEnv
        >>> env = TicTacToeEnv()
        >>> td = env.reset()
        >>> td["action"] = torch.tensor(4)
        >>> td = env.step(td)
        >>> td["next", "board"]
        tensor([[-1, -1, -1],
                [-1,  0, -1],
                [-1, -1, -1]], dtype=torch.int32)
        >>> td["next", "turn"]
        tensor([1], dtype=torch.int32)
    """

    def __init__(
        self,
        *,
        single_player: bool = False,
        device: Device | None = None,
        **options: Unpack[EnvOptions],
    ):
        super().__init__(device=device, **options)
        require_memory(self.device, type(self).__name__)
        self.single_player = as_bool("single_player", single_player)
        place: dict[str, Any] = {"device": self.device}
        state = Composite(
            board=Unbounded((3, 3), dtype=torch.int32, **place),
            turn=Categorical(2, (1,), dtype=torch.int32, **place),
            mask=Categorical(2, (9,), dtype=torch.bool, **place),
        )
        reward = Unbounded((1,), dtype=torch.float32, **place)
        flag = Categorical(2, (1,), dtype=torch.bool, **place)
        self.observation_spec_unbatched = state
        self.state_spec_unbatched = state.clone()
        self.action_spec_unbatched = Categorical(9, (), dtype=torch.int64, **place)
        self.reward_spec_unbatched = Composite(
            {name: Composite(reward=reward.clone()) for name in ("player0", "player1")}
        )
        self.full_done_spec_unbatched = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone()
        )

    def _find_facts(self) -> Facts:
        return replace(super()._find_facts(), action_masks=(("action", "mask"),))

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        shape = self._shape_of(td)
        cells = torch.full((*shape, 9), EMPTY, dtype=torch.int32, device=self.device)
        turn = torch.zeros(*shape, 1, dtype=torch.int32, device=self.device)
        return TensorDict(_shown(cells, turn), shape, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        action = self._action_inputs["action"].take(td.get("action", None), td.batch_size)
        cells, turn = td["board"].flatten(-2), td["turn"]
        _require_free(cells, action)
        move = _Move.of(cells, turn, action)
        rewards = [move.won & (turn == player) for player in (0, 1)]
        if self.single_player:
            reply = _Move.of(move.cells, move.turn, self._drawn_reply(move))
            rewards = [
                reward | (reply.won & (move.turn == player) & ~move.done)
                for player, reward in enumerate(rewards)
            ]
            move = reply.unless(move)
        out = _shown(move.cells, move.turn)
        for player, reward in enumerate(rewards):
            out[f"player{player}"] = TensorDict({"reward": reward.float()}, td.batch_size)
        flags = {"done": move.done, "terminated": move.done.clone()}
        return TensorDict({**out, **flags}, td.batch_size, device=td.device)

    def _drawn_reply(self, move: _Move) -> torch.Tensor:
        """Draw a free cell in each game; any cell where the game is over."""
        free = ((move.cells == EMPTY) | move.done).float()
        drawn = torch.multinomial(free.reshape(-1, 9), 1, generator=self._noise)
        return drawn.reshape(free.shape[:-1])


@dataclass(frozen=True)
class _Move:
    """A game after a move: cells (*batch, 9) as the player sees them whose turn it is, flags (*batch, 1)."""

    cells: torch.Tensor
    turn: torch.Tensor
    won: torch.Tensor
    done: torch.Tensor

    @classmethod
    def of(cls, cells: torch.Tensor, turn: torch.Tensor, action: torch.Tensor) -> _Move:
        """Put a stone of the player to move on a cell, and turn the board to the other."""
        cells = cells.scatter(-1, action.unsqueeze(-1), OWN)
        lines = torch.tensor(_LINES, device=cells.device)
        won = (cells[..., lines] == OWN).all(-1).any(-1, keepdim=True)
        done = won | (cells != EMPTY).all(-1, keepdim=True)
        seen = torch.where(cells == EMPTY, cells, OWN - cells)
        return cls(seen, 1 - turn, won, done)

    def unless(self, before: _Move) -> _Move:
        """Return this move, and in games that were over ``before`` that one."""
        cells = torch.where(before.done, before.cells, self.cells)
        turn = torch.where(before.done, before.turn, self.turn)
        won = torch.where(before.done, before.won, self.won)
        return _Move(cells, turn, won, before.done | self.done)


def _shown(cells: torch.Tensor, turn: torch.Tensor) -> dict[str, torch.Tensor | TensorDict]:
    return {"board": cells.unflatten(-1, (3, 3)), "turn": turn, "mask": cells == EMPTY}


def _require_free(cells: torch.Tensor, action: torch.Tensor) -> None:
    """Check that every action is a free cell."""
    free = cells.gather(-1, action.unsqueeze(-1)).squeeze(-1) == EMPTY
    if not bool(free.all()):
        place = tuple((~free).nonzero()[0].tolist())
        where = f" of row {place[0] if len(place) == 1 else place}" if place else ""
        left = (cells[place] == EMPTY).nonzero().flatten().tolist()
        raise InputError(
            f"the action{where} is cell {int(action[place])}, but the free cells are {left}. Choose "
            "among those that are set in td['mask'], as env.rand_action(td) does."
        )
