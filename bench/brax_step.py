"""Stepping Brax from torch: envkit against bare JAX loops and TorchRL.

Stepwise: a small torch policy acts on every observation. The bare loop is one jitted
``vmap(step)`` with its state left in JAX, observation, reward and done handed to torch and
the action back by DLPack, nothing reset. So "nothing reset" is the same work through envkit; the other ways
also begin anew what has ended. Whole rollouts as one program stand in `bench.brax_scan`.

Run: ``python -m bench.brax_step [--quick] [--device cuda]``
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bench.harness import compare, record
from envkit import BraxEnv, EnvBase
from envkit_bridges.worlds.brax import import_brax

# Env, rows (None: one env without a batch) and steps of a round.
WORKS = (
    ("inverted_pendulum", None, 300),
    ("inverted_pendulum", 64, 200),
    ("inverted_pendulum", 4096, 50),
    ("ant", 64, 50),
    ("ant", 1024, 10),
)


def policy_for(observation_size: int, action_size: int, device: str) -> torch.nn.Sequential:
    """A small torch policy."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(observation_size, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, action_size),
        torch.nn.Tanh(),
    ).to(device)


def bare_loop(
    name: str, rows: int | None, steps: int, policy: torch.nn.Module
) -> Callable[[], None]:
    """jit(vmap(step)) and DLPack, by hand; without ``rows``, jit(step) of one env."""
    env = import_brax().get_environment(name, backend="spring")
    if rows is None:
        first, step = jax.jit(env.reset)(jax.random.PRNGKey(0)), jax.jit(env.step)
    else:
        first = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(0), rows))
        step = jax.jit(jax.vmap(env.step))

    @torch.no_grad()
    def run() -> None:
        state = first
        for _ in range(steps):
            observation = torch.from_dlpack(state.obs)
            action = policy(observation)
            state = step(state, jnp.from_dlpack(action))
            jax.block_until_ready(state)
            _ = torch.from_dlpack(state.reward), torch.from_dlpack(state.done)

    return run


def envkit_loop(env: EnvBase, steps: int, policy: torch.nn.Module) -> Callable[[], None]:
    """The same loop, resets included, as a user writes it."""
    first = env.reset()

    @torch.no_grad()
    def run() -> None:
        td = first.copy()  # an entry under "next" would count as preset
        for _ in range(steps):
            td["action"] = policy(td["observation"])
            _, td = env.step_and_maybe_reset(td)

    return run


def envkit_steps(env: BraxEnv, steps: int, policy: torch.nn.Module) -> Callable[[], None]:
    """The same without resets, as the bare loop."""
    first = env.reset()

    @torch.no_grad()
    def run() -> None:
        td = first.copy()
        for _ in range(steps):
            td["action"] = policy(td["observation"])
            td = env.step_mdp(env.step(td))

    return run


def envkit_rollout(env: BraxEnv, steps: int, policy: torch.nn.Module) -> Callable[[], None]:
    """`rollout`, which also stacks every step."""
    first = env.reset()

    @torch.no_grad()
    def run() -> None:
        env.rollout(steps, policy, auto_reset=False, tensordict=first, break_when_any_done=False)

    return run


def torchrl_env(name: str, rows: int, **kwargs: Any) -> Any:
    """The env of the reference API, its default cache clearing switched off."""
    from torchrl.envs import BraxWrapper as PeerWrapper

    bare = import_brax().get_environment(name, backend="spring")
    return PeerWrapper(bare, batch_size=[rows], device="cpu", cache_clear_frequency=False, **kwargs)


def torchrl_loop(env: Any, steps: int, policy: torch.nn.Module) -> Callable[[], None]:
    """Step an env of the reference API as a user of it writes it."""
    first = env.reset()

    @torch.no_grad()
    def run() -> None:
        td = first.clone()
        for _ in range(steps):
            td["action"] = policy(td["observation"])
            _, td = env.step_and_maybe_reset(td)

    return run


def measure(name: str, rows: int | None, steps: int, *, device: str, quick: bool) -> None:
    """Compare all ways to step one env at one batch size."""
    batch = [] if rows is None else [rows]
    env = BraxEnv(name, backend="spring", batch_size=batch, device=device)
    env.set_seed(0)
    size = env.observation_spec["observation"].shape[-1]
    policy = policy_for(size, env.action_spec.shape[-1], device)
    works = {
        "bare jit + dlpack loop": bare_loop(name, rows, steps, policy),
        "envkit stepwise": envkit_loop(env, steps, policy),
        "envkit stepwise, nothing reset": envkit_steps(env, steps, policy),
        "envkit rollout, state recorded": envkit_rollout(env, steps, policy),
    }
    if importlib.util.find_spec("torchrl") and not quick and rows in (64, 1024):
        works["TorchRL, cache kept"] = torchrl_loop(torchrl_env(name, rows), steps, policy)
    compare(
        f"{name} spring x {rows or 1} on {device}, torch policy",
        works,
        steps=steps * (rows or 1),
        reference="bare jit + dlpack loop",
        rounds=5 if quick else 7,
    )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="no TorchRL, fewer rounds, no ant")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    begin = time.perf_counter()
    for name, rows, steps in WORKS:
        if not (options.quick and name == "ant"):
            measure(name, rows, steps, device=options.device, quick=options.quick)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record("memory of the whole run", {"peak_rss_mib": round(peak)})
    print(f"\ndone in {time.perf_counter() - begin:.0f} s, peak memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
