"""Agents built of TorchRL's modules, losses and buffers, trained for a moment on envs of ours."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from tensordict.nn.distributions import NormalParamExtractor
from torch import nn

from envkit import (
    Compose,
    DoubleToFloat,
    ExplorationType,
    GymEnv,
    InitTracker,
    ObservationNorm,
    RewardScaling,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    set_exploration_type,
    step_mdp,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.collectors.utils import split_trajectories
    from torchrl.data import (
        LazyTensorStorage,
        ReplayBuffer,
        SamplerWithoutReplacement,
        TensorDictReplayBuffer,
    )
    from torchrl.modules import (
        MLP,
        EGreedyModule,
        LSTMModule,
        OneHotCategorical,
        ProbabilisticActor,
        QValueActor,
        QValueModule,
        ValueOperator,
    )
    from torchrl.objectives import ClipPPOLoss, DQNLoss, SACLoss, SoftUpdate
    from torchrl.objectives.value import GAE
from tests.reference.tasks.actors import tanh_actor
from tests.reference.tasks.continuity import steps_follow_each_other

pytestmark = pytest.mark.filterwarnings(
    r"ignore::DeprecationWarning:torchrl\..*", r"ignore::FutureWarning:torchrl\..*"
)


def test_ppo_with_generalised_advantages():
    env = TransformedEnv(
        GymEnv("Pendulum-v1"),
        Compose(
            ObservationNorm(in_keys=["observation"]),
            DoubleToFloat(),
            StepCounter(max_steps=32),
            RewardScaling(loc=0.0, scale=0.1),
        ),
    )
    env.transform[0].init_stats(num_iter=50, reduce_dim=0, cat_dim=0)
    net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2), NormalParamExtractor())
    policy = tanh_actor(net, env.action_spec, return_log_prob=True)
    value = ValueOperator(MLP(3, 1, num_cells=[16]), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=value, average_gae=True)
    loss_module = ClipPPOLoss(policy, value, clip_epsilon=0.2)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(64), sampler=SamplerWithoutReplacement(), batch_size=16
    )
    optim = torch.optim.Adam(loss_module.parameters(), 3e-4)
    before = [p.detach().clone() for p in policy.parameters()]

    for _ in range(2):
        data = env.rollout(64, policy, break_when_any_done=False).detach()
        advantage(data)
        buffer.extend(data.reshape(-1))
        for _ in range(4):
            losses = loss_module(buffer.sample())
            loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            loss.backward()
            optim.step()
            optim.zero_grad()

    assert torch.isfinite(loss) and steps_follow_each_other(data)
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        assert env.rollout(10, policy).shape == (10,)


def test_dqn_with_greedy_exploration_and_a_replay_buffer():
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    actor = QValueActor(MLP(4, 2, num_cells=[16]), in_keys=["observation"], spec=env.action_spec)
    explore = EGreedyModule(spec=env.action_spec, annealing_num_steps=100, eps_init=0.9)
    policy = TensorDictSequential(actor, explore)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=16)
    loss_module = DQNLoss(actor, action_space=env.action_spec, delay_value=True)
    updater = SoftUpdate(loss_module, eps=0.95)
    optim = torch.optim.Adam(loss_module.parameters(), 1e-3)

    for _ in range(3):
        data = env.rollout(20, policy, break_when_any_done=False)
        explore.step(data.numel())
        buffer.extend(data)
        loss = loss_module(buffer.sample())["loss"]
        loss.backward()
        optim.step()
        optim.zero_grad()
        updater.step()

    assert torch.isfinite(loss) and steps_follow_each_other(data)
    assert (data["action"].sum(-1) == 1).all() and (data["next", "reward"] == 1).all()
    assert explore.eps < 0.9


def test_sac_on_a_batch_of_envs():
    env = SerialEnv(2, lambda: GymEnv("Pendulum-v1"))
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2), NormalParamExtractor())
    spec = env.action_spec[0]
    actor = tanh_actor(net, spec)
    critic = ValueOperator(MLP(4, 1, num_cells=[16]), in_keys=["observation", "action"])
    loss_module = SACLoss(actor, critic, action_spec=spec)
    loss_module.make_value_estimator(gamma=0.99)
    updater = SoftUpdate(loss_module, eps=0.99)

    with torch.no_grad():
        data = env.rollout(20, actor, break_when_any_done=False)
    losses = loss_module(data.reshape(-1))
    updater.step()

    assert all(torch.isfinite(losses[f"loss_{name}"]) for name in ("actor", "qvalue", "alpha"))
    assert steps_follow_each_other(data)
    cosine, sine, speed = data["observation"].unbind(-1)
    cost = torch.atan2(sine, cosine) ** 2 + 0.1 * speed**2 + 0.001 * data["action"][..., 0] ** 2
    torch.testing.assert_close(data["next", "reward"][..., 0], -cost, atol=1e-4, rtol=1e-4)
    env.close()


def test_a_recurrent_agent_with_its_primer():
    lstm = LSTMModule(input_size=4, hidden_size=8, in_key="observation", out_key="embed")
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), InitTracker()))
    env.append_transform(lstm.make_tensordict_primer())
    policy = TensorDictSequential(
        lstm,
        TensorDictModule(MLP(8, 2, num_cells=[8]), ["embed"], ["action_value"]),
        QValueModule(spec=env.action_spec),
    )

    data = env.rollout(30, policy, break_when_any_done=False)
    hidden = (
        data["recurrent_state_h"] if "recurrent_state_h" in data.keys() else data[lstm.in_keys[1]]
    )

    starts = data["is_init"].squeeze(-1)
    assert starts.sum() > 1
    assert (hidden[starts] == 0).all() and (hidden[~starts] != 0).any()


def test_a_categorical_actor_on_one_hot_actions():
    env = GymEnv("CartPole-v1")
    policy = ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[8]), ["observation"], ["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )

    rollout = env.rollout(5, policy)

    assert (rollout["action"].sum(-1) == 1).all()
    assert any("log_prob" in key for key in rollout.keys())


def test_trajectories_are_split_and_padded():
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=4))

    split = split_trajectories(env.rollout(10, break_when_any_done=False), done_key="done")

    assert split.shape == (3, 4)
    assert split["mask"].sum(-1).tolist() == [4, 4, 2]


def test_a_loop_over_steps_feeds_a_buffer():
    env = GymEnv("Pendulum-v1")
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    td = env.reset()

    for _ in range(12):
        td = env.step(env.rand_action(td))
        buffer.add(td.clone())
        td = step_mdp(td)

    assert len(buffer) == 12
    assert buffer.sample()["next", "observation"].shape == (4, 3)
