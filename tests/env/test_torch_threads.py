"""Threads of torch while a policy acts: one where its work is small; the user's number everywhere else."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from envkit import (
    Composite,
    ConditionalPolicySwitch,
    EnvBase,
    GymEnv,
    MixedEnv,
    MultiSyncDataCollector,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TransformedEnv,
    Unbounded,
    compile_policy,
    evaluate,
    record,
)
from envkit.env.torch_threads import (
    WORTH_THREADS,
    ThreadLimit,
    act_with_fitting_threads,
    work_of_row,
)

USERS = 3


@pytest.fixture(autouse=True)
def number_of_the_user():
    before = torch.get_num_threads()
    torch.set_num_threads(USERS)
    yield
    torch.set_num_threads(before)


class Seen(nn.Module):
    """Acts with zeros, and notes the number of threads; ``size`` parameters take no memory."""

    def __init__(self, size=8, act=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1).expand(size), requires_grad=False)
        self.seen = []
        self.act = act or (lambda observation: torch.zeros(*observation.shape[:-1], 1))

    def forward(self, observation):
        self.seen.append(torch.get_num_threads())
        return self.act(observation)


class Line(EnvBase):
    """Moves rows of three numbers by an action, in torch."""

    def __init__(self, rows=()):
        super().__init__(batch_size=rows)
        self.observation_spec = Composite(observation=Unbounded((*rows, 3)), shape=rows)
        self.action_spec = Unbounded((*rows, 1))
        self.reward_spec = Unbounded((*rows, 1))

    def _shown(self):
        done = torch.zeros((*self.batch_size, 1), dtype=torch.bool)
        flags = {"done": done, "terminated": done.clone()}
        return TensorDict({"observation": self.at, **flags}, self.batch_size)

    def _reset(self, td):
        size = self.observation_spec["observation"].shape
        self.at = torch.linspace(-1, 1, size.numel()).reshape(size)
        return self._shown()

    def _step(self, td):
        self.at = self.at + td["action"]
        return self._shown().set("reward", self.at[..., :1])

    def _set_seed(self, seed):
        pass


def pendulum():
    return GymEnv("Pendulum-v1")


KINDS = {
    "torch": Line,
    "one simulator": pendulum,
    "transformed": lambda: TransformedEnv(pendulum(), StepCounter()),
    "in this process": lambda: SerialEnv(2, pendulum),
    "in workers": lambda: ParallelEnv(2, pendulum, num_processes=1),
    "mixed": lambda: MixedEnv([SerialEnv(2, pendulum), SerialEnv(1, pendulum)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_policy_acts_with_one_thread_and_callbacks_run_with_those_of_the_user(kind, opened):
    env, policy, between = opened(KINDS[kind]()), Seen(), []

    env.rollout(4, policy, lambda *_: between.append(torch.get_num_threads()))
    env.rollout(3, policy)

    assert set(policy.seen) == {1}
    assert set(between) == {USERS}
    assert torch.get_num_threads() == USERS


def as_function(policy):
    return lambda observation: policy(observation)


def as_td_function(policy):
    return lambda td: td.set("action", policy(td["observation"]))


@pytest.mark.parametrize(
    "form",
    [
        as_function,
        as_td_function,
        lambda policy: policy.forward,
        lambda policy: TensorDictModule(policy, ["observation"], ["action"]),
    ],
    ids=["function", "of a TensorDict", "method", "TensorDictModule"],
)
def test_every_form_of_a_policy_acts_with_one_thread(form):
    policy = Seen()

    Line().rollout(3, form(policy))
    Line().rollout(3, form(policy), lambda *_: None)

    assert set(policy.seen) == {1}


def test_a_large_policy_keeps_the_threads_of_the_user():
    rows = Line((3,))
    large, small = Seen(WORTH_THREADS // 3), Seen(WORTH_THREADS // 3 - 1)

    rows.rollout(2, large)
    rows.rollout(2, small)

    assert (set(large.seen), set(small.seen)) == ({USERS}, {1})


def test_collectors_act_with_one_thread_and_loops_over_them_run_with_those_of_the_user():
    policy, between = Seen(), []

    with SyncDataCollector(Line(), policy, frames_per_batch=3, total_frames=9) as batches:
        policy.seen.clear()
        for _ in batches:
            between.append(torch.get_num_threads())

    assert (set(policy.seen), set(between)) == ({1}, {USERS})


def test_evaluations_and_records_act_with_one_thread(tmp_path):
    env, policy = GymEnv("Pendulum-v1", render_mode="rgb_array"), Seen()

    evaluate(env, policy, episodes=1, max_steps=3)
    record(env, policy, tmp_path / "pendulum.gif", steps=3)
    env.close()

    assert (set(policy.seen), torch.get_num_threads()) == ({1}, USERS)


def test_what_a_compiled_policy_leaves_to_torch_acts_with_one_thread(opened):
    env, policy = opened(SerialEnv(2, pendulum)), Seen()
    compiled = compile_policy(policy)
    policy.register_forward_hook(lambda *_: None)  # which NumPy would not call

    env.rollout(3, compiled)

    assert set(policy.seen) == {1}


def test_the_policy_of_a_transform_acts_with_one_thread():
    policy = Seen()
    switch = ConditionalPolicySwitch(as_td_function(policy), lambda td: True)

    TransformedEnv(Line(), switch).rollout(2)

    assert (set(policy.seen), torch.get_num_threads()) == ({1}, USERS)


@pytest.mark.parametrize(
    "ends_by",
    [lambda: 1 / 0, lambda: signal.raise_signal(signal.SIGINT)],
    ids=["an error", "Ctrl-C"],
)
def test_the_number_is_back_after(ends_by):
    with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
        Line().rollout(3, lambda observation: ends_by())

    assert torch.get_num_threads() == USERS


def test_a_number_that_is_asked_for_holds_for_policies_too(opened):
    env, policy = opened(ParallelEnv(1, pendulum, num_threads=2)), Seen()

    env.rollout(3, policy)
    env.close()
    Line().rollout(3, policy)

    assert policy.seen == [2, 2, 2, 1, 1, 1]
    assert torch.get_num_threads() == USERS


def test_a_pool_that_is_started_by_a_policy_limits_threads_until_it_ends():
    pool = ParallelEnv(1, pendulum, num_threads=2)

    def starts_pool(observation):
        pool.start()
        return torch.zeros(1)

    Line().rollout(1, starts_pool)
    limited = torch.get_num_threads()
    pool.close()

    assert limited == 2 != USERS
    assert torch.get_num_threads() == USERS


def test_ctrl_c_while_limits_are_looked_up_leaves_the_number_of_the_user(monkeypatch):
    def interrupt(cls, without):
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadLimit, "number", classmethod(interrupt))

    with pytest.raises(KeyboardInterrupt):
        act_with_fitting_threads(1, lambda: None)

    assert torch.get_num_threads() == USERS


class TellsThreads(nn.Module):
    def forward(self, observation):
        return torch.full((*observation.shape[:-1], 1), float(torch.get_num_threads()) / 8)


@pytest.mark.parametrize("asked", [1, 2])
def test_a_number_that_is_asked_for_workers_holds_for_their_policies(asked):
    with MultiSyncDataCollector(
        [Line], TellsThreads(), frames_per_batch=2, num_sub_threads=asked
    ) as collector:
        assert (collector.next()["action"] * 8).flatten().tolist() == [asked, asked]


def test_threads_that_act_at_once_keep_their_own_numbers():
    acts, goes_on, numbers = threading.Event(), threading.Event(), {}

    def slow(observation):
        acts.set()
        goes_on.wait(30)
        return torch.zeros(1)

    def run(name, policy, number=None):
        if number is not None:
            torch.set_num_threads(number)
        between = []
        Line().rollout(2, policy, lambda *_: between.append(torch.get_num_threads()))
        numbers[name] = {*between, torch.get_num_threads()}

    first = threading.Thread(target=run, args=("first", slow, 2))
    first.start()
    acts.wait(30)
    later = Seen(), Seen()
    others = [
        threading.Thread(target=run, args=("new", later[0])),
        threading.Thread(target=run, args=("own number", later[1], 4)),
    ]
    for thread in others:
        thread.start()
        thread.join()
    goes_on.set()
    first.join()

    # a new thread has the number that was set last, before the policy of another one began to act
    assert numbers == {"first": {2}, "new": {2}, "own number": {4}}
    assert set(later[0].seen + later[1].seen) == {1}
    assert torch.get_num_threads() == USERS


def run_of(rows, width, number):
    torch.manual_seed(0)
    layers = nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    net = nn.Sequential(*layers)
    torch.set_num_threads(number)
    return Line((rows,)).rollout(5, net)


@pytest.mark.parametrize(
    "width", [64, 1024]
)  # of the latter, torch's own sums depend on the number
def test_a_small_policy_gives_the_same_data_whatever_number_the_user_has_set(width):
    first, *others = (run_of(27, width, number) for number in (1, 2, 3, 4))

    assert all(bool((other == first).all()) for other in others)


def test_work_is_parameters_and_convolutions_count_for_the_places_where_they_are_used():
    linear, convolution = nn.Linear(3, 4, bias=False), nn.Conv2d(1, 2, 3, bias=False)

    assert work_of_row(linear) == work_of_row(linear.forward) == 12
    assert work_of_row(nn.Sequential(linear, convolution)) == 12 + 100 * 18


def test_a_policy_that_shows_no_parameters_counts_as_a_network_of_usual_size():
    unseen = lambda observation: observation, nn.Tanh(), nn.LazyLinear(3)

    assert {work_of_row(policy) for policy in unseen} == {100_000}
