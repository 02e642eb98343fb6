"""Envs as other libraries see them: what a view costs on top of the env's own calls.

Each work plays the same actions in an env and in a view of it, step by step, with resets. The reference is
the env's own `step_and_maybe_reset` in a loop; its own `rollout` stands beside it. Views as arrays around a pool
make no TensorDicts, so they may be faster than that. The actions are all zero: a CartPole falls after nine or ten steps,
so nearly every step of 32 ends some rows and resets them, which is the dearer kind.

Run: ``python -m bench.views [--quick] [WORK ...]``
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from bench.harness import compare
from envkit import BraxEnv, EnvBase, GymEnv, ParallelEnv, to_gym_vector, to_sb3, to_torchrl


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


def arrays_of(
    title: str, make: Callable[[], EnvBase], peers: dict[str, Any], steps: int, rounds: int
) -> None:
    """Compare views that show arrays with the env itself, and with vector envs of those libraries.

    Args:
        peers: what makes each, by name.
    """
    with ExitStack() as opened, closing(make()) as env:
        env.set_seed(0)
        policy = always_zero(env)

        def by_hand() -> None:
            td = env.reset()
            for _ in range(steps):
                _, td = env.step_and_maybe_reset(policy(td))

        works: dict[str, Callable[[], object]] = {"env.step_and_maybe_reset": by_hand}
        for mode in ("next_step", "same_step"):
            works[f"to_gym_vector(env, {mode!r})"] = stepped(to_gym_vector(env, mode), steps)
        works["to_sb3(env)"] = stepped(to_sb3(env), steps)
        for name, maker in peers.items():
            theirs = maker()
            opened.callback(theirs.close)
            works[name] = stepped(theirs, steps)
        compare(
            f"views as arrays, {title} x {env.numel()}, {steps} steps a round",
            works,
            steps=steps * env.numel(),
            reference="env.step_and_maybe_reset",
            rounds=rounds,
        )


def stepped(envs: Any, steps: int) -> Callable[[], None]:
    """Step a vector env of Gymnasium's or SB3's with actions that are all zero."""
    space = getattr(envs, "single_action_space", envs.action_space)
    actions = np.zeros((envs.num_envs, *space.shape), space.dtype)

    def work() -> None:
        envs.reset()
        for _ in range(steps):
            envs.step(actions)

    return work


def arrays_cart_pole(quick: bool) -> None:
    """Views as arrays of CartPole x 32, beside the libraries' own vector envs."""
    makers: list[Any] = [partial(gymnasium.make, "CartPole-v1")] * 32
    peers = {
        "gymnasium SyncVectorEnv": partial(gymnasium.vector.SyncVectorEnv, makers),
        "gymnasium AsyncVectorEnv": partial(gymnasium.vector.AsyncVectorEnv, makers),
        "SB3 DummyVecEnv": partial(DummyVecEnv, makers),
        "SB3 SubprocVecEnv": partial(SubprocVecEnv, makers),
    }
    arrays_of("CartPole-v1", cart_poles, peers, 100 if quick else 500, 5 if quick else 7)


def arrays_brax(quick: bool) -> None:
    """Views as arrays of Brax's inverted pendulum x 1024."""
    arrays_of("Brax inverted_pendulum", pendulums, {}, 50 if quick else 300, 5 if quick else 9)


WORKS: dict[str, Callable[[bool], None]] = {
    "torchrl_cart_pole": torchrl_cart_pole,
    "torchrl_brax": torchrl_brax,
    "arrays_cart_pole": arrays_cart_pole,
    "arrays_brax": arrays_brax,
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
