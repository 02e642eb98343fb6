"""Worlds against what their libraries do by themselves; each function is one line of the table.

Run: ``python -m bench.worlds [--quick] [--only games]``
"""

from __future__ import annotations

import argparse
import multiprocessing
import warnings
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch

from bench.harness import compare

GAMES, PISTONS = 8, 20


# ---------------------------------------------------------------------------------------- PettingZoo


def games(quick: bool) -> None:
    """Measure ParallelEnv of 8 games of Pistonball against two bare loops at the same time."""
    from envkit import ParallelEnv, PettingZooEnv, SerialEnv

    steps, processes = (4 if quick else 8), 2

    def make() -> PettingZooEnv:
        return PettingZooEnv("butterfly/pistonball_v6")

    with ExitStack() as opened:
        loops = opened.enter_context(_GameLoops(GAMES, steps, processes))
        parallel = ParallelEnv(GAMES, make, num_processes=processes)
        serial = SerialEnv(GAMES, make)
        for env in (parallel, serial):
            env.set_seed(0)
            opened.callback(env.close)
        reference = f"{processes} bare loops at the same time"
        compare(
            f"Pistonball x{GAMES}, {PISTONS} agents, random actions",
            {
                reference: loops,
                "bare loop, one process": bare_games(GAMES, steps),
                "envkit ParallelEnv, rollout": _rollout(parallel, steps),
                "envkit ParallelEnv, step by step": _steps(parallel, steps),
                "envkit SerialEnv, rollout": _rollout(serial, steps),
            },
            steps=GAMES * steps,
            reference=reference,
            rounds=5 if quick else 7,
        )


def bare_games(count: int, steps: int) -> Callable[[], None]:
    """Step games by the library alone; observations of all agents are put side by side, as a policy needs them."""
    from pettingzoo.butterfly.pistonball.pistonball import parallel_env

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        envs = [parallel_env() for _ in range(count)]
    agents = envs[0].possible_agents
    shape = envs[0].observation_space(agents[0]).shape
    seen = np.empty((count, len(agents), *shape), np.uint8)
    for row, env in enumerate(envs):
        _put(seen[row], env.reset(seed=row)[0])
    generator = np.random.default_rng(0)

    def run() -> None:
        for _ in range(steps):
            actions = generator.uniform(-1, 1, (count, len(agents), 1)).astype(np.float32)
            for row, env in enumerate(envs):
                result = env.step(dict(zip(agents, actions[row], strict=True)))
                observations = result[0] if env.agents else env.reset()[0]
                _put(seen[row], observations)

    return run


def _put(rows: np.ndarray, observations: dict[str, np.ndarray]) -> None:
    for row, observation in zip(rows, observations.values(), strict=True):
        row[...] = observation


class _GameLoops:
    """Bare loops in processes of their own that run at the same time, each over its share."""

    def __init__(self, count: int, steps: int, processes: int):
        context = multiprocessing.get_context("spawn")
        self._ends, self._processes = [], []
        for _ in range(processes):
            here, there = context.Pipe()
            arguments = (there, count // processes, steps)
            self._processes.append(context.Process(target=_serve_games, args=arguments))
            self._ends.append(here)
        for process in self._processes:
            process.start()

    def __call__(self) -> None:
        for end in self._ends:
            end.send("run")
        for end in self._ends:
            end.recv()

    def __enter__(self) -> _GameLoops:
        return self

    def __exit__(self, *raised: object) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()


def _serve_games(end, count: int, steps: int) -> None:
    torch.set_num_threads(1)
    run = bare_games(count, steps)
    while end.recv():
        end.send(run())


def _rollout(env, steps: int) -> Callable[[], None]:
    """Roll out with resets inside, each time from where the last one stopped."""
    state = {"td": env.reset()}

    def run() -> None:
        td = state["td"]
        data = env.rollout(steps, auto_reset=False, tensordict=td, break_when_any_done=False)
        state["td"] = env.step_mdp(data[..., -1])

    return run


def _steps(env, steps: int) -> Callable[[], object]:
    state = {"td": env.reset()}

    def run() -> None:
        td = state["td"]
        for _ in range(steps):
            _, td = env.step_and_maybe_reset(env.rand_action(td))
        state["td"] = td

    return run


WORKS = {"games": games}


def main() -> None:
    """Run the works, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    parser.add_argument("--only", choices=WORKS, help="one of the works")
    options = parser.parse_args()
    for name, work in WORKS.items():
        if options.only in (None, name):
            work(options.quick)


if __name__ == "__main__":
    main()
