"""Pools of gymnasium envs: envkit against the bare loop, gymnasium's vector envs and TorchRL.

A small torch policy acts on the whole batch at each step, except where "random" is said: there the
same random actions are drawn once for the batch.

Run: ``python -m bench.gym_pool [--quick]``
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict

from bench.harness import compare, record
from envkit import GymEnv, ParallelEnv, SerialEnv


class Policy(torch.nn.Module):
    """Linear layers on the observation; greedy over logits, or tanh for boxes."""

    def __init__(self, observation_size: int, action_size: int, discrete: bool, dtype):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(observation_size, 32),
            torch.nn.Tanh(),
            torch.nn.Linear(32, action_size),
        ).to(dtype)
        self.discrete = discrete

    def act(self, observation: torch.Tensor) -> torch.Tensor:
        """Give an index (discrete) or a value in (-1, 1) for each row."""
        out = self.net(observation)
        return out.argmax(-1) if self.discrete else out.tanh().float()

    def forward(self, tensordict: TensorDict) -> TensorDict:
        """Act on a TensorDict."""
        action = self.act(tensordict.get("observation"))
        if self.discrete:
            action = torch.nn.functional.one_hot(action, 2)
        return tensordict.set("action", action)


def bare_loop(name: str, count: int, steps: int, policy: Policy) -> Callable[[], None]:
    """One process, one list of envs, no TensorDicts: what the simulator alone costs."""
    envs = [gymnasium.make(name) for _ in range(count)]
    observations = np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)])
    observations = observations.astype(_dtype(name))

    @torch.no_grad()
    def run() -> None:
        for _ in range(steps):
            actions = policy.act(torch.from_numpy(observations)).numpy()
            for row, env in enumerate(envs):
                observation, _, terminated, truncated, _ = env.step(actions[row])
                if terminated or truncated:
                    observation, _ = env.reset()
                observations[row] = observation

    return run


def gymnasium_vector(
    name: str, count: int, steps: int, policy: Policy, kind: str, opened: ExitStack
) -> Callable[[], None]:
    """Gymnasium's own vector env."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = {"sync": gymnasium.vector.SyncVectorEnv, "async": gymnasium.vector.AsyncVectorEnv}
        envs = make[kind]([lambda: gymnasium.make(name)] * count)
    opened.callback(envs.close)
    observations, _ = envs.reset(seed=0)
    state = {"observations": observations}

    @torch.no_grad()
    def run() -> None:
        for _ in range(steps):
            actions = policy.act(torch.from_numpy(state["observations"])).numpy()
            state["observations"], *_ = envs.step(actions)

    return run


def envkit_pool(env, steps: int, policy) -> Callable[[], None]:
    """An envkit rollout with resets inside."""
    state = {"td": env.reset()}

    @torch.no_grad()
    def run() -> None:
        data = env.rollout(
            steps, policy, auto_reset=False, tensordict=state["td"], break_when_any_done=False
        )
        state["td"] = env.step_mdp(data[:, -1])

    return run


def torchrl_pool(
    name: str, count: int, steps: int, policy: Policy, kind: str, opened: ExitStack
) -> Callable[[], None]:
    """The same with the reference API."""
    import torchrl.envs as peer

    make = {"serial": peer.SerialEnv, "parallel": peer.ParallelEnv}[kind]
    env = make(count, lambda: peer.GymEnv(name))
    opened.callback(env.close)
    env.reset()

    @torch.no_grad()
    def run() -> None:
        env.rollout(steps, policy, break_when_any_done=False)

    return run


def measure(name: str, count: int, steps: int, *, processes: int | None, quick: bool) -> None:
    """Compare all pools on one env."""
    discrete = isinstance(gymnasium.make(name).action_space, gymnasium.spaces.Discrete)
    space = gymnasium.make(name).observation_space
    width = 2 if discrete else gymnasium.make(name).action_space.shape[0]
    torch.manual_seed(0)
    policy = Policy(space.shape[0], width, discrete, torch.from_numpy(space.sample()).dtype)
    serial = SerialEnv(count, lambda: GymEnv(name))
    parallel = ParallelEnv(count, lambda: GymEnv(name), num_processes=processes)
    opened = ExitStack()
    for env in (serial, parallel):
        env.set_seed(0)
        opened.callback(env.close)
    works = {
        "bare loop, one process": bare_loop(name, count, steps, policy),
        "envkit ParallelEnv": envkit_pool(parallel, steps, policy),
        "envkit ParallelEnv, random actions": envkit_pool(parallel, steps, None),
        "envkit SerialEnv": envkit_pool(serial, steps, policy),
        "gymnasium SyncVectorEnv": gymnasium_vector(name, count, steps, policy, "sync", opened),
        "gymnasium AsyncVectorEnv": gymnasium_vector(name, count, steps, policy, "async", opened),
    }
    if importlib.util.find_spec("torchrl") and not quick:
        works["TorchRL SerialEnv"] = torchrl_pool(name, count, steps, policy, "serial", opened)
        works["TorchRL ParallelEnv"] = torchrl_pool(name, count, steps, policy, "parallel", opened)
    rows = compare(
        f"{name} x {count}, {steps} steps a round",
        works,
        steps=steps * count,
        reference="bare loop, one process",
        rounds=5 if quick else 7,
    )
    speed = {row.work: row.steps_per_s for row in rows}
    ratio = speed["envkit ParallelEnv"] / speed["gymnasium AsyncVectorEnv"]
    print(f"  envkit ParallelEnv is {ratio:.1f} x gymnasium AsyncVectorEnv")
    opened.close()


_START_SCRIPT = """
    import time
    import torch, jax, brax.envs
    started = time.perf_counter()
    from envkit import GymEnv, ParallelEnv
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        env = ParallelEnv(32, lambda: GymEnv("CartPole-v1"))
        env.reset()
        seconds.append(time.perf_counter() - begin)
        env.close()
    print(*seconds)
"""


def measure_start(rounds: int = 5) -> None:
    """Time until 32 envs are ready, from a script that imports everything and has no main guard."""
    first, second = [], []
    for _ in range(rounds):
        out = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(_START_SCRIPT)],
            capture_output=True,
            text=True,
            check=True,
        )
        one, two = map(float, out.stdout.split()[-2:])
        first.append(one)
        second.append(two)
    result = {
        "first_pool_s": sorted(first)[rounds // 2],
        "second_pool_s": sorted(second)[rounds // 2],
    }
    print(f"\nstart of 32 CartPole envs: first pool {result['first_pool_s']:.2f} s, ", end="")
    print(f"second pool {result['second_pool_s']:.2f} s (median of {rounds})")
    record("start of 32 CartPole envs", {"rounds": rounds, **result})


def _dtype(name: str) -> np.dtype:
    return gymnasium.make(name).observation_space.dtype


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="no TorchRL, fewer rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)  # a small policy; the cores are for the envs
    begin = time.perf_counter()
    for count in (2, 8, 32):
        measure("CartPole-v1", count, 200 if count < 32 else 100, processes=None, quick=quick)
    measure("HalfCheetah-v5", 8, 100, processes=2, quick=quick)
    measure_start()
    print(f"\ndone in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
