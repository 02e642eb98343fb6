"""What new weights cost: 40 MB for 1 and for 4 Ray actors of this machine, beside as many worker processes.

A work updates the weights of a collector and takes a batch, whose steps cost nearly nothing. "Batch alone" does so without an
update. On Ray the weights are put into the object store once, so four actors should take at most twice as long as one:
a ratio of 0.5 or more. Each of them copies the weights into its policy, for which they share the cores.

Run: ``python -m bench.ray_weights [--quick]``
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Literal

import ray
import torch

from bench.harness import compare, record
from envkit import Collector, GymEnv

Backend = Literal["ray", "process"]
WORKERS = (1, 4)
SIZE_BYTES, QUICK_BYTES = 40 * 10**6, 4 * 10**6


class Heavy(torch.nn.Module):
    """Acts with the first of many weights."""

    def __init__(self, size_bytes: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size_bytes // 4), requires_grad=False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Give the action."""
        return self.weight[:1] + 0 * observation[..., :1]


def batches(collector: Collector, *, updating: bool) -> Callable[[], None]:
    """Take a batch, which new weights make if ``updating``."""

    def work() -> None:
        if updating:
            collector.update_policy_weights_()
        collector.next()

    return work


def main() -> None:
    """Compare, print, and append lines to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    size_bytes = QUICK_BYTES if quick else SIZE_BYTES
    ray.init(
        num_cpus=max(WORKERS),
        include_dashboard=False,
        object_store_memory=600 * 2**20,
        log_to_driver=False,
    )
    with ExitStack() as opened:
        opened.callback(ray.shutdown)
        works: dict[str, Callable[[], None]] = {}
        backends: tuple[tuple[Backend, str], ...] = (("ray", "Ray"), ("process", "processes"))
        for backend, name in backends:
            for workers in WORKERS:
                collector = Collector(
                    [partial(GymEnv, "Pendulum-v1")] * workers,
                    Heavy(size_bytes),
                    backend=backend,
                    frames_per_batch=workers,
                )
                opened.callback(collector.shutdown)
                works[f"{name}, {workers}"] = batches(collector, updating=True)
                works[f"{name}, {workers}, batch alone"] = batches(collector, updating=False)
        title = f"new weights of {size_bytes // 10**6} MB, then a batch"
        record(f"before {title}", {"load": round(os.getloadavg()[0], 1)})
        compare(title, works, steps=1, reference="Ray, 1", rounds=5 if quick else 9)


if __name__ == "__main__":
    main()
