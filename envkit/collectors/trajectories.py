"""Trajectories that go on from batch to batch: their numbers, whole ones put together, returns of those that end.

Conventions
    rows      the flattened batch of an env.
    number    int64; every trajectory of a collector has its own one. Worker w of n counts w, w + n, w + 2n, ...,
              so that workers need not talk about it.
    fragment  batch of a runner, (*env_batch, steps), with ``("collector", "traj_ids")``.
    ended     a trajectory has, where its number is followed by another one in its row.
    return    sum of the rewards of an episode; of several rewards, the first one the data has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from time import perf_counter
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from envkit.data.episodes import split_trajectories
from envkit.data.plain import from_plain, plain
from envkit.data.transition import leaves
from envkit.errors import MissingLibraryError
from envkit.installing import install_hint
from envkit.process_wide import warn

_IDS = ("collector", "traj_ids")

_LONG = 100_000
"""Steps after which an episode that has not ended is reported, since a caller may wait for its end without success."""

_Pieces = dict[int, list[TensorDictBase]]


class TrajectoryNumbers:
    """Number the trajectories of some rows in the order in which they begin: by time, then by row.

    Args:
        rows: how many go on side by side.
        first: the first number.
        stride: difference between one number and the next.
    """

    def __init__(self, rows: int, *, first: int = 0, stride: int = 1):
        self.stride = stride
        self.current = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self.restart(first)

    def count(self, ended: torch.Tensor) -> torch.Tensor:
        """Number steps, of which some are the last ones of their trajectory.

        Args:
            ended: bool, shape ``(rows, steps)``: a new trajectory begins after this step.

        Returns:
            int64 of that shape.
        """
        begun = ended.T.reshape(-1).cumsum(0).reshape(ended.T.shape).T  # by time, then by row
        numbers = torch.where(ended, self.following + (begun - 1) * self.stride, -1)
        numbers = torch.cat([self.current[:, None], numbers], 1).cummax(1).values  # they only grow
        self.following += int(ended.sum()) * self.stride
        self.current = numbers[:, -1].clone()
        self._is_unused = ended[:, -1].clone()
        return numbers[:, :-1].contiguous()

    def begin_anew(self, rows: torch.Tensor) -> list[int]:
        """Assign a new number to the rows that a bool mask names, unless theirs was not used yet.

        Returns:
            The numbers of trajectories that are not continued.
        """
        renewed = rows & ~self._is_unused
        count = int(renewed.sum())
        ended = self.current[renewed].tolist()
        self.current[renewed] = self.following + torch.arange(count, device="cpu") * self.stride
        self.following += count * self.stride
        self._is_unused |= renewed
        return ended

    def restart(self, first: int) -> None:
        """Number all rows again, from ``first`` on."""
        rows = len(self.current)
        self.current = first + torch.arange(rows, device="cpu") * self.stride
        self.following = first + rows * self.stride
        """The number of the next trajectory that begins."""
        self._is_unused = torch.ones(rows, dtype=torch.bool, device="cpu")

    def state_dict(self) -> dict[str, Any]:
        """Return what the next numbers depend on."""
        return {
            "following": self.following,
            "current": self.current.clone(),
            "is_unused": self._is_unused.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as the object that gave ``state`` would have."""
        self.following = int(state["following"])
        self.current = state["current"].clone()
        self._is_unused = state["is_unused"].clone()


def abandoned(
    earlier: Collection[int], collected: Collection[int], following: Collection[int], stride: int
) -> list[int]:
    """Return the trajectories that are not continued although no step says so: a reset or a fault came between.

    Args:
        earlier: numbers of trajectories that have not ended.
        collected: numbers in the newest batch of some rows.
        following: numbers that these rows go on with.
        stride: see `TrajectoryNumbers`.
    """
    workers = {number % stride for number in following}
    alive = {*collected, *following}
    return sorted(
        number for number in earlier if number % stride in workers and number not in alive
    )


class EpisodeStore:
    """Keep the pieces of trajectories until they have ended, and give whole ones in the order of their ends.

    Each call takes effect at its end, at once: Ctrl-C within one has changed nothing.

    Args:
        stride: see `TrajectoryNumbers`.
    """

    def __init__(self, stride: int = 1) -> None:
        self._stride = stride
        self._pieces: dict[int, list[TensorDictBase]] = {}
        self._whole: deque[TensorDictBase] = deque()
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._whole)

    def add(self, fragment: TensorDictBase, following: torch.Tensor) -> None:
        """Divide a fragment into episodes.

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
        whole += [_joined(pieces.pop(number)) for _, _, number in sorted(over)]
        self._warn_of_long_ones(pieces, steps)
        self._pieces, self._whole = pieces, whole

    def _warn_of_long_ones(self, pieces: _Pieces, steps: int) -> None:
        if self._has_warned or all(len(kept) * steps < _LONG for kept in pieces.values()):
            return
        self._has_warned = True
        warn(
            f"an episode has not ended within {_LONG:,} steps, and trajs_per_batch waits for whole ones, which are kept until then. "
            "If this env's episodes have no end, pass max_frames_per_traj=, or frames_per_batch= instead.",
        )

    def cut(self, numbers: Collection[int] | None = None) -> None:
        """End trajectories (None: all) that will not be continued, by truncation at their last step."""
        unfinished = self._pieces.keys() if numbers is None else self._pieces.keys() & numbers
        self._pieces, self._whole = self._without(sorted(unfinished))

    def _without(self, numbers: Collection[int]) -> tuple[_Pieces, deque[TensorDictBase]]:
        """Return what is kept when trajectories are ended by truncation."""
        pieces, whole = dict(self._pieces), self._whole.copy()
        for number in numbers:
            episode = _joined(pieces.pop(number))
            for path, flags in leaves(episode.get("next")):
                if path[-1] in ("truncated", "done"):
                    cut = flags.clone()
                    cut[-1] = True
                    episode.set(("next", *path), cut)
            whole.append(episode)
        return pieces, whole

    def take(self, count: int, layout: str) -> TensorDictBase:
        """Return the first ``count`` whole episodes.

        Args:
            count: how many; at most as many as there are.
            layout: "padded" gives batch size ``(count, longest)`` and ``("collector", "mask")``, "cat" one
                episode after the other, batch size ``(frames,)``.
        """
        data = _joined(list(islice(self._whole, count)))
        data.names = ["time"]
        if layout == "padded":
            data = split_trajectories(data)
        self._whole = deque(islice(self._whole, count, None))
        return data

    def state_dict(self) -> dict[str, Any]:
        """Return the pieces and whole episodes that wait, in plain form."""
        pieces = {str(number): pieces for number, pieces in self._pieces.items()}
        return {"pieces": plain(pieces), "whole": plain(list(self._whole))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what another store has kept."""
        self._pieces = {int(number): one for number, one in from_plain(state["pieces"]).items()}
        self._whole = deque(from_plain(state["whole"]))


def _keep(pieces: _Pieces, piece: TensorDictBase) -> int:
    """Add a piece to those of its trajectory, the lists of others being left as they are; give its number."""
    number = int(piece.get(_IDS)[0])
    pieces[number] = [*pieces.get(number, ()), piece]
    return number


def _joined(pieces: Sequence[TensorDictBase]) -> TensorDictBase:
    """Concatenate pieces in time."""
    return cast(TensorDictBase, torch.cat(cast(Any, pieces)))


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
        """Count a batch of a runner; see `EpisodeStore.add` for the arguments."""
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
        """Begin to list ended episodes again."""
        self.returns, self.lengths = [], []

    def _note_unseen(self, first: torch.Tensor) -> None:
        """Exclude the episodes that are under way where a worker's first batch begins after `join_late`."""
        if not self._joins_late:
            return
        for number in first.reshape(-1).tolist():
            if number % self._stride in self._joins_late:
                self._unseen.add(number)
        self._joins_late -= {number % self._stride for number in self._unseen}

    def join_late(self) -> None:
        """Count batches from now on, whose first steps may be within an episode."""
        self._sums, self._unseen = {}, set()
        self._joins_late = set(range(self._stride))

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the episodes under way, in plain form."""
        return {
            "numbers": list(self._sums),
            "returns": [total for total, _ in self._sums.values()],
            "lengths": [steps for _, steps in self._sums.values()],
            "unseen": sorted(self._unseen),
            "joins_late": sorted(self._joins_late),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the object that gave ``state`` would have."""
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
        """Return what is shown of, in plain form."""
        return {"frames": self._bar.n, "meter": self._meter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None, frames: int) -> None:
        """Load the state of another bar; where there was none, continue from ``frames``."""
        if state is None:
            self._meter.join_late()
        else:
            self._meter.load_state_dict(state["meter"])
        self._bar.initial = self._bar.n = frames if state is None else state["frames"]
        self._bar.refresh()

    def close(self) -> None:
        """Stop the bar; what it shows stays."""
        self._bar.close()
