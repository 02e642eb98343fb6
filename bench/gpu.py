"""Brax on a graphics card: stepwise and whole rollouts of ant against a bare scan, and what the hand-off of a step costs.

Nothing is measured without a card; ``python -m bench.gpu_day --rehearse`` shows that the works run. The stepwise loop
hands observation, reward and done to torch and the action back at each step; the bare scan is one program with the
same network in it. Both also run with all rows reset at each step, for which the host is asked nothing.

Run: ``python -m bench.gpu [--quick] [--rows 4096]``
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

from bench.brax_scan import acting_like, backend_of, bare_scan, envkit_unroll
from bench.brax_step import envkit_loop, policy_for
from bench.harness import accelerator, compare, is_rehearsal, record
from envkit import BraxEnv, JaxPolicy, compile_policy, configure_gpu
from envkit_bridges.dlpack import number_to_jit, to_jit, to_torch
from envkit_bridges.jax.programs import RESTART

WORKS = (("ant", 4096, 50), ("ant", 16384, 25))
REHEARSED = (("fast", 8, 3),)


def synchronised(work: Callable[[], object]) -> Callable[[], None]:
    """Let a work wait for the card, torch's part and JAX's."""

    def run() -> None:
        result = work()
        jax.block_until_ready(jnp.zeros(()))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        del result

    return run


def works_of(name: str, rows: int, steps: int, device: str) -> dict[str, Callable[[], Any]]:
    """Make ways to step one env at one batch size."""
    how = {**backend_of(name), "batch_size": [rows], "device": device}
    env, every = BraxEnv(name, **how), BraxEnv(name, reset_rows="all", **how)
    first, first_of_all = (one.reset() for one in (env, every))
    size = env.observation_spec["observation"].shape[-1]
    policy = policy_for(size, env.action_spec.shape[-1], str(env.device))
    act, params = acting_like(policy)
    return {
        "bare lax.scan": bare_scan(name, rows, steps, act, params),
        "envkit stepwise, torch policy": envkit_loop(env, steps, policy),
        "envkit stepwise, all rows reset": envkit_loop(every, steps, policy),
        "envkit unroll, JaxPolicy": envkit_unroll(env, first, steps, JaxPolicy(act, params)),
        "envkit unroll, compile_policy": envkit_unroll(env, first, steps, compile_policy(policy)),
        "envkit unroll, JaxPolicy, all rows reset": envkit_unroll(
            every, first_of_all, steps, JaxPolicy(act, params)
        ),
    }


def measure(name: str, rows: int, steps: int, rounds: int, device: str) -> None:
    """Compare ways to step one env at one batch size."""
    works, where = works_of(name, rows, steps, device), accelerator() or "a CPU"
    compare(
        f"{' '.join((name, *backend_of(name).values()))} x {rows} on {where}",
        {title: synchronised(work) for title, work in works.items()},
        steps=steps * rows,
        reference="bare lax.scan",
        rounds=rounds,
    )
    title = f"hand-off of a step, {rows} rows on {where}"
    env = BraxEnv(name, **backend_of(name), batch_size=[rows], device=device)
    record(title, {"rounds": 200, **handoff_of(env, title, rounds=200)})


def handoff_of(env: BraxEnv, title: str, rounds: int) -> dict[str, float]:
    """Time what a step costs besides its program, on the host: all that goes in, all that comes out.

    The root is one that a step gave, as all but the first of a loop are: its state goes back as it is.
    """
    _, td = env.step_and_maybe_reset(env.rand_action(env.reset()))
    td = env.rand_action(td)
    inputs, constants = env._engine.prepare(td).inputs, env._engine.constants(td.batch_size)
    lent = to_jit(inputs, copy=False, detach=True)
    follows = number_to_jit(RESTART, env.device)
    results = jax.block_until_ready(env._engine.programs.advance(*lent, constants, follows))
    works = {
        "read_inputs_us": lambda: env._engine.prepare(td).inputs,
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
    print(f"\n{title}: {total} us {medians} {leaves}")
    return {"total_us": total, **medians, **leaves}


def main() -> None:
    """Run everything, if there is a card."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds, the smaller batch")
    parser.add_argument(
        "--rows", type=int, choices=[rows for _, rows, _ in WORKS], help="only these"
    )
    options = parser.parse_args()
    if is_rehearsal():
        for work in REHEARSED:
            measure(*work, rounds=1, device="cpu")
        return
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured (python -m bench.gpu_day --rehearse)")
        return
    configure_gpu(0.6)
    works = [work for work in WORKS if options.rows in (None, work[1])]
    for work in works[:1] if options.quick else works:
        measure(*work, rounds=5 if options.quick else 7, device="cuda")


if __name__ == "__main__":
    main()
