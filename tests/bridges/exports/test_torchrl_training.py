"""TorchRL's collector, loss and replay buffer train on an env of ours."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from envkit import GymEnv, SerialEnv, evaluate
from envkit_bridges.exports.torchrl import to_torchrl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::UserWarning:torchrl", "ignore::FutureWarning:torchrl"),
]

ROWS, STEPS, BATCHES = 8, 64, 40


def cart_poles() -> SerialEnv:
    return SerialEnv(ROWS, lambda: GymEnv("CartPole-v1"))


def trained(seed: int):
    """Train PPO, as TorchRL's users write it, on 20,480 steps of CartPole; give the actor."""
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    torch.manual_seed(seed)
    env = to_torchrl(cart_poles())
    env.set_seed(seed)
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        spec=env.action_spec,
        return_log_prob=True,
    )
    critic = ValueOperator(
        nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)), in_keys=["observation"]
    )
    loss, advantage = ClipPPOLoss(actor, critic), GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimiser = torch.optim.Adam(loss.parameters(), lr=1e-3)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(ROWS * STEPS), sampler=SamplerWithoutReplacement(), batch_size=128
    )
    collector = Collector(
        env, actor, frames_per_batch=ROWS * STEPS, total_frames=BATCHES * ROWS * STEPS
    )
    for batch in collector:
        with torch.no_grad():
            advantage(batch)
        buffer.extend(batch.reshape(-1))
        for _ in range(4 * ROWS * STEPS // 128):
            losses = loss(buffer.sample())
            total = sum(losses[name] for name in losses.keys() if name.startswith("loss_"))
            optimiser.zero_grad()
            total.backward()
            optimiser.step()
    collector.shutdown()
    return actor


def test_ppo_of_torchrl_balances_a_pole_in_an_env_of_ours():
    actor, env = trained(0), cart_poles()

    found = evaluate(env, {"trained": actor, "random": None}, 40, seed=1)

    assert found["trained"].ci95[0] >= 2 * found["random"].mean, found
    env.close()
