"""Batches of whole episodes, put together from fragments of them.

Conventions
    fragment  batch of a runner, (*env_batch, steps), with ``("collector", "traj_ids")``.
    ended     a trajectory has, where its number is followed by another one in its row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from envkit.data.plain import from_plain, plain
from envkit.data.trajectories import split_trajectories
from envkit.data.transition import leaves

__all__ = ["EpisodeStore"]

_IDS = ("collector", "traj_ids")


class EpisodeStore:
    """Keep the pieces of trajectories until they have ended, and give whole ones in the order of their ends."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[TensorDictBase]] = {}
        self._whole: deque[TensorDictBase] = deque()

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
        ended = numbers != torch.cat([numbers[:, 1:], following.cpu()[:, None]], 1)
        over: list[tuple[int, int, int]] = []
        for row, flags in enumerate(ended):
            own, start = rows[row], 0
            for last in flags.nonzero()[:, 0].tolist():
                over.append((last, row, self._keep(own[start : last + 1])))
                start = last + 1
            if start < steps:
                self._keep(own[start:])
        for _, _, number in sorted(over):
            self._whole.append(self._joined(number))

    def _keep(self, piece: TensorDictBase) -> int:
        number = int(piece.get(_IDS)[0])
        self._pieces.setdefault(number, []).append(piece)
        return number

    def _joined(self, number: int) -> TensorDictBase:
        return cast(TensorDictBase, torch.cat(cast(Any, self._pieces.pop(number))))

    def cut(self, numbers: Collection[int] | None = None) -> None:
        """End trajectories (None: all) that nobody will go on with, by truncation at their last step."""
        unfinished = self._pieces.keys() if numbers is None else self._pieces.keys() & numbers
        for number in sorted(unfinished):
            whole = self._joined(number)
            for path, flags in leaves(whole.get("next")):
                if path[-1] in ("truncated", "done"):
                    cut = flags.clone()
                    cut[-1] = True
                    whole.set(("next", *path), cut)
            self._whole.append(whole)

    def take(self, count: int, layout: str) -> TensorDictBase:
        """Give the first ``count`` whole episodes.

        Args:
            count: how many; at most as many as there are.
            layout: "padded" gives batch size ``(count, longest)`` and ``("collector", "mask")``, "cat" one
                episode after the other, batch size ``(frames,)``.
        """
        taken = [self._whole.popleft() for _ in range(count)]
        data = cast(TensorDictBase, torch.cat(cast(Any, taken)))
        data.names = ["time"]
        if layout == "cat":
            return data
        padded = split_trajectories(data)
        return padded if padded.batch_dims == 2 else padded.unsqueeze(0)

    def state_dict(self) -> dict[str, Any]:
        """Give the pieces and whole episodes that wait, in plain form."""
        pieces = {str(number): pieces for number, pieces in self._pieces.items()}
        return {"pieces": plain(pieces), "whole": plain(list(self._whole))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what another store has kept."""
        self._pieces = {int(number): one for number, one in from_plain(state["pieces"]).items()}
        self._whole = deque(from_plain(state["whole"]))
