"""Whether what a sub-env returns has the form that its specs declare.

One sub-env with another form than it says would spoil the data of all. This module compares keys,
shapes and dtypes; values are the business of `check_env_specs`.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from envkit.data.forms import require_form
from envkit.data.paths import Key, as_key, leaf_paths
from envkit.env.base import EnvBase
from envkit.specs.consolidation import contains_lazy_spec

__all__ = ["OutputForms"]


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
