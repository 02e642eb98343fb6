"""The keywords of SerialEnv and ParallelEnv: what each does, and what it refuses."""

from __future__ import annotations

import inspect
import os
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from envkit import (
    ConditionalSkip,
    GymEnv,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from envkit.batched.env_host import STEP
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError, DoneError, EmptySpecError, SpecError, WorkerError
from envkit.specs import Composite, NonTensor, Unbounded
from envkit.transport.cores import usable_cores
from tests.zoo.envs import Count
from tests.zoo.policies import Replay

make_count = partial(Count, 5)
make_cartpole = partial(GymEnv, "CartPole-v1", max_episode_steps=7)
both = pytest.mark.parametrize(
    "batched", [SerialEnv, partial(ParallelEnv, num_processes=2)], ids=["serial", "parallel"]
)


def play(env: EnvBase, steps: int = 12) -> TensorDict:
    """A non-stop rollout with actions that are the same for every env."""
    choices = torch.rand(*env.batch_size, steps, generator=torch.Generator().manual_seed(1)) < 0.5
    env.set_seed(7)
    actions = torch.nn.functional.one_hot(choices.long(), 2)
    return env.rollout(steps, Replay(actions), break_when_any_done=False)


def equal(left: TensorDict, right: TensorDict) -> bool:
    return set(left.keys(True, True)) == set(right.keys(True, True)) and bool((left == right).all())


# ----------------------------------------------------------------------------------------- tasks


class Described(Count):
    """Counts how often its metadata is read, which asks for its repr."""

    described = 0

    def __repr__(self):
        self.described += 1
        return "Described"


@both
def test_metadata_is_read_once_for_each_task(opened, batched):
    one, other = partial(Described, 3), partial(Described, 4)
    env = opened(batched(4, [one, one, other, one]))
    env.start()

    assert list(env.described) == [1, 0, 1, 0]


@both
def test_keywords_that_differ_make_another_task(opened, batched):
    env = opened(batched(3, Described, create_env_kwargs=[{"n": 1}, {"n": 2}, {"n": 1}]))
    env.start()

    assert list(env.n) == [1, 2, 1]
    assert list(env.described) == [1, 1, 0]


@both
def test_equal_list_entries_give_plain_specs(opened, batched):
    env = opened(batched(2, [make_count, make_count]))

    assert type(env.observation_spec) is Composite


class Moody(Count):
    """Shows as many features as its worker has made envs of this class."""

    built = 0

    def __init__(self):
        super().__init__()
        Moody.built += 1
        self.observation_spec = Composite(count=Unbounded((Moody.built,), dtype=torch.int64))


@both
def test_an_env_that_does_not_fit_its_task_is_named(opened, batched):
    class Local(Moody):
        pass

    Moody.built = 0
    env = opened(batched(4, Local, use_buffers=True))

    with pytest.raises(
        WorkerError, match=r"'count' has shape.*list of different functions"
    ) as info:
        env.start()

    assert "row 1" in str(info.value) or "row 2" in str(info.value)


# ---------------------------------------------------------------------------- layout of results


@pytest.mark.parametrize("use_buffers", [True, False])
@both
def test_individual_tds_are_lazy_stacks_of_the_same_data(opened, batched, use_buffers):
    dense = opened(batched(3, make_cartpole, use_buffers=use_buffers))
    individual = opened(
        batched(3, make_cartpole, use_buffers=use_buffers, share_individual_td=True)
    )

    assert isinstance(individual.reset(), LazyStackedTensorDict)
    assert isinstance(individual.rand_step(), LazyStackedTensorDict)
    data = play(individual)
    check_env_specs(individual)

    assert individual.share_individual_td is True
    assert individual.use_buffers is use_buffers
    assert isinstance(data, LazyStackedTensorDict)
    assert equal(data.contiguous(), play(dense))


@both
def test_results_of_a_single_task_are_dense(opened, batched):
    env = opened(batched(2, make_count))

    assert env.share_individual_td is None
    assert not isinstance(env.reset(), LazyStackedTensorDict)
    assert env.share_individual_td is False


# ------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize(
    ("options", "uses"),
    [
        ({}, True),
        ({"use_buffers": False}, False),
        ({"memmap": True, "shared_memory": False}, True),
        ({"shared_memory": False}, False),
    ],
    ids=["default", "no buffers", "memmap", "no shared memory"],
)
def test_data_is_the_same_however_it_travels(opened, options, uses):
    serial = opened(SerialEnv(3, make_cartpole))
    env = opened(ParallelEnv(3, make_cartpole, num_processes=2, **options))

    data = play(env)

    assert env.use_buffers is uses
    assert equal(data, play(serial))


def test_serial_env_takes_the_keywords_of_memory_without_effect(opened):
    env = opened(SerialEnv(2, make_cartpole, memmap=True, shared_memory=False))

    assert env.rollout(3).shape == (2, 3)


def mapped_files() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if len(line.split()) > 5}


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="asks Linux for its mappings")
def test_memmap_rows_lie_in_an_unlinked_file(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    env = opened(ParallelEnv(2, make_count, num_processes=1, memmap=True, shared_memory=False))

    env.start()

    assert any(name.startswith(str(tmp_path)) for name in mapped_files())
    assert not list(tmp_path.iterdir())


@both
def test_memmap_and_shared_memory_exclude_each_other(batched):
    with pytest.raises(RuntimeError, match="shared_memory=False with memmap=True"):
        batched(2, make_count, memmap=True, shared_memory=True)


def test_a_workers_write_is_seen_without_a_message(opened):
    env = opened(ParallelEnv(2, make_count, num_processes=1))
    env.reset()
    counts = env._exchange.nexts[0][("count",)]
    before = counts.tolist()

    env._pool.send(STEP)
    deadline = time.monotonic() + 20
    while counts.tolist() != [[1], [1]] and time.monotonic() < deadline:
        time.sleep(0.001)
    seen = counts.tolist()
    env._pool.recv()

    assert (before, seen) == ([[0], [0]], [[1], [1]])


class Wide(Count):
    """Its observation has a size that only data can tell."""

    def __init__(self, sizes=(1, 1)):
        super().__init__()
        self.sizes = sizes
        self.observation_spec = Composite(count=Unbounded((1,), dtype=torch.int64).make_neg_dim(0))

    def _out(self):
        size = self.sizes[min(self.c, len(self.sizes) - 1)]
        return super()._out().set("count", torch.full((size,), self.c))


class Named(Count):
    """Shows a string beside its count."""

    def __init__(self, n=5):
        super().__init__(n)
        self.observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), name=NonTensor(())
        )

    def _out(self):
        return super()._out().set_non_tensor("name", f"n{self.c}")


@both
def test_dynamic_specs_travel_as_tensordicts(opened, batched):
    env = opened(batched(2, [Wide, partial(Wide, (1, 2, 3))]))

    data = env.rollout(2, return_contiguous=False)

    assert env.use_buffers is False
    assert data[1, 1]["next", "count"].tolist() == [2, 2, 2]
    assert data[0, 1]["next", "count"].tolist() == [2]


@both
def test_rows_are_used_where_specs_are_fixed(opened, batched):
    env = opened(batched(2, make_count))

    before = env.use_buffers
    env.reset()

    assert before is None
    assert env.use_buffers is True


@both
def test_asking_for_rows_where_specs_are_dynamic_warns(opened, batched):
    env = opened(batched(2, Wide, use_buffers=True))

    with pytest.warns(UserWarning, match="no fixed size"):
        env.start()

    assert env.use_buffers is False
    assert env.rollout(2).shape == (2, 2)


@both
def test_non_tensor_data_travels_beside_tensors(opened, batched):
    env = opened(batched(2, Named, create_env_kwargs=[{"n": 2}, {"n": 3}]))

    data = env.rollout(3, break_when_any_done=False)
    kept = env.reset(
        env.rand_step(env.reset())["next"].set("_reset", torch.tensor([[True], [False]]))
    )

    assert env.use_buffers is False
    assert data[0, 1]["next", "name"] == "n2"
    assert data[0, 2]["name"] == "n0"
    assert [kept[row]["name"] for row in (0, 1)] == ["n0", "n1"]


class Titled(Count):
    """Shows a title without axes, where its spec has one."""

    def __init__(self, n=5):
        super().__init__(n)
        count = Unbounded((1,), dtype=torch.int64)
        self.observation_spec = Composite(count=count, title=NonTensor((1,), example_data="none"))

    def _out(self):
        return super()._out().set("title", NonTensorData(f"t{self.c}"))


@both
@pytest.mark.parametrize("kind", [Named, Titled])
def test_rows_that_are_not_stepped_keep_what_is_no_tensor(opened, batched, kind):
    env = opened(batched(2, kind))
    name = "name" if kind is Named else "title"
    td = env.rand_action(env.reset())

    out = env.step(td.set("_step", torch.tensor([True, False])))

    assert env.device is None
    assert [row.get(name).data for row in out["next"].unbind(0)] == [f"{name[0]}1", f"{name[0]}0"]


@both
@pytest.mark.parametrize("kind", [Named, Titled])
def test_skipped_rows_keep_what_is_no_tensor(opened, batched, kind):
    turns = count()

    def in_turns(td):
        return (next(turns) + torch.tensor([0, 1])) % 2 == 0

    skipping = TransformedEnv(batched(2, kind), ConditionalSkip(in_turns))
    env = opened(TransformedEnv(skipping, StepCounter(), auto_unwrap=False))
    name = "name" if kind is Named else "title"

    data = env.rollout(4, break_when_any_done=False)

    for row in data.unbind(0):
        shown = [step["next"].get(name).data for step in row.unbind(0)]
        assert shown == [f"{name[0]}{int(step['next', 'count'])}" for step in row.unbind(0)]
    assert data["next", "count"].squeeze(-1).tolist() == [[0, 1, 1, 2], [1, 1, 2, 2]]


class Hollow(Count):
    """Declares a node without leaves."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), hollow=Composite(inside=Composite())
        )


@both
def test_an_empty_composite_is_refused_with_advice(batched):
    with pytest.raises(EmptySpecError, match=r"'hollow'.*RemoveEmptySpecs") as info:
        batched(2, Hollow).reset()

    assert isinstance(info.value, RuntimeError)


# -------------------------------------------------------------------------- devices and threads


@both
def test_sub_envs_on_different_devices_need_a_device_of_delivery(batched):
    makers = [partial(Count, device="cpu"), partial(Count, device="meta")]

    with pytest.raises(ValueError, match=r"different devices.*device="):
        batched(2, makers).reset()


@pytest.mark.parametrize("use_buffers", [True, False])
@both
def test_data_is_delivered_to_the_device_given(opened, batched, use_buffers):
    env = opened(batched(2, make_count, device="cpu", use_buffers=use_buffers))
    plain = opened(batched(2, make_count))

    assert env.device == torch.device("cpu")
    assert env.reset().device == torch.device("cpu")
    assert env.observation_spec.device == torch.device("cpu")
    assert plain.device is None
    assert plain.reset().device is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("use_buffers", [True, False])
@both
def test_cpu_envs_deliver_to_a_gpu_and_take_actions_from_it(opened, batched, use_buffers):
    env = opened(batched(3, make_cartpole, device="cuda", use_buffers=use_buffers))
    host = opened(batched(3, make_cartpole, use_buffers=use_buffers))
    env.set_seed(3)
    host.set_seed(3)
    actions = torch.nn.functional.one_hot(torch.arange(30).reshape(3, 10) % 2, 2)

    there = env.rollout(10, Replay(actions.cuda()), break_when_any_done=False)
    masked = env.step(env.rand_action(env.reset()).set("_step", torch.tensor([True, False, True])))

    assert there["observation"].is_cuda and masked["next", "observation"].is_cuda
    assert equal(there.cpu(), host.rollout(10, Replay(actions), break_when_any_done=False))


@both
def test_moving_changes_where_data_goes_and_returns_the_env(opened, batched):
    env = opened(batched(2, make_count))

    moved = env.to("cpu")
    unstarted = env.is_closed
    env.reset()

    assert moved is env
    assert unstarted
    assert env.device == torch.device("cpu")
    assert env.to(torch.float64) is env


class Reads(Count):
    """Counts on from what the root shows."""

    def _step(self, td):
        self.c = int(td["count"])
        return super()._step(td)


@pytest.mark.parametrize("use_buffers", [True, False])
@both
def test_a_running_env_can_be_moved(opened, batched, use_buffers):
    env = opened(batched(2, Reads, use_buffers=use_buffers))
    td = env.step_mdp(env.rand_step(env.reset()))

    env.to("cpu")
    out = env.rand_step(td.to("cpu"))

    assert out["next"].device == torch.device("cpu")
    assert out["next", "count"].tolist() == [[2], [2]]
    assert env.full_action_spec.device == torch.device("cpu")
    assert env.is_spec_locked


def test_serial_env_moves_its_sub_envs(opened):
    env = opened(SerialEnv(2, make_count))
    env.reset()

    env.to("cpu")

    assert [sub.device for sub in env._pool.backend.workers[0].host.envs] == [
        torch.device("cpu")
    ] * 2


def test_moving_a_seeded_parallel_env_warns_and_seeds_again(opened):
    env = opened(ParallelEnv(2, make_count, num_processes=1))
    env.set_seed(5)
    env.reset()

    with torch.device("meta"), pytest.warns(UserWarning, match="seeded again with 5"):
        env.to("cpu")

    assert next(iter(env.seed_seen)) == 5


def test_naming_the_device_that_the_data_is_on_anyway_begins_nothing_anew(opened):
    env = opened(ParallelEnv(2, make_count, num_processes=1))
    env.set_seed(5)
    root = env.reset()

    env.to("cpu")

    assert env.rand_step(root)["next", "count"].tolist() == [[1], [1]]


def test_threads_of_the_parent_are_limited_while_workers_run(opened):
    before = torch.get_num_threads()
    wanted = before + 1
    env = opened(ParallelEnv(2, make_count, num_processes=1, num_threads=wanted))

    built = torch.get_num_threads()
    env.start()
    running = torch.get_num_threads()
    env.close()

    assert (built, running, torch.get_num_threads()) == (before, wanted, before)


class Threads(Count):
    def threads(self):
        return torch.get_num_threads()

    def cores(self):
        return os.sched_getaffinity(0)


def test_threads_of_workers_are_set(opened):
    env = opened(ParallelEnv(2, Threads, num_processes=1, num_sub_threads=2))
    env.start()

    assert env.threads() == [2, 2]


def test_serial_env_leaves_threads_alone(opened):
    before = torch.get_num_threads()
    env = opened(SerialEnv(2, Threads, num_threads=before + 1, num_sub_threads=before + 2))
    env.start()

    assert env.threads() == [before, before]


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("options", "one_each"),
    [({}, True), ({"num_processes": 1}, False), ({"num_sub_threads": 2}, False)],
)
def test_as_many_workers_as_cores_keep_to_one_each(opened, options, one_each):
    every = os.sched_getaffinity(0)
    two = set(usable_cores()[:2])
    os.sched_setaffinity(0, two)
    try:
        env = opened(ParallelEnv(2, Threads, **options))
        env.start()
    finally:
        os.sched_setaffinity(0, every)
    mine = env.cores()

    assert (sorted(map(sorted, mine)) == [[core] for core in sorted(two)]) is one_each


# ---------------------------------------------------------------------------------- which env


def test_one_sub_env_may_be_served_in_this_process(opened):
    options = {"serial_for_single": True, "mp_start_method": "spawn"}
    single = opened(ParallelEnv(1, make_count, spec_locked=False, **options))
    several = opened(ParallelEnv(2, make_count, num_processes=1, serial_for_single=True))

    assert isinstance(single, SerialEnv)
    assert not single.is_spec_locked
    assert single.rollout(2).shape == (1, 2)
    assert type(several) is ParallelEnv


@both
def test_keywords_can_be_read_back(batched):
    env = batched(2, make_count, timeout=9.0, start_timeout=90.0, num_threads=None)

    assert env.non_blocking is True
    assert env.start_timeout == 90.0
    assert batched(2, make_count, non_blocking=False).non_blocking is False
    assert (env.timeout, env.num_sub_threads, env.shared_memory, env.memmap) == (
        9.0,
        1,
        True,
        False,
    )
    assert env.is_closed


def test_signatures_show_every_keyword():
    common = {"num_workers", "create_env_fn", "use_buffers", "timeout", "num_processes", "policy"}

    serial, parallel = (inspect.signature(cls).parameters for cls in (SerialEnv, ParallelEnv))

    assert common <= serial.keys()
    assert parallel == serial
    assert serial["timeout"].annotation == float | None
    assert not any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in parallel.values())


# ----------------------------------------------------------------------------- starting and makers


@both
def test_start_does_nothing_where_the_env_has_started_by_itself(opened, batched):
    env = opened(batched(2, make_count))
    env.reset()
    env.rand_step()

    env.start()

    assert list(env.c) == [1, 1]
    with pytest.raises(RuntimeError, match="started already"):
        env.start()


@both
def test_sub_envs_may_be_done_after_a_reset_if_they_say_so(opened, batched):
    class Ended(Count):
        def _reset(self, td, **kwargs):
            self.c = self.n
            return self._out()

    allowed = opened(batched(2, partial(Ended, allow_done_after_reset=True)))

    assert allowed.reset()["done"].all()
    with pytest.raises((DoneError, WorkerError), match="allow_done_after_reset"):
        opened(batched(2, Ended)).reset()


def test_an_instance_that_cannot_be_pickled_is_refused_with_advice():
    env = Count(5)
    env.lock = threading.Lock()

    with pytest.raises(ArgumentError, match=r"lambda: env_cls\(...\).*EnvCreator"):
        ParallelEnv(2, env).reset()


@both
def test_an_instance_in_a_list_is_copied_too(opened, batched):
    model = Count(5)
    env = opened(batched(2, [model, model]))

    env.step(env.rand_action(env.reset()).set("_step", torch.tensor([True, False])))

    assert list(env.c) == [1, 0]


@both
def test_keywords_for_an_instance_are_refused(batched):
    with pytest.raises(
        (ArgumentError, WorkerError), match=r"\['n'\] were given, but create_env_fn is an env"
    ):
        batched(2, Count(5), create_env_kwargs={"n": 3}).reset()


@both
def test_keywords_that_cannot_be_compared_do_no_harm(opened, batched):
    class Marked(Count):
        def __init__(self, marks):
            super().__init__()
            self.marks = marks

    env = opened(batched(2, Marked, create_env_kwargs={"marks": np.arange(3)}))
    env.start()

    assert [marks.tolist() for marks in env.marks] == [[0, 1, 2]] * 2


@both
def test_one_sub_env_takes_masks_like_any_other(opened, batched):
    env = opened(batched(1, make_count, **({} if batched is SerialEnv else {"num_processes": 1})))
    td = env.step_mdp(env.rand_step(env.reset()))

    skipped = env.step(env.rand_action(td.clone()).set("_step", torch.tensor([False])))
    kept = env.reset(td.clone().set("_reset", torch.tensor([[False]])))

    assert skipped["next", "count"].tolist() == [[1]]
    assert kept["count"].tolist() == [[1]]
    assert list(env.c) == [1]


@both
def test_batched_envs_can_be_nested(opened, batched):
    env = opened(batched(2, partial(SerialEnv, 3, make_count)))
    td = env.rand_action(env.reset())
    mask = torch.tensor([[True, False, True], [False, False, False]])

    out = env.step(td.set("_step", mask))
    following = env.rollout(7, break_when_any_done=False)

    assert env.batch_size == (2, 3)
    assert out["next", "count"].squeeze(-1).tolist() == [[1, 0, 1], [0, 0, 0]]
    assert following["next", "count"][1, 2].flatten().tolist() == [1, 2, 3, 4, 5, 1, 2]


def test_specs_that_cannot_be_batched_name_the_difference():
    with pytest.raises(ValueError, match=r"'count' is \(1,\) torch.int64 in one, \(2,\)") as info:
        SerialEnv(2, [make_count, Pair], share_individual_td=False).reset()

    assert not isinstance(info.value, SpecError)


class Pair(Count):
    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(count=Unbounded((2,), dtype=torch.int64))


# ------------------------------------------------------------------------------------------- pinning


@both
def test_pin_memory_is_false_and_nothing_else(opened, batched):
    env = opened(batched(2, make_count, pin_memory=False))

    assert env.reset().shape == (2,)
    with pytest.raises(ArgumentError, match=r"Append PinMemoryTransform\(\)"):
        batched(2, make_count, pin_memory=True)


# ------------------------------------------------------------------- how workers are placed and ended


class SlowToClose(Count):
    """Writes a file when it has closed, which takes longer than a hung worker is waited for."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path

    def close(self, *, raise_if_closed: bool = False):
        time.sleep(1.0)
        Path(self.path).write_text("closed")


@pytest.mark.parametrize(("seconds", "closes"), [(20.0, True), (0.05, False)])
def test_workers_have_as_long_to_close_as_they_are_given(opened, tmp_path, seconds, closes):
    path = tmp_path / "told"
    options = {"num_processes": 1, "shutdown_timeout": seconds}
    env = opened(ParallelEnv(1, SlowToClose, create_env_kwargs={"path": str(path)}, **options))
    env.start()

    env.close()

    assert path.exists() is closes


@pytest.mark.parametrize("wrong", [0, -1.0, None, "long"])
def test_how_long_workers_have_to_close_is_a_positive_number(wrong):
    with pytest.raises(ArgumentError, match=r"shutdown_timeout is .* positive number"):
        ParallelEnv(1, make_count, shutdown_timeout=wrong)


@both
@pytest.mark.parametrize("name", ["consolidate", "daemon", "metadata_from_workers"])
def test_keywords_without_a_meaning_here_are_checked_all_the_same(batched, name):
    with pytest.raises(ArgumentError, match=f"{name} is 'no'"):
        batched(2, make_count, **{name: "no"})


@both
def test_what_was_configured_holds_from_the_next_start_on(opened, batched):
    env = opened(batched(2, make_count, use_buffers=True))
    env.reset()
    env.close()

    env.configure_parallel(use_buffers=False)
    env.reset()

    assert env.use_buffers is False


@both
def test_a_configuration_that_is_refused_changes_nothing(opened, batched):
    env = opened(batched(2, make_count))

    with pytest.raises(ArgumentError, match="num_threads is 0"):
        env.configure_parallel(num_sub_threads=3, num_threads=0)

    assert (env.num_sub_threads, env.num_threads) == (1, None)


def test_rows_that_nobody_shares_are_refused_when_they_are_configured():
    env = ParallelEnv(2, make_count, shared_memory=False)

    with pytest.raises(ArgumentError, match="shared_memory and memmap are both False"):
        env.configure_parallel(use_buffers=True)


def test_a_serial_env_has_no_processes_to_configure():
    with pytest.raises(TypeError, match="a SerialEnv starts no processes"):
        SerialEnv(2, make_count).configure_parallel(mp_start_method="spawn")
