"""CartPole in a pool, and what is put around it: the bare pool beside statistics, nested envs, a function and a mixed env.

Each is a rollout with random actions. TorchRL's pool, with and without a counter around it, stands beside them.

Run: ``python -m bench.around_pools [--quick]``
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torchrl.envs

from bench.harness import compare, rolled_out
from envkit import (
    GymEnv,
    MixedEnv,
    NormalizeReward,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)
from envkit.env.base import EnvBase

NAME, ROWS = "CartPole-v1", 8


def pool(rows: int = ROWS) -> SerialEnv:
    """Make the env that stands in the middle of each."""
    return SerialEnv(rows, lambda: GymEnv(NAME))


AROUND: dict[str, Callable[[], EnvBase]] = {
    "bare pool": pool,
    "StepCounter": lambda: TransformedEnv(pool(), StepCounter()),
    "nested envs": lambda: TransformedEnv(TransformedEnv(pool(), RewardSum()), StepCounter()),
    "VecNorm": lambda: TransformedEnv(pool(), VecNorm(["observation"])),
    "NormalizeReward": lambda: TransformedEnv(pool(), NormalizeReward()),
    "VecNormV2": lambda: TransformedEnv(pool(), VecNormV2(["observation"])),
    "a function td -> td": lambda: TransformedEnv(pool(), lambda td: td),
    "MixedEnv of two halves": lambda: MixedEnv([pool(ROWS // 2), pool(ROWS // 2)]),
}


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    steps = 100 if quick else 400
    with ExitStack() as open_envs:
        works = {
            name: rolled_out(open_envs.enter_context(make()), steps)
            for name, make in AROUND.items()
        }
        peer = torchrl.envs.SerialEnv(ROWS, lambda: torchrl.envs.GymEnv(NAME))
        counted = torchrl.envs.TransformedEnv(peer, torchrl.envs.StepCounter())
        works |= {
            "TorchRL pool": rolled_out(peer, steps),
            "TorchRL StepCounter": rolled_out(counted, steps),
        }
        compare(
            f"{NAME} x {ROWS} in a SerialEnv, {steps} steps a round",
            works,
            steps=steps * ROWS,
            reference="bare pool",
            rounds=5 if quick else 7,
        )
        counted.close()


if __name__ == "__main__":
    main()
