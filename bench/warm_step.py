"""Measure warm steps of two checkouts of this repository against each other, in one run.

Each checkout has a process of its own, which takes turns with the other: round by round, env by env.
So a busy machine slows both alike. Trust ratios, not seconds.

Conventions
    before   the checkout that is compared with; ``git archive COMMIT | tar -x -C before`` makes one.
    rounds   timed turns of each env in each checkout; the ratio of an env is the median over rounds.

Run: ``python -m bench.warm_step --before PATH``
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.harness import record

_HERE = Path(__file__).parents[1]
_STEPS = {
    "GymEnv": 1000,
    "SerialEnv(32)": 150,
    "ParallelEnv(32)": 150,
    "JaxEnv x64": 500,
    "TransformedEnv(GymEnv, 3 transforms)": 300,
}


def serve() -> None:
    """Make every env, and take steps of the one that each line of the input names."""
    import gymnasium
    import torch

    from envkit import (
        BraxEnv,
        Compose,
        GymEnv,
        InitTracker,
        ParallelEnv,
        RewardSum,
        SerialEnv,
        StepCounter,
        TransformedEnv,
    )

    def cartpole():
        return GymEnv("CartPole-v1")

    gymnasium.logger.min_level = gymnasium.logger.ERROR
    torch.set_num_threads(1)
    envs = {
        "GymEnv": cartpole(),
        "SerialEnv(32)": SerialEnv(32, cartpole),
        "ParallelEnv(32)": ParallelEnv(32, cartpole),
        "JaxEnv x64": BraxEnv("fast", batch_size=[64], device="cpu"),
        "TransformedEnv(GymEnv, 3 transforms)": TransformedEnv(
            cartpole(), Compose(InitTracker(), StepCounter(), RewardSum())
        ),
    }
    roots = {}
    for name, env in envs.items():
        env.set_seed(0)
        roots[name] = env.rand_action(env.reset())
    for line in sys.stdin:
        name = line.strip()
        env, root = envs[name], roots[name]
        start = time.perf_counter()
        for _ in range(_STEPS[name]):
            env.step(root.copy())
        print(time.perf_counter() - start, flush=True)
    for env in envs.values():
        env.close(raise_if_closed=False)


def started(checkout: Path) -> subprocess.Popen[str]:
    """Start the process of a checkout, which runs this file with the packages that lie there."""
    from bench.harness import python_path  # not in the process of a checkout that may lack it

    environment = {**os.environ, "PYTHONPATH": python_path(checkout)}
    command = [sys.executable, __file__, "--serve"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def timed(process: subprocess.Popen[str], name: str) -> float:
    """Run the steps of an env in a process, and return the seconds it took."""
    assert process.stdin is not None and process.stdout is not None
    print(name, file=process.stdin, flush=True)
    return float(process.stdout.readline())


def main() -> None:
    """Compare, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    before, after = started(options.before.resolve()), started(_HERE)
    rows = []
    for name, steps in _STEPS.items():
        for process in (before, after):
            timed(process, name)  # warm
        pairs = [(timed(before, name), timed(after, name)) for _ in range(options.rounds)]
        ratios = sorted(old / new for old, new in pairs)
        now = steps / statistics.median(new for _, new in pairs)
        rows.append(
            {
                "env": name,
                "steps_per_s": now,
                "ratio": statistics.median(ratios),
                "ratio_low": ratios[0],
                "ratio_high": ratios[-1],
            }
        )
        row = rows[-1]
        print(
            f"{name:40s} {now:10,.0f} steps/s {row['ratio']:6.2f} times as fast as before   "
            f"{ratios[0]:.2f}-{ratios[-1]:.2f}",
            flush=True,
        )
    for process in (before, after):
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    record("warm steps, after over before", {"rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
