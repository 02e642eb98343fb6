"""Acting beside busy processes: the rule of `envkit.env.torch_threads` against fixed numbers of torch's threads.

Each work is measured alone and beside one and two processes that need a core all the time: with the rule, and without it,
with one thread and with as many as there are cores, which is what torch begins with. Alone, a large network must lose
nothing. Processes that the machine runs besides are not counted, but the load that they make is recorded.

Run: ``python -m bench.busy [--quick]``
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from bench.harness import compare, record
from envkit import BraxEnv, EnvBase, GymEnv, ParallelEnv, SerialEnv, SyncDataCollector
from envkit.env.bound_policy import bind_policy
from envkit.env.torch_threads import ThreadLimit
from envkit.transport.cores import count_cores

RULE, ONE, ALL = "the rule", "one thread", "all threads, no rule"


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run as many processes that need a core all the time."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def fixed(number: int, work: Callable[[], object]) -> Callable[[], None]:
    """Do a work with a number of threads that is asked for."""

    def run() -> None:
        limit = ThreadLimit(number)
        try:
            work()
        finally:
            limit.end()

    return run


def measure(name: str, work: Callable[[], object], steps: int, *, busy: int, rounds: int) -> None:
    """Compare the rule with fixed numbers, and record the load that the machine had before."""
    title = f"{name}, beside {busy} more busy processes"
    works = {RULE: work, ONE: fixed(1, work), ALL: fixed(count_cores(), work)}
    record(f"before {title}", {"load": round(os.getloadavg()[0] - busy, 1)})
    compare(title, works, steps=steps, reference=ALL, rounds=rounds)


def perceptron(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    """Build two hidden layers."""
    torch.manual_seed(0)
    hidden = nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


class Choice(nn.Module):
    """Acts with the best of two options."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation).argmax(-1)


def cart_pole() -> GymEnv:
    """Build the env of the pools."""
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def rolled(env: EnvBase, policy: nn.Module, steps: int) -> Callable[[], None]:
    """Roll out from resets on."""

    @torch.no_grad()
    def run() -> None:
        env.rollout(steps, policy, break_when_any_done=False)

    return run


def envs(rounds: int) -> None:
    """Measure one env, pools, steps of a stateless env and a collector."""
    choice, torque = Choice(), perceptron(4, 1)
    one, here, pool = cart_pole(), SerialEnv(32, cart_pole), ParallelEnv(32, cart_pole)
    brax = BraxEnv("inverted_pendulum", batch_size=[64], device="cpu")
    step_by_step = rolled(brax, torque, 20)
    collected = ParallelEnv(32, cart_pole)
    collector = SyncDataCollector(collected, choice, frames_per_batch=640)
    works: dict[str, tuple[Callable[[], object], int]] = {
        "one CartPole": (rolled(one, choice, 50), 50),
        "SerialEnv, CartPole x 32": (rolled(here, choice, 20), 640),
        "ParallelEnv, CartPole x 32": (rolled(pool, choice, 20), 640),
        "BraxEnv inverted_pendulum x 64, stepwise": (step_by_step, 1280),
        "SyncDataCollector over ParallelEnv, CartPole x 32": (collector.next, 640),
    }
    for busy in (0, 1, 2):
        with busy_processes(busy):
            for name, (work, steps) in works.items():
                measure(name, work, steps, busy=busy, rounds=rounds)
    collector.shutdown()
    for env in (one, here, pool, collected):
        env.close()


def large_network(rounds: int) -> None:
    """Measure three layers of 1024 that act on 4096 rows, alone."""
    layers = [nn.Linear(4, 1024), *(nn.Linear(1024, 1024) for _ in range(3)), nn.Linear(1024, 2)]
    root = TensorDict({"observation": torch.randn(4096, 4)}, [4096])
    act = bind_policy(
        cart_pole(), TensorDictModule(nn.Sequential(*layers), ["observation"], ["action"])
    )
    with torch.no_grad():
        measure("three layers of 1024 on 4096 rows", lambda: act(root), 4096, busy=0, rounds=rounds)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 15
    torch.set_num_threads(count_cores())  # what torch begins with
    large_network(rounds)
    envs(rounds)


if __name__ == "__main__":
    main()
