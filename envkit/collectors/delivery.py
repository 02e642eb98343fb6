"""One batch on its way to the caller: split, post-processed, shown to a hook, and put into a replay buffer.

What fails on the way loses nothing and does nothing twice: `postproc` sees a batch once, a buffer gets a step once.

Conventions
    raw     the batch as it was collected; None where there is none to deliver.
    formed  what `split_trajs` and `postproc` have made of it; None until they have.
    buffer  has ``extend(batch)``, or ``add(step)`` where every step is put in by itself; TorchRL's, or any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from tensordict import TensorDictBase

from envkit.collectors.runner import COLLECTOR, OWN_STEP_COUNT
from envkit.collectors.settings import CollectorSettings
from envkit.data.episodes import split_trajectories
from envkit.data.paths import Key, Path, as_key
from envkit.data.plain import from_plain, plain
from envkit.errors import ArgumentTypeError, MissingKeyError


class _BufferFilling:
    """Put batches into a buffer.

    Args:
        buffer: where.
        whole: put whole batches in; else step by step.
        episodes_each: of whole episodes, put so many in at once; None: all.
    """

    def __init__(self, buffer: Any, *, whole: bool, episodes_each: int | None = None):
        self._buffer, self._whole, self._episodes_each = buffer, whole, episodes_each
        self._fits = False
        self._parts_in = (
            0  # of the batch that is put in part by part: single steps, or some episodes
        )

    def require_room(self, paths: Iterable[Path]) -> None:
        """Check that a buffer which holds data has the entries that the env will give.

        Raises:
            MissingKeyError: (a KeyError) it does not.
        """
        held = _held_keys(self._buffer)
        if held is None:
            return
        if missing := {as_key(path) for path in paths if path[-1] != OWN_STEP_COUNT} - held:
            raise MissingKeyError(
                f"the replay buffer holds data without {sorted(map(str, missing))}, which the env gives. It holds "
                f"{sorted(map(str, held))}. Use an empty buffer."
            )

    def add(self, batch: TensorDictBase) -> None:
        """Put a batch in; after an error or Ctrl-C, what is left of it.

        Raises:
            MissingKeyError: (a KeyError) the buffer holds other entries.
        """
        if not self._fits:
            _require_same_keys(self._buffer, batch)
            self._fits = True
        if self._whole and self._episodes_each is None:
            self._buffer.extend(batch)
            return
        if self._whole:
            parts, put_in = self._episodes_of(batch), self._buffer.extend
        else:
            parts, put_in = batch.unbind(batch.batch_dims - 1), self._buffer.add
        for part in parts[self._parts_in :]:
            put_in(part)
            self._parts_in += 1
        self._parts_in = 0

    def _episodes_of(self, batch: TensorDictBase) -> list[TensorDictBase]:
        """Cut whole episodes, one after the other, into parts of so many."""
        numbers = batch.get((COLLECTOR, "traj_ids"))
        begins = [0, *((numbers[1:] != numbers[:-1]).nonzero()[:, 0] + 1).tolist()]
        firsts = [*begins[:: self._episodes_each], len(numbers)]
        return [batch[first:last] for first, last in pairwise(firsts)]

    def state_dict(self) -> dict[str, Any]:
        """Return what the next batches depend on, in plain form; what the buffer holds is the buffer's."""
        return {"steps_in": self._parts_in}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the object that gave ``state`` would have."""
        self._parts_in = state["steps_in"]


def _require_same_keys(buffer: Any, batch: TensorDictBase) -> None:
    in_batch, in_buffer = set(batch.keys(True, True)), _held_keys(buffer)
    if in_buffer is not None and in_batch != in_buffer:
        raise MissingKeyError(
            f"the replay buffer holds other entries than the batch: {sorted(map(str, in_buffer - in_batch))} are in the "
            f"buffer alone, {sorted(map(str, in_batch - in_buffer))} in the batch alone. Use an empty buffer."
        )


def _held_keys(buffer: Any) -> set[Key] | None:
    """Return the entries of the data that a buffer holds; None where there is none, or it cannot be seen."""
    # what transforms of the buffer add is not in there
    storage = getattr(buffer, "storage", buffer)
    if not (hasattr(storage, "__len__") and hasattr(storage, "__getitem__") and len(storage)):
        return None
    held = storage[0]
    return set(held.keys(True, True)) - {"index"} if isinstance(held, TensorDictBase) else None


class Delivery:
    """Deliver batches as the settings of a collector say.

    Attributes:
        raw, formed: see the module; who has counted a batch as delivered sets both to None.
        post_collect_hook: called with each batch; None calls none.
    """

    def __init__(self, settings: CollectorSettings):
        self._settings = settings
        self.raw: TensorDictBase | None = None
        self.formed: TensorDictBase | None = None
        self.post_collect_hook = settings.post_collect_hook
        self._postproc: Any = settings.postproc
        self._buffer: _BufferFilling | None = None
        stored = settings.storing_device
        devices = set(stored) if isinstance(stored, list) else {stored}
        if hasattr(self._postproc, "to") and len(devices) == 1 and None not in devices:
            moved = self._postproc.to(*devices)
            self._postproc = moved if callable(moved) else self._postproc
        if settings.replay_buffer is not None:
            self._buffer = _BufferFilling(
                settings.replay_buffer,
                whole=settings.replay_buffer_chunk,
                episodes_each=settings.trajs_per_write,
            )

    def require_room(self, paths: Iterable[Path]) -> None:
        """Check that the replay buffer, if it holds data, holds what a batch will have."""
        if self._buffer is not None and self._postproc is None:
            self._buffer.require_room(paths)

    def deliver(self) -> TensorDictBase | None:
        """Return the batch; None where it was put into a buffer. Called again after an error, it goes on from there."""
        if self.formed is None:
            assert self.raw is not None
            self.formed = self.made_of(self.raw)
        batch = self.formed.copy()
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        if self._buffer is None:
            return batch
        self._buffer.add(batch)
        return None  # with no call since it was put in: Ctrl-C cannot come in between

    def made_of(self, raw: TensorDictBase) -> TensorDictBase:
        """Split and post-process a batch."""
        settings, batch = self._settings, raw.copy()
        if settings.return_contiguous:
            batch = batch.contiguous()
        if settings.split_trajs:
            batch = split_trajectories(batch)
        if not settings.track_traj_ids:
            batch = _without_ids(batch)
        if self._postproc is None:
            return batch
        processed = self._postproc(batch)
        if not isinstance(processed, TensorDictBase):
            raise ArgumentTypeError(
                f"postproc returned {processed!r}, of type {type(processed).__name__}, but must return the batch, a TensorDict. "
                "Return the batch also from a function that writes into it."
            )
        return processed

    def state_dict(self) -> dict[str, Any]:
        """Return what is not delivered yet, and what the buffer and `postproc` depend on, in plain form."""
        postproc = getattr(self._postproc, "state_dict", None)
        return {
            "undelivered": plain(self.raw),
            "formed": plain(self.formed),
            "buffer": None if self._buffer is None else self._buffer.state_dict(),
            "postproc_state_dict": None if postproc is None else plain(dict(postproc())),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the object that gave ``state`` would have."""
        self.raw = from_plain(state["undelivered"])
        self.formed = from_plain(state["formed"])
        if self._buffer is not None and state["buffer"] is not None:
            self._buffer.load_state_dict(state["buffer"])
        if state["postproc_state_dict"] is not None:
            self._postproc.load_state_dict(from_plain(state["postproc_state_dict"]))


def _without_ids(batch: TensorDictBase) -> TensorDictBase:
    """Remove the numbers of trajectories, and their node where nothing else is in it."""
    batch = batch.exclude((COLLECTOR, "traj_ids"))
    kept = batch.get(COLLECTOR, None)
    return batch.exclude(COLLECTOR) if kept is not None and kept.is_empty() else batch
