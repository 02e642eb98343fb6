"""The algorithms that TorchRL has recipes for, each trained for a moment, with envs, transforms and collectors of ours."""

from __future__ import annotations

import warnings
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from envkit import (
    CatFrames,
    Collector,
    Compose,
    DoubleToFloat,
    DreamerDecoder,
    DreamerEnv,
    EnvCreator,
    ExcludeTransform,
    ExplorationType,
    FrameSkipTransform,
    GrayScale,
    GymEnv,
    GymWrapper,
    InitTracker,
    MultiaSyncDataCollector,
    NoopResetEnv,
    ObservationNorm,
    ParallelEnv,
    RandomCropTensorDict,
    RenameTransform,
    Resize,
    Reward2GoTransform,
    RewardScaling,
    RewardSum,
    SerialEnv,
    SignTransform,
    StepCounter,
    SyncDataCollector,
    TargetReturn,
    TensorDictPrimer,
    ToTensorImage,
    TransformedEnv,
    Unbounded,
    UnsqueezeTransform,
    VecNormV2,
    VideoRecorder,
    check_env_specs,
    set_exploration_type,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data import (
        LazyMemmapStorage,
        LazyTensorStorage,
        SamplerWithoutReplacement,
        SliceSampler,
        TensorDictReplayBuffer,
    )
    from torchrl.modules import (
        MLP,
        ActorValueOperator,
        AdditiveGaussianModule,
        BatchRenorm1d,
        ConvNet,
        DreamerActor,
        EGreedyModule,
        IndependentNormal,
        OneHotCategorical,
        ProbabilisticActor,
        QValueActor,
        RSSMPosterior,
        RSSMPrior,
        RSSMRollout,
        SafeModule,
        SafeSequential,
        TanhDelta,
        TanhModule,
        TanhNormal,
        ValueOperator,
        WorldModelWrapper,
    )
    from torchrl.objectives import (
        A2CLoss,
        ClipPPOLoss,
        CQLLoss,
        CrossQLoss,
        DDPGLoss,
        DiscreteSACLoss,
        DQNLoss,
        DreamerActorLoss,
        DreamerModelLoss,
        DreamerValueLoss,
        DTLoss,
        HardUpdate,
        IQLLoss,
        REDQLoss,
        SACLoss,
        SoftUpdate,
        TD3Loss,
        ValueEstimators,
        group_optimizers,
    )
    from torchrl.objectives.value import GAE, VTrace
    from torchrl.record import CSVLogger
from tests.reference.tasks.actors import tanh_actor
from tests.reference.tasks.continuity import steps_follow_each_other

pytestmark = pytest.mark.filterwarnings(
    r"ignore::DeprecationWarning:torchrl\..*", r"ignore::FutureWarning:torchrl\..*"
)


def sweep(test):
    return pytest.mark.slow(pytest.mark.sweep(test))


# ------------------------------------------------------------------------------------- envs and nets


def pendulum(rows=2, serial=True):
    """A batch of pendulums, transformed as the recipes for continuous control have it."""
    batched = SerialEnv if serial else ParallelEnv
    env = TransformedEnv(
        batched(rows, EnvCreator(lambda: GymEnv("Pendulum-v1")), serial_for_single=True),
        Compose(InitTracker(), StepCounter(40), DoubleToFloat(), RewardSum()),
    )
    env.set_seed(0)
    return env


def drawing_actor(env, width=3):
    spec = env.action_spec_unbatched
    net = nn.Sequential(MLP(width, 2 * spec.shape[-1], num_cells=[32]), NormalParamExtractor())
    return tanh_actor(
        net, spec, default_interaction_type=InteractionType.RANDOM, return_log_prob=True
    )


def fixed_actor(env, width=3):
    spec = env.action_spec_unbatched
    return TensorDictSequential(
        TensorDictModule(MLP(width, spec.shape[-1], num_cells=[32]), ["observation"], ["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=spec),
    )


def critic_of_actions(width=3, actions=1):
    return ValueOperator(MLP(width + actions, 1, num_cells=[32]), in_keys=["observation", "action"])


def critic_of_states(width=3):
    return ValueOperator(MLP(width, 1, num_cells=[32]), in_keys=["observation"])


def replay_buffer(size=2000, batch=64):
    return TensorDictReplayBuffer(
        pin_memory=False,
        prefetch=3,
        storage=LazyMemmapStorage(size),
        batch_size=batch,
    )


def learned(values, by=0.9):
    """Say whether losses are finite and came down."""
    told = np.array(values)
    return bool(np.isfinite(told).all() and told[-5:].mean() < by * told[:5].mean())


def optimised(loss, optimiser, buffer, updater=None, names=("loss_actor", "loss_qvalue")):
    sample = buffer.sample()
    losses = loss(sample)
    sum(losses[name] for name in names).backward()
    optimiser.step()
    optimiser.zero_grad()
    if updater is not None:
        updater.step()
    return losses.detach()


def train_off_policy(
    env, policy, loss, names, *, updater=None, optimiser=None, frames=800, updates=20, after=None
):
    """Collect, store and learn as the recipes do; give the losses by name."""
    collector = Collector(
        env,
        policy,
        init_random_frames=200,
        frames_per_batch=100,
        total_frames=frames,
        device="cpu",
    )
    collector.set_seed(0)
    buffer = replay_buffer()
    optimiser = optimiser or torch.optim.Adam(loss.parameters(), lr=1e-2)
    history = {name: [] for name in names}
    stored = 0
    for data in collector:
        collector.update_policy_weights_()
        # Random steps have nothing that a policy writes beside its action.
        data = data.select("observation", "action", "next", "collector").reshape(-1)
        buffer.extend(data)
        stored += data.numel()
        if after is not None:
            after(data.numel())
        if stored <= 200:
            continue
        for _ in range(updates):
            losses = optimised(loss, optimiser, buffer, updater, names)
            for name in names:
                history[name].append(losses[name].item())
    collector.shutdown()
    assert len(buffer) == frames
    ends = buffer[:]["next", "done"].sum()
    assert ends == frames // 40  # every episode has 40 steps
    return history


@torch.no_grad()
def evaluated(env, policy, episodes=2):
    """Give the mean return of episodes played without exploring."""
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
        env, actor, frames_per_batch=120, total_frames=3600, max_frames_per_traj=-1
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
                losses = loss(batch)
                (
                    losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                ).backward()
                optim.step()
                optim.zero_grad()
        collector.update_policy_weights_()
    collector.shutdown()

    assert returns[0] < 7 and np.mean(returns[-5:]) > 9


@sweep
def test_a2c():
    env = TransformedEnv(SerialEnv(4, buttons), Compose(RewardSum(), StepCounter()))
    actor, critic = choosing_agent(env)
    collector = SyncDataCollector(env, actor, frames_per_batch=40, total_frames=6000, prefetch=0)
    collector.set_seed(0)
    advantage = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
    loss = A2CLoss(actor, critic, loss_critic_type="l2", entropy_coeff=0.01, critic_coeff=0.25)
    optim = torch.optim.Adam(loss.parameters(), lr=1e-2)

    returns = []
    for data in collector:
        ended = data["next", "episode_reward"][data["next", "done"]]
        if len(ended):
            returns.append(ended.mean().item())
        with torch.no_grad():
            data = advantage(data)
        losses = loss(data.reshape(-1))
        (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
        nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
        optim.step()
        optim.zero_grad()
    collector.shutdown()

    assert returns[0] < 7.5 and np.mean(returns[-10:]) > 9


@sweep
def test_impala(opened):
    env = buttons()
    actor, critic = choosing_agent(env)
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
            losses = loss(batch)
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optim.step()
            optim.zero_grad()
    collector.shutdown()

    assert frames == 6400 and len(returns) == 640
    assert np.mean(returns[:40]) < 7.5 and np.mean(returns[-40:]) > 8


@sweep
def test_dqn():
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(RewardSum(), StepCounter()))
    env.set_seed(0)
    spec = env.action_spec
    value = QValueActor(MLP(4, 2, num_cells=[32, 32]), in_keys=["observation"], spec=spec)
    explore = EGreedyModule(annealing_num_steps=1500, eps_init=1.0, eps_end=0.05, spec=spec)
    collector = SyncDataCollector(
        env,
        TensorDictSequential(value, explore),
        frames_per_batch=50,
        total_frames=4000,
        device="cpu",
        storing_device="cpu",
        max_frames_per_traj=-1,
        init_random_frames=None,
    )
    buffer = TensorDictReplayBuffer(
        pin_memory=False, prefetch=0, storage=LazyTensorStorage(4000), batch_size=64
    )
    loss = DQNLoss(value_network=value, loss_function="l2", delay_value=True)
    loss.make_value_estimator(gamma=0.99)
    updater = HardUpdate(loss, value_network_update_interval=50)
    optim = torch.optim.Adam(loss.parameters(), lr=2.5e-3)

    returns = []
    for data in collector:
        returns += data["next", "episode_reward"][data["next", "done"]].tolist()
        buffer.extend(data.reshape(-1))
        explore.step(data.numel())
        for _ in range(10):
            losses = loss(buffer.sample())
            losses["loss"].backward()
            optim.step()
            optim.zero_grad()
            updater.step()
    collector.shutdown()

    assert np.mean(returns[-5:]) > 2 * np.mean(returns[:20])


# ------------------------------------------------------------------------------------- off-policy


@sweep
def test_ddpg():
    env = pendulum()
    actor, critic = fixed_actor(env), critic_of_actions()
    noise = AdditiveGaussianModule(
        spec=env.action_spec_unbatched, sigma_init=1.0, sigma_end=0.1, annealing_num_steps=500
    )
    loss = DDPGLoss(actor, critic, loss_function="l2", delay_actor=True, delay_value=True)
    loss.make_value_estimator(gamma=0.9)

    history = train_off_policy(
        env,
        TensorDictSequential(actor, noise),
        loss,
        ("loss_actor", "loss_value"),
        updater=SoftUpdate(loss, eps=0.95),
        after=noise.step,
    )

    assert learned(history["loss_value"])
    assert noise.sigma.item() == pytest.approx(0.1)
    assert evaluated(env, actor) < 0
    if not env.is_closed:
        env.close()


@sweep
def test_td3():
    env = pendulum()
    actor = fixed_actor(env)
    noise = AdditiveGaussianModule(spec=env.action_spec_unbatched, sigma_init=1.0, sigma_end=1.0)
    loss = TD3Loss(
        actor,
        critic_of_actions(),
        num_qvalue_nets=2,
        loss_function="l2",
        delay_actor=True,
        delay_qvalue=True,
        action_spec=env.action_spec_unbatched,
    )
    loss.make_value_estimator(gamma=0.9)

    history = train_off_policy(
        env,
        TensorDictSequential(actor, noise),
        loss,
        ("loss_actor", "loss_qvalue"),
        updater=SoftUpdate(loss, eps=0.95),
    )

    assert learned(history["loss_qvalue"])
    if not env.is_closed:
        env.close()


@sweep
@pytest.mark.parametrize("serial", [True, False])
def test_sac(serial, opened):
    env = opened(pendulum(serial=serial))
    actor = drawing_actor(env)
    loss = SACLoss(
        actor, critic_of_actions(), num_qvalue_nets=2, loss_function="l2", delay_qvalue=True
    )
    loss.make_value_estimator(gamma=0.9)
    critics = list(loss.qvalue_network_params.flatten_keys().values())
    actors = list(loss.actor_network_params.flatten_keys().values())
    optimiser = group_optimizers(
        torch.optim.Adam(actors, lr=1e-3),
        torch.optim.Adam(critics, lr=1e-2),
        torch.optim.Adam([loss.log_alpha], lr=1e-3),
    )

    history = train_off_policy(
        env,
        actor,
        loss,
        ("loss_actor", "loss_qvalue", "loss_alpha"),
        updater=SoftUpdate(loss, eps=0.95),
        optimiser=optimiser,
    )

    assert learned(history["loss_qvalue"])
    assert evaluated(env, actor) < 0


@sweep
def test_discrete_sac():
    env = TransformedEnv(SerialEnv(2, buttons), Compose(InitTracker(), RewardSum(), StepCounter()))
    spec = env.action_spec_unbatched
    actor = ProbabilisticActor(
        TensorDictModule(MLP(2, 2, num_cells=[16]), ["observation"], ["logits"]),
        spec=spec,
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=OneHotCategorical,
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=False,
    )
    values = TensorDictModule(MLP(2, 2, num_cells=[16]), ["observation"], ["action_value"])
    loss = DiscreteSACLoss(
        actor_network=actor,
        qvalue_network=values,
        action_space=spec,
        num_actions=2,
        num_qvalue_nets=2,
        target_entropy_weight=0.2,
        loss_function="l2",
    )
    loss.make_value_estimator(gamma=0.5)
    updater = SoftUpdate(loss, eps=0.9)
    optim = torch.optim.Adam(loss.parameters(), lr=1e-2)
    collector = SyncDataCollector(
        env, actor, init_random_frames=100, frames_per_batch=100, total_frames=1500
    )
    collector.set_seed(0)
    buffer = replay_buffer()

    for data in collector:
        buffer.extend(data.select("observation", "action", "next").reshape(-1))
        for _ in range(20):
            losses = optimised(
                loss, optim, buffer, updater, ("loss_actor", "loss_qvalue", "loss_alpha")
            )
    collector.shutdown()

    assert torch.isfinite(losses["loss_qvalue"]) and steps_follow_each_other(data)
    assert evaluated(env, actor) > 9


@sweep
def test_crossq():
    env = pendulum()
    actor = drawing_actor(env)
    net = nn.Sequential(
        BatchRenorm1d(4, warmup_steps=100),
        nn.Linear(4, 32),
        nn.Tanh(),
        BatchRenorm1d(32, warmup_steps=100),
        nn.Linear(32, 1),
    )

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, observation, action):
            return self.net(torch.cat([observation, action], -1))

    critic = ValueOperator(Joined(), in_keys=["observation", "action"])
    loss = CrossQLoss(actor, critic, num_qvalue_nets=2, loss_function="l2")
    loss.make_value_estimator(gamma=0.9)

    told = train_off_policy(env, actor, loss, ("loss_actor", "loss_qvalue", "loss_alpha"))

    assert learned(told["loss_qvalue"])
    if not env.is_closed:
        env.close()


@sweep
def test_redq():
    env = pendulum()
    actor = drawing_actor(env)
    loss = REDQLoss(
        actor, critic_of_actions(), num_qvalue_nets=4, sub_sample_len=2, delay_qvalue=True
    )
    loss.make_value_estimator(gamma=0.9)

    history = train_off_policy(
        env,
        actor,
        loss,
        ("loss_actor", "loss_qvalue", "loss_alpha"),
        updater=SoftUpdate(loss, eps=0.95),
    )

    assert learned(history["loss_qvalue"])
    if not env.is_closed:
        env.close()


# ------------------------------------------------------------------------------- from recorded data


def recorded(frames=600):
    """Record a random policy, as a data set that nobody adds to."""
    env = pendulum()
    collector = SyncDataCollector(env, None, frames_per_batch=frames, total_frames=frames)
    (data,) = list(collector)
    collector.shutdown()
    buffer = replay_buffer(frames)
    buffer.extend(data.reshape(-1))
    return env, buffer


@sweep
def test_iql():
    env, buffer = recorded()
    actor = drawing_actor(env)
    loss = IQLLoss(
        actor,
        critic_of_actions(),
        value_network=critic_of_states(),
        loss_function="l2",
        temperature=3.0,
        expectile=0.7,
    )
    loss.make_value_estimator(gamma=0.9)
    updater = SoftUpdate(loss, tau=0.05)
    optim = torch.optim.Adam(loss.parameters(), lr=1e-2)

    history = [
        optimised(loss, optim, buffer, updater, ("loss_actor", "loss_qvalue", "loss_value"))
        for _ in range(100)
    ]

    assert learned([losses["loss_qvalue"].item() for losses in history])
    assert evaluated(env, actor) < 0


@sweep
def test_cql():
    env, buffer = recorded()
    actor = drawing_actor(env)
    loss = CQLLoss(
        actor,
        critic_of_actions(),
        loss_function="l2",
        action_spec=env.action_spec_unbatched,
        with_lagrange=True,
        num_random=4,
    )
    loss.make_value_estimator(gamma=0.9)
    updater = SoftUpdate(loss, tau=0.05)
    optim = torch.optim.Adam(loss.parameters(), lr=1e-2)
    names = ("loss_actor", "loss_qvalue", "loss_cql", "loss_alpha", "loss_alpha_prime")

    told = [optimised(loss, optim, buffer, updater, names) for _ in range(60)]

    assert learned([losses["loss_qvalue"].item() for losses in told])
    assert all(losses[name].isfinite() for losses in told for name in names)


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


@sweep
def test_decision_transformer():
    frames, length = 4, 20

    def make(target=-50.0):
        env = TransformedEnv(GymEnv("Pendulum-v1"))
        env.append_transform(
            RewardScaling(loc=0.0, scale=0.1, in_keys=["reward"], standard_normal=False)
        )
        env.append_transform(TargetReturn(target, out_keys=["return_to_go"], mode="reduce"))
        env.append_transform(TensorDictPrimer(action=env.base_env.action_spec))
        env.append_transform(DoubleToFloat())
        env.append_transform(
            ObservationNorm(loc=0.0, scale=1.0, in_keys=["observation"], standard_normal=True)
        )
        names = ["observation", "action", "return_to_go"]
        stacks = [f"{name}_cat" for name in names]
        env.append_transform(UnsqueezeTransform(-2, in_keys=names, out_keys=stacks))
        env.append_transform(CatFrames(in_keys=stacks, N=frames, dim=-2, padding="constant"))
        env.append_transform(RewardSum())
        return env

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
    env = make()
    check_env_specs(env)
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

    history = []
    for _ in range(60):
        value = loss(buffer.sample())["loss"]
        value.backward()
        optim.step()
        optim.zero_grad()
        history.append(value.item())

    def last(td):  # acts by the last of the window
        return td.set("action", actor(td.clone())["action"][..., -1, :])

    with torch.no_grad():
        played = env.rollout(8, last)

    sums = episodes["next", "reward"].flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(episodes["next", "return_to_go"], sums)
    assert learned(history, by=1.0)
    assert played["action_cat"].shape == (8, frames, 1)
    torch.testing.assert_close(
        played["return_to_go"][1:], -50.0 * 1.0 - played["next", "reward"][:-1].cumsum(0)
    )


# ------------------------------------------------------------------------------------ a world model


STATE, BELIEF = 4, 6


def world_of(env, seen):
    prior = RSSMPrior(
        hidden_dim=BELIEF, rnn_hidden_dim=BELIEF, state_dim=STATE, action_spec=env.action_spec
    )
    posterior = RSSMPosterior(hidden_dim=BELIEF, state_dim=STATE)
    encoder = MLP(seen, 8, num_cells=[8])
    decoder = MLP(STATE + BELIEF, seen, num_cells=[8])
    reward = MLP(STATE + BELIEF, 1, num_cells=[8])
    rollout = RSSMRollout(
        TensorDictModule(
            prior,
            in_keys=["state", "belief", "action"],
            out_keys=[
                ("next", "prior_mean"),
                ("next", "prior_std"),
                "_",
                ("next", "belief"),
            ],
        ),
        TensorDictModule(
            posterior,
            in_keys=[("next", "belief"), ("next", "encoded_latents")],
            out_keys=[("next", "posterior_mean"), ("next", "posterior_std"), ("next", "state")],
        ),
    )
    transition = TensorDictSequential(
        TensorDictModule(encoder, [("next", "observation")], [("next", "encoded_latents")]),
        rollout,
        ProbabilisticTensorDictSequential(
            TensorDictModule(decoder, [("next", "state"), ("next", "belief")], ["loc"]),
            ProbabilisticTensorDictModule(
                in_keys=["loc"],
                out_keys=[("next", "reco_observation")],
                distribution_class=IndependentNormal,
                distribution_kwargs={"scale": 1.0, "event_dim": 1},
            ),
        ),
    )
    rewards = ProbabilisticTensorDictSequential(
        TensorDictModule(reward, [("next", "state"), ("next", "belief")], [("next", "loc")]),
        ProbabilisticTensorDictModule(
            in_keys=[("next", "loc")],
            out_keys=[("next", "reward")],
            distribution_class=IndependentNormal,
            distribution_kwargs={"scale": 1.0, "event_dim": 1},
        ),
    )
    parts = {"prior": prior, "posterior": posterior, "encoder": encoder, "decoder": decoder}
    return WorldModelWrapper(transition, rewards), {**parts, "reward": reward}


def imagination_of(env, parts):
    world = WorldModelWrapper(
        TensorDictSequential(
            TensorDictModule(
                parts["prior"], ["state", "belief", "action"], ["_", "_", "state", "belief"]
            )
        ),
        TensorDictModule(parts["reward"], ["state", "belief"], ["reward"]),
    )
    imagined = DreamerEnv(
        world_model=world,
        prior_shape=torch.Size([STATE]),
        belief_shape=torch.Size([BELIEF]),
        obs_decoder=TensorDictModule(parts["decoder"], ["state", "belief"], ["reco_observation"]),
    )
    imagined.set_specs_from_env(env)
    return imagined


@sweep
@pytest.mark.filterwarnings("ignore:set_seed.. of DreamerEnv:UserWarning")
@pytest.mark.filterwarnings("ignore:(?s)the data of DreamerEnv:envkit.errors.EnvSpecWarning")
def test_dreamer():
    env = TransformedEnv(
        SerialEnv(1, EnvCreator(lambda: GymEnv("Pendulum-v1"))),
        Compose(DoubleToFloat(), RewardSum(), FrameSkipTransform(2), StepCounter(30)),
    )
    env.append_transform(
        TensorDictPrimer(
            random=False,
            default_value=0,
            state=Unbounded((STATE,)),
            belief=Unbounded((BELIEF,)),
        )
    )
    env.set_seed(0)
    check_env_specs(env)
    single = TransformedEnv(GymEnv("Pendulum-v1"), DoubleToFloat())
    single.append_transform(
        TensorDictPrimer(
            random=False, default_value=0, state=Unbounded((STATE,)), belief=Unbounded((BELIEF,))
        )
    )
    world, parts = world_of(single, 3)
    imagined = imagination_of(single, parts)
    check_env_specs(imagined)
    net = DreamerActor(out_features=1, depth=1, num_cells=8, activation_class=nn.ELU)

    def acting():
        return ProbabilisticTensorDictSequential(
            TensorDictModule(net, ["state", "belief"], ["loc", "scale"]),
            ProbabilisticTensorDictModule(
                in_keys=["loc", "scale"],
                out_keys=["action"],
                default_interaction_type=InteractionType.RANDOM,
                distribution_class=TanhNormal,
                distribution_kwargs={"tanh_loc": True},
            ),
        )

    dreaming = acting()
    awake = SafeSequential(
        SafeModule(parts["encoder"], ["observation"], ["encoded_latents"]),
        SafeModule(parts["posterior"], ["belief", "encoded_latents"], ["_", "_", "state"]),
        acting(),
        SafeModule(
            parts["prior"],
            ["state", "belief", "action"],
            ["_", "_", "_", ("next", "belief")],
        ),
    )
    value = ProbabilisticTensorDictSequential(
        TensorDictModule(MLP(STATE + BELIEF, 1, num_cells=[8]), ["state", "belief"], ["loc"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc"],
            out_keys=["state_value"],
            distribution_class=IndependentNormal,
            distribution_kwargs={"scale": 1.0, "event_dim": 1},
        ),
    )
    with torch.no_grad():
        awake(env.reset()[0])
        value(imagined.fake_tensordict())
    model_loss = DreamerModelLoss(world)
    model_loss.set_keys(pixels="observation", reco_pixels="reco_observation")
    actor_loss = DreamerActorLoss(dreaming, value, imagined, imagination_horizon=5)
    actor_loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.9, lmbda=0.9)
    value_loss = DreamerValueLoss(value)
    optims = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in (world, dreaming, value)]
    collector = SyncDataCollector(
        env,
        awake,
        init_random_frames=60,
        frames_per_batch=60,
        total_frames=240,
        storing_device="cpu",
    )
    collector.set_seed(0)
    buffer = TensorDictReplayBuffer(
        prefetch=0,
        storage=LazyMemmapStorage(240, ndim=2),
        sampler=SliceSampler(
            slice_len=10, strict_length=False, traj_key=("collector", "traj_ids"), cache_values=True
        ),
        batch_size=60,
    )

    history = {"model": [], "actor": [], "value": []}
    kept = ("observation", "action", "state", "belief", "collector", "next", "done", "terminated")
    for data in collector:
        buffer.extend(data.select(*kept).exclude(("next", "state")))
        for _ in range(15):
            sample = buffer.sample().reshape(-1, 10)
            losses, sample = model_loss(sample)
            total = (
                losses["loss_model_kl"] + losses["loss_model_reco"] + losses["loss_model_reward"]
            )
            optims[0].zero_grad()
            total.backward()
            optims[0].step()
            acted, dream = actor_loss(sample.detach().reshape(-1))
            optims[1].zero_grad()
            acted["loss_actor"].backward()
            optims[1].step()
            judged, _ = value_loss(dream.detach())
            optims[2].zero_grad()
            judged["loss_value"].backward()
            optims[2].step()
            history["model"].append(total.item())
            history["actor"].append(acted["loss_actor"].item())
            history["value"].append(judged["loss_value"].item())
    collector.shutdown()

    assert learned(history["model"])
    assert np.isfinite(history["actor"] + history["value"]).all()
    assert dream.shape[-1] == 5


@sweep
def test_dreams_are_decoded(tmp_path):
    single = TransformedEnv(GymEnv("Pendulum-v1"), DoubleToFloat())
    _, parts = world_of(single, 3)
    imagined = imagination_of(single, parts)

    shown = imagined.append_transform(DreamerDecoder())
    data = shown.rollout(3, break_when_any_done=False)

    torch.testing.assert_close(
        data["next", "reco_observation"][-1],
        parts["decoder"](torch.cat([data["next", "state"][-1], data["next", "belief"][-1]], -1)),
    )


# --------------------------------------------------------------------------- arcade games and videos


@sweep
@pytest.mark.parametrize("batched", [SerialEnv, ParallelEnv])
def test_frames_of_games_are_prepared_as_for_arcade_games(opened, batched, rendering):
    def make(is_test=False):
        env = GymEnv("CartPole-v1", frame_skip=2, from_pixels=True, pixels_only=False)
        env = TransformedEnv(env)
        env.append_transform(NoopResetEnv(noops=5, random=True))
        return env

    env = opened(TransformedEnv(batched(2, EnvCreator(partial(make)), serial_for_single=True)))
    env.append_transform(RenameTransform(in_keys=["pixels"], out_keys=["pixels_int"]))
    env.append_transform(ToTensorImage(in_keys=["pixels_int"], out_keys=["pixels"]))
    env.append_transform(GrayScale())
    env.append_transform(Resize(20, 20))
    env.append_transform(CatFrames(N=4, dim=-3))
    env.append_transform(RewardSum())
    env.append_transform(StepCounter(max_steps=30))
    env.append_transform(SignTransform(in_keys=["reward"]))
    env.append_transform(DoubleToFloat())
    env.set_seed(0)
    net = ConvNet(num_cells=[8, 8], kernel_sizes=[4, 3], strides=[2, 1])
    feature = TensorDictModule(net, ["pixels"], ["embedding"])

    data = env.rollout(12, break_when_any_done=False)

    assert data["pixels"].shape == (2, 12, 4, 20, 20)
    assert (
        data["pixels"][:, 1:, 3].equal(data["next", "pixels"][:, :-1, 3])
        or data["next", "done"].any()
    )
    assert (data["next", "reward"] == 1).all()  # of two frames each; the sum is of what was paid
    assert data["next", "episode_reward"].max() > data["next", "step_count"].max()
    assert feature(data[:, 0])["embedding"].shape[0] == 2


@sweep
@pytest.mark.parametrize("video_format", ["pt", "memmap"])
def test_videos_of_evaluations_are_logged(tmp_path, rendering, video_format):
    logger = CSVLogger("run", log_dir=str(tmp_path), video_format=video_format)
    env = TransformedEnv(
        SerialEnv(
            1, EnvCreator(lambda: GymEnv("CartPole-v1", from_pixels=True, pixels_only=False))
        ),
        Compose(StepCounter(12), RewardSum()),
    )
    env.insert_transform(0, VideoRecorder(logger, tag="rendering/test", in_keys=["pixels"], skip=1))

    def dump(module):
        if isinstance(module, VideoRecorder):
            module.dump()

    env.rollout(8, break_when_any_done=False)
    env.apply(dump)

    assert [file for file in tmp_path.rglob(f"*.{video_format}") if file.is_file()]
