"""Makers, faults, attributes and the life of the processes behind a batched env."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import psutil
import pytest
import torch

from envkit import ParallelEnv, SerialEnv
from envkit.errors import ClosedEnvError, WorkerError
from tests.zoo.envs import Count

make_count = partial(Count, 5)
both = pytest.mark.parametrize(
    "batched", [SerialEnv, partial(ParallelEnv, num_processes=2)], ids=["serial", "parallel"]
)


@pytest.fixture
def soon() -> Iterator:
    """Fail a test that waited for a deadline, all of which are 60 s, instead of being told at once."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 30.0


@pytest.fixture(scope="module", autouse=True)
def warm_fork_server() -> None:
    """Start the fork server, which all pools share, before times are taken."""
    env = ParallelEnv(1, make_count)
    env.start()
    env.close()


def gone(pids: list[int]) -> bool:
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(alive, 5.0)[1]


# ---------------------------------------------------------------------------------------- makers


def test_there_are_as_many_processes_as_asked_for_and_none_after_close(opened):
    env = opened(ParallelEnv(4, make_count, num_processes=4))

    env.reset()
    pids = env.worker_pids
    env.close()

    assert len(set(pids)) == 4
    assert os.getpid() not in pids
    assert gone(pids)


def test_makers_run_in_the_workers_and_once_for_each_env(opened, tmp_path):
    def make():
        (tmp_path / f"{time.monotonic_ns()}-{os.getpid()}").touch()
        return Count(5)

    env = opened(ParallelEnv(3, make, num_processes=2))
    env.rollout(2)
    pids = env.worker_pids

    made_by = [int(path.name.partition("-")[2]) for path in tmp_path.iterdir()]
    assert len(made_by) == 3
    assert set(made_by) == set(pids)


@both
def test_a_lambda_and_a_local_class_are_makers(opened, batched):
    class Local(Count):
        secret = 7

    env = opened(batched(2, [lambda: Local(3), lambda: Local(4)]))
    env.reset()

    assert list(env.secret) == [7, 7]
    assert list(env.maxs) == [3, 4]


@both
def test_an_env_instance_is_copied_for_each_row(opened, batched):
    model = Count(5)
    env = opened(batched(2, model))

    env.step(env.rand_action(env.reset()).set("_step", torch.tensor([True, False])))

    assert list(env.c) == [1, 0]
    assert model.c == 0


@both
def test_keywords_are_one_dict_for_all_or_one_for_each(opened, batched):
    shared = opened(batched(2, Count, create_env_kwargs={"n": 3}))
    each = opened(batched(2, Count, create_env_kwargs=[{"n": 1}, {"n": 2}]))
    for env in (shared, each):
        env.reset()

    assert list(shared.n) == [3, 3]
    assert list(each.n) == [1, 2]


@both
def test_new_keywords_count_when_the_sub_envs_are_built_next(opened, batched):
    env = opened(batched(2, Count, create_env_kwargs={"n": 3}))

    env.update_kwargs({"n": 9})
    env.reset()
    first = list(env.n)
    env.update_kwargs([{"n": 1}, {"n": 2}])
    running = list(env.n)
    env.close()
    env.reset()

    assert (first, running, list(env.n)) == ([9, 9], [9, 9], [1, 2])


# ------------------------------------------------------------------------------------------ life


@both
def test_building_and_showing_an_env_starts_nothing(batched):
    def make():
        raise AssertionError("built")

    env = batched(2, make)

    assert "not started" in repr(env)
    assert dir(env)
    assert env.is_closed


@both
def test_reading_a_spec_starts_the_sub_envs(opened, batched):
    env = opened(batched(2, make_count))

    assert env.observation_spec["count"].shape == (2, 1)
    assert not env.is_closed


@both
def test_an_env_can_be_started_closed_and_opened_again(opened, batched):
    env = opened(batched(2, make_count))

    env.start()
    with pytest.raises(RuntimeError, match="started already"):
        env.start()
    env.close()
    env.close()
    with pytest.raises(ClosedEnvError, match="not running"):
        env.close(raise_if_closed=True)

    assert env.is_closed
    assert env.rollout(3).shape == (2, 3)


def test_a_forgotten_env_ends_its_processes():
    env = ParallelEnv(2, make_count, num_processes=2)
    env.reset()
    pids = env.worker_pids

    del env

    assert gone(pids)


SCRIPT = """
import os, torch
print("main", os.getpid(), flush=True)
from envkit import GymEnv, GymWrapper, ParallelEnv
import gymnasium

class Mine(gymnasium.Wrapper):
    def hello(self, x): return x + 1

env = ParallelEnv(3, lambda: GymWrapper(Mine(gymnasium.make("CartPole-v1"))), num_processes=2)
assert env.rollout(4).shape == (3, 4)
assert env.hello(5) == [6, 6, 6]
print("workers", *env.worker_pids, flush=True)
"""


def tidy_environment() -> dict[str, str]:
    """Leave out what tensordict writes when other tests stack unlike data: see the test below."""
    return {name: value for name, value in os.environ.items() if name != "LAZY_LEGACY_OP"}


@pytest.mark.slow
def test_a_script_without_main_guard_may_end_without_close(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)

    done = subprocess.run(
        [sys.executable, "-W", "error", path],
        env={**tidy_environment(), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    main, workers = done.stdout.splitlines()
    assert main.startswith("main")
    assert gone([int(pid) for pid in workers.split()[1:]])


INSIDE_A_CHILD = """
import sys
import torch.multiprocessing as multiprocessing
from torch.utils.data import DataLoader, IterableDataset
from envkit import EnvCreator, GymEnv, ParallelEnv

class Mine(GymEnv):
    secret = 3

def make():
    return Mine("CartPole-v1")

def played(*_):
    for maker in (make, EnvCreator(make)):
        env = ParallelEnv(2, maker, num_processes=1)
        assert env.rollout(3).shape == (2, 3)
        assert list(env.secret) == [3, 3]
        env.close()
    print("fine in", __name__, flush=True)

class Played(IterableDataset):
    def __iter__(self):
        played()
        yield 1

if __name__ == "__main__":
    if sys.argv[1] == "loader":
        context = multiprocessing.get_context("spawn")
        assert len(list(DataLoader(Played(), num_workers=1, multiprocessing_context=context))) == 1
    else:
        multiprocessing.spawn(played, nprocs=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loader", "ranks"])
def test_a_script_may_use_workers_in_the_processes_that_torch_starts_for_it(tmp_path, how):  # B1
    path = tmp_path / "script.py"
    path.write_text(INSIDE_A_CHILD)

    done = subprocess.run(
        [sys.executable, path, how],
        env={**tidy_environment(), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine in __mp_main__\n"


def test_what_tensordict_leaves_in_the_environment_does_not_reach_workers(opened, monkeypatch):
    class Surroundings(Count):
        def variable(self):
            return os.environ.get("LAZY_LEGACY_OP")

    monkeypatch.setenv("LAZY_LEGACY_OP", "None")
    env = opened(ParallelEnv(1, Surroundings))
    env.start()

    assert env.variable() == [None]


# -------------------------------------------------------------------------- attributes and states


class Weighted(Count):
    """Has a parameter."""

    def __init__(self, weight: float = 0.0):
        super().__init__(5)
        self.weight = torch.nn.Parameter(torch.tensor([weight]))


def weights(env) -> list[float]:
    states = env.state_dict()
    return [states[name]["weight"].item() for name in ("worker0", "worker1")]


@both
def test_states_are_named_by_worker_and_come_back(opened, batched):
    source = opened(batched(2, Weighted, create_env_kwargs=[{"weight": 1.0}, {"weight": 2.0}]))
    target = opened(batched(2, Weighted))

    states = source.state_dict()
    target.load_state_dict(states)
    restored = weights(target)
    target.load_state_dict({"weight": torch.tensor([9.0])})

    assert list(states) == ["worker0", "worker1", "_state"]
    assert restored == [1.0, 2.0]
    assert weights(target) == [9.0, 9.0]


# ----------------------------------------------------------------------------------------- seeds


@both
def test_each_sub_env_gets_its_seed_of_the_chain(opened, batched):
    env = opened(batched(3, make_count))

    following = env.set_seed(0)
    chain = list(env.seed_seen)
    same = env.set_seed(3, static_seed=True)

    assert chain == [0, 795726461, 2841183792]
    assert following == 2309840538
    assert same == 3
    assert list(env.seed_seen) == [3, 3, 3]


class Logged(Count):
    """Remembers the keywords of its last reset."""

    last = None

    def _reset(self, td, **kwargs):
        self.last = kwargs
        return super()._reset(td)


@both
def test_reset_keywords_are_merged_with_those_of_each_worker(opened, batched):
    env = opened(batched(2, Logged))

    td = env.reset(b=5, list_of_kwargs=[{"x": 1}, {"x": 2}])
    full = list(env.last)
    mask = torch.tensor([[False], [True]])
    env.reset(td.set("_reset", mask), list_of_kwargs=[{"x": 8}, {"x": 9}])

    assert full == [{"b": 5, "x": 1}, {"b": 5, "x": 2}]
    assert list(env.last) == [{"b": 5, "x": 1}, {"x": 9}]


# ---------------------------------------------------------------------------------------- faults


@pytest.mark.usefixtures("soon")
def test_a_gymnasium_env_that_raises_in_a_step_is_named(opened):
    gymnasium = pytest.importorskip("gymnasium")

    class Broken(gymnasium.Wrapper):
        def step(self, action):
            raise ArithmeticError("broken pole")

    def make(broken):
        from envkit_bridges.gym.gym_wrapper import GymWrapper

        env = gymnasium.make("CartPole-v1")
        return GymWrapper(Broken(env) if broken else env)

    env = opened(ParallelEnv(3, [partial(make, row == 1) for row in range(3)], num_processes=1))

    with pytest.raises(WorkerError, match=r"raised ArithmeticError in row 1 .*broken pole"):
        env.rollout(3)


@pytest.mark.parametrize(
    "hidden",
    [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.slow)],
)
def test_workers_hide_warnings_unless_told_otherwise(hidden):
    script = f"""
import envkit
envkit.filter_warnings_subprocess = {hidden}
from envkit import ParallelEnv
from tests.zoo.envs import Count

def make():
    import warnings
    warnings.warn("look here")
    return Count(3)

env = ParallelEnv(1, make)
env.reset()
env.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )

    assert ("look here" in done.stderr) is not hidden
