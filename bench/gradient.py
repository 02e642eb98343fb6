"""Gradients through Brax from torch: envkit against fused JAX, and against TorchRL.

A small policy acts for 10 steps, the loss is the mean of the squared observations minus that of the
rewards, and its gradient with respect to the policy's parameters is taken. Fused JAX is one jitted ``value_and_grad`` of a scan over the
same physics and the same policy; nothing is reset, and nothing but the loss is computed. envkit steps
from Python with a torch policy, ends of episodes included, and `rollout` records every step.

Run: ``python -m bench.gradient [--quick] [--device cuda]``
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from tensordict import TensorDictBase

from bench.brax_step import policy_for, torchrl_env
from bench.harness import compare, record
from envkit import BraxEnv
from envkit_bridges.worlds.brax import import_brax

STEPS = 10
WORKS = (("inverted_pendulum", 64), ("ant", 64))


def fused(name: str, rows: int, policy: torch.nn.Module) -> Callable[[], object]:
    """value_and_grad of a scan, by hand."""
    env = import_brax().get_environment(name, backend="spring")
    first = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(0), rows))
    params = [jnp.array(leaf.detach().cpu().numpy()) for leaf in policy.parameters()]

    def act(params: list[jax.Array], observation: jax.Array) -> jax.Array:
        inner, inner_bias, outer, outer_bias = params
        return jnp.tanh(jnp.tanh(observation @ inner.T + inner_bias) @ outer.T + outer_bias)

    def loss(params: list[jax.Array], state):
        def once(state, _):
            state = jax.vmap(env.step)(state, act(params, state.obs))
            return state, (state.obs, state.reward)

        observations, rewards = jax.lax.scan(once, state, length=STEPS)[1]
        return (observations**2).mean() - rewards.mean()

    gradient = jax.jit(jax.value_and_grad(loss))
    return lambda: jax.block_until_ready(gradient(params, first))


def loss_of(data: TensorDictBase) -> torch.Tensor:
    """The loss of some transitions."""
    return data["next", "observation"].square().mean() - data["next", "reward"].mean()


def envkit_loop(env: BraxEnv, policy: torch.nn.Module) -> Callable[[], None]:
    """Step by step, as a user writes it."""
    first = env.reset()

    def run() -> None:
        td, losses = first.copy(), []
        for _ in range(STEPS):
            data, td = env.step_and_maybe_reset(td.set("action", policy(td["observation"])))
            losses.append(loss_of(data))
        torch.stack(losses).mean().backward()
        policy.zero_grad()

    return run


def envkit_rollout(env: BraxEnv, policy: torch.nn.Module) -> Callable[[], None]:
    """`rollout`, which also stacks every step."""
    first = env.reset()

    def run() -> None:
        data = env.rollout(
            STEPS, policy, auto_reset=False, tensordict=first, break_when_any_done=False
        )
        loss_of(data).backward()
        policy.zero_grad()

    return run


def torchrl_gradient(name: str, rows: int, policy: torch.nn.Module) -> Callable[[], None]:
    """The reference API, as a user of it writes it."""
    env = torchrl_env(name, rows, requires_grad=True)
    first = env.reset()

    def run() -> None:
        td, losses = first.clone(), []
        for _ in range(STEPS):
            td["action"] = policy(td["observation"])
            data, td = env.step_and_maybe_reset(td)
            losses.append(loss_of(data))
        torch.stack(losses).mean().backward()
        policy.zero_grad()

    return run


def measure(name: str, rows: int, *, device: str, quick: bool) -> None:
    """Compare all ways to get the gradient of one env at one batch size."""
    env = BraxEnv(name, backend="spring", batch_size=[rows], device=device, requires_grad=True)
    env.set_seed(0)
    size = env.observation_spec["observation"].shape[-1]
    policy = policy_for(size, env.action_spec.shape[-1], device)
    works = {
        "fused JAX value_and_grad": fused(name, rows, policy),
        "envkit stepwise": envkit_loop(env, policy),
        "envkit rollout, state recorded": envkit_rollout(env, policy),
    }
    if importlib.util.find_spec("torchrl") and not quick:
        works["TorchRL, cache kept"] = torchrl_gradient(name, rows, policy)
    compare(
        f"gradient of {STEPS} steps, {name} spring x {rows} on {device}",
        works,
        steps=STEPS * rows,
        reference="fused JAX value_and_grad",
        rounds=5 if quick else 7,
    )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="no TorchRL, fewer rounds")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    begin = time.perf_counter()
    for name, rows in WORKS:
        measure(name, rows, device=options.device, quick=options.quick)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record("memory of the whole run", {"peak_rss_mib": round(peak)})
    print(f"\ndone in {time.perf_counter() - begin:.0f} s, peak memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
