"""Compare rollouts on a GPU with those of the CPU: the same seed, the same actions or policy, a stated tolerance.

Brax, gymnax and an env of our own, under given actions, random ones and a torch policy, step by step and as one
program, with episodes that end and begin again. ``python -m bench.gpu_day --rehearse`` compares the CPU with itself.

Conventions
    difference  the largest ``|GPU - CPU| / (1 + |CPU|)`` of all floating-point entries that a rollout records.
    parted      rows in which any other entry, flags and counts among them, is unlike at any step. None may be. Their
                numbers are left out of the difference, since they belong to other episodes.
    tolerance   the largest difference allowed: a hundred times that of the same rollout on one CPU under SSE4.2 and
                under AVX-512. Products are exact (``jax_default_matmul_precision``), not in TF32.

Run: ``python -m bench.gpu_parity``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import torch
from tensordict import TensorDictBase

from bench.brax_scan import backend_of
from bench.brax_step import policy_for
from bench.harness import accelerator, is_rehearsal, record
from envkit import BraxEnv, GymnaxEnv, JaxEnv, compile_policy, configure_gpu

ROWS = 64


@dataclass(frozen=True)
class Comparison:
    """A rollout that two devices do, and how far they may be apart."""

    roll: Callable[[str], TensorDictBase]
    tolerance: float


def _brax(name: str, device: str) -> BraxEnv:
    name = (
        "fast" if is_rehearsal() else name
    )  # it has no physics, which take half a minute to compile
    env = BraxEnv(name, **backend_of(name), batch_size=[ROWS], device=device, episode_length=20)
    env.set_seed(3)
    return env


def _network(env: BraxEnv) -> torch.nn.Sequential:
    size = env.observation_spec["observation"].shape[-1]
    return policy_for(size, env.action_spec.shape[-1], str(env.device))


def _constant(actions: int, device: str) -> Callable[[TensorDictBase], TensorDictBase]:
    """Give a policy that acts otherwise in each row, and always alike."""
    action = torch.linspace(-0.9, 0.9, ROWS).unsqueeze(-1).repeat(1, actions).to(device)
    return lambda td: td.set("action", action)


def masked_steps(device: str) -> TensorDictBase:
    """Roll an env of our own out until all rows are done: those that are done earlier stand still."""
    from tests.zoo.walkers import Walker  # opens JAX's devices, so only after configure_gpu

    env = JaxEnv(Walker(), batch_size=[ROWS], device=device, episode_length=50)
    env.set_seed(3)
    return env.rollout(60, _constant(2, device), break_when_all_done=True)


def given_actions(device: str) -> TensorDictBase:
    """Step an inverted pendulum under given actions, with resets."""
    policy = _constant(1, device)
    return _brax("inverted_pendulum", device).rollout(50, policy, break_when_any_done=False)


def torch_policy(device: str) -> TensorDictBase:
    """Step an inverted pendulum under a torch module that acts at each step, with resets."""
    env = _brax("inverted_pendulum", device)
    network = _network(env)

    def act(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", network(td["observation"]))

    with torch.no_grad():
        return env.rollout(50, act, break_when_any_done=False)


def compiled_policy(device: str) -> TensorDictBase:
    """Roll ant out as one program with a torch module in it."""
    env = _brax("ant", device)
    return env.rollout(10, compile_policy(_network(env)), break_when_any_done=False)


def random_actions(device: str) -> TensorDictBase:
    """Roll gymnax's CartPole out as one program that draws actions, with resets."""
    env = GymnaxEnv("CartPole-v1", batch_size=[ROWS], device=device)
    env.set_seed(3)
    return env.rollout(100, break_when_any_done=False)


COMPARISONS = {
    "an env of our own, masked steps, given actions": Comparison(masked_steps, 1e-5),
    "brax inverted_pendulum, given actions": Comparison(given_actions, 1e-3),
    "brax inverted_pendulum, torch policy": Comparison(torch_policy, 1e-3),
    "brax ant, compiled torch policy": Comparison(compiled_policy, 5e-3),
    "gymnax CartPole-v1, random actions": Comparison(random_actions, 3e-4),
}


def compared(here: TensorDictBase, there: TensorDictBase) -> dict[str, Any]:
    """Compare two rollouts of the same rows; see the conventions of this module.

    Raises:
        SystemExit: they record other entries or shapes.
    """
    sides = [{path: leaf.cpu() for path, leaf in side.items(True, True)} for side in (here, there)]
    shapes = [{path: (leaf.shape, leaf.dtype) for path, leaf in side.items()} for side in sides]
    if shapes[0] != shapes[1]:
        raise SystemExit(f"rollouts record {shapes[0]} here and {shapes[1]} there.")
    rows = there.batch_size[0]
    parted, apart = torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.float64)
    for path, leaf in sides[1].items():
        if leaf.numel() == 0:
            continue
        if leaf.is_floating_point():
            right = leaf.double().reshape(rows, -1)
            gap = (sides[0][path].double().reshape(rows, -1) - right).abs() / (1 + right.abs())
            apart = torch.maximum(apart, gap.amax(1))
        else:
            parted |= (sides[0][path] != leaf).reshape(rows, -1).any(1)
    kept = apart[~parted]
    return {"difference": float(kept.max()) if len(kept) else 0.0, "parted": int(parted.sum())}


def main() -> None:
    """Compare every rollout and record each; the exit code is 1 where two do not agree."""
    device = "cpu" if is_rehearsal() else "cuda"
    if device == "cuda":
        if not torch.cuda.is_available():
            print("no CUDA device: nothing was compared (python -m bench.gpu_day --rehearse)")
            return
        configure_gpu(0.5)
    jax.config.update("jax_default_matmul_precision", "highest")
    all_agree = True
    for name, comparison in COMPARISONS.items():
        found = compared(comparison.roll(device), comparison.roll("cpu"))
        agrees = found["parted"] == 0 and found["difference"] <= comparison.tolerance
        all_agree &= agrees
        result = {**found, "tolerance": comparison.tolerance, "agrees": agrees}
        print(f"{name}: {result}", flush=True)
        record(f"{name}: {accelerator() or 'a CPU'} against the CPU", result)
    raise SystemExit(int(not all_agree))


if __name__ == "__main__":
    main()
