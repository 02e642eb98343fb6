"""Memory of large results, used again once no caller holds them any more.

The system takes large blocks back when they are freed, and clears each page of a new one when it is first written: that
took as long as the copies of a rollout of pictures. Small blocks are kept by the allocator anyway.

Conventions
    block  bytes of one tensor; it is lent from `LentMemory.empty` until the last tensor on it is gone.
"""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch

__all__ = ["LentMemory"]

_LARGE_BYTES = (
    32 * 2**20
)  # glibc maps blocks from here on again each time (mallopt(3), M_MMAP_THRESHOLD)


class LentMemory:
    """Allocate tensors, the large ones on memory of earlier ones that are gone.

    No more is kept than was lent since `begin`, and that until this object and all it has lent are gone.

    Args:
        large_bytes: smaller tensors are left to torch, as are those elsewhere than on the CPU.
    """

    def __init__(self, large_bytes: int = _LARGE_BYTES):
        self._large_bytes = large_bytes
        self._idle: list[torch.Tensor] = []
        self._lent_bytes = 0

    def begin(self) -> None:
        """Begin another result, which decides how much is kept."""
        self._lent_bytes = 0

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None
    ) -> torch.Tensor:
        """Give a tensor of any values, which belongs to who holds it; None is the CPU, whatever torch's default is."""
        size_bytes = math.prod(shape) * dtype.itemsize
        device = torch.device("cpu") if device is None else device
        if size_bytes < self._large_bytes or device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        self._lent_bytes += size_bytes
        block = self._idle_of(size_bytes)
        if block is None:
            block = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        lent: np.ndarray = block.numpy()[:]
        weakref.finalize(lent, self._take_back, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _idle_of(self, size_bytes: int) -> torch.Tensor | None:
        """Take a block of a size out of those that are idle."""
        for index, block in enumerate(self._idle):
            if len(block) == size_bytes:
                return self._idle.pop(index)
        return None

    def _take_back(self, block: torch.Tensor) -> None:
        """Keep a block for later, unless enough are kept; other threads may call this at any time."""
        if sum(map(len, self._idle)) + len(block) <= self._lent_bytes:
            self._idle.append(block)
