"""`reset` with masks, states and keywords, beside the reference library."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tensordict import TensorDict

from envkit import BraxEnv, ParallelEnv
from envkit.errors import SetStateError
from tests.reference.compare import OURS, check_same, check_works_alike, differs
from tests.reference.envs import zoo
from tests.reference.envs.zoo import ENVS


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS)
def test_a_reset_gives_what_the_reference_gives(make):
    check_works_alike(lambda lib: make(lib).reset())


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS)
def test_a_reset_writes_into_the_data_it_is_given(make):
    def given_back(lib):
        env = make(lib)
        td = env.rand_action(env.reset())
        return env.reset(td) is td, td

    check_works_alike(given_back)


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS)
@pytest.mark.parametrize("workers", [1, 2])
def test_sub_envs_are_reset_like_single_ones(make, workers):
    check_works_alike(lambda lib: lib.SerialEnv(workers, lambda: make(lib)).reset())


@pytest.mark.parametrize("mask", list(product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("trailing", [True, False])
def test_rows_outside_the_mask_are_left_alone(mask, trailing):
    def some(lib, env):
        td = env.step_mdp(env.step(env.reset().set("action", torch.ones(2, 1, dtype=torch.int64))))
        chosen = torch.tensor(mask).unsqueeze(-1) if trailing else torch.tensor(mask)
        return env.reset(td.select("count", *env.done_keys).set("_reset", chosen))

    check_works_alike(lambda lib: some(lib, zoo.batched(lib)))
    check_works_alike(lambda lib: some(lib, lib.SerialEnv(2, lambda: zoo.counter(lib))))


def test_what_a_reset_does_not_give_stays_in_the_rows_that_are_reset():
    def some(lib):
        env = zoo.batched(lib)
        td = env.reset().set("note", torch.ones(2)).set("_reset", torch.tensor([[True], [False]]))
        return env.reset(td)["note"].tolist()

    differs("partial-reset-keeps", some)
    assert some(OURS) == [1, 1]


@pytest.mark.parametrize("set_state", [True, False, None])
@pytest.mark.parametrize("entries", [("count",), ("other",), ("count", "other"), ()], ids=str)
def test_an_env_that_can_begins_at_the_state_it_is_given(set_state, entries):
    def begin(lib):
        td = TensorDict({name: torch.full((1,), 2.0) for name in entries})
        found = zoo.placed(lib).reset(td, set_state=set_state)
        return found is td, found

    check_works_alike(begin)


@pytest.mark.parametrize("set_state", [True, False, None])
def test_states_reach_envs_inside_others(set_state):
    many = TensorDict({"count": torch.tensor([[1.0], [2.0]])}, [2])

    def transformed(lib):
        return lib.TransformedEnv(zoo.placed(lib), lib.StepCounter())

    check_works_alike(lambda lib: transformed(lib).reset(many[0].clone(), set_state=set_state))
    check_works_alike(
        lambda lib: lib.SerialEnv(2, lambda: transformed(lib)).reset(
            many.clone(), set_state=set_state
        )
    )
    check_works_alike(
        lambda lib: zoo.placed(lib).rollout(2, tensordict=many[1].clone(), set_state=set_state)
    )


def test_the_end_of_an_episode_is_no_state_to_begin_at():
    check_works_alike(lambda lib: zoo.placed(lib).rollout(6, break_when_any_done=False))
    check_works_alike(
        lambda lib: lib.SerialEnv(2, lambda: zoo.placed(lib)).rollout(6, break_when_any_done=False)
    )


def test_an_env_that_cannot_begin_at_a_state_says_so():
    check_same(lambda lib: zoo.counter(lib).reset(set_state=True))
    check_same(lambda lib: zoo.unlocked(lib).rollout(2, set_state=True))
    check_same(lambda lib: lib.SerialEnv(2, lambda: zoo.counter(lib)).reset(set_state=True))
    check_same(lambda lib: lib.TransformedEnv(zoo.counter(lib)).reset(set_state=True))
    with pytest.raises(SetStateError, match="step from that data"):
        BraxEnv("fast", device="cpu").reset(set_state=True)


@pytest.mark.slow
def test_states_reach_worker_processes(opened):
    env = opened(ParallelEnv(2, lambda: zoo.placed(OURS)))
    start = TensorDict({"count": torch.tensor([[1.0], [2.0]])}, [2])

    td = env.reset(start, set_state=True)

    assert td is start
    assert td["count"].flatten().tolist() == [1, 2]


def test_a_reset_may_be_shown_its_mask_alone():
    def shown(lib):
        env, seen = zoo.batched(lib), []
        reset = env._reset
        vars(env)["_reset"] = lambda td, **kw: (seen.append(sorted(td.keys())), reset(td, **kw))[1]
        td = env.reset(TensorDict(batch_size=[2])).set("_reset", torch.tensor([[True], [False]]))
        env.reset(td, select_reset_only=True)
        env.reset(td.exclude("_reset"), select_reset_only=True)
        return seen

    check_works_alike(shown)


def test_a_reset_of_what_is_done_is_shown_the_data_that_is_there():
    def shown(lib):
        env, seen = zoo.batched(lib), []
        reset = env._reset
        vars(env)["_reset"] = lambda td, **kw: (seen.append(sorted(td.keys())), reset(td, **kw))[1]
        env.maybe_reset(
            env.reset(TensorDict(batch_size=[2])).set("done", torch.ones(2, 1, dtype=torch.bool))
        )
        return seen[-1]

    differs("maybe-reset-data", shown)
    assert "count" in shown(OURS)


def test_keywords_of_a_reset_go_to_the_simulator():
    check_works_alike(lambda lib: zoo.counter(lib).reset(start=2))
    check_works_alike(lambda lib: lib.SerialEnv(2, lambda: zoo.counter(lib)).reset(start=2))
    check_works_alike(
        lambda lib: lib.SerialEnv(2, lambda: zoo.counter(lib)).reset(
            list_of_kwargs=[{"start": 1}, {"start": 2}]
        )
    )
