"""``rollout(pipeline=...)``: one part of the rows is acted on while the others step, and the data is the same.

Conventions
    plan  what goes wrong, by step and row, see `planned`; policies find it by the ``row`` and ``time`` in a root.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from envkit import AsyncEnvPool, GymEnv, ParallelEnv, SerialEnv, TransformedEnv, compile_policy
from envkit.env.base import EnvBase
from envkit.env.policy import RandomPolicy
from envkit.errors import (
    ArgumentError,
    BusyEnvError,
    InputError,
    OptionError,
    RolloutError,
    WorkerError,
)
from envkit.specs import Unbounded
from envkit.transforms.episodes import StepCounter
from tests.batched.test_sub_envs import Pair
from tests.bridges.compare import assert_same
from tests.zoo.envs import Chaos, Count, order_fault

SEED = 3

pytestmark = pytest.mark.usefixtures("warm_fork_server")

together = {"break_when_any_done": False}


def cart_pole() -> EnvBase:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


@pytest.fixture(scope="module")
def pools():
    """Give open pools of CartPole by number of rows and of workers."""
    made: dict[tuple[int, int], ParallelEnv] = {}

    def pool(rows: int, workers: int) -> ParallelEnv:
        if (rows, workers) not in made:
            made[rows, workers] = ParallelEnv(rows, cart_pole, num_processes=workers)
        return made[rows, workers]

    yield pool
    for env in made.values():
        env.close()


class Lean(nn.Module):
    """Pushes the cart to where the pole leans; what a row does depends on no other."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (observation[..., 2] > 0).long()


def lean(observation: torch.Tensor) -> torch.Tensor:
    return Lean()(observation)


def lean_in_turns(tensordict: TensorDictBase) -> TensorDictBase:
    """Lean every other step, by a number of its own that it carries from step to step; and changes what it sees."""
    before = tensordict.get("turn", torch.zeros(tensordict.shape, dtype=torch.int64))
    leaning = lean(tensordict["observation"])
    action = torch.where(before % 2 == 0, leaning, 1 - leaning)
    tensordict["observation"][..., 0] = 7.0
    return tensordict.update({"action": action, "turn": before + 1, "sure": leaning > 0})


WAYS: dict[str, Callable[[], object]] = {
    "function": lambda: lean,
    "module": Lean,
    "TensorDictModule": lambda: TensorDictModule(Lean(), ["observation"], ["action"]),
    "TensorDicts": lambda: lean_in_turns,
    "compiled": lambda: compile_policy(Lean()),
}


def rolled(env: EnvBase, steps: int, policy: object, **options) -> TensorDictBase:
    env.set_seed(SEED)
    return env.rollout(steps, policy, **together, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parts", [2, 3])
def test_the_data_is_the_same(pools, way, parts):
    env, policy = pools(7, 3), WAYS[way]()

    data = rolled(env, 150, policy, pipeline=parts)  # longer than the slots, with ends of episodes

    assert data["next", "done"].any()
    assert_same(data, rolled(env, 150, policy))
    assert data.batch_size == (7, 150) and data.names[-1] == "time"


@settings(max_examples=15, deadline=None)
@given(
    rows=st.sampled_from([2, 5, 7]),
    workers=st.integers(2, 3),
    parts=st.integers(1, 3),
    steps=st.sampled_from([1, 2, 31, 32, 33, 64, 65, 97]),
    way=st.sampled_from(sorted(WAYS)),
)
def test_whatever_the_numbers_the_data_is_the_same(pools, rows, workers, parts, steps, way):
    workers = min(workers, rows)
    env, policy = pools(rows, workers), WAYS[way]()
    parts = min(parts, workers)

    assert_same(rolled(env, steps, policy, pipeline=parts), rolled(env, steps, policy))


def test_what_follows_goes_on_from_there(pools):
    env = pools(7, 3)

    def twice(**options) -> list[TensorDictBase]:
        first = rolled(env, 40, lean, **options)
        root = env.step_mdp(first[..., -1])
        second = env.rollout(40, lean, auto_reset=False, tensordict=root, **together, **options)
        single = env.step(env.step_mdp(second[..., -1]).set("action", torch.ones(7).long()))
        return [first, second, single]

    for found, wanted in zip(twice(pipeline=2), twice(), strict=True):
        assert_same(found, wanted)


def test_entries_of_the_caller_stay_beside_the_roots_of_their_rows(pools):
    env = pools(7, 3)
    env.set_seed(SEED)
    root = env.reset().set("row", torch.arange(7))

    data = env.rollout(5, lean, auto_reset=False, tensordict=root, pipeline=2, **together)

    assert data["row"].tolist() == [[row] * 5 for row in range(7)]


@pytest.mark.parametrize("policy", [lean, lean_in_turns])
def test_the_options_of_a_rollout_are_kept(pools, policy):
    env = pools(7, 3)
    wanted = rolled(env, 20, policy)
    out = wanted.clone().zero_()

    data = rolled(env, 20, policy, pipeline=3, set_truncated=True, storing_device="cpu", out=out)

    assert data is out and data["next", "truncated"][:, -1].all()
    assert_same(data[:, :-1], wanted[:, :-1].to("cpu"))


class Large(Count):
    """Shows so much that only two moments of it are kept."""

    def __init__(self):
        super().__init__(4)
        self.observation_spec = self.observation_spec.set("view", Unbounded((300_000,)))

    def _out(self):
        return super()._out().set("view", torch.full((300_000,), float(self.c)))


def test_rows_as_large_as_pictures_are_recorded_alike(opened):
    env = opened(ParallelEnv(4, Large, num_processes=2))

    def act(count: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        return (view[..., :1] > 1).long()

    data = rolled(env, 9, act, pipeline=2)

    assert env._exchange.has_large_rows
    assert data["next", "done"].any()
    assert_same(data, rolled(env, 9, act))


@pytest.mark.parametrize("policy", [None, RandomPolicy(), "rand_action"])
def test_random_actions_are_those_without_it(pools, policy):
    env = pools(7, 3)
    policy = env.rand_action if policy == "rand_action" else policy

    assert_same(rolled(env, 40, policy, pipeline=2), rolled(env, 40, None))


# ----------------------------------------------------------------------------------------- overlap


class Patient(Count):
    """Steps only once the policy has been called so often as its action says; see `Calls`."""

    def __init__(self, calls: Path):
        super().__init__(1000)
        self.calls = calls
        self.action_spec = Unbounded((1,), dtype=torch.int64)

    def _step(self, td):
        until = time.monotonic() + 20
        while len(self.calls.read_bytes()) < int(td["action"]):
            assert time.monotonic() < until, "the policy was not called while this row stepped"
            time.sleep(0.001)
        return super()._step(td)


class Calls:
    """A policy whose calls sub-envs can count; each row steps only when it has been called once more, for others."""

    def __init__(self, calls: Path, last: int):
        self.calls, self.count, self.last, self.rows = calls, 0, last, []

    def __call__(self, count: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.rows.append(len(count))
        with self.calls.open("ab") as file:
            file.write(b".")
        return torch.full_like(count, min(self.count + 1, self.last))


def test_it_acts_on_rows_while_others_step(opened, tmp_path):
    calls = tmp_path / "calls"
    calls.touch()
    env = opened(ParallelEnv(3, partial(Patient, calls), num_processes=2))
    policy = Calls(calls, 10)

    data = env.rollout(5, policy, pipeline=2, **together)

    assert data["next", "count"].squeeze(-1).tolist() == [[1, 2, 3, 4, 5]] * 3
    assert policy.rows == [2, 1] * 5


# ------------------------------------------------------------------------------------------ faults


def planned(**faults: str) -> dict[tuple[int, int], str]:
    """Plan faults named by step and row: ``s3r1="raise"``."""
    places = {place: place[1:].split("r") for place in faults}
    return {(int(step), int(row)): faults[place] for place, (step, row) in places.items()}


def following(plan: dict[tuple[int, int], str]) -> Callable[[TensorDictBase], TensorDictBase]:
    """Make a policy that has rows go wrong as planned."""

    def act(td: TensorDictBase) -> TensorDictBase:
        places = zip(td["time"].tolist(), td["row"].tolist(), strict=True)
        faults = [[Chaos.FAULTS.index(plan.get(place, "none"))] for place in places]
        return td.update({"action": torch.tensor(faults), "time": td["time"] + 1, "row": td["row"]})

    return act


ROWS = 4
RESTARTING = {"on_worker_failure": "restart", "max_restarts": 40}


def played(
    env: ParallelEnv, plan, steps: int = 14, order: Callable = bool, **options
) -> TensorDictBase:
    env.set_seed(SEED)
    root = env.reset()
    order()
    root.update({"time": torch.zeros(ROWS).long(), "row": torch.arange(ROWS)})
    options = {"auto_reset": False, "tensordict": root, **together, **options}
    return env.rollout(steps, following(plan), **options)


@pytest.mark.parametrize(
    "plan",
    [
        planned(s3r1="raise", s3r2="raise", s4r2="raise", s13r0="raise"),
        planned(s0r0="kill", s0r3="kill", s5r3="exit", s13r2="exit"),
        planned(s2r1="kill", s2r2="raise", s3r0="raise", s6r0="raise", s6r3="misfit"),
    ],
    ids=["raise", "die", "both"],
)
def test_rows_that_are_lost_are_made_good_as_without_it(opened, plan):
    make = partial(ParallelEnv, ROWS, Chaos, num_processes=2, **RESTARTING)
    env, calm = opened(make()), opened(make())

    data = played(env, plan, pipeline=2)

    assert data["next", "truncated"].sum() >= len(plan)
    assert_same(data, played(calm, plan))
    assert_same(played(env, {}, pipeline=2), played(calm, {}))


def test_rows_that_are_lost_with_the_reset_of_another_are_told_by_the_next_step(opened, tmp_path):
    def lost_in_a_reset(orders: Path, **options) -> TensorDictBase:
        orders.mkdir()
        make = partial(ParallelEnv, ROWS, Chaos, create_env_kwargs=[{"orders": orders}] * ROWS)
        env = opened(make(num_processes=2, **RESTARTING))
        order = partial(order_fault, orders, "reset", "kill")
        return played(env, planned(s3r2="raise"), 6, order, **options)

    data = lost_in_a_reset(tmp_path / "parts", pipeline=2)

    assert data["next", "truncated"].squeeze(-1).nonzero().tolist() == [[2, 3], [3, 4]]
    assert_same(data, lost_in_a_reset(tmp_path / "whole"))


@pytest.mark.parametrize("pipeline", [1, 2])
def test_it_is_known_where_every_row_is(opened, pipeline):
    make = partial(ParallelEnv, ROWS, partial(Chaos, 50), num_processes=2)
    env, failing = opened(make()), opened(make())

    played(env, {}, 3, pipeline=pipeline)
    with pytest.raises(WorkerError):
        played(failing, planned(s2r1="raise"), 3, pipeline=pipeline)

    assert env._exchange.newest()["count"].flatten().tolist() == [3, 3, 3, 3]
    assert failing._exchange.newest()["count"].flatten().tolist()[2:] == [3, 3]


def test_a_worker_that_hangs_is_made_good_while_others_go_on(opened):
    make = partial(ParallelEnv, ROWS, Chaos, num_processes=2, **RESTARTING)
    env, calm = opened(make()), opened(make())
    env.start(), calm.start()
    env.timeout = calm.timeout = 2.0
    plan = planned(s2r3="hang")

    assert_same(played(env, plan, 4, pipeline=2), played(calm, plan, 4))


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_without_restarts_the_error_names_all_rows_that_failed(opened, fault):
    env = opened(ParallelEnv(ROWS, Chaos, num_processes=2))
    told = {"raise": "rows? 3", "kill": "rows 2, 3|worker 1"}[fault]

    with pytest.raises(WorkerError, match=told):
        played(env, planned(s5r3=fault), pipeline=2)

    if fault == "kill":
        env.close()
    assert_same(played(env, {}, pipeline=2), played(env, {}))


def test_failures_of_two_parts_are_told_together(opened):
    env = opened(ParallelEnv(ROWS, Chaos, num_processes=2))

    with pytest.raises(WorkerError) as caught:
        played(env, planned(s5r1="raise", s5r3="raise"), pipeline=2)

    rows = {row for failure in caught.value.failures for row in failure.rows}
    assert rows == {1}
    (note,) = caught.value.__notes__
    assert "other rows failed" in note and "row 3" in note


class StopsError(Exception):
    pass


@pytest.mark.parametrize("error", [StopsError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [0, 1, 8, 9, 130, 131])
def test_a_policy_that_raises_leaves_every_row_where_it_is(opened, call, error):
    env = opened(ParallelEnv(ROWS, partial(Count, 1000), num_processes=2))
    calls = 0

    def act(count: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > call:
            raise error
        return torch.zeros(len(count), 1, dtype=torch.int64)

    with pytest.raises(error):
        env.rollout(200, act, pipeline=2, **together)

    mask = torch.tensor([[True], [False], [False], [False]])
    stepped = [-(-call // 2), call // 2]
    td = env.reset(env.fake_tensordict().exclude("next").set("_reset", mask))
    assert env._exchange.newest()["count"].flatten().tolist() == [
        *[0, stepped[0]],
        *[stepped[1]] * 2,
    ]
    assert list(env.c) == [0, stepped[0], *[stepped[1]] * 2]
    assert td["count"][0].item() == 0
    data = env.rollout(3, lambda count: torch.zeros_like(count), pipeline=2, **together)
    assert data["next", "count"].squeeze(-1).tolist() == [[1, 2, 3]] * ROWS


@pytest.mark.parametrize("pipeline", [1, 2])
def test_an_action_that_is_none_moves_nothing_of_its_part(opened, pipeline):
    env = opened(ParallelEnv(ROWS, partial(Count, 1000), num_processes=2))

    def act(count: torch.Tensor) -> torch.Tensor:
        return torch.where(count == 5, 9, 0)

    with pytest.raises(InputError, match="row 0"):
        env.rollout(20, act, pipeline=pipeline, **together)

    newest = env._exchange.newest()["count"].flatten().tolist()
    assert newest == list(env.c) and set(newest) == {5}


def test_messages_call_rows_what_they_are_called_in_the_pool(opened):
    env = opened(ParallelEnv(ROWS, partial(Count, 1000), num_processes=2))
    root = env.reset().set("row", torch.arange(ROWS))

    def act(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", torch.where(td["row"] == 3, 9, 0).unsqueeze(-1))

    with pytest.raises(InputError, match="row 3"):
        env.rollout(3, act, auto_reset=False, tensordict=root, pipeline=2, **together)


class Napping(Count):
    """Sleeps in each step."""

    def _step(self, td):
        time.sleep(0.3)
        return super()._step(td)


def test_ctrl_c_leaves_a_pool_that_goes_on(opened):
    env = opened(ParallelEnv(ROWS, partial(Napping, 1000), num_processes=2))
    env.reset()
    previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            env.rollout(50, lambda count: torch.zeros_like(count), pipeline=2, **together)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)

    assert env._exchange.newest()["count"].flatten().tolist() == list(env.c)
    data = env.rollout(2, lambda count: torch.zeros_like(count), pipeline=2, **together)
    assert data["next", "count"].squeeze(-1).tolist() == [[1, 2]] * ROWS


def interrupting(method: Callable, *calls: int, before: bool = False) -> Callable:
    """Have Ctrl-C come as some calls of a method, counted from 1, return, or before they do anything."""
    count = 0

    def call(*args):
        nonlocal count
        count += 1
        if before and count in calls:
            raise KeyboardInterrupt
        made = method(*args)
        if count in calls:
            raise KeyboardInterrupt
        return made

    return call


def idle(count: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(count)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("call", [1, 2, 3, 4, 6, 7, 8])
def test_ctrl_c_while_jobs_are_begun_loses_none(opened, monkeypatch, call, before):
    env = opened(ParallelEnv(ROWS, partial(Count, 1000), num_processes=4))
    env.reset()
    begin = interrupting(env._pool.begin, call, before=before)
    monkeypatch.setattr(env._pool, "begin", begin)

    with pytest.raises(KeyboardInterrupt):
        env.rollout(5, idle, pipeline=2, **together)

    assert env._exchange.newest()["count"].flatten().tolist() == list(env.c)
    data = env.rollout(2, idle, pipeline=2, **together)
    assert data["next", "count"].squeeze(-1).tolist() == [[1, 2]] * ROWS


@pytest.mark.parametrize("before", [True, False])
def test_a_second_ctrl_c_leaves_the_wait_to_the_next_use(opened, monkeypatch, before):
    env = opened(ParallelEnv(ROWS, partial(Count, 1000), num_processes=4))
    env.reset()
    collect = interrupting(env._pool.collect, 3, 4, before=before)
    monkeypatch.setattr(env._pool, "collect", collect)

    with pytest.raises(KeyboardInterrupt):
        env.rollout(5, idle, pipeline=2, **together)

    assert env._exchange.newest()["count"].flatten().tolist() == list(env.c)
    assert env.reset()["count"].eq(0).all() and list(env.c) == [0] * ROWS


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("call", [2, 3, 4, 5])
def test_ctrl_c_while_a_row_that_was_lost_begins_anew_loses_no_step(
    opened, monkeypatch, call, before
):
    make = partial(ParallelEnv, ROWS, partial(Chaos, 1000), num_processes=2, **RESTARTING)
    env, calm = opened(make()), opened(make())
    first = played(env, planned(s3r3="raise"), 4, pipeline=2)
    root = env.step_mdp(first[..., -1])
    for flag in (
        "done",
        "terminated",
        "truncated",
    ):  # so that nobody resets it before it is stepped
        root[flag].zero_()
    count = iter(range(1, 100))

    def interrupting_all(method: Callable) -> Callable:
        def asked(*args):
            number = next(count)
            if number == call and before:
                raise KeyboardInterrupt
            made = method(*args)
            if number == call:
                raise KeyboardInterrupt
            return made

        return asked

    with monkeypatch.context() as patched:
        for name in ("send", "recv", "begin", "collect"):
            patched.setattr(env._pool, name, interrupting_all(getattr(env._pool, name)))
        with pytest.raises(KeyboardInterrupt):
            env.rollout(6, following({}), auto_reset=False, tensordict=root, pipeline=2, **together)

    newest = env._exchange.newest()
    counts = newest["count"].flatten().tolist()[:3]
    assert counts == list(env.c)[:3]
    after = env.step(newest.set("action", torch.zeros(ROWS, 1, dtype=torch.int64)))
    assert after["next", "count"].flatten().tolist()[:3] == [count + 1 for count in counts]
    assert_same(played(env, {}, pipeline=2), played(calm, {}))


def test_a_policy_that_looks_at_rows_that_step_is_told_to_leave_them(opened):
    env = opened(ParallelEnv(ROWS, partial(Napping, 1000), num_processes=2))

    def act(count: torch.Tensor) -> torch.Tensor:
        assert count.sum() == next(iter(env.c))
        return torch.zeros_like(count)

    with pytest.raises(BusyEnvError, match="in the policy"):
        env.rollout(3, act, pipeline=2, **together)


@pytest.mark.parametrize("ask", [EnvBase.reset, EnvBase.rand_step, EnvBase.state_dict])
def test_a_policy_that_asks_the_env_for_something_else_is_told(opened, ask):
    env = opened(ParallelEnv(ROWS, partial(Count, 1000), num_processes=2))

    def act(count: torch.Tensor) -> torch.Tensor:
        if int(count[0]) == 3:
            time.sleep(0.1)  # the other part is done
            ask(env)
        return torch.zeros_like(count)

    with pytest.raises(BusyEnvError, match="under way"):
        env.rollout(20, act, pipeline=2, **together)
    assert env._exchange.newest()["count"].flatten().tolist() == list(env.c)
    assert env.reset()["count"].eq(0).all()


# ----------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "stops it"),
        ({"break_when_all_done": True}, "stops it"),
        ({**together, "callback": print}, "a callback"),
        ({**together, "return_contiguous": False}, "return_contiguous=False"),
        ({**together, "actions": torch.zeros(3, 7), "policy": None}, "actions"),
        ({**together, "pipeline": 4}, "num_processes=4"),
    ],
)
def test_what_parts_cannot_do_is_refused(pools, options, told):
    with pytest.raises(OptionError, match=told):
        pools(7, 3).rollout(3, **{"policy": lean, "pipeline": 2, **options})


@pytest.mark.parametrize("pipeline", [0, -1, "2", 1.5, None])
def test_a_number_of_parts_is_a_positive_integer(pools, pipeline):
    with pytest.raises((ArgumentError, TypeError), match="pipeline"):
        pools(7, 3).rollout(3, lean, pipeline=pipeline, **together)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: SerialEnv(4, cart_pole), id="serial"),
        pytest.param(lambda: AsyncEnvPool([cart_pole] * 2), id="async"),
        pytest.param(cart_pole, id="single"),
        pytest.param(
            lambda: TransformedEnv(ParallelEnv(4, cart_pole), StepCounter()), id="transformed"
        ),
    ],
)
def test_envs_that_do_not_split_their_rows_say_so(opened, make):
    with pytest.raises(OptionError, match="ParallelEnv"):
        opened(make()).rollout(3, lean, pipeline=2, **together)


def test_data_that_does_not_lie_in_rows_is_refused(opened):
    env = opened(ParallelEnv(4, cart_pole, num_processes=2, use_buffers=False))

    with pytest.raises(OptionError, match="shared rows"):
        env.rollout(3, lean, pipeline=2, **together)


def test_a_policy_that_is_obeyed_step_by_step_is_refused(pools):
    def act(td: TensorDictBase) -> TensorDictBase:
        mask = torch.ones(td.shape, dtype=torch.bool)
        return td.update({"action": lean(td["observation"]), "_step": mask})

    with pytest.raises(RolloutError, match="step by step"):
        pools(7, 3).rollout(3, act, pipeline=2, **together)


def test_parts_that_are_given_unlike_entries_are_refused(pools):
    def act(td: TensorDictBase) -> TensorDictBase:
        more = {"few": torch.zeros(td.shape)} if len(td) < 4 else {}
        return td.update({"action": lean(td["observation"]), **more})

    with pytest.raises(RolloutError, match="put together"):
        pools(7, 3).rollout(3, act, pipeline=2, **together)


def test_sub_envs_with_a_batch_of_their_own_are_split_by_workers(opened):
    env = opened(ParallelEnv(3, Pair, num_processes=2))
    sizes = []

    def act(tensordict: TensorDictBase) -> TensorDictBase:
        sizes.append(tuple(tensordict.batch_size))
        return tensordict.set("action", tensordict["count"] * 0.5)

    data = env.rollout(70, act, pipeline=2, **together)

    assert set(sizes) == {(2, 2), (1, 2)} and data.batch_size == (3, 2, 70)
    assert_same(data, env.rollout(70, act, **together))
