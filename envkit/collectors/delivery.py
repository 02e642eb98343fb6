"""One batch on its way to the caller: split, post-processed, shown to a hook, and put into a replay buffer.

What fails on the way loses nothing and does nothing twice: `postproc` sees a batch once, a buffer gets a step once.

Conventions
    raw     the batch as it was collected; None where there is none to deliver.
    formed  what `split_trajs` and `postproc` have made of it; None until they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tensordict import TensorDictBase

from envkit.collectors.buffers import BufferFilling
from envkit.collectors.runner import COLLECTOR
from envkit.data.paths import Path
from envkit.data.plain import from_plain, plain
from envkit.data.trajectories import split_trajectories
from envkit.errors import ArgumentTypeError

__all__ = ["Delivery"]


class Delivery:
    """Deliver batches as `CollectorOptions` say.

    Attributes:
        raw, formed: see the module; who has counted a batch as delivered sets both to None.
    """

    def __init__(self, options: Any):
        self._options = options
        self.raw: TensorDictBase | None = None
        self.formed: TensorDictBase | None = None
        self._buffer: BufferFilling | None = None
        stored = options.storing_device
        devices = set(stored) if isinstance(stored, list) else {stored}
        if hasattr(options.postproc, "to") and len(devices) == 1 and None not in devices:
            moved = options.postproc.to(*devices)
            options.postproc = moved if callable(moved) else options.postproc
        if options.replay_buffer is not None:
            self._buffer = BufferFilling(
                options.replay_buffer,
                whole=options.replay_buffer_chunk,
                episodes_each=options.trajs_per_write,
                begins_randomly=bool(options.init_random_frames),
            )

    def require_room(self, paths: Iterable[Path]) -> None:
        """Check that the replay buffer, if it holds data, holds what a batch will have."""
        if self._buffer is not None and self._options.postproc is None:
            self._buffer.require_room(paths)

    def deliver(self) -> TensorDictBase | None:
        """Give the batch; None where it was put into a buffer. Called again after an error, it goes on from there."""
        if self.formed is None:
            assert self.raw is not None
            self.formed = self.made_of(self.raw)
        batch = self.formed.copy()
        if self._options.post_collect_hook is not None:
            self._options.post_collect_hook(batch)
        if self._buffer is None:
            return batch
        self._buffer.add(batch)
        return None  # with no call since it was put in: Ctrl-C cannot come in between

    def made_of(self, raw: TensorDictBase) -> TensorDictBase:
        """Split and post-process a batch."""
        options, batch = self._options, raw.copy()
        if options.split_trajs:
            batch = split_trajectories(batch)
        if not options.track_traj_ids:
            batch = _without_ids(batch)
        if options.postproc is None:
            return batch
        made = options.postproc(batch)
        if not isinstance(made, TensorDictBase):
            raise ArgumentTypeError(
                f"postproc returned {made!r}, of type {type(made).__name__}, but must return the batch, a TensorDict. "
                "One that writes into the batch returns it in the end."
            )
        return made

    def state_dict(self) -> dict[str, Any]:
        """Give what is not delivered yet, and what the buffer and `postproc` depend on, in plain form."""
        postproc = getattr(self._options.postproc, "state_dict", None)
        return {
            "undelivered": plain(self.raw),
            "formed": plain(self.formed),
            "buffer": None if self._buffer is None else self._buffer.state_dict(),
            "postproc_state_dict": None if postproc is None else plain(dict(postproc())),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as whoever gave ``state`` would have."""
        self.raw = from_plain(state["undelivered"])
        self.formed = from_plain(state["formed"])
        if self._buffer is not None and state["buffer"] is not None:
            self._buffer.load_state_dict(state["buffer"])
        if state["postproc_state_dict"] is not None:
            self._options.postproc.load_state_dict(from_plain(state["postproc_state_dict"]))


def _without_ids(batch: TensorDictBase) -> TensorDictBase:
    """Leave the numbers of trajectories out, and their node where nothing else is in it."""
    batch = batch.exclude((COLLECTOR, "traj_ids"))
    kept = batch.get(COLLECTOR, None)
    return batch.exclude(COLLECTOR) if kept is not None and kept.is_empty() else batch
