"""Pools whose envs step at their own pace, in threads and in processes."""

from __future__ import annotations

import os
import pickle
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase

from envkit import (
    ActionDiscretizer,
    AsyncEnvPool,
    GymEnv,
    ParallelEnv,
    ProcessorAsyncEnvPool,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    ThreadingAsyncEnvPool,
    TransformedEnv,
    check_env_specs,
)
from envkit.batched.job_queues import ENV_INDEX, EnvIndex
from envkit.env.base import EnvBase
from envkit.errors import (
    ArgumentCountError,
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    BusyEnvError,
    BypassError,
    ClosedEnvError,
    InputError,
    MissingKeyError,
    NotResetError,
    OptionError,
    WorkerError,
    WorkerTimeoutError,
)
from envkit.specs import Categorical, Composite, Unbounded
from tests.batched.test_faults import interrupt_at_random
from tests.bridges.compare import assert_same
from tests.zoo.drift import make_gym
from tests.zoo.envs import Chaos, Count

PATIENCE_S, SOON_S = 30.0, 0.2
BACKENDS = ["threading", "multiprocessing"]

pytestmark = pytest.mark.usefixtures("warm_fork_server")


class Gated(Count):
    """Counts; a step begins when the gate, a file, is there."""

    def __init__(self, gate: Path | None = None, n: int = 100):
        super().__init__(n)
        self.gate = gate

    def _step(self, td):
        while self.gate is not None and not self.gate.exists():
            time.sleep(0.001)
        return super()._step(td)


def gated_with_truncated(gate):
    return Gated(gate).add_truncated_keys()


@pytest.fixture(params=BACKENDS)
def new_pool(request, opened):
    def make(makers, **options):
        return opened(AsyncEnvPool(makers, backend=request.param, **options))

    return make


def cartpole():
    return GymEnv("CartPole-v1")


def pendulum():
    return GymEnv("Pendulum-v1")


def binned():
    return TransformedEnv(pendulum(), ActionDiscretizer(5))


def acting(td, value=0):
    """Write an action for every row."""
    return td.set("action", torch.full((*td.batch_size, 1), value))


# ------------------------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("threading", ThreadingAsyncEnvPool),
        ("thread", ThreadingAsyncEnvPool),
        ("multiprocessing", ProcessorAsyncEnvPool),
        ("process", ProcessorAsyncEnvPool),
    ],
)
def test_the_backend_decides_the_class(backend, kind):
    pool = AsyncEnvPool([Count, Count], backend=backend)

    assert type(pool) is kind and isinstance(pool, AsyncEnvPool)
    assert (pool.num_envs, pool.min_get, pool.stack) == (2, 1, "dense")
    assert type(kind([Count])) is kind
    assert type(AsyncEnvPool(Count)) is ThreadingAsyncEnvPool


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "asyncio"}, NotImplementedError, "backend is 'asyncio'.*'threading'"),
        ({"stack": "loose"}, NotImplementedError, "stack is 'loose'.*'maybe_dense'"),
        ({"min_get": 0}, ArgumentError, "min_get is 0"),
        ({"min_get": "all"}, ArgumentTypeError, "min_get is 'all'"),
        ({"timeout": -1}, ArgumentError, "timeout is -1"),
        ({"num_processes": 2}, OptionError, "num_processes"),
        ({"create_env_kwargs": [{}]}, ArgumentCountError, "create_env_kwargs"),
    ],
)
def test_what_cannot_be_is_refused_at_once(options, error, message):
    with pytest.raises(error, match=message):
        AsyncEnvPool([Count, Count], **options)


def test_envs_have_keywords_of_their_own(new_pool):
    pool = new_pool([Count, Count], create_env_kwargs=[{"n": 2}, {"n": 4}])

    data = pool.rollout(6, break_when_any_done=False)

    assert data["next", "done"].squeeze(-1).sum(-1).tolist() == [3, 1]


# ----------------------------------------------------------------------------------- all at once


def test_a_pool_takes_whole_floats_as_integers_and_no_others(new_pool):
    pool = new_pool([Count] * 2)
    root = pool.reset()

    stepped = pool.step(acting(root.clone(), 1.0))["next", "count"]

    assert (
        stepped.flatten().tolist()
        == pool.step(acting(pool.reset(), 1))["next", "count"].flatten().tolist()
    )
    with pytest.raises(InputError, match=r"is \[0.7\], but the env takes torch.int64"):
        pool.step(acting(pool.reset(), 0.7))


@pytest.mark.parametrize("make", [cartpole, Chaos], ids=["gym", "custom"])
def test_all_at_once_it_gives_the_data_of_a_serial_env(new_pool, opened, make):
    pool, serial = new_pool([make] * 3), opened(SerialEnv(3, make))

    assert pool.set_seed(5) == serial.set_seed(5)
    act = None if make is cartpole else acting
    data, wanted = (env.rollout(12, act, break_when_any_done=False) for env in (pool, serial))

    assert (data.exclude("env_index") == wanted).all()
    assert data["env_index"] == [[env] * 12 for env in range(3)]


def test_it_does_what_its_specs_say(new_pool):
    pool = new_pool([cartpole] * 2)

    check_env_specs(pool)

    assert pool.batch_size == (2,)
    assert pool.env_batch_sizes == [torch.Size([])] * 2
    assert "env_index" in pool.full_state_spec.keys()


def test_unlike_envs_are_joined_lazily(new_pool):
    pool = new_pool([cartpole, pendulum], stack="lazy")

    data = pool.rollout(3)

    assert isinstance(data, LazyStackedTensorDict)
    assert [part["observation"].shape for part in data.unbind(0)] == [(3, 4), (3, 3)]


@pytest.mark.parametrize(
    ("makers", "is_lazy"), [([cartpole, cartpole], False), ([cartpole, pendulum], True)]
)
def test_maybe_dense_is_dense_where_envs_agree(new_pool, makers, is_lazy):
    pool = new_pool(makers, stack="maybe_dense")

    assert isinstance(pool.reset(), LazyStackedTensorDict) is is_lazy


def test_dense_results_of_unlike_envs_are_refused(new_pool):
    pool = new_pool([cartpole, pendulum])

    with pytest.raises(ArgumentError, match="differ"):
        pool.reset()


def test_rows_keep_the_number_of_their_env_behind_transforms(new_pool):
    env = TransformedEnv(new_pool([Count, Count]), StepCounter())

    check_env_specs(env)
    root = env.reset()
    stepped, following = env.step_and_maybe_reset(env.rand_action(root))

    for data in (root, stepped, following, env.rollout(2)[:, 0]):
        assert EnvIndex(2).read(data) == [0, 1]
    with pytest.raises(ArgumentError, match="Put them in order"):
        env.step(env.rand_action(env.reset())[[1, 0]])


def test_a_transform_around_a_pool_sees_its_calls_for_all(new_pool):
    env = TransformedEnv(new_pool([Count, Count]), StepCounter(3))

    data = env.rollout(7, acting, break_when_any_done=False)

    assert data["step_count"][0].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_rows_do_not_pass_by_a_transform_around_a_pool(new_pool):
    pool = new_pool([Count, Count])
    env = TransformedEnv(TransformedEnv(pool, StepCounter(3)), StepCounter(4, step_count_key="n"))
    root = acting(env.reset())

    assert not hasattr(env, "async_step_send") and hasattr(pool, "async_step_send")
    with pytest.raises(
        BypassError, match=r"'async_step_send'.*Put them inside the envs of the pool"
    ):
        env.async_step_send(root)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_a_reset_mask_may_have_the_shape_of_the_batch(new_pool, shape):
    pool = new_pool([Count, Count])
    pool.async_step_send(acting(pool.reset()))
    td = pool.step_mdp(pool.async_step_recv(min_get=2))

    pool.async_reset_send(td.set("_reset", torch.tensor([True, False]).reshape(shape)))

    assert pool.async_reset_recv(min_get=2)["count"].flatten().tolist() == [0, 1]


STEPS = ["step"], ["step_and_maybe_reset"], ["step", "step_and_maybe_reset"]


@pytest.mark.parametrize("kinds", STEPS, ids=["step", "step and reset", "both in turn"])
@pytest.mark.parametrize("seed", range(4))
def test_gymnasium_envs_that_are_left_out_do_not_move(new_pool, kinds, seed):
    pool, singles = new_pool([partial(make_gym, 3)] * 2), [make_gym(3), make_gym(3)]
    pool.set_seed(seed)
    singles[1].set_seed(singles[0].set_seed(seed))
    roots, alone = pool.reset(), [single.reset() for single in singles]
    generator = torch.Generator().manual_seed(seed)

    for kind in kinds * (12 // len(kinds)):
        inputs = {
            "action": torch.rand(2, 1, generator=generator),
            "_step": torch.rand(2, generator=generator) < 0.6,
        }
        getattr(pool, f"async_{kind}_send")(roots.update(inputs))
        received = getattr(pool, f"async_{kind}_recv")(min_get=2)
        for row, single in enumerate(singles):
            of_row = alone[row].update({key: value[row] for key, value in inputs.items()})
            outcome = getattr(single, kind)(of_row)
            parts = (received, outcome) if kind == "step" else (received[0], outcome[0])
            assert_same(parts[0][row], parts[1], without=(ENV_INDEX,))
            alone[row] = (
                single.maybe_reset(single.step_mdp(outcome)) if kind == "step" else outcome[1]
            )
        roots = pool.maybe_reset(pool.step_mdp(received)) if kind == "step" else received[1]
        for row, root in enumerate(alone):
            assert_same(roots[row], root, without=(ENV_INDEX,))


@pytest.mark.parametrize("source", ["a root", "a step"])
def test_a_gymnasium_env_that_has_ended_and_is_left_out_begins_anew(new_pool, source):
    pool = new_pool([partial(make_gym, 2)])
    root = pool.set_seed(0) and pool.reset()
    if source == "a step":
        for _ in range(2):
            pool.async_step_send(root.set("action", torch.zeros(1, 1)))
            root = pool.step_mdp(pool.async_step_recv())
    ended = root.update({"done": torch.tensor([[True]]), "action": torch.zeros(1, 1)})

    pool.async_step_and_maybe_reset_send(ended.set("_step", torch.tensor([False])))
    data, following = pool.async_step_and_maybe_reset_recv()

    assert data["next", "observation"].equal(ended["observation"]) and data["next", "done"].all()
    assert not following["observation"].equal(ended["observation"])
    assert not following["done"].any()
    assert following["observation"].flatten().tolist() == [place.item() for place in pool.place]


def test_only_selected_envs_are_stepped(new_pool):
    pool = new_pool([Count, Count])
    td = acting(pool.reset()).set("_step", torch.tensor([True, False]))

    assert pool.step(td)["next", "count"].flatten().tolist() == [1, 0]


class Chooses(Count):
    """Has ``n`` choices."""

    def __init__(self, n: int):
        super().__init__()
        self.action_spec = Categorical(n, shape=(1,))


def test_each_env_takes_the_choices_of_its_own(new_pool):
    pool = new_pool([partial(Chooses, 5), partial(Chooses, 2)], use_buffers=True)
    td = pool.reset()

    with pytest.raises(InputError, match=r"'action' of row 1 is \[4\]"):
        pool.async_step_send(td.clone().set("action", torch.tensor([[1], [4]])))
    pool.async_step_send(td.set("action", torch.tensor([[4], [1]])))

    assert pool.async_step_recv(min_get=2)["next", "count"].flatten().tolist() == [1, 1]


class Placed(EnvBase):
    """Begins where it is told to, at 0 otherwise; counts on from there, and fails at action 9."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(place=Unbounded((1,)))
        self.state_spec = Composite(place=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.add_truncated_keys()

    def _reset(self, td, **kwargs):
        place = None if td is None else td.get("place", None)
        return TensorDict({"place": torch.zeros(1) if place is None else place}, [])

    def _step(self, td):
        if td["action"] == 9:
            raise ArithmeticError("cannot go on")
        return TensorDict({"place": td["place"] + 1, "reward": td["place"]}, [])

    def _set_seed(self, seed):
        pass


def test_envs_begin_where_a_reset_tells_them_to(new_pool):
    pool = new_pool([Placed, Placed], use_buffers=True)
    root = pool.reset().set("place", torch.tensor([[3.0], [5.0]]))

    pool.async_reset_send(root)
    started = pool.async_reset_recv(min_get=2)
    pool.async_reset_send(root.exclude("place"))
    left = pool.async_reset_recv(min_get=2)

    assert started["place"].tolist() == [[3], [5]] and left["place"].tolist() == [[0], [0]]


@pytest.mark.parametrize("batched", [SerialEnv, partial(ParallelEnv, num_processes=2)])
def test_an_env_that_was_lost_begins_anew_wherever_a_reset_tells_it_to(opened, batched):
    env = opened(batched(2, Placed, on_worker_failure="restart", use_buffers=True))
    root = env.reset()

    lost = env.step(root.set("action", torch.tensor([[0.0], [9.0]])))
    told = env.reset(TensorDict({"place": torch.tensor([[3.0], [5.0]])}, [2]))

    assert lost["next", "truncated"].flatten().tolist() == [False, True]
    assert told["place"].flatten().tolist() == [3, 0]


@pytest.mark.parametrize("kind", ["step", "step_and_maybe_reset"])
@pytest.mark.parametrize(
    ("make", "options"),
    [(cartpole, {}), (cartpole, {"stack": "lazy"}), (binned, {}), (binned, {"stack": "lazy"})],
)
def test_the_action_of_an_env_that_is_left_out_may_be_anything(new_pool, kind, make, options):
    pool = new_pool([make] * 2, **options)
    root = pool.rand_action(pool.set_seed(0) and pool.reset())
    bad = torch.full_like(root["action"][1], 99)
    root[1].set("action", bad) if options else root["action"][1].copy_(bad)

    with pytest.raises(InputError, match=r"'action' of row 1 is"):
        getattr(pool, f"async_{kind}_send")(root.copy().set("_step", torch.tensor([False, True])))
    getattr(pool, f"async_{kind}_send")(root.copy().set("_step", torch.tensor([True, False])))
    received = getattr(pool, f"async_{kind}_recv")(min_get=2)

    data = received if kind == "step" else received[0]
    moved = data["next", "observation"] != data["observation"]
    assert moved.any(-1).tolist() == [True, False]
    assert data["action"][1].equal(bad)


# ------------------------------------------------------------------------------------ one by one


def test_a_fast_env_does_not_wait_for_a_slow_one(new_pool, tmp_path):
    gate = tmp_path / "gate"
    pool = new_pool([partial(Gated, gate), Gated])

    pool.async_step_send(acting(pool.reset()))
    first = pool.async_step_recv(min_get=1)
    gate.touch()
    second = pool.async_step_recv(min_get=1)

    assert (first.batch_size, first["env_index"]) == ((1,), [1])
    assert (second.batch_size, second["env_index"]) == ((1,), [0])
    assert first["next", "count"].item() == second["next", "count"].item() == 1


def test_a_fast_env_goes_on_while_a_slow_one_works(new_pool, tmp_path):
    gate = tmp_path / "gate"
    pool = new_pool([partial(Gated, gate), Gated])
    pool.async_step_send(acting(pool.reset()))

    for number in range(1, 6):
        data = pool.async_step_recv()
        assert (data["env_index"], data["next", "count"].item()) == ([1], number)
        pool.async_step_send(acting(pool.step_mdp(data)))
    gate.touch()
    data = pool.async_step_recv(min_get=2)

    assert data["env_index"] == [0, 1]
    assert data["next", "count"].flatten().tolist() == [1, 6]


def test_one_env_is_driven_by_hand_among_unlike_ones(new_pool):
    pool = new_pool([pendulum, cartpole], stack="lazy")
    td = pool.rand_step(pool.reset())
    one = pool.step_mdp(td)[0]
    one["action"] = torch.zeros(1)
    one["env_index"] = 0

    pool.async_step_send(one)
    out = pool.async_step_recv()

    assert out.batch_size == (1,)
    assert out[0]["next", "observation"].shape == (3,)
    assert out["env_index"] == [0]


@pytest.mark.parametrize("makers", [[cartpole] * 3, [cartpole, pendulum, pendulum]])
def test_random_actions_are_drawn_for_the_rows_that_came(new_pool, makers):
    pool = new_pool(makers, stack="maybe_dense")
    td = pool.rand_action(pool.reset())

    some = pool.rand_action(td[1:])
    one = pool.rand_action(td[2])

    for env, row in zip((1, 2), some.unbind(0), strict=True):
        assert pool.full_action_spec[env].is_in(row.select("action"))
    assert pool.full_action_spec[2].is_in(one.select("action"))


def test_jobs_give_what_calls_for_all_give(new_pool, opened):
    pool, serial = new_pool([cartpole] * 3), opened(SerialEnv(3, cartpole))
    assert pool.set_seed(1) == serial.set_seed(1)
    pool.async_reset_send(env_index=[0, 1, 2])
    td, wanted = pool.async_reset_recv(min_get=3), serial.reset()
    assert (td.exclude("env_index") == wanted).all()

    for step in range(60):
        act = torch.nn.functional.one_hot(torch.tensor([step % 2, 1, step % 3 % 2]), 2)
        pool.async_step_and_maybe_reset_send(td.set("action", act))
        data, td = pool.async_step_and_maybe_reset_recv(min_get=3)
        expected, wanted = serial.step_and_maybe_reset(wanted.set("action", act))
        assert (data.exclude("env_index") == expected).all()
        assert (td.exclude("env_index") == wanted).all()


def test_what_was_received_stays_as_it_was(new_pool):
    pool = new_pool([Count, Count])
    pool.async_step_and_maybe_reset_send(acting(pool.reset()))
    data, root = pool.async_step_and_maybe_reset_recv(min_get=2)

    pool.async_step_and_maybe_reset_send(acting(root.clone()))
    pool.async_step_and_maybe_reset_recv(min_get=2)

    assert data["next", "count"].flatten().tolist() == [1, 1]
    assert root["count"].flatten().tolist() == [1, 1]


@pytest.mark.parametrize("use_buffers", [True, False])
def test_what_was_sent_may_be_written_to_again(new_pool, tmp_path, use_buffers):
    gate = tmp_path / "gate"
    pool = new_pool([partial(Gated, gate), Gated], use_buffers=use_buffers)
    td = acting(pool.reset(), 0)

    pool.async_step_send(td)
    td["action"].fill_(1)
    td["count"].fill_(77)
    gate.touch()
    data = pool.async_step_recv(min_get=2)

    assert data["action"].flatten().tolist() == [0, 0]
    assert data["count"].flatten().tolist() == [0, 0]


def test_rows_in_another_order_are_sent_and_not_stepped_at_once(new_pool):
    pool = new_pool([cartpole, pendulum], stack="lazy")
    td = pool.reset()
    turned = LazyStackedTensorDict(td[1], td[0], stack_dim=0)

    turned = pool.rand_action(turned)
    with pytest.raises(ArgumentError, match=r"rows belong to envs \[1, 0\]"):
        pool.step(turned.clone())
    pool.async_step_send(turned)

    data = pool.async_step_recv(min_get=2)
    assert data["env_index"] == [0, 1]
    assert data[0]["next", "observation"].shape == (4,)


def test_rounds_and_jobs_may_alternate(new_pool):
    pool = new_pool([Count, Count])
    td = pool.step_mdp(pool.step(acting(pool.reset())))

    pool.async_step_send(acting(td[1:]))
    pool.async_step_recv()
    pool.async_reset_send(env_index=[0])
    pool.async_reset_recv()
    both = pool.step(acting(pool.reset(td.set("_reset", torch.tensor([[False], [False]])))))

    assert both["next", "count"].flatten().tolist() == [1, 3]


def test_a_slot_is_given_to_who_asks_for_it(new_pool):
    pool = new_pool([Count, Count])
    td = acting(pool.reset())

    pool.async_step_send(td[0], env_index=0)
    pool.async_step_send(td[1:])

    assert pool.async_step_recv()["env_index"] == [1]
    with pytest.raises(BusyEnvError, match="0 such jobs"):
        pool.async_step_recv()
    out = pool.async_step_recv(env_index=0)
    assert out.batch_size == () and out["env_index"] == 0
    with pytest.raises(BusyEnvError, match=r"no 'step' was sent with env_index=0"):
        pool.async_step_recv(env_index=0)


def test_kinds_of_jobs_have_queues_of_their_own(new_pool):
    pool = new_pool([Count, Count])
    td = acting(pool.reset())

    pool.async_step_send(td[:1])
    pool.async_reset_send(env_index=[1])

    with pytest.raises(BusyEnvError, match="step_and_maybe_reset"):
        pool.async_step_and_maybe_reset_recv()
    assert pool.async_reset_recv()["env_index"] == [1]
    assert pool.async_step_recv()["env_index"] == [0]


def test_at_most_so_many_are_given_and_the_others_stay(new_pool):
    pool = new_pool([Count] * 4)
    pool.async_step_send(acting(pool.reset()))

    first = pool.async_step_recv(min_get=3, max_get=3)
    last = pool.async_step_recv()

    assert sorted(first["env_index"] + last["env_index"]) == [0, 1, 2, 3]
    assert first.batch_size == (3,)
    with pytest.raises(ArgumentError, match="max_get is 1, but must be at least min_get, 2"):
        pool.async_step_recv(min_get=2, max_get=1)


def test_waiting_ends_in_time_and_loses_nothing(new_pool, tmp_path):
    gate = tmp_path / "gate"
    pool = new_pool([partial(Gated, gate), Gated])
    pool.async_step_send(acting(pool.reset()))

    with pytest.raises(TimeoutError, match="of 2 results"):
        pool.async_step_recv(min_get=2, timeout=SOON_S)
    gate.touch()

    assert pool.async_step_recv(min_get=2)["env_index"] == [0, 1]


def test_who_is_busy_is_told_by_name(new_pool, tmp_path):
    pool = new_pool([partial(Gated, tmp_path / "gate"), Gated])
    td = acting(pool.reset())
    pool.async_step_send(td[:1])

    with pytest.raises(BusyEnvError, match=r"envs \[0\] of \[0, 1\] are busy"):
        pool.async_step_send(td)
    for call in (
        pool.reset,
        lambda: pool.step(td),
        lambda: pool.rollout(2),
        lambda: pool.set_seed(0),
    ):
        with pytest.raises(BusyEnvError, match="still processing"):
            call()
    pool.async_step_send(td[1:])
    assert pool.async_step_recv()["env_index"] == [1]
    (tmp_path / "gate").touch()


@pytest.mark.parametrize(
    ("send", "error", "message"),
    [
        (
            lambda pool, td: pool.async_step_send(td.exclude("env_index")),
            MissingKeyError,
            "env_index",
        ),
        (lambda pool, td: pool.async_step_send(td, env_index=[0, 2]), ArgumentError, "0 to 1"),
        (lambda pool, td: pool.async_step_send(td, env_index=[0, 0]), ArgumentError, "different"),
        (lambda pool, td: pool.async_step_send(td, env_index=["a", 1]), ArgumentError, "int"),
        (
            lambda pool, td: pool.async_step_send(td, env_index=1),
            BatchSizeError,
            "one row for each",
        ),
        (
            lambda pool, td: pool.async_step_send(td.set("action", td["action"] + 7)),
            InputError,
            "action",
        ),
        (lambda pool, td: pool.async_step_send(td.exclude("action")), KeyError, "action"),
        (lambda pool, td: pool.async_step_send({}), ArgumentTypeError, "sent"),
        (lambda pool, td: pool.async_reset_send(), MissingKeyError, "env_index"),
    ],
)
def test_what_makes_no_sense_is_refused_and_moves_nothing(new_pool, send, error, message):
    pool = new_pool([Count, Count])
    td = acting(pool.reset())

    with pytest.raises(error, match=message):
        send(pool, td.copy())

    assert pool.step(td)["next", "count"].flatten().tolist() == [1, 1]


def test_an_env_is_stepped_after_its_first_reset(new_pool):
    pool = new_pool([Count, Count])
    td = acting(TensorDict(batch_size=[1]))

    with pytest.raises(NotResetError, match=r"envs \[1\]"):
        pool.async_step_send(td, env_index=[1])


# ---------------------------------------------------------------------------------------- faults


def faulty(*faults):
    return torch.tensor([[Chaos.FAULTS.index(fault)] for fault in faults])


def test_an_env_that_raises_tells_who_receives_it_and_is_free_then(new_pool):
    pool = new_pool([Chaos] * 3)
    td = pool.reset().set("action", faulty("none", "raise", "none"))
    pool.async_step_send(td)

    with pytest.raises(WorkerError, match=r"ValueError in row 1.*cannot go on from 0") as caught:
        pool.async_step_recv(min_get=3)
    others = pool.async_step_recv(min_get=2)
    pool.async_reset_send(env_index=[1])

    assert isinstance(caught.value.__cause__, ValueError)
    assert others["env_index"] == [0, 2]
    assert pool.async_reset_recv()["env_index"] == [1]


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("make", [Chaos, partial(Chaos, 7)])
def test_with_restarts_a_lost_row_is_truncated_and_begins_anew(new_pool, make, use_buffers):
    pool = new_pool([make] * 2, on_worker_failure="restart", use_buffers=use_buffers)
    _, td = pool.step_and_maybe_reset(pool.reset().set("action", faulty("none", "none")))
    pool.async_step_and_maybe_reset_send(td.set("action", faulty("none", "raise")))

    data, root = pool.async_step_and_maybe_reset_recv(min_get=2)

    assert data["next", "truncated"].flatten().tolist() == [False, True]
    assert data["next", "reward"].flatten().tolist() == [1.0, 0.0]
    assert root["count"].flatten().tolist() == [2, 0]
    pool.async_step_send(root.set("action", faulty("none", "none")))
    assert pool.async_step_recv(min_get=2)["next", "count"].flatten().tolist() == [3, 1]


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("first", ["step", "reset"])
def test_a_row_that_was_lost_goes_on_with_whatever_is_sent_next(new_pool, use_buffers, first):
    pool = new_pool([Chaos] * 2, on_worker_failure="restart", use_buffers=use_buffers)
    td = pool.reset()
    pool.async_step_send(td.set("action", faulty("none", "raise")))
    lost = pool.async_step_recv(min_get=2)
    assert lost["next", "truncated"].flatten().tolist() == [False, True]

    root = pool.step_mdp(lost).set("action", faulty("none", "none"))
    if first == "reset":
        pool.async_reset_send(root[1:])
        assert pool.async_reset_recv()["count"].item() == 0
    pool.async_step_send(root[1:])

    assert pool.async_step_recv()["next", "count"].item() == 1
    pool.async_reset_send(root)
    assert pool.async_reset_recv(min_get=2)["count"].flatten().tolist() == [0, 0]


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("kind", ["step", "step_and_maybe_reset"])
@pytest.mark.filterwarnings("ignore:the state dict does not hold")
def test_an_episode_that_was_lost_by_loading_is_truncated_where_it_is_stepped(
    new_pool, use_buffers, kind
):
    pool = new_pool([cartpole] * 2, use_buffers=use_buffers)
    pool.set_seed(0)
    td = pool.rand_action(pool.reset())
    pool.load_state_dict(pool.state_dict())

    getattr(pool, f"async_{kind}_send")(td[:1])
    lost = getattr(pool, f"async_{kind}_recv")()
    data, root = (lost, None) if kind == "step" else lost

    assert data["next", "truncated"].item()
    assert data["next", "observation"].equal(data["observation"])
    if root is None:
        pool.async_reset_send(env_index=[0])
        root = pool.async_reset_recv()
    pool.async_step_send(pool.rand_action(root))
    assert not pool.async_step_recv()["next", "truncated"].item()


@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_a_process_that_is_lost_is_told_and_replaced(opened, fault):
    pool = opened(
        AsyncEnvPool(
            [Chaos] * 2, backend="process", on_worker_failure="restart", timeout=PATIENCE_S
        )
    )
    td = pool.reset().set("action", faulty(fault, "none"))
    pool.async_step_send(td[1:])
    pool.timeout = 1.0 if fault == "hang" else PATIENCE_S
    pool.async_step_send(td[:1])

    data = pool.async_step_recv(min_get=2)

    assert data["next", "truncated"].flatten().tolist() == [True, False]
    pool.timeout = PATIENCE_S
    pool.async_reset_send(env_index=[0])
    assert pool.async_reset_recv()["count"].item() == 0


def test_an_env_that_hangs_in_a_thread_is_given_up_in_time(opened, tmp_path):
    gate = tmp_path / "gate"
    pool = opened(AsyncEnvPool([partial(Gated, gate), Gated]))
    td = acting(pool.reset())
    pool.async_step_send(td[1:])
    assert pool.async_step_recv()["env_index"] == [1]
    pool.timeout = SOON_S
    pool.async_step_send(td[:1])

    told = r"did not answer 'step' within 0.2 s .* was given up .*stack below(.|\n)*in _step"
    with pytest.raises(WorkerTimeoutError, match=told):
        pool.async_step_recv()
    gate.touch()


@pytest.mark.parametrize("use_buffers", [None, True])
def test_a_thread_that_was_given_up_writes_into_nobodys_rows(opened, tmp_path, use_buffers):
    gate = tmp_path / "gate"
    make = partial(gated_with_truncated, gate)
    options = {"on_worker_failure": "restart", "use_buffers": use_buffers}
    pool = opened(AsyncEnvPool([make], **options))
    td = acting(pool.reset())
    pool.timeout = SOON_S
    pool.async_step_send(td)

    if use_buffers:  # its successor would share them
        with pytest.raises(WorkerTimeoutError, match="did not answer 'step'"):
            pool.async_step_recv()
    else:
        assert pool.async_step_recv()["next", "truncated"].item()
        pool.timeout = PATIENCE_S
        gate.touch()
        pool.async_reset_send(env_index=[0])
        pool.async_step_send(acting(pool.async_reset_recv()))
        assert pool.async_step_recv()["next", "count"].item() == 1
    gate.touch()


def test_what_was_taken_before_an_error_is_given_next(new_pool):
    pool = new_pool([Chaos] * 3, on_worker_failure="restart", max_restarts=1)
    td = pool.reset().set("action", faulty("raise", "raise", "none"))
    pool.async_step_send(td)

    with pytest.raises(WorkerError, match="max_restarts"):
        pool.async_step_recv(min_get=3)
    data = pool.async_step_recv(min_get=2)

    assert data["next", "truncated"].flatten().tolist() == [True, False]
    assert data["env_index"][1] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stack", ["dense", "lazy"])
def test_ctrl_c_at_any_moment_drops_no_step_and_makes_none_twice(opened, stack):
    pool = opened(AsyncEnvPool([lambda: Count(10**6)] * 3, backend="process", stack=stack))
    first = pool.reset()
    seen = [(first, first)]

    def newest(env):
        rows = ((root, i) for _, root in reversed(seen) for i in range(len(root)))
        return next(root[i] for root, i in rows if root[i]["env_index"] == env)

    def once():
        if idle := [env for env in range(3) if env not in pool._queues.busy]:
            roots = torch.stack([newest(env).exclude("env_index") for env in idle])
            roots["action"] = torch.zeros(len(idle), 1, dtype=torch.int64)
            pool.async_step_and_maybe_reset_send(roots, env_index=idle)
        seen.append(pool.async_step_and_maybe_reset_recv())

    interrupted = interrupt_at_random(once, 200)

    once()
    assert interrupted > 160
    counts: dict[int, list] = {env: [] for env in range(3)}
    for data, _ in seen[1:]:
        for row in data.unbind(0):
            counts[row["env_index"]].append((row["count"].item(), row["next", "count"].item()))
    for found in counts.values():
        assert found == [(count, count + 1) for count in range(len(found))]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"timeout": -1}, "timeout is -1, but must be a number of seconds, 0 or more"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
        ({"env_index": [0]}, r"env_index is \[0\], but must be the int of one env"),
    ],
)
def test_a_receive_that_cannot_be_is_refused(opened, how, message):
    pool = opened(AsyncEnvPool([Count] * 2, backend="thread"))
    pool.async_reset_send(env_index=[0, 1])

    with pytest.raises(ArgumentError, match=message):
        pool.async_reset_recv(**how)

    assert len(pool.async_reset_recv(min_get=2)) == 2


def test_closing_drops_what_is_under_way_and_leaves_nothing(holdings, tmp_path):
    before, threads = holdings(), set(threading.enumerate())
    for backend in BACKENDS:
        pool = AsyncEnvPool([partial(Gated, tmp_path / backend), Gated], backend=backend)
        pool.async_step_send(acting(pool.reset()))
        (tmp_path / backend).touch()
        pool.shutdown()
        pool.shutdown()
        assert pool.is_closed
        with pytest.raises(ClosedEnvError, match=r"was closed, and what was sent .* was dropped"):
            pool.async_step_recv()
        with pytest.raises(ClosedEnvError, match="was closed"):
            pool.async_reset_recv(env_index=0)
        assert pool.reset()["count"].flatten().tolist() == [0, 0]
        pool.close()

    assert holdings() == before
    assert set(threading.enumerate()) == threads


# ----------------------------------------------------------------------------- rows that move together


def exchanges(pool):
    """Send and receive in all ways, rows of one send and of several; give everything that came."""
    pool.set_seed(0)
    seen = []

    def keep(*calls):
        seen.extend(td.clone() for td in calls)
        return calls[-1]

    td = keep(pool.reset()).set("mine", torch.arange(3.0).unsqueeze(-1))
    for rows in (slice(None), slice(1, 3), slice(0, 1)):
        sent = pool.rand_action(td[rows].clone())
        pool.async_step_and_maybe_reset_send(sent)
        keep(*pool.async_step_and_maybe_reset_recv(min_get=len(sent)))
    pool.async_step_send(pool.rand_action(td[:2].clone()))
    pool.async_step_send(pool.rand_action(td[2:].clone()))
    keep(pool.async_step_recv(min_get=3))
    pool.async_reset_send(td[1:])
    keep(pool.async_reset_recv(min_get=2))
    pool.async_reset_send(env_index=[0])
    keep(pool.async_reset_recv())
    return seen


def everything(td):
    entries = {key: td[key] for key in td.keys(True, True) if key != "env_index"}
    told = {key: (value.dtype, value.tolist()) for key, value in entries.items()}
    return told, list(td["env_index"]), td.batch_size, td.device


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stack", ["dense", "lazy"])
def test_rows_in_memory_give_what_whole_tensordicts_give(opened, backend, stack):
    pools = [
        opened(AsyncEnvPool([cartpole] * 3, backend=backend, stack=stack, use_buffers=use_buffers))
        for use_buffers in (True, False)
    ]

    runs = [[everything(td) for td in exchanges(pool)] for pool in pools]

    assert runs[0] == runs[1]


def test_actions_drawn_together_are_those_drawn_one_by_one(opened, monkeypatch):
    runs = []
    for make in (cartpole, pendulum):
        for way in (AsyncEnvPool._action_of_a_row, lambda pool: None):
            monkeypatch.setattr(AsyncEnvPool, "_action_of_a_row", way)
            pool = opened(AsyncEnvPool([make] * 3, backend="threading"))
            pool.set_seed(0)
            td = pool.reset()
            runs.append([pool.rand_action(td[1:].clone())["action"] for _ in range(3)])

    assert all(map(torch.equal, runs[0], runs[1]))
    assert all(map(torch.equal, runs[2], runs[3]))


# --------------------------------------------------------------------------------- which rows are whose


@pytest.mark.parametrize(
    ("travel", "envs"),
    [
        (lambda td: td, [2, 0, 1]),
        (lambda td: td.clone(), [2, 0, 1]),
        (lambda td: td[[1, 0]], [0, 2]),
        (lambda td: pickle.loads(pickle.dumps(td)), [2, 0, 1]),
        (lambda td: torch.cat([td[2:], td[:1].clone()]), [1, 2]),
    ],
)
@pytest.mark.parametrize("size", [(), (2,)])
def test_rows_name_their_envs_wherever_they_have_been(travel, envs, size):
    index = EnvIndex(3)
    td = TensorDict({"x": torch.zeros(3, *size)}, [3, *size])
    td.set(ENV_INDEX, index.entry([2, 0, 1], torch.Size(size)))

    assert index.read(travel(td)) == envs


@pytest.mark.parametrize(
    ("written", "size", "envs"),
    [
        (NonTensorData(2, batch_size=[2]), [2], [2]),
        (NonTensorData([2, 0], batch_size=[2]), [2], [2, 0]),
        (NonTensorData(torch.tensor(1)), [], [1]),
        (torch.tensor([1, 2]), [2], [1, 2]),
    ],
)
def test_envs_may_be_written_by_hand_in_any_form(written, size, envs):
    td = TensorDict({ENV_INDEX: written}, size)

    assert EnvIndex(3).read(td) == envs


def test_an_entry_that_a_caller_has_changed_in_place_names_its_env_all_the_same():
    index, cpu = EnvIndex(3), torch.device("cpu")
    changed = TensorDict({ENV_INDEX: index.entry([2], torch.Size([]), cpu)}, [1], device=cpu)
    changed.clear_device_()

    again = TensorDict({ENV_INDEX: index.entry([2], torch.Size([]), cpu)}, [1], device=cpu)

    assert index.read(changed) == index.read(again) == [2]
    assert again.get(ENV_INDEX).device == cpu


# ------------------------------------------------------------------- how data travels, and where workers run


class Cores(Count):
    """Says on which cores its process may run."""

    def cores(self):
        return sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux places processes")
@pytest.mark.parametrize("as_function", [False, True])
def test_each_process_runs_on_the_cores_it_was_given(opened, as_function):
    every = sorted(os.sched_getaffinity(0))
    cores = [every[:1], every]
    affinity = cores.__getitem__ if as_function else cores

    env = opened(AsyncEnvPool([Cores] * 2, backend="multiprocessing", worker_affinity=affinity))
    env.reset()

    assert env.cores() == cores


def test_memory_that_envs_of_dynamic_size_cannot_use_is_refused(opened):
    class Growing(Count):
        def __init__(self):
            super().__init__()
            self.observation_spec = Composite(
                count=Unbounded((1,), dtype=torch.int64).make_neg_dim(0)
            )

    env = opened(AsyncEnvPool([Growing], backend="multiprocessing", exchange="shm"))

    with pytest.raises(ValueError, match=r"no fixed size .* exchange='auto'"):
        env.reset()


def test_the_time_from_a_result_to_the_next_action_is_told(opened):
    env = opened(AsyncEnvPool([Count] * 2, backend="multiprocessing", exchange="shm"))
    env.async_step_send(env.rand_action(env.reset()))
    env.async_step_recv(min_get=2)
    waiting = env.stats()
    env.async_step_send(env.rand_action(env.reset()))

    told = env.stats()

    assert waiting["avg_batch_to_action_ms"] == 0.0 < told["avg_batch_to_action_ms"]
    assert 0.0 < told["consumer_busy_fraction"] <= 1.0


def cartpoles(num_envs: int) -> AsyncEnvPool:
    return AsyncEnvPool([lambda: GymEnv("CartPole-v1")] * num_envs, backend="threading")


def collected(pool: AsyncEnvPool) -> TensorDictBase:
    collector = SyncDataCollector(pool, frames_per_batch=pool.batch_size.numel())
    collector.next()
    batch = collector.next()
    assert batch is not None
    collector.shutdown()
    return batch


@pytest.mark.parametrize(
    "change",
    [
        lambda pool: pool.reset().clear_device_(),
        lambda pool: pool.rollout(2).clear_device_(),
        lambda pool: pool.reset().exclude("observation").clear_device_(),
        collected,
    ],
)
@pytest.mark.parametrize("num_envs", [1, 2])
def test_data_that_a_caller_changes_in_place_changes_no_later_data(change, num_envs):
    with closing(cartpoles(num_envs)) as pool, closing(cartpoles(3)) as other:
        before = other.reset()
        change(pool)

        after = other.reset()
        assert other.rollout(2).device == torch.device("cpu")
        assert after.get("env_index").device == torch.device("cpu")
        assert after["env_index"] == before["env_index"] == [0, 1, 2]


def test_a_batch_of_a_collector_names_no_device_and_leaves_other_data_as_it_is():
    with closing(cartpoles(3)) as other, closing(cartpoles(1)) as pool:
        before = other.reset()
        batch = collected(pool)

        assert batch.device is None
        assert torch.stack([before, other.reset()]).device == torch.device("cpu")
