"""Which rows a call is for, which workers own them, and when its data may arrive.

Conventions
    row   number of a sub-env, 0 .. num_workers - 1.
    mask  bool, shape (rows, *sub_batch).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from envkit.errors import ResetMaskError
from envkit.transport import Pool

__all__ = ["call_by_row", "can_wait", "refuse_early_part", "rows_of"]


def call_by_row(pool: Pool, method: str, values: dict[int, Any], *leading: Any) -> list[Any]:
    """Call ``method(*leading, {row: value})`` of every worker that owns one of the rows."""
    arguments, workers = [], []
    for worker, owned in enumerate(pool.rows_of):
        own = {row: values[row] for row in owned if row in values}
        if own:
            arguments.append(((*leading, own), {}))
            workers.append(worker)
    return pool.call_each(method, arguments, workers)


def rows_of(mask: torch.Tensor | None, count: int) -> list[int]:
    """Give the rows that a mask touches with any of their parts; None touches all."""
    if mask is None:
        return list(range(count))
    return mask.reshape(count, -1).any(-1).nonzero().squeeze(-1).tolist()


def refuse_early_part(rows: Collection[int], has_root: Sequence[bool] | np.ndarray) -> None:
    """Check that a reset leaves no row without data.

    Raises:
        ResetMaskError: a row that is not reset has never been before.
    """
    if len(rows) < len(has_root) and not all(
        known or row in rows for row, known in enumerate(has_root)
    ):
        raise ResetMaskError(
            "a partial reset came before the first full one, so there is no data of the other "
            "sub-envs. Call reset() once without a mask."
        )


def can_wait(device: torch.device | None, non_blocking: bool) -> bool:
    """Say whether a copy to ``device`` may end after the call: what reads it there is queued too."""
    return non_blocking and device is not None and device.type == "cuda"
