"""What a transform remembers is its own, whatever later transforms make of the entry that shows it.

Each case compares an env whose memory is changed by a later transform with the same env without that transform.

Conventions
    shown   the entry under which memory is shown.
    change  a later transform, and what the shown entry is after it.
"""

from __future__ import annotations

import inspect
import warnings
from functools import cache, partial

import pytest
import torch
from tensordict import TensorDictBase

import envkit
from envkit import (
    CatFrames,
    ClipTransform,
    Compose,
    DTypeCastTransform,
    EndOfLifeTransform,
    EnvBase,
    ExcludeTransform,
    FrameSkipTransform,
    GymWrapper,
    MultiAction,
    NormalizeReward,
    ObservationNorm,
    RenameTransform,
    RewardScaling,
    RewardSum,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TimeMaxPool,
    TrajCounter,
    Transform,
    TransformedEnv,
    Unbounded,
    VecNormV2,
    check_env_specs,
    gSDENoise,
)
from envkit.data.transition import leaves
from envkit.transforms.core.fusable import FusableTransform
from envkit.transforms.core.leafwise import LeafTransform
from envkit_bridges.jax.jax_env import JaxEnv
from tests.bridges.compare import assert_same
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.gym_envs import Lives
from tests.zoo.half import TORCH_HALF
from tests.zoo.policies import Replay
from tests.zoo.transform_envs import TwoTeams
from tests.zoo.walkers import Walker

STEPS = 9


class Trace(Transform):
    """A user's transform: shows a decaying trace of the rewards of an episode."""

    def _step(self, td, next_td):
        return next_td.set("trace", td["trace"] / 2 + next_td["reward"])

    def _reset(self, td, td_reset):
        return td_reset.set("trace", torch.zeros_like(td_reset["done"], dtype=torch.float32))

    def transform_observation_spec(self, observation_spec):
        observation_spec["trace"] = Unbounded((*observation_spec.shape, 1))
        return observation_spec

    transform_state_spec = transform_observation_spec


MEMORIES = {  # the transform, and what it shows
    StepCounter: (partial(StepCounter, 3), "step_count"),
    RewardSum: (RewardSum, "episode_reward"),
    TargetReturn: (partial(TargetReturn, 4.0), "target_return"),
    TrajCounter: (TrajCounter, "traj_count"),
    TensorDictPrimer: (partial(TensorDictPrimer, mem=Unbounded((1,)), default_value=3.0), "mem"),
    gSDENoise: (partial(gSDENoise, shape=()), "_eps_gSDE"),
    CatFrames: (partial(CatFrames, 3, -1, ["count"], ["frames"]), "frames"),
    TimeMaxPool: (partial(TimeMaxPool, ["count"], ["most"], 2), "most"),
    VecNormV2: (partial(VecNormV2, ["count"], ["normal"], stateful=False), "normal"),
    EndOfLifeTransform: (EndOfLifeTransform, "lives"),
    NormalizeReward: (NormalizeReward, "_discounted_reward"),
    Trace: (Trace, "trace"),
}


CHANGE_INPUTS_ONLY = {
    "ActionDiscretizer",
    "ActionMask",
    "BatchSizeTransform",
    "BurnInTransform",
    "Compose",
    "DTypeCastTransform",
    "DeviceCastTransform",
    "DoubleToFloat",
    "ModuleTransform",
    "MultiStepTransform",
    "RandomCropTensorDict",
    "RemoveEmptySpecs",
    "RenameTransform",
}
"""They declare inputs too, but remember nothing of an episode in the data."""


def cast_to(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.int64 else TORCH_HALF


CHANGES = {
    "rename": (lambda shown, _: RenameTransform([shown], ["other"]), lambda value: value),
    "cast": (
        lambda shown, dtype: DTypeCastTransform(dtype, cast_to(dtype), [shown]),
        lambda value: value.to(cast_to(value.dtype)),
    ),
    "normalise": (
        lambda shown, _: ObservationNorm(1.0, 2.0, [shown]),
        lambda value: value * 2.0 + 1.0,
    ),
    "clip": (lambda shown, _: ClipTransform([shown], high=1.5), lambda value: value.clamp(max=1.5)),
    "exclude": (lambda shown, _: ExcludeTransform(shown), lambda value: None),
}


def remembering(kind: type) -> TransformedEnv:
    return TransformedEnv(
        GymWrapper(Lives()) if kind is EndOfLifeTransform else Count(5), MEMORIES[kind][0]()
    )


def changed(kind: type, change: str) -> TransformedEnv:
    env, shown = remembering(kind), MEMORIES[kind][1]
    return env.append_transform(CHANGES[change][0](shown, env.observation_spec[shown].dtype))


def played(env: EnvBase) -> TensorDictBase:
    env.set_seed(3)
    spec, generator = env.full_action_spec["action"], torch.Generator().manual_seed(0)
    actions = [spec.rand((), generator) for _ in range(STEPS)]
    td = env.rollout(STEPS, Replay(torch.stack(actions, env.batch_dims)), break_when_any_done=False)
    return td.detach()


def assert_memory_is_kept(plain: TensorDictBase, env: EnvBase, shown: list[str], change: str):
    """Check that an env gives the data ``plain`` but for what a change makes of the shown entries."""
    data, expected = played(env), plain.clone()
    for root in (expected, expected["next"]):
        for number, name in enumerate(shown):
            value = CHANGES[change][1](root.pop(name))
            if value is not None:
                root[f"other{number or ''}" if change == "rename" else name] = value

    assert_same(data, expected, without=("_memory",))
    with warnings.catch_warnings():  # numbers of trajectories are drawn from one counter
        warnings.simplefilter("ignore", envkit.EnvSpecWarning)
        check_env_specs(env)


@cache
def plain_run(kind: type) -> TensorDictBase:
    return played(remembering(kind))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", MEMORIES)
def test_memory_goes_on_whatever_is_made_of_what_shows_it(kind, change):
    env = changed(kind, change)

    assert_memory_is_kept(plain_run(kind).clone(), env, [MEMORIES[kind][1]], change)


def declares_states(kind: type[Transform]) -> bool:
    """Say whether a class declares states, as each that remembers something in the data does."""
    bases = (Transform, LeafTransform, FusableTransform)
    hooks = ("transform_state_spec", "transform_input_spec", "memory")
    return any(
        getattr(kind, hook, None) not in [getattr(base, hook, None) for base in bases]
        for hook in hooks
    )


def test_every_transform_that_remembers_is_tried():
    kinds = {getattr(envkit, name) for name in envkit.__all__}
    found = {k for k in kinds if inspect.isclass(k) and issubclass(k, Transform)}
    declaring = {kind.__name__ for kind in found if declares_states(kind)}

    assert declaring - CHANGE_INPUTS_ONLY == {kind.__name__ for kind in MEMORIES} - {"Trace"}
    assert declaring >= CHANGE_INPUTS_ONLY


def test_sums_of_one_name_before_and_after_a_scaling_are_two_sums():
    env = TransformedEnv(
        Count(20),
        Compose(
            RewardSum(),
            RenameTransform(["episode_reward"], ["raw"]),
            RewardScaling(0.0, 10.0),
            RewardSum(),
            ObservationNorm(0.5, 1.0, ["episode_reward"]),
        ),
    )

    data = played(env)["next"]

    steps = torch.arange(1.0, STEPS + 1)[:, None]
    assert torch.equal(data["raw"], steps)
    assert torch.equal(data["episode_reward"], steps * 10.0 + 0.5)


def test_a_base_env_goes_on_from_its_own_state():
    env = TransformedEnv(StatelessCount(20), ObservationNorm(0.0, 0.5, ["count"]))

    data = played(env)

    assert torch.equal(data["next", "count"], torch.arange(1, STEPS + 1)[:, None] * 0.5)


def test_what_is_given_back_on_the_way_in_is_not_kept_twice():
    env = TransformedEnv(StatelessCount(20), RenameTransform(["count"], ["n"], ["count"], ["n"]))

    data = played(env)

    assert "_memory" not in data.keys() and data["next", "n"][-1] == STEPS


@pytest.mark.parametrize("level", ["a", "b"])
def test_a_partial_reset_of_a_level_keeps_what_the_other_one_remembers(level):
    other = {"a": "b", "b": "a"}[level]
    env = TransformedEnv(
        TwoTeams((9, 9)),
        Compose(
            StepCounter(), ObservationNorm(0.0, 0.5, [("a", "step_count"), ("b", "step_count")])
        ),
    )
    root = env.step_mdp(env.rollout(3)[..., -1])
    for name in "ab":
        root[name, "_reset"] = torch.tensor([name == level])

    td = env.rollout(1, auto_reset=False, tensordict=env.reset(root))

    assert td["next", level, "step_count"].item() == 0.5
    assert td["next", other, "step_count"].item() == 2.0


def test_a_step_from_stored_data_goes_on_from_the_memory_stored_with_it():
    env = TransformedEnv(Count(20), Compose(StepCounter(6), ClipTransform(["step_count"], high=2)))
    root = env.step_mdp(env.rollout(4)[..., -1])

    data = env.rollout(9, auto_reset=False, tensordict=root)

    assert data.shape == (2,) and data["next", "truncated"][-1]
    assert (data["next", "step_count"] == 2).all()


def test_steps_that_transforms_make_themselves_remember_too():
    env = TransformedEnv(
        Count(20),
        Compose(StepCounter(), ObservationNorm(0.0, 0.5, ["step_count"]), FrameSkipTransform(3)),
    )

    data = played(env)

    assert data["next", "step_count"].flatten().tolist() == [1.5 * n for n in range(1, 7)] + [
        10.0
    ] + [1.5, 3.0]


def test_stacked_observations_of_a_chunk_leave_the_count_alone():
    env = TransformedEnv(Count(20), Compose(StepCounter(), MultiAction(stack_observations=True)))

    def chunk(td):
        return td.set("action", torch.zeros(2, 1, dtype=torch.int64))

    data = env.rollout(3, chunk)

    assert data["next", "step_count"].flatten(1).tolist() == [[1, 2], [3, 4], [5, 6]]


def test_a_plain_policy_and_a_collector_are_not_shown_what_is_kept():
    seen = []

    def act(*observations):
        seen.append(len(observations))
        return torch.zeros(1, dtype=torch.int64)

    def make():
        return TransformedEnv(Count(20), Compose(StepCounter(), ExcludeTransform("step_count")))

    make().rollout(2, act)
    batch = next(iter(envkit.Collector(make, None, frames_per_batch=4, total_frames=4)))

    assert set(seen) == {1}
    assert not [path for path, _ in leaves(batch) if "_memory" in path]


def test_leaving_out_the_state_of_a_stateless_env_is_refused():
    env = TransformedEnv(JaxEnv(Walker(), batch_size=[3], device="cpu"), ExcludeTransform("state"))

    with pytest.raises(envkit.errors.ArgumentError, match="reads at its next step"):
        _ = env.output_spec
