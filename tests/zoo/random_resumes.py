"""Random runs that are cut, saved and gone on with by other objects: ``python -m tests.zoo.random_resumes FIRST COUNT``.

A number decides a run: its env, transforms, policy, collector, and where it is cut. `differs` plays it in one piece, and
again in two pieces, the second with objects that were built from nothing but what is in the file.

Conventions
    seen   observation that policies read; a float vector in every env.
    chain  transforms around the env, or around each sub-env of a pool.
"""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

import envkit
from envkit import (
    ActionDiscretizer,
    AsyncEnvPool,
    BraxEnv,
    CatFrames,
    Collector,
    Compose,
    DiscreteActionProjection,
    DMControlEnv,
    GymEnv,
    InitTracker,
    JaxEnv,
    MixedEnv,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    NoopResetEnv,
    NormalizeReward,
    ParallelEnv,
    RandomTruncationTransform,
    RewardClipping,
    RewardSum,
    SerialEnv,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TimeMaxPool,
    TrajCounter,
    TransformedEnv,
    Unbounded,
    VecNorm,
    VecNormV2,
    compile_policy,
    gSDENoise,
)
from envkit.env.base import EnvBase
from envkit.transforms.actions import SamplingStrategy
from tests.zoo.drift import make_gym
from tests.zoo.jax_drift import jax_rows
from tests.zoo.resumed import same
from tests.zoo.walkers import Chooser, Pendulum

__all__ = ["COLLECTORS", "ENVS", "TRANSFORMS", "Run", "differs"]


# --------------------------------------------------------------------------------------------- envs


def cartpole() -> EnvBase:
    return GymEnv("CartPole-v1", max_episode_steps=11)


def pendulum() -> EnvBase:
    return GymEnv("Pendulum-v1", max_episode_steps=9)


def swing() -> EnvBase:
    return DMControlEnv("pendulum", "swingup", task_kwargs={"time_limit": 0.16})


def one_jax() -> EnvBase:
    return JaxEnv(Pendulum(), episode_length=7)


def two_jax() -> EnvBase:
    return JaxEnv(Pendulum(), batch_size=[2], episode_length=7)


@dataclass(frozen=True)
class Known:
    """How an env is made, and what its data is called.

    Args:
        make: builds it, with a function around each sub-env if it has any.
        seen: see the module.
        has_rows: transforms may stand around each sub-env.
        weight: how often it is chosen; those of processes take long.
    """

    make: Callable[[Callable[[EnvBase], EnvBase]], EnvBase]
    seen: str = "observation"
    has_rows: bool = False
    weight: int = 4


def _wrapped(make: Callable[[], EnvBase], around: Callable[[EnvBase], EnvBase]) -> EnvBase:
    return around(make())


def _alone(make: Callable[[], EnvBase]) -> Any:
    return lambda around: make()


def _pool(cls: Any, make: Callable[[], EnvBase], **options: Any) -> Any:
    return lambda around: cls(2, partial(_wrapped, make, around), **options)


def _async(count: int, make: Callable[[], EnvBase]) -> EnvBase:
    return AsyncEnvPool([make] * count, backend="threading")


def _one(make: Callable[[], EnvBase]) -> Any:
    return lambda around: SerialEnv(1, partial(_wrapped, make, around))


def _mixed(*members: Callable[[Any], EnvBase]) -> Any:
    return lambda around: MixedEnv([member(around) for member in members])


ENVS: dict[str, Known] = {
    "gym, choices": Known(_alone(cartpole)),
    "gym, moves": Known(_alone(pendulum)),
    "gym, vector": Known(_alone(partial(GymEnv, "CartPole-v1", num_envs=2, max_episode_steps=11))),
    "gym, drift": Known(_alone(partial(make_gym, 6))),
    "dm_control": Known(_alone(swing), "orientation"),
    "serial": Known(_pool(SerialEnv, cartpole), has_rows=True),
    "serial, moves": Known(_pool(SerialEnv, pendulum), has_rows=True),
    "serial, dm_control": Known(_pool(SerialEnv, swing), "orientation", has_rows=True),
    "serial, jax": Known(_pool(SerialEnv, one_jax), has_rows=True, weight=2),
    "parallel": Known(_pool(ParallelEnv, cartpole, num_processes=1), has_rows=True, weight=1),
    "async": Known(_pool(_async, cartpole), has_rows=True, weight=2),
    "jax, single": Known(_alone(one_jax)),
    "jax, rows": Known(_alone(two_jax)),
    "jax, drift": Known(_alone(partial(jax_rows, 3, 4))),
    "jax, choices": Known(
        _alone(lambda: JaxEnv(Chooser(), batch_size=[2], episode_length=5)), weight=3
    ),
    "brax": Known(
        _alone(partial(BraxEnv, "fast", batch_size=[2], episode_length=6, device="cpu")), weight=2
    ),
    "brax, single": Known(
        _alone(partial(BraxEnv, "fast", episode_length=6, device="cpu")), weight=2
    ),
    "mixed": Known(_mixed(_alone(partial(jax_rows, 2, 5)), _pool(SerialEnv, partial(make_gym, 6)))),
    "mixed, gym": Known(
        _mixed(_pool(SerialEnv, cartpole), _pool(SerialEnv, cartpole)), has_rows=True
    ),
    "mixed, dm_control": Known(_mixed(_one(swing), _one(swing)), "orientation", has_rows=True),
    "mixed, rows of dm_control": Known(
        _mixed(_pool(SerialEnv, swing), _one(swing)), "orientation", has_rows=True
    ),
}


# --------------------------------------------------------------------------------------- transforms

TRANSFORMS: dict[str, Callable[[str], Any]] = {
    "StepCounter": lambda seen: StepCounter(6),
    "RewardSum": lambda seen: RewardSum(),
    "RewardClipping": lambda seen: RewardClipping(-0.5, 0.5),
    "InitTracker": lambda seen: InitTracker(),
    "TrajCounter": lambda seen: TrajCounter(),
    "TargetReturn": lambda seen: TargetReturn(3.0),
    "VecNorm": lambda seen: VecNorm([seen]),
    "NormalizeReward": lambda seen: NormalizeReward(clip=5.0),
    "VecNormV2": lambda seen: VecNormV2(
        [seen, "reward"], [seen, "normal_reward"], reduce_batch_dims=True
    ),
    "CatFrames": lambda seen: CatFrames(3, -1, [seen]),
    "TimeMaxPool": lambda seen: TimeMaxPool([seen], ["most"], T=2),
    "RandomTruncationTransform": lambda seen: Compose(
        StepCounter(step_count_key="steps"),
        RandomTruncationTransform(2, 6, prob=0.2, step_count_key="steps"),
    ),
    "TensorDictPrimer": lambda seen: TensorDictPrimer(h=Unbounded((2,)), random=True),
    "gSDENoise": lambda seen: gSDENoise(state_dim=3, action_dim=1, shape=()),
    "NoopResetEnv": lambda seen: NoopResetEnv(3),
    "DiscreteActionProjection": lambda seen: DiscreteActionProjection(2, 5),
    "ActionDiscretizer": lambda seen: ActionDiscretizer(4, sampling=SamplingStrategy.RANDOM),
}
_CHOOSE = ("DiscreteActionProjection",)
_MOVE = ("ActionDiscretizer",)
_FUSED = {"StepCounter", "RewardSum", "RewardClipping", "InitTracker", "CatFrames", "TimeMaxPool"}


# ----------------------------------------------------------------------------------------- policies


class Acts(torch.nn.Module):
    """Draws an action, of whichever kind, from what it is shown."""

    def __init__(self, shown: int, actions: int, *, chooses: bool, is_hot: bool, dtype: Any):
        super().__init__()
        self.net = torch.nn.Linear(shown, actions)
        self.chooses, self.is_hot, self.dtype, self.actions = chooses, is_hot, dtype, actions

    def forward(self, *shown: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([one.float().nan_to_num() for one in shown], -1)
        loc = self.net(wide)
        drawn = loc + 0.5 * torch.randn(loc.shape)
        if not self.chooses:
            return drawn.tanh().to(self.dtype)
        choice = drawn.argmax(-1)
        if not self.is_hot:
            return choice.to(self.dtype)
        return torch.nn.functional.one_hot(choice, self.actions).to(self.dtype)


def _policy(env: EnvBase, run: Run) -> Any:
    if run.policy == "random":
        return None
    spec = env.single_action_spec
    chooses = isinstance(spec, envkit.OneHot | envkit.Categorical)
    count = int(spec.n) if chooses else spec.shape[-1]
    read = [ENVS[run.env].seen]
    if "StepCounter" in run.chain and not run.inside:
        read.append("step_count")
    wide = sum(env.single_observation_spec[key].shape[-1] for key in read)
    torch.manual_seed(5)
    net = Acts(
        wide, count, chooses=chooses, is_hot=isinstance(spec, envkit.OneHot), dtype=spec.dtype
    )
    module = TensorDictModule(net, read, ["action"])
    return compile_policy(module) if run.policy == "compiled" else module


# ------------------------------------------------------------------------------------------- players


def _by_hand(env: EnvBase, policy: Any, run: Run) -> Iterator[Any]:
    """Step by hand; gives the parts to be saved, then transitions, in turn."""
    root: TensorDictBase | None = None
    act = env.rand_action if policy is None else policy
    while True:
        loaded = yield root
        root = root if loaded is None else loaded
        root = env.reset() if root is None else root
        with torch.no_grad():
            steps = []
            for _ in range(run.steps):
                data, root = env.step_and_maybe_reset(act(root.copy()))
                steps.append(data.copy())
        yield torch.stack(steps, -1)


COLLECTORS: dict[str, tuple[Any, int]] = {
    "by hand": (None, 6),
    "single": (Collector, 12),
    "sync workers": (MultiSyncDataCollector, 1),
    "async worker": (MultiaSyncDataCollector, 1),
}


@dataclass(frozen=True)
class Run:
    """What a number decides."""

    number: int
    env: str
    chain: tuple[str, ...]
    inside: bool
    policy: str
    collector: str
    before: int
    steps: int
    seed: int
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, number: int, *, workers: bool = True) -> Run:
        """Draw a run; ``workers`` False leaves out what takes processes."""
        draw = random.Random(number)
        kinds = {name: kind for name, kind in ENVS.items() if workers or name != "parallel"}
        env = draw.choices(list(kinds), [kind.weight for kind in kinds.values()])[0]
        ways = {name: way for name, way in COLLECTORS.items() if workers or "worker" not in name}
        collector = draw.choices(list(ways), [weight for _, weight in ways.values()])[0]
        kind, chain = ENVS[env], draw.sample(list(TRANSFORMS), draw.choice([0, 1, 2, 3, 4]))
        inside = kind.has_rows and draw.random() < 0.4
        chooses = "choices" in env or env in (
            "gym, vector",
            "serial",
            "parallel",
            "async",
            "mixed, gym",
        )
        left_out = (_MOVE if chooses else _CHOOSE) if env != "jax, choices" else (*_MOVE, *_CHOOSE)
        chain = [name for name in chain if name not in left_out]
        options: dict[str, Any] = {}
        if collector != "by hand":
            options = draw.choice(
                [
                    {},
                    {"max_frames_per_traj": 5},
                    {"init_random_frames": 20},
                    {"reset_at_each_iter": True},
                    {"trajs_per_batch": 2, "frames_per_batch": None},
                    {"split_trajs": True},
                ]
            )
        policy = draw.choice(["random", "module", "compiled"])
        is_program = env.startswith(("jax", "brax")) and policy != "module"
        if collector == "single" and is_program and set(chain) <= _FUSED and draw.random() < 0.3:
            options = {"prefetch": 1}
        if collector == "by hand" and policy == "compiled":
            policy = "module"
        before, steps = draw.choice([0, 1, 2, 3]), draw.choice([1, 3, 4, 8])
        return cls(
            number,
            env,
            tuple(chain),
            inside,
            policy,
            collector,
            before,
            steps,
            draw.randrange(1000),
            options,
        )

    @property
    def make(self) -> Callable[[], EnvBase]:
        """A function that builds the env, which worker processes can be sent."""
        return partial(_env_of, self)


def _behind(run: Run, env: EnvBase) -> EnvBase:
    if not run.chain:
        return env
    made = [TRANSFORMS[name](ENVS[run.env].seen) for name in run.chain]
    return TransformedEnv(env, Compose(*made))


def _env_of(run: Run) -> EnvBase:
    if run.inside:
        return ENVS[run.env].make(partial(_behind, run))
    return _behind(run, ENVS[run.env].make(_as_it_is))


def _as_it_is(env: EnvBase) -> EnvBase:
    return env


@contextmanager
def _player(run: Run, seed: int) -> Iterator[tuple[dict[str, Any], Callable[[Any], Any]]]:
    """Build all anew; gives the parts that are saved, and a function that gives the next batch."""
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    shown = run.make()
    policy = _policy(shown, run)
    shown.close(raise_if_closed=False)
    torch.manual_seed(seed)
    if run.collector == "by hand":
        with closing(run.make().record_for_resume()) as env:
            env.set_seed(seed)
            played = _by_hand(env, policy, run)
            next(played)
            yield {"env": env, "torch": torch}, played.send
        return
    cls, _ = COLLECTORS[run.collector]
    rows = {"sync workers": 2, "async worker": 1}.get(run.collector, 0)
    options = {"frames_per_batch": 12 * run.steps, "record_for_resume": True, **run.options}
    makes = [run.make] * rows if rows else run.make
    collector = cls(makes, policy, **options)
    try:
        collector.set_seed(seed)
        yield {"collector": collector}, lambda _: collector.next()
    finally:
        collector.shutdown()


def differs(run: Run, folder: Path, *, after: int = 2) -> str | None:
    """Play a run in one piece and in two; says where they differ, or gives None."""
    with _player(run, run.seed) as (_, play):
        whole = []
        for _ in range(run.before + after):
            whole.append(_kept(play(None)))
            if run.collector == "by hand":
                play(None)
    path = folder / "run.pt"
    with _player(run, run.seed) as (parts, play):
        root = None
        for _ in range(run.before):
            play(None)
            if run.collector == "by hand":
                root = play(None)
        envkit.save(path, **parts, root=root)
    resumed = []
    with _player(run, run.seed + 1) as (parts, play):
        root = envkit.load(path, **parts, root=None)["root"]
        for _ in range(after):
            resumed.append(_kept(play(root)))
            root = None
            if run.collector == "by hand":
                play(None)
    for number, (one, other) in enumerate(zip(whole[run.before :], resumed, strict=True)):
        if not same(([one], [other])):
            keys = [
                key
                for key in one.keys(True, True)
                if key not in other.keys(True, True)
                or not same(([one.select(key)], [other.select(key)]))
            ]
            return f"batch {number} after the cut differs in {keys}"
    return None


def _kept(batch: Any) -> Any:
    return batch.clone()


if __name__ == "__main__":
    import time
    import traceback

    warnings.simplefilter("ignore")
    first, count = int(sys.argv[1]), int(sys.argv[2])
    failed = 0
    for number in range(first, first + count):
        run, began = Run.of(number), time.time()
        try:
            with tempfile.TemporaryDirectory() as folder:
                told = differs(run, Path(folder))
        except Exception as error:
            told = f"{type(error).__name__}: {str(error)[:600]}"
            if "-v" in sys.argv:
                traceback.print_exc()
        if told is not None:
            failed += 1
        if told is not None or "-a" in sys.argv:
            print(f"{time.time() - began:.1f}s {run}: {told}", flush=True)
        elif number % 20 == 19:
            print(f"up to {number}: {failed} failed", flush=True)
    print(f"{count} runs from {first}: {failed} failed", flush=True)
