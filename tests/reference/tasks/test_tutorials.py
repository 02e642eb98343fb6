"""TorchRL's tutorials on algorithms, buffers, memory and several agents, each as a small program."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn

import envkit
from envkit import (
    Bounded,
    CatFrames,
    CatTensors,
    Collector,
    Compose,
    Composite,
    DMControlEnv,
    DoubleToFloat,
    EnvBase,
    EnvCreator,
    ExplorationType,
    GrayScale,
    GymEnv,
    InitTracker,
    MultiaSyncDataCollector,
    ObservationNorm,
    ParallelEnv,
    RandomPolicy,
    Resize,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    ToTensorImage,
    Transform,
    TransformedEnv,
    Unbounded,
    UnsqueezeTransform,
    check_env_specs,
    set_exploration_type,
    split_trajectories,
    step_mdp,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.checkpoint import Checkpoint, GlobalRNGState
    from torchrl.collectors import Evaluator
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
        ConvNet,
        DuelingCnnDQNet,
        EGreedyModule,
        LSTMModule,
        MultiAgentMLP,
        OrnsteinUhlenbeckProcessModule,
        ProbabilisticActor,
        QValueActor,
        QValueModule,
        TanhModule,
        TanhNormal,
        ValueOperator,
        set_recurrent_mode,
    )
    from torchrl.objectives import (
        ClipPPOLoss,
        DDPGLoss,
        DQNLoss,
        SoftUpdate,
        ValueEstimators,
    )
    from torchrl.objectives.value import GAE
from tests.reference.tasks.actors import tanh_actor
from tests.reference.tasks.continuity import steps_follow_each_other

pytestmark = pytest.mark.filterwarnings(
    r"ignore::DeprecationWarning:torchrl\..*", r"ignore::FutureWarning:torchrl\..*"
)


def sweep(test):
    return pytest.mark.slow(pytest.mark.sweep(test))


# ------------------------------------------------------------------------- an env of one's own dynamics


class Spring(EnvBase):
    """A mass on a spring; its stiffness is data, and so each row may have another."""

    metadata = {"render_modes": []}  # noqa: RUF012
    batch_locked = False

    def __init__(self, td_params=None, seed=None, device="cpu"):
        if td_params is None:
            td_params = self.gen_params()
        super().__init__(device=device, batch_size=[])
        self._make_spec(td_params)
        if seed is None:
            seed = torch.empty((), dtype=torch.int64).random_().item()
        self.set_seed(seed)

    @staticmethod
    def gen_params(stiffness=4.0, batch_size=()):
        params = TensorDict({"params": TensorDict({"k": stiffness, "dt": 0.05})})
        return params.expand(batch_size).contiguous() if batch_size else params

    def _make_spec(self, td_params):
        shape = td_params.shape
        self.observation_spec = Composite(
            place=Bounded(-3.0, 3.0, shape, dtype=torch.float32),
            speed=Unbounded(shape, dtype=torch.float32),
            params=self.composite_of(td_params["params"]),
            shape=shape,
        )
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Bounded(-1.0, 1.0, (1,), dtype=torch.float32)
        self.reward_spec = Unbounded((*shape, 1))

    @staticmethod
    def composite_of(td):
        leaves = {
            key: Unbounded(value.shape, dtype=value.dtype, device=value.device)
            for key, value in td.items()
        }
        return Composite(leaves, shape=td.shape)

    def _reset(self, tensordict=None):
        if tensordict is None or tensordict.is_empty():
            tensordict = self.gen_params(batch_size=self.batch_size)
        shape = tensordict.shape
        place = torch.rand(shape, generator=self.rng, device=self.device) * 2 - 1
        start = {"place": place, "speed": torch.zeros(shape), "params": tensordict["params"]}
        return TensorDict(start, batch_size=shape)

    @staticmethod
    def _step(tensordict):
        place, speed = tensordict["place"], tensordict["speed"]
        stiffness, dt = tensordict["params", "k"], tensordict["params", "dt"]
        pull = tensordict["action"].squeeze(-1).clamp(-1, 1)
        speed = speed + (pull - stiffness * place) * dt
        place = (place + speed * dt).clamp(-3, 3)
        reward = -(place**2 + 0.1 * speed**2).view(*tensordict.shape, 1)
        return TensorDict(
            {
                "place": place,
                "speed": speed,
                "params": tensordict["params"],
                "reward": reward,
                "done": torch.zeros_like(reward, dtype=torch.bool),
            },
            tensordict.shape,
        )

    def _set_seed(self, seed):
        self.rng = torch.Generator().manual_seed(seed)


class Squared(Transform):
    """Shows the square of an entry; its spec is a new one."""

    def _apply_transform(self, obs):
        return obs**2

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec):
        shown = observation_spec.clone()
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            leaf = observation_spec[source]
            shown[target] = Bounded(0.0, 9.0, leaf.shape, dtype=leaf.dtype, device=leaf.device)
        return Composite(dict(shown.items()), shape=observation_spec.shape)


def spring_with_transforms():
    env = TransformedEnv(
        Spring(seed=0),
        UnsqueezeTransform(dim=-1, in_keys=["place", "speed"], in_keys_inv=["place", "speed"]),
    )
    env.append_transform(Squared(in_keys=["place"], out_keys=["square"]))
    env.append_transform(
        CatTensors(
            in_keys=["square", "place", "speed"], dim=-1, out_key="observation", del_keys=False
        )
    )
    return env


@sweep
def test_an_env_of_ones_own_is_rolled_out_in_any_batch():
    env = spring_with_transforms()
    check_env_specs(env)

    data = env.rollout(
        20, auto_reset=False, tensordict=env.reset(Spring.gen_params(batch_size=[7]))
    )

    assert data.shape == (7, 20)
    assert data["observation"].equal(torch.cat([data[k] for k in ("place", "speed", "square")], -1))
    torch.testing.assert_close(data["square"], data["place"] ** 2)
    assert env.observation_spec["square"].space.low.eq(0).all()


def test_a_policy_learns_through_dynamics_of_ones_own():
    env = spring_with_transforms()
    net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    optim = torch.optim.Adam(policy.parameters(), lr=2e-2)

    means = []
    for _ in range(30):
        start = env.reset(env.base_env.gen_params(stiffness=1.0, batch_size=[32]))
        data = env.rollout(30, policy, tensordict=start, auto_reset=False)
        mean = data["next", "reward"].mean()
        (-mean).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        means.append(mean.item())

    assert sum(means[-5:]) > sum(means[:5])


# ----------------------------------------------------------------------------------- PPO, DQN, DDPG


@sweep
@pytest.mark.filterwarnings("ignore:.*begins new trajectories:UserWarning")
def test_ppo():
    base = GymEnv("InvertedDoublePendulum-v5")
    env = TransformedEnv(
        base, Compose(ObservationNorm(in_keys=["observation"]), DoubleToFloat(), StepCounter())
    )
    env.transform[0].init_stats(num_iter=200, reduce_dim=0, cat_dim=0)
    check_env_specs(env)
    actor_net = nn.Sequential(
        nn.LazyLinear(32), nn.Tanh(), nn.LazyLinear(2 * env.action_spec.shape[-1])
    )
    net = nn.Sequential(actor_net, NormalParamExtractor())
    policy = tanh_actor(net, env.action_spec, return_log_prob=True)
    value = ValueOperator(
        nn.Sequential(nn.LazyLinear(32), nn.Tanh(), nn.LazyLinear(1)), ["observation"]
    )
    policy(env.reset())
    value(env.reset())
    collector = SyncDataCollector(
        env, policy, frames_per_batch=200, total_frames=2000, split_trajs=False, device="cpu"
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(max_size=200), sampler=SamplerWithoutReplacement()
    )
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=value, average_gae=True)
    loss_module = ClipPPOLoss(
        actor_network=policy,
        critic_network=value,
        clip_epsilon=0.2,
        entropy_bonus=True,
        entropy_coeff=1e-4,
        critic_coeff=1.0,
        loss_critic_type="smooth_l1",
    )
    optim = torch.optim.Adam(loss_module.parameters(), 3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 10, 0.0)

    lengths = []
    for data in collector:
        for _ in range(5):
            advantage(data)
            buffer.extend(data.reshape(-1).cpu())
            for _ in range(200 // 64):
                losses = loss_module(buffer.sample(64))
                total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                total.backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
                optim.step()
                optim.zero_grad()
        lengths.append(data.numel() / data["next", "done"].sum().item())
        assert steps_follow_each_other(data)
        if len(lengths) % 3 == 1:
            with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
                played = env.rollout(1000, policy)
        scheduler.step()

    assert torch.isfinite(total)
    assert played["step_count"].max().item() == played.shape[0] - 1
    assert sum(lengths[-3:]) > sum(lengths[:3])


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
            value = loss(buffer.sample())["loss"]
            value.backward()
            optim.step()
            optim.zero_grad()
            updater.step()
        explore.step(data.numel())
        collector.update_policy_weights_()
    collector.shutdown()

    seen = torch.cat(seen, 1)
    assert stats["loc"].shape == (4, 1, 1)
    assert seen.shape == (2, 48, 4, 16, 16)
    assert seen[:, :, 3].mean().abs() < 1.0 and seen.std() > 0.1
    assert torch.isfinite(value) and steps_follow_each_other(data, "pixels")


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
    critic = ValueOperator(
        MLP(in_features=4, out_features=1, num_cells=[16]), ["observation", "action"]
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
    loss = DDPGLoss(actor, critic, delay_actor=True, delay_value=True)
    loss.make_value_estimator(ValueEstimators.TD0, gamma=0.99)
    updater = SoftUpdate(loss, tau=0.005)
    optim = torch.optim.Adam(loss.parameters(), 1e-3)

    frames = 0
    for data in collector:
        collector.update_policy_weights_()
        frames += data.numel()
        buffer.extend(data.reshape(-1).cpu())
        for _ in range(4):
            losses = loss(buffer.sample())
            (losses["loss_actor"] + losses["loss_value"]).backward()
            optim.step()
            optim.zero_grad()
            updater.step()
        explore[1].step(data.numel())
    collector.shutdown()

    stored = buffer[:]
    assert frames == 240 and len(buffer) == 240
    assert torch.isfinite(losses["loss_value"]) and torch.isfinite(losses["loss_actor"])
    assert steps_follow_each_other(stored)
    assert stored["next", "reward"].max() <= 0
    assert stored["action"].abs().max() <= 2
    assert stored["observation"].mean(0).abs().max() < 5  # normalised by what was measured


# ------------------------------------------------------------------------------------------- memory


def remembering_policy(env, size=8):
    lstm = LSTMModule(input_size=4, hidden_size=size, in_key="observation", out_key="embed")
    head = TensorDictModule(MLP(size, 2, num_cells=[8]), ["embed"], ["action_value"])
    return lstm, head, QValueModule(spec=env.action_spec)


@sweep
def test_recurrent_dqn(rendering):
    env = TransformedEnv(
        GymEnv("CartPole-v1", from_pixels=True),
        Compose(
            ToTensorImage(),
            GrayScale(),
            Resize(12, 12),
            StepCounter(),
            InitTracker(),
            RewardScaling(loc=0.0, scale=0.1),
            ObservationNorm(standard_normal=True, in_keys=["pixels"]),
        ),
    )
    env.transform[-1].init_stats(20, reduce_dim=[0, 1, 2], cat_dim=0, keep_dims=[0])
    feature = TensorDictModule(
        ConvNet(
            num_cells=[4, 8],
            squeeze_output=True,
            aggregator_class=nn.AdaptiveAvgPool2d,
            aggregator_kwargs={"output_size": (1, 1)},
        ),
        in_keys=["pixels"],
        out_keys=["embed"],
    )
    width = feature(env.reset())["embed"].shape[-1]
    lstm = LSTMModule(input_size=width, hidden_size=8, in_key="embed", out_key="embed")
    env.append_transform(lstm.make_tensordict_primer())
    values = TensorDictModule(MLP(8, 2, num_cells=[8]), ["embed"], ["action_value"])
    greedy = QValueModule(action_space=None, spec=env.action_spec)
    explore = EGreedyModule(annealing_num_steps=1000, spec=env.action_spec, eps_init=0.2)
    acting = TensorDictSequential(feature, lstm, values, greedy, explore)
    trained = TensorDictSequential(feature, lstm, values, greedy)
    loss = DQNLoss(trained, action_space=env.action_spec, delay_value=True)
    updater = SoftUpdate(loss, eps=0.95)
    optim = torch.optim.Adam(trained.parameters(), lr=3e-3)
    collector = SyncDataCollector(env, acting, frames_per_batch=25, total_frames=100)
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(100), batch_size=4, prefetch=2)

    batches = []
    for data in collector:
        batches.append(data)
        buffer.extend(data.unsqueeze(0).to_tensordict().cpu())
        for _ in range(4):
            with set_recurrent_mode(True):
                value = loss(buffer.sample())
            value["loss"].backward()
            optim.step()
            optim.zero_grad()
        explore.step(data.numel())
        updater.step()
    collector.shutdown()

    assert collector.total_frames == 100
    state, key = torch.cat(batches), "recurrent_state_h"
    begins = state["is_init"].flatten()
    assert begins[0] and not state[key][begins].any()
    carried = ~begins[1:]
    assert state[key][1:][carried].equal(state["next", key][:-1][carried])
    assert torch.isfinite(value["loss"]) and steps_follow_each_other(state, "pixels")


@sweep
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

    data = next(iter(collector))
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


# ------------------------------------------------------------------------------- tasks and buffers


@sweep
@pytest.mark.parametrize("batched", [SerialEnv, ParallelEnv])
def test_two_tasks_are_played_side_by_side(opened, batched):
    def make(domain, task, name):
        env = DMControlEnv(domain, task)
        names = list(env.observation_spec.keys())
        return TransformedEnv(
            env,
            Compose(
                CatTensors(names, f"observation_{name}", del_keys=False),
                CatTensors(names, "observation"),
                DoubleToFloat(
                    in_keys=[f"observation_{name}", "observation"], in_keys_inv=["action"]
                ),
            ),
        )

    stand, walk = partial(make, "walker", "stand", "stand"), partial(make, "walker", "walk", "walk")
    common = TensorDictModule(nn.Linear(24, 8), ["observation"], ["hidden"])
    heads = [
        TensorDictModule(MLP(32, 6, num_cells=[8]), [f"observation_{name}", "hidden"], ["action"])
        for name in ("stand", "walk")
    ]
    policy = TensorDictSequential(common, *heads, partial_tolerant=True)
    env = opened(batched(2, [stand, walk]))

    root = policy(env.reset())
    stepped = env.step(root)
    data = env.rollout(6, policy=policy, return_contiguous=False)

    assert not env._single_task
    assert isinstance(root, LazyStackedTensorDict)
    assert "observation_stand" in root[0].keys() and "observation_walk" in root[1].keys()
    assert "observation_walk" not in root[0].keys()
    assert stepped["next", "reward"].shape == (2, 1)
    assert data.shape == (2, 6)
    torch.testing.assert_close(
        data[1]["action"], policy(data[1].select("observation", "observation_walk"))["action"]
    )


@sweep
def test_buffers_hold_what_collectors_give(tmp_path):
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), StepCounter(9))
    collector = SyncDataCollector(
        env, RandomPolicy(env.action_spec), frames_per_batch=40, total_frames=80
    )
    plain = ReplayBuffer(storage=LazyMemmapStorage(80, scratch_dir=tmp_path), batch_size=8)
    sampler = SamplerWithoutReplacement()
    once = TensorDictReplayBuffer(storage=LazyTensorStorage(80), sampler=sampler, batch_size=20)
    slices = TensorDictReplayBuffer(
        storage=LazyTensorStorage(80),
        sampler=SliceSampler(num_slices=5, traj_key=("collector", "traj_ids"), strict_length=True),
        batch_size=20,
    )
    pairs = TensorDictReplayBuffer(storage=LazyTensorStorage(80, ndim=2), batch_size=8)

    for data in collector:
        for buffer in (plain, once, slices):
            buffer.extend(data.reshape(-1))
        pairs.extend(data)
    collector.shutdown()
    seen = torch.cat([sample["index"] for sample in [once.sample() for _ in range(4)]])

    assert len(plain) == 80 and plain.sample()["observation"].shape == (8, 4)
    assert sorted(seen.tolist()) == list(range(80))
    drawn = slices.sample().reshape(5, 4)
    assert (drawn["step_count"].diff(dim=1) == 1).all()
    assert pairs.storage.shape == (2, 40) or len(pairs) == 80


@sweep
def test_trajectories_are_taken_apart_and_collected_whole():
    env = GymEnv("CartPole-v1")
    env.set_seed(0)
    policy = RandomPolicy(env.action_spec)
    collector = SyncDataCollector(env, policy, frames_per_batch=200, total_frames=-1)
    data = next(iter(collector))
    whole = SyncDataCollector(env, policy, frames_per_batch=200, total_frames=-1, trajs_per_batch=5)
    into = ReplayBuffer(storage=LazyTensorStorage(100))

    padded = split_trajectories(data)
    nested = split_trajectories(data, as_nested=True)
    episodes = next(iter(whole))
    into.extend(episodes)
    collector.shutdown()
    whole.shutdown()

    ids = data["collector", "traj_ids"]
    lengths = torch.bincount(ids)[ids.unique()]
    assert padded["collector", "mask"].sum(-1).tolist() == lengths.tolist()
    assert padded.shape == (len(lengths), lengths.max())
    assert [len(row) for row in nested["observation"].unbind()] == lengths.tolist()
    assert episodes.shape[0] == 5
    last = episodes["collector", "mask"].sum(-1) - 1
    assert episodes["next", "done"][torch.arange(5), last].all()
    assert len(into) == 5 and into.sample(3).shape == (3, episodes.shape[1])


@sweep
def test_next_observations_are_not_stored_twice():
    from torchrl.envs.transforms import NextStateReconstructor

    full = SyncDataCollector(lambda: GymEnv("CartPole-v1"), frames_per_batch=200, total_frames=200)
    short = SyncDataCollector(
        create_env_fn=lambda: GymEnv("CartPole-v1"),
        frames_per_batch=200,
        total_frames=200,
        compact_obs=True,
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=SliceSampler(slice_len=5, traj_key=("collector", "traj_ids")),
        transform=NextStateReconstructor(),
        batch_size=40,
    )
    value = TensorDictModule(
        lambda x: x.norm(dim=-1, keepdim=True), ["observation"], ["state_value"]
    )
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=value, shifted=False)

    whole, compact = next(iter(full)), next(iter(short))
    full.shutdown()
    short.shutdown()
    buffer.extend(compact)
    sample = buffer.sample()
    advantages = gae(sample.reshape(-1, 5).clone())["advantage"]

    assert set(whole.keys(True, True)) - set(compact.keys(True, True)) == {("next", "observation")}
    assert compact.bytes() < whole.bytes()
    steps = sample.reshape(-1, 5)
    assert steps["next", "observation"][:, :-1].equal(steps["observation"][:, 1:])
    assert steps["next", "observation"][:, -1].isnan().all()
    assert advantages.isfinite().all()


# ------------------------------------------------------------------------ evaluation and checkpoints


@sweep
def test_an_evaluator_plays_episodes_beside_training():
    def make():
        return TransformedEnv(
            GymEnv("CartPole-v1"), Compose(RewardSum(), StepCounter(max_steps=30))
        )

    def actor():
        return QValueActor(
            MLP(4, 2, num_cells=[8]), in_keys=["observation"], spec=make().action_spec
        )

    trained, results = actor(), []
    evaluator = Evaluator(
        make,
        actor(),
        num_trajectories=3,
        max_steps=30,
        collector_cls=envkit.Collector,
        dump_video=False,  # which calls what is private to TorchRL's collectors
        on_result=results.append,
    )

    report = evaluator.evaluate(trained, step=10)
    evaluator.trigger_eval(trained, step=20)
    waited = evaluator.wait(timeout=60)
    evaluator.shutdown()

    assert report["eval/num_episodes"] == 3
    assert report["eval/reward"] == pytest.approx(report["eval/episode_length"])  # 1 for each step
    assert waited["eval/step"] == 20
    assert [int(result["eval/step"]) for result in results][-1] == 20


@sweep
def test_a_checkpoint_holds_policy_optimiser_env_and_collector(tmp_path):
    def parts():
        env = TransformedEnv(
            SerialEnv(2, lambda: GymEnv("Pendulum-v1")), envkit.VecNorm(in_keys=["observation"])
        )
        policy = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
        collector = Collector(
            env, policy, frames_per_batch=8, total_frames=-1, record_for_resume=True
        )
        optim = torch.optim.Adam(policy.parameters(), 1e-2)
        return policy, optim, env.transform, collector

    policy, optim, norm, collector = parts()
    torch.manual_seed(1)
    batches = iter(collector)
    policy.module(torch.ones(3)).backward()
    optim.step()
    next(batches)
    Checkpoint(
        policy=policy, optimizer=optim, norm=norm, collector=collector, rng=GlobalRNGState()
    ).save(tmp_path / "step")
    expected = next(batches)
    collector.shutdown()

    policy, optim, norm, collector = parts()
    report = Checkpoint(
        policy=policy, optimizer=optim, norm=norm, collector=collector, rng=GlobalRNGState()
    ).load(tmp_path / "step")
    batch = next(iter(collector))
    collector.shutdown()

    assert report.loaded == {"policy", "optimizer", "norm", "collector", "rng"}
    assert len(optim.state_dict()["state"]) == 2
    assert (batch == expected).all()


# ------------------------------------------------------------------------------------ several agents


class Meeting(EnvBase):
    """Agents on a line are paid for being near each other."""

    def __init__(self, agents=3, rows=4, device=None):
        super().__init__(device=device, batch_size=[rows])
        self.n_agents = agents
        shape = (rows, agents)
        self.observation_spec = Composite(
            agents=Composite(observation=Unbounded((*shape, 2)), shape=shape), shape=[rows]
        )
        self.action_spec = Composite(
            agents=Composite(action=Bounded(-1.0, 1.0, (*shape, 1)), shape=shape), shape=[rows]
        )
        self.reward_spec = Composite(
            agents=Composite(reward=Unbounded((*shape, 1)), shape=shape), shape=[rows]
        )

    def shown(self):
        middle = self.places.mean(1, keepdim=True).expand_as(self.places)
        seen = torch.stack([self.places, middle], -1)
        return TensorDict({"observation": seen}, self.places.shape)

    def _reset(self, tensordict=None):
        fresh = torch.rand(*self.batch_size, self.n_agents, generator=self.rng) * 4 - 2
        if tensordict is not None and "_reset" in tensordict.keys():
            fresh = torch.where(tensordict["_reset"], fresh, self.places)
        self.places = fresh
        return TensorDict({"agents": self.shown()}, self.batch_size)

    def _step(self, tensordict):
        moved = self.places + tensordict["agents", "action"].squeeze(-1) * 0.5
        moving = tensordict.get("_step", torch.ones(self.batch_size, dtype=torch.bool))
        self.places = torch.where(moving.reshape(-1, 1), moved, self.places)
        agents = self.shown()
        away = (self.places - agents["observation"][..., 1]).abs() * moving.reshape(-1, 1)
        agents["reward"] = -away.unsqueeze(-1)
        return TensorDict({"agents": agents}, self.batch_size)

    def _set_seed(self, seed):
        self.rng = torch.Generator().manual_seed(seed)


@sweep
@pytest.mark.parametrize(("share", "central"), [(True, True), (False, False)])
def test_ppo_of_several_agents(share, central):
    env = TransformedEnv(
        Meeting(),
        Compose(
            StepCounter(10),
            RewardSum(in_keys=[("agents", "reward")], out_keys=[("agents", "episode_reward")]),
        ),
    )
    env.set_seed(0)
    check_env_specs(env)
    actions = env.full_action_spec[env.action_key]
    nets = {"n_agents": 3, "share_params": share, "depth": 1, "num_cells": 16}
    heads = nn.Sequential(
        MultiAgentMLP(n_agent_inputs=2, n_agent_outputs=2, centralised=False, **nets),
        NormalParamExtractor(),
    )
    policy = ProbabilisticActor(
        module=TensorDictModule(
            heads, [("agents", "observation")], [("agents", "loc"), ("agents", "scale")]
        ),
        spec=env.action_spec,
        in_keys=[("agents", "loc"), ("agents", "scale")],
        out_keys=[env.action_key],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": actions.space.low[0, 0], "high": actions.space.high[0, 0]},
        return_log_prob=True,
    )
    critic = TensorDictModule(
        MultiAgentMLP(n_agent_inputs=2, n_agent_outputs=1, centralised=central, **nets),
        [("agents", "observation")],
        [("agents", "state_value")],
    )
    collector = SyncDataCollector(env, policy, frames_per_batch=200, total_frames=3000)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(200), sampler=SamplerWithoutReplacement(), batch_size=50
    )
    loss_module = ClipPPOLoss(policy, critic, clip_epsilon=0.2, normalize_advantage=False)
    loss_module.set_keys(
        reward=env.reward_key,
        action=env.action_key,
        value=("agents", "state_value"),
        done=("agents", "done"),
        terminated=("agents", "terminated"),
    )
    loss_module.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.9)
    optim = torch.optim.Adam(loss_module.parameters(), 5e-3)

    returns = []
    for data in collector:
        for flag in ("done", "terminated"):
            shape = data["next", "agents", "reward"].shape
            data["next", "agents", flag] = data["next", flag].unsqueeze(-1).expand(shape)
        with torch.no_grad():
            loss_module.value_estimator(
                data,
                params=loss_module.critic_network_params,
                target_params=loss_module.target_critic_network_params,
            )
        buffer.extend(data.reshape(-1))
        for _ in range(12):
            losses = loss_module(buffer.sample())
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
            optim.step()
            optim.zero_grad()
        ended = data["next", "done"].squeeze(-1)
        returns.append(data["next", "agents", "episode_reward"][ended].mean().item())
    collector.shutdown()

    assert np.mean(returns[-4:]) > np.mean(returns[:4])


@sweep
def test_a_planned_step_is_one_of_the_env():
    env = GymEnv("Pendulum-v1")
    now = env.rand_step(env.reset())

    assert step_mdp(now)["observation"].equal(now["next", "observation"])
