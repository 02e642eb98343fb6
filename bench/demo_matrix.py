"""Run the demo's training over seeds and instruction sets, each in a process of its own.

What trains on one CPU may stall on another, which rounds otherwise. Other CPUs are emulated by capping
what XLA, torch and MKL use of this one. A run counts when the policy balances in both simulators.

Conventions
    training_s  from the first rollout to the last evaluation, compilations included.
    total_s     of the whole process: imports, envs and training.

Run: ``python -m bench.demo_matrix [--seeds 0 1 2 3] [--sets native avx2 sse4_2]``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from bench.harness import RESULTS, machine

CAPS: dict[str, dict[str, str]] = {
    "native": {},
    "avx2": {
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "AVX2",
    },
    "sse4_2": {
        "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
    },
}
"""What each instruction set is emulated by."""

_LIMIT_S = 1200


def train_once(seed: int, caps: str) -> dict:
    """Train with one seed under one instruction set, in a new process.

    Returns:
        Steps and seconds of training, mean episode lengths at its end, and whether the goal was reached.

    Raises:
        RuntimeError: the process failed for another reason than a missed goal.
    """
    start = time.perf_counter()
    child = subprocess.run(
        [sys.executable, "-m", "bench.demo_matrix", "--child", str(seed), caps],
        env={**os.environ, **CAPS[caps]},
        stdout=subprocess.PIPE,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    total_s = time.perf_counter() - start
    if child.returncode:
        raise RuntimeError(
            f"seed {seed} under {caps} exited with {child.returncode}:\n{child.stdout}"
        )
    return {**json.loads(child.stdout.splitlines()[-1]), "total_s": round(total_s, 1)}


def run_child(seed: int, caps: str) -> None:
    """Train in this process and print the outcome as the last line, in JSON."""
    from envkit import cache_dir
    from envkit.demo.display import announcements_said
    from envkit.demo.job import make_envs, train

    with tempfile.TemporaryDirectory() as folder, announcements_said():
        # Programs for one instruction set are useless to another; each has a folder of its own.
        cache_dir(Path(os.environ.get("ENVKIT_DEMO_CACHE", folder)) / caps)
        brax, gym = make_envs("cpu", seed)
        with closing(brax), closing(gym):
            curve = train(brax, gym, seed).curve
    result = {
        "reached": curve.is_reached,
        "steps": curve.steps[-1],
        "training_s": round(curve.seconds, 1),
        "brax": round(curve.brax[-1], 1),
        "gym": round(curve.gym[-1], 1),
    }
    print(json.dumps(result))


def main() -> None:
    """Run the matrix, print a line a run, and record them."""
    parser = argparse.ArgumentParser(description="Run the demo over seeds and instruction sets.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--sets", nargs="+", choices=list(CAPS), default=list(CAPS))
    parser.add_argument("--child", nargs=2, metavar=("SEED", "SET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(int(options.child[0]), options.child[1])
        return
    missed = 0
    about = machine()
    for caps in options.sets:
        for seed in options.seeds:
            outcome = train_once(seed, caps)
            missed += not outcome["reached"]
            print(
                f"seed {seed:3d} {caps:7s} {'reached' if outcome['reached'] else 'MISSED ':7s} "
                f"{outcome['steps']:9,d} steps {outcome['training_s']:6.1f} s of training, "
                f"{outcome['total_s']:6.1f} s in all; Brax {outcome['brax']:.0f}, MuJoCo {outcome['gym']:.0f}",
                flush=True,
            )
            line = {"seed": seed, "instruction_set": caps, **outcome, **about, "cpu": _cpu()}
            with (RESULTS / "demo.jsonl").open("a") as file:
                file.write(json.dumps({"date": time.strftime("%Y-%m-%d"), **line}) + "\n")
    if missed:
        raise SystemExit(
            f"{missed} of {len(options.sets) * len(options.seeds)} runs missed the goal"
        )


def _cpu() -> str:
    """Name the processor, as Linux does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


if __name__ == "__main__":
    main()
