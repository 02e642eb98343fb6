"""A small training that saves after each iteration and goes on from what it finds: run by `test_resume`.

``python resumed_training.py KIND FILE [--kill-at N]`` ends with a digest of parameters, optimiser and last batch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch

import envkit

ITERATIONS = 8


def gym_env() -> envkit.EnvBase:
    return envkit.GymEnv("Pendulum-v1")


class Policy(torch.nn.Module):
    """Draws an action around a linear function of the observation."""

    def __init__(self, size: int):
        super().__init__()
        self.net = torch.nn.Linear(size, 1)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        mean = self.net(observation.float())
        return (mean + 0.3 * torch.randn(mean.shape)).clamp(-1, 1)


def brax() -> envkit.EnvBase:
    return envkit.BraxEnv("fast", batch_size=[4], episode_length=9)


def build(kind: str) -> envkit.Collector:
    options = {"frames_per_batch": 48, "record_for_resume": True}
    if kind == "brax":
        policy = envkit.compile_policy(Policy(brax().observation_spec["observation"].shape[-1]))
        return envkit.SyncDataCollector(brax, policy, **options)
    if kind == "multi_sync":
        return envkit.MultiSyncDataCollector(
            lambda: envkit.SerialEnv(2, gym_env), Policy(3), num_workers=2, **options
        )
    makers = {
        "serial": lambda: envkit.SerialEnv(4, gym_env),
        "parallel": lambda: envkit.ParallelEnv(4, gym_env, num_processes=2),
        "mixed": lambda: envkit.MixedEnv(
            [envkit.SerialEnv(2, gym_env), envkit.ParallelEnv(2, gym_env, num_processes=1)]
        ),
    }
    return envkit.SyncDataCollector(makers[kind], Policy(3), max_frames_per_traj=17, **options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("file", type=Path)
    parser.add_argument("--kill-at", type=int)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    collector = build(arguments.kind)
    collector.set_seed(1)
    policy = collector._trained
    optimiser = torch.optim.Adam(policy.parameters(), lr=0.05)
    parts = {"collector": collector, "policy": policy, "optimiser": optimiser, "torch": torch}
    first, batch = 0, None
    if arguments.file.exists():
        first = envkit.load(arguments.file, **parts, iteration=None)["iteration"]
        print(f"resumed after {first} iterations")
    for iteration in range(first, ITERATIONS):
        batch = collector.next()
        if iteration + 1 == arguments.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        observation = batch["observation"].float()
        module = getattr(policy, "module", policy)
        loss = (module.net(observation) - batch["next", "reward"].float()).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        collector.update_policy_weights_()
        envkit.save(arguments.file, **parts, iteration=iteration + 1)
    collector.shutdown()
    digest = hashlib.sha256()
    for tensor in (*policy.parameters(), *batch.values(True, True)):
        digest.update(tensor.detach().numpy().tobytes())
    print("digest", digest.hexdigest())


if __name__ == "__main__":
    main()
