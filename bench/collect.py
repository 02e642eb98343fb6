"""What collecting costs: collectors against what they drive, bare loops with the same policy, and TorchRL's.

Stateless envs: a batch of `SyncDataCollector` is one program; the reference is `unroll` with the same policy. Gym
envs in this process: the reference is `rollout`. Workers: the reference are bare loops, one in each of as many
processes, that run at the same time with the same torch policy; with `compile_policy` they keep the torch
module. Trainers: epochs of gradient steps in torch that take about as long as collecting; what counts is the time of
a batch against the longer of the two alone. Weights: a million parameters to two workers.

Run: ``python -m bench.collect [--quick] [--only NAME]``
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from bench.brax_step import policy_for
from bench.gym_pool import BareLoops, Policy
from bench.harness import compare, record
from envkit import (
    BraxEnv,
    Collector,
    GymEnv,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    ParallelEnv,
    SerialEnv,
    SyncDataCollector,
    compile_policy,
)

WORKERS = 2


class Acting(torch.nn.Module):
    """The policy of the bare loops, as a module of observations."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Give the action."""
        return self.policy.act(observation)


def serial(name: str, count: int) -> SerialEnv:
    """Several gym envs in one process."""
    return SerialEnv(count, partial(GymEnv, name, categorical_action_encoding=True))


def drained(collector: Any, batches: int = 1) -> Callable[[], None]:
    """Take so many batches."""

    def work() -> None:
        for _ in range(batches):
            collector.next()

    return work


def unrolled(env: BraxEnv, steps: int, policy: Any) -> Callable[[], None]:
    """Go on unrolling from where the last call ended."""
    carried = env.reset()

    def work() -> None:
        nonlocal carried
        _, carried = env.unroll(carried, steps, policy)

    return work


def stateless(rounds: int) -> None:
    """Collect from Brax with a compiled policy."""
    for name, rows, steps in (("inverted_pendulum", 4096, 100), ("ant", 64, 100)):
        env = BraxEnv(name, backend="spring", batch_size=[rows])
        policy = compile_policy(
            policy_for(
                env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1], "cpu"
            )
        )
        other = BraxEnv(name, backend="spring", batch_size=[rows])
        collector = SyncDataCollector(other, policy, frames_per_batch=rows * steps)
        compare(
            f"Brax {name} x{rows}, compiled policy, {steps} steps a batch",
            {"unroll": unrolled(env, steps, policy), "SyncDataCollector": drained(collector)},
            steps=rows * steps,
            reference="unroll",
            rounds=rounds,
        )
        collector.shutdown()


def parallel(steps: int, rounds: int) -> None:
    """Collect from a ParallelEnv in this process."""
    policy = Acting(Policy(4, 2, True, torch.float32))
    make = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
    rollout_env, env = ParallelEnv(32, make), ParallelEnv(32, make)
    collector = SyncDataCollector(env, policy, frames_per_batch=32 * steps)
    with torch.no_grad():
        compare(
            f"ParallelEnv CartPole x32, torch policy, {steps} steps a batch",
            {
                "rollout": lambda: rollout_env.rollout(steps, policy, break_when_any_done=False),
                "SyncDataCollector": drained(collector),
            },
            steps=32 * steps,
            reference="rollout",
            rounds=rounds,
        )
    collector.shutdown()
    rollout_env.close()


def theirs(name: str, count: int, policy: Policy, frames: int) -> Any:
    """TorchRL's collector on the same work."""
    import torchrl.collectors
    import torchrl.envs
    from tensordict.nn import TensorDictModule

    make = partial(
        torchrl.envs.SerialEnv,
        count,
        partial(torchrl.envs.GymEnv, name, categorical_action_encoding=True),
    )
    module = TensorDictModule(Acting(policy), in_keys=["observation"], out_keys=["action"])
    return torchrl.collectors.MultiSyncCollector(
        [make] * WORKERS, module, frames_per_batch=frames, total_frames=-1, cat_results="stack"
    )


def workers(
    name: str, each: int, steps: int, rounds: int, *, with_theirs: bool, compiled: bool
) -> None:
    """Collect in workers."""
    shape = (4, 2, True, torch.float32) if name == "CartPole-v1" else (17, 6, False, torch.float64)
    policy = Policy(*shape)
    frames = WORKERS * each * steps
    make = partial(serial, name, each)
    with ExitStack() as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loops = BareLoops(name, WORKERS * each, steps, policy, WORKERS)
        opened.callback(loops.close)
        works: dict[str, Callable[[], object]] = {"bare loops": loops}
        acting: dict[str, torch.nn.Module] = {"MultiSyncDataCollector": Acting(policy)}
        if compiled:
            acting["the same, compile_policy"] = compile_policy(Acting(policy))
        for title, module in acting.items():
            collector = MultiSyncDataCollector(
                make, module, num_workers=WORKERS, frames_per_batch=frames
            )
            opened.callback(collector.shutdown)
            works[title] = drained(collector)
        if with_theirs:
            other = theirs(name, each, policy, frames)
            opened.callback(other.shutdown)
            batches = iter(other)
            works["TorchRL's MultiSyncCollector"] = lambda: next(batches)
        compare(
            f"{WORKERS} workers x {each} {name}, policy in the workers, {steps} steps a batch",
            works,
            steps=frames,
            reference="bare loops",
            rounds=rounds,
        )


def trainer(frames: int, seconds: float) -> Callable[[], None]:
    """Epochs of gradient steps in torch that take about so long."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
    optimiser = torch.optim.Adam(net.parameters())
    data = torch.randn(frames, 4)

    def epochs(count: int) -> None:
        for _ in range(count):
            for part in data.split(512):
                optimiser.zero_grad()
                net(part).square().mean().backward()
                optimiser.step()

    epochs(1)
    began = time.perf_counter()
    epochs(3)
    each = (time.perf_counter() - began) / 3
    return partial(epochs, max(1, round(seconds / each)))


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def trainers(rounds: int) -> None:
    """Train on each batch while the next one is made."""
    frames = 16 * 1000
    cases: list[tuple[str, dict[str, Any]]] = [
        ("MultiaSync, 1 worker", {"sync": False}),
        ("MultiSync, 1 worker, prefetch=1", {"prefetch": 1}),
    ]
    for title, options in cases:
        collector = Collector(
            partial(serial, "CartPole-v1", 16),
            Acting(Policy(4, 2, True, torch.float32)),
            backend="process",
            num_collectors=1,
            frames_per_batch=frames,
            **options,
        )
        collector.next()
        alone = statistics.median(timed(collector.next) for _ in range(rounds))
        train = trainer(frames, alone)
        rows = []
        for _ in range(rounds):
            collecting = statistics.median(timed(collector.next) for _ in range(3))
            training = timed(train)
            both = (
                timed(
                    lambda collector=collector, train=train: (
                        train(),
                        collector.next(),
                        train(),
                        collector.next(),
                    )
                )
                / 2
            )
            rows.append((both / max(collecting, training), collecting, training, both))
        collector.shutdown()
        ratio, collecting, training, both = (
            statistics.median(column) for column in zip(*rows, strict=True)
        )
        print(
            f"\n{title}: collecting {collecting:.3f} s, training {training:.3f} s, a batch of both {both:.3f} s: "
            f"{ratio:.2f} of the longer ({min(rows)[0]:.2f}-{max(rows)[0]:.2f})"
        )
        record(
            f"a batch and its training, {title}",
            {
                "collecting_s": collecting,
                "training_s": training,
                "both_s": both,
                "ratio_to_longer": ratio,
                "rounds": rounds,
            },
        )


def weights(rounds: int) -> None:
    """Give a million parameters to the workers."""
    policy = torch.nn.Sequential(
        torch.nn.Linear(4, 1000), torch.nn.Linear(1000, 995), torch.nn.Linear(995, 2)
    )
    count = sum(parameter.numel() for parameter in policy.parameters())
    collector = MultiaSyncDataCollector(
        partial(serial, "CartPole-v1", 1), _Greedy(policy), num_workers=WORKERS, frames_per_batch=1
    )
    collector.next()
    worker_pool, updates = collector._worker_pool, []
    for _ in range(10 * rounds):
        began = time.perf_counter()
        collector.update_policy_weights_()
        for worker in range(WORKERS):
            worker_pool._lay_weights(worker, worker_pool._newest)
        updates.append(time.perf_counter() - began)
    collector.shutdown()
    taken = statistics.median(updates)
    print(f"\n{count:,} parameters into the memory of {WORKERS} workers: {taken * 1e3:.2f} ms")
    record(
        f"{count:,} parameters to {WORKERS} workers", {"seconds": taken, "updates": len(updates)}
    )


class _Greedy(torch.nn.Module):
    def __init__(self, net: torch.nn.Module):
        super().__init__()
        self.net = net

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation).argmax(-1)


def main() -> None:
    """Run everything, or what was named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    parser.add_argument(
        "--only", help="stateless, parallel, cartpole, cheetah, trainers or weights"
    )
    options = parser.parse_args()
    rounds, steps = (5, 200) if options.quick else (7, 1000)
    torch.set_num_threads(1)  # the cores are for the envs
    parts: dict[str, Callable[[], None]] = {
        "stateless": partial(stateless, rounds),
        "parallel": partial(parallel, steps, rounds),
        "cartpole": partial(
            workers, "CartPole-v1", 16, steps, rounds, with_theirs=True, compiled=True
        ),
        "cheetah": partial(
            workers, "HalfCheetah-v5", 4, steps // 2, rounds, with_theirs=False, compiled=True
        ),
        "trainers": partial(trainers, rounds),
        "weights": partial(weights, rounds),
    }
    for name, part in parts.items():
        if options.only in (None, name):
            part()


if __name__ == "__main__":
    main()
