"""Returns and lengths of the episodes in data that was recorded already, over as many batches as there are.

Conventions
    episodes  in the order of `envkit.data.episodes`: as they are met, by row, then by time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDictBase

from envkit.data.arguments import require_tensordict
from envkit.data.episodes import EpisodeNumbers, Piece
from envkit.data.paths import Key
from envkit.errors import ArgumentError, MissingKeyError

__all__ = ["Agents", "EpisodeStats", "checked_agents", "episode_stats", "one_number"]

Agents = Literal["sum", "mean"] | None


class EpisodeStats(NamedTuple):
    """What `episode_stats` gives; each of shape ``(episodes,)``.

    Attributes:
        returns: sum of the rewards that are in the data, float64.
        lengths: steps that are in the data, int64.
        ended: bool; False where the data ends before the episode does.
        terminated: bool; it ended by itself. What ended and is not terminated was truncated.
    """

    returns: torch.Tensor
    lengths: torch.Tensor
    ended: torch.Tensor
    terminated: torch.Tensor

    def __repr__(self) -> str:
        """Count the episodes, with mean return and length of those that ended."""
        told = f"{len(self.returns)} episodes, {int(self.ended.sum())} ended"
        if self.ended.any():
            returns, lengths = self.returns[self.ended], self.lengths[self.ended].double()
            told += f": mean return {returns.mean():.6g}, mean length {lengths.mean():.6g}"
        return f"{type(self).__name__}({told})"


def episode_stats(
    data: TensorDictBase | Iterable[TensorDictBase],
    *,
    reward_key: Key = ("next", "reward"),
    agents: Agents = None,
) -> EpisodeStats:
    """Give returns and lengths of the episodes in a rollout, in a batch of a collector, or in several of them.

    An episode that goes on in the next batch is one episode: by the trajectory ids of a collector, or else in the same
    row, where that goes on from where it had ended (see `envkit.data.episodes.EpisodeNumbers`). What an episode had
    before the first batch is not known, nor what it has after the last: ``ended`` says where the end is there. Rows
    that `rollout` freezes, and padding, are no steps.

    Args:
        data: batch size ``(*batch, T)``, or batches in the order in which they were made.
        reward_key: entry that is summed.
        agents: ``"sum"`` or ``"mean"`` makes one number of those that a group of agents gets in a step.

    Raises:
        DataTypeError: (a TypeError) it is no TensorDict.
        MissingKeyError: (a KeyError) there is no such entry, or no ``("next", "done")``.
        ArgumentError: it has several numbers for a step and ``agents`` is None; or see `EpisodeNumbers.number`.
    """
    wanted = "a rollout, a batch of a collector, or a list of these"
    if not isinstance(data, Iterable):
        require_tensordict("data", data, wanted)
    checked_agents(agents)
    numbers, found = EpisodeNumbers(), _Totals()
    for batch in [data] if isinstance(data, TensorDictBase) else data:
        require_tensordict("data", batch, wanted)
        steps = numbers.number(batch)
        found.grow(numbers.count)
        inside = steps.episode >= 0
        number, reward = (
            steps.episode[inside],
            _by_step(batch, reward_key, inside.shape, agents)[inside],
        )
        found.returns.index_add_(0, number, reward)
        found.lengths.index_add_(0, number, torch.ones_like(number))
        found.mark_ends(steps.pieces, _flags(batch, inside.shape))
    return EpisodeStats(found.returns, found.lengths, found.ended, found.terminated)


class _Totals:
    """Sums over episodes, whose number grows."""

    def __init__(self) -> None:
        self.returns = torch.zeros(0, dtype=torch.float64)
        self.lengths = torch.zeros(0, dtype=torch.int64)
        self.ended = torch.zeros(0, dtype=torch.bool)
        self.terminated = torch.zeros(0, dtype=torch.bool)

    def grow(self, count: int) -> None:
        for name, held in list(vars(self).items()):
            more = torch.zeros(count - len(held), dtype=held.dtype)
            setattr(self, name, torch.cat([held, more]))

    def mark_ends(self, pieces: list[Piece], terminated: torch.Tensor) -> None:
        last = [piece for piece in pieces if piece.ended]
        numbers = torch.tensor([piece.episode for piece in last], dtype=torch.int64)
        rows, steps = [piece.row for piece in last], [piece.stop - 1 for piece in last]
        self.ended[numbers] = True
        self.terminated[numbers] = terminated[rows, steps]


def checked_agents(agents: object) -> None:
    """Refuse another way to make one number of the rewards of agents than there is."""
    if agents not in (None, "sum", "mean"):
        raise ArgumentError(f"agents is {agents!r}, but must be 'sum', 'mean' or None.")


def one_number(rewards: torch.Tensor, agents: Agents) -> torch.Tensor:
    """Make one number of those of a step, shape ``(*steps, numbers)``, float64 on the CPU."""
    rewards = rewards.detach().double().cpu()
    return rewards.mean(-1) if agents == "mean" else rewards.sum(-1)


def _by_step(batch: TensorDictBase, key: Key, shape: torch.Size, agents: Agents) -> torch.Tensor:
    value: Any = batch.get(key, None)
    if value is None:
        raise MissingKeyError(
            f"the data has no {key!r}; it has {sorted(map(str, batch.keys(True, True)))}. Name the reward: "
            "reward_key=..."
        )
    if agents is None and value.numel() != shape.numel():
        raise ArgumentError(
            f"{key!r} has {value.numel() // max(1, shape.numel())} numbers for each step, but a return is the sum of one. "
            "Name an entry that has one, reward_key=..., or make one number of those of several agents: agents='mean'."
        )
    return one_number(value.reshape(*shape, -1), agents)


def _flags(batch: TensorDictBase, shape: torch.Size) -> torch.Tensor:
    """Give where an episode has ended by itself; data that does not say why it ended has ended so."""
    following = batch.get("next")
    flags: Any = following.get("terminated", None)
    if flags is None:
        flags = following.get("done")
    return flags.reshape(*shape, -1).any(-1).cpu()
