"""A rollout that resets first begins its episodes in its own program, as a reset would, and compiles no other."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from envkit import GymnaxEnv, JumanjiEnv, StepCounter, TransformedEnv, compile_policy
from envkit_bridges.jax.jax_env import JaxEnv
from tests.bridges.compare import assert_same
from tests.bridges.jax.test_groups import Race
from tests.zoo.walkers import Pendulum, Walker, unlike_any


def walker(**options):
    return JaxEnv(unlike_any(Walker), device="cpu", episode_length=5, **options)


MAKERS = {
    "fresh": partial(walker, batch_size=[40]),
    "pool": partial(walker, batch_size=[4], reset_mode="pool", pool_size=3),
    "cached": partial(walker, batch_size=[4], reset_mode="cached"),
    "all rows": partial(walker, batch_size=[4], reset_rows="all"),
    "leaf by leaf": partial(walker, batch_size=[2, 3], state_layout="nested"),
    "single": partial(walker, batch_size=[]),
    "groups": lambda: JaxEnv(Race(), batch_size=[4], device="cpu"),
    "gymnax": partial(GymnaxEnv, "CartPole-v1", batch_size=[4], device="cpu"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("record_state", [True, False])
def test_it_gives_what_a_reset_and_a_rollout_from_it_give(make, record_state):
    ours, theirs = make(), make()
    how = {"break_when_any_done": False, "record_state": record_state}
    for env in (ours, theirs):
        env.set_seed(3)

    for _ in range(2):  # keys that follow are the same, too
        data = ours.rollout(12, **how)
        wanted = theirs.rollout(12, auto_reset=False, tensordict=theirs.reset(), **how)

        assert_same(data, wanted)
    assert data["next", "done"].any()
    assert "restart" not in ours.traces


def used(env, use):
    """Use an env in one way, some times."""
    if use == "whole rollout":
        env.rollout(7, break_when_any_done=False)
        env.rollout(7, break_when_any_done=False)
    elif use == "rollout that stops":
        env.rollout(7)
        env.rollout(5)
    elif use == "steps":
        td = env.reset()
        for _ in range(3):
            td = env.step_mdp(env.step(env.rand_action(td)))
        env.reset(td.set("_reset", torch.tensor([[True], [False], [False], [False]])))
    else:
        td = env.rand_action(env.reset())
        for _ in range(3):
            _, td = env.step_and_maybe_reset(td)
            td = env.rand_action(td)


PROGRAMS = {
    "whole rollout": {"unroll"},
    "rollout that stops": {"restart", "until"},
    "steps": {"restart", "step"},
    "steps and resets": {"restart", "advance"},
}


@pytest.mark.parametrize(("use", "programs"), PROGRAMS.items(), ids=PROGRAMS)
def test_a_way_to_use_a_gymnax_env_takes_two_programs_at_most(use, programs):
    env = GymnaxEnv("MountainCar-v0", batch_size=[4], device="cpu")

    used(env, use)

    assert set(env.traces) <= programs and len(programs) <= 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("use", "programs"), PROGRAMS.items(), ids=PROGRAMS)
def test_a_way_to_use_snake_takes_two_programs_at_most(use, programs):
    env = JumanjiEnv("Snake-v1", batch_size=[4], device="cpu")

    used(env, use)

    assert set(env.traces) <= programs


def test_a_compiled_policy_begins_with_it():
    env = JaxEnv(unlike_any(Pendulum), batch_size=[4], device="cpu")
    policy = compile_policy(torch.nn.Linear(3, 1))

    data = env.rollout(3, policy, break_when_any_done=False)

    assert (data["action"] != 0).any() and env.traces == {"unroll": 1}


def test_what_resets_in_its_own_way_is_reset_by_it():
    class Counted(JaxEnv):
        resets = 0

        def _reset(self, td=None, **kwargs):
            self.resets += 1
            return super()._reset(td, **kwargs)

    env = Counted(Pendulum(), batch_size=[2], device="cpu")
    outer = TransformedEnv(walker(batch_size=[2]), StepCounter())

    env.rollout(3, break_when_any_done=False)
    counts = outer.rollout(3, break_when_any_done=False)["step_count"]

    assert env.resets >= 1
    assert counts[0].flatten().tolist() == [0, 1, 2]
