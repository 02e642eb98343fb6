"""The rows of an env over JAX: what its options put around each, how they begin anew, how many are compiled for."""

from __future__ import annotations

from typing import Any

import torch

from envkit.functional import (
    BatchedEnv,
    FrameSkip,
    Metrics,
    Randomization,
    StatelessEnv,
    TimeLimit,
)
from envkit.functional.autoreset import ALL_ON_CARD, ALL_ON_HOST, ON_CARD, ON_HOST, Chunks
from envkit_bridges.jax.options import ResetRows

__all__ = ["chunks_on", "padded_size", "rows_of"]


def chunks_on(device: torch.device | None, reset_rows: ResetRows) -> Chunks:
    """Say how rows begin anew together in programs on a device."""
    if device is None or device.type == "cpu":
        return ALL_ON_HOST if reset_rows == "all" else ON_HOST
    return ALL_ON_CARD if reset_rows == "all" else ON_CARD


def rows_of(env: StatelessEnv, given: Any, device: torch.device, *, axis: str | None) -> BatchedEnv:
    """Put what the keywords ask for around one env: metrics, then repeated actions, then the time limit."""
    drawn = None
    if given.randomize is not None:
        drawn = Randomization.of(env, given.randomize, given.randomize_at or "episode")
    if given.metrics:
        env = Metrics(env)
    if given.action_repeat != 1:
        env = FrameSkip(env, given.action_repeat)
    return BatchedEnv(
        TimeLimit(env, given.episode_length),
        reset_mode=given.reset_mode,
        pool_size=given.pool_size,
        randomization=drawn,
        axis=axis,
        chunks=chunks_on(device, given.reset_rows),
    )


def padded_size(rows: int, own: int, multiple: int) -> int:
    """Give the size to compile for: the env's own as it is, any other rounded up to a power of two.

    Sizes from 1 to N thus take about log2(N) programs. ``multiple`` must divide all but the own size.
    """
    if rows == own:
        return own
    size = 1 << max(rows - 1, 0).bit_length()
    return -(-size // multiple) * multiple
