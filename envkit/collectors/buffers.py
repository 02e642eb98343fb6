"""Batches that go into a replay buffer: whether they fit what it holds, and how they are put in.

Conventions
    buffer  has ``extend(batch)``, or ``add(step)`` where every step is put in by itself; TorchRL's, or any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from tensordict import TensorDictBase

from envkit.collectors.runner import COLLECTOR, OWN_STEP_COUNT
from envkit.data.paths import Key, Path, as_key
from envkit.data.plain import from_plain, plain
from envkit.errors import MissingKeyError

__all__ = ["BufferFilling"]


class BufferFilling:
    """Put batches into a buffer.

    Args:
        buffer: where.
        whole: put whole batches in; else step by step.
        episodes_each: of whole episodes, put so many in at once; None: all.
        begins_randomly: the first batches have random actions, and so nothing else that a policy writes: only what
            they have is put in, of all batches.
    """

    def __init__(
        self,
        buffer: Any,
        *,
        whole: bool,
        begins_randomly: bool,
        episodes_each: int | None = None,
    ):
        self._buffer, self._whole, self._begins_randomly = buffer, whole, begins_randomly
        self._episodes_each = episodes_each
        self.keys: list[Key] = []
        """What is put in, where the first batches had random actions."""
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
        if self._begins_randomly:
            self.keys = self.keys or list(batch.keys(True, True))
            batch = batch.select(*self.keys)
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
        """Give what the next batches depend on, in plain form; what the buffer holds is the buffer's."""
        return {"keys": plain(self.keys), "steps_in": self._parts_in}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as whoever gave ``state`` would have."""
        self.keys, self._parts_in = from_plain(state["keys"]), state["steps_in"]


def _require_same_keys(buffer: Any, batch: TensorDictBase) -> None:
    own, theirs = set(batch.keys(True, True)), _held_keys(buffer)
    if theirs is not None and own != theirs:
        raise MissingKeyError(
            f"the replay buffer holds other entries than the batch: {sorted(map(str, theirs - own))} are in the "
            f"buffer alone, {sorted(map(str, own - theirs))} in the batch alone. Use an empty buffer."
        )


def _held_keys(buffer: Any) -> set[Key] | None:
    """Give the entries of the data that a buffer holds; None where there is none, or it cannot be seen."""
    storage = getattr(
        buffer, "storage", buffer
    )  # what transforms of the buffer add is not in there
    if not (hasattr(storage, "__len__") and hasattr(storage, "__getitem__") and len(storage)):
        return None
    held = storage[0]
    return set(held.keys(True, True)) - {"index"} if isinstance(held, TensorDictBase) else None
