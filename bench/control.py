"""DeepMind Control's cartpole swingup: envkit against the bare library, alone and in workers.

Actions are random everywhere: the bare loop draws all of a round at once.

Run: ``python -m bench.control [--quick]``
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from bench.harness import LoopsTogether, compare, rolled_out, stepped
from envkit import DMControlEnv, ParallelEnv, SerialEnv

DOMAIN, TASK, ROWS, PROCESSES = "cartpole", "swingup", 8, 2


def bare_loop(count: int, steps: int) -> Callable[[], None]:
    """Step env objects of the library, one after the other; what they observe is put side by side."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from dm_control import suite
    envs = [suite.load(DOMAIN, TASK, {"random": row}) for row in range(count)]
    for env in envs:
        env.reset()
    generator = np.random.default_rng(0)
    seen = {
        name: np.empty((count, *spec.shape)) for name, spec in envs[0].observation_spec().items()
    }

    def run() -> None:
        actions = generator.uniform(-1, 1, (steps, count, 1))
        for row_actions in actions:
            for row, env in enumerate(envs):
                step = env.step(row_actions[row])
                if step.last():
                    step = env.reset()
                for name, value in step.observation.items():
                    seen[name][row] = value

    return run


def theirs(steps: int) -> Callable[[], object]:
    """Roll out the same task with the reference API."""
    from torchrl.envs import DMControlEnv as Peer

    env = Peer(DOMAIN, TASK)
    return lambda: env.rollout(steps, break_when_any_done=False)


def one_env(quick: bool) -> None:
    """Compare one env with the bare loop."""
    steps = 300 if quick else 1000
    env = DMControlEnv(DOMAIN, TASK)
    env.set_seed(0)
    compare(
        f"dm_control {DOMAIN} {TASK}, one env, {steps} steps a round",
        {
            "bare loop": bare_loop(1, steps),
            "envkit rollout": rolled_out(env, steps),
            "envkit step_and_maybe_reset": stepped(env, steps),
            "TorchRL rollout": theirs(steps),
        },
        steps=steps,
        reference="bare loop",
        rounds=5 if quick else 7,
    )


def in_workers(quick: bool) -> None:
    """Compare ParallelEnv of eight envs with two bare loops of four at the same time."""
    steps = 150 if quick else 500
    make = partial(DMControlEnv, DOMAIN, TASK)
    parallel, serial = ParallelEnv(ROWS, make, num_processes=PROCESSES), SerialEnv(ROWS, make)
    reference = f"{PROCESSES} bare loops at the same time"
    with ExitStack() as opened:
        bare = partial(bare_loop, ROWS // PROCESSES, steps)
        loops = opened.enter_context(LoopsTogether(bare, PROCESSES))
        for env in (parallel, serial):
            env.set_seed(0)
            opened.callback(env.close)
        compare(
            f"dm_control {DOMAIN} {TASK} x{ROWS}, {steps} steps a round",
            {
                reference: loops,
                "bare loop, one process": bare_loop(ROWS, steps),
                "envkit ParallelEnv, rollout": rolled_out(parallel, steps),
                "envkit ParallelEnv, step by step": stepped(parallel, steps),
                "envkit SerialEnv, rollout": rolled_out(serial, steps),
            },
            steps=ROWS * steps,
            reference=reference,
            rounds=5 if quick else 7,
        )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    one_env(quick)
    in_workers(quick)


if __name__ == "__main__":
    main()
