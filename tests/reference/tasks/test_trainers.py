"""TorchRL's trainers over our collectors: they read, count and update as over its own."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict.nn import TensorDictSequential
from tensordict.nn.distributions import NormalParamExtractor
from torch import nn

from envkit import Collector, GymEnv, RewardSum, SerialEnv, TransformedEnv, make
from tests.reference.tasks.learning import tanh_actor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.modules import MLP, EGreedyModule, QValueActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss, DQNLoss, SACLoss, SoftUpdate
    from torchrl.trainers import Trainer
    from torchrl.trainers.algorithms import DQNTrainer, PPOTrainer, SACTrainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch", "ignore:.*experimental"
)
OPTIONS = {"frame_skip": 1, "progress_bar": False, "optim_steps_per_batch": 2}


def buffer(batch_size: int = 8, **options) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(200), batch_size=batch_size, **options)


def moved(module: nn.Module, train) -> bool:
    """Train, and check whether any weight of a module has changed."""
    before = [parameter.detach().clone() for parameter in module.parameters()]
    train()
    pairs = zip(before, module.parameters(), strict=True)
    return any(not torch.equal(one, other) for one, other in pairs)


def q_actor(env) -> QValueActor:
    return QValueActor(MLP(4, 2, num_cells=[8]), in_keys=["observation"], spec=env.action_spec)


def test_a_trainer_begins_to_learn_when_the_random_frames_are_over():
    env = GymEnv("CartPole-v1")
    actor = q_actor(env)
    loss = DQNLoss(actor, action_space=env.action_spec, delay_value=False)
    collector = Collector(env, actor, frames_per_batch=16, total_frames=96, init_random_frames=48)
    trainer = Trainer(
        collector=collector,
        total_frames=96,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        **OPTIONS,
    )

    assert moved(actor, trainer.train)
    assert trainer.collected_frames == 96
    assert trainer._optim_count == 2 * 4  # of the batches that end at 48, 64, 80 and 96 frames
    assert collector.closed


def test_dqn():
    env = TransformedEnv(GymEnv("CartPole-v1"), RewardSum(out_keys=["reward_sum"]))
    actor, explore = q_actor(env), EGreedyModule(env.action_spec, annealing_num_steps=50)
    loss = DQNLoss(actor, action_space=env.action_spec, delay_value=True)
    policy = TensorDictSequential(actor, explore)
    collector = Collector(env, policy, frames_per_batch=16, total_frames=64, seed=0)
    trainer = DQNTrainer(
        collector=collector,
        total_frames=64,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        replay_buffer=buffer(),
        target_net_updater=SoftUpdate(loss, eps=0.9),
        greedy_module=explore,
        seed=1,
        **OPTIONS,
    )

    assert moved(actor, trainer.train)
    assert collector.policy_version == 4
    assert explore.eps < 1


def ppo_over(env, action_spec, features: int, save=None) -> bool:
    net = nn.Sequential(
        MLP(features, 2 * action_spec.shape[-1], num_cells=[8]), NormalParamExtractor()
    )
    actor = tanh_actor(net, action_spec, return_log_prob=True)
    loss = ClipPPOLoss(actor, ValueOperator(MLP(features, 1, num_cells=[8]), ["observation"]))
    trainer = PPOTrainer(
        collector=Collector(env, actor, frames_per_batch=32, total_frames=64),
        total_frames=64,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        replay_buffer=buffer(16, sampler=SamplerWithoutReplacement()),
        num_epochs=2,
        save_trainer_file=save,
        **OPTIONS,
    )
    return moved(net, trainer.train)


def test_ppo_over_a_pool(tmp_path):
    env = SerialEnv(2, lambda: GymEnv("Pendulum-v1"))

    assert ppo_over(env, env.action_spec_unbatched, 3, tmp_path / "trainer.pt")
    env.close()


@pytest.mark.slow
def test_ppo_over_programs():
    pytest.importorskip("gymnax")
    env = make("gymnax/Pendulum-v1", 2)

    assert ppo_over(env, env.action_spec_unbatched, 3)


@pytest.mark.parametrize("in_background", [False, True])
def test_sac(in_background):
    env = TransformedEnv(GymEnv("Pendulum-v1"), RewardSum(out_keys=["reward_sum"]))
    held = buffer()
    net = nn.Sequential(MLP(3, 2, num_cells=[8]), NormalParamExtractor())
    loss = SACLoss(
        tanh_actor(net, env.action_spec),
        ValueOperator(MLP(4, 1, num_cells=[8]), ["observation", "action"]),
    )
    filled = {"replay_buffer": held} if in_background else {}
    frames = (
        2048 if in_background else 64
    )  # a collector of its own thread may be at its end before the first step
    trainer = SACTrainer(
        collector=Collector(
            env,
            loss.actor_network,
            frames_per_batch=8,
            total_frames=frames,
            init_random_frames=16,
            **filled,
        ),
        total_frames=frames,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        replay_buffer=held,
        target_net_updater=SoftUpdate(loss, eps=0.9),
        async_collection=in_background,
        **OPTIONS,
    )

    assert moved(net, trainer.train)
    assert trainer.collected_frames >= 48
    assert len(held) >= 48
