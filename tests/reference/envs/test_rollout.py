"""`rollout` with every keyword, on every kind of env, beside the reference library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from envkit.errors import PolicyError, RolloutError
from tests.reference.compare import OURS, check_same, check_works_alike, differs
from tests.reference.envs import zoo
from tests.reference.envs.zoo import ENVS

STOPS = [{}, {"break_when_any_done": False}, {"break_when_all_done": True}]
KEYWORDS = st.fixed_dictionaries(
    {"max_steps": st.integers(1, 5)},
    optional={
        "return_contiguous": st.sampled_from([None, False]),
        "auto_cast_to_device": st.booleans(),
        "storing_device": st.sampled_from([None, "cpu"]),
        "set_state": st.just(False),
    },
)


@settings(max_examples=40)
@given(make=st.sampled_from(list(ENVS.values())), stop=st.sampled_from(STOPS), keywords=KEYWORDS)
def test_random_rollouts_are_those_of_the_reference(make, stop, keywords):
    if make is zoo.nested and stop.get("break_when_all_done"):
        keywords["max_steps"] = 2  # see the next test
    check_works_alike(lambda lib: make(lib).rollout(**stop, **keywords))


def test_an_env_of_which_one_part_is_done_counts_as_done():
    def steps(lib):
        return zoo.nested(lib).rollout(9, break_when_all_done=True).shape

    differs("rollout-ends", steps)
    assert steps(OURS) == (2,)


def test_sub_envs_that_say_done_alone_have_terminated():
    def ended(lib):
        return lib.SerialEnv(2, lambda: zoo.talking(lib)).rollout(9)["next", "terminated"][:, -1]

    differs("serial-terminated", ended)
    assert ended(OURS).all()


def same_action(action: torch.Tensor, **options: Any) -> TensorDictModule:
    return TensorDictModule(lambda _: action, in_keys=["count"], out_keys=["action"], **options)


def anew(td: TensorDict) -> TensorDict:
    return TensorDict({"action": td["count"].long(), "extra": td["count"] + 1}, td.batch_size)


POLICIES = {
    "in place": same_action(torch.ones(1, dtype=torch.int64)),
    "inplace=False": same_action(torch.ones(1, dtype=torch.int64), inplace=False),
    "inplace='empty'": same_action(torch.ones(1, dtype=torch.int64), inplace="empty"),
    "a new TensorDict": lambda td: anew(td),
    "a copy": lambda td: td.clone().update(anew(td)),
}


@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("trust_policy", [False, True])
def test_what_a_policy_returns_is_merged_into_what_it_was_given(policy, stop, trust_policy):
    check_works_alike(
        lambda lib: zoo.counter(lib).rollout(5, policy, trust_policy=trust_policy, **stop)
    )


@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("end", [2, 9])
def test_actions_that_were_decided_before_are_played(stop, end):
    actions = torch.tensor([[0], [1], [2], [1]])

    check_works_alike(lambda lib: zoo.counter(lib, end=end).rollout(4, actions=actions, **stop))
    check_works_alike(
        lambda lib: zoo.counter(lib, end=end).rollout(9, actions=list(actions), **stop)
    )
    check_works_alike(
        lambda lib: zoo.counter(lib, end=end).rollout(3, actions=iter(actions.numpy()), **stop)
    )


def test_actions_of_a_batch_are_played_in_a_serial_env():
    actions = torch.ones(3, 2, 1, dtype=torch.int64)

    check_works_alike(
        lambda lib: lib.SerialEnv(2, lambda: zoo.counter(lib)).rollout(5, actions=actions)
    )


def test_a_policy_beside_actions_and_no_action_at_all_are_refused():
    check_same(lambda lib: zoo.counter(lib).rollout(3, lambda td: td, actions=[torch.ones(1)]))
    check_same(lambda lib: zoo.counter(lib).rollout(3, actions=[]))


def test_several_and_nested_actions_can_be_played_too():
    def play_nested(lib):
        return zoo.nested(lib).rollout(2, actions=torch.ones(2, 2, 3))["data", "move"]

    def play_several(lib):
        env = zoo.several(lib)
        return env.rollout(2, actions=[env.full_action_spec.one() for _ in range(2)])["turn"]

    differs("rollout-actions", play_nested)
    differs("rollout-actions", play_several)
    assert play_nested(OURS).eq(1).all() and play_several(OURS).shape == (2, 1)


def test_actions_that_end_too_early_are_told():
    env = zoo.counter(OURS)

    with pytest.raises(RolloutError, match="actions ended before the rollout did"):
        env.rollout(3, actions=iter(torch.ones(2, 1, dtype=torch.int64)))


def test_a_trusted_policy_that_returns_no_tensordict_is_told():
    with pytest.raises(PolicyError, match="called with a TensorDict and must return one"):
        zoo.counter(OURS).rollout(2, lambda td: 3, trust_policy=True)


def test_callbacks_are_shown_the_transition_just_completed():
    def seen(lib):
        shown = []
        zoo.counter(lib).rollout(3, callback=lambda env, td: shown.append(sorted(td.keys())))
        return shown

    differs("rollout-callback", seen)
    assert all("next" in keys for keys in seen(OURS))


@pytest.mark.parametrize("make", [zoo.counter, zoo.batched], ids=["counter", "batched"])
@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_the_last_step_is_marked_as_cut_short(make, stop):
    check_works_alike(lambda lib: make(lib).rollout(2, set_truncated=True, **stop))


def test_without_a_flag_for_it_the_last_step_cannot_be_marked():
    check_same(lambda lib: zoo.nested(lib).rollout(2, set_truncated=True))


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS)
def test_a_rollout_goes_on_from_the_last_step_of_another(make):
    def two_parts(lib):
        env = make(lib)
        first = env.rollout(2, return_contiguous=False)
        keys = {"action_keys": env.action_keys, "reward_keys": env.reward_keys}
        root = lib.step_mdp(first[..., -1].clone(), **keys)
        return env.rollout(2, auto_reset=False, tensordict=root)

    check_works_alike(two_parts)


def test_the_batch_size_of_the_given_data_is_that_of_an_unlocked_env():
    start = TensorDict(batch_size=[4])

    check_works_alike(lambda lib: zoo.unlocked(lib).rollout(3, tensordict=start.clone()))


@pytest.mark.parametrize("dense", [None, True, False])
def test_a_rollout_of_growing_observations_is_dense_only_where_that_is_asked(dense):
    check_same(lambda lib: zoo.dynamic(lib).rollout(3, return_contiguous=dense))


def test_rollouts_are_written_into_what_is_given():
    def into(lib):
        out = zoo.counter(lib).rollout(3).clone().zero_()
        found = zoo.counter(lib).rollout(3, out=out)
        return found is out, out

    check_works_alike(into)


@settings(max_examples=20)
@given(
    make=st.sampled_from(list(ENVS.values())), stop=st.sampled_from(STOPS), steps=st.integers(1, 5)
)
def test_rollouts_of_sub_envs_are_those_of_the_reference(make, stop, steps):
    if make is zoo.nested and stop.get("break_when_all_done"):
        steps = min(steps, 2)  # an env of which one part is done counts as done

    def rows(lib):
        env = lib.SerialEnv(2, lambda: make(lib))
        actions = torch.stack([make(lib).full_action_spec.rand() for _ in range(2)])
        data = env.rollout(steps, lambda td: td.update(actions), trust_policy=True, **stop)
        flags = ["terminated", ("next", "terminated")]  # where sub-envs say done alone
        return [row.exclude(*flags) for row in data.unbind(0)]

    check_works_alike(rows)


def test_a_policy_that_changes_an_observation_in_place_changes_recorded_data_there():
    def call(lib):
        def act(td):
            td["count"] += 10
            return td.set("action", torch.ones(1, dtype=torch.int64))

        return zoo.counter(lib, end=99).rollout(3, act, trust_policy=True)["next", "count"]

    differs("policies-change-nothing", call)
    with pytest.raises(PolicyError, match=r"changed \['count'\] in place"):
        call(OURS)


def cut_short(lib):
    """An env whose second step sets ``truncated`` and leaves ``done`` unset."""
    endless = zoo.counter(lib, end=99)
    return lib.TransformedEnv(endless, lib.StepCounter(2, update_done=False))


@pytest.mark.parametrize("stop", [{}, {"break_when_all_done": True}])
def test_a_rollout_stops_where_any_flag_ends_the_episode(stop):
    check_works_alike(lambda lib: cut_short(lib).rollout(5, **stop))
    assert cut_short(OURS).rollout(5, **stop).shape[-1] == 2


def test_whatever_flag_ends_an_episode_the_next_one_begins():
    def call(lib):
        return cut_short(lib).rollout(5, break_when_any_done=False)["step_count"]

    differs("rollout-ends", call)
    assert call(OURS).flatten().tolist() == [0, 1, 0, 1, 0]
