"""Envs on the CPU, whatever torch's default device is: "meta" stands for an accelerator, and holds no data at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tensordict import TensorDict

from envkit import (
    AsyncEnvPool,
    EnvCreator,
    GymEnv,
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    SyncDataCollector,
    compile_policy,
)
from envkit.env.base import EnvBase
from envkit_bridges.jax.jax_env import JaxEnv
from tests.bridges.compare import assert_same
from tests.zoo.envs import Count
from tests.zoo.walkers import Pendulum

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
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)  # naming "cpu" would leave a mode on for later tests


def cartpole() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


KINDS: dict[str, Callable[[], EnvBase]] = {
    "single": OnCpu,
    "gymnasium": cartpole,
    "vector": lambda: GymEnv("CartPole-v1", categorical_action_encoding=True, num_envs=2),
    "rows": lambda: SerialEnv(2, cartpole),
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
    results = [env.rollout(5, break_when_any_done=False), env.rollout(5)]
    root = env.reset()
    data, root = env.step_and_maybe_reset(env.rand_action(root))
    action = torch.ones(env.action_spec.shape, dtype=torch.int64, device="cpu")
    results += [data, env.step(root.set("action", action))]
    if env.batch_dims:
        half = torch.arange(env.batch_size[0], device="cpu") == 0
        root = env.step_mdp(results[-1]).set("action", action)
        results.append(env.step(root.set("_step", half)))
        results.append(env.reset(env.step_mdp(results[-1]).set("_reset", half.unsqueeze(-1))))
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_data_and_results_are_those_of_the_cpu(opened, kind, elsewhere):
    wanted = uses_on_cpu(KINDS[kind])

    found = uses(opened(KINDS[kind]()))

    with torch.device("cpu"):
        for own, other in zip(found, wanted, strict=True):
            assert_same(own, other, without=("env_index",))


@pytest.mark.parametrize("way", ["leaves", "TensorDicts"])
def test_rollouts_with_a_policy_are_those_of_the_cpu(opened, way, elsewhere):
    def on_leaves(count: torch.Tensor) -> torch.Tensor:
        return count % 2

    def on_tensordicts(td: TensorDict) -> TensorDict:
        return td.set("action", td["count"] % 2)

    env = opened(ParallelEnv(3, OnCpu, num_processes=2))
    policy = on_leaves if way == "leaves" else on_tensordicts

    data = env.rollout(70, policy, break_when_any_done=False)

    assert data.device == torch.device("cpu")
    with torch.device("cpu"):
        assert torch.equal(data["action"], data["count"] % 2)
        assert torch.equal(data["next", "count"], data["count"] + 1)


def test_a_compiled_run_is_that_of_the_cpu(elsewhere):
    def run() -> TensorDict:
        with torch.device("cpu"):
            torch.manual_seed(0)
            policy = compile_policy(torch.nn.Linear(3, 1))
        env = JaxEnv(Pendulum(), batch_size=[4], device="cpu")
        env.set_seed(0)
        return env.rollout(5, policy, break_when_any_done=False)

    found = run()

    with torch.device("cpu"):
        assert_same(found, run())


def test_a_collector_numbers_episodes_on_the_cpu(elsewhere):
    collector = SyncDataCollector(OnCpu, None, frames_per_batch=7, total_frames=7)

    (batch,) = collector

    with torch.device("cpu"):
        assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1, 2]


def uses_on_cpu(make: Callable[[], EnvBase]) -> list[TensorDict]:
    with torch.device("cpu"):
        env = make()
        found = uses(env)
        env.close()
    return found
