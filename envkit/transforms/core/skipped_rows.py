"""Rows that running statistics leave out: one that is not finite would make them so for ever.

Such a row is shown as it came. `SkipsRows` counts it, and warns of the first.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from envkit.data.inference import lasting
from envkit.specs.devices import reading_waits

__all__ = ["SkipsRows"]

_NAME = "skipped_rows"


class SkipsRows(nn.Module):
    """The part of a transform that counts the rows it skips.

    Attributes:
        skipped_rows: how many rows held a number that is not finite, int64, shape (); a buffer.
    """

    skipped_rows: torch.Tensor
    _has_warned = False

    def _begin_count(self) -> None:
        with lasting():
            self.register_buffer(_NAME, torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def _count_skipped(self, is_skipped: torch.Tensor) -> None:
        """Count the rows that are set, bool, and warn of the first."""
        self.skipped_rows += is_skipped.sum().to(self.skipped_rows.device)
        self._warn_of_skipped()

    def _warn_of_skipped(self) -> None:
        """Warn once if rows were skipped; on a GPU, where reading the count would wait, do not."""
        if self._has_warned or reading_waits(self.skipped_rows) or not self.skipped_rows:
            return
        self._has_warned = True
        warnings.warn(
            f"{type(self).__name__} of {self.in_keys} was given a row that holds NaN or an infinite number. Such rows are left out of its "
            "statistics and shown as they are. Read skipped_rows for their number, and put a "
            "FiniteTensorDictCheck before this transform to find where they come from.",
            stacklevel=2,
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if any(name.startswith(prefix) for name in state_dict):
            with lasting():  # dicts that were saved by other versions do not have it
                state_dict.setdefault(prefix + _NAME, torch.zeros((), dtype=torch.int64))
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[call-arg]
