"""Measure works against each other in one run, and write down what came out.

Works are interleaved round by round, so that a busy machine slows all of them alike; the ratio is
the median over rounds of the ratio within a round. Trust ratios, not seconds.

Conventions
    work   callable that does the same number of environment steps at each call and returns when
           they are done (synchronised).
    round  calls of one work in a row, as many as take a fifth of a second, then those of the next.
    ratio  speed of a work over the speed of the reference: 1.0 is equal, 2.0 twice as fast.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from envkit.installing import DISTRIBUTION

_ROUND = 0.2  # seconds: shorter ones show what else the machine did
RESULTS = Path(__file__).parent / "results"
INTO = "BENCH_RESULTS"  # environment variable: the folder that lines go to instead
REHEARSAL = "BENCH_REHEARSAL"  # environment variable: set where `bench.gpu_day` rehearses on a CPU
RUN = "BENCH_RUN"  # environment variable: when `make bench` began; lines of one run show it
_LIBRARIES = (DISTRIBUTION, "jax", "torch", "tensordict", "numpy", "brax", "gymnasium", "mujoco")
_LIBRARIES += ("torchrl",)


@dataclass(frozen=True)
class Measured:
    """One work in one comparison."""

    work: str
    steps_per_s: float  # median over rounds
    ratio: float  # median over rounds, to the reference of the comparison
    ratio_low: float  # lowest and highest round
    ratio_high: float


def compare(
    title: str,
    works: Mapping[str, Callable[[], object]],
    *,
    steps: int | dict[str, int],
    reference: str,
    rounds: int = 7,
) -> list[Measured]:
    """Time the works against ``reference`` and print a table.

    Args:
        title: what is compared.
        works: callables by name; each is called twice before it counts.
        steps: environment steps of one call, the same for all or by name.
        reference: the work all ratios refer to.
        rounds: timed rounds, at least 5.
    """
    for work in works.values():
        work()
    calls = {name: math.ceil(_ROUND / _seconds(work, 1)) for name, work in works.items()}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            seconds[name].append(_seconds(work, calls[name]))
    count = {name: steps[name] if isinstance(steps, dict) else steps for name in works}
    speeds = {name: [count[name] / s for s in seconds[name]] for name in works}
    rows = []
    for name in works:
        ratios = [a / b for a, b in zip(speeds[name], speeds[reference], strict=True)]
        rows.append(
            Measured(
                name,
                statistics.median(speeds[name]),
                statistics.median(ratios),
                min(ratios),
                max(ratios),
            )
        )
    print(f"\n{title}")
    print(f"  {'':42s} {'steps/s':>12s} {'ratio':>8s}   spread")
    for row in rows:
        mark = " (reference)" if row.work == reference else ""
        print(
            f"  {row.work:42s} {row.steps_per_s:12,.0f} {row.ratio:8.2f}   "
            f"{row.ratio_low:.2f}-{row.ratio_high:.2f}{mark}",
            flush=True,
        )
    record(title, {"reference": reference, "rounds": rounds, "works": [asdict(r) for r in rows]})
    return rows


def _seconds(work: Callable[[], object], calls: int) -> float:
    """Time one of several calls."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


class LoopsTogether:
    """The same work in processes of their own at the same time; a call returns when all of them are done.

    Args:
        make: gives the work, in each process.
        processes: how many.
    """

    def __init__(self, make: Callable[[], Callable[[], object]], processes: int):
        context = multiprocessing.get_context("spawn")
        self._ends, self._processes = [], []
        for _ in range(processes):
            here, there = context.Pipe()
            self._processes.append(context.Process(target=_serve, args=(there, make)))
            self._ends.append(here)
        for process in self._processes:
            process.start()

    def __call__(self) -> None:
        for end in self._ends:
            end.send("run")
        for end in self._ends:
            end.recv()

    def __enter__(self) -> LoopsTogether:
        return self

    def __exit__(self, *raised: object) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()


def _serve(end, make: Callable[[], Callable[[], object]]) -> None:
    import torch

    torch.set_num_threads(1)
    run = make()
    while end.recv():
        run()
        end.send(None)


def rolled_out(env: Any, steps: int) -> Callable[[], None]:
    """Roll out with random actions and resets inside, each time from where the last one stopped."""
    state = {"td": env.reset()}

    def run() -> None:
        td = state["td"]
        data = env.rollout(steps, auto_reset=False, tensordict=td, break_when_any_done=False)
        state["td"] = env.maybe_reset(env.step_mdp(data[..., -1]))

    return run


def stepped(env: Any, steps: int) -> Callable[[], None]:
    """Call `step_and_maybe_reset` with random actions, each time from where the last one stopped."""
    state = {"td": env.reset()}

    def run() -> None:
        td = state["td"]
        for _ in range(steps):
            _, td = env.step_and_maybe_reset(env.rand_action(td))
        state["td"] = td

    return run


def is_rehearsal() -> bool:
    """Return whether this only shows that works run: on the CPU, on few rows, and lines are marked."""
    return REHEARSAL in os.environ


def record(title: str, result: dict) -> None:
    """Append one JSON line, with date, machine and versions, to the file of the running script.

    A line of a rehearsal has ``"rehearsal": true``, and `bench.report` skips it.
    """
    import __main__

    name = Path(getattr(__main__, "__file__", "bench")).stem
    line = {
        "title": title,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **({"rehearsal": True} if is_rehearsal() else {}),
        **({"run": os.environ[RUN]} if RUN in os.environ else {}),
        **machine(),
        **result,
    }
    folder = Path(os.environ.get(INTO, RESULTS))
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def python_path(checkout: Path) -> str:
    """Give the PYTHONPATH with which a process imports the packages of a checkout, one of before 0.2 too."""
    folders = [checkout, checkout / "bridges"]
    return os.pathsep.join(
        str(at) for at in folders if at == checkout or (at / "envkit_bridges").exists()
    )


def machine() -> dict:
    """Describe the machine and the versions measured."""
    versions = {}
    for library in _LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        **cpu(),
        "accelerator": accelerator(),
        "versions": versions,
    }


def cpu() -> dict:
    """Name the CPU, and say how many cores there are and how many threads share one; None where Linux does not tell."""
    told = Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    names, shared = (file.read_text() if file.exists() else "" for file in told)
    name = re.search(r"^model name\s*:\s*(.+)$", names, re.MULTILINE)
    return {
        "cores": os.cpu_count(),
        "cpu": name[1] if name else None,
        "threads_per_core": len(re.split("[,-]", shared.strip())) if shared else None,
    }


def accelerator() -> str | None:
    """Return the name of the GPU, or None where torch sees none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
