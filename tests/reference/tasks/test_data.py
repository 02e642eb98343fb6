"""Our data in TorchRL's buffers, trees, logs and checkpoints, and its evaluator over our collectors."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import envkit
from envkit import (
    CatFrames,
    Collector,
    Compose,
    EnvCreator,
    GymEnv,
    Hash,
    RewardSum,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TicTacToeEnv,
    TransformedEnv,
    UnsqueezeTransform,
    VideoRecorder,
)
from envkit.errors import OptionError
from tests.zoo.envs import Count

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.checkpoint import Checkpoint, GlobalRNGState
    from torchrl.collectors import Evaluator
    from torchrl.collectors.utils import split_trajectories
    from torchrl.data import LazyTensorStorage, MCTSForest, ReplayBuffer, SliceSampler
    from torchrl.envs.transforms import NextStateReconstructor
    from torchrl.modules import MLP, QValueActor
    from torchrl.objectives.value import GAE
    from torchrl.record import CSVLogger
from tests.reference.tasks.learning import sweep

pytestmark = pytest.mark.filterwarnings(
    r"ignore::DeprecationWarning:torchrl\..*", r"ignore::FutureWarning:torchrl\..*"
)


# ------------------------------------------------------------------------------------------ buffers


def test_torchrl_splits_and_pads_the_trajectories_of_a_rollout():
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=4))

    split = split_trajectories(env.rollout(10, break_when_any_done=False), done_key="done")

    assert split.shape == (3, 4)
    assert split["mask"].sum(-1).tolist() == [4, 4, 2]


@pytest.mark.parametrize("frames", [2, 3])
def test_a_buffer_stores_frames_one_by_one_and_joins_them_when_sampled(frames):
    stack = CatFrames(N=frames, dim=-3, in_keys=["count"], out_keys=["stack"])
    axes = [UnsqueezeTransform(-1, in_keys=["count"]) for _ in range(2)]
    env = TransformedEnv(Count(5), Compose(*axes, stack, StepCounter()))
    transform, sampler = stack.make_rb_transform_and_sampler(
        batch_size=5, end_key=("next", "done"), strict_length=True
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(50), sampler=sampler, transform=transform, batch_size=5
    )
    recorded = env.rollout(8)

    buffer.extend(recorded)
    sample = buffer.sample()

    assert "stack" not in buffer.storage[:].keys()
    assert sample.shape == (5,)
    drawn = sample["step_count"].flatten()
    assert (drawn >= frames - 1).all()
    assert sample["stack"].equal(recorded["stack"][drawn])
    assert sample["next", "stack"][:, -1].equal(sample["next", "count"][:, 0])


@pytest.mark.parametrize("short", [{"strict_length": False}, {"span": True}, {"span": (False, 1)}])
def test_windows_of_fewer_steps_are_refused(short):
    stack = CatFrames(N=3, dim=-3, in_keys=["count"], out_keys=["stack"])

    with pytest.raises(OptionError, match="fewer than 3 steps"):
        stack.make_rb_transform_and_sampler(batch_size=5, **short)


@sweep
def test_next_observations_are_not_stored_twice():
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


def test_games_are_gathered_in_a_tree():
    env = TransformedEnv(TicTacToeEnv(), Hash(["board"], ["board_hash"]))
    forest = MCTSForest()
    forest.reward_keys, forest.done_keys = env.reward_keys, env.done_keys
    forest.action_keys, forest.observation_keys = env.action_keys, ["board_hash"]
    torch.manual_seed(0)

    firsts = set()
    for _ in range(4):
        game = env.rollout(3)
        firsts.add(int(game["action"][0]))
        forest.extend(game)

    assert forest.get_tree(env.reset()).num_children == len(firsts)


# ----------------------------------------------------------------- evaluation, videos and checkpoints


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


@pytest.mark.parametrize("video_format", ["pt", "memmap"])
def test_videos_of_evaluations_are_logged(tmp_path, video_format):
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

    data = env.rollout(8, break_when_any_done=False)
    env.apply(dump)

    files = [file for file in tmp_path.rglob(f"*.{video_format}") if file.is_file()]
    assert data["pixels"].dtype == torch.uint8 and data["observation"].shape == (1, 8, 4)
    assert files
    if video_format == "pt":
        assert torch.load(files[0]).shape[-3:] == (3, *data["pixels"].shape[-3:-1])


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
