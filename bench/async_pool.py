"""What envs at their own pace cost: slow ones of varying speed, and fast ones that are waited for all the same.

Slow envs sleep 1 to 20 ms a step (log-normal, cut at both ends; CartPole below). A random policy acts on whatever
is ready. The best that n such envs can do is n steps in the mean time of a step; that is the reference. Fast
ones are CartPoles whose results are taken eight at a time, beside TorchRL's pools in its best setting.

Run: ``python -m bench.async_pool [--quick]``
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch

from bench.harness import compare
from envkit import AsyncEnvPool, GymEnv, GymWrapper, ParallelEnv

SLOW, FAST = 16, 8
LOW_S, HIGH_S = 1e-3, 20e-3


class Sleeping(gymnasium.Wrapper):
    """CartPole whose steps take a log-normal time."""

    def __init__(self, seed: int):
        super().__init__(gymnasium.make("CartPole-v1"))
        self._random = np.random.default_rng(seed)

    def step(self, action: Any) -> Any:
        """Sleep, and step."""
        time.sleep(float(np.clip(self._random.lognormal(np.log(5e-3), 0.7), LOW_S, HIGH_S)))
        return self.env.step(action)


def sleeping(seed: int = 0) -> GymWrapper:
    """Make one slow env."""
    return GymWrapper(Sleeping(seed), categorical_action_encoding=True)


def mean_step_s(steps: int = 300) -> float:
    """Measure the mean time of a step of the bare simulator."""
    env = Sleeping(0)
    env.reset(seed=0)
    begin = time.perf_counter()
    for step in range(steps):
        *_, terminated, truncated, _ = env.step(step % 2)
        if terminated or truncated:
            env.reset()
    return (time.perf_counter() - begin) / steps


def at_own_pace(pool: Any, steps: int) -> Callable[[], None]:
    """Step whatever is ready until ``steps`` steps came back."""

    def work() -> None:
        td = pool.rand_action(pool.reset())
        pool.async_step_and_maybe_reset_send(td)
        left = steps
        while left > 0:
            _, td = pool.async_step_and_maybe_reset_recv()
            left -= len(td)
            pool.async_step_and_maybe_reset_send(pool.rand_action(td))
        pool.async_step_and_maybe_reset_recv(min_get=pool.num_envs)

    return work


def in_step(env: ParallelEnv, rounds: int) -> Callable[[], None]:
    """Step all envs together."""

    def work() -> None:
        td = env.reset()
        for _ in range(rounds):
            _, td = env.step_and_maybe_reset(env.rand_action(td))

    return work


def slow_envs(steps: int, rounds: int) -> None:
    """Compare pools of slow envs with the best there can be."""
    makers = [partial(sleeping, seed) for seed in range(SLOW)]
    with ExitStack() as opened:
        pools: dict[str, Any] = {
            "AsyncEnvPool, threads": AsyncEnvPool(makers, backend="threading"),
            "AsyncEnvPool, processes": AsyncEnvPool(makers, backend="multiprocessing"),
        }
        together = ParallelEnv(SLOW, makers, num_processes=SLOW)
        for pool in (*pools.values(), together):
            pool.set_seed(0)
            opened.callback(pool.close)
        ideal_s = steps * mean_step_s() / SLOW
        compare(
            f"{SLOW} envs of {LOW_S * 1e3:.0f}-{HIGH_S * 1e3:.0f} ms a step, {steps} steps a round",
            {
                "n / mean step time": partial(time.sleep, ideal_s),
                **{name: at_own_pace(pool, steps) for name, pool in pools.items()},
                "ParallelEnv": in_step(together, steps // SLOW),
            },
            steps=steps,
            reference="n / mean step time",
            rounds=rounds,
        )


def waited_for(pool: Any, count: int) -> Callable[[], None]:
    """Act on all envs, send to them and receive all, as a training loop does."""
    actions = torch.arange(FAST) % 2
    held = [pool.rand_action(pool.reset())]

    def work() -> None:
        td = held[0]
        for _ in range(count):
            pool.async_step_and_maybe_reset_send(td.set("action", actions))
            _, td = pool.async_step_and_maybe_reset_recv(min_get=FAST)
        held[0] = td

    return work


def theirs(backend: str, **options: Any) -> Any:
    """Make TorchRL's pool of CartPoles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchrl.envs

        make = partial(torchrl.envs.GymEnv, "CartPole-v1", categorical_action_encoding=True)
        build: Any = torchrl.envs.AsyncEnvPool  # abstract to a type checker
        return build([make] * FAST, backend=backend, **options)


def cartpole() -> GymEnv:
    """Make one fast env."""
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def fast_envs(count: int, rounds: int) -> None:
    """Compare pools of fast envs, all of whose results are waited for, with TorchRL's."""
    for backend in ("multiprocessing", "threading"):
        with ExitStack() as opened:
            works = {}
            ours = AsyncEnvPool([cartpole] * FAST, backend=backend)
            opened.callback(ours.close)
            works["envkit"] = waited_for(ours, count)
            for stack in ("dense", "lazy"):
                pool = theirs(backend, stack=stack)
                opened.callback(pool.close)
                works[f"TorchRL, {stack}"] = waited_for(pool, count)
            compare(
                f"{FAST} CartPoles, min_get={FAST}, {backend}, {count} steps a round",
                works,
                steps=count * FAST,
                reference="envkit",
                rounds=rounds,
            )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)  # small work; the cores are for the envs
    slow_envs(800 if quick else 1600, 5 if quick else 7)
    fast_envs(20, 5 if quick else 7)


if __name__ == "__main__":
    main()
