"""Transforms with state inside programs: the same statistics as step by step, counted once for each row."""

from __future__ import annotations

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
    Compose,
    MomentTransform,
    NormalizeReward,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNorm,
)
from envkit.errors import StatisticsError
from envkit.functional import Box, Timestep
from envkit_bridges.jax.jax_env import JaxEnv
from tests.bridges.compare import assert_close
from tests.transforms.chains import Opaque
from tests.zoo.envs import Count
from tests.zoo.policies import Replay
from tests.zoo.walkers import Walker

pytestmark = [
    pytest.mark.rounding,
    pytest.mark.filterwarnings("ignore::envkit.CentredRewardWarning"),
]

ROWS, STEPS, DECAY = 4, 9, 0.9


@cache
def pair() -> tuple[TransformedEnv, TransformedEnv]:
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
    for env in pair():
        for tensor in env.transform.buffers():
            tensor.zero_()
        env.train()
        norm_of(env).frozen = False
        env.set_seed(3)
    return pair()


def assert_alike(left, right):
    """Same entries; floats within 1e-4, since sums of many rows are rounded in another order."""
    shared = right.select(*left.keys(True, True))
    assert_close(left, shared, atol=1e-4)


@pytest.mark.parametrize(
    "stop",
    [pytest.param("break_when_any_done", marks=pytest.mark.slow), "break_when_all_done", None],
)
def test_a_compiled_rollout_leaves_the_statistics_of_the_stepwise_one(both, stop):
    rule = {"break_when_any_done": False} if stop is None else {stop: True}
    inside, outside = both

    compiled = inside.rollout(STEPS, **rule)
    outside.set_seed(3)
    stepped = outside.rollout(STEPS, Replay(compiled["action"]), **rule)

    assert compiled.shape == stepped.shape and compiled["next", "done"].any()
    assert_alike(compiled, stepped)
    assert_alike(statistics(inside), statistics(outside))
    assert statistics(inside)["place", "weight"] > 10


def test_the_last_step_of_a_rollout_from_python_begins_no_episodes_that_would_count(both):
    actions, runs = torch.full((ROWS, 8, 2), 0.1), []

    for env in both:
        env.set_seed(3)
        runs.append(env.rollout(8, Replay(actions), break_when_any_done=False))

    assert runs[0]["next", "done"][:, -1].any()
    assert_alike(*runs)
    assert_alike(*map(statistics, both))


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
    assert_alike(compiled, stepped)
    assert_alike(statistics(inside), statistics(outside))


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
    assert_alike(unrolled, stepped)
    assert_alike(statistics(inside), statistics(outside))


masks = st.lists(st.booleans(), min_size=3, max_size=3).map(torch.tensor)


@settings(max_examples=8)
@given(step=masks, reset=masks)
def test_rows_that_are_skipped_or_only_fill_up_a_batch_do_not_count(step, reset):
    outcomes = []
    for env in pair():
        for tensor in norm_of(env).moments.buffers():
            tensor.zero_()
        env.set_seed(1)
        td = env.reset(TensorDict(batch_size=[3]))  # compiled for 4 rows
        td = env.step(td.set("action", torch.full((3, 2), 0.5)).set("_step", step))
        td = env.reset(env.step_mdp(td).set("_reset", reset[:, None]))
        outcomes.append((td, statistics(env)))

    assert_alike(outcomes[0][0], outcomes[1][0])
    assert_alike(outcomes[0][1], outcomes[1][1])


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


def test_statistics_are_saved_and_loaded(both):
    inside, outside = both
    inside.rollout(STEPS, break_when_any_done=False)

    norm_of(outside).load_state_dict(norm_of(inside).state_dict())

    assert_close(statistics(outside), statistics(inside), atol=0)


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
