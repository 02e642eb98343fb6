"""One env and several threads: each may use it, none while another does."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import partial

import pytest
import torch

from envkit import (
    GymEnv,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from envkit.errors import BusyError
from tests.zoo.envs import Count
from tests.zoo.jax_envs import Countdown

KINDS = {
    "count": Count,
    "gym": partial(GymEnv, "CartPole-v1"),
    "vector": partial(GymEnv, "CartPole-v1", num_envs=2),
    "jax": partial(JaxEnv, Countdown(9), batch_size=[2]),
    "fused": lambda: TransformedEnv(JaxEnv(Countdown(9), batch_size=[2]), StepCounter()),
    "serial": partial(SerialEnv, 2, Count),
    "parallel": partial(ParallelEnv, 2, Count, num_processes=1),
    "transformed": lambda: TransformedEnv(GymEnv("CartPole-v1"), RewardSum()),
    "mixed": lambda: MixedEnv([SerialEnv(2, Count)]),
}


COMPILED_TOO = {"jax"}  # what "fused" is around


@pytest.fixture(
    params=[
        pytest.param(kind, marks=pytest.mark.slow if kind in COMPILED_TOO else ())
        for kind in sorted(KINDS)
    ]
)
def env(request):
    env = KINDS[request.param]()
    yield env
    env.close(raise_if_closed=False)


def in_thread(name, work):
    """Run ``work`` in a thread of that name, and give what it returned or raised."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    (result,) = outcome
    return result


class Holding:
    """A policy in whose first call something else is done."""

    def __init__(self, env, work):
        self.env, self.work, self.result = env, work, None

    def __call__(self, tensordict):
        if self.result is None:
            self.result = self.work()
        return self.env.rand_action(tensordict)


CALLS = {
    "step": lambda env, td: env.step(td),
    "advance": lambda env, td: env.step_and_maybe_reset(td),
    "reset": lambda env, td: env.reset(),
    "rollout": lambda env, td: env.rollout(2),
    "draw": lambda env, td: env.rand_action(),
    "seed": lambda env, td: env.set_seed(0),
    "close": lambda env, td: env.close(),
}


def test_a_second_thread_is_refused_at_once_and_both_are_named(env):
    root = env.rand_action(env.reset())

    def intrude():
        return [in_thread("intruder", partial(call, env, root.clone())) for call in CALLS.values()]

    policy = Holding(env, intrude)
    data = in_thread("owner", lambda: env.rollout(3, policy))

    assert data.shape[-1] == 3
    for error in policy.result:
        assert isinstance(error, BusyError)
        assert "'owner'" in str(error)
        assert "'intruder'" in str(error)
        assert "its own env" in str(error)


def test_an_env_may_go_from_thread_to_thread(env):
    env.set_seed(0)
    root = env.rand_action(env.reset())

    stepped = in_thread("other", lambda: env.step(root))
    env.step(env.rand_action(env.step_mdp(stepped)))
    data = in_thread("third", lambda: env.rollout(3, break_when_any_done=False))

    assert data.shape[-1] == 3
    assert env.rollout(2).shape[-1] == 2


def test_callbacks_and_policies_use_the_env_that_runs_them(env):
    seen = []

    def callback(env, td):
        seen.append(env.rand_action().batch_size)

    env.rollout(3, callback=callback, break_when_any_done=False)

    assert seen == [env.batch_size] * 2


@pytest.mark.parametrize(
    ("make", "inside"),
    [
        (KINDS["transformed"], lambda env: env.base_env),
        (KINDS["fused"], lambda env: env.base_env),
        (KINDS["mixed"], lambda env: env.members[0].env),
    ],
)
def test_an_env_inside_another_is_used_with_it(make, inside):
    env = make()
    policy = Holding(env, lambda: in_thread("intruder", inside(env).reset))

    env.rollout(2, policy)

    assert isinstance(policy.result, BusyError)


@pytest.mark.parametrize("name", ["has_attribute", "get_attribute"])
def test_attributes_of_workers_are_not_asked_for_meanwhile(name):
    env = ParallelEnv(2, Count, num_processes=1)
    look = {"has_attribute": lambda: env.maxs, "get_attribute": lambda: list(maxs)}[name]
    env.start()
    maxs = env.maxs
    policy = Holding(env, lambda: in_thread("intruder", look))

    env.rollout(2, policy)
    kept = list(maxs)
    env.close()

    assert isinstance(policy.result, BusyError)
    assert kept == [5, 5]


def test_two_threads_do_not_start_the_same_workers():
    started, results = threading.Event(), []

    def make():
        started.set()
        results.append(in_thread("intruder", lambda: env.batch_size))
        return Count()

    env = SerialEnv(1, make)
    env.start()
    env.close()

    assert started.is_set()
    assert isinstance(results[0], BusyError)


def test_a_call_that_fails_lets_the_env_go():
    env = Count()

    with pytest.raises(TypeError):
        env.step(None)

    assert in_thread("other", lambda: env.rollout(2)).shape == (2,)


def test_a_mixed_env_that_is_refused_for_one_member_lets_the_others_go():
    first, second = SerialEnv(1, Count), SerialEnv(1, Count)
    env = MixedEnv([first, second])
    policy = Holding(second, lambda: in_thread("intruder", env.reset))

    second.rollout(2, policy)

    assert isinstance(policy.result, BusyError)
    assert in_thread("other", first.reset).batch_size == (1,)
    assert in_thread("other", env.reset).batch_size == (2,)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_is_held_by_nobody(twin):
    env = TransformedEnv(Count(), StepCounter())
    copies = []
    policy = Holding(env, lambda: copies.append(twin(env)) or in_thread("other", copies[0].reset))

    env.rollout(2, policy)

    assert torch.equal(policy.result["count"], torch.zeros(1, dtype=torch.int64))
    copied = Holding(copies[0], lambda: in_thread("intruder", copies[0].base_env.reset))
    copies[0].rollout(2, copied)
    assert isinstance(copied.result, BusyError)
