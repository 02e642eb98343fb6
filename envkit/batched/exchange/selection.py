"""Which rows the mask of a step or a reset selects, and whether a reset may select only some.

Conventions
    row   number of a sub-env, 0 .. num_workers - 1.
    mask  bool, shape (rows, *sub_batch).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from envkit.errors import ResetMaskError

__all__ = ["refuse_early_part", "rows_of"]


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
    if not all(known or row in rows for row, known in enumerate(has_root)):
        raise ResetMaskError(
            "a partial reset came before the first full one, so there is no data of the other "
            "sub-envs. Call reset() once without a mask."
        )
