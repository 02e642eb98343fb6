"""Rollouts train what others wrote: TorchRL's losses, and a plain torch loop on a DataLoader.

Conventions
    Both envs are the same task, one in JAX and one in worker processes: observation float32 (3,),
    action float32 (1,) in [-2, 2], episodes of 5 steps.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.utils.data import DataLoader

from envkit.batched.parallel import ParallelEnv
from envkit_bridges.gym.gym_env import GymEnv
from envkit_bridges.jax.jax_env import JaxEnv
from tests.zoo.walkers import Pendulum

pytestmark = pytest.mark.rounding

ROWS, STEPS = 3, 12


def in_jax() -> JaxEnv:
    return JaxEnv(Pendulum(), batch_size=[ROWS], device="cpu", episode_length=5)


def in_processes() -> ParallelEnv:
    return ParallelEnv(ROWS, lambda: GymEnv("Pendulum-v1", max_episode_steps=5), num_processes=2)


@pytest.fixture(scope="module", params=[in_jax, in_processes], ids=["JaxEnv", "ParallelEnv"])
def env(request):
    env = request.param()
    yield env
    env.close(raise_if_closed=False)


def torchrl_actor():
    """Build a policy from TorchRL's parts; it writes ``action`` and its log-probability."""
    from torchrl import modules  # takes seconds to import

    network = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    return modules.ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=modules.TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
    )


def collect(env, policy) -> TensorDict:
    env.set_seed(0)
    torch.manual_seed(0)
    with torch.no_grad():
        return env.rollout(STEPS, policy, break_when_any_done=False)


def test_a_rollout_trains_with_the_gae_and_ppo_of_torchrl(env):
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    actor = torchrl_actor()
    critic = TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_value"])
    data = collect(env, actor)
    loss = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in loss.parameters()]

    GAE(gamma=0.99, lmbda=0.95, value_network=critic)(data)
    losses = loss(data.reshape(-1))
    sum(losses[name] for name in loss.out_keys if name.startswith("loss_")).backward()
    optimizer.step()

    assert data["advantage"].shape == (ROWS, STEPS, 1)
    assert all(
        bool(parameter.isfinite().all()) and not torch.equal(parameter, old)
        for parameter, old in zip(loss.parameters(), before, strict=True)
    )


def test_torchrl_sees_where_episodes_end_and_that_a_time_limit_does_not_end_the_future(env):
    from torchrl.objectives.value import GAE

    critic = TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_value"])
    data = collect(env, None)

    GAE(gamma=0.9, lmbda=0.8, value_network=critic)(data)

    ended = data["next", "done"]
    assert ended.sum() == ROWS * (STEPS // 5)
    assert not data["next", "terminated"].any()
    reward, now, following = (
        data[key] for key in (("next", "reward"), "state_value", ("next", "state_value"))
    )
    one_step = reward + 0.9 * following - now  # what an advantage is where nothing follows it
    torch.testing.assert_close(data["advantage"][ended], one_step[ended])


def test_a_rollout_feeds_a_plain_dataloader_and_an_optimiser(env):
    data = collect(env, None).exclude("state", ("next", "state")).reshape(-1)
    loader = DataLoader(data, batch_size=6, shuffle=True, collate_fn=lambda rows: rows)
    model = nn.Linear(3 + 1, 3)  # predicts the next observation
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = model.weight.detach().clone()

    for batch in loader:
        predicted = model(torch.cat([batch["observation"], batch["action"]], -1))
        loss = (predicted - batch["next", "observation"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert len(loader) == ROWS * STEPS // 6
    assert loss.isfinite()
    assert not torch.equal(model.weight, before)


def test_rollouts_of_both_worlds_go_into_one_training_set():
    with_jax, with_processes = in_jax(), in_processes()

    rollouts = [
        collect(env, None).exclude("state", ("next", "state")) for env in (with_jax, with_processes)
    ]
    with_processes.close()
    both = torch.cat([data.reshape(-1) for data in rollouts])

    assert both.shape == (2 * ROWS * STEPS,)
    assert both["next", "observation"].dtype == torch.float32


def test_a_rollout_written_as_a_memory_map_reads_back_the_same(env, tmp_path):
    data = collect(env, None)

    data.memmap(tmp_path)

    assert (TensorDict.load_memmap(tmp_path) == data).all()
