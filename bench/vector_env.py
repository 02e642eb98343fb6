"""CartPole as Gymnasium's vector env: envkit against the bare library, and TorchRL beside it.

The bare library resets a row in the step after its last, whose action it ignores; that is the reference. Beside it
stands a loop that resets what has ended at once, as every env here does: the same work as envkit's.
Actions are random everywhere.

Run: ``python -m bench.vector_env [--quick]``
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
import torchrl.envs
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from bench.harness import compare, rolled_out, stepped
from envkit import GymEnv, SerialEnv

NAME, ROWS = "CartPole-v1", 8


def _vector_env(mode: AutoresetMode) -> tuple[Any, np.random.Generator]:
    """Make the library's vector env, reset once, and what draws its actions."""
    env = SyncVectorEnv([lambda: gymnasium.make(NAME)] * ROWS, autoreset_mode=mode)
    env.reset(seed=0)
    return env, np.random.default_rng(0)


def bare(steps: int) -> Callable[[], None]:
    """Step the library as it is."""
    env, random = _vector_env(AutoresetMode.NEXT_STEP)

    def work() -> None:
        for _ in range(steps):
            env.step(random.integers(0, 2, ROWS))

    return work


def with_resets(steps: int) -> Callable[[], None]:
    """Step the library, and reset what has ended at once."""
    env, random = _vector_env(AutoresetMode.DISABLED)

    def work() -> None:
        for _ in range(steps):
            _, _, terminated, truncated, _ = env.step(random.integers(0, 2, ROWS))
            ended = terminated | truncated
            if ended.any():
                env.reset(options={"reset_mask": ended})

    return work


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    steps = 200 if quick else 1000
    with (
        GymEnv(NAME, num_envs=ROWS) as env,
        SerialEnv(ROWS, lambda: GymEnv(NAME)) as serial,
    ):
        peer = torchrl.envs.GymEnv(NAME, num_envs=ROWS)
        compare(
            f"{NAME} x {ROWS} in one vector env, {steps} steps a round",
            {
                "bare vector env": bare(steps),
                "bare vector env, ended rows reset at once": with_resets(steps),
                "envkit rollout": rolled_out(env, steps),
                "envkit step_and_maybe_reset": stepped(env, steps),
                "envkit SerialEnv rollout": rolled_out(serial, steps),
                "TorchRL rollout": rolled_out(peer, steps),
            },
            steps=steps * ROWS,
            reference="bare vector env",
            rounds=5 if quick else 7,
        )
        peer.close()


if __name__ == "__main__":
    main()
