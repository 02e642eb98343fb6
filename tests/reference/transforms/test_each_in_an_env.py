"""Each transform around a small env: what it declares, and what resets, steps and rollouts show."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from tests.reference.compare import OURS, check_same, differs
from tests.reference.transforms.worlds import arm, count, leaf_specs, ones, played, rows, teams
from tests.zoo.gym_envs import Lives

CASES = {  # the env, and what stands around it
    "ActionScaling": (arm, lambda lib: lib.ActionScaling()),
    "ActionScaling from 0 to 1": (arm, lambda lib: lib.ActionScaling(standard_normal=False)),
    "ActionScaling by numbers": (arm, lambda lib: lib.ActionScaling(loc=1.0, scale=-2.0)),
    "ActionScaling, renamed": (arm, lambda lib: lib.ActionScaling(["action"], ["wish"])),
    "FlattenAction": (arm, lambda lib: lib.FlattenAction()),
    "FlattenAction, positive": (
        arm,
        lambda lib: lib.FlattenAction(0, 1, ["action"], ["flat"], allow_positive_dim=True),
    ),
    "DeviceCastTransform": (count, lambda lib: lib.DeviceCastTransform("cpu")),
    "RandomTruncationTransform": (
        partial(count, n=99),
        lambda lib: lib.Compose(lib.StepCounter(), lib.RandomTruncationTransform(3, 3, 1.0)),
    ),
    "TerminateTransform": (count, lambda lib: lib.TerminateTransform(lambda td: td["count"] >= 3)),
    "TerminateTransform by a bool": (
        count,
        lambda lib: lib.TerminateTransform(lambda td: bool(td["count"].max() >= 3)),
    ),
    "Stack": (
        teams,
        lambda lib: lib.Stack(["a", "b"], "both", in_key_inv="both", out_keys_inv=["a", "b"]),
    ),
    "Stack of leaves": (
        teams,
        lambda lib: lib.Stack([("a", "seen"), ("b", "seen")], "seen", dim=-2, del_keys=False),
    ),
    "Stack, inputs gone": (teams, lambda lib: lib.Stack([("a", "seen"), ("b", "seen")], "seen")),
    "EndOfLifeTransform": (
        lambda lib: lib.GymWrapper(Lives()),
        lambda lib: lib.EndOfLifeTransform(),
    ),
    "EndOfLifeTransform of a number": (
        lambda lib: lib.GymWrapper(Lives()),
        lambda lib: lib.EndOfLifeTransform("eol", "left", eol_attribute="unwrapped.ale.left"),
    ),
    "gSDENoise": (count, lambda lib: lib.gSDENoise(shape=(2,))),
    "MultiAction": (count, lambda lib: lib.MultiAction()),
    "MultiAction, last reward": (count, lambda lib: lib.MultiAction(stack_rewards=False)),
    "MultiAction, renamed": (count, lambda lib: lib.MultiAction(chunk_key=("vla", "chunk"))),
}
LAYOUTS = {
    "alone": lambda lib, make, transform: lib.TransformedEnv(make(lib), transform(lib)),
    "around a SerialEnv": lambda lib, make, transform: lib.TransformedEnv(
        rows(lib, make), transform(lib)
    ),
    "inside a SerialEnv": lambda lib, make, transform: lib.SerialEnv(
        2, lambda: lib.TransformedEnv(make(lib), transform(lib))
    ),
    "cloned": lambda lib, make, transform: lib.TransformedEnv(
        make(lib), lib.TransformedEnv(make(lib), transform(lib)).transform.clone()
    ),
}
BY_ITSELF = {
    "FlattenAction, positive"
}  # the reference counts positive axes from the first of the batch
GROWN = {"MultiAction", "MultiAction, last reward", "MultiAction, renamed"}


def laid_out(cases):
    return [
        (case, layout)
        for case in cases
        for layout in LAYOUTS
        if layout in ("alone", "cloned") or case not in BY_ITSELF
    ]


def built(case, layout):
    make, transform = CASES[case]
    return lambda lib: LAYOUTS[layout](lib, make, transform)


@pytest.mark.parametrize(("case", "layout"), laid_out(case for case in CASES if case not in GROWN))
def test_a_transform_declares_what_the_reference_declares(case, layout):
    make = built(case, layout)

    check_same(lambda lib: leaf_specs(make(lib)))


@pytest.mark.parametrize(("case", "layout"), laid_out(CASES))
def test_a_rollout_shows_what_the_reference_shows(case, layout):
    make = built(case, layout)

    check_same(lambda lib: played(make(lib), 4))


@pytest.mark.parametrize("case", CASES)
def test_a_rollout_over_several_episodes_shows_what_the_reference_shows(case):
    make = built(case, "alone")

    check_same(lambda lib: played(make(lib), 7, break_when_any_done=False))


def test_masks_reach_rows_behind_a_transform_as_in_the_reference():
    def masked(lib, transform, kind):
        env = lib.TransformedEnv(rows(lib, partial(count, n=99)), transform(lib))
        root = env.step_mdp(env.step(ones(env, env.reset())))
        if kind == "step":
            return env.step(ones(env, root).set("_step", torch.tensor([True, False])))[
                "next", "count"
            ]
        return env.reset(root.set("_reset", torch.tensor([[True], [False]])))["count"]

    for make, transform in CASES.values():
        if make is count:
            for kind in ("step", "reset"):
                check_same(lambda lib, kind=kind, t=transform: masked(lib, t, kind))


# -------------------------------------------------------------------------------- more about some of them


def chunked(lib, *, ends=(2, 9), length=3, **keywords):
    env = lib.TransformedEnv(
        lib.SerialEnv(2, [partial(count, lib, n) for n in ends]), lib.MultiAction(**keywords)
    )
    chunk = torch.ones(2, length, 1, dtype=torch.int64)
    return env.step(env.reset().set("action", chunk))["next"]


def test_every_action_of_a_chunk_is_a_step():
    check_same(lambda lib: chunked(lib, ends=(9, 9)))
    check_same(lambda lib: chunked(lib, ends=(9, 9), length=1))
    check_same(lambda lib: chunked(lib, ends=(9, 9), stack_rewards=False, stack_observations=True))
    check_same(lambda lib: chunked(lib, ends=(2, 2), length=5))
    check_same(lambda lib: chunked(lib, stack_rewards=False))


def test_steps_after_the_end_of_an_episode_earn_nothing():
    differs("chunk-rewards", chunked)

    assert chunked(OURS)["reward"].flatten(1).tolist() == [[1, 2, 0], [1, 2, 3]]
    assert chunked(OURS)["count"].tolist() == [[2], [3]]


def test_transforms_before_a_chunk_run_at_every_action_and_those_after_it_once():
    def call(lib):
        counters = [lib.StepCounter(step_count_key=name) for name in ("inner", "outer")]
        chain = lib.Compose(counters[0], lib.ActionScaling(), lib.MultiAction(), counters[1])
        env = lib.TransformedEnv(arm(lib, (3,)), chain)
        return env.step(env.reset().set("action", torch.ones(4, 3)))["next"]

    check_same(call)


def test_a_belief_is_acted_on_by_its_mean():
    def call(lib):
        env = lib.TransformedEnv(lib.GymEnv("Pendulum-v1"), lib.MeanActionSelector())
        env.set_seed(0)

        def policy(td):
            action = {"mean": td["observation", "mean"][..., :1], "var": torch.ones(1, 1)}
            return td.set("action", TensorDict(action))

        return [leaf_specs(env), env.rollout(3, policy)]

    check_same(call)


@pytest.mark.parametrize("low", [None, float("-inf")])
def test_an_action_without_finite_bounds_is_scaled_by_numbers_only(low):
    def call(lib, **numbers):
        env = arm(lib)
        unbounded = lib.Unbounded((2, 3)) if low is None else lib.Bounded(low, 1.0, (2, 3))
        env.action_spec = unbounded
        return leaf_specs(lib.TransformedEnv(env, lib.ActionScaling(**numbers)))

    check_same(call)
    check_same(lambda lib: call(lib, loc=1.0, scale=2.0))


def test_a_random_truncation_says_which_counter_it_misses():
    def call(lib, *transforms):
        return played(lib.TransformedEnv(count(lib), lib.Compose(*transforms)), 2)

    check_same(lambda lib: call(lib, lib.RandomTruncationTransform(1, 2)))
    check_same(
        lambda lib: call(lib, lib.RandomTruncationTransform(1, 2), lib.StepCounter()),
    )
    check_same(
        lambda lib: call(
            lib,
            lib.StepCounter(step_count_key="age"),
            lib.RandomTruncationTransform(2, 2, step_count_key="age"),
        )
    )
