"""The public transforms: how each is built, and the env that suits it. One table for the contract of all of them.

Most stand around an env that observes a ``place`` and a ``sight``. There are three: `Walk`, a simulator, which is
stepped on rows of memory; `StatelessWalk`, which reads its state from the data; and `tests.zoo.walkers.Walker`,
whose steps are programs.

Conventions
    place  float32 (2,); sight: ``lamps``, three of bool or int8, and ``level``, uint8.
    chain  several transforms in one case; it is named in lower case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

import envkit
from envkit import Composite, EnvBase, OneHot, Transform, Unbounded
from envkit.specs import Binary
from envkit.transforms.actions import SamplingStrategy
from tests.zoo.gym_envs import Lives
from tests.zoo.half import TORCH_HALF
from tests.zoo.transform_envs import Cards, Drawn, SelfResetting, SelfResettingRows, Twins

# ---------------------------------------------------------------------------------------------- envs


class Walk(gymnasium.Env):
    """Walk from a random place; ends by itself, or is cut, at times that the seed decides.

    ``fails_at``: the call, counted from 0 over steps and resets, that raises.
    """

    observation_space = spaces.Dict(
        place=spaces.Box(-9.0, 9.0, (2,)),
        sight=spaces.Dict(lamps=spaces.MultiBinary(3), level=spaces.Box(0, 255, (1,), np.uint8)),
    )
    action_space = spaces.Discrete(2)

    def __init__(self, fails_at: int | None = None):
        self.fails_at, self.calls = fails_at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count()
        self.place = self.np_random.normal(size=2)
        self.level = int(self.np_random.integers(256))
        return self._observe(), {}

    def step(self, action):
        self._count()
        self.place = self.place + (action - 0.5) * self.np_random.random(2)
        observation = self._observe()
        ends, cut = self.np_random.random(2) < (0.1, 0.15)
        return observation, float(self.place.sum()), bool(ends), bool(cut), {}

    def _count(self):
        self.calls += 1
        if self.calls - 1 == self.fails_at:
            raise RuntimeError(f"call {self.fails_at}")

    def _observe(self):
        lamps = (np.arange(3) < self.level % 4).astype(np.int8)
        sight = {"lamps": lamps, "level": np.array([self.level], np.uint8)}
        return {"place": self.place.astype(np.float32), "sight": sight}


class StatelessWalk(EnvBase):
    """Walk from the origin; the place and the level are the state. Takes any batch, and ends beyond 2."""

    _batch_locked = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        batch = self.batch_size
        state = {
            "place": Unbounded((*batch, 2)),
            "sight": {"level": Unbounded((*batch, 1), dtype=torch.uint8)},
        }
        lamps = {"sight": {"lamps": Binary(3, shape=(*batch, 3), dtype=torch.int8)}}
        self.state_spec = Composite(state, shape=batch)
        self.observation_spec = Composite(state, shape=batch).update(Composite(lamps, shape=batch))
        self.action_spec = OneHot(2, shape=(*batch, 2))

    def _shown(self, place, level):
        lamps = (torch.arange(3) < level % 4).to(torch.int8)
        ended = place[..., :1].abs() > 2
        sight = {"level": level, "lamps": lamps}
        entries = {"place": place, "sight": sight, "reward": place.sum(-1, keepdim=True)}
        return TensorDict({**entries, "terminated": ended}, place.shape[:-1])

    def _reset(self, td, **kwargs):
        batch = self.batch_size if td is None else td.batch_size
        level = torch.zeros((*batch, 1), dtype=torch.uint8)
        return self._shown(torch.zeros((*batch, 2)), level).exclude("reward")

    def _step(self, td):
        move = td["action"].to(torch.float32) @ torch.tensor([[-0.5, 0.25], [0.75, 0.5]])
        return self._shown(td["place"] + move, td["sight", "level"] + 1)

    def _set_seed(self, seed):
        pass


def walk(fails_at: int | None = None) -> EnvBase:
    return envkit.GymWrapper(Walk(fails_at))


def pendulum() -> EnvBase:
    return envkit.GymEnv("Pendulum-v1", max_episode_steps=6)


def canvas() -> EnvBase:
    from tests.transforms.test_images import Canvas

    return Canvas()


def doubles() -> EnvBase:
    from tests.transforms.test_values import Doubles

    return Doubles()


def lives() -> EnvBase:
    return envkit.GymWrapper(Lives())


class Opaque(Transform):
    """Does nothing, in a way no program can know of: what follows it is not fused, nor stacked."""

    only_adds_done = True

    def _call(self, next_td):
        return next_td

    def _reset(self, td, td_reset):
        return td_reset


# --------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One transform, or several.

    Args:
        make: builds it.
        env: builds the env that it stands around; None for those that are used on recorded data alone.
        policy: chooses the actions by what is shown; None: they are drawn from the spec of the env.
        data: what it makes of recorded steps must be what it shows in an env. The entries it writes, below
            ``next``. None where it writes them in an env only.
        inv: it is the inverse pass that works on recorded data.
        together: places where rows draw, count or learn together, so that no row is as if it were alone.
        never: places where it cannot stand.
        rounds: it computes with all rows at once, which are rounded otherwise than one by one.
        holds: names of its buffers.
    """

    make: Callable[[], Transform]
    env: Callable[[], EnvBase] | None = walk
    policy: Callable[[TensorDictBase], torch.Tensor] | None = None
    data: tuple = ()
    inv: bool = False
    together: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()
    rounds: bool = False
    holds: frozenset[str] = frozenset()
    needs_gpu: bool = False

    def leaves(self) -> list[Transform]:
        """Return the transforms of the case, one by one."""
        return envkit.Compose(self.make()).flat()


def alone_with(env: Callable[[], EnvBase], *make: Callable[[], Transform], **options) -> Case:
    """Return a case of a chain."""
    return Case(lambda: envkit.Compose(*(one() for one in make)), env, **options)


BATCHES = ("around", "around without buffers", "around workers", "mixed", "stateless")
"""The places around several rows."""
TOGETHER = frozenset(BATCHES)
ACTS = TOGETHER | {"alone"}  # an action is drawn for a row that is not stepped as well
ANY_ROWS = frozenset(("stateless", "programs"))
"""The places where a partial step shows the stepped rows alone, so that averages of each row are refused."""
STATISTICS = frozenset(("weight", "mean", "squares", "skipped_rows"))
AVERAGES = frozenset(("loc", "var", "count", "skipped_rows"))
NUMBERS = frozenset(("loc", "scale"))


def episodes():
    return [
        envkit.StepCounter(4),
        envkit.RewardSum(),
        envkit.InitTracker(),
        envkit.TargetReturn(3.0),
    ]


def values(half: torch.dtype = TORCH_HALF):
    loc = torch.tensor([0.5, -1.0])
    return [
        envkit.RewardScaling(0.5, 2.0),
        envkit.RewardClipping(-1.0, 0.5),
        envkit.RewardSum(),
        envkit.BinarizeReward(["reward"], ["is_good"]),
        envkit.LineariseRewards(["reward"], ["sum"], weights=[-1.5]),
        envkit.SignTransform(["place", "reward"], ["side", "sign"]),
        envkit.ClipTransform(["place"], ["near"], low=-0.25),
        envkit.ObservationNorm(loc, 2.0, ["place"], standard_normal=True),
        envkit.ObservationNorm(0.1, 0.5, [("sight", "level")], ["light"]),
        envkit.DTypeCastTransform(torch.float32, half, ["near"], ["coarse"]),
        envkit.DTypeCastTransform(torch.uint8, torch.int64, [("sight", "level")]),
        envkit.DoubleToFloat(),
    ]


def frames():
    return [
        envkit.CatFrames(3, -1, ["place"], ["places"]),
        envkit.CatFrames(2, -1, ["place"], padding="constant", padding_value=7.0),
        envkit.TimeMaxPool(["place"], ["now"], T=1),
        envkit.TimeMaxPool(["place"], ["farthest"], 2),
        envkit.UnsqueezeTransform(0, in_keys=["places"], allow_positive_dim=True),
        envkit.PermuteTransform((-1, -2), in_keys=["places"]),
        envkit.FlattenObservation(0, -1, in_keys=["places"], allow_positive_dim=True),
        envkit.UnsqueezeTransform(-1, in_keys=["reward"]),
        envkit.SqueezeTransform(-1, in_keys=["reward"]),
    ]


def names():
    sight = [("body", "place"), "eyes", "gain"]
    return [
        envkit.CatTensors(["place", ("sight", "lamps")], "seen", del_keys=False),
        envkit.RenameTransform(["place", "sight", "reward"], sight),
        envkit.RewardSum(["gain"], ["total"]),
        envkit.RenameTransform(["total"], ["copy"], create_copy=True),
        envkit.ExcludeTransform(("eyes", "lamps")),
        envkit.StepCounter(step_count_key="count"),
        envkit.SelectTransform("seen", "body", "copy", "is_init"),
    ]


def kept():
    """Transforms that remember, before others that change what shows their memory."""
    return [
        envkit.StepCounter(4),
        envkit.RewardSum(),
        envkit.TargetReturn(3.0),
        envkit.CatFrames(3, -1, ["place"], ["frames"]),
        envkit.TimeMaxPool(["place"], ["most"], 2),
        envkit.TensorDictPrimer(mem=Unbounded((1,)), default_value=3.0),
        envkit.RenameTransform(["step_count"], ["count"]),
        envkit.ClipTransform(["episode_reward"], high=0.5),
        envkit.ObservationNorm(0.5, 2.0, ["frames", "target_return"]),
        envkit.DTypeCastTransform(torch.float32, TORCH_HALF, ["most"]),
        envkit.ExcludeTransform("mem"),
        envkit.StepCounter(6),
    ]


def primed():
    return [
        envkit.TensorDictPrimer(memory=Unbounded((2,)), default_value=1.5),
        envkit.gSDENoise(),
        envkit.StepCounter(3),
    ]


def encoder() -> Transform:
    module = torch.nn.Linear(2, 2).requires_grad_(False)
    torch.nn.init.constant_(module.weight, 0.5)
    torch.nn.init.constant_(module.bias, 0.25)
    return envkit.ModuleTransform(module, in_keys="place", out_keys="code", no_grad=True)


def opponent(td):
    first = torch.zeros(td["place"].shape, dtype=torch.int64)
    first[..., 0] = 1
    return td.set("action", first)


def far(td):
    return td["place"][..., 0] > 0.5


def succeeding() -> list[Transform]:
    return [
        envkit.UnaryTransform(["place"], ["success"], fn=lambda value: value[..., :1] > 0),
        envkit.SuccessReward(),
    ]


def imagined() -> EnvBase:
    from tests.envs.model_based.test_model_based import dreamer

    return dreamer()


def curious(**options) -> Transform:
    target, predictor = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    with torch.no_grad():
        for number, parameter in enumerate((*target.parameters(), *predictor.parameters())):
            parameter.copy_(
                torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) * number
            )
    return envkit.RNDTransform(target, predictor, ["place"], **options)


def first_allowed(td: TensorDictBase) -> torch.Tensor:
    return td["action_mask"].int().argmax(-1)


class Total(torch.nn.Module):
    def forward(self, x, hidden):
        total = x.cumsum(-2) + hidden[..., :1, :]
        return total, total


def summing() -> TensorDictModule:
    return TensorDictModule(Total(), ["place", "hidden"], ["total", ("next", "hidden")])


def recorded(steps: int = 8) -> TensorDict:
    """Steps of two rows; the first one ends once."""
    generator = torch.Generator().manual_seed(0)
    place = torch.rand(2, steps + 1, 2, generator=generator)
    done = torch.zeros(2, steps, 1, dtype=torch.bool)
    done[0, 4] = done[:, -1] = True
    following = {"place": place[:, 1:], "reward": torch.rand(2, steps, 1, generator=generator)}
    following |= {"done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)}
    data = {"place": place[:, :-1], "hidden": torch.zeros(2, steps, 2), "next": following}
    return TensorDict(data, [2, steps], names=[None, "time"])


CASES: dict[str, Case] = {
    # what an episode knows of itself
    "StepCounter": Case(partial(envkit.StepCounter, 3)),
    "InitTracker": Case(envkit.InitTracker),
    "RewardSum": Case(envkit.RewardSum, data=("episode_reward",)),
    "RewardSum, compensated": Case(partial(envkit.RewardSum, compensated=True)),
    "TargetReturn": Case(partial(envkit.TargetReturn, 4.0)),
    "TrajCounter": Case(envkit.TrajCounter, together=TOGETHER, holds=frozenset(("next_number",))),
    "TensorDictPrimer": Case(
        partial(envkit.TensorDictPrimer, mem=Unbounded((2,)), default_value=3, expand_specs=True)
    ),
    "TensorDictPrimer, drawn": Case(
        lambda: envkit.TensorDictPrimer(mem=Unbounded((2,)), random=True, expand_specs=True),
        together=TOGETHER,
    ),
    "gSDENoise": Case(partial(envkit.gSDENoise, 2, 2), together=TOGETHER),
    "RandomTruncationTransform": alone_with(
        walk,
        envkit.StepCounter,
        partial(envkit.RandomTruncationTransform, 2, 4, 0.5),
        together=TOGETHER,
    ),
    "TerminateTransform": Case(partial(envkit.TerminateTransform, far)),
    "EndOfLifeTransform": Case(envkit.EndOfLifeTransform, lives, never=frozenset(("mixed",))),
    # windows of recorded data have tests by themselves
    "CatFrames": Case(partial(envkit.CatFrames, 3, -1, ["place"], ["out"], padding="constant")),
    "CatFrames, the same": Case(partial(envkit.CatFrames, 3, -1, ["place"])),
    "TimeMaxPool": Case(partial(envkit.TimeMaxPool, ["place"], ["out"], 3)),
    "Timer": Case(envkit.Timer),
    "PolicyVersion": Case(envkit.PolicyVersion),
    "NextObservationDelta": Case(partial(envkit.NextObservationDelta, ["place"])),
    "NextObservationDelta, of data": Case(
        partial(envkit.NextObservationDelta, ["place"]), None, inv=True
    ),
    "RNDTransform": Case(
        curious,
        together=TOGETHER,
        rounds=True,
        holds=frozenset(("mean", "var", "count", "skipped_rows")),
    ),
    "RNDTransform, plain": Case(
        partial(curious, normalize_obs=False, normalize_reward=False),
        rounds=True,
        holds=frozenset(("skipped_rows",)),
    ),
    # what changes entries
    "CatTensors": Case(partial(envkit.CatTensors, ["place"], "out", del_keys=False), data=("out",)),
    "RenameTransform": Case(
        lambda: envkit.RenameTransform(
            ["place", "reward"], ["out", ("deep", "reward")], create_copy=True
        ),
        data=("out", ("deep", "reward")),
    ),
    "SelectTransform": Case(partial(envkit.SelectTransform, "place"), data=("place",)),
    "ExcludeTransform": Case(partial(envkit.ExcludeTransform, "reward"), data=("place",)),
    "Stack": Case(
        partial(envkit.Stack, ["a", "b"], "both", in_key_inv="both", out_keys_inv=["a", "b"]),
        Twins,
    ),
    "UnsqueezeTransform": Case(
        lambda: envkit.UnsqueezeTransform(-1, in_keys=["place"], out_keys=["out"]), data=("out",)
    ),
    "SqueezeTransform": Case(
        lambda: envkit.SqueezeTransform(-1, in_keys=["reward"]), data=("reward",)
    ),
    "shapes": alone_with(
        walk,
        lambda: envkit.UnsqueezeTransform(-1, in_keys=["place"], out_keys=["out"]),
        lambda: envkit.PermuteTransform((-1, -2), in_keys=["out"]),
        lambda: envkit.FlattenObservation(-2, -1, in_keys=["out"]),
        lambda: envkit.SqueezeTransform(-1, in_keys=["reward"]),
        data=("out", "reward"),
    ),
    "ExpandAs": Case(partial(envkit.ExpandAs, ("a", "done"), ("a", "count")), Twins),
    "DTypeCastTransform": alone_with(
        walk,
        partial(envkit.DTypeCastTransform, torch.float32, torch.float64),
        partial(envkit.DTypeCastTransform, torch.uint8, torch.int32),
    ),
    "DoubleToFloat": Case(
        envkit.DoubleToFloat,
        doubles,
        never=frozenset(("around workers",)),  # a reset hands a state on that was cast
    ),
    "ClipTransform": Case(
        partial(envkit.ClipTransform, ["place"], ["out"], low=-0.5, high=0.5), data=("out",)
    ),
    "RewardClipping": Case(partial(envkit.RewardClipping, -0.5, 0.5), data=("reward",)),
    "SignTransform": Case(
        partial(envkit.SignTransform, ["place", "reward"], ["out", "r"]), data=("out", "r")
    ),
    "LineariseRewards": Case(
        partial(envkit.LineariseRewards, ["reward"], weights=[-2.0]),
        data=("reward",),
        holds=frozenset(("weights",)),
    ),
    "BinarizeReward": Case(envkit.BinarizeReward, data=("reward",)),
    "SuccessReward": Case(lambda: envkit.Compose(*succeeding())),
    "ObservationNorm": Case(
        partial(envkit.ObservationNorm, 0.5, 2.0, ["place"], ["out"]), data=("out",), holds=NUMBERS
    ),
    "RewardScaling": Case(
        partial(envkit.RewardScaling, 1.0, -2.0), data=("reward",), holds=NUMBERS
    ),
    "frames, normalised": alone_with(
        walk,
        partial(envkit.CatFrames, 2, -1, ["place"], ["out"]),
        partial(envkit.ObservationNorm, 0.5, 2.0, ["out"]),
        holds=NUMBERS,
    ),
    "VecNorm": Case(
        partial(envkit.VecNorm, ["place", "reward"], ["out", "r"]),
        together=TOGETHER,
        holds=STATISTICS,
    ),
    "NormalizeReward": Case(
        lambda: envkit.NormalizeReward(out_keys=["r"], clip=5.0),
        together=TOGETHER,
        holds=STATISTICS,
    ),
    "statistics of policies": alone_with(
        walk,
        partial(envkit.VecNorm, ["place"], ["out"], policies=3),
        partial(envkit.NormalizeReward, out_keys=["r"], policies=3),
        together=TOGETHER,
        never=frozenset(("alone", "inside", "inside without buffers", "workers", "nested")),
        holds=STATISTICS,
    ),
    "VecNormV2": Case(
        partial(envkit.VecNormV2, ["place", "reward"], ["out", "r"], decay=0.9),
        together=TOGETHER,
        never=ANY_ROWS,
        holds=AVERAGES,
    ),
    "VecNormV2, in the data": Case(
        partial(envkit.VecNormV2, ["place", "reward"], ["c", "r"], decay=0.9, stateful=False),
        holds=frozenset(("skipped_rows",)),
        together=TOGETHER,
    ),
    "UnaryTransform": Case(
        lambda: envkit.UnaryTransform(["place"], ["half"], fn=lambda value: value / 2),
        data=("half",),
    ),
    "Hash": Case(lambda: envkit.Hash(["place"], ["hash"]), never=TOGETHER | {"programs"}),
    "ModuleTransform": Case(encoder, data=("code",), rounds=True),
    "DreamerDecoder": Case(envkit.DreamerDecoder, imagined, never=TOGETHER | {"workers", "nested"}),
    "FiniteTensorDictCheck": Case(envkit.FiniteTensorDictCheck, data=("place",)),
    "RemoveEmptySpecs": Case(envkit.RemoveEmptySpecs),
    "DeviceCastTransform": Case(partial(envkit.DeviceCastTransform, "cpu"), data=("place",)),
    "BatchSizeTransform": Case(
        lambda: envkit.BatchSizeTransform(reshape_fn=lambda data: data.reshape(1, 1)),
        never=TOGETHER | {"nested", "programs"},  # it comes first, and one env has one shape
    ),
    "PinMemoryTransform": Case(envkit.PinMemoryTransform, needs_gpu=True),
    "function": Case(lambda: envkit.Compose(lambda td: td)),
    # pictures
    "ToTensorImage": Case(envkit.ToTensorImage, canvas, data=("pixels",)),
    "GrayScale": alone_with(canvas, envkit.ToTensorImage, envkit.GrayScale, data=("pixels",)),
    "Resize": Case(partial(envkit.Resize, 3), canvas),
    "Crop": Case(partial(envkit.Crop, 2, 3), canvas, data=("pixels",)),
    "CenterCrop": Case(partial(envkit.CenterCrop, 2), canvas, data=("pixels",)),
    "images": alone_with(
        canvas,
        envkit.ToTensorImage,
        envkit.GrayScale,
        partial(envkit.Resize, 3),
        partial(envkit.CenterCrop, 2),
    ),
    "PixelRenderTransform": Case(envkit.PixelRenderTransform, Drawn, never=frozenset(("mixed",))),
    "VideoRecorder": Case(envkit.VideoRecorder, canvas),
    # actions
    "ActionMask": Case(envkit.ActionMask, Cards, first_allowed),
    "DiscreteActionProjection": Case(
        partial(envkit.DiscreteActionProjection, 2, 4),
        together=ACTS,
        never=frozenset(("programs",)),
    ),
    "ActionDiscretizer": Case(
        partial(envkit.ActionDiscretizer, 3), pendulum, holds=frozenset(("low", "high"))
    ),
    "ActionDiscretizer, drawn": Case(
        lambda: envkit.ActionDiscretizer(4, sampling=SamplingStrategy.RANDOM),
        pendulum,
        holds=frozenset(("low", "high")),
        together=ACTS,
    ),
    "ActionScaling": Case(envkit.ActionScaling, pendulum, holds=NUMBERS),
    "FlattenAction": Case(partial(envkit.FlattenAction, -1, -1), pendulum),
    "MeanActionSelector": Case(envkit.MeanActionSelector, pendulum),
    "MultiAction": Case(envkit.MultiAction, pendulum),
    "ActionChunkTransform": Case(partial(envkit.ActionChunkTransform, 2), pendulum),
    # that step by themselves, or do not
    "ConditionalSkip": Case(
        partial(envkit.ConditionalSkip, lambda td: td["action"][..., 0] > 0),
        never=frozenset(("nested",)),  # a pool is not told which rows its sub-envs skip
    ),
    "ConditionalPolicySwitch": Case(partial(envkit.ConditionalPolicySwitch, opponent, far)),
    "FrameSkipTransform": Case(partial(envkit.FrameSkipTransform, 2)),
    "NoopResetEnv": Case(partial(envkit.NoopResetEnv, 2, random=False), together=TOGETHER),
    "NoopResetEnv, drawn": Case(partial(envkit.NoopResetEnv, 3), together=TOGETHER),
    "after averages": alone_with(
        walk,
        partial(envkit.VecNormV2, ["place"]),
        partial(envkit.NoopResetEnv, 3),
        holds=AVERAGES,
        together=TOGETHER,
        never=ANY_ROWS,
    ),
    "AutoResetTransform": Case(
        envkit.AutoResetTransform,
        partial(SelfResetting, 3),
        never=TOGETHER | {"nested"},  # it comes first
    ),
    "VecGymEnvTransform": Case(
        envkit.VecGymEnvTransform,
        partial(SelfResettingRows, (2, 3)),
        together=frozenset(("alone", "inside", "inside without buffers", "workers")),
        never=TOGETHER | {"nested"},
    ),
    # chains
    "Compose": Case(lambda: envkit.Compose(*episodes())),
    "values": Case(lambda: envkit.Compose(*values()), holds=NUMBERS | {"weights"}),
    "entries": Case(lambda: envkit.Compose(*episodes(), *frames(), *names())),
    "kept": Case(lambda: envkit.Compose(*kept()), holds=NUMBERS),
    "primed": Case(lambda: envkit.Compose(*primed()), together=TOGETHER),
    "none": Case(envkit.Compose),
    # on recorded data alone
    "MultiStepTransform": Case(lambda: envkit.MultiStepTransform(3, 0.9), None, inv=True),
    "Reward2GoTransform": Case(envkit.Reward2GoTransform, None, inv=True),
    "BurnInTransform": Case(
        lambda: envkit.BurnInTransform(summing(), burn_in=2),
        None,
    ),
    "RandomCropTensorDict": Case(partial(envkit.RandomCropTensorDict, 3), None),
}
