"""Batches of whole episodes, put together from fragments of them.

Conventions
    fragment  batch of a runner, (*env_batch, steps), with ``("collector", "traj_ids")``.
    ended     a trajectory has, where its number is followed by another one in its row.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from envkit.collectors.trajectory_ids import abandoned
from envkit.data.episodes import split_trajectories
from envkit.data.plain import from_plain, plain
from envkit.data.transition import leaves

__all__ = ["EpisodeStore"]

_IDS = ("collector", "traj_ids")

RANDOM = ("collector", "random_action")
"""Where a batch has random actions and others: which are random, bool of its batch size."""

_LONG = 100_000
"""Steps after which an episode that has not ended is told of: whoever waits for it may wait for ever."""

_Pieces = dict[int, list[TensorDictBase]]


class EpisodeStore:
    """Keep the pieces of trajectories until they have ended, and give whole ones in the order of their ends.

    Each call takes effect at its end, at once: Ctrl-C within one has changed nothing.

    Args:
        stride: see `TrajectoryNumbers`.
        completes: an episode that begins with random actions has what the policy writes later, zero until then;
            False: it has only what all of its steps have.
    """

    def __init__(self, stride: int = 1, *, completes: bool = True) -> None:
        self._stride, self._completes = stride, completes
        self._pieces: dict[int, list[TensorDictBase]] = {}
        self._whole: deque[TensorDictBase] = deque()
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._whole)

    def add(self, fragment: TensorDictBase, following: torch.Tensor) -> None:
        """Take a fragment apart.

        Args:
            fragment: batch size ``(*env_batch, steps)``.
            following: number of the trajectory that each row goes on with, shape ``(rows,)``.
        """
        steps = fragment.batch_size[-1]
        rows = fragment.reshape(-1, steps)
        numbers = rows.get(_IDS).cpu()
        going_on = following.cpu()
        lost = abandoned(self._pieces, numbers.unique().tolist(), going_on.tolist(), self._stride)
        pieces, whole = self._without(lost)
        ended = numbers != torch.cat([numbers[:, 1:], going_on[:, None]], 1)
        over: list[tuple[int, int, int]] = []
        for row, flags in enumerate(ended):
            start = 0
            for last in flags.nonzero()[:, 0].tolist():
                over.append((last, row, _keep(pieces, rows[row, start : last + 1])))
                start = last + 1
            if start < steps:
                _keep(pieces, rows[row, start:])
        whole += [self._joined(pieces.pop(number)) for _, _, number in sorted(over)]
        self._warn_of_long_ones(pieces, steps)
        self._pieces, self._whole = pieces, whole

    def _warn_of_long_ones(self, pieces: _Pieces, steps: int) -> None:
        if self._has_warned or all(len(kept) * steps < _LONG for kept in pieces.values()):
            return
        self._has_warned = True
        warnings.warn(
            f"an episode has not ended within {_LONG:,} steps, and trajs_per_batch waits for whole ones, which are kept until then. "
            "If this env's episodes have no end, pass max_frames_per_traj=, or frames_per_batch= instead.",
            stacklevel=6,
        )

    def cut(self, numbers: Collection[int] | None = None) -> None:
        """End trajectories (None: all) that nobody will go on with, by truncation at their last step."""
        unfinished = self._pieces.keys() if numbers is None else self._pieces.keys() & numbers
        self._pieces, self._whole = self._without(sorted(unfinished))

    def _without(self, numbers: Collection[int]) -> tuple[_Pieces, deque[TensorDictBase]]:
        """Give what is kept when trajectories are ended by truncation."""
        pieces, whole = dict(self._pieces), self._whole.copy()
        for number in numbers:
            episode = self._joined(pieces.pop(number))
            for path, flags in leaves(episode.get("next")):
                if path[-1] in ("truncated", "done"):
                    cut = flags.clone()
                    cut[-1] = True
                    episode.set(("next", *path), cut)
            whole.append(episode)
        return pieces, whole

    def take(self, count: int, layout: str) -> TensorDictBase:
        """Give the first ``count`` whole episodes.

        Args:
            count: how many; at most as many as there are.
            layout: "padded" gives batch size ``(count, longest)`` and ``("collector", "mask")``, "cat" one
                episode after the other, batch size ``(frames,)``.
        """
        data = self._joined(list(islice(self._whole, count)))
        data.names = ["time"]
        if layout == "padded":
            data = split_trajectories(data)
        self._whole = deque(islice(self._whole, count, None))
        return data

    def _joined(self, pieces: Sequence[TensorDictBase]) -> TensorDictBase:
        """Concatenate pieces in time; what a policy writes is zero where random actions were taken, and RANDOM says where."""
        keys = [set(piece.keys(True, True)) for piece in pieces]
        every = set().union(*keys)
        if all(own == every for own in keys):
            return cast(TensorDictBase, torch.cat(cast(Any, pieces)))
        if self._completes:
            pieces = [
                _completed(piece, every - own - {RANDOM}, pieces)
                for piece, own in zip(pieces, keys, strict=True)
            ]
        else:
            common = [key for key in pieces[0].keys(True, True) if all(key in own for own in keys)]
            pieces = [piece.select(*common) for piece in pieces]
        return cast(TensorDictBase, torch.cat(cast(Any, pieces)))

    def state_dict(self) -> dict[str, Any]:
        """Give the pieces and whole episodes that wait, in plain form."""
        pieces = {str(number): pieces for number, pieces in self._pieces.items()}
        return {"pieces": plain(pieces), "whole": plain(list(self._whole))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what another store has kept."""
        self._pieces = {int(number): one for number, one in from_plain(state["pieces"]).items()}
        self._whole = deque(from_plain(state["whole"]))


def _keep(pieces: _Pieces, piece: TensorDictBase) -> int:
    """Add a piece to those of its trajectory, the lists of others being left as they are; give its number."""
    number = int(piece.get(_IDS)[0])
    pieces[number] = [*pieces.get(number, ()), piece]
    return number


def _completed(
    piece: TensorDictBase, missing: Collection[Any], pieces: Sequence[TensorDictBase]
) -> TensorDictBase:
    """Add what a piece of random actions lacks, as zeros of the form that it has in another piece."""
    completed, steps = piece.copy(), piece.batch_size[0]
    for key in missing:
        like = next(value for other in pieces if (value := other.get(key, None)) is not None)
        completed.set(key, like.new_zeros(steps, *like.shape[1:]))
    if missing or RANDOM not in completed.keys(True, True):
        completed.set(RANDOM, torch.full((steps,), bool(missing), device=piece.device))
    return completed
