"""`step`, what follows it and what masks leave out, beside the reference library."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

from tests.reference.compare import OURS, check_works_alike, differs
from tests.reference.envs import zoo
from tests.reference.envs.zoo import ENVS


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS)
def test_steps_give_what_the_reference_gives(make):
    def step(lib):
        env = make(lib)
        return env.step(env.rand_action(env.reset()))

    check_works_alike(step)
    check_works_alike(
        lambda lib: make(lib).rand_step(make(lib).reset()) if make is zoo.unlocked else 0
    )


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS)
def test_the_loop_of_a_collector_gives_what_the_reference_gives(make):
    def collect(lib):
        env = make(lib)
        td, steps = env.reset(), []
        for _ in range(5):
            data, td = env.step_and_maybe_reset(env.rand_action(td))
            steps.append(data)
        return steps, td.exclude(*env.action_keys)

    check_works_alike(collect)


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS)
def test_what_is_done_is_told_and_reset(make):
    def done(lib):
        env = make(lib)
        td, seen = env.reset(), []
        for _ in range(4):
            td = env.step_mdp(env.step(env.rand_action(td))).exclude(*env.action_keys)
            seen.append((bool(env.any_done(td)), td.copy()))
            td = env.maybe_reset(td.exclude(*env.reset_keys))
        return seen, td

    check_works_alike(done)


@pytest.mark.parametrize("mask", list(product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("trailing", [True, False])
def test_rows_that_a_mask_leaves_out_are_not_stepped(mask, trailing):
    def some(lib, env):
        td = env.step_mdp(env.step(env.reset().set("action", torch.ones(2, 1, dtype=torch.int64))))
        chosen = torch.tensor(mask).unsqueeze(-1) if trailing else torch.tensor(mask)
        td.set("action", torch.full((2, 1), 2)).set("_step", chosen)
        following = env.step(td)["next"]
        return following.exclude("reward"), following["reward"].flatten()[chosen.flatten()]

    if not trailing:
        check_works_alike(lambda lib: some(lib, zoo.batched(lib)))
    check_works_alike(lambda lib: some(lib, lib.SerialEnv(2, lambda: zoo.counter(lib))))


@pytest.mark.parametrize("stepped", [True, False])
def test_one_env_is_stepped_or_left_alone(stepped):
    def masked(lib):
        env = zoo.counter(lib)
        td = env.rand_action(env.reset()).set("_step", torch.tensor(stepped))
        return env.step(td)["next"], env.count

    check_works_alike(masked)


def test_a_batch_that_is_left_alone_wholly_is_not_called():
    def calls(lib):
        env, seen = zoo.batched(lib), []
        step = env._step
        vars(env)["_step"] = lambda td: (seen.append(td), step(td))[1]
        td = env.rand_action(env.reset()).set("_step", torch.zeros(2, dtype=torch.bool))
        return env.step(td)["next"], len(seen)

    check_works_alike(calls)


def test_masks_are_gone_from_what_a_call_gives():
    def left(lib):
        env = zoo.batched(lib)
        td = env.rand_action(env.reset()).set("_step", torch.tensor([True, False]))
        return "_step" in env.step(td).keys()

    differs("step-mdp", left)
    assert not left(OURS)


def transition() -> TensorDict:
    """A step with nested entries of every kind, some of them below a name of their own."""
    one, flag = torch.ones(1), torch.zeros(1, dtype=torch.bool)
    return TensorDict(
        {
            "obs": one * 0,
            "action": one,
            "other": one,
            "done": flag,
            "nested": TensorDict({"action": one, "x": one}),
            "only_action": TensorDict({"action": one}),
            "empty": TensorDict({}),
            "next": TensorDict(
                {
                    "obs": one,
                    "reward": one,
                    "done": ~flag,
                    "nested": TensorDict({"reward": one, "y": one}),
                    "only_reward": TensorDict({"reward": one}),
                    "empty too": TensorDict({}),
                }
            ),
        }
    )


SWITCHES = {
    name: st.booleans()
    for name in ("keep_other", "exclude_reward", "exclude_done", "exclude_action")
}
NAMED = {
    "action_keys": ["action", ("nested", "action"), ("only_action", "action")],
    "reward_keys": ["reward", ("nested", "reward"), ("only_reward", "reward")],
}


@settings(max_examples=32)
@given(
    switches=st.fixed_dictionaries({}, optional=SWITCHES),
    named=st.sampled_from([{}, NAMED]),
    given_next=st.booleans(),
)
def test_the_root_of_the_next_step_holds_what_the_reference_says(switches, named, given_next):
    def follow(lib):
        into = TensorDict({"z": torch.ones(1)}) if given_next else None
        return lib.step_mdp(transition(), into, **switches, **named)

    check_works_alike(follow)


def test_lazy_stacks_are_carried_on_part_by_part():
    def follow(lib):
        parts = [transition(), transition().set("more", torch.ones(1))]
        return lib.step_mdp(LazyStackedTensorDict(*parts))

    check_works_alike(follow)


def test_what_is_not_of_the_next_root_is_dropped():
    def flags(lib):
        td = transition().set("terminated", torch.zeros(1, dtype=torch.bool))
        return sorted(lib.step_mdp(td, exclude_done=True).keys())

    def masks(lib):
        return "_reset" in lib.step_mdp(transition().set("_reset", torch.ones(1))).keys()

    def actions(lib):
        env = zoo.counter(lib)
        return sorted(env.step_mdp(env.step(env.rand_action(env.reset()))).keys())

    for call in (flags, masks, actions):
        differs("step-mdp", call)
    assert "terminated" not in flags(OURS)
    assert not masks(OURS)
    assert "action" not in actions(OURS)


def test_a_reset_that_gives_a_reward_spoils_no_rollout():
    def rewarded(lib):
        class Rewarded(zoo.counter_class(lib)):
            def _reset(self, tensordict=None, **kwargs):
                return super()._reset(tensordict, **kwargs).set("reward", torch.zeros(1))

        return sorted(Rewarded().reset().keys()), Rewarded().rollout(3, return_contiguous=True)

    found = rewarded(OURS)

    differs("reset-rewards", rewarded)
    assert "reward" not in found[0] and found[1]["next", "reward"].shape == (3, 1)


def test_a_reward_spec_may_hold_an_empty_composite():
    def hollow(lib):
        class Hollow(zoo.counter_class(lib)):
            def __init__(self):
                super().__init__()
                self.reward_spec = lib.Composite(reward=lib.Unbounded((1,)), none=lib.Composite())

        return Hollow().rollout(3), Hollow().rollout(6, break_when_any_done=False)

    check_works_alike(hollow)


def test_entries_that_a_caller_put_under_next_win():
    def preset(lib):
        env = zoo.counter(lib)
        td = env.rand_action(env.reset())
        return env.step(td.set(("next", "count"), torch.tensor([7])))["next", "count"]

    differs("presets-win", preset)


@pytest.mark.filterwarnings("ignore::envkit.StaleNextWarning")
def test_data_that_is_stepped_twice_holds_the_second_outcome():
    def again(lib):
        env = zoo.counter(lib)
        return env.rand_step(env.rand_step(env.reset()))["next", "count"]

    check_works_alike(again)


def test_sub_envs_must_be_reset_before_their_first_step():
    def early(lib):
        root = zoo.batched(lib).fake_tensordict().exclude("next")
        return lib.SerialEnv(2, lambda: zoo.counter(lib)).step(root)["next", "count"]

    differs("step-before-reset", early)


def test_a_reset_with_a_seed_gives_each_row_its_own():
    def begun(lib):
        return lib.SerialEnv(2, lambda: lib.GymEnv("Pendulum-v1")).reset(seed=0)["observation"]

    differs("row-seeds", begun)
    first, second = begun(OURS)
    assert not torch.equal(first, second)


def test_batched_envs_take_an_action_in_a_dtype_that_changes_no_value():
    def chosen(lib, number):
        env = lib.SerialEnv(2, lambda: zoo.counter(lib))
        root = env.reset().set("action", torch.full((2, 1), number))
        return env.step(root)["next", "reward"]

    check_works_alike(lambda lib: chosen(lib, 2.0))
    found = differs("actions-are-whole", lambda lib: chosen(lib, 0.7))
    assert "InputError" in found and "torchrl: ((2, 1)" in found
