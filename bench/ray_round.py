"""What a round costs that does nothing: two Ray actors of this machine beside two worker processes, and bare Ray.

Each worker holds two rows. In an empty round nothing moves but the order and the answer; in the others each
row sends a megabyte back, which is what a few frames of video take. Ray's best is two bare calls, waited for.

Run: ``python -m bench.ray_round [--quick]``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import ray

from bench.harness import compare
from envkit.transport import Field, Layout, Pool, Processes, Traffic
from envkit_bridges.transports.ray import RayActors

ROWS, WORKERS = 4, 2
NOTHING, FRAMES = 1, 2
LAYOUT = Layout(
    (Field("order", (), "int64"), Field("frames", (2**20,), "uint8")),
    ROWS,
    {NOTHING: Traffic(), FRAMES: Traffic(("order",), ("frames",))},
)


class Idle:
    """A host that writes its frames, or does nothing."""

    def __init__(self, rows: range):
        self.rows = rows

    def describe(self) -> None:
        """Nothing to tell."""

    def bind(self, arrays: dict[str, np.ndarray], rows: range) -> None:
        """Take the arrays."""
        self.order, self.frames = arrays["order"], arrays["frames"]

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> None:
        """Nothing is asked."""

    def run(self, command: int, rows: list[int]) -> None:
        """Fill the frames of each row with what was ordered."""
        for row in rows:
            if command == FRAMES:
                self.frames[row] = self.order[row]

    def close(self) -> None:
        """Nothing to give back."""


class Bare:
    """The least that an actor can do."""

    def nothing(self) -> None:
        """Answer."""


def rounds(pool: Any, command: int, count: int) -> Callable[[], None]:
    """Have all rows carry out a command so many times."""

    def work() -> None:
        for _ in range(count):
            pool.send(command)
            pool.recv()

    return work


def bare_rounds(count: int) -> Callable[[], None]:
    """Call two actors that are no part of envkit."""
    actors: Any = [ray.remote(Bare).options(num_cpus=0).remote() for _ in range(WORKERS)]

    def work() -> None:
        for _ in range(count):
            ray.get([actor.nothing.remote() for actor in actors])

    return work


def main() -> None:
    """Compare, print, and append one line to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    count = 20 if parser.parse_args().quick else 200
    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        object_store_memory=150 * 2**20,
        log_to_driver=False,
    )
    with ExitStack() as opened:
        opened.callback(ray.shutdown)
        pools: dict[str, Any] = {
            "processes": Pool(Processes(Idle, ROWS, WORKERS)),
            "Ray": Pool(RayActors(Idle, ROWS, WORKERS)),
        }
        works = {"bare Ray": bare_rounds(count)}
        for name, pool in pools.items():
            opened.callback(pool.close)
            pool.start()
            pool.bind(LAYOUT)
            works[f"{name}, empty"] = rounds(pool, NOTHING, count)
            works[f"{name}, 1 MiB back from each row"] = rounds(pool, FRAMES, count)
        compare(
            f"a round of {ROWS} rows in {WORKERS} workers",
            works,
            steps=count,
            reference="processes, empty",
            rounds=5,
        )


if __name__ == "__main__":
    main()
