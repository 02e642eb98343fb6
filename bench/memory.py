"""Peak memory of a rollout of Brax, as a multiple of the memory of its result.

What the process holds is watched from a thread during the first rollout of its length, which compiles the program too.

Run: ``python -m bench.memory [--quick]``
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

import psutil
from tensordict import TensorDictBase

from bench.harness import record
from envkit import BraxEnv


def peak_of(work: Callable[[], TensorDictBase]) -> tuple[TensorDictBase, int]:
    """Give what the work gives, and by how many bytes this process grew meanwhile at most."""
    memory, over = psutil.Process().memory_info, threading.Event()
    before = memory().rss
    peak = before

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.002):
            peak = max(peak, memory().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
        peak = max(peak, memory().rss)
    finally:
        over.set()
        watcher.join()
    return result, peak - before


def bytes_of(data: TensorDictBase) -> int:
    """Add up the memory behind the entries; what several of them view counts once."""
    storages = [value.untyped_storage() for value in data.values(True, True)]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def main() -> None:
    """Measure, print, and append one line to the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps")
    rows, steps = 4096, 32 if parser.parse_args().quick else 128
    env = BraxEnv("ant", backend="spring", batch_size=[rows], device="cpu")
    env.set_seed(0)
    env.rollout(
        2, break_when_any_done=False
    )  # a later one of the same length would use its memory again
    begin = time.perf_counter()
    data, peak = peak_of(lambda: env.rollout(steps, break_when_any_done=False))
    result = bytes_of(data)
    title = f"memory of a rollout, ant spring x {rows} on cpu, {steps} steps"
    found = {"peak_mib": peak / 2**20, "result_mib": result / 2**20, "ratio": peak / result}
    print(f"{title}: {found}, {time.perf_counter() - begin:.0f} s")
    record(title, {name: round(value, 3) for name, value in found.items()})


if __name__ == "__main__":
    main()
