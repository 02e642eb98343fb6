"""Envs on the CPU, whatever torch's default device is: "meta" stands for an accelerator, and holds no data at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tensordict import TensorDict

from envkit import AsyncEnvPool, EnvCreator, MixedEnv, ParallelEnv, SerialEnv
from envkit.env.base import EnvBase
from tests.bridges.compare import assert_same
from tests.zoo.envs import Count

pytestmark = pytest.mark.usefixtures("warm_fork_server")


class OnCpu(Count):
    """Says for each tensor where it is."""

    def __init__(self, n: int = 3):
        with torch.device("cpu"):
            super().__init__(n, device="cpu")

    def _out(self) -> TensorDict:
        with torch.device("cpu"):
            return super()._out()

    def _step(self, td):
        with torch.device("cpu"):
            return super()._step(td)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    previous = torch.get_default_device()
    torch.set_default_device("meta")
    yield
    torch.set_default_device(previous)


KINDS: dict[str, Callable[[], EnvBase]] = {
    "single": OnCpu,
    "serial": lambda: SerialEnv(2, OnCpu),
    "parallel": lambda: ParallelEnv(2, OnCpu),
    "pipes": lambda: ParallelEnv(2, OnCpu, use_buffers=False),
    "shared state": lambda: SerialEnv(2, EnvCreator(OnCpu)),
    "threads": lambda: AsyncEnvPool([OnCpu, OnCpu]),
    "processes": lambda: AsyncEnvPool([OnCpu, OnCpu], backend="multiprocessing"),
    "mixed": lambda: MixedEnv([SerialEnv(2, OnCpu), ParallelEnv(1, OnCpu)]),
}


def uses(env: EnvBase) -> list[TensorDict]:
    """Use an env in many ways, with no randomness but that of its seed."""
    env.set_seed(0)
    found = [env.rollout(5, break_when_any_done=False), env.rollout(5)]
    root = env.reset()
    data, root = env.step_and_maybe_reset(env.rand_action(root))
    action = torch.ones(env.action_spec.shape, dtype=torch.int64, device="cpu")
    found += [data, env.step(root.set("action", action))]
    if env.batch_dims:
        half = torch.arange(env.batch_size[0], device="cpu") == 0
        root = env.step_mdp(found[-1]).set("action", action)
        found.append(env.step(root.set("_step", half)))
        found.append(env.reset(env.step_mdp(found[-1]).set("_reset", half.unsqueeze(-1))))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_data_and_results_are_those_of_the_cpu(opened, kind, elsewhere):
    wanted = uses_on_cpu(KINDS[kind])

    found = uses(opened(KINDS[kind]()))

    with torch.device("cpu"):
        for own, other in zip(found, wanted, strict=True):
            assert_same(own, other, without=("env_index",))


@pytest.mark.parametrize("way", ["leaves", "TensorDicts"])
@pytest.mark.parametrize("parts", [1, 2])
def test_rollouts_with_a_policy_are_those_of_the_cpu(opened, parts, way, elsewhere):
    def on_leaves(count: torch.Tensor) -> torch.Tensor:
        return count % 2

    def on_tensordicts(td: TensorDict) -> TensorDict:
        return td.set("action", td["count"] % 2)

    env = opened(ParallelEnv(3, OnCpu, num_processes=2))
    policy = on_leaves if way == "leaves" else on_tensordicts

    data = env.rollout(70, policy, break_when_any_done=False, pipeline=parts)

    assert data.device == torch.device("cpu")
    with torch.device("cpu"):
        assert torch.equal(data["action"], data["count"] % 2)
        assert torch.equal(data["next", "count"], data["count"] + 1)


def uses_on_cpu(make: Callable[[], EnvBase]) -> list[TensorDict]:
    with torch.device("cpu"):
        env = make()
        found = uses(env)
        env.close()
    return found
