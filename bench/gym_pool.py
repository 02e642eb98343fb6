"""Pools of gymnasium envs: envkit against the bare loop, gymnasium's vector envs and TorchRL.

A small torch policy acts on the whole batch at each step, except where "random" is said: there the
env draws its actions. Discrete actions are indices everywhere.

Run: ``python -m bench.gym_pool [--quick]``
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import cast

import gymnasium
import numpy as np
import psutil
import torch
from tensordict import TensorDict

from bench.harness import compare, record
from envkit import GymEnv, GymWrapper, ParallelEnv, SerialEnv, compile_policy


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
        return tensordict.set("action", self.act(tensordict.get("observation")))


def bare_loop(name: str, count: int, steps: int, policy: Policy) -> Callable[[], None]:
    """One process, one list of envs, no TensorDicts: what the simulator alone costs."""
    envs = [gymnasium.make(name) for _ in range(count)]
    observations = np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)])
    observations = observations.astype(_observations(name).dtype)

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


class BareLoops:
    """Bare loops in processes of their own that run at the same time, each over its share."""

    def __init__(self, name: str, count: int, steps: int, policy: Policy, processes: int):
        context = multiprocessing.get_context("spawn")
        self._ends, self._processes = [], []
        for _ in range(processes):
            here, there = context.Pipe()
            arguments = (there, name, count // processes, steps, policy)
            self._processes.append(context.Process(target=_serve_bare_loop, args=arguments))
            self._ends.append(here)
        for process in self._processes:
            process.start()

    def __call__(self) -> None:
        for end in self._ends:
            end.send("run")
        for end in self._ends:
            end.recv()

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()


def _serve_bare_loop(end, name: str, count: int, steps: int, policy: Policy) -> None:
    torch.set_num_threads(1)
    run = bare_loop(name, count, steps, policy)
    while end.recv():
        end.send(run())


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
        state["td"] = env.maybe_reset(env.step_mdp(data[..., -1]))

    return run


def torchrl_pool(
    name: str, count: int, steps: int, policy: Policy, kind: str, opened: ExitStack
) -> Callable[[], None]:
    """The same with the reference API."""
    import torchrl.envs as peer

    make = {"serial": peer.SerialEnv, "parallel": peer.ParallelEnv}[kind]
    env = make(count, lambda: peer.GymEnv(name, categorical_action_encoding=True))
    opened.callback(env.close)
    env.reset()

    @torch.no_grad()
    def run() -> None:
        env.rollout(steps, policy, break_when_any_done=False)

    return run


def measure(
    name: str,
    count: int,
    steps: int,
    *,
    processes: int | None,
    quick: bool,
    together: bool = False,
) -> None:
    """Compare all pools on one env; with ``together`` also as many bare loops as there are processes, at the same time."""
    discrete = isinstance(gymnasium.make(name).action_space, gymnasium.spaces.Discrete)
    space = _observations(name)
    width = 2 if discrete else gymnasium.spaces.flatdim(gymnasium.make(name).action_space)
    torch.manual_seed(0)
    policy = Policy(space.shape[0], width, discrete, torch.from_numpy(space.sample()).dtype)

    def make_env() -> GymEnv:
        return GymEnv(name, categorical_action_encoding=True)

    serial = SerialEnv(count, make_env)
    parallel = ParallelEnv(count, make_env, num_processes=processes)
    opened = ExitStack()
    for env in (serial, parallel):
        env.set_seed(0)
        opened.callback(env.close)
    works: dict[str, Callable[[], object]] = {
        "bare loop, one process": bare_loop(name, count, steps, policy)
    }
    if together:
        assert processes is not None
        loops = BareLoops(name, count, steps, policy, processes)
        works[f"{processes} bare loops at the same time"] = loops
        opened.callback(loops.close)
    works |= {
        "envkit ParallelEnv": envkit_pool(parallel, steps, policy),
        "envkit ParallelEnv, compile_policy": envkit_pool(parallel, steps, compile_policy(policy)),
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


def bare_single(name: str, steps: int, policy: Policy | None) -> Callable[[], None]:
    """One env without a batch: a policy, or the action space, gives each action."""
    env = gymnasium.make(name)
    env.action_space.seed(0)
    state = {"observation": env.reset(seed=0)[0]}

    @torch.no_grad()
    def run() -> None:
        observation = state["observation"]
        for _ in range(steps):
            if policy is None:
                action = env.action_space.sample()
            else:
                action = policy.act(torch.from_numpy(observation)).numpy()
            observation, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                observation, _ = env.reset()
        state["observation"] = observation

    return run


def measure_one(name: str, steps: int, *, quick: bool) -> None:
    """Compare one env by itself, acted upon by a policy and at random."""
    torch.manual_seed(0)
    policy = Policy(_observations(name).shape[0], 2, True, torch.float32)
    for title, acting in (("a policy acts", policy), ("random actions", None)):
        env = GymEnv(name, categorical_action_encoding=True)
        env.set_seed(0)
        works: dict[str, Callable[[], object]] = {
            "bare loop": bare_single(name, steps, acting),
            "envkit GymEnv": envkit_pool(env, steps, acting),
        }
        if acting is not None:
            works["envkit GymEnv, compile_policy"] = envkit_pool(env, steps, compile_policy(acting))
        opened = ExitStack()
        if importlib.util.find_spec("torchrl") and not quick:
            works["TorchRL GymEnv"] = torchrl_single(name, steps, acting, opened)
        compare(
            f"one {name}, {title}, {steps} steps a round",
            works,
            steps=steps,
            reference="bare loop",
            rounds=5 if quick else 7,
        )
        opened.close()
        env.close()


def torchrl_single(
    name: str, steps: int, policy: Policy | None, opened: ExitStack
) -> Callable[[], None]:
    """One env of the reference API."""
    import torchrl.envs as peer

    env = peer.GymEnv(name, categorical_action_encoding=True)
    opened.callback(env.close)

    @torch.no_grad()
    def run() -> None:
        env.rollout(steps, policy, break_when_any_done=False)

    return run


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


class Sleepy(gymnasium.Env):
    """Takes 10 ms a step, and no processor."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        time.sleep(0.01)
        return np.zeros(1, np.float32), 0.0, False, False, {}


def measure_slow(count: int = 4, steps: int = 20) -> None:
    """Compare the two ways where a step is slow: one process for each env pays."""
    serial = SerialEnv(count, lambda: GymWrapper(Sleepy()))
    parallel = ParallelEnv(count, lambda: GymWrapper(Sleepy()), num_processes=count)
    compare(
        f"an env of 10 ms a step x {count}, {steps} steps a round",
        {
            "envkit SerialEnv": envkit_pool(serial, steps, None),
            "envkit ParallelEnv, one process per env": envkit_pool(parallel, steps, None),
        },
        steps=steps * count,
        reference="envkit SerialEnv",
        rounds=5,
    )
    parallel.close()
    serial.close()


def measure_growth(steps: int = 10_000) -> None:
    """Watch memory, processes and descriptors of the parent over a long run."""
    env = ParallelEnv(32, lambda: GymEnv("CartPole-v1"))
    env.set_seed(0)
    run = envkit_pool(env, 100, None)
    process, seen = psutil.Process(), []
    for step in range(0, steps + 1, 100):
        run()
        if step % (steps // 5) == 0:
            seen.append(
                {
                    "steps": step,
                    "rss_mib": round(process.memory_info().rss / 2**20, 1),
                    "processes": len(process.children(recursive=True)),
                    "descriptors": process.num_fds(),
                }
            )
    env.close()
    print("\nParallelEnv CartPole x 32, what the parent holds")
    for row in seen:
        print("  " + "  ".join(f"{name} {value}" for name, value in row.items()))
    record("growth of the parent", {"seen": seen})


def _observations(name: str) -> gymnasium.spaces.Box:
    return cast(gymnasium.spaces.Box, gymnasium.make(name).observation_space)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="no TorchRL, fewer rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)  # a small policy; the cores are for the envs
    begin = time.perf_counter()
    measure_one("CartPole-v1", 500, quick=quick)
    measure("CartPole-v1", 32, 100, processes=None, quick=quick)
    measure("HalfCheetah-v5", 8, 100, processes=2, quick=quick, together=True)
    measure_slow()
    measure_growth()
    measure_start()
    print(f"\ndone in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
