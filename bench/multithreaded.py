"""CartPole by EnvPool's threads: envkit against the bare library.

The bare library resets a row in the step after its last, whose action it ignores; that is the reference. Beside it
stands a loop that resets what has ended at once, as every env here does: the same work as envkit's.
Actions are random everywhere.

Run: ``python -m bench.multithreaded [--quick]``
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import envpool
import numpy as np
import torch

from bench.harness import compare
from envkit import MultiThreadedEnv

NAME, ROWS = "CartPole-v1", 256


def bare_pool() -> tuple[Any, np.random.Generator]:
    """Make the library's pool, reset once, and draw its actions."""
    pool = envpool.make_gymnasium(NAME, num_envs=ROWS, seed=0)
    pool.reset()
    return pool, np.random.default_rng(0)


def bare(steps: int) -> Callable[[], None]:
    """Step the library as it is."""
    pool, random = bare_pool()

    def work() -> None:
        for _ in range(steps):
            pool.step(random.integers(0, 2, ROWS, dtype=np.int32))

    return work


def with_resets(steps: int) -> Callable[[], None]:
    """Step the library, and reset what has ended at once."""
    pool, random = bare_pool()

    def work() -> None:
        for _ in range(steps):
            _, _, terminated, truncated, _ = pool.step(random.integers(0, 2, ROWS, dtype=np.int32))
            ended = np.flatnonzero(terminated | truncated).astype(np.int32)
            if len(ended):
                pool.reset(ended)

    return work


def recorded(env: MultiThreadedEnv, steps: int) -> Callable[[], object]:
    """Roll out with random actions."""
    return lambda: env.rollout(steps, break_when_any_done=False)


def acting(env: MultiThreadedEnv, steps: int) -> Callable[[], object]:
    """Roll out with a policy that costs next to nothing."""

    def policy(td: Any) -> Any:
        return td.set("action", (td.get("observation")[:, 2] > 0).long())

    return lambda: env.rollout(steps, policy, break_when_any_done=False)


def by_hand(env: MultiThreadedEnv, steps: int) -> Callable[[], None]:
    """Call `step_and_maybe_reset` in a loop."""

    def work() -> None:
        td = env.reset()
        for _ in range(steps):
            _, td = env.step_and_maybe_reset(env.rand_action(td))

    return work


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)  # the cores are for the library's threads
    warnings.simplefilter("ignore")
    steps = 200 if quick else 1000
    with MultiThreadedEnv(ROWS, NAME) as env:
        env.set_seed(0)
        compare(
            f"{NAME} x {ROWS}, {steps} steps a round",
            {
                "bare EnvPool": bare(steps),
                "bare EnvPool, ended rows reset at once": with_resets(steps),
                "envkit rollout": recorded(env, steps),
                "envkit rollout, policy": acting(env, steps),
                "envkit step_and_maybe_reset": by_hand(env, steps),
            },
            steps=steps * ROWS,
            reference="bare EnvPool",
            rounds=5 if quick else 7,
        )


if __name__ == "__main__":
    main()
