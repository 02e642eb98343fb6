"""The first steps that TorchRL's tutorials teach, each as a small program: envs, policies, losses, data, logs, a loop."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn

from envkit import (
    CatTensors,
    Collector,
    Compose,
    DoubleToFloat,
    EnvCreator,
    ExplorationType,
    GymEnv,
    GymWrapper,
    NoopResetEnv,
    ObservationNorm,
    ParallelEnv,
    RandomPolicy,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    ToTensorImage,
    TransformedEnv,
    VecNorm,
    VideoRecorder,
    check_env_specs,
    set_exploration_type,
    step_mdp,
)
from envkit.errors import InputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
    from torchrl.modules import (
        MLP,
        Actor,
        ConvNet,
        EGreedyModule,
        ProbabilisticActor,
        QValueActor,
        QValueModule,
        TanhNormal,
        ValueOperator,
    )
    from torchrl.objectives import DDPGLoss, DQNLoss, SoftUpdate
    from torchrl.record import CSVLogger

pytestmark = pytest.mark.filterwarnings(
    r"ignore::DeprecationWarning:torchrl\..*", r"ignore::FutureWarning:torchrl\..*"
)
rest = [pytest.mark.slow, pytest.mark.sweep]


@pytest.mark.slow
@pytest.mark.sweep
def test_0_an_env_is_reset_stepped_and_rolled_out():
    env = TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(max_steps=10))
    env.set_seed(3)

    first = env.rand_action(env.reset())
    stepped = env.step(first)
    root = step_mdp(stepped)
    data = env.rollout(max_steps=100)

    assert root["observation"].equal(stepped["next", "observation"])
    assert "reward" not in root.keys() and root["step_count"].item() == 1
    assert data.shape == (10,)
    assert data["next", "truncated"].flatten().tolist() == [False] * 9 + [True]
    assert data[3]["next", "observation"].equal(data[4]["observation"])


@pytest.mark.slow
@pytest.mark.sweep
def test_1_policies_act_and_explore():
    env = GymEnv("Pendulum-v1")
    plain = Actor(MLP(out_features=1, num_cells=[16]))  # its sizes are those of the first data
    net = nn.Sequential(MLP(out_features=2, num_cells=[16]), NormalParamExtractor())
    drawing = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
    )
    root = env.reset()

    by_net = env.rollout(5, plain)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        modes = [drawing(root.clone())["action"] for _ in range(3)]
    with set_exploration_type(ExplorationType.RANDOM):
        draws = [drawing(root.clone())["action"] for _ in range(3)]

    torch.testing.assert_close(by_net["action"], plain.module(by_net["observation"]))
    assert modes[0].equal(modes[1]) and modes[1].equal(modes[2])
    assert len({draw.item() for draw in draws}) == 3
    assert env.rollout(4, drawing)["action_log_prob"].shape == (4,)


@pytest.mark.slow
@pytest.mark.sweep
def test_1_greedy_actions_are_replaced_by_random_ones():
    env = GymEnv("CartPole-v1")
    greedy = QValueActor(MLP(4, 2, num_cells=[8]), in_keys=["observation"], spec=env.action_spec)
    explore = EGreedyModule(env.action_spec, annealing_num_steps=1000, eps_init=1.0, eps_end=0.0)
    policy = TensorDictSequential(greedy, explore)

    drawn = env.rollout(60, policy, break_when_any_done=False)
    explore.step(1000)
    chosen = env.rollout(60, policy, break_when_any_done=False)

    best = chosen["action_value"].argmax(-1)
    assert chosen["action"].argmax(-1).equal(best)
    assert not drawn["action"].argmax(-1).equal(drawn["action_value"].argmax(-1))
    assert (drawn["action"].sum(-1) == 1).all()


def deterministic_agent():
    actor = Actor(MLP(out_features=1, num_cells=[16], in_features=3))
    critic = ValueOperator(
        MLP(out_features=1, num_cells=[32], in_features=4), in_keys=["observation", "action"]
    )
    return actor, critic


@pytest.mark.slow
@pytest.mark.sweep
def test_2_a_loss_is_minimised():
    env = GymEnv("Pendulum-v1")
    actor, critic = deterministic_agent()
    loss_module = DDPGLoss(actor_network=actor, value_network=critic)
    updater = SoftUpdate(loss_module, eps=0.9)
    optim = torch.optim.Adam(loss_module.parameters(), 1e-2)
    data = env.rollout(100, actor)

    values = []
    for _ in range(40):
        losses = loss_module(data)
        total = sum(value for key, value in losses.items() if key.startswith("loss_"))
        total.backward()
        optim.step()
        optim.zero_grad()
        updater.step()
        values.append(losses["loss_value"].item())

    assert values[-1] < values[0] / 2


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_3_data_is_collected_and_stored(storage):
    env = GymEnv("CartPole-v1")
    env.set_seed(0)
    policy = RandomPolicy(env.action_spec)
    collector = SyncDataCollector(env, policy, frames_per_batch=200, total_frames=-1)
    buffer = ReplayBuffer(storage=storage(max_size=1000), batch_size=32)

    numbers = []
    for data in collector:
        assert data.shape == (200,)
        ids = data["collector", "traj_ids"]
        ends = data["next", "done"].flatten()
        assert (ids.diff() == ends[:-1]).all()  # the number goes up where an episode has ended
        numbers.append(ids)
        written = buffer.extend(data)
        if len(buffer) == 600:
            break
    collector.shutdown()
    sample = buffer.sample()

    assert written.numel() == 200
    assert numbers[1][0] - numbers[0][-1] in (0, 1)  # batches continue each other
    assert sample.shape == (32,)
    assert sample["next", "observation"].shape == (32, 4)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("video_format", ["pt", "memmap"])
def test_4_scalars_and_videos_are_logged(tmp_path, rendering, video_format):
    logger = CSVLogger("run", log_dir=str(tmp_path), video_format=video_format)
    recorder = VideoRecorder(logger, tag="seen", skip=2)
    env = TransformedEnv(GymEnv("CartPole-v1", from_pixels=True, pixels_only=False), recorder)

    data = env.rollout(max_steps=3)
    recorder.dump()
    logger.log_scalar("reward", data["next", "reward"].sum().item(), step=1)

    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.suffix == f".{video_format}" for file in files)
    assert any("1,3.0" in file.read_text() for file in files if file.suffix == ".csv")
    assert data["pixels"].dtype == torch.uint8 and data["observation"].shape == (3, 4)


def test_5_an_agent_learns_to_balance_a_pole():
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
                loss(buffer.sample(128))["loss"].backward()
                optim.step()
                optim.zero_grad()
                explore.step(data.numel())
                updater.step()
        if longest > 200 or frames > 30_000:
            break
    collector.shutdown()

    assert longest > 200


# ----------------------------------------------------------------------------- a tour of all of it


@pytest.mark.slow
@pytest.mark.sweep
def test_a_tour_of_envs(rendering):
    import gymnasium

    wrapped = GymWrapper(gymnasium.make("Pendulum-v1"))
    drawn = GymEnv("Pendulum-v1", frame_skip=3, from_pixels=True, pixels_only=False)
    env = TransformedEnv(drawn, Compose(NoopResetEnv(3), ToTensorImage()))
    env.append_transform(ObservationNorm(in_keys=["pixels"], loc=2.0, scale=1.0))

    root = env.reset()

    assert wrapped.rand_step(wrapped.reset())["next", "reward"].shape == (1,)
    assert root["pixels"].shape[-3] == 3 and root["pixels"].max() <= 3.0
    assert root["pixels"].min() >= 2.0
    assert [type(t).__name__ for t in env.transform[2].parent.transform] == [
        "NoopResetEnv",
        "ToTensorImage",
    ]
    env.close()


@pytest.mark.slow
@pytest.mark.sweep
def test_a_tour_of_batches_with_transforms_around_them(opened, rendering):
    base = opened(
        ParallelEnv(
            2, lambda: GymEnv("Pendulum-v1", frame_skip=3, from_pixels=True, pixels_only=False)
        )
    )
    env = TransformedEnv(base, Compose(NoopResetEnv(3), ToTensorImage()))
    net = ConvNet(num_cells=[4, 4], kernel_sizes=[8, 4], strides=[4, 2])
    feature = TensorDictModule(net, in_keys=["pixels"], out_keys=["embedding"])

    root = feature(env.reset())

    assert env.action_spec.shape == (2, 1)
    assert root["embedding"].ndim == 2 and root["embedding"].shape[0] == 2


@pytest.mark.slow
@pytest.mark.sweep
def test_a_tour_of_loops():
    env = GymEnv("Pendulum-v1")
    actor = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])

    env.set_seed(0)
    now, steps = env.reset(), []
    for _ in range(20):
        actor(now)
        steps.append(env.step(now).clone())
        now = step_mdp(now)
    by_hand = torch.stack(steps)
    env.set_seed(0)
    into = TensorDict(batch_size=[20])
    now = env.reset()
    for index in range(20):
        actor(now)
        into[index] = env.step(now)
        now = step_mdp(now)
    env.set_seed(0)
    rolled = env.rollout(max_steps=20, policy=actor)

    assert (by_hand == rolled).all() and (into == rolled).all()


@pytest.mark.slow
@pytest.mark.sweep
def test_a_tour_of_collectors_with_workers(opened):
    from envkit import MultiaSyncDataCollector, MultiSyncDataCollector

    make = EnvCreator(lambda: ParallelEnv(2, lambda: GymEnv("Pendulum-v1")))
    actor = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    keywords = {"frames_per_batch": 40, "total_frames": 120, "max_frames_per_traj": 10}

    shapes = {}
    for kind in (MultiSyncDataCollector, MultiaSyncDataCollector):
        collector = kind([make, make], actor, split_trajs=True, **keywords)
        shapes[kind.__name__] = [data.shape[-1] for data in collector]
        collector.shutdown()

    assert shapes == {"MultiSyncDataCollector": [10] * 3, "MultiaSyncDataCollector": [10] * 3}


# ------------------------------------------------------------------------------------ environments


@pytest.mark.slow
@pytest.mark.sweep
def test_environments_of_gymnasium_and_their_specs():
    env = GymEnv("Pendulum-v1")
    check_env_specs(env)

    assert env.set_seed(987) == GymEnv("Pendulum-v1").set_seed(987)
    assert env.action_spec.is_in(env.action_spec.rand())
    assert env.observation_spec["observation"].shape == (3,)
    assert env.reward_spec.shape == (1,) and env.done_spec is not None
    assert env.rollout(5, policy=None).batch_size == (5,)
    with pytest.raises(InputError, match="nan"):
        env.step(env.reset().set("action", torch.full((1,), float("nan"))))


@pytest.mark.slow
@pytest.mark.sweep
def test_environments_of_dm_control(opened):
    from envkit import DMControlEnv

    env = opened(DMControlEnv("acrobot", "swingup"))
    names = list(env.observation_spec.keys())
    flat = TransformedEnv(
        DMControlEnv("acrobot", "swingup"),
        Compose(CatTensors(in_keys=names, out_key="observation"), DoubleToFloat()),
    )

    data = flat.rollout(4)

    assert ("acrobot", "swingup") in [
        (domain, task) for domain, tasks in DMControlEnv.available_envs for task in tasks
    ]
    assert data["observation"].dtype == torch.float32
    assert data["observation"].shape == (4, sum(env.observation_spec[n].shape[-1] for n in names))
    flat.close()


@pytest.mark.slow
@pytest.mark.sweep
def test_environments_in_parallel_take_keywords_and_seeds(opened):
    def make(env_name, max_episode_steps=None):
        return TransformedEnv(GymEnv(env_name), StepCounter(max_episode_steps))

    env = opened(
        ParallelEnv(
            2,
            [make, make],
            create_env_kwargs=[
                {"env_name": "Pendulum-v1", "max_episode_steps": 3},
                {"env_name": "Pendulum-v1", "max_episode_steps": 5},
            ],
            pin_memory=False,
        )
    )

    following = env.set_seed(10)
    data = env.rollout(6, break_when_any_done=False)
    env.set_seed(10)
    again = env.rollout(1)

    assert isinstance(following, int)
    assert data["next", "truncated"][..., 0].sum(-1).tolist() == [2, 1]
    assert not data["observation"][0, 0].equal(data["observation"][1, 0])
    assert again["observation"][:, 0].equal(data["observation"][:, 0])


@pytest.mark.slow
@pytest.mark.sweep
def test_environments_share_their_statistics():
    env = TransformedEnv(
        SerialEnv(2, lambda: GymEnv("Pendulum-v1")), VecNorm(in_keys=["observation"], decay=0.9)
    )
    env.rollout(30)

    other = TransformedEnv(
        SerialEnv(2, lambda: GymEnv("Pendulum-v1")), VecNorm(in_keys=["observation"])
    )
    other.rollout(2)
    other.transform.load_state_dict(env.transform.state_dict())

    assert other.transform.loc["observation"].equal(env.transform.loc["observation"])


@pytest.mark.slow
@pytest.mark.sweep
def test_a_collector_goes_on_where_a_rollout_resets():
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    collector = Collector(env, None, frames_per_batch=7, total_frames=21)

    batches = list(collector)
    collector.shutdown()

    whole = torch.cat(batches)
    going = ~whole["next", "done"][:-1, 0]
    assert whole["observation"][1:][going].equal(whole["next", "observation"][:-1][going])
