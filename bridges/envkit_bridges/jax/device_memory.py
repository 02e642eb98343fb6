"""One GPU for two libraries: how much memory JAX takes, and a warning when it took too much.

JAX takes three quarters of a GPU when it opens it, which leaves torch the rest; see
https://docs.jax.dev/en/latest/gpu_memory_allocation.html. It reads its settings once, at that moment.
"""

from __future__ import annotations

import os

import torch
from jax._src import xla_bridge  # the one place that tells whether devices have been opened

from envkit.errors import ArgumentError, StartedError
from envkit.process_wide import warn

_LITTLE = 0.1  # of the GPU


def configure_gpu(fraction: float = 0.5, *, preallocate: bool = False) -> None:
    """Set how much of each GPU JAX may take; call it before the first env is made.

    Args:
        fraction: of the memory of a GPU, between 0 and 1; the rest is torch's.
        preallocate: take it at once, which makes later allocations faster and never fragments; else as
            it is needed.

    Raises:
        ArgumentError: ``fraction`` is not between 0 and 1.
        StartedError: (a RuntimeError) JAX has opened its devices already.

    Example:
        >>> from envkit import PendulumJaxEnv, configure_gpu
        >>> configure_gpu(fraction=0.3)
        >>> env = PendulumJaxEnv(batch_size=[4])
    """
    if not 0 < fraction < 1:
        raise ArgumentError(
            f"fraction is {fraction}, but must be above 0 and below 1. Pass JAX's part of each GPU, 0.5 for half."
        )
    if xla_bridge.backends_are_initialized():
        raise StartedError(
            "JAX has started already, and reads these settings only when it starts. Call configure_gpu() before the "
            "first env is made and before any other use of JAX."
        )
    os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # its old name; JAX refuses both
    os.environ["XLA_CLIENT_MEM_FRACTION"] = str(fraction)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true" if preallocate else "false"


def warn_if_full(device: torch.device) -> None:
    """Warn if a device is a GPU on which hardly any memory is left for torch."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if free < _LITTLE * total and torch.cuda.memory_reserved(device) < total / 2:
        warn(
            f"only {free / 2**30:.1f} of {total / 2**30:.1f} GiB of {device} are free for torch. JAX takes most of "
            "a GPU when it opens it: call envkit.configure_gpu(fraction=0.5) before the first env is made.",
        )
