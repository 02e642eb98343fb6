"""Whether what a sub-env returns has the form that its specs declare.

One sub-env with another form than it says would spoil the data of all. This module compares keys,
shapes and dtypes; values are the business of `check_env_specs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit.data.paths import Key, as_key, leaf_paths
from envkit.env.base import EnvBase
from envkit.errors import WorkerError
from envkit.specs.trees.helpers import contains_lazy_spec

__all__ = ["OutputForms", "require_form"]

_ADVICE = "Run check_env_specs on one env first."


class OutputForms:
    """The forms of what one env makes: of a root, and of the outcome of a step.

    Sizes that only data can tell fit any, and so do entries without a dtype. An env whose parts are
    unlike is trusted.
    """

    def __init__(self, env: EnvBase):
        def forms(*kinds: str) -> list[tuple[Key, tuple[int, ...], torch.dtype]]:
            specs = [getattr(env, f"full_{kind}_spec") for kind in kinds]
            return [
                (as_key(path), tuple(leaf.shape), leaf.dtype)
                for spec in specs
                if not contains_lazy_spec(spec)
                for path in leaf_paths(spec)
                if (leaf := spec[as_key(path)]).dtype is not None
            ]

        self._of_root = forms("observation", "done")
        self._of_outcome = forms("observation", "reward", "done")

    def check_root(self, td: TensorDictBase) -> None:
        """Check what a reset returned.

        Raises:
            WorkerError: an entry is missing, or has another form.
        """
        for key, shape, dtype in self._of_root:
            require_form(key, td.get(key, None), shape, dtype)

    def check_outcome(self, td: TensorDictBase) -> None:
        """Check ``next`` of a step; see `check_root`."""
        for key, shape, dtype in self._of_outcome:
            require_form(key, td.get(key, None), shape, dtype)


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


def _fits(found: Sequence[int], wanted: Sequence[int]) -> bool:
    if len(found) != len(wanted):
        return False
    return all(want in (size, -1) for size, want in zip(found, wanted, strict=True))
