"""A batch over several devices against the same batch on one: virtual devices of the CPU, which share its cores.

Random actions in one program. On real devices each shard would have a processor of its own; here only what splitting
costs is measured.

Run: ``python -m bench.devices [--quick]``
"""

from __future__ import annotations

import argparse
import os

MOST = 4
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={MOST}"
)

import jax  # noqa: E402

from bench.harness import compare, rolled_out  # noqa: E402
from envkit import BraxEnv  # noqa: E402


def measure(name: str, rows: int, steps: int, rounds: int) -> None:
    """Compare rollouts of one batch over 1, 2 and 4 devices."""
    works = {}
    for count in (1, 2, MOST):
        devices = None if count == 1 else jax.devices()[:count]
        env = BraxEnv(name, backend="spring", batch_size=[rows], devices=devices)
        env.set_seed(0)
        works["one device" if count == 1 else f"{count} devices"] = rolled_out(env, steps)
    title = f"{name} spring x {rows} over virtual devices, {steps} steps in one program"
    compare(title, works, steps=rows * steps, reference="one device", rounds=rounds)


def main() -> None:
    """Measure a small and a large simulator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 7
    measure("inverted_pendulum", 4096, 50, rounds)
    measure("ant", 1024, 10, rounds)


if __name__ == "__main__":
    main()
