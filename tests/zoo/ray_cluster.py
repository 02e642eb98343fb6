"""A small Ray cluster on this machine, begun by the first test that needs one and ended with the program."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envkit import ParallelEnv

__all__ = ["Gated", "begin_ray", "bytes_in_stores", "on_ray", "wait_until"]

_MARKER_BYTES = 2**26


def begin_ray() -> None:
    """Begin Ray for two actors at a time, with little memory; does nothing where it runs."""
    import ray

    if ray.is_initialized():
        return
    with warnings.catch_warnings():
        # Ray starts its daemons by fork, and JAX, once it is imported, warns of any; they exec at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=150 * 2**20,
            log_to_driver=False,
            configure_logging=False,
        )


def on_ray(*args: Any, **kwargs: Any) -> ParallelEnv:
    """Make a `ParallelEnv` whose sub-envs are on that cluster."""
    begin_ray()
    return ParallelEnv(*args, backend="ray", **kwargs)


def wait_until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait for what happens elsewhere, and fail where it does not."""
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def bytes_in_stores() -> int:
    """Return the bytes of all objects in Ray's stores now, each counted once.

    Nodes report this a few times a second, so something large is put there: the report that shows it shows what was
    there before, too.
    """
    import ray

    def used() -> float:
        total, free = ray.cluster_resources(), ray.available_resources()
        return total["object_store_memory"] - free["object_store_memory"]

    marker = ray.put(np.zeros(_MARKER_BYTES, np.uint8))
    wait_until(lambda: used() >= _MARKER_BYTES)
    size_bytes = int(used()) - _MARKER_BYTES
    del marker
    wait_until(lambda: used() < _MARKER_BYTES)
    return size_bytes


class Gated(torch.nn.Module):
    """Acts with the first of its weights, but only while the gate, a file in ``folder``, is open; notes all calls there.

    It is built open.
    """

    def __init__(self, folder: Path, numbers: int = 1):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(numbers))
        self._folder, self._gate = folder, folder / "gate"
        self.open()

    def open(self) -> None:
        self._gate.touch()

    def shut(self) -> None:
        self._gate.unlink()

    def say(self, value: float) -> None:
        torch.nn.init.constant_(self.weight, value)

    def calls(self) -> list[int]:
        """Return how often it was called, in each process that has called it."""
        return [path.stat().st_size for path in sorted(self._folder.glob("calls*"))]

    def forward(self, count: torch.Tensor) -> torch.Tensor:
        with (self._folder / f"calls{os.getpid()}").open("a") as file:
            file.write(".")
        while not self._gate.exists():
            time.sleep(0.01)
        return (self.weight[:1] + 0 * count).round().long()
