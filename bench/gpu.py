"""Brax on a graphics card: stepwise and whole rollouts of ant against a bare scan, and what the hand-off of a step costs.

Nothing is measured without a card. The stepwise loop hands observation, reward and done to torch and the
action back at each step; the bare scan is one program with the same network in it.

Run: ``python -m bench.gpu [--quick]``
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bench.brax_scan import acting_like, bare_scan, envkit_unroll
from bench.brax_step import envkit_loop, policy_for
from bench.harness import compare, record
from bridges.dlpack import number_to_jit, to_jit, to_torch
from bridges.jax.programs import RESTART
from envkit import BraxEnv, JaxPolicy, compile_policy, configure_gpu

WORKS = (("ant", 4096, 50), ("ant", 16384, 25))


def synchronised(work: Callable[[], object]) -> Callable[[], None]:
    """Let a work wait for the card, torch's part and JAX's."""

    def run() -> None:
        result = work()
        jax.block_until_ready(jnp.zeros(()))
        torch.cuda.synchronize()
        del result

    return run


def measure(name: str, rows: int, steps: int, rounds: int) -> None:
    """Compare ways to step one env at one batch size."""
    env = BraxEnv(name, backend="spring", batch_size=[rows], device="cuda")
    env.set_seed(0)
    first = env.reset()
    size = env.observation_spec["observation"].shape[-1]
    policy = policy_for(size, env.action_spec.shape[-1], "cuda")
    act, params = acting_like(policy)
    works: dict[str, Callable[[], Any]] = {
        "bare lax.scan": bare_scan(name, rows, steps, act, params),
        "envkit stepwise, torch policy": envkit_loop(env, steps, policy),
        "envkit unroll, JaxPolicy": envkit_unroll(env, first, steps, JaxPolicy(act, params)),
        "envkit unroll, compile_policy": envkit_unroll(env, first, steps, compile_policy(policy)),
    }
    compare(
        f"{name} spring x {rows} on {torch.cuda.get_device_name()}",
        {title: synchronised(work) for title, work in works.items()},
        steps=steps * rows,
        reference="bare lax.scan",
        rounds=rounds,
    )
    measure_handoff(env, rows)


def measure_handoff(env: BraxEnv, rows: int, rounds: int = 200) -> None:
    """Time what a step costs besides its program, on the host: all that goes in, all that comes out."""
    td = env.rand_action(env.reset())
    env.step_and_maybe_reset(td.copy())
    inputs, constants = env._inputs(td), env._constants(td.batch_size)
    lent = to_jit(inputs, copy=False, detach=True)
    follows = number_to_jit(RESTART, env.device)
    results = jax.block_until_ready(env._programs.advance(*lent, constants, follows))
    works = {
        "read_inputs_us": lambda: env._inputs(td),
        "torch_to_jax_us": lambda: to_jit(inputs, copy=False, detach=True),
        "jax_to_torch_us": lambda: to_torch(results),
    }
    medians: dict[str, float] = {}
    for name, work in works.items():
        seconds = []
        for _ in range(rounds):
            begin = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begin)
        medians[name] = round(statistics.median(seconds) * 1e6, 1)
    total = round(sum(medians.values()), 1)
    leaves = {"leaves_in": len(jax.tree.leaves(lent)), "leaves_out": len(jax.tree.leaves(results))}
    title = f"hand-off of a step, {rows} rows on {torch.cuda.get_device_name()}"
    print(f"\n{title}: {total} us {medians} {leaves}")
    record(title, {"rounds": rounds, "total_us": total, **medians, **leaves})


def main() -> None:
    """Run everything, if there is a card."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds, the smaller batch")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return
    configure_gpu(0.6)
    for name, rows, steps in WORKS[:1] if options.quick else WORKS:
        measure(name, rows, steps, rounds=5 if options.quick else 7)


if __name__ == "__main__":
    main()
