"""What `torch.compile` compiles around an env, and what an env calls that is compiled by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from envkit import (
    Compose,
    GymEnv,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from envkit.env.base import EnvBase
from tests.zoo.walkers import Pendulum

pendulum = partial(GymEnv, "Pendulum-v1")
swing = partial(JaxEnv, Pendulum(), batch_size=[2])

KINDS: dict[str, Callable[[], EnvBase]] = {
    "jax": swing,
    "gym": pendulum,
    "serial": partial(SerialEnv, 2, pendulum),
    "parallel": partial(ParallelEnv, 2, pendulum, num_processes=1),
    "mixed": lambda: MixedEnv([SerialEnv(1, pendulum), SerialEnv(1, pendulum)]),
    "fused": lambda: TransformedEnv(swing(), Compose(RewardSum(), StepCounter())),
}


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind == "fused" else ()) for kind in KINDS],
)
def test_a_compiled_function_steps_an_env(kind):
    env = KINDS[kind]()
    force = torch.full((*env.batch_size, 1), 0.5)

    def play(force: torch.Tensor) -> torch.Tensor:
        env.set_seed(0)
        td = env.reset().set("action", force * 2)
        data, root = env.step_and_maybe_reset(td)
        root = env.step(root.set("action", force))["next"]
        return data["next", "reward"] + root["reward"] + env.rollout(2)["next", "reward"].mean()

    compiled = torch.compile(play, backend="eager")(force)

    assert torch.equal(compiled, play(force))
    env.close()


def test_a_compiled_policy_stays_compiled_in_a_rollout():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    env = SerialEnv(2, pendulum)
    policy = torch.nn.Linear(3, 1)

    with torch.no_grad():
        data = env.rollout(3, torch.compile(policy, backend=backend))
        wanted = policy(data["observation"])

    assert graphs
    assert torch.allclose(data["action"], wanted, atol=1e-6)
    env.close()
