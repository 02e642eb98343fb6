"""Envs as other libraries see them: what a view costs on top of the env's own calls.

Each work plays the same actions in an env and in a view of it, step by step, with resets. The reference is
the env's own `step_and_maybe_reset` in a loop; its own `rollout` stands beside it.

Run: ``python -m bench.views [--quick] [WORK ...]``
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from bench.harness import compare
from envkit import BraxEnv, EnvBase, GymEnv, ParallelEnv, to_torchrl


def cart_poles() -> EnvBase:
    """Make CartPole in 32 rows, in processes."""
    return ParallelEnv(32, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))


def pendulums() -> EnvBase:
    """Make Brax's inverted pendulum in 1024 rows."""
    return BraxEnv("inverted_pendulum", backend="spring", batch_size=[1024], device="cpu")


def always_zero(env: EnvBase) -> Callable[[Any], Any]:
    """Give a policy that costs next to nothing."""
    action = env.full_action_spec.zero()
    return lambda td: td.update(action)


def torchrl_of(title: str, make: Callable[[], EnvBase], steps: int, rounds: int) -> None:
    """Compare `to_torchrl` with the env itself: a rollout, and the loop that users write."""
    options = {"break_when_any_done": False, "trust_policy": True}

    def rolled(env: Any, policy: Any) -> Callable[[], object]:
        return lambda: env.rollout(steps, policy, **options)

    def by_hand(env: Any, policy: Any) -> Callable[[], None]:
        def work() -> None:
            td = env.reset()
            for _ in range(steps):
                _, td = env.step_and_maybe_reset(policy(td))

        return work

    with closing(make()) as env:
        env.set_seed(0)
        view, policy = to_torchrl(env), always_zero(env)
        compare(
            f"to_torchrl, {title} x {env.numel()}, {steps} steps a round",
            {
                "env.rollout": rolled(env, policy),
                "to_torchrl(env).rollout": rolled(view, policy),
                "env.step_and_maybe_reset": by_hand(env, policy),
                "to_torchrl(env).step_and_maybe_reset": by_hand(view, policy),
            },
            steps=steps * env.numel(),
            reference="env.step_and_maybe_reset",
            rounds=rounds,
        )


def torchrl_cart_pole(quick: bool) -> None:
    """TorchRL's view of CartPole x 32."""
    torchrl_of("CartPole-v1", cart_poles, 200 if quick else 1000, 5 if quick else 9)


def torchrl_brax(quick: bool) -> None:
    """TorchRL's view of Brax's inverted pendulum x 1024, step by step."""
    torchrl_of("Brax inverted_pendulum", pendulums, 50 if quick else 300, 5 if quick else 9)


WORKS: dict[str, Callable[[bool], None]] = {
    "torchrl_cart_pole": torchrl_cart_pole,
    "torchrl_brax": torchrl_brax,
}


def main() -> None:
    """Run the works that are named, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("works", nargs="*", choices=[*WORKS, []], default=[], metavar="WORK")
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in arguments.works or WORKS:
        WORKS[name](arguments.quick)


if __name__ == "__main__":
    main()
