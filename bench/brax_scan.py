"""Whole rollouts of Brax as one program: envkit against bare `lax.scan`.

The bare scan is ``vmap(step)`` that records what the work beside it records: observation, action, reward
and done at the root and after the step, and with "state recorded" the whole state at both. It resets
nothing; envkit resets what is done. Policies are the same small network, in JAX and in torch.

Resets: episodes of 50 steps that end one after the other, 2 % of the rows at every step, against
episodes that do not end. First calls stand in `bench.cold`.

Run: ``python -m bench.brax_scan [--quick] [--device cuda]``
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import psutil
import torch
from tensordict import TensorDict

from bench.brax_step import policy_for
from bench.harness import compare, record
from envkit import BraxEnv, JaxPolicy, compile_policy
from envkit_bridges.dlpack import to_jax
from envkit_bridges.worlds.brax import import_brax

WORKS = (
    ("fast", 64, 2000),
    ("fast", 4096, 500),
    ("inverted_pendulum", 64, 500),
    ("inverted_pendulum", 4096, 100),
    ("ant", 64, 100),
    ("ant", 4096, 5),
)
EPISODE = 50


def backend_of(name: str) -> dict[str, Any]:
    """Name the physics of an env; "fast" has none."""
    return {} if name == "fast" else {"backend": "spring"}


def acting_like(policy: torch.nn.Sequential) -> tuple[Callable[..., Any], list[Any]]:
    """The network of `policy_for` in JAX: a function ``(params, observation, key)`` and its params."""
    layers = [part for part in policy if isinstance(part, torch.nn.Linear)]
    params = [(to_jax(one.weight, detach=True), to_jax(one.bias, detach=True)) for one in layers]

    def act(params: Any, observation: jax.Array, key: jax.Array) -> jax.Array:
        for weight, bias in params:
            observation = jnp.tanh(observation @ weight.T + bias)
        return observation

    return act, params


def bare_scan(
    name: str, rows: int, steps: int, act: Any, params: Any, *, state: bool = False
) -> Callable:
    """lax.scan over vmap(step); ``act`` None draws actions."""
    env = import_brax().get_environment(name, **backend_of(name))
    first = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(0), rows))

    @jax.jit
    def scan(begin: Any, params: Any, key: jax.Array) -> Any:
        def once(before: Any, key: jax.Array) -> Any:
            if act is None:
                action = jax.random.uniform(key, (rows, env.action_size), minval=-1.0, maxval=1.0)
            else:
                action = act(params, before.obs, key)
            after = jax.vmap(env.step)(before, action)
            seen = (before.obs, action, after.obs, after.reward, before.done, after.done)
            return after, (seen, (before, after) if state else None)

        return jax.lax.scan(once, begin, jax.random.split(key, steps))

    return lambda: jax.block_until_ready(scan(first, params, jax.random.PRNGKey(1)))


def envkit_unroll(env: Any, first: TensorDict, steps: int, policy: Any) -> Callable[[], Any]:
    """The same as a TensorDict [rows, steps], what is done reset."""
    return lambda: env.unroll(first, steps, policy)


def envkit_rollout(env: BraxEnv, first: TensorDict, steps: int, policy: Any) -> Callable[[], Any]:
    """`rollout`, which records the state at the root and under next."""
    return lambda: env.rollout(
        steps, policy, auto_reset=False, tensordict=first, break_when_any_done=False
    )


def measure(name: str, rows: int, steps: int, *, device: str, rounds: int) -> None:
    """Compare whole rollouts at one batch size: random actions, policies, state recorded."""
    env = BraxEnv(name, **backend_of(name), batch_size=[rows], device=device)
    env.set_seed(0)
    first = env.reset()
    size = env.observation_spec["observation"].shape[-1]
    policy = policy_for(size, env.action_spec.shape[-1], device)
    act, params = acting_like(policy)
    physics = " ".join((name, *backend_of(name).values()))
    title = f"{physics} x {rows} on {device}, {steps} steps in one program"
    numbers: Any = {"steps": steps * rows, "rounds": rounds}
    compare(
        f"{title}, random actions",
        {
            "bare lax.scan": bare_scan(name, rows, steps, None, None),
            "envkit unroll": envkit_unroll(env, first, steps, None),
        },
        reference="bare lax.scan",
        **numbers,
    )
    compare(
        f"{title}, a small network acts",
        {
            "bare lax.scan": bare_scan(name, rows, steps, act, params),
            "envkit unroll, JaxPolicy": envkit_unroll(env, first, steps, JaxPolicy(act, params)),
            "envkit unroll, compile_policy": envkit_unroll(
                env, first, steps, compile_policy(policy)
            ),
        },
        reference="bare lax.scan",
        **numbers,
    )
    compare(
        f"{title}, state recorded",
        {
            "bare lax.scan": bare_scan(name, rows, steps, act, params, state=True),
            "envkit rollout, JaxPolicy": envkit_rollout(env, first, steps, JaxPolicy(act, params)),
        },
        reference="bare lax.scan",
        **numbers,
    )


def measure_resets(name: str, rows: int, steps: int, *, device: str, rounds: int) -> None:
    """Compare episodes that end all the time with episodes that never do."""
    works = {}
    for title, length in (("no reset", 10**6), ("2 % of the rows reset at every step", EPISODE)):
        env = BraxEnv(
            name, backend="spring", batch_size=[rows], device=device, episode_length=length
        )
        env.set_seed(0)
        first = env.reset()
        named = env.unpack(first["state"])
        named["elapsed"] = torch.arange(rows, dtype=torch.int32, device=device) % EPISODE
        first["state"] = env.pack(named)
        works[title] = envkit_unroll(env, first, steps, None)
    compare(
        f"{name} spring x {rows} on {device}, resets",
        works,
        steps=steps * rows,
        reference="no reset",
        rounds=rounds,
    )


def measure_growth(device: str, steps: int = 10_000) -> None:
    """Watch memory and live arrays while a policy steps an env."""
    env = BraxEnv("inverted_pendulum", backend="spring", batch_size=[64], device=device)
    policy = policy_for(4, 1, device)
    td = env.reset()
    process, seen = psutil.Process(), []
    with torch.no_grad():
        for step in range(steps + 1001):
            if step >= 1000 and (step - 1000) % (steps // 5) == 0:
                rss = round(process.memory_info().rss / 2**20, 1)
                seen.append(
                    {"steps": step - 1000, "rss_mib": rss, "live_arrays": len(jax.live_arrays())}
                )
                print("  " + "  ".join(f"{name} {value}" for name, value in seen[-1].items()))
            td["action"] = policy(td["observation"])
            _, td = env.step_and_maybe_reset(td)
    record("inverted_pendulum spring x 64, what is held while it steps", {"seen": seen})


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no ant")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    begin = time.perf_counter()
    keywords: Any = {"device": options.device, "rounds": 5 if options.quick else 7}
    for name, rows, steps in WORKS:
        if not (options.quick and name == "ant"):
            measure(name, rows, steps, **keywords)
    measure_resets("inverted_pendulum", 1024, 100, **keywords)
    if not options.quick:
        measure_resets("ant", 1024, 10, **keywords)
    measure_growth(options.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record("memory of the whole run", {"peak_rss_mib": round(peak)})
    print(f"\ndone in {time.perf_counter() - begin:.0f} s, peak memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
