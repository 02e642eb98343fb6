"""What a round costs that does nothing: 1, 2 and 4 Ray actors of this machine beside as many worker processes, and bare Ray.

Each worker holds two rows. In an empty round nothing moves but the order and the answer; in the others each
row sends 64 KiB or 1 MiB back, what the batch of a few hundred steps or a few frames of video take. Ray's best is a bare call
of each actor, waited for. Of all these rounds a model is fitted: so much
for a round, so much more for each actor, for each actor that sends data, and for each MiB.

Run: ``python -m bench.ray_round [--quick]``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import ray

from bench.harness import compare, record
from envkit.transport import Field, Layout, Pool, Processes, Traffic
from envkit_bridges.transports.ray import RayActors

ROWS = 2  # of each worker
WORKERS = (1, 2, 4)
NOTHING = 0
SENT = {1: 2**16, 2: 2**20}  # bytes that a row sends back, by command
SAID = {NOTHING: "empty", 1: "64 KiB back from each row", 2: "1 MiB back from each row"}


def layout(rows: int) -> Layout:
    """Describe rows that have a field for each size."""
    fields = [Field(f"sent_{command}", (size,), "uint8") for command, size in SENT.items()]
    traffic = {command: Traffic(("order",), (f"sent_{command}",)) for command in SENT}
    return Layout((Field("order", (), "int64"), *fields), rows, {NOTHING: Traffic(), **traffic})


class Idle:
    """A host that writes its frames, or does nothing."""

    def __init__(self, rows: range):
        self.rows = rows

    def describe(self) -> None:
        """Nothing to tell."""

    def bind(self, arrays: dict[str, np.ndarray], rows: range) -> None:
        """Take the arrays."""
        self.arrays = arrays

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> None:
        """Nothing is asked."""

    def run(self, command: int, rows: list[int]) -> None:
        """Fill what each row sends with what was ordered."""
        for row in rows:
            if command != NOTHING:
                self.arrays[f"sent_{command}"][row] = self.arrays["order"][row]

    def close(self) -> None:
        """Nothing to give back."""


class Bare:
    """The least that an actor can do."""

    def nothing(self) -> None:
        """Answer."""


def rounds(pool: Any, command: int, count: int) -> Callable[[], None]:
    """Run a command in all rows so many times."""

    def work() -> None:
        for _ in range(count):
            pool.send(command)
            pool.recv()

    return work


def bare_rounds(workers: int, count: int) -> Callable[[], None]:
    """Call actors that are no part of envkit."""
    actors: Any = [ray.remote(Bare).options(num_cpus=0).remote() for _ in range(workers)]

    def work() -> None:
        for _ in range(count):
            ray.get([actor.nothing.remote() for actor in actors])

    return work


def measure(workers: int, count: int) -> dict[int, float]:
    """Compare the rounds of so many workers; give the seconds of a round on Ray, by command."""
    with ExitStack() as opened:
        pools: dict[str, Any] = {
            "processes": Pool(Processes(Idle, ROWS * workers, workers)),
            "Ray": Pool(RayActors(Idle, ROWS * workers, workers)),
        }
        works = {"bare Ray": bare_rounds(workers, count)}
        for name, pool in pools.items():
            opened.callback(pool.close)
            pool.start()
            pool.bind(layout(ROWS * workers))
            works |= {
                f"{name}, {said}": rounds(pool, command, count) for command, said in SAID.items()
            }
        measured = compare(
            f"a round of {ROWS * workers} rows in {workers} workers",
            works,
            steps=count,
            reference="processes, empty",
            rounds=5,
        )
    speed = {one.work: one.steps_per_s for one in measured}
    return {command: 1 / speed[f"Ray, {said}"] for command, said in SAID.items()}


def fit(seconds: dict[tuple[int, int], float]) -> None:
    """Fit a round on Ray by its actors and what they send, and record the model with its largest relative error."""
    points = [
        (1.0, workers, workers * (command in SENT), workers * ROWS * SENT.get(command, 0) / 2**20)
        for workers, command in seconds
    ]
    terms, wanted = np.array(points), np.array(list(seconds.values()))
    weights = 1 / wanted[:, None]  # relative errors count
    found = np.linalg.lstsq(terms * weights, wanted * weights[:, 0], rcond=None)[0]
    error = float(np.abs(terms @ found / wanted - 1).max())
    names = ("round_ms", "ms_per_actor", "ms_per_actor_that_sends", "ms_per_MiB")
    model = {name: round(1000 * float(value), 3) for name, value in zip(names, found, strict=True)}
    print(f"\na round on Ray: {model}, largest error {error:.0%}")
    record("model of a round on Ray", {**model, "largest_relative_error": round(error, 2)})


def main() -> None:
    """Compare, print, and append lines to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    count = 20 if parser.parse_args().quick else 100
    ray.init(
        num_cpus=max(WORKERS),
        include_dashboard=False,
        object_store_memory=300 * 2**20,
        log_to_driver=False,
    )
    with ExitStack() as opened:
        opened.callback(ray.shutdown)
        seconds = {
            (workers, command): taken
            for workers in WORKERS
            for command, taken in measure(workers, count).items()
        }
    fit(seconds)


if __name__ == "__main__":
    main()
