"""Small torch policies on few rows: compiled to NumPy, as the torch module, and written by hand.

First single calls, for networks of several sizes (from which `envkit_bridges.policy.numpy_policy.LARGE_PRODUCT` tells where torch acts), then
whole runs of pools of CartPole against the bare loop that acts with the torch module, and of pendulums under a
stochastic actor, as the module and compiled.

Run: ``python -m bench.policy_rows [--quick]``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from bench.gym_pool import Policy, bare_loop, envkit_pool
from bench.harness import compare
from envkit import GymEnv, SerialEnv, compile_policy
from envkit.env.bound_policy import LeavesPolicy, bind_policy


def perceptron(width: int, inputs: int = 4, outputs: int = 2) -> nn.Sequential:
    """Give a network of one hidden layer, and of two where that is wide."""
    inner = [nn.Linear(width, width), nn.Tanh()] if width > 32 else []
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), *inner, nn.Linear(width, outputs), nn.Tanh()
    )


def by_hand(net: nn.Sequential) -> Callable[[np.ndarray], np.ndarray]:
    """Write a perceptron in NumPy, as one would who knows that it is one."""
    layers = [
        (layer.weight.detach().numpy().T, layer.bias.detach().numpy())
        for layer in net
        if isinstance(layer, nn.Linear)
    ]

    def act(rows: np.ndarray) -> np.ndarray:
        for weight, bias in layers:
            rows = np.tanh(rows @ weight + bias)
        return rows

    return act


def repeated(times: int, call: Callable[[], object]) -> Callable[[], None]:
    """Make a work of many calls."""

    @torch.no_grad()
    def run() -> None:
        for _ in range(times):
            call()

    return run


def measure_calls(rows: int, width: int, *, rounds: int, times: int) -> None:
    """Compare single calls on rows of four numbers."""
    torch.manual_seed(0)
    net = perceptron(width)
    module = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    env = GymEnv("CartPole-v1")
    tensor = torch.randn(rows, 4)
    root, array = TensorDict({"observation": tensor}, [rows]), tensor.numpy()
    compiled, plain = compile_policy(module).bound_to(env), bind_policy(env, module)
    with torch.no_grad():
        on_rows = compiled.for_run(root)
    hand, size = by_hand(net), sum(parameter.numel() for parameter in net.parameters())
    works: dict[str, Callable[[], object]] = {
        "torch module": lambda: net(tensor),
        "NumPy by hand": lambda: hand(array),
        "torch module, TensorDict": lambda: plain(root),
        "compiled, TensorDict": lambda: compiled(root),
    }
    if on_rows is not None and not isinstance(on_rows, LeavesPolicy):
        out = {path: np.empty(*form) for path, form in on_rows.writes.items()}
        works["compiled, rows"] = lambda: on_rows.act({("observation",): array}, out)
    compare(
        f"a policy of {size} parameters on {rows} rows, {times} calls a round",
        {name: repeated(times, call) for name, call in works.items()},
        steps=times,
        reference="torch module",
        rounds=rounds,
    )


def measure_runs(count: int, steps: int, *, rounds: int) -> None:
    """Compare runs of CartPoles in this process; the bare loop acts with the torch module."""
    torch.manual_seed(0)
    policy = Policy(4, 2, True, torch.float32)

    class Index(nn.Module):
        def forward(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.argmax(-1)

    plain = nn.Sequential(*policy.net, Index())
    module = TensorDictModule(plain, in_keys=["observation"], out_keys=["action"])

    def pool() -> SerialEnv:
        env = SerialEnv(count, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
        env.set_seed(0)
        return env

    works = {
        "bare loop, torch module": bare_loop("CartPole-v1", count, steps, policy),
        "SerialEnv, nn.Sequential": envkit_pool(pool(), steps, plain),
        "SerialEnv, TensorDictModule": envkit_pool(pool(), steps, module),
        "SerialEnv, compile_policy": envkit_pool(pool(), steps, compile_policy(plain)),
    }
    compare(
        f"CartPole x {count} in this process, {steps} steps a round",
        works,
        steps=steps * count,
        reference="bare loop, torch module",
        rounds=rounds,
    )


def measure_stochastic(count: int, steps: int, *, rounds: int) -> None:
    """Compare runs of pendulums under a Gaussian actor that records its log-probability, as the module and compiled."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2), NormalParamExtractor())
    parts: list[Any] = [
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=torch.distributions.Normal,
            default_interaction_type=InteractionType.from_str("random"),
            return_log_prob=True,
        ),
    ]
    actor = ProbabilisticTensorDictSequential(*parts)

    def pool() -> SerialEnv:
        env = SerialEnv(count, lambda: GymEnv("Pendulum-v1"))
        env.set_seed(0)
        return env

    compare(
        f"Pendulum x {count} in this process, a stochastic actor, {steps} steps a round",
        {
            "SerialEnv, the module": envkit_pool(pool(), steps, actor),
            "SerialEnv, compile_policy": envkit_pool(pool(), steps, compile_policy(actor)),
        },
        steps=steps * count,
        reference="SerialEnv, the module",
        rounds=rounds,
    )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds, small networks only")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)  # a small policy; the cores are for the envs
    rounds = 5 if quick else 9
    for rows, width in ((16, 32), (32, 32)):
        measure_calls(rows, width, rounds=rounds, times=2000)
    for rows, width in () if quick else ((16, 256), (128, 256), (1024, 64), (1024, 256)):
        measure_calls(rows, width, rounds=rounds, times=100)
    for count in (16, 32):
        measure_runs(count, 200, rounds=rounds)
    for count in (1, 16):
        measure_stochastic(count, 200, rounds=rounds)


if __name__ == "__main__":
    main()
