"""Errors of the public interface are small repair manuals: what was wrong, what was expected, how to fix it.

Each case is the text that names what was passed, and a call that must fail. Envs are shared where a call leaves
them as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

import envkit
from envkit import (
    ActionDiscretizer,
    ActionScaling,
    AsyncEnvPool,
    AutoResetTransform,
    BatchSizeTransform,
    Binary,
    Bounded,
    BurnInTransform,
    Categorical,
    CatFrames,
    CatTensors,
    Choice,
    ClipTransform,
    Collector,
    Compose,
    Composite,
    ConditionalPolicySwitch,
    ConditionalSkip,
    Crop,
    DoubleToFloat,
    EnvCreator,
    ExcludeTransform,
    ExpandAs,
    FrameSkipTransform,
    GrayScale,
    GymEnv,
    GymWrapper,
    Hash,
    InitTracker,
    LineariseRewards,
    MixedEnv,
    ModuleTransform,
    MultiCategorical,
    MultiOneHot,
    MultiStepTransform,
    NonTensor,
    NoopResetEnv,
    ObservationNorm,
    OneHot,
    ParallelEnv,
    PendulumEnv,
    PermuteTransform,
    PixelRenderTransform,
    RandomCropTensorDict,
    RandomPolicy,
    RandomTruncationTransform,
    RenameTransform,
    Resize,
    Reward2GoTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SerialEnv,
    Stack,
    StepCounter,
    SyncDataCollector,
    TargetReturn,
    TensorDictPrimer,
    TerminateTransform,
    TicTacToeEnv,
    TimeMaxPool,
    Timer,
    TransformedEnv,
    UnaryTransform,
    Unbounded,
    VecNorm,
    VecNormV2,
    VideoRecorder,
    check_env_specs,
    check_marl_grouping,
    episode_stats,
    evaluate,
    gSDENoise,
    make,
    split_trajectories,
    step_mdp,
    to_gym_vector,
)
from envkit.errors import EnvkitError
from tests.zoo.envs import Count


@cache
def one() -> PendulumEnv:
    return PendulumEnv()


@cache
def root() -> TensorDict:
    return one().rand_action(one().reset())


@cache
def rows() -> SerialEnv:
    env = SerialEnv(2, Count)
    env.reset()
    return env


@cache
def pole() -> GymEnv:
    return GymEnv("CartPole-v1")


@cache
def played() -> TensorDict:
    return rows().rollout(3, break_when_any_done=False)


@cache
def locked() -> Composite:
    return Composite(a=Unbounded((1,))).lock_()


@cache
def pool() -> AsyncEnvPool:
    env = AsyncEnvPool([Count] * 2, backend="threading")
    env.reset()
    return env


def transformed(*transforms: Any) -> TransformedEnv:
    return TransformedEnv(PendulumEnv(), Compose(*transforms))


def played_with(*transforms: Any) -> TensorDict:
    return transformed(*transforms).rollout(2)


def collected(**options: Any) -> Collector:
    given: dict[str, Any] = {"frames_per_batch": 4, "total_frames": 8}
    return Collector(Count, None, **{**given, **options})


CASES: list[tuple[str, Callable[[], Any]]] = [
    # ---------------------------------------------------------------------------- specs
    ("domain is 'whole'", lambda: Bounded(0, 1, (1,), domain="whole")),
    ("low=2", lambda: Bounded(2, 1, (1,))),
    ("(3,) and (2,)", lambda: Bounded(torch.zeros(3), torch.ones(2), (4,))),
    ("300", lambda: Bounded(0, 300, (1,), dtype=torch.uint8)),
    ("neither n nor shape", lambda: Binary()),
    ("n=3 and shape (4,)", lambda: Binary(3, (4,))),
    ("torch.complex64", lambda: Binary(3, dtype=torch.complex64)),
    ("n=5", lambda: Categorical(5, dtype=torch.bool)),
    ("0 options", lambda: Categorical(0)),
    ("(4,)", lambda: OneHot(3, (4,))),
    ("(5,)", lambda: MultiOneHot([2, 2], (5,))),
    ("(3,)", lambda: MultiCategorical([2, 2], (3,))),
    ("torch.float32", lambda: Categorical(2, mask=torch.tensor([0.5, 1.0]))),
    ("'left'", lambda: OneHot(3).encode("left")),
    ("(2, 2)", lambda: OneHot(3).encode(torch.zeros(2, 2))),
    ("of type str", lambda: Unbounded((2,)).encode("left")),
    ("3 elements", lambda: Unbounded((2,)).encode([1, 2, 3])),
    ("(3,)", lambda: Unbounded((2,)).project(torch.zeros(3))),
    ("torch.float64", lambda: Unbounded((2,)).assert_is_in(torch.zeros(2, dtype=torch.float64))),
    ("Bounded", lambda: Bounded(-1, 1, (1,)).assert_is_in(torch.tensor([3.0]))),
    ("'fast'", lambda: Unbounded((2,)).to("fast")),
    ("of type int", lambda: Unbounded((2,), dtype=32)),
    ("Unbounded", lambda: Unbounded((2,)).enumerate()),
    ("too many", lambda: MultiCategorical([100] * 9).enumerate()),
    ("(5,)", lambda: Unbounded((2, 3)).expand(5)),
    ("6 elements", lambda: Unbounded((2, 3)).reshape(5)),
    ("start 1 after end 0", lambda: Unbounded((2, 3)).flatten(1, 0)),
    ("4", lambda: Unbounded((2, 3)).unsqueeze(4)),
    ("'a'", lambda: Unbounded((2, 3))["a"]),
    ("2.5", lambda: Unbounded((2,)).rand(2.5)),
    ("(2,)", lambda: Composite(a=Unbounded((3,)), shape=(2,))),
    ("of type int", lambda: Composite(a=3)),
    ("of type list", lambda: Composite([Unbounded((1,))])),
    ("shape=(2,) and batch_size=(3,)", lambda: Composite(shape=(2,), batch_size=(3,))),
    ("1.5", lambda: Composite().set(1.5, Unbounded((1,)))),
    ("locked", lambda: locked().set("b", Unbounded((1,)))),
    ("leads through 'a'", lambda: Composite(a=Unbounded((1,))).set(("a", "b"), Unbounded((1,)))),
    ("of type int", lambda: Composite(a=Unbounded((1,))).encode(3)),
    ("of type int", lambda: Composite(a=Unbounded((1,))).project(3)),
    ("no members", lambda: Choice([])),
    ("several classes", lambda: Choice([Unbounded((1,)), OneHot(1)])),
    ("differ in", lambda: Choice([Unbounded((1,)), Unbounded((2,))])),
    ("batched=True and feature_dims=1", lambda: NonTensor((2,), batched=True, feature_dims=1)),
    ("feature_dims=5", lambda: NonTensor((2,), feature_dims=5)),
    ("kinds", lambda: torch.stack([Unbounded((1,)), OneHot(3)])),
    ("3 flags", lambda: torch.stack([OneHot(2), OneHot(3)])[torch.tensor([True, False, True])]),
    ("index [7]", lambda: torch.stack([OneHot(2), OneHot(3)])[7]),
    ("of type int", lambda: torch.stack([OneHot(2), OneHot(3)]).encode(1)),
    # ---------------------------------------------------------------------- one environment
    ("'action'", lambda: one().step(one().reset())),
    ("(2,)", lambda: one().step(root().copy().set("action", torch.zeros(2)))),
    ("[0., 0.]", lambda: pole().step(pole().reset().set("action", torch.zeros(2)))),
    ("of type int", lambda: one().step(3)),
    ("of type int", lambda: one().reset(3)),
    ("'many'", lambda: one().rollout("many")),
    ("max_steps is -1", lambda: one().rollout(-1)),
    ("callback is 3", lambda: one().rollout(2, callback=3)),
    (
        "policy and actions",
        lambda: one().rollout(2, policy=RandomPolicy(one().full_action_spec), actions=[1]),
    ),
    ("actions is empty", lambda: one().rollout(2, actions=[])),
    ("both True", lambda: one().rollout(2, break_when_any_done=True, break_when_all_done=True)),
    ("auto_reset=False", lambda: one().rollout(2, auto_reset=False)),
    ("policy is 3", lambda: one().rollout(2, 3)),
    ("check_every is 0", lambda: one().rollout(2, check_every=0)),
    ("'truncated'", lambda: Count().rollout(2, set_truncated=True)),
    ("pipeline=2", lambda: one().rollout(2, pipeline=2)),
    ("out has batch size (1,)", lambda: one().rollout(3, out=one().rollout(1))),
    ("(3,)", lambda: one().rollout(2, lambda th, thdot: torch.zeros(3))),
    ("does not take", lambda: one().rollout(2, lambda a, b, c, d: a)),
    ("NoneType", lambda: one().rollout(2, lambda th, thdot: None)),
    ("returned int", lambda: one().rollout(2, lambda td: 3)),
    ("ended before", lambda: one().rollout(3, actions=iter([torch.zeros(1)]))),
    ("'next'", lambda: step_mdp(TensorDict({"a": torch.zeros(1)}, []))),
    ("colour", lambda: PendulumEnv(colour="red")),
    ("device is 3.5", lambda: PendulumEnv(device=3.5)),
    ("'warp'", lambda: PendulumEnv(device="warp")),
    ("batch_size is 3", lambda: Count(batch_size=3)),
    ("[-1]", lambda: Count(batch_size=[-1])),
    ("'1'", lambda: one().set_seed("1")),
    ("-1", lambda: one().set_seed(-1)),
    ("'maybe'", lambda: check_env_specs(one(), strict="maybe")),
    ("env is 3", lambda: check_env_specs(3)),
    ("the class Count", lambda: check_env_specs(Count)),
    ("of type int", lambda: evaluate(3, None, episodes=2)),
    ("episodes is 0", lambda: evaluate(Count(), None, episodes=0)),
    ("empty dict", lambda: evaluate(Count(), {}, episodes=1)),
    ("agents is 'max'", lambda: episode_stats(played(), agents="max")),
    ("'score'", lambda: episode_stats(played(), reward_key="score")),
    ("batch size ()", lambda: episode_stats(played()[0, 0])),
    ("batch size ()", lambda: split_trajectories(root())),
    ("'maybe'", lambda: split_trajectories(played(), as_nested="maybe")),
    ("agent_names is empty", lambda: check_marl_grouping({}, [])),
    ("more than once", lambda: check_marl_grouping({"g": ["a"]}, ["a", "a"])),
    ("'g' has no agents", lambda: check_marl_grouping({"g": []}, ["a"])),
    ("'b'", lambda: check_marl_grouping({"g": ["b"]}, ["a"])),
    ("'a' is in 2 groups", lambda: check_marl_grouping({"g": ["a"], "h": ["a"]}, ["a"])),
    ("no action_spec", lambda: RandomPolicy()(root())),
    (
        "cell 0",
        lambda: TicTacToeEnv().step(
            TicTacToeEnv()
            .step(TicTacToeEnv().reset().set("action", torch.tensor(0)))["next"]
            .set("action", torch.tensor(0))
        ),
    ),
    ("td_params", lambda: PendulumEnv(td_params=TensorDict({"x": torch.zeros(1)}, []))),
    # -------------------------------------------------------------------------- simulators
    ("'CartPol-v1'", lambda: make("CartPol-v1")),
    ("num_envs is 0", lambda: make("gym/CartPole-v1", 0)),
    ("'nowhere'", lambda: envkit.list_envs(world="nowhere")),
    ("of type int", lambda: make(3)),
    ("'cloud'", lambda: make("gym/CartPole-v1", 2, backend="cloud")),
    ("id is 3", lambda: envkit.register(3, Count)),
    ("kind is 'new'", lambda: envkit.register("lab/Count", Count, kind="new")),
    ("frame_skip is 0", lambda: GymEnv("CartPole-v1", frame_skip=0)),
    ("from_pixels is 'yes'", lambda: GymEnv("CartPole-v1", from_pixels="yes")),
    ("categorical_action_encoding is 2", lambda: GymWrapper(3, 2)),
    ("frame_skip is 'two'", lambda: GymEnv("CartPole-v1", frame_skip="two")),
    ("'colour'", lambda: make("gym/CartPole-v1", colour="red")),
    ("'frameskip'", lambda: GymEnv("CartPole-v1", frameskip=2)),
    ("of type int", lambda: GymWrapper(3)),
    ("autoreset", lambda: to_gym_vector(rows(), autoreset="soon")),
    ("batch", lambda: to_gym_vector(PendulumEnv())),
    # --------------------------------------------------------------------------- many at once
    ("create_env_fn is 3", lambda: SerialEnv(2, 3)),
    ("create_env_fn is 3", lambda: EnvCreator(3)),
    ("is 3, of type int", lambda: EnvCreator(lambda: 3)),
    ("create_env_kwargs is 3", lambda: EnvCreator(Count, 3)),
    ("env_or_creator is 3", lambda: envkit.get_env_metadata(3)),
    ("3 entries for 2", lambda: SerialEnv(2, [Count] * 3)),
    ("num_workers is 0", lambda: SerialEnv(0, Count)),
    ("'two'", lambda: SerialEnv("two", Count)),
    ("create_env_kwargs is 3", lambda: SerialEnv(2, Count, create_env_kwargs=3)),
    ("3 entries", lambda: SerialEnv(2, Count, create_env_kwargs=[{}] * 3)),
    ("'size'", lambda: SerialEnv(2, Count, create_env_kwargs={"size": 3}).reset()),
    ("metadata_from_workers is True", lambda: SerialEnv(2, Count, metadata_from_workers=True)),
    ("mp_start_method is 'spawn'", lambda: SerialEnv(2, Count, mp_start_method="spawn")),
    ("backend is 'cloud'", lambda: ParallelEnv(2, Count, backend="cloud")),
    ("num_processes is 5", lambda: ParallelEnv(2, Count, num_processes=5)),
    ("on_worker_failure is 'wait'", lambda: ParallelEnv(2, Count, on_worker_failure="wait")),
    ("'num_threads'", lambda: ParallelEnv(2, Count, num_thread=1)),
    ("pin_memory is True", lambda: SerialEnv(2, Count, pin_memory=True)),
    ("allow_step_when_done is True", lambda: SerialEnv(2, Count, allow_step_when_done=True)),
    (
        "use_buffers=True",
        lambda: ParallelEnv(2, Count, use_buffers=True, shared_memory=False, memmap=False),
    ),
    (
        "batch size (3,)",
        lambda: rows().step(TensorDict({"action": torch.zeros(3, 1, dtype=torch.int64)}, [3])),
    ),
    ("index is True", lambda: rows()[True]),
    ("7", lambda: rows()[7]),
    ("chooses none", lambda: rows()[0:0]),
    ("[0, 0]", lambda: rows()[[0, 0]]),
    ("running", lambda: rows().configure_parallel(num_threads=2)),
    ("truncated keys", lambda: rows().add_truncated_keys()),
    (
        "before its first reset",
        lambda: SerialEnv(2, Count).step(
            TensorDict({"action": torch.zeros(2, 1, dtype=torch.int64)}, [2])
        ),
    ),
    ("shape ()", lambda: SerialEnv(2, [Count, lambda: Count(batch_size=[3])]).reset()),
    ("empty list", lambda: MixedEnv([])),
    ("member 0 is 3", lambda: MixedEnv([3])),
    ("member 1 has absent", lambda: MixedEnv([SerialEnv(1, Count), SerialEnv(1, PendulumEnv)])),
    ("batch size ()", lambda: MixedEnv([PendulumEnv()])),
    ("backend is 'cloud'", lambda: AsyncEnvPool([Count], backend="cloud")),
    ("stack is 'pile'", lambda: AsyncEnvPool([Count], stack="pile")),
    ("exchange is 'mail'", lambda: AsyncEnvPool([Count], exchange="mail")),
    ("exchange is 'shm'", lambda: AsyncEnvPool([Count], backend="threading", exchange="shm")),
    ("env_index", lambda: pool().async_step_send(TensorDict({"action": torch.zeros(1, 1)}, [1]))),
    ("min_get", lambda: pool().async_step_recv(min_get=5)),
    ("[9]", lambda: pool().async_reset_send(TensorDict({}, [1]), env_index=[9])),
    # ------------------------------------------------------------------------- transforms
    ("of type int", lambda: TransformedEnv(3)),
    ("a transform is 3", lambda: TransformedEnv(PendulumEnv(), 3)),
    ("NoneType", lambda: Compose(None)),
    ("5", lambda: Compose(StepCounter())[5]),
    ("max_steps is 0", lambda: StepCounter(max_steps=0)),
    ("frame_skip is 0", lambda: FrameSkipTransform(0)),
    ("noops is -1", lambda: NoopResetEnv(noops=-1)),
    ("'reduced'", lambda: TargetReturn(3.0, mode="reduced")),
    ("N is 0", lambda: CatFrames(0, -1, in_keys=["th"])),
    ("dim is 1", lambda: CatFrames(2, 1, in_keys=["th"])),
    ("'soon'", lambda: CatFrames(2, -1, in_keys=["th"], padding="soon")),
    ("'th' has shape ()", lambda: played_with(CatFrames(2, -1, in_keys=["th"], mask_key="m"))),
    ("T is 0", lambda: TimeMaxPool(T=0, in_keys=["th"])),
    ("'nope'", lambda: played_with(CatTensors(["nope"], "out"))),
    ("dim is 0", lambda: CatTensors(dim=0)),
    ("'params'", lambda: played_with(CatTensors(["th", "thdot"], "params"))),
    ("in_keys", lambda: RenameTransform(["a"], ["b", "c"])),
    ("['a']", lambda: RenameTransform(["a", "b"], ["c", "a"])),
    ("'thdot'", lambda: played_with(RenameTransform(["th"], ["thdot"]))),
    ("in_key_inv=", lambda: Stack(in_keys=["a"], out_key="b", in_key_inv="c")),
    (
        "['truncated']",
        lambda: played_with(
            SelectTransform("th"), ExcludeTransform("done", "terminated", "truncated")
        ),
    ),
    ("neither of module and module_factory", lambda: ModuleTransform()),
    (
        "'nope'",
        lambda: played_with(
            ModuleTransform(TensorDictModule(torch.nn.Linear(1, 1), ["nope"], ["out"]))
        ),
    ),
    ("does not say which entries", lambda: ModuleTransform(torch.nn.Linear(1, 1))),
    ("in_keys", lambda: VideoRecorder(None, "x", in_keys=["a", "b"])),
    ("works only in one", lambda: PixelRenderTransform()(root())),
    ("'cubicle'", lambda: Resize(4, 4, interpolation="cubicle")),
    ("w is 0", lambda: Crop(0, 4)),
    ("shape ()", lambda: played_with(GrayScale(in_keys=["th"]))),
    ("no batch axis", lambda: RandomCropTensorDict(2)(root())),
    ("sub_seq_len is -1", lambda: RandomCropTensorDict(-1)),
    ("init_key is ('a', 'b')", lambda: InitTracker(init_key=("a", "b"))),
    ("scale is 'b'", lambda: RewardScaling(1, "b")),
    ("loc is 'a'", lambda: ObservationNorm("a", 1, in_keys=["th"])),
    ("scale is [1, 'b']", lambda: ActionScaling(loc=0, scale=[1, "b"])),
    ("gamma is 'half'", lambda: Reward2GoTransform(gamma="half")),
    ("gamma is 'half'", lambda: MultiStepTransform(2, "half")),
    ("decay is 'slow'", lambda: VecNorm(in_keys=["th"], decay="slow")),
    ("eps is -1", lambda: VecNormV2(in_keys=["th"], eps=-1)),
    ("target_return is 'all'", lambda: TargetReturn("all")),
    ("padding_value is 'x'", lambda: CatFrames(2, -1, in_keys=["th"], padding_value="x")),
    ("lower bound is 'a'", lambda: ClipTransform(in_keys=["th"], low="a")),
    (
        "tensor([0., 3.])",
        lambda: ClipTransform(in_keys=["th"], low=torch.tensor([0.0, 3.0]), high=2),
    ),
    ("weights is 'a'", lambda: LineariseRewards(in_keys=["reward"], weights="a")),
    ("prob is 2", lambda: RandomTruncationTransform(1, 5, prob=2)),
    ("cond is 3", lambda: ConditionalSkip(3)),
    ("condition is 3", lambda: ConditionalPolicySwitch(RandomPolicy(), 3)),
    ("fn is 3", lambda: UnaryTransform(["a"], ["b"], fn=3)),
    ("stop is 3", lambda: TerminateTransform(3)),
    ("batch_size is 3", lambda: BatchSizeTransform(batch_size=3)),
    ("fill_float is 'x'", lambda: AutoResetTransform(fill_float="x")),
    ("sampling is 'x'", lambda: ActionDiscretizer(3, sampling="x")),
    ("state_dim is 0", lambda: gSDENoise(state_dim=0, action_dim=2)),
    ("of type int", lambda: TensorDictPrimer(3)),
    ("given int", lambda: BurnInTransform(3, burn_in=1)),
    ("3", lambda: DoubleToFloat(in_keys=3)),
    ("dims is (3,)", lambda: PermuteTransform(3, in_keys=["th"])),
    ("ref_key is ['a', 'b']", lambda: ExpandAs("a", ["a", "b"])),
    ("out_keys is ['a']", lambda: Timer(out_keys="a")),
    ("cache_specs is 2", lambda: TransformedEnv(PendulumEnv(), cache_specs=2)),
    ("sub_seq_len is 9", lambda: RandomCropTensorDict(9)(played())),
    ("Linear", lambda: BurnInTransform([torch.nn.Linear(1, 1)], burn_in=1)),
    ("whole episodes", lambda: played_with(Reward2GoTransform())),
    ("no episode ends", lambda: Reward2GoTransform().inv(played())),
    ("n_steps is 0", lambda: MultiStepTransform(0, 0.9)),
    ("gamma is 3", lambda: MultiStepTransform(2, 3)),
    (
        "random=True and default_value",
        lambda: TensorDictPrimer(a=Unbounded((1,)), random=True, default_value=0.0),
    ),
    ("['a']", lambda: TensorDictPrimer({"b": Unbounded((1,))}, a=Unbounded((1,)))),
    ("['z']", lambda: TensorDictPrimer({"b": Unbounded((1,))}, default_value={"z": 1.0})),
    ("'time'", lambda: RewardSum()(TensorDict({"reward": torch.zeros(3, 1)}, [3]))),
    ("decay is 2", lambda: VecNorm(in_keys=["th"], decay=2)),
    (
        "none yet",
        lambda: VecNormV2(in_keys=["th"]).loc and VecNormV2(in_keys=["th"]).to_observation_norm(),
    ),
    ("5 entries", lambda: VecNorm(in_keys=["th"], shapes=[(1,)] * 5)),
    ("num_intervals is 0", lambda: ActionDiscretizer(0)),
    ("no bound", lambda: ClipTransform(in_keys=["th"])),
    ("lower bound 2", lambda: ClipTransform(in_keys=["th"], low=2, high=1)),
    ("lower bound 2", lambda: RewardClipping(2, 1)),
    ("no keys", lambda: played_with(ObservationNorm(0.0, 1.0))),
    ("loc=0", lambda: ObservationNorm(loc=0.0, in_keys=["th"])),
    ("no loc and scale", lambda: played_with(ObservationNorm(in_keys=["th"]))),
    ("in none", lambda: ObservationNorm(in_keys=["th"]).init_stats(3)),
    (
        "num_iter is 0",
        lambda: transformed(ObservationNorm(in_keys=["th"])).transform[0].init_stats(0),
    ),
    ("(2, 2)", lambda: LineariseRewards(in_keys=["reward"], weights=torch.zeros(2, 2))),
    ("dims is", lambda: PermuteTransform((0, 1), in_keys=["th"])),
    ("'nope'", lambda: played_with(DoubleToFloat(in_keys=["nope"]))),
    ("Hash", lambda: Hash(in_keys=["a"], out_keys=["b"]).get_input_from_hash(torch.zeros(1))),
    # -------------------------------------------------------------------- collectors, files
    ("frames_per_batch is 0", lambda: collected(frames_per_batch=0)),
    ("'many'", lambda: collected(frames_per_batch="many")),
    ("both None", lambda: collected(frames_per_batch=None)),
    ("total_frames is 'all'", lambda: collected(total_frames="all")),
    ("exploration_type is", lambda: collected(exploration_type="wild")),
    ("prefetch is 3", lambda: collected(prefetch=3)),
    ("traj_format is 'pile'", lambda: collected(traj_format="pile")),
    ("'cat'", lambda: collected(traj_format="cat")),
    ("track_traj_ids=False", lambda: collected(track_traj_ids=False, split_trajs=True)),
    ("interruptor", lambda: collected(interruptor=3)),
    ("reset_when_done=False", lambda: collected(reset_when_done=False, split_trajs=True)),
    (
        "policy_factory",
        lambda: Collector(
            Count,
            RandomPolicy(Count().full_action_spec),
            policy_factory=lambda: None,
            frames_per_batch=4,
            total_frames=8,
        ),
    ),
    ("replay_buffer_chunk=False", lambda: collected(replay_buffer_chunk=False)),
    ("postproc is 3", lambda: collected(postproc=3)),
    ("replay_buffer is 3", lambda: collected(replay_buffer=3)),
    ("policy is 3", lambda: Collector(Count, 3, frames_per_batch=4, total_frames=8)),
    ("max_frames_per_traj is -3", lambda: collected(max_frames_per_traj=-3)),
    ("init_random_frames is -3", lambda: collected(init_random_frames=-3)),
    ("split_trajs is 'yes'", lambda: collected(split_trajs="yes")),
    ("storing_device is 'warp'", lambda: collected(storing_device="warp")),
    ("backend is 'cloud'", lambda: collected(backend="cloud")),
    ("'frames_per_bath'", lambda: collected(frames_per_bath=3)),
    ("preemptive_threshold", lambda: collected(preemptive_threshold=0.5)),
    (
        "replay buffer",
        lambda: SyncDataCollector(Count, None, frames_per_batch=4, total_frames=8).start(),
    ),
    (
        "in the background",
        lambda: (
            SyncDataCollector(Count, None, frames_per_batch=4, total_frames=8).pause().__enter__()
        ),
    ),
    ("/no/such/file", lambda: envkit.load("/no/such/file.pt", env=Count())),
    ("path is 3", lambda: envkit.save(3, env=Count())),
    ("/no/such", lambda: envkit.save("/no/such/folder/run.pt", policy=torch.nn.Linear(1, 1))),
    ("path is ''", lambda: envkit.save("", policy=torch.nn.Linear(1, 1))),
]


EXPECTED = re.compile(
    r"\b(must|[Ee]xpected|needs?|takes?|but|cannot|only|one of|exclude|differ|exists?|[Tt]here are|same thing|neither"
    r"|more than once|outside|too many|keyword|without|Pass (a|an|the|numbers|')|no|none|locked|not|ended before|two names|empty|each|both|one|running)(?!\w)"
)
FIX = re.compile(
    r"(?:^|\n|[.:;,] (?:or |and )?|or )(?:Pass|Call|Use|Leave|Give|Name|Set|Put|Add|Choose|Build|Make|Reset|Return|Write|Say|Wrap"
    r"|Take|Keep|Assign|Append|Record|Copy|Exchange|Expand|Enumerate|Stack|Turn|Convert|Receive|Send|Start|Let|Correct"
    r"|Allocate|Delete|Bring|Declare|Step|Render|Sample|Did you mean|pass|call|put|choose|leave|say|use|take|keep)\b"
    r"|must be (?:one of|'\w+' or|'\w+', )|There are: |spec\.project|shows what it takes|TransformedEnv\(env"
)
# Masks and hooks that a user writes have an underscore; all else with one, modules and files are our own.
PRIVATE = re.compile(
    r"(?<![\w.'\"])_(?!reset\b|step\b|set_seed\b)[a-z]\w+|envkit_bridges|\.py\b|\.md\b"
    r"|\benvkit\.(batched|collectors|data|env|specs|transforms|transport|functional|arrays|evaluation|cli)\b"
)


@pytest.mark.parametrize(
    ("wrong", "call"), CASES, ids=[str(number) for number in range(len(CASES))]
)
def test_an_error_says_what_was_wrong_what_was_expected_and_how_to_fix_it(wrong, call):
    with pytest.raises(EnvkitError) as caught:
        call()
    message = str(caught.value).split("\n  Traceback")[
        0
    ]  # a worker's stack is for the author of the env

    assert wrong in message
    assert EXPECTED.search(message), message
    assert FIX.search(message), message
    assert not PRIVATE.search(message), message


def test_there_are_many_distinct_errors():
    assert len(CASES) >= 150


@pytest.mark.parametrize(
    "vague", ["invalid mask", "wrong shape (3,)", "see envkit.specs.trees", "bad value 3"]
)
def test_a_vague_message_is_found(vague):
    assert not (EXPECTED.search(vague) and FIX.search(vague) and not PRIVATE.search(vague))
