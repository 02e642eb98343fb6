"""Steps per second against batch size: envkit, bare Brax and TorchRL.

A small network acts. Lines that are called from Python at every step, and lines that are one program.

Run: ``python -m bench.scaling [--quick] [--device cuda]``; `bench.report` draws what it records.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

from bench.brax_scan import acting_like, bare_scan, envkit_unroll
from bench.brax_step import bare_loop, envkit_loop, policy_for, torchrl_env, torchrl_loop
from bench.harness import compare
from envkit import BraxEnv, compile_policy

NAME = "inverted_pendulum"
SIZES = (1, 16, 64, 256, 1024, 4096)


def measure(rows: int, device: str, rounds: int) -> None:
    """Compare all lines at one batch size."""
    steps = 200 if rows <= 64 else 50
    env = BraxEnv(NAME, backend="spring", batch_size=[rows], device=device)
    env.set_seed(0)
    policy = policy_for(4, 1, device)
    act, params = acting_like(policy)
    works: dict[str, Callable[[], Any]] = {
        "bare lax.scan": bare_scan(NAME, rows, steps, act, params),
        "envkit unroll": envkit_unroll(env, env.reset(), steps, compile_policy(policy)),
        "bare jit + dlpack loop": bare_loop(NAME, rows, steps, policy),
        "envkit stepwise": envkit_loop(env, steps, policy),
    }
    if importlib.util.find_spec("torchrl"):
        works["TorchRL stepwise"] = torchrl_loop(torchrl_env(NAME, rows), steps, policy)
    compare(
        f"{NAME} spring x {rows} on {device}, against batch size",
        works,
        steps=steps * rows,
        reference="bare lax.scan",
        rounds=rounds,
    )


def main() -> None:
    """Measure each batch size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    sizes, rounds = (SIZES[::2], 5) if options.quick else (SIZES, 7)
    for rows in sizes:
        measure(rows, options.device, rounds)


if __name__ == "__main__":
    main()
