"""What transforms cost a pool of gymnasium envs: around the sub-envs, inside the workers, and around the pool.

Around the sub-envs, transforms are shown to all rows of a worker at once; "one by one" puts one more there that
does nothing and does not stack, so that every sub-env steps by itself. A small torch policy acts on the whole
batch. Every ratio is to the same pool without transforms.

Run: ``python -m bench.gym_transforms [--quick]``
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial

import torch

from bench.gym_pool import Policy, envkit_pool
from bench.harness import compare
from bench.transforms import Opaque
from envkit import Compose, GymEnv, ParallelEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv


def bare() -> GymEnv:
    """Make one env."""
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def counted(*more: type[Opaque]) -> TransformedEnv:
    """Make one env behind transforms."""
    return TransformedEnv(bare(), Compose(StepCounter(), RewardSum(), *(kind() for kind in more)))


def measure(kind: type[SerialEnv] | type[ParallelEnv], count: int, steps: int, rounds: int) -> None:
    """Compare one kind of pool with and without transforms."""
    torch.manual_seed(0)
    policy = Policy(4, 2, True, torch.float32)
    pools = {
        "no transforms": kind(count, bare),
        "inside": kind(count, counted),
        "inside, one by one": kind(count, partial(counted, Opaque)),
        "outside": TransformedEnv(kind(count, bare), Compose(StepCounter(), RewardSum())),
    }
    with ExitStack() as opened:
        for env in pools.values():
            env.set_seed(0)
            opened.callback(env.close)
        compare(
            f"{kind.__name__} CartPole-v1 x {count}, StepCounter and RewardSum, {steps} steps a round",
            {name: envkit_pool(env, steps, policy) for name, env in pools.items()},
            steps=steps * count,
            reference="no transforms",
            rounds=rounds,
        )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 9
    torch.set_num_threads(1)  # a small policy; the cores are for the envs
    for kind in (SerialEnv, ParallelEnv):
        measure(kind, 32, 50, rounds)


if __name__ == "__main__":
    main()
