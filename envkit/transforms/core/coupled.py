"""Transforms in which the rows of a batch have an effect on each other.

Everything else is computed row by row, wherever a row is stepped. What needs all rows together (running
statistics, for instance) needs to know which of them are new: `CoupledTransform` decides that, once
for each step and reset, and hands them over. It does not know what is done with them.

Conventions
    event  axes of an entry that belong to one row; all axes before are rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from array_api_compat import array_namespace
from tensordict import TensorDictBase

from envkit import rules
from envkit.data.paths import Key, as_path
from envkit.transforms.episodes import EpisodeTransform

__all__ = ["CoupledTransform", "by_rows"]


class CoupledTransform(EpisodeTransform):
    """Base of transforms that look at all rows of a batch together.

    A concrete one writes `_observe_rows`, which sees the new values of each in_key before `_call`
    changes any, and for the rest what any `Transform` writes.
    """

    def _observe_rows(self, key: Key, rows: torch.Tensor) -> None:
        """Look at the values that an in_key has got, all new rows together.

        Called once for each in_key that is there and has any: after a step with the rows that were
        stepped, after a reset with those that were reset, and with all rows of data the transform is
        called on.

        Args:
            key: the in_key.
            rows: its new values, shape ``(n, *event)``, at least one.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not write _observe_rows. Write it, or derive the class from "
            "Transform if its rows have no effect on each other."
        )

    def _event_of(self, key: Key, shape: Sequence[int]) -> tuple[int, ...]:
        """Say which axes of an entry are the event: by default ``shape``, all after the batch."""
        return tuple(shape)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        stepped = td.get(rules.STEP, None)
        self._observe(next_td, lambda key: stepped)
        return self._call(next_td)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        self._observe(td_reset, lambda key: self._reset_mask(td, as_path(key)[:-1]))
        return super()._reset(td, td_reset)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Look at the values of data, all rows, and transform them."""
        self._observe(tensordict, lambda key: None)
        return self._call(tensordict)

    def _observe(self, td: TensorDictBase, mask_of: Callable[[Key], torch.Tensor | None]) -> None:
        """Hand over the new rows of each in_key; ``mask_of`` selects them, None means all."""
        for key in self.in_keys:
            value = td.get(key, None)
            if value is None:
                continue
            event = self._event_of(key, value.shape[td.batch_dims :])
            rows, mask = by_rows(value, event, mask_of(key), td.batch_dims)
            if mask is not None:
                rows = rows[mask]
            if len(rows):
                self._observe_rows(key, rows)


def by_rows(
    value: Any, event: Sequence[int], mask: Any | None, batch_dims: int
) -> tuple[Any, Any | None]:
    """Flatten an entry to rows, and a mask with it.

    Args:
        value: array of any namespace, its last axes ``event``.
        event: see the module.
        mask: which parts are meant; its axes are the leading ones of ``value``, or more. None: all.
        batch_dims: number of batch axes.

    Returns:
        Rows of shape ``(n, *event)``, and the mask ``(n,)``, if there is one.
    """
    xp, lead = array_namespace(value), tuple(value.shape[: value.ndim - len(event)])
    rows = xp.reshape(value, (-1, *event))
    if mask is None:
        return rows, None
    own = rules.reduce_mask(mask, lead, batch_dims)
    own = xp.reshape(own, (*own.shape, *(1,) * (len(lead) - own.ndim)))
    return rows, xp.reshape(xp.broadcast_to(own, lead), (-1,))
