"""What both exchanges ask of rows: which a mask selects, and whether a reset or what was saved leaves one without data.

Conventions
    row   number of a sub-env, 0 .. num_workers - 1.
    mask  bool, shape (rows, *sub_batch).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.data.paths import Key, Path, as_key
from envkit.data.transition import leaves
from envkit.errors import ResetMaskError, ResumeError


def require_keys(saved: TensorDictBase, wanted: Iterable[Key]) -> None:
    """Check that what was saved of a row has the entries of its env.

    Raises:
        ResumeError: it lacks one.
    """
    if missing := [key for key in wanted if saved.get(key, None) is None]:
        raise ResumeError(
            f"what was saved lacks {missing}; it has {sorted(map(str, saved.keys(True, True)))}. Build the env "
            "that was saved."
        )


def require_leaves(saved: TensorDictBase, wanted: Mapping[Path, tuple[int, ...]]) -> None:
    """Check that what was saved has the entries of this env.

    Raises:
        ResumeError: it has others, or other shapes.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves(saved)}
    if shapes != dict(wanted):
        differences = [
            f"{as_key(path)!r}: {shapes.get(path)} saved, {wanted.get(path)} here"
            for path in sorted(shapes.keys() | wanted.keys())
            if shapes.get(path) != wanted.get(path)
        ]
        raise ResumeError(
            "what was saved has other entries than this env: "
            + "; ".join(differences)
            + ". Build the env that was saved."
        )


def rows_of(mask: torch.Tensor | None, count: int) -> list[int]:
    """Return the rows that a mask touches with any of their parts; None touches all."""
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
