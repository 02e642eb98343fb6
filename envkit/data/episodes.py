"""Which episode each step of recorded data belongs to, over as many batches as there are.

An episode ends after a step whose done flag is set. Where it goes on in the next batch, trajectory ids of a
collector say; without them, the same row does, unless it begins elsewhere than it had ended.

Conventions
    rows     batch axes in front of time, flattened; time is the last batch axis.
    number   of an episode: 0, 1, ... in the order in which they are met, by row, then by time.
    outside  steps of no episode: padding, and what a rollout repeats in rows that are done before others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from envkit.data.paths import Key, as_key, as_path
from envkit.data.trajectories import ended_steps
from envkit.data.transition import copied
from envkit.errors import ArgumentError, BatchSizeError

__all__ = ["EpisodeNumbers", "EpisodeSteps", "Piece"]

_FLAGS = {"done", "terminated", "truncated", "reward"}

_NO_FLAGS = "Pass steps as rollout and collectors give them, with their flags."


class Piece(NamedTuple):
    """Consecutive steps of one row that belong to one episode.

    Attributes:
        row: of the data.
        start, stop: the steps are ``start <= t < stop``.
        episode: its number.
        first: how many steps the episode had before.
        ended: whether the last of these is the last of the episode.
    """

    row: int
    start: int
    stop: int
    episode: int
    first: int
    ended: bool


class EpisodeSteps(NamedTuple):
    """What `EpisodeNumbers` says of one batch.

    Attributes:
        episode: int64, shape ``(rows, T)``; -1 outside of episodes.
        step: int64 of that shape, how many steps of the episode came before; -1 outside.
        pieces: in the order of the rows, then of time.
    """

    episode: torch.Tensor
    step: torch.Tensor
    pieces: list[Piece]


class EpisodeNumbers:
    """Number the episodes in batches that follow each other.

    With ``("collector", "traj_ids")`` the batches may have any shape, come from any worker, and be flattened.
    Without, the last axis must be time. A row then goes on where it ended in the batch before: its first root is
    the last ``next``. Where it is not, the row was reset in between, and a new episode begins. ``traj_ids`` at the
    root, as `split_trajectories` writes them, hold within their batch.

    Attributes:
        count: how many episodes there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._open: dict[int, tuple[int, int]] = {}  # by id, or by row: number and steps so far
        self._last: TensorDictBase | None = None

    def number(self, batch: TensorDictBase) -> EpisodeSteps:
        """Say which episode each step of the next batch belongs to.

        Raises:
            ArgumentError: (a ValueError) the data has no time axis, or neither ids nor a last axis named "time".
            BatchSizeError: (a RuntimeError) without ids, the batch has other rows than the one before.
            MissingKeyError: (a KeyError) it has no ``("next", "done")``.
        """
        if not batch.batch_dims:
            raise ArgumentError(
                "the data has batch size (), but its last batch axis must be time. Pass a rollout."
            )
        ended = ended_steps(batch, fix=_NO_FLAGS).cpu()
        ids, is_whole = _ids(batch)
        outside = _outside(batch, ids)
        if ids is None:
            outside |= _frozen(batch, ended)
            self._go_on(batch)
            ids = torch.arange(len(ended), device="cpu")[:, None].expand(ended.shape)
        pieces = list(self._pieces(ids, ended, outside))
        if is_whole:
            self._open.clear()
        return EpisodeSteps(*_spread(pieces, ended.shape), pieces)

    def _pieces(
        self, ids: torch.Tensor, ended: torch.Tensor, outside: torch.Tensor
    ) -> Iterator[Piece]:
        begins = torch.ones_like(ended)
        begins[:, 1:] = ended[:, :-1] | (ids[:, 1:] != ids[:, :-1])
        begins[:, 1:] |= outside[:, 1:] != outside[:, :-1]
        rows, starts = (begins & ~outside).nonzero(as_tuple=True)
        stops = _next_begin(begins)[rows, starts]
        last = (rows, stops - 1)
        of_piece = (rows, starts, stops, ids[rows, starts], ended[last])
        for row, start, stop, key, is_last in zip(*(x.tolist() for x in of_piece), strict=True):
            number, first = self._open.pop(key, (self.count, 0))
            self.count = max(self.count, number + 1)
            if not is_last:
                self._open[key] = (number, first + stop - start)
            yield Piece(row, start, stop, number, first, is_last)

    def _go_on(self, batch: TensorDictBase) -> None:
        """Forget the open episodes of rows that begin elsewhere than they ended, and keep where these end."""
        if batch.names[-1] != "time":
            names = [*([None] * (batch.batch_dims - 1)), "time"]
            raise ArgumentError(
                f"the data has batch size {tuple(batch.batch_size)}, no trajectory ids, and no last axis named "
                "'time', so that nothing tells where its rows end. Pass it as it was before it was reshaped. If "
                f"its last axis is time, say so: data.names = {names}."
            )
        rows, carried = batch.batch_size[:-1], _carried(batch)
        if self._last is not None:
            if rows != self._last.batch_size:
                raise BatchSizeError(
                    f"a batch has rows of shape {tuple(rows)}, the one before {tuple(self._last.batch_size)}, and no "
                    "trajectory ids say which go on. Pass batches of one env, or write them one by one."
                )
            same = _same(self._last, batch[..., 0], carried)
            for row in (~same).nonzero()[:, 0].tolist():
                self._open.pop(row, None)
        self._last = copied(batch.get("next")[..., -1].select(*carried))


def _ids(batch: TensorDictBase) -> tuple[torch.Tensor | None, bool]:
    """Give the trajectory ids of each step, and whether they hold within the batch only."""
    for key, is_whole in ((("collector", "traj_ids"), False), ("traj_ids", True)):
        ids: Any = batch.get(key, None)
        if ids is not None:
            return ids.reshape(-1, batch.batch_size[-1]).cpu(), is_whole
    return None, False


def _outside(batch: TensorDictBase, ids: torch.Tensor | None) -> torch.Tensor:
    """Mark padding, and steps from a root whose episode has ended already."""
    steps = batch.batch_size[-1]
    outside = torch.zeros(
        batch.batch_size.numel() // max(steps, 1), steps, dtype=torch.bool, device="cpu"
    )
    done: Any = batch.get("done", None)
    if done is not None:
        outside |= done.reshape(*outside.shape, -1).any(-1).cpu()
    if ids is not None:
        beside = ("collector", "mask") if "collector" in batch.keys() else "mask"
        mask: Any = batch.get(beside, None)
        outside |= ids < 0
        if mask is not None:
            outside |= ~mask.reshape(outside.shape).cpu()
    return outside


def _frozen(batch: TensorDictBase, ended: torch.Tensor) -> torch.Tensor:
    """Mark what ``rollout(break_when_all_done=True)`` repeats in rows that are done before others.

    There some row has not ended yet at each step but the last, and whatever follows the first end of a row is
    that step again, unpaid.
    """
    over = ended.cumsum(1) > 0
    repeats = torch.cat([torch.zeros_like(over[:, :1]), over[:, :-1]], 1)
    none = torch.zeros_like(over)
    if not repeats.any() or over[:, :-1].all(0).any() or not _carried(batch):
        return none
    rows, steps = repeats.nonzero(as_tuple=True)
    ends = ended.int().argmax(1)[rows]
    root = set(map(as_path, batch.keys(True, True)))
    for path in sorted(root):
        values = batch.get(as_key(path)).reshape(*ended.shape, -1)
        again, was = values[rows, steps], values[rows, ends]
        same = (again == was) | ((again != again) & (was != was))
        if path[0] == "next" and path[1:] not in root:  # rewards
            same |= again == 0
        if not same.all():
            return none
    return repeats


def _next_begin(begins: torch.Tensor) -> torch.Tensor:
    """Give for each step where, after it, the next piece of its row begins."""
    steps = begins.shape[1]
    at = torch.arange(steps, device="cpu").expand(begins.shape).where(begins, steps)
    after = torch.cat([at[:, 1:], torch.full_like(at[:, :1], steps)], 1)
    return after.flip(1).cummin(1).values.flip(1)


def _spread(pieces: list[Piece], shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the number of the episode, and that of the step in it, at each step."""
    episode = torch.full(shape, -1, dtype=torch.int64, device="cpu")
    step = episode.clone()
    for row, start, stop, number, first, _ in pieces:
        episode[row, start:stop] = number
        step[row, start:stop] = torch.arange(first, first + stop - start, device="cpu")
    return episode, step


def _carried(batch: TensorDictBase) -> list[Key]:
    """Name the entries of a step that are the next root's, flags and rewards aside."""
    root = set(map(as_path, batch.keys(True, True)))
    paths = map(as_path, batch.get("next").keys(True, True))
    return [as_key(path) for path in paths if path in root and path[-1] not in _FLAGS]


def _same(last: TensorDictBase, root: TensorDictBase, keys: list[Key]) -> torch.Tensor:
    """Say of each row whether it begins where it ended, NaN included."""
    same = torch.ones(last.batch_size.numel(), dtype=torch.bool, device="cpu")
    for key in keys:
        was, now = last.get(key), root.get(key)
        if was.is_nested:  # of unlike shapes, which one row alone has
            same &= all(map(torch.equal, was.unbind(), now.unbind()))
            continue
        equal = (was == now) | ((was != was) & (now != now))
        same &= equal.reshape(len(same), -1).all(-1).cpu()
    return same
