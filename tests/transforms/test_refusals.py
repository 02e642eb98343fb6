"""What transforms refuse, and with which way out."""

from __future__ import annotations

from functools import cache
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from envkit import (
    ActionDiscretizer,
    ActionScaling,
    AutoResetTransform,
    BatchSizeTransform,
    Bounded,
    BraxEnv,
    BurnInTransform,
    CatFrames,
    CatTensors,
    ClipTransform,
    Compose,
    ConditionalPolicySwitch,
    ConditionalSkip,
    Crop,
    DoubleToFloat,
    ExcludeTransform,
    ExpandAs,
    FrameSkipTransform,
    GrayScale,
    Hash,
    InitTracker,
    LineariseRewards,
    ModuleTransform,
    MultiStep,
    MultiStepTransform,
    NoopResetEnv,
    NormalizeReward,
    ObservationNorm,
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
    TargetReturn,
    TensorDictPrimer,
    TerminateTransform,
    TimeMaxPool,
    Timer,
    TransformedEnv,
    UnaryTransform,
    Unbounded,
    VecNorm,
    VecNormV2,
    VideoRecorder,
    gSDENoise,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    DoneError,
    KeyCollisionError,
    MissingKeyError,
    NoParentError,
    OptionError,
    PlacementError,
    PositiveAxisError,
    PrimerError,
    SpecError,
    SpecTypeError,
    StatisticsError,
    TransformIndexError,
    UnsupportedError,
)
from tests.zoo.envs import Count
from tests.zoo.refusals import assert_refused, each_row
from tests.zoo.transform_envs import TwoTeams


def owned():
    counter = StepCounter()
    TransformedEnv(Count(), counter)
    return counter


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
def played() -> TensorDict:
    return rows().rollout(3, break_when_any_done=False)


def transformed(*transforms: Any) -> TransformedEnv:
    return TransformedEnv(PendulumEnv(), Compose(*transforms))


def seen(norm: VecNorm) -> VecNorm:
    norm(TensorDict({"x": torch.zeros(2, 1)}, [2]))
    return norm


def played_with(*transforms: Any) -> TensorDict:
    return transformed(*transforms).rollout(2)


REFUSALS = [
    # -- transforms
    (
        "a transform of two envs",
        lambda: TransformedEnv(Count(), owned()),
        AttributeError,
        r"StepCounter.*clone\(\)",
    ),
    (
        "a transform that is a number",
        lambda: TransformedEnv(Count(), 3),
        ValueError,
        "of type int, but must be a Transform or a function",
    ),
    (
        "a list of transforms",
        lambda: TransformedEnv(Count(), [StepCounter(), InitTracker()]),
        ValueError,
        r"of type list, .*Put several into one: Compose\(t1, t2\)",
    ),
    (
        "an index out of range",
        lambda: Compose(StepCounter()).insert(7, InitTracker()),
        ValueError,
        "index is 7, but there are 1 transforms",
    ),
    ("a limit of no step", lambda: StepCounter(0), ValueError, "max_steps is 0.*None for no limit"),
    (
        "a random default",
        lambda: TensorDictPrimer(m=Unbounded((1,)), random=True, default_value=1.0),
        ValueError,
        "random=True and default_value are both given. Pass one",
    ),
    (
        "names of unequal number",
        lambda: RenameTransform(["a", "b"], ["c"]),
        ValueError,
        r"2 in_keys \['a', 'b'\].*1 out_keys \['c'\].*Pass one for each",
    ),
    ("a return over no step", lambda: MultiStep(0.9, 0), ValueError, "n_steps is 0.*at least 1"),
    # -- arguments and data
    ("TransformedEnv: of type int", lambda: TransformedEnv(3), ArgumentTypeError, "of type int"),
    ("Compose: NoneType", lambda: Compose(None), ArgumentError, "NoneType"),
    ("Compose: 5", lambda: Compose(StepCounter())[5], TransformIndexError, "5"),
    (
        "FrameSkipTransform: frame_skip is 0",
        lambda: FrameSkipTransform(0),
        ArgumentError,
        "frame_skip is 0",
    ),
    ("NoopResetEnv: noops is -1", lambda: NoopResetEnv(noops=-1), ArgumentError, "noops is -1"),
    (
        "TargetReturn: 'reduced'",
        lambda: TargetReturn(3.0, mode="reduced"),
        ArgumentError,
        "'reduced'",
    ),
    ("CatFrames: N is 0", lambda: CatFrames(0, -1, in_keys=["th"]), ArgumentError, "N is 0"),
    ("CatFrames: dim is 1", lambda: CatFrames(2, 1, in_keys=["th"]), PositiveAxisError, "dim is 1"),
    (
        "CatFrames: 'soon'",
        lambda: CatFrames(2, -1, in_keys=["th"], padding="soon"),
        ArgumentError,
        "'soon'",
    ),
    (
        "CatFrames: 'th' has shape ()",
        lambda: played_with(CatFrames(2, -1, in_keys=["th"], mask_key="m")),
        SpecError,
        r"'th' has shape \(\)",
    ),
    ("TimeMaxPool: T is 0", lambda: TimeMaxPool(T=0, in_keys=["th"]), ArgumentError, "T is 0"),
    (
        "CatTensors: 'nope'",
        lambda: played_with(CatTensors(["nope"], "out")),
        MissingKeyError,
        "'nope'",
    ),
    ("CatTensors: dim is 0", lambda: CatTensors(dim=0), ArgumentError, "dim is 0"),
    (
        "CatTensors: 'params'",
        lambda: played_with(CatTensors(["th", "thdot"], "params")),
        KeyCollisionError,
        "'params'",
    ),
    (
        "RenameTransform: ['a']",
        lambda: RenameTransform(["a", "b"], ["c", "a"]),
        ArgumentError,
        r"\['a'\]",
    ),
    (
        "RenameTransform: 'thdot'",
        lambda: played_with(RenameTransform(["th"], ["thdot"])),
        KeyCollisionError,
        "'thdot'",
    ),
    (
        "Stack: in_key_inv=",
        lambda: Stack(in_keys=["a"], out_key="b", in_key_inv="c"),
        ArgumentError,
        "in_key_inv=",
    ),
    (
        "SelectTransform: ['truncated']",
        lambda: played_with(
            SelectTransform("th"), ExcludeTransform("done", "terminated", "truncated")
        ),
        MissingKeyError,
        r"\['truncated'\]",
    ),
    (
        "ModuleTransform: neither of module and module_factory",
        lambda: ModuleTransform(),
        ArgumentError,
        "neither of module and module_factory",
    ),
    (
        "ModuleTransform: 'nope'",
        lambda: played_with(
            ModuleTransform(TensorDictModule(torch.nn.Linear(1, 1), ["nope"], ["out"]))
        ),
        MissingKeyError,
        "'nope'",
    ),
    (
        "ModuleTransform: does not say which entries",
        lambda: ModuleTransform(torch.nn.Linear(1, 1)),
        ArgumentError,
        "does not say which entries",
    ),
    (
        "VideoRecorder: in_keys",
        lambda: VideoRecorder(None, "x", in_keys=["a", "b"]),
        ArgumentError,
        "in_keys",
    ),
    (
        "PixelRenderTransform: works only in one",
        lambda: PixelRenderTransform()(root()),
        NoParentError,
        "works only in one",
    ),
    (
        "Resize: 'cubicle'",
        lambda: Resize(4, 4, interpolation="cubicle"),
        ArgumentError,
        "'cubicle'",
    ),
    ("Crop: w is 0", lambda: Crop(0, 4), ArgumentError, "w is 0"),
    (
        "GrayScale: shape ()",
        lambda: played_with(GrayScale(in_keys=["th"])),
        SpecError,
        r"shape \(\)",
    ),
    (
        "RandomCropTensorDict: no batch axis",
        lambda: RandomCropTensorDict(2)(root()),
        PlacementError,
        "no batch axis",
    ),
    (
        "RandomCropTensorDict: sub_seq_len is -1",
        lambda: RandomCropTensorDict(-1),
        ArgumentError,
        "sub_seq_len is -1",
    ),
    (
        "InitTracker: init_key is ('a', 'b')",
        lambda: InitTracker(init_key=("a", "b")),
        ArgumentError,
        r"init_key is \('a', 'b'\)",
    ),
    (
        "RewardScaling: scale is 'b'",
        lambda: RewardScaling(1, "b"),
        ArgumentTypeError,
        "scale is 'b'",
    ),
    (
        "ObservationNorm: loc is 'a'",
        lambda: ObservationNorm("a", 1, in_keys=["th"]),
        ArgumentTypeError,
        "loc is 'a'",
    ),
    (
        "ActionScaling: scale is [1, 'b']",
        lambda: ActionScaling(loc=0, scale=[1, "b"]),
        ArgumentTypeError,
        r"scale is \[1, 'b'\]",
    ),
    (
        "Reward2GoTransform: gamma is 'half'",
        lambda: Reward2GoTransform(gamma="half"),
        ArgumentTypeError,
        "gamma is 'half'",
    ),
    (
        "MultiStepTransform: gamma is 'half'",
        lambda: MultiStepTransform(2, "half"),
        ArgumentTypeError,
        "gamma is 'half'",
    ),
    (
        "VecNorm: decay is 'slow'",
        lambda: VecNorm(in_keys=["th"], decay="slow"),
        ArgumentTypeError,
        "decay is 'slow'",
    ),
    ("VecNormV2: eps is -1", lambda: VecNormV2(in_keys=["th"], eps=-1), ArgumentError, "eps is -1"),
    (
        "TargetReturn: target_return is 'all'",
        lambda: TargetReturn("all"),
        ArgumentTypeError,
        "target_return is 'all'",
    ),
    (
        "CatFrames: padding_value is 'x'",
        lambda: CatFrames(2, -1, in_keys=["th"], padding_value="x"),
        ArgumentTypeError,
        "padding_value is 'x'",
    ),
    (
        "ClipTransform: lower bound is 'a'",
        lambda: ClipTransform(in_keys=["th"], low="a"),
        ArgumentTypeError,
        "lower bound is 'a'",
    ),
    (
        "ClipTransform: tensor([0., 3.])",
        lambda: ClipTransform(in_keys=["th"], low=torch.tensor([0.0, 3.0]), high=2),
        ArgumentError,
        r"tensor\(\[0\., 3\.\]\)",
    ),
    (
        "LineariseRewards: weights is 'a'",
        lambda: LineariseRewards(in_keys=["reward"], weights="a"),
        ArgumentTypeError,
        "weights is 'a'",
    ),
    (
        "RandomTruncationTransform: prob is 2",
        lambda: RandomTruncationTransform(1, 5, prob=2),
        ArgumentError,
        "prob is 2",
    ),
    ("ConditionalSkip: cond is 3", lambda: ConditionalSkip(3), ArgumentTypeError, "cond is 3"),
    (
        "ConditionalPolicySwitch: condition is 3",
        lambda: ConditionalPolicySwitch(RandomPolicy(), 3),
        ArgumentTypeError,
        "condition is 3",
    ),
    (
        "UnaryTransform: fn is 3",
        lambda: UnaryTransform(["a"], ["b"], fn=3),
        ArgumentTypeError,
        "fn is 3",
    ),
    (
        "TerminateTransform: stop is 3",
        lambda: TerminateTransform(3),
        ArgumentTypeError,
        "stop is 3",
    ),
    (
        "BatchSizeTransform: batch_size is 3",
        lambda: BatchSizeTransform(batch_size=3),
        ArgumentTypeError,
        "batch_size is 3",
    ),
    (
        "AutoResetTransform: fill_float is 'x'",
        lambda: AutoResetTransform(fill_float="x"),
        ArgumentTypeError,
        "fill_float is 'x'",
    ),
    (
        "ActionDiscretizer: sampling is 'x'",
        lambda: ActionDiscretizer(3, sampling="x"),
        ArgumentError,
        "sampling is 'x'",
    ),
    (
        "gSDENoise: state_dim is 0",
        lambda: gSDENoise(state_dim=0, action_dim=2),
        ArgumentError,
        "state_dim is 0",
    ),
    ("TensorDictPrimer: of type int", lambda: TensorDictPrimer(3), SpecTypeError, "of type int"),
    (
        "BurnInTransform: given int",
        lambda: BurnInTransform(3, burn_in=1),
        ArgumentError,
        "given int",
    ),
    ("DoubleToFloat: 3", lambda: DoubleToFloat(in_keys=3), ArgumentTypeError, "3"),
    (
        "PermuteTransform: dims is (3,)",
        lambda: PermuteTransform(3, in_keys=["th"]),
        ArgumentError,
        r"dims is \(3,\)",
    ),
    (
        "ExpandAs: ref_key is ['a', 'b']",
        lambda: ExpandAs("a", ["a", "b"]),
        ArgumentError,
        r"ref_key is \['a', 'b'\]",
    ),
    ("Timer: out_keys is ['a']", lambda: Timer(out_keys="a"), OptionError, r"out_keys is \['a'\]"),
    (
        "TransformedEnv: cache_specs is 2",
        lambda: TransformedEnv(PendulumEnv(), cache_specs=2),
        ArgumentTypeError,
        "cache_specs is 2",
    ),
    (
        "RandomCropTensorDict: sub_seq_len is 9",
        lambda: RandomCropTensorDict(9)(played()),
        PlacementError,
        "sub_seq_len is 9",
    ),
    (
        "BurnInTransform: Linear",
        lambda: BurnInTransform([torch.nn.Linear(1, 1)], burn_in=1),
        ArgumentError,
        "Linear",
    ),
    (
        "Reward2GoTransform: whole episodes",
        lambda: played_with(Reward2GoTransform()),
        ArgumentError,
        "whole episodes",
    ),
    (
        "Reward2GoTransform: no episode ends",
        lambda: Reward2GoTransform().inv(played()),
        DoneError,
        "no episode ends",
    ),
    (
        "MultiStepTransform: n_steps is 0",
        lambda: MultiStepTransform(0, 0.9),
        ArgumentError,
        "n_steps is 0",
    ),
    (
        "MultiStepTransform: gamma is 3",
        lambda: MultiStepTransform(2, 3),
        ArgumentError,
        "gamma is 3",
    ),
    (
        "TensorDictPrimer: ['a']",
        lambda: TensorDictPrimer({"b": Unbounded((1,))}, a=Unbounded((1,))),
        ArgumentError,
        r"\['a'\]",
    ),
    (
        "TensorDictPrimer: ['z']",
        lambda: TensorDictPrimer({"b": Unbounded((1,))}, default_value={"z": 1.0}),
        MissingKeyError,
        r"\['z'\]",
    ),
    (
        "RewardSum: 'time'",
        lambda: RewardSum()(TensorDict({"reward": torch.zeros(3, 1)}, [3])),
        ArgumentError,
        "'time'",
    ),
    ("VecNorm: decay is 2", lambda: VecNorm(in_keys=["th"], decay=2), ArgumentError, "decay is 2"),
    (
        "VecNormV2: none yet",
        lambda: VecNormV2(in_keys=["th"]).loc and VecNormV2(in_keys=["th"]).to_observation_norm(),
        StatisticsError,
        "none yet",
    ),
    (
        "VecNorm: policies without rows of their own",
        lambda: (
            TransformedEnv(
                PendulumEnv(batch_size=[3, 2]), VecNorm(["th"], policies=2)
            ).observation_spec
        ),
        BatchSizeError,
        r"\(3, 2\); expected a multiple of 2",
    ),
    (
        "NormalizeReward: policies without rows of their own",
        lambda: transformed(NormalizeReward(policies=2)).reward_spec,
        BatchSizeError,
        r"\(\); expected a multiple of 2",
    ),
    (
        "VecNorm: data of policies without rows of their own",
        lambda: VecNorm(["x"], policies=2)(TensorDict({"x": torch.zeros(3, 2, 1)}, [3])),
        BatchSizeError,
        r"\(3,\); expected a multiple of 2",
    ),
    (
        "VecNorm: no such policy",
        lambda: VecNorm(["th"], policies=2).unstacked(2),
        ArgumentError,
        "expected the number of a policy",
    ),
    (
        "VecNorm: an ObservationNorm of policies",
        lambda: VecNorm(["th"], policies=2).to_observation_norm(),
        UnsupportedError,
        "unstacked",
    ),
    (
        "VecNorm: shared statistics of other policies",
        lambda: VecNorm(["x"], shared_td=seen(VecNorm(["x"], policies=2)).statistics),
        ArgumentError,
        r"shape \(2,\)",
    ),
    (
        "VecNorm: 5 entries",
        lambda: VecNorm(in_keys=["th"], shapes=[(1,)] * 5),
        ArgumentError,
        "5 entries",
    ),
    (
        "ActionDiscretizer: num_intervals is 0",
        lambda: ActionDiscretizer(0),
        ArgumentError,
        "num_intervals is 0",
    ),
    (
        "ClipTransform: no bound",
        lambda: ClipTransform(in_keys=["th"]),
        ArgumentTypeError,
        "no bound",
    ),
    (
        "ClipTransform: lower bound 2",
        lambda: ClipTransform(in_keys=["th"], low=2, high=1),
        ArgumentError,
        "lower bound 2",
    ),
    ("RewardClipping: lower bound 2", lambda: RewardClipping(2, 1), ArgumentError, "lower bound 2"),
    (
        "ObservationNorm: no keys",
        lambda: played_with(ObservationNorm(0.0, 1.0)),
        ArgumentError,
        "no keys",
    ),
    (
        "ObservationNorm: loc=0",
        lambda: ObservationNorm(loc=0.0, in_keys=["th"]),
        ArgumentError,
        "loc=0",
    ),
    (
        "ObservationNorm: no loc and scale",
        lambda: played_with(ObservationNorm(in_keys=["th"])),
        StatisticsError,
        "no loc and scale",
    ),
    (
        "ObservationNorm: in none",
        lambda: ObservationNorm(in_keys=["th"]).init_stats(3),
        NoParentError,
        "in none",
    ),
    (
        "ObservationNorm: num_iter is 0",
        lambda: transformed(ObservationNorm(in_keys=["th"])).transform[0].init_stats(0),
        ArgumentError,
        "num_iter is 0",
    ),
    (
        "LineariseRewards: (2, 2)",
        lambda: LineariseRewards(in_keys=["reward"], weights=torch.zeros(2, 2)),
        ArgumentError,
        r"\(2, 2\)",
    ),
    (
        "PermuteTransform: dims is",
        lambda: PermuteTransform((0, 1), in_keys=["th"]),
        ArgumentError,
        "dims is",
    ),
    (
        "DoubleToFloat: 'nope'",
        lambda: played_with(DoubleToFloat(in_keys=["nope"])),
        MissingKeyError,
        "'nope'",
    ),
    (
        "Hash: Hash",
        lambda: Hash(in_keys=["a"], out_keys=["b"]).get_input_from_hash(torch.zeros(1)),
        StatisticsError,
        "Hash",
    ),
    # -- others
    (
        "an env of another library",
        lambda: TransformedEnv(gymnasium.make("CartPole-v1")),
        ValueError,
        r"of type TimeLimit.*Wrap it: GymWrapper\(env\)",
    ),
    (
        "as many sums as rewards",
        lambda: TransformedEnv(TwoTeams(), RewardSum(None, ["one"])).reset(),
        ValueError,
        r"1 out_keys .*for the rewards",
    ),
    (
        "a skip cannot be called on data",
        lambda: ConditionalSkip(lambda td: True)(TensorDict()),
        NotImplementedError,
        "TransformedEnv",
    ),
    (
        "a keyword that resembles none is told with all",
        lambda: Compose(StepCounter(), zeal=1),
        TypeError,
        r"^Compose takes no keyword 'zeal'\. Leave it out\.",
    ),
    (
        "numbers that are not in their spec are refused before a program runs",
        lambda: TransformedEnv(
            BraxEnv("fast", batch_size=[3], device="cpu"),
            TensorDictPrimer(mem=Bounded(0.0, 1.0, (1,)), default_value=2, expand_specs=True),
        ).reset(),
        PrimerError,
        r"'mem'.*is not in its spec",
    ),
    (
        "clipping needs bounds in order 1",
        lambda: RewardClipping(),
        ArgumentError,
        "RewardClipping has no bound",
    ),
    (
        "clipping needs bounds in order 2",
        lambda: ClipTransform(["a"], low=1, high=0),
        ValueError,
        "lower bound 1, but it must be below the upper one, 0",
    ),
    # -- misspelt keywords
    (
        "no keyword max_steps",
        lambda: StepCounter(max_step=3),
        OptionError,
        r"takes no keyword .*Did you mean 'max_steps'\?",
    ),
    (
        "no keyword dim",
        lambda: CatFrames(2, dims=-1),
        OptionError,
        r"takes no keyword .*Did you mean 'dim'\?",
    ),
    (
        "no keyword noops",
        lambda: NoopResetEnv(noop=3),
        OptionError,
        r"takes no keyword .*Did you mean 'noops'\?",
    ),
    (
        "no keyword in_keys",
        lambda: DoubleToFloat(in_kys=["a"]),
        OptionError,
        r"takes no keyword .*Did you mean 'in_keys'\?",
    ),
    (
        "no keyword decay",
        lambda: VecNorm(decays=0.9),
        OptionError,
        r"takes no keyword .*Did you mean 'decay'\?",
    ),
    (
        "no keyword eps",
        lambda: VecNorm(["a"], ep=0.9, new_api=True),
        OptionError,
        r"takes no keyword .*Did you mean 'eps'\?",
    ),
    (
        "a function of observations is no transform",
        lambda: TransformedEnv(Count(), lambda obs: obs / 2).reset(),
        ArgumentError,
        r"<lambda> that is used as a transform changed 'done' from torch.bool to torch.float32.*td\.set\('observation'",
    ),
]


@each_row(REFUSALS)
def test_it_is_refused_with_a_way_out(call, error, words):
    assert_refused(call, error, words)
