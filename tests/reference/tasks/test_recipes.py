"""What the pages on transforms, buffers, loggers and several agents show, beyond the tutorials of one env."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorClass, TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import (
    LazyTensorStorage,
    MCTSForest,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss, ValueEstimators
from torchrl.record import CSVLogger

from envkit import (
    CatFrames,
    Compose,
    Composite,
    EnvBase,
    GymEnv,
    Hash,
    PixelRenderTransform,
    RewardSum,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TargetReturn,
    TensorDictPrimer,
    TicTacToeEnv,
    TrajCounter,
    TransformedEnv,
    Unbounded,
    UnsqueezeTransform,
    VideoRecorder,
    check_env_specs,
)
from envkit.errors import OptionError
from tests.reference.tasks.test_data_of_all_kinds import Growing
from tests.reference.tasks.test_games import Soccer
from tests.reference.tasks.test_own_transforms import Camera


def test_shapes_that_change_are_batched_lazily():
    env = SerialEnv(2, Growing)
    check_env_specs(env, return_contiguous=False)

    steps = env.rollout(3, return_contiguous=False).unbind(-1)

    assert [step["next", "path"].shape for step in steps] == [(2, 2, 2), (2, 3, 2), (2, 4, 2)]


# ------------------------------------------------------------------------------- episodes in buffers


def test_a_buffer_of_a_collector_gives_slices_of_episodes():
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(8))
    collector = SyncDataCollector(env, None, frames_per_batch=40, total_frames=80)
    sampler = SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(80), sampler=sampler, batch_size=16)

    for data in collector:
        buffer.extend(data)
    slices = buffer.sample().reshape(4, 4)

    assert (slices["collector", "traj_ids"] == slices["collector", "traj_ids"][:, :1]).all()
    assert (slices["step_count"].diff(dim=1) == 1).all()


def test_episodes_are_told_apart_by_their_ends():
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(8), TrajCounter()))
    sampler = SliceSampler(num_slices=4, end_key=("next", "done"))
    buffer = ReplayBuffer(storage=LazyTensorStorage(80), sampler=sampler, batch_size=16)

    buffer.extend(env.rollout(60, break_when_any_done=False))
    slices = buffer.sample().reshape(4, 4)

    assert (slices["traj_count"] == slices["traj_count"][:, :1]).all()


@pytest.mark.parametrize("frames", [2, 3])
def test_a_buffer_stores_frames_one_by_one_and_joins_them_when_sampled(frames):
    stack = CatFrames(N=frames, dim=-3, in_keys=["pixels"], out_keys=["stack"])
    env = TransformedEnv(Camera(), Compose(stack, StepCounter()))
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
    assert sample["next", "stack"][:, -1].equal(sample["next", "pixels"][:, 0])


@pytest.mark.parametrize("short", [{"strict_length": False}, {"span": True}, {"span": (False, 1)}])
def test_windows_of_fewer_steps_are_refused(short):
    stack = CatFrames(N=3, dim=-3, in_keys=["pixels"], out_keys=["stack"])

    with pytest.raises(OptionError, match="fewer than 3 steps"):
        stack.make_rb_transform_and_sampler(batch_size=5, **short)


# ------------------------------------------------------------------------------------------- pictures


def test_a_logger_is_handed_the_video_of_an_episode(tmp_path):
    logger = CSVLogger("run", log_dir=str(tmp_path), video_format="pt")
    recorder = VideoRecorder(logger, tag="episode", in_keys=["pixels"], skip=1)
    env = TransformedEnv(Camera(), recorder)

    env.rollout(3)
    env.transform.dump()

    (file,) = tmp_path.rglob("*.pt")
    assert torch.load(file).shape[-3:] == (3, 4, 4)


def test_an_env_that_draws_itself_is_given_pixels():
    class Drawn(Growing):
        def render(self, mode="rgb_array"):
            return torch.full((4, 4, 3), len(self.path), dtype=torch.uint8).numpy()

    env = TransformedEnv(Drawn(), PixelRenderTransform())

    steps = env.rollout(2, return_contiguous=False).unbind(0)

    assert [step["next", "pixels"].unique().item() for step in steps] == [2, 3]


# ------------------------------------------------------------------------------------------ sequences


def test_a_decision_transformer_sees_the_last_returns_observations_and_actions():
    base = GymEnv("Pendulum-v1")
    keys = ["observation", "return_to_go", "action_seen"]
    stacks = [f"{key}_cat" for key in keys]
    env = TransformedEnv(base, TargetReturn(-100.0, out_keys=["return_to_go"]))
    env.append_transform(TensorDictPrimer(action_seen=Unbounded((1,))))
    env.append_transform(UnsqueezeTransform(-2, in_keys=keys, out_keys=stacks))
    env.append_transform(CatFrames(N=3, dim=-2, in_keys=stacks, padding="constant"))
    net = nn.Linear(3 * 5, 1)

    def policy(td):
        window = torch.cat([td[key] for key in stacks], -1)
        return td.set("action", net(window.flatten(-2)).detach())

    data = env.rollout(4, policy)

    assert data["observation_cat"].shape == (4, 3, 3)
    assert data["return_to_go_cat"][-1, :, 0].equal(data["return_to_go"][1:, 0])
    assert not data["observation_cat"][0, :2].any()


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


# ------------------------------------------------------------------------------------ data of a class


class Sight(TensorClass):
    near: torch.Tensor
    far: torch.Tensor


class Looking(EnvBase):
    """Shows an object of a class of its user."""

    def __init__(self):
        super().__init__()
        shown = Composite(near=Unbounded((2,)), far=Unbounded((1,)), data_cls=Sight)
        self.observation_spec = Composite(sight=shown)
        self.action_spec = Unbounded((2,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict=None):
        return TensorDict({"sight": Sight(near=torch.zeros(2), far=torch.ones(1))})

    def _step(self, tensordict):
        sight = tensordict["sight"]
        moved = Sight(near=sight.near + 1, far=sight.far)
        return TensorDict({"sight": moved, "reward": sight.far, "done": sight.far < 0})

    def _set_seed(self, seed): ...


@pytest.mark.parametrize("make", [Looking, lambda: SerialEnv(2, Looking)])
def test_observations_are_objects_of_a_class(make):
    env = make()
    check_env_specs(env)

    data = env.rollout(3)

    assert isinstance(data["sight"], Sight)
    assert data["next", "sight"].near[..., -1, 0].eq(3).all()


class Rows(Looking):
    """The same for any batch size: each step is told which rows it is for."""

    batch_locked = False

    def _reset(self, tensordict=None):
        shape = () if tensordict is None else tensordict.batch_size
        return super()._reset().expand(shape).clone()

    def _step(self, tensordict):
        out = super()._step(tensordict)
        return TensorDict(dict(out.items()), tensordict.batch_size)


def test_rows_of_objects_are_left_out():
    env, batched = Rows(), SerialEnv(2, Looking)
    mask = torch.tensor([True, False])
    torch.manual_seed(0)

    steps = [
        env.step(env.rand_action(env.reset(TensorDict(batch_size=[2]))).set("_step", mask)),
        batched.step(batched.rand_action(batched.reset()).set("_step", mask)),
    ]

    for step in steps:
        assert isinstance(step["next", "sight"], Sight)
        assert step["next", "sight"].near.tolist() == [[1, 1], [0, 0]]


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


# ------------------------------------------------------------------------------------- several agents


def test_ppo_trains_a_team_by_its_nested_keys():
    env = TransformedEnv(
        Soccer(), RewardSum(in_keys=[("red", "reward")], out_keys=[("red", "episode_reward")])
    )
    seen, action, reward = ("red", "position"), ("red", "action"), ("red", "reward")
    width = env.observation_spec[seen].shape[-1]
    size = env.full_action_spec[action].shape[-1]
    net = MultiAgentMLP(
        n_agent_inputs=width,
        n_agent_outputs=2 * size,
        n_agents=2,
        centralised=False,
        share_params=True,
        depth=1,
        num_cells=8,
    )
    heads = nn.Sequential(net, NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(heads, [seen], [("red", "loc"), ("red", "scale")]),
        spec=env.full_action_spec[action],
        in_keys=[("red", "loc"), ("red", "scale")],
        out_keys=[action],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = TensorDictModule(nn.Linear(width, 1), [seen], [("red", "state_value")])
    loss = ClipPPOLoss(actor, critic)
    loss.set_keys(
        reward=reward,
        action=action,
        value=("red", "state_value"),
        done=("red", "done"),
        terminated=("red", "terminated"),
    )
    loss.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.9)

    def policy(td):  # the other team moves at random
        return env.rand_action(td).update(actor(td))

    with torch.no_grad():
        data = env.rollout(4, policy)
    loss.value_estimator(data, params=loss.critic_network_params)
    losses = loss(data)
    (losses["loss_objective"] + losses["loss_critic"]).backward()

    assert data["next", "red", "episode_reward"][-1].equal(data["next", *reward].sum(0))
    assert all(weight.grad is not None for weight in loss.actor_network_params.values(True, True))
