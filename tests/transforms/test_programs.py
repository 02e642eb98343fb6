"""Transforms inside the programs of a stateless env: which there are, what they may change, and whole runs.

That they show the data of single steps outside of programs is part of `test_contract`. What is compared with here
is the same env behind the same transforms after one that cannot be fused.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from envkit import (
    BraxEnv,
    CatFrames,
    ClipTransform,
    Compose,
    DTypeCastTransform,
    ExcludeTransform,
    GymEnv,
    InitTracker,
    MomentTransform,
    NormalizeReward,
    ObservationNorm,
    RenameTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    StepCounter,
    TargetReturn,
    TransformedEnv,
    VecNorm,
)
from envkit.data.transition import leaves
from envkit.errors import FusionError, MissingKeyError, StatisticsError
from envkit.functional import Box, Timestep
from envkit_bridges.jax.jax_env import JaxEnv
from tests.bridges.compare import assert_close, assert_same, replay
from tests.zoo.envs import Count
from tests.zoo.policies import Replay
from tests.zoo.transforms import Opaque, episodes, frames, names, values
from tests.zoo.walkers import Pendulum, Walker

pytestmark = [
    pytest.mark.rounding,
    pytest.mark.filterwarnings("ignore::envkit.CentredRewardWarning"),
]


ROWS, STEPS = 4, 9


def short():
    return [StepCounter(4), RewardSum(compensated=True), CatFrames(2, -1, ["place"])]


def entries():
    return [*episodes(), *frames(), *names()]


CHAINS = {"entries": entries, "values": values, "short": short}


@cache
def base(layout="packed") -> JaxEnv:
    """The env around which transforms stand; its own programs are compiled once."""
    return JaxEnv(Walker(), batch_size=[ROWS], device="cpu", episode_length=6, state_layout=layout)


@cache
def pair(name: str, layout: str = "packed") -> tuple[TransformedEnv, TransformedEnv]:
    """The same transforms inside and outside of programs."""
    make = CHAINS[name]
    inside = TransformedEnv(base(layout), Compose(*make()))
    outside = TransformedEnv(base(layout), Compose(Opaque(), *make()))
    assert len(inside._route.fused) == len(make()) and not inside._route.outside
    assert not outside._route.fused
    return inside, outside


def actions(batch=(ROWS,), steps=STEPS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(*batch, steps, 2, generator=generator) * 2 - 1


@cache
def _advanced(env: TransformedEnv, batch: tuple[int, ...]) -> TensorDictBase:
    env.set_seed(5)
    td = env.reset(TensorDict(batch_size=batch))
    _, td = replay(env, td, actions(batch, 3))
    return td.set("action", actions(batch, 1)[..., 0, :])


def advanced(env: TransformedEnv, batch=(ROWS,)) -> TensorDictBase:
    """A root after three steps, with an action."""
    return _advanced(env, batch).clone()


masks = st.lists(st.booleans(), min_size=ROWS, max_size=ROWS).map(torch.tensor)


@settings(max_examples=10)
@given(step=masks, reset=masks)
def test_the_nested_layout_obeys_both_masks(step, reset):
    outcomes = []
    for env in pair("short", "nested"):
        td = env.step_mdp(env.step(advanced(env).set("_step", step)))
        outcomes.append(env.reset(td.set("_reset", reset[:, None])))

    assert_same(*outcomes)


@pytest.mark.parametrize(
    "batch",
    [
        (2, 3),
        pytest.param((), marks=pytest.mark.slow),
        pytest.param((0,), marks=pytest.mark.more),
    ],
)
def test_data_of_another_batch_size_is_treated_alike(batch):
    outcomes = []
    for env in pair("entries"):
        data, td = env.step_and_maybe_reset(advanced(env, batch))
        outcomes.append(data.update(TensorDict({"root": td}, batch)))

    assert_same(*outcomes)


@pytest.mark.parametrize("lacking", [["step_count"], ["episode_reward", "target_return"], []])
def test_data_without_memory_is_completed_alike(lacking):
    steps = [env.step(advanced(env).exclude(*lacking)) for env in pair("entries")]

    assert_same(*steps)


def test_what_stands_under_next_already_wins():
    steps = []
    for env in pair("entries"):
        td = advanced(env)
        td["next"] = TensorDict({"step_count": torch.full((ROWS, 1), 77)}, [ROWS])
        steps.append(env.step(td))

    assert_same(*steps)
    assert (steps[0]["next", "step_count"] == 77).all()


@pytest.mark.parametrize("name", ["entries", pytest.param("values", marks=pytest.mark.more)])
def test_unrolled_data_is_that_of_single_steps(name):
    inside, outside = pair(name)
    inside.set_seed(1)
    root = inside.reset()

    data, td = inside.unroll(root.clone(), STEPS)

    looped, last = replay(outside, root.clone(), data["action"])
    assert_close(data, looped.select(*data.keys(True, True)))
    assert {path: leaf.dtype for path, leaf in leaves(data)} == {
        path: leaf.dtype for path, leaf in leaves(looped) if "state" not in path
    }
    ended = data["next", "done"][:, -1]  # unroll begins them anew at the next step
    assert_close(td[~ended[:, 0]], last[~ended[:, 0]].select(*td.keys(True, True)))


def test_unroll_goes_on_where_it_stopped():
    inside, _ = pair("entries")
    inside.set_seed(1)

    _, td = inside.unroll(inside.reset(), STEPS)  # a length that is compiled already
    data, _ = inside.unroll(td, STEPS)

    step_count, ended = td["step_count"], td["done"]
    assert data["step_count"][:, 0].equal(torch.where(ended, 0, step_count))
    assert data["is_init"][:, 0].equal(ended)


def test_a_random_rollout_is_one_program():
    env = TransformedEnv(JaxEnv(Pendulum(), batch_size=[3]), Compose(*episodes()))

    data = env.rollout(10, break_when_any_done=False)

    assert env.traces == {"restart": 1, "unroll": 1}
    assert env.base_env.traces == {}
    assert data["step_count"][..., 0].tolist() == [[0, 1, 2, 3] * 2 + [0, 1]] * 3
    assert data["next", "truncated"].dtype == torch.bool
    assert data["step_count"].dtype == torch.int64
    assert "state" in data.keys()


def test_unroll_names_what_it_would_pass_by():
    env = TransformedEnv(base(), Compose(StepCounter(), lambda td: td, RewardSum()))

    with pytest.raises(FusionError, match=r"pass CallableTransform, RewardSum by.*rollout"):
        env.unroll(env.reset(), 3)


def test_only_a_stateless_env_is_unrolled():
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())

    with pytest.raises(FusionError, match=r"but GymEnv is not\. Use rollout"):
        env.unroll(env.reset(), 3)
    with pytest.raises(AttributeError, match="traces"):
        _ = env.traces


def fused_in(env: TransformedEnv) -> list[str]:
    return [type(transform).__name__ for transform in env._route.fused]


class Doubled(RewardScaling):
    """A subclass that writes the hook over values anew."""

    def __init__(self):
        super().__init__(0.0, 1.0)

    def _apply_transform(self, value):
        return value * 2


class Late(StepCounter):
    """A subclass that writes a hook over TensorDicts anew."""

    def _step(self, td, next_td):
        following = super()._step(td, next_td)
        return following.set("step_count", following["step_count"] + 100)


@pytest.mark.parametrize(
    "make",
    [
        Opaque,
        Doubled,
        Late,
        lambda: lambda td: td,
        lambda: StepCounter(3, update_done=False),
        lambda: StepCounter(3, truncated_key="time_up"),
        lambda: DTypeCastTransform(torch.float32, torch.float64, ["place"]),
        lambda: ClipTransform(in_keys_inv=["action"], low=0.0),
        lambda: RenameTransform(["done"], ["over"]),
        lambda: RenameTransform(["state"], ["s"], ["state"], ["s"]),
    ],
)
def test_what_no_program_can_do_ends_the_run(make):
    env = TransformedEnv(base(), Compose(InitTracker(), make(), RewardSum()))

    assert fused_in(env) == ["InitTracker"]
    assert [len(part) for part in env._route.outside] == [1, 1]


def test_an_env_that_shows_its_state_alone_is_rolled_out_with_random_actions():
    bare = JaxEnv(Pendulum(), batch_size=[4])
    shown = [key for key in bare.observation_keys if key[0] != "state"]
    env = TransformedEnv(bare, ExcludeTransform(*shown))

    data = env.rollout(3, break_when_any_done=False)

    assert data["next", "reward"].any() and not set(shown) & set(data.keys(True, True))


def test_what_a_subclass_writes_anew_is_obeyed():
    env = TransformedEnv(base(), Compose(Late(), Doubled(), RewardSum()))
    root = env.rand_action(env.reset())

    following = env.step(root.clone())["next"]

    bare = base().step(root.clone())["next"]
    assert (following["step_count"] == 101).all()
    assert following["episode_reward"].equal(bare["reward"] * 2)


@pytest.mark.parametrize("hook", ["_reset_env_preprocess", "_inv_call"])
@pytest.mark.parametrize(
    "transform",
    [
        DTypeCastTransform(torch.float32, torch.float64, in_keys=["place"]),
        ExcludeTransform("place"),
    ],
    ids=["cast", "exclude"],
)
@pytest.mark.parametrize("place", ["class", "object"])
def test_a_hook_on_the_way_in_that_a_transform_of_envkit_lacks_is_called(hook, transform, place):
    calls = []
    transform = copy.deepcopy(transform)
    if place == "class":
        written = {hook: lambda _, td: calls.append(hook) or td}
        transform.__class__ = type("Written", (type(transform),), written)
    else:
        setattr(transform, hook, lambda td: calls.append(hook) or td)
    env = TransformedEnv(base(), transform)

    env.rand_step(env.reset())

    assert not fused_in(env) and calls == [hook]


@pytest.mark.more
def test_an_env_behind_transforms_is_fused_with_more_of_them():
    inner = TransformedEnv(base(), Compose(*episodes()[:2]))
    env = TransformedEnv(inner, Compose(*episodes()[2:]))

    assert type(env._route.stepper) is type(inner._route.stepper)
    assert fused_in(env) == ["InitTracker", "TargetReturn"]
    outside = TransformedEnv(base(), Compose(Opaque(), *episodes()))
    assert_same(env.step(advanced(env)), outside.step(advanced(outside)))


def test_no_transforms_are_no_obstacle():
    inner = TransformedEnv(base())
    env = TransformedEnv(inner, StepCounter())

    assert inner._route.is_direct and fused_in(env) == ["StepCounter"]
    assert inner.observation_spec == base().observation_spec


def test_a_row_that_is_not_reset_now_keeps_its_mark_at_any_depth():
    bare = JaxEnv(Pendulum(), batch_size=[4])
    inits = [
        TransformedEnv(bare, Compose(InitTracker(), RewardSum())),
        TransformedEnv(TransformedEnv(bare, InitTracker()), RewardSum()),
        TransformedEnv(TransformedEnv(bare, Compose(Opaque(), InitTracker())), RewardSum()),
    ]
    mask = torch.tensor([True, False, True, False])
    for env in inits:
        moved = env.step_mdp(env.rand_step(env.reset()))

        at_start, later = (env.reset(root.set("_reset", mask)) for root in (env.reset(), moved))

        assert at_start["is_init"].all()
        assert later["is_init"][:, 0].tolist() == mask.tolist()


def test_what_an_outer_env_leaves_out_does_not_come_back():
    inner = TransformedEnv(JaxEnv(Pendulum(), batch_size=[4]), InitTracker())
    env = TransformedEnv(inner, ExcludeTransform("is_init"))

    root = env.reset(env.reset().set("_reset", torch.tensor([True, False, True, False])))

    assert "is_init" not in root.keys()


def test_programs_outlive_caches_of_keys():
    env = TransformedEnv(base(), StepCounter())
    stepper = env._route.stepper

    env.empty_cache()
    env.set_spec_lock_(True)
    assert env._route.stepper is stepper

    env.set_spec_lock_(False)
    env.set_spec_lock_(True)
    assert env._route.stepper is not stepper


def test_a_transform_that_is_appended_is_fused_too():
    env = TransformedEnv(base(), StepCounter())
    env.rand_step(env.reset())

    env.append_transform(RewardSum())

    assert fused_in(env) == ["StepCounter", "RewardSum"]
    assert "episode_reward" in env.rand_step(env.reset())["next"].keys()


def test_specs_that_may_change_are_not_compiled():
    env = TransformedEnv(base(), StepCounter(), spec_locked=False)

    assert not env._route.fused
    assert (env.rand_step(env.reset())["next", "step_count"] == 1).all()


def test_numbers_that_change_are_seen_and_compile_nothing():
    norm = ObservationNorm(torch.zeros(2), torch.ones(2), ["place"], ["normal"])
    counter, target, clip = StepCounter(5), TargetReturn(1.0), RewardClipping(-9.0, 9.0)
    env = TransformedEnv(base(), Compose(norm, counter, clip, target))
    root = env.rand_action(env.reset())
    before = env.step(root.clone())["next"]
    traces = env.traces

    norm.loc += 10
    norm.scale = torch.full((2,), 2.0)
    counter.max_steps, target.target_return, clip.high = 1, 7.0, -0.5
    after, begun = env.step(root.clone())["next"], env.reset()

    assert env.traces == traces
    assert after["normal"].equal(before["normal"] * 2 + 10)
    assert after["truncated"].all() and not before["truncated"].any()
    assert (after["reward"] <= -0.5).all()
    assert (begun["target_return"] == 7).all()


def test_a_loaded_state_is_seen():
    first, second = (
        ObservationNorm(torch.zeros(2), torch.ones(2), ["place"], ["normal"]) for _ in range(2)
    )
    env = TransformedEnv(base(), second)
    root = env.rand_action(env.reset())
    before = env.step(root.clone())["next", "normal"]
    first.loc += 3

    env.load_state_dict(first.state_dict())

    assert env.step(root.clone())["next", "normal"].equal(before + 3)


def test_both_sides_draw_rows_from_one_sequence():
    bare = JaxEnv(Walker(), batch_size=[2])
    env = TransformedEnv(bare, StepCounter())

    env.set_seed(4)
    drawn = [env.reset()["place"], bare.reset()["place"]]

    bare.set_seed(4)
    assert drawn[0].equal(bare.reset()["place"]) and drawn[1].equal(env.reset()["place"])


def test_a_closed_env_is_closed_behind_transforms():
    bare = JaxEnv(Walker(), batch_size=[2])
    env = TransformedEnv(bare, StepCounter())
    root = env.rand_action(env.reset())

    bare.close()

    with pytest.raises(RuntimeError, match="closed"):
        env.step(root)


def test_dtypes_are_checked_as_the_base_env_says():
    env = TransformedEnv(JaxEnv(Walker(), batch_size=[2]), StepCounter())

    env.run_type_checks = True

    assert env._route.stepper.run_type_checks
    env.rand_step(env.reset())


def test_a_state_that_is_missing_is_named():
    inside, _ = pair("entries")

    with pytest.raises(MissingKeyError, match="no 'state'"):
        inside.step(advanced(inside).exclude("state"))


ROWS, STEPS, DECAY = 4, 9, 0.9


# ------------------------------------------------------- statistics that programs count


@cache
def counting() -> tuple[TransformedEnv, TransformedEnv]:
    """The same transforms inside and outside of programs, with statistics of their own."""
    base = JaxEnv(Walker(), batch_size=[ROWS], device="cpu", episode_length=6)

    def make(*first):
        norm = VecNorm(["place", "reward"], ["normal", "reward"], decay=DECAY)
        divided = NormalizeReward(out_keys=["divided"], gamma=0.9, clip=2.0)
        return TransformedEnv(base, Compose(*first, StepCounter(4), divided, norm, RewardSum()))

    inside, outside = make(), make(Opaque())
    assert len(inside._route.fused) == 4 and not outside._route.fused
    return inside, outside


def norm_of(env) -> VecNorm:
    return next(leaf for leaf in env.transform.flat() if isinstance(leaf, VecNorm))


def statistics(env) -> TensorDictBase:
    return norm_of(env).statistics.clone()


@pytest.fixture
def both():
    for env in counting():
        for tensor in env.transform.buffers():
            tensor.zero_()
        env.train()
        norm_of(env).frozen = False
        env.set_seed(3)
    return counting()


def assert_counts_alike(left, right):
    """Same entries; floats within 1e-4, since sums of many rows are rounded in another order."""
    shared = right.select(*left.keys(True, True))
    assert_close(left, shared, atol=1e-4)


def test_rows_that_wait_for_the_others_do_not_count(both):
    inside, outside = both
    roots = []
    for env in both:
        env.set_seed(3)
        td = env.reset()
        for moves in ([True, True, False, False], [True, False, False, False]):
            td = td.set("action", torch.full((ROWS, 2), 0.1)).set("_step", torch.tensor(moves))
            td = env.step_mdp(env.step(td))
        roots.append(td)
    rule = {"auto_reset": False, "break_when_all_done": True}

    compiled = inside.rollout(STEPS, tensordict=roots[0], **rule)
    stepped = outside.rollout(STEPS, Replay(compiled["action"]), tensordict=roots[1], **rule)

    assert len(compiled["next", "done"].sum(1).unique()) > 1
    assert_counts_alike(compiled, stepped)
    assert_counts_alike(statistics(inside), statistics(outside))


def test_statistics_go_on_from_one_unroll_to_the_next(both):
    inside, outside = both
    td, runs = inside.reset(), []
    for _ in range(2):
        data, td = inside.unroll(td, STEPS)
        runs.append(data)
    unrolled = torch.cat(runs, 1)

    outside.set_seed(3)
    stepped = outside.rollout(2 * STEPS, Replay(unrolled["action"]), break_when_any_done=False)

    assert unrolled["next", "done"].any()
    assert_counts_alike(unrolled, stepped)
    assert_counts_alike(statistics(inside), statistics(outside))


three = st.lists(st.booleans(), min_size=3, max_size=3).map(torch.tensor)


@settings(max_examples=8)
@given(step=three, reset=three)
def test_rows_that_are_skipped_or_only_fill_up_a_batch_do_not_count(step, reset):
    outcomes = []
    for env in counting():
        for tensor in norm_of(env).moments.buffers():
            tensor.zero_()
        env.set_seed(1)
        td = env.reset(TensorDict(batch_size=[3]))  # compiled for 4 rows
        td = env.step(td.set("action", torch.full((3, 2), 0.5)).set("_step", step))
        td = env.reset(env.step_mdp(td).set("_reset", reset[:, None]))
        outcomes.append((td, statistics(env)))

    assert_counts_alike(outcomes[0][0], outcomes[1][0])
    assert_counts_alike(outcomes[0][1], outcomes[1][1])


def test_nothing_is_counted_when_frozen_and_nothing_compiled_for_it(both):
    inside, _ = both
    inside.rollout(STEPS, break_when_any_done=False)
    before, traces = statistics(inside), dict(inside.traces)

    norm_of(inside).frozen = True
    data = inside.rollout(STEPS, break_when_any_done=False)

    assert_close(statistics(inside), before, atol=0)
    assert inside.traces == traces
    loc, scale = norm_of(inside).loc["place"], norm_of(inside).scale["place"]
    torch.testing.assert_close(data["normal"], (data["place"] - loc) / scale)


def test_a_clone_shares_the_statistics_of_programs(both):
    inside, _ = both
    twin = norm_of(inside).clone()

    inside.rollout(STEPS, break_when_any_done=False)

    assert_close(twin.statistics, statistics(inside), atol=0)


def test_statistics_that_processes_share_stay_outside_of_programs():
    def make():
        return TransformedEnv(
            BraxEnv("fast", batch_size=[2], device="cpu"), VecNorm(["observation"])
        )

    locked, shared, late = make(), make(), make()
    norm_of(locked).shared_lock = torch.multiprocessing.get_context("spawn").Lock()
    _ = shared.output_spec
    norm_of(shared).moments.share_memory()
    late.reset()
    norm_of(late).moments.share_memory()

    assert not locked._route.fused and not shared._route.fused
    with pytest.raises(StatisticsError, match=r"are shared since.*before the env is used"):
        late.reset()


def test_an_env_that_gives_gradients_keeps_statistics_outside():
    base = JaxEnv(Walker(), batch_size=[2], device="cpu", requires_grad=True)
    env = TransformedEnv(base, Compose(StepCounter(), VecNorm(["place"])))

    assert [type(leaf) for leaf in env._route.fused] == [StepCounter]
    env.rand_step(env.reset())


class Uncoupled(MomentTransform):
    """Has state, and nothing that counts it outside of programs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def state(self):
        return {"seen": self.seen}

    def moment_leaves(self, leaves, constants):
        return {}


def test_state_that_only_programs_would_change_is_refused_outside_of_them():
    env = TransformedEnv(Count(3), Uncoupled())

    with pytest.raises(NotImplementedError, match=r"Uncoupled has state.*CoupledTransform"):
        env.reset()


@dataclass(frozen=True)
class Broken:
    """Shows its steps, and NaN at each third one."""

    action_space: Any = Box(-1.0, 1.0, (1,))

    def reset(self, key):
        return jnp.int32(0), Timestep(jnp.zeros(2))

    def step(self, state, action):
        shown = jnp.stack([state + 1.0, jnp.where(state % 3 == 2, jnp.nan, 1.0)])
        return state + 1, Timestep(shown, action.sum())


def test_a_program_leaves_rows_out_that_are_not_finite_and_counts_them():
    base = JaxEnv(Broken(), batch_size=[2], device="cpu")
    inside, outside = (
        TransformedEnv(base, Compose(*first, VecNorm(["observation"], decay=1.0)))
        for first in ([], [Opaque()])
    )
    assert inside._route.fused and not outside._route.fused

    inside.rollout(7)
    with pytest.warns(UserWarning, match="NaN"):
        inside.rollout(7)
    with pytest.warns(UserWarning, match="NaN"):
        outside.rollout(14)

    assert norm_of(inside).skipped_rows == 8 and norm_of(outside).skipped_rows == 8
    assert norm_of(inside).loc["observation"].isfinite().all()
