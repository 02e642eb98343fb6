"""Whether an entry that an env made has the shape and dtype that its spec declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from envkit.data.paths import Key
from envkit.errors import WorkerError

_ADVICE = "Run check_env_specs on one env first."


def require_form(key: Key, value: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check an entry; a size of -1 fits any.

    Raises:
        WorkerError: it is missing, or has another shape or dtype.
    """
    if value is None:
        raise WorkerError(f"the env returned no {key!r}, but its specs declare it. {_ADVICE}")
    if value.dtype == dtype and (value.is_nested or _fits(value.shape, shape)):
        return
    found = "of varying size" if value.is_nested else f"{tuple(value.shape)}"
    raise WorkerError(
        f"{key!r} has shape {found} and dtype {value.dtype}, but its spec says {tuple(shape)} and "
        f"{dtype}. {_ADVICE}"
    )


def _fits(sizes: Sequence[int], wanted: Sequence[int]) -> bool:
    if len(sizes) != len(wanted):
        return False
    return all(want in (size, -1) for size, want in zip(sizes, wanted, strict=True))
