"""Agents that TorchRL has recipes and tutorials for, each trained for a moment, with envs, transforms and collectors of ours.

Each program asks something of envkit that no other asks; that TorchRL's other losses take our data is asked by
`tests/reference/test_their_modules.py`.
"""

from __future__ import annotations

import warnings
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from envkit import (
    CatFrames,
    Collector,
    Compose,
    DoubleToFloat,
    EnvCreator,
    ExcludeTransform,
    ExplorationType,
    GrayScale,
    GymEnv,
    GymWrapper,
    InitTracker,
    MultiaSyncDataCollector,
    ObservationNorm,
    ParallelEnv,
    RandomCropTensorDict,
    RenameTransform,
    Resize,
    Reward2GoTransform,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TargetReturn,
    TensorDictPrimer,
    ToTensorImage,
    TransformedEnv,
    UnsqueezeTransform,
    VecNormV2,
    check_env_specs,
    set_exploration_type,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data import (
        LazyMemmapStorage,
        LazyTensorStorage,
        ReplayBuffer,
        SamplerWithoutReplacement,
        SliceSampler,
        TensorDictReplayBuffer,
    )
    from torchrl.modules import (
        MLP,
        ActorValueOperator,
        DuelingCnnDQNet,
        EGreedyModule,
        LSTMModule,
        MultiAgentMLP,
        OneHotCategorical,
        OrnsteinUhlenbeckProcessModule,
        ProbabilisticActor,
        QValueActor,
        QValueModule,
        SafeModule,
        TanhDelta,
        TanhModule,
        ValueOperator,
        set_recurrent_mode,
    )
    from torchrl.objectives import (
        A2CLoss,
        ClipPPOLoss,
        DDPGLoss,
        DQNLoss,
        DTLoss,
        IQLLoss,
        SACLoss,
        SoftUpdate,
        ValueEstimators,
        group_optimizers,
    )
    from torchrl.objectives.value import GAE, VTrace
from tests.reference.tasks.learning import descend, learned, sweep, tanh_actor
from tests.zoo.reference_style_envs import Herd

pytestmark = pytest.mark.filterwarnings(
    r"ignore::DeprecationWarning:torchrl\..*", r"ignore::FutureWarning:torchrl\..*"
)


ACTOR_AND_CRITIC = ("loss_objective", "loss_critic", "loss_entropy")


# ------------------------------------------------------------------------------ what programs check


def steps_follow_each_other(data: TensorDictBase, key: str = "observation") -> bool:
    """Check whether each step begins with what the step before it in its episode has shown.

    Args:
        data: steps along the last axis, with the numbers of their trajectories.
        key: the entry that is compared.
    """
    numbers = data["collector", "traj_ids"]
    goes_on = ~data["next", "done"][..., :-1, 0] & (numbers[..., :-1] == numbers[..., 1:])
    shown, begun = data["next", key], data[key]
    axis = data.ndim - 1
    shown, begun = (
        shown.narrow(axis, 0, goes_on.shape[-1]),
        begun.narrow(axis, 1, goes_on.shape[-1]),
    )
    return bool(goes_on.any()) and shown[goes_on].equal(begun[goes_on])


@torch.no_grad()
def evaluated(env, policy, episodes=2):
    """Return the mean return of episodes played without exploring."""
    returns = []
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        for _ in range(episodes):
            data = env.rollout(
                policy=policy,
                auto_reset=True,
                auto_cast_to_device=True,
                break_when_any_done=True,
                max_steps=10_000_000,
            )
            returns.append(data["next", "reward"].sum(-2).mean().item())
    return sum(returns) / len(returns)


# -------------------------------------------------------------------------------------- on-policy


class Buttons(gymnasium.Env):
    """Show which of two buttons pays, ten times."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def _shown(self):
        self._paying = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self._paying]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._left = 10
        return self._shown(), {}

    def step(self, action):
        reward = float(action == self._paying)
        self._left -= 1
        return self._shown(), reward, self._left == 0, False, {}


def buttons():
    return GymWrapper(Buttons())


def choosing_agent(env):
    spec = env.action_spec_unbatched
    common = SafeModule(
        MLP(2, 16, num_cells=[], activate_last_layer=True), ["observation"], ["hidden"]
    )
    head = ProbabilisticActor(
        SafeModule(nn.Linear(16, spec.shape[-1]), ["hidden"], ["logits"]),
        in_keys=["logits"],
        spec=spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )
    both = ActorValueOperator(common, head, ValueOperator(nn.Linear(16, 1), in_keys=["hidden"]))
    return both.get_policy_operator(), both.get_value_operator()


def test_ppo():
    env = TransformedEnv(
        SerialEnv(4, buttons),
        Compose(
            VecNormV2(in_keys=["observation"], decay=0.99999, eps=1e-2),
            RewardSum(),
            StepCounter(),
            DoubleToFloat(),
        ),
    )
    actor, critic = choosing_agent(env)
    collector = SyncDataCollector(
        env,
        actor,
        frames_per_batch=120,
        total_frames=3600,
        max_frames_per_traj=-1,
        init_random_frames=None,
        prefetch=0,
    )
    collector.set_seed(0)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(120, device="cpu"),
        sampler=SamplerWithoutReplacement(),
        batch_size=40,
    )
    advantage = GAE(gamma=0.9, lmbda=0.9, value_network=critic, average_gae=False)
    loss = ClipPPOLoss(
        actor, critic, clip_epsilon=0.2, entropy_coeff=0.01, normalize_advantage=True
    )
    optim = torch.optim.Adam(loss.parameters(), lr=1e-2)

    returns = []
    for data in collector:
        ended = data["next", "episode_reward"][data["next", "done"]]
        returns.append(ended.mean().item())
        assert (data["next", "step_count"][data["next", "done"]] == 10).all()
        for _ in range(3):
            with torch.no_grad():
                data = advantage(data)
            buffer.extend(data.reshape(-1))
            for batch in buffer:
                descend(optim, loss(batch), *ACTOR_AND_CRITIC)
        collector.update_policy_weights_()
    collector.shutdown()

    assert returns[0] < 7 and np.mean(returns[-5:]) > 9


@sweep
def test_impala():
    actor, critic = choosing_agent(buttons())
    make = lambda: TransformedEnv(buttons(), Compose(RewardSum(), StepCounter()))  # noqa: E731
    collector = MultiaSyncDataCollector(
        create_env_fn=[make] * 2,
        policy=actor,
        frames_per_batch=40,
        total_frames=6400,
        device="cpu",
        storing_device="cpu",
        max_frames_per_traj=-1,
        update_at_each_batch=True,
    )
    collector.set_seed(0)
    advantage = VTrace(gamma=0.9, value_network=critic, actor_network=actor, average_adv=False)
    loss = A2CLoss(actor, critic, loss_critic_type="l2", entropy_coeff=0.01, critic_coeff=0.5)
    optim = torch.optim.Adam(loss.parameters(), lr=1e-2)
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(80), sampler=SamplerWithoutReplacement(), batch_size=80
    )

    returns, waiting, frames = [], [], 0
    for data in collector:
        frames += data.numel()
        returns += data["next", "episode_reward"][data["next", "terminated"]].tolist()
        waiting.append(data)
        if len(waiting) < 2:
            continue
        stacked = torch.stack(waiting).contiguous()
        waiting = []
        with torch.no_grad():
            stacked = advantage(stacked)
        for part in stacked:
            buffer.extend(part.reshape(-1))
        for batch in buffer:
            descend(optim, loss(batch), *ACTOR_AND_CRITIC)
    collector.shutdown()

    assert frames == 6400 and len(returns) == 640
    assert np.mean(returns[:40]) < 7.5 and np.mean(returns[-40:]) > 8


def test_ppo_of_a_team_by_its_nested_keys():
    seen, logits, action, reward, value = (
        ("sheep", name) for name in ("observation", "logits", "action", "reward", "state_value")
    )
    env = TransformedEnv(SerialEnv(4, Herd), RewardSum([reward], [("sheep", "episode_reward")]))
    nets = {"n_agents": 3, "share_params": True, "depth": 1, "num_cells": 16}
    actor = ProbabilisticActor(
        TensorDictModule(MultiAgentMLP(2, 4, centralised=False, **nets), [seen], [logits]),
        spec=env.full_action_spec_unbatched[action],
        in_keys=[logits],
        out_keys=[action],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    critic = TensorDictModule(MultiAgentMLP(2, 1, centralised=True, **nets), [seen], [value])
    loss = ClipPPOLoss(actor, critic, normalize_advantage=False)
    done, terminated = (("sheep", flag) for flag in ("done", "terminated"))
    loss.set_keys(reward=reward, action=action, value=value, done=done, terminated=terminated)
    loss.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.9)
    optim = torch.optim.Adam(loss.parameters(), 5e-3)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(240), sampler=SamplerWithoutReplacement(), batch_size=60
    )

    def policy(td):  # the dog moves at random
        return env.rand_action(td).update(actor(td))

    collector = SyncDataCollector(env, policy, frames_per_batch=240, total_frames=1200)
    returns = []
    for data in collector:
        for flag in (done, terminated):  # the end of the root is that of each sheep
            ends = data["next", flag[1]].unsqueeze(-2)
            data["next", *flag] = ends.expand(data["next", *reward].shape)
        with torch.no_grad():
            loss.value_estimator(
                data,
                params=loss.critic_network_params,
                target_params=loss.target_critic_network_params,
            )
        for _ in range(4):
            buffer.extend(data.reshape(-1))
            for batch in buffer:
                descend(optim, loss(batch), *ACTOR_AND_CRITIC)
        ended = data["next", "done"].squeeze(-1)
        returns.append(data["next", "sheep", "episode_reward"][ended].mean().item())
    collector.shutdown()

    assert returns[-1] > returns[0] + 1


# ------------------------------------------------------------------------------------- off-policy


def test_an_agent_learns_to_balance_a_pole():
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    env.set_seed(0)
    net = MLP(out_features=env.action_spec.shape[-1], num_cells=[64, 64])
    value = TensorDictModule(net, in_keys=["observation"], out_keys=["action_value"])
    policy = TensorDictSequential(value, QValueModule(spec=env.action_spec))
    explore = EGreedyModule(env.action_spec, annealing_num_steps=4000, eps_init=0.5)
    collector = SyncDataCollector(
        env,
        TensorDictSequential(policy, explore),
        frames_per_batch=100,
        total_frames=-1,
        init_random_frames=500,
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000))
    loss = DQNLoss(value_network=policy, action_space=env.action_spec, delay_value=True)
    optim = torch.optim.Adam(loss.parameters(), lr=0.02)
    updater = SoftUpdate(loss, eps=0.99)

    longest, frames = 0, 0
    for data in collector:
        # Random steps have no values beside their action.
        buffer.extend(data.select("observation", "action", "step_count", "next"))
        frames += data.numel()
        longest = buffer[:]["next", "step_count"].max().item()
        if frames > 500:
            for _ in range(10):
                descend(optim, loss(buffer.sample(128)), "loss")
                explore.step(data.numel())
                updater.step()
        if longest > 200 or frames > 30_000:
            break
    collector.shutdown()

    assert longest > 200


def pole_seen(parallel=False, obs_norm_sd=None):
    keywords = {"from_pixels": True, "pixels_only": True}
    if parallel:
        base = ParallelEnv(
            2, EnvCreator(lambda: GymEnv("CartPole-v1", **keywords)), num_processes=2
        )
    else:
        base = GymEnv("CartPole-v1", **keywords)
    return TransformedEnv(
        base,
        Compose(
            StepCounter(),
            ToTensorImage(),
            RewardScaling(loc=0.0, scale=0.1),
            GrayScale(),
            Resize(16, 16),
            CatFrames(4, in_keys=["pixels"], dim=-3),
            ObservationNorm(in_keys=["pixels"], **(obs_norm_sd or {"standard_normal": True})),
        ),
    )


@sweep
def test_dqn_from_pixels(rendering):
    measured = pole_seen()
    measured.set_seed(0)
    for transform in measured.transform:
        if isinstance(transform, ObservationNorm):
            transform.init_stats(20, cat_dim=0, reduce_dim=[-1, -2, -4], keep_dims=(-1, -2))
    stats = {
        "standard_normal": True,
        **{k: measured.transform[-1].state_dict()[k] for k in ("loc", "scale")},
    }
    measured.close()
    env = pole_seen(True, stats)
    cnn = {"num_cells": [8, 8], "kernel_sizes": [4, 3], "strides": [2, 1]}
    net = DuelingCnnDQNet(2, 1, cnn, {"num_cells": [16], "depth": 1})
    actor = QValueActor(net, in_keys=["pixels"], spec=env.action_spec_unbatched)
    actor(env.fake_tensordict()[0].unsqueeze(0))
    explore = EGreedyModule(spec=env.action_spec_unbatched, annealing_num_steps=100)
    collector = SyncDataCollector(
        env,
        TensorDictSequential(actor, explore),
        frames_per_batch=32,
        total_frames=96,
        exploration_type=ExplorationType.RANDOM,
        split_trajs=False,
    )
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(200), batch_size=16, prefetch=2)
    loss = DQNLoss(actor, action_space="one_hot", delay_value=True)
    loss.make_value_estimator(gamma=0.97)
    updater = SoftUpdate(loss, eps=0.995)
    optim = torch.optim.Adam(loss.parameters(), 1e-3)

    seen = []
    for data in collector:
        seen.append(data["pixels"])
        buffer.extend(data.reshape(-1))
        for _ in range(3):
            value = descend(optim, loss(buffer.sample()), "loss")
            updater.step()
        explore.step(data.numel())
        collector.update_policy_weights_()
    collector.shutdown()

    seen = torch.cat(seen, 1)
    assert stats["loc"].shape == (4, 1, 1)
    assert seen.shape == (2, 48, 4, 16, 16)
    assert seen[:, :, 3].mean().abs() < 1.0 and seen.std() > 0.1
    assert np.isfinite(value) and steps_follow_each_other(data, "pixels")


@sweep
def test_ddpg_from_workers(opened):
    def make(env_per_worker, state=None):
        def one():
            return GymEnv("Pendulum-v1", frame_skip=2)

        env = TransformedEnv(
            SerialEnv(env_per_worker, one, pin_memory=False) if env_per_worker else one()
        )
        env.append_transform(RewardScaling(loc=0.0, scale=5.0))
        env.append_transform(DoubleToFloat(in_keys=["observation"]))
        env.append_transform(ObservationNorm(in_keys=["observation"]))
        env.append_transform(StepCounter(40))
        if state is not None:
            env.transform[2].init_stats(3)
            env.transform[2].load_state_dict(state)
        return env

    measured = make(0)
    measured.transform[2].init_stats(60)
    state = measured.transform[2].state_dict()
    net = MLP(in_features=3, out_features=1, num_cells=[16])
    spec = measured.action_spec
    actor = TensorDictSequential(
        TensorDictModule(net, ["observation"], ["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=spec),
    )
    explore = TensorDictSequential(
        actor, OrnsteinUhlenbeckProcessModule(spec=spec, annealing_num_steps=1000)
    )
    collector = MultiaSyncDataCollector(
        [partial(make, 2, state)] * 2,
        policy=explore,
        frames_per_batch=40,
        total_frames=240,
        max_frames_per_traj=None,
        reset_at_each_iter=False,
        split_trajs=False,
        device="cpu",
        exploration_type=ExplorationType.RANDOM,
    )
    collector.set_seed(0)
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(300), batch_size=32, pin_memory=False, prefetch=0
    )
    loss = DDPGLoss(actor, critic_of_actions(), delay_actor=True, delay_value=True)
    loss.make_value_estimator(ValueEstimators.TD0, gamma=0.99)
    updater = SoftUpdate(loss, tau=0.005)
    optim = torch.optim.Adam(loss.parameters(), 1e-3)

    frames = 0
    for data in collector:
        collector.update_policy_weights_()
        frames += data.numel()
        buffer.extend(data.reshape(-1).cpu())
        for _ in range(4):
            value = descend(optim, loss(buffer.sample()), "loss_actor", "loss_value")
            updater.step()
        explore[1].step(data.numel())
    collector.shutdown()

    stored = buffer[:]
    assert frames == 240 and len(buffer) == 240
    assert np.isfinite(value)
    assert steps_follow_each_other(stored)
    assert stored["next", "reward"].max() <= 0
    assert stored["action"].abs().max() <= 2
    assert stored["observation"].mean(0).abs().max() < 5  # normalised by what was measured


def pendulums(serial=True):
    """Build a batch of pendulums, transformed as the recipes for continuous control have it."""
    batched = SerialEnv if serial else ParallelEnv
    env = TransformedEnv(
        batched(2, EnvCreator(lambda: GymEnv("Pendulum-v1")), serial_for_single=True),
        Compose(InitTracker(), StepCounter(40), DoubleToFloat(), RewardSum()),
    )
    env.set_seed(0)
    return env


def drawing_actor(env):
    net = nn.Sequential(MLP(3, 2, num_cells=[32]), NormalParamExtractor())
    return tanh_actor(
        net,
        env.action_spec_unbatched,
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=True,
    )


def critic_of_actions():
    return ValueOperator(MLP(4, 1, num_cells=[32]), in_keys=["observation", "action"])


def replay_buffer(size):
    return TensorDictReplayBuffer(
        pin_memory=False, prefetch=3, storage=LazyMemmapStorage(size), batch_size=64
    )


@sweep
@pytest.mark.parametrize("serial", [True, False])
def test_sac(serial, opened):
    env = opened(pendulums(serial))
    actor = drawing_actor(env)
    loss = SACLoss(
        actor, critic_of_actions(), num_qvalue_nets=2, loss_function="l2", delay_qvalue=True
    )
    loss.make_value_estimator(gamma=0.9)
    updater = SoftUpdate(loss, eps=0.95)
    critics = list(loss.qvalue_network_params.flatten_keys().values())
    actors = list(loss.actor_network_params.flatten_keys().values())
    optim = group_optimizers(
        torch.optim.Adam(actors, lr=1e-3),
        torch.optim.Adam(critics, lr=1e-2),
        torch.optim.Adam([loss.log_alpha], lr=1e-3),
    )
    collector = Collector(
        env,
        actor,
        init_random_frames=200,
        frames_per_batch=100,
        total_frames=800,
        device="cpu",
    )
    collector.set_seed(0)
    buffer = replay_buffer(2000)

    history = []
    for data in collector:
        collector.update_policy_weights_()
        # Random steps have nothing that a policy writes beside its action.
        buffer.extend(data.select("observation", "action", "next", "collector").reshape(-1))
        if len(buffer) <= 200:
            continue
        for _ in range(20):
            losses = loss(buffer.sample())
            descend(optim, losses, "loss_actor", "loss_qvalue", "loss_alpha")
            updater.step()
            history.append(losses["loss_qvalue"].item())
    collector.shutdown()

    assert len(buffer) == 800
    assert buffer[:]["next", "done"].sum() == 800 // 40  # every episode has 40 steps
    assert learned(history)
    assert evaluated(env, actor) < 0


# ------------------------------------------------------------------------------- from recorded data


@sweep
def test_iql():
    env = pendulums()
    collector = SyncDataCollector(env, None, frames_per_batch=600, total_frames=600)
    (data,) = list(collector)
    collector.shutdown()
    buffer = replay_buffer(600)
    buffer.extend(data.reshape(-1))
    actor = drawing_actor(env)
    loss = IQLLoss(
        actor,
        critic_of_actions(),
        value_network=ValueOperator(MLP(3, 1, num_cells=[32]), in_keys=["observation"]),
        loss_function="l2",
        temperature=3.0,
        expectile=0.7,
    )
    loss.make_value_estimator(gamma=0.9)
    updater = SoftUpdate(loss, tau=0.05)
    optim = torch.optim.Adam(loss.parameters(), lr=1e-2)

    history = []
    for _ in range(100):
        losses = loss(buffer.sample())
        descend(optim, losses, "loss_actor", "loss_qvalue", "loss_value")
        updater.step()
        history.append(losses["loss_qvalue"].item())

    assert learned(history)
    assert evaluated(env, actor) < 0


class Remembering(nn.Module):
    """Attend to the steps of a window; the action of each is guessed without having been seen.

    It stands in for TorchRL's ``DTActor``, which needs the library transformers.
    """

    def __init__(self, width=16):
        super().__init__()
        self.read = nn.Linear(3 + 1 + 1, width)
        self.attend = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.act = nn.Linear(width, 1)

    def forward(self, observation, action, return_to_go):
        before = torch.cat([torch.zeros_like(action[..., :1, :]), action[..., :-1, :]], -2)
        steps = self.read(torch.cat([observation, before, return_to_go], -1))
        mask = nn.Transformer.generate_square_subsequent_mask(steps.shape[-2])
        return self.act(self.attend(steps.reshape(-1, *steps.shape[-2:]), src_mask=mask)).reshape(
            action.shape
        )


def test_decision_transformer():
    frames, length = 4, 20
    names = ["observation", "action", "return_to_go"]
    stacks = [f"{name}_cat" for name in names]
    env = TransformedEnv(GymEnv("Pendulum-v1"))
    env.append_transform(
        RewardScaling(loc=0.0, scale=0.1, in_keys=["reward"], standard_normal=False)
    )
    env.append_transform(TargetReturn(-50.0, out_keys=["return_to_go"], mode="reduce"))
    env.append_transform(TensorDictPrimer(action=env.base_env.action_spec))
    env.append_transform(DoubleToFloat())
    env.append_transform(
        ObservationNorm(loc=0.0, scale=1.0, in_keys=["observation"], standard_normal=True)
    )
    env.append_transform(UnsqueezeTransform(-2, in_keys=names, out_keys=stacks))
    env.append_transform(CatFrames(in_keys=stacks, N=frames, dim=-2, padding="constant"))
    env.append_transform(RewardSum())
    check_env_specs(env)
    base = TransformedEnv(GymEnv("Pendulum-v1"), Compose(StepCounter(length), DoubleToFloat()))
    base.set_seed(0)
    episodes = torch.stack([base.rollout(length) for _ in range(12)])
    to_go = Reward2GoTransform(
        gamma=1.0,
        in_keys=[("next", "reward")],
        out_keys=[("next", "return_to_go")],
    )
    episodes = to_go.inv(episodes)
    episodes["return_to_go"] = episodes["next", "return_to_go"]
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12),
        batch_size=6,
        transform=Compose(
            RandomCropTensorDict(sub_seq_len=frames, sample_dim=-1),
            RenameTransform(
                in_keys=["action", "observation", "return_to_go"],
                out_keys=["action_cat", "observation_cat", "return_to_go_cat"],
            ),
            ExcludeTransform(("next", "observation"), "step_count"),
        ),
    )
    buffer.extend(episodes)
    spec = env.action_spec
    actor = ProbabilisticActor(
        TensorDictModule(
            Remembering(),
            in_keys=["observation_cat", "action_cat", "return_to_go_cat"],
            out_keys=["param"],
        ),
        spec=spec,
        in_keys=["param"],
        out_keys=["action"],
        distribution_class=TanhDelta,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
    )
    loss = DTLoss(actor, loss_function="l2")
    loss.set_keys(action_target="action_cat")
    optim = torch.optim.Adam(loss.parameters(), lr=1e-2)

    history = [descend(optim, loss(buffer.sample()), "loss") for _ in range(60)]

    def last(td):  # acts by the last of the window
        return td.set("action", actor(td.clone())["action"][..., -1, :])

    with torch.no_grad():
        played = env.rollout(8, last)

    sums = episodes["next", "reward"].flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(episodes["next", "return_to_go"], sums)
    assert learned(history, by=1.0)
    assert played["action_cat"].shape == (8, frames, 1)
    assert played["observation_cat"].shape == (8, frames, 3)
    assert not played["observation_cat"][0, :-1].any()
    assert played["return_to_go_cat"][-1, :, 0].equal(played["return_to_go"][-frames:, 0])
    torch.testing.assert_close(
        played["return_to_go"][1:], -50.0 * 1.0 - played["next", "reward"][:-1].cumsum(0)
    )


# ------------------------------------------------------------------------------------------- memory


def test_sequences_train_a_recurrent_policy():
    def policy():
        lstm = LSTMModule(
            input_size=4,
            hidden_size=8,
            in_keys=["observation", "rs_h", "rs_c"],
            out_keys=["features", ("next", "rs_h"), ("next", "rs_c")],
            python_based=True,
        )
        head = TensorDictModule(nn.Linear(8, 2), in_keys=["features"], out_keys=["logits"])
        choose = TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"])
        return TensorDictSequential(lstm, head, choose)

    acting = policy().eval()
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    collector = Collector(
        env,
        acting,
        frames_per_batch=64,
        total_frames=128,
        auto_register_policy_transforms=True,
        reset_at_each_iter=False,
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(128),
        sampler=SliceSampler(slice_len=8, strict_length=False),
        batch_size=32,
    )

    batches = list(collector)
    data = batches[0]
    buffer.extend(data)
    sample = buffer.sample()
    with set_recurrent_mode(True), torch.no_grad():
        again = acting(data.select("observation", "is_init", "rs_h", "rs_c").clone())
    trained = policy()
    optim = torch.optim.Adam(trained.parameters(), 1e-2)
    losses = []
    for _ in range(10):
        with set_recurrent_mode(True):
            out = trained(buffer.sample())
        loss = (out["logits"] - torch.tensor([1.0, 0.0])).pow(2).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    collector.shutdown()

    assert data["is_init"][1:].equal(data["next", "done"][:-1])
    assert data["next", "rs_h"].shape == (64, 1, 8)
    torch.testing.assert_close(again["logits"], data["logits"], atol=1e-5, rtol=1e-4)
    assert sample.shape[0] <= 32
    assert losses[-1] < losses[0]
    both = torch.cat(batches)
    begins = both["is_init"].flatten()
    assert begins[0] and not both["rs_h"][begins].any()
    carried = ~begins[1:]
    assert both["rs_h"][1:][carried].equal(both["next", "rs_h"][:-1][carried])
