"""Collectors feed trainers: on-policy from workers, off-policy from asynchronous ones into TorchRL's buffer.

On-policy training on Brax through `SyncDataCollector` is the demo, see tests/test_demo.py.
"""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from envkit import (
    PPO,
    ExplorationType,
    GymEnv,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    SerialEnv,
    set_exploration_type,
)
from envkit.demo.job import balanced, balancing_actor, make_gym, mean_length

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning"),
]


@pytest.fixture(autouse=True)
def few_threads():
    """Leave the cores to the workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_ppo_balances_a_pendulum_with_batches_of_two_workers():
    test_env = SerialEnv(8, make_gym)
    ppo = PPO(
        test_env,
        balancing_actor(),
        epochs=4,
        learning_rate=1e-3,
        gamma=0.995,
        lmbda=0.98,
        normalize_rewards=False,
        seed=0,
    )
    collector = MultiSyncDataCollector(
        lambda: SerialEnv(16, make_gym),
        ppo.policy,
        num_workers=2,
        frames_per_batch=32 * 128,
        total_frames=150 * 32 * 128,
        cat_results=0,
    )
    collector.set_seed(0)
    lengths = []

    for iteration, batch in enumerate(collector, 1):
        ppo.update(batch)
        collector.update_policy_weights_()
        if iteration % 15 == 0:
            lengths.append(mean_length(balanced(test_env, ppo.policy, seed=100)))
            if lengths[-1] >= 950:
                break
    collector.shutdown()
    ppo.close()
    test_env.close()

    assert lengths[-1] >= 950, lengths


@pytest.mark.sweep
def test_sac_swings_a_pendulum_up_from_an_asynchronous_collector():
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import SACLoss, SoftUpdate

    torch.manual_seed(0)
    env = GymEnv("Pendulum-v1")
    net = torch.nn.Sequential(
        *(torch.nn.Linear(3, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()),
        *(torch.nn.Linear(64, 2), NormalParamExtractor()),
    )
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        default_interaction_type=ExplorationType.RANDOM,
        spec=env.action_spec,
    )

    class Q(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(
                *(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)),
                *(torch.nn.ReLU(), torch.nn.Linear(64, 1)),
            )

        def forward(self, observation, action):
            return self.net(torch.cat([observation, action], -1))

    loss = SACLoss(actor, ValueOperator(Q(), in_keys=["observation", "action"]), num_qvalue_nets=2)
    loss.make_value_estimator(gamma=0.98)
    target = SoftUpdate(loss, tau=0.01)
    optimiser = torch.optim.Adam(loss.parameters(), lr=2e-3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20_000), batch_size=128)
    collector = MultiaSyncDataCollector(
        lambda: GymEnv("Pendulum-v1"),
        actor,
        num_workers=2,
        frames_per_batch=100,
        total_frames=12_000,
        init_random_frames=1_000,
        replay_buffer=buffer,
    )
    collector.set_seed(0)

    test_env = SerialEnv(8, lambda: GymEnv("Pendulum-v1"))

    def mean_return() -> float:
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            return float(test_env.rollout(200, actor)["next", "reward"].sum(1).mean())

    reached = [mean_return()]
    for nothing in collector:
        assert nothing is None
        if collector.frames < 1_000:
            continue
        for _ in range(60):
            losses = loss(buffer.sample())
            total = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
            optimiser.zero_grad()
            total.backward()
            optimiser.step()
            target.step()
        collector.update_policy_weights_()
        if collector.frames % 2000 == 0:
            reached.append(mean_return())
            if reached[-1] > -300:
                break
    collector.shutdown()
    test_env.close()

    assert reached[0] < -600 and reached[-1] > -300, reached
