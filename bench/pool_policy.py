"""Pools under a policy that acts in the parent, against the bare loop that acts with the same policy.

The small torch policy is given in each way that a user has: a plain module, a `TensorDictModule`, a module that
takes the TensorDict, compiled to NumPy; random actions show what the pool costs without one. The bare loop is one
process; two of them at the same time, one in each of as many processes as the pool has, show what two cores could do.

Beside ratios, which depend on how busy the machine is, the parent's own CPU time for a step is recorded.

Run: ``python -m bench.pool_policy [--quick]``
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModule

from bench.collect import Acting
from bench.gym_pool import BareLoops, Policy, bare_loop
from bench.harness import compare, record
from envkit import Categorical, EnvBase, GymEnv, ParallelEnv, SerialEnv, compile_policy

PROCESSES = 2


def small_policy(name: str) -> Policy:
    """Give the network that acts in an env."""
    env = GymEnv(name, categorical_action_encoding=True)
    seen, action = env.full_observation_spec["observation"], env.action_spec
    discrete = isinstance(action, Categorical)
    width = action.n if isinstance(action, Categorical) else action.shape[-1]
    torch.manual_seed(0)
    return Policy(seen.shape[-1], width, discrete, seen.dtype)


def ways_of(policy: Policy) -> dict[str, Any]:
    """Give the policy in all ways that a user has."""
    acting = Acting(policy)
    return {
        "a plain module": acting,
        "a TensorDictModule": TensorDictModule(acting, ["observation"], ["action"]),
        "a module of TensorDicts": policy,
        "compile_policy": compile_policy(acting),
        "random actions": None,
    }


def rolled(env: EnvBase, shared: dict[str, Any], steps: int, policy: Any) -> Callable[[], None]:
    """Roll out from where the last rollout of this env ended, whoever acted."""

    @torch.no_grad()
    def run() -> None:
        data = env.rollout(
            steps,
            policy,
            auto_reset=False,
            tensordict=shared["root"],
            break_when_any_done=False,
        )
        root = env.maybe_reset(env.step_mdp(data[..., -1]))
        shared["root"] = root.select(*env.observation_keys, *env.done_keys)

    return run


def parent_cpu(title: str, works: dict[str, Callable[[], None]], steps: int, rounds: int) -> None:
    """Record the CPU time of this process for a step of each work: the median over rounds."""
    seen: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            begin = time.process_time()
            work()
            seen[name].append((time.process_time() - begin) / steps * 1e6)
    medians = {name: round(statistics.median(values), 1) for name, values in seen.items()}
    print(f"\n{title}: CPU time of the parent for a step, us")
    for name, value in medians.items():
        print(f"  {name:42s} {value:8.1f}")
    record(f"{title}: CPU time of the parent", {"rounds": rounds, "us_per_step": medians})


def measure(name: str, count: int, steps: int, *, serial: bool, rounds: int) -> None:
    """Compare `ParallelEnv`, and `SerialEnv`, under the policy of an env with its bare loop."""
    policy = small_policy(name)
    make = partial(GymEnv, name, categorical_action_encoding=True)
    with ExitStack() as opened:
        pools: dict[str, EnvBase] = {
            "ParallelEnv": ParallelEnv(count, make, num_processes=PROCESSES)
        }
        if serial:
            pools["SerialEnv"] = SerialEnv(count, make)
        together = opened.enter_context(closing(BareLoops(name, count, steps, policy, PROCESSES)))
        bare = {
            "bare loop": bare_loop(name, count, steps, policy),
            f"{PROCESSES} bare loops at the same time": together,
        }
        works: dict[str, Callable[[], None]] = {}
        for kind, pool in pools.items():
            opened.callback(pool.close)
            pool.set_seed(0)
            shared = {"root": pool.reset()}
            for way, acting in ways_of(policy).items():
                works[f"{kind}, {way}"] = rolled(pool, shared, steps, acting)
        title = f"{name} x {count} under a policy, {steps} steps a round"
        compare(
            title,
            {**bare, **works},
            steps=steps * count,
            reference="bare loop",
            rounds=rounds,
        )
        parent_cpu(title, works, steps, rounds)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 15
    torch.set_num_threads(1)  # a small policy; the cores are for the envs
    measure("CartPole-v1", 32, 200, serial=True, rounds=rounds)
    measure("HalfCheetah-v5", 8, 100, serial=False, rounds=rounds)


if __name__ == "__main__":
    main()
