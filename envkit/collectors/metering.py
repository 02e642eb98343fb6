"""Returns and lengths of the episodes that end while data is collected, and the bar that shows them.

Conventions
    return  sum of the rewards of an episode; of several rewards, the first one the data has.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit.collectors.trajectory_ids import abandoned
from envkit.data.transition import leaves
from envkit.errors import MissingLibraryError
from envkit.installing import install_hint

__all__ = ["EpisodeMeter", "ProgressBar"]

_IDS = ("collector", "traj_ids")


class EpisodeMeter:
    """Sum up rewards by trajectory, batch after batch.

    Args:
        stride: see `TrajectoryNumbers`.

    Attributes:
        returns, lengths: of the episodes that have ended since `forget`.
    """

    def __init__(self, stride: int = 1) -> None:
        self._stride = stride
        self._sums: dict[int, tuple[float, int]] = {}
        self._unseen: set[int] = set()  # numbers whose first steps were not seen
        self._joins_late: set[int] = set()  # workers whose next batch may begin within an episode
        self.returns: list[float] = []
        self.lengths: list[int] = []

    def add(self, batch: TensorDictBase, following: torch.Tensor) -> None:
        """Take note of a batch of a runner; see `EpisodeStore.add` for the arguments."""
        following_step = batch.get("next")
        rewards = [value for path, value in leaves(following_step) if path[-1] == "reward"]
        if not rewards:
            return
        self._note_unseen(batch.get(_IDS)[..., 0])
        ids = batch.get(_IDS).reshape(-1).cpu()
        paid = rewards[0].reshape(*batch.batch_size, -1).sum(-1).double().reshape(-1).cpu()
        valid = ids >= 0
        numbers, places = ids[valid].unique(return_inverse=True)
        sums = torch.zeros(len(numbers), dtype=torch.float64, device="cpu").index_add_(
            0, places, paid[valid]
        )
        counts = places.bincount(minlength=len(numbers))
        going_on = set(following.tolist())
        for number in abandoned(self._sums, numbers.tolist(), going_on, self._stride):
            del self._sums[number]
        for number, total, count in zip(
            numbers.tolist(), sums.tolist(), counts.tolist(), strict=True
        ):
            before, steps = self._sums.pop(number, (0.0, 0))
            if number in going_on:
                self._sums[number] = before + total, steps + count
            elif number in self._unseen:
                self._unseen.remove(number)
            else:
                self.returns.append(before + total)
                self.lengths.append(steps + count)

    def forget(self) -> None:
        """Begin to list ended episodes anew."""
        self.returns, self.lengths = [], []

    def _note_unseen(self, first: torch.Tensor) -> None:
        """Leave out the episodes that are under way where a worker's first batch begins after `join_late`."""
        if not self._joins_late:
            return
        for number in first.reshape(-1).tolist():
            if number % self._stride in self._joins_late:
                self._unseen.add(number)
        self._joins_late -= {number % self._stride for number in self._unseen}

    def join_late(self) -> None:
        """Take note of batches from now on, whose first steps may be within an episode."""
        self._sums, self._unseen = {}, set()
        self._joins_late = set(range(self._stride))

    def state_dict(self) -> dict[str, Any]:
        """Give what is known of the episodes under way, in plain form."""
        return {
            "numbers": list(self._sums),
            "returns": [total for total, _ in self._sums.values()],
            "lengths": [steps for _, steps in self._sums.values()],
            "unseen": sorted(self._unseen),
            "joins_late": sorted(self._joins_late),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as whoever gave ``state`` would have."""
        known = zip(state["returns"], state["lengths"], strict=True)
        self._sums = dict(zip(state["numbers"], known, strict=True))
        self._unseen, self._joins_late = set(state["unseen"]), set(state["joins_late"])


class ProgressBar:
    """A bar over the frames of a collector.

    Args:
        total: frames that there will be; None where there is no end.
        stride: see `TrajectoryNumbers`.

    Raises:
        MissingLibraryError: tqdm is not installed.
    """

    def __init__(self, total: int | None, stride: int = 1):
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise MissingLibraryError(
                f"progress=True shows a bar by tqdm, which is not installed. {install_hint('viz')}"
            ) from error
        self._bar: Any = tqdm(total=total, unit="frames")
        self._meter = EpisodeMeter(stride)
        self._began = perf_counter()
        self._frames = 0

    def add(self, batch: TensorDictBase, following: torch.Tensor, frames: int) -> None:
        """Show a batch of ``frames`` valid frames."""
        self._meter.add(batch, following)
        self._frames += frames
        shown: dict[str, str] = {
            "frames/s": f"{self._frames / (perf_counter() - self._began):,.0f}"
        }
        if episodes := len(self._meter.returns):
            shown["return"] = f"{sum(self._meter.returns) / episodes:.4g}"
            shown["length"] = f"{sum(self._meter.lengths) / episodes:.4g}"
            self._meter.forget()
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(frames)

    def state_dict(self) -> dict[str, Any]:
        """Give what is shown of, in plain form."""
        return {"frames": self._bar.n, "meter": self._meter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None, frames: int) -> None:
        """Go on as the bar that gave ``state``; where there was none, from ``frames`` on."""
        if state is None:
            self._meter.join_late()
        else:
            self._meter.load_state_dict(state["meter"])
        self._bar.initial = self._bar.n = frames if state is None else state["frames"]
        self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
