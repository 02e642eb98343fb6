"""Whether copies to the device of delivery may end after the call that made them."""

from __future__ import annotations

import torch

__all__ = ["can_wait"]


def can_wait(device: torch.device | None, non_blocking: bool) -> bool:
    """Say whether a copy to ``device`` may end after the call: what reads it there is queued too."""
    return non_blocking and device is not None and device.type == "cuda"
