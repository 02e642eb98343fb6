"""Envs and policies of other kinds: unlike tasks side by side, arcade games, texts, pools in workers, exported networks."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from envkit import (
    CatFrames,
    CatTensors,
    Compose,
    Composite,
    DMControlEnv,
    DoubleToFloat,
    EnvBase,
    EnvCreator,
    GrayScale,
    GymEnv,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    NonTensor,
    NoopResetEnv,
    ParallelEnv,
    RenameTransform,
    Resize,
    RewardSum,
    SerialEnv,
    SignTransform,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
    Unbounded,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.modules import MLP, ConvNet
from tests.reference.tasks.learning import sweep

pytestmark = pytest.mark.filterwarnings(
    r"ignore::DeprecationWarning:torchrl\..*", r"ignore::FutureWarning:torchrl\..*"
)


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
def test_workers_that_hold_pools_deliver_trajectories():
    make = EnvCreator(lambda: ParallelEnv(2, lambda: GymEnv("Pendulum-v1")))
    actor = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    keywords = {"frames_per_batch": 40, "total_frames": 120, "max_frames_per_traj": 10}

    shapes = {}
    for kind in (MultiSyncDataCollector, MultiaSyncDataCollector):
        collector = kind([make, make], actor, split_trajs=True, **keywords)
        shapes[kind.__name__] = [data.shape[-1] for data in collector]
        collector.shutdown()

    assert shapes == {"MultiSyncDataCollector": [10] * 3, "MultiaSyncDataCollector": [10] * 3}


def test_a_policy_that_was_exported_acts():
    env = GymEnv("Pendulum-v1")
    net = nn.Sequential(nn.Linear(3, 1), nn.Tanh())
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    shown = env.fake_tensordict()["observation"]

    exported = torch.export.export(policy, args=(), kwargs={"observation": shown}).module()
    acting = TensorDictModule(
        lambda observation: exported(observation=observation), ["observation"], ["action"]
    )
    data = env.rollout(3, acting)

    torch.testing.assert_close(data["action"], net(data["observation"]))


# -------------------------------------------------------------------------------------------- texts


class Chat(EnvBase):
    """The observation is a text that grows."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(history=NonTensor(shape=(), example_data="hello"))
        self.action_spec = Composite(answer=NonTensor(shape=(), example_data="yes"))
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict=None, **kwargs):
        self.text = "user: hi"
        return TensorDict({"history": NonTensorData(self.text)})

    def _step(self, tensordict):
        self.text += " | agent: " + tensordict["answer"]
        done = torch.tensor([self.text.count("|") >= 3])
        return TensorDict(
            {"history": NonTensorData(self.text), "reward": torch.ones(1), "done": done}
        )

    def _set_seed(self, seed):
        pass


def answering(td):
    return td.set("answer", NonTensorData(f"answer {td['history'].count('|')}"))


def test_a_conversation_is_data():
    env = Chat()

    rollout = env.rollout(10, answering)

    assert rollout.shape == (3,)
    assert rollout[-1]["next", "history"].endswith("agent: answer 2")
    assert [step["history"].count("|") for step in rollout.unbind(0)] == [0, 1, 2]


def test_conversations_are_batched():
    env = SerialEnv(2, Chat)

    def policy(td):
        return LazyStackedTensorDict.maybe_dense_stack([answering(row) for row in td.unbind(0)])

    td = env.reset()
    td = env.step(policy(td))

    assert td["next", "history"] == ["user: hi | agent: answer 0"] * 2
