"""Batched envs cannot be made to hang, lose or leak: faults on real processes, one by one.

For each fault: the error says who, where, with which seed, during what and how it ended, and shows
the remote traceback (or the stack of the stuck worker); nothing is left behind; and the env, closed
and opened again, works.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces

from envkit import MixedEnv, ParallelEnv, SerialEnv
from envkit.errors import SharedMemoryError, WorkerError, WorkerTimeoutError
from envkit_bridges.gym.gym_wrapper import GymWrapper
from tests.zoo.envs import Chaos, Count, order_fault

SEEDS = [0, 795726461, 2841183792]
SOON_S = 10.0  # deadlines are a minute; how much later than it can be noticed an error may come
PATIENCE_S = 10.0  # for what has no such limit

pytestmark = pytest.mark.usefixtures("warm_fork_server")

with_and_without_buffers = pytest.mark.parametrize(
    "use_buffers", [True, False], ids=["buffers", "tds"]
)


def folders(tmp_path: Path, count: int) -> list[Path]:
    return [Path(tempfile.mkdtemp(prefix=f"{row}-", dir=tmp_path)) for row in range(count)]


def three(batched: Callable, tmp_path: Path, **options):
    """Three envs, of which the first two share a process, and where to put their orders."""
    orders = folders(tmp_path, 3)
    kwargs = [{"orders": folder} for folder in orders]
    if batched is ParallelEnv:
        options = {"num_processes": 2, **options}
    return batched(3, Chaos, create_env_kwargs=kwargs, **options), orders


def acted(env, td, *faults: str):
    """Write the actions that make rows go wrong."""
    numbers = [[Chaos.FAULTS.index(fault)] for fault in faults]
    return td.set("action", torch.tensor(numbers))


class LateError(AssertionError):
    """An error came, but not within `SOON_S`."""


def once_more_if_late(test: Callable) -> Callable:
    """Give a test a second chance to be told soon: other programs may keep the machine busy."""

    @wraps(test)
    def run(**fixtures):
        try:
            test(**fixtures)
        except LateError:
            test(**fixtures)

    return run


def told_by(call: Callable, after_s: float = 0.0) -> WorkerError:
    """Give the error of a call, which comes soon after it can be noticed, ``after_s`` from now."""
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        call()
    late_s = time.monotonic() - began - after_s
    if late_s > SOON_S:
        raise LateError(f"{late_s:.1f} s late: {caught.value}")
    return caught.value


def assert_works(env) -> None:
    td = env.set_seed(0) and env.reset()

    td = env.step(acted(env, td, *["none"] * env.num_workers))

    assert td["next", "count"].flatten().tolist() == [1] * env.num_workers
    for row in range(env.num_workers):
        generator = torch.Generator().manual_seed(SEEDS[row])
        draws = torch.rand(2, generator=generator)
        assert torch.equal(torch.stack([td["draw"][row, 0], td["next", "draw"][row, 0]]), draws)


# ------------------------------------------------------------------------------------- the fault matrix

HOW_IT_ENDED = {
    "exit": "exited with code 3",
    "kill": "was ended by signal 9 (SIGKILL)",
    "hang": "did not answer",
}
PLACES = ["constructor", "set_seed", "reset", "step", "visit"]
COMMANDS = {"constructor": "start", "step": "step_and_maybe_reset", "visit": "call_method"}


def provoke(env, orders: list[Path], place: str, fault: str) -> Callable:
    """Bring an env to where row 1 is about to go wrong, and give the call that makes it."""
    if place != "constructor":
        env.set_seed(0)
    if place != "step":
        order_fault(orders[1], place, fault)
    td = env.reset() if place in ("step", "visit") else None
    if fault == "hang":
        env.timeout, env.start_timeout = 1.0, 5.0
    return {
        "constructor": env.start,
        "set_seed": partial(env.set_seed, 0),
        "reset": env.reset,
        "step": lambda: env.step_and_maybe_reset(acted(env, td, "none", fault, "none")),
        "visit": lambda: list(env.visit()),
    }[place]


FAULTS = ["raise", "exit", "kill", "hang"]
CASES = [
    *((place, True, fault) for place in PLACES for fault in FAULTS),
    *((place, False, fault) for place in ("reset", "step") for fault in FAULTS),
]
slow, sweep = pytest.mark.slow, pytest.mark.sweep


def is_quick(place: str, use_buffers: bool, fault: str) -> bool:
    """Whether a case runs by default: every fault in a step, and one in the constructor."""
    return use_buffers and (place == "step" or (place, fault) == ("constructor", "raise"))


@pytest.mark.parametrize(
    ("place", "use_buffers", "fault"),
    [case if is_quick(*case) else pytest.param(*case, marks=slow) for case in CASES],
)
@once_more_if_late
def test_a_fault_in_a_worker_is_told_in_full_and_leaves_nothing(
    opened, holdings, tmp_path, use_buffers, place, fault
):
    before = holdings()
    env, orders = three(ParallelEnv, tmp_path, use_buffers=use_buffers)
    opened(env)
    call = provoke(env, orders, place, fault)

    limit_s = env.start_timeout if place == "constructor" else env.timeout
    error = told_by(call, limit_s if fault == "hang" else 0.0)
    text = str(error)
    env.close(raise_if_closed=False)
    env.timeout = env.start_timeout = 60.0

    command = COMMANDS.get(place, place)
    seeds = "" if place == "constructor" else " (seeds 0, 795726461)"
    if fault == "raise":
        seed = "" if place == "constructor" else " (seed 795726461)"
        rows = f"rows 0-1{seeds}" if place == "visit" else f"row 1{seed}"
        assert f"worker 0 of 2 raised ValueError in {rows} during {command!r}" in text
        assert "Traceback in the worker" in text
        assert "in fail" in text
        assert isinstance(error.__cause__, ValueError)
    else:
        assert f"worker 0 of 2, which held rows 0-1{seeds}, {HOW_IT_ENDED[fault]}" in text
        assert f"{command!r}" in text
    assert isinstance(error, WorkerTimeoutError) is (fault == "hang")
    if fault == "hang":
        assert "Stack of the worker" in text
        assert "in fail" in text
    del error, call
    assert holdings() == before
    assert_works(env)


@pytest.mark.parametrize("place", PLACES)
@with_and_without_buffers
@once_more_if_late
def test_a_fault_in_this_process_is_told_in_the_same_way(opened, tmp_path, use_buffers, place):
    env, orders = three(SerialEnv, tmp_path, use_buffers=use_buffers)
    opened(env)
    call = provoke(env, orders, place, "raise")

    if place == "visit":  # its caller is at hand: no messenger is needed
        with pytest.raises(ValueError, match="was told to fail in visit"):
            call()
    else:
        text = str(told_by(call))
        seed = "" if place == "constructor" else " (seed 795726461)"
        assert f"this process raised ValueError in row 1{seed} during" in text
        assert "in fail" in text

    assert_works(env)


@with_and_without_buffers
@once_more_if_late
def test_an_env_that_raised_goes_on_after_a_reset(opened, tmp_path, use_buffers):
    env, _ = three(ParallelEnv, tmp_path, use_buffers=use_buffers)
    opened(env)
    pids = env.worker_pids
    td = env.reset()

    told_by(lambda: env.step(acted(env, td, "raise", "none", "raise")))

    assert_works(env)
    assert env.worker_pids == pids


@once_more_if_late
def test_a_dead_worker_is_told_by_every_call_until_the_env_is_closed(opened, tmp_path):
    env, _ = three(ParallelEnv, tmp_path)
    opened(env)
    td = env.reset()
    first = told_by(lambda: env.step(acted(env, td, "exit", "none", "none")))

    again = told_by(env.reset)

    assert "during 'step'" in str(again)
    assert "close()" in first.__notes__[0]
    env.close()
    assert_works(env)


@pytest.mark.parametrize(
    ("result", "fix"),
    [
        (None, "End the function with return env"),
        ("CartPole-v1", r"Return an env, e\.g\. GymEnv\('CartPole-v1'\)"),
        (Count, r"Build one: Count\(\.\.\.\)"),
        (object(), r"Wrap it: GymWrapper\(env\)"),
    ],
    ids=["none", "name", "class", "object"],
)
def test_a_create_function_that_returns_no_env_is_told_what_to_return(result, fix):
    with pytest.raises(WorkerError, match=f"must return an envkit environment. {fix}"):
        SerialEnv(1, lambda: result).reset()


def test_envs_that_were_built_are_closed_when_another_cannot_be():
    closed = []

    class Closing(Chaos):
        def close(self, **kwargs):
            closed.append(self.n)
            super().close(**kwargs)

    def broken(n):
        raise ArithmeticError("no licence")

    with pytest.raises(WorkerError, match=r"ArithmeticError in row 2 during 'start': no licence"):
        SerialEnv(
            3, [Closing, Closing, broken], create_env_kwargs=[{"n": n} for n in (3, 4, 5)]
        ).start()

    assert sorted(closed) == [3, 4]


def test_an_env_that_cannot_close_does_not_keep_others_open(opened):
    closed = []

    class Closing(Chaos):
        def close(self, **kwargs):
            closed.append(self.n)
            super().close(**kwargs)
            if self.n == 4:
                raise ArithmeticError("stuck")

    env = SerialEnv(3, Closing, create_env_kwargs=[{"n": n} for n in (3, 4, 5)])
    env.start()

    with pytest.raises(ArithmeticError, match="stuck"):
        env.close()

    assert sorted(closed) == [3, 4, 5]
    assert env.is_closed


# ------------------------------------------------------------------------------ death from outside


def killed_during(env, call: Callable) -> WorkerError:
    """Kill the first worker while ``call`` waits for it."""
    wait_s = 0.3
    killer = threading.Timer(wait_s, os.kill, (env.worker_pids[0], signal.SIGKILL))
    killer.start()
    error = told_by(call, wait_s)
    killer.join()
    return error


@pytest.mark.parametrize("place", ["step", "reset"])
@once_more_if_late
def test_a_worker_killed_from_outside_at_work_is_told(opened, holdings, tmp_path, place):
    before = holdings()
    env, orders = three(ParallelEnv, tmp_path)
    opened(env)

    text = str(killed_during(env, provoke(env, orders, place, "hang")))
    env.close()

    assert "which held rows 0-1 (seeds 0, 795726461), was ended by signal 9 (SIGKILL)" in text
    assert "use fewer workers" in text
    assert holdings() == before


@with_and_without_buffers
@once_more_if_late
def test_a_worker_killed_while_idle_is_told_by_the_next_call(
    opened, holdings, tmp_path, use_buffers
):
    before = holdings()
    env, _ = three(ParallelEnv, tmp_path, use_buffers=use_buffers)
    opened(env)
    td = env.reset()
    victim = psutil.Process(env.worker_pids[1])
    victim.kill()
    victim.wait(5.0)

    text = str(told_by(lambda: env.step(acted(env, td, "none", "none", "none"))))
    env.close()

    assert "worker 1 of 2, which held row 2" in text
    assert "SIGKILL" in text
    assert holdings() == before


@with_and_without_buffers
@once_more_if_late
def test_two_workers_that_fail_at_once_are_both_told(opened, holdings, tmp_path, use_buffers):
    before = holdings()
    env, _ = three(ParallelEnv, tmp_path, use_buffers=use_buffers)
    opened(env)
    td = env.reset()

    text = str(told_by(lambda: env.step(acted(env, td, "none", "exit", "raise"))))
    env.close()

    assert "worker 0 of 2, which held rows 0-1, exited with code 3" in text
    assert "worker 1 of 2 raised ValueError in row 2" in text
    assert holdings() == before


# ------------------------------------------------------------------------ data that does not fit


def test_a_result_that_cannot_be_pickled_is_told_and_the_worker_lives(opened, tmp_path):
    env, _ = three(ParallelEnv, tmp_path)
    opened(env)
    env.reset()

    with pytest.raises(WorkerError, match=r"type list, cannot be pickled.*Return arrays"):
        list(env.lock())

    assert list(env.visit()) == [0, 0, 0]


def test_an_argument_that_cannot_be_pickled_is_told_and_reaches_nobody(opened, tmp_path):
    env, _ = three(ParallelEnv, tmp_path)
    opened(env)
    env.reset()

    with pytest.raises(ValueError, match=r"'call_method' is called with cannot be sent.*tensors"):
        env.hello(threading.Lock())

    assert list(env.visit()) == [0, 0, 0]


class Locked(Count):
    """Gives a lock, which no process can send to another, where it is told to."""

    def __init__(self, locked: bool):
        super().__init__(5)
        self.locked = locked

    def _step(self, td):
        out = super()._step(td)
        return out.set_non_tensor("secret", threading.Lock()) if self.locked else out


def test_data_that_cannot_be_pickled_is_blamed_on_its_row(opened):
    env = opened(
        ParallelEnv(
            3,
            Locked,
            create_env_kwargs=[{"locked": row == 1} for row in range(3)],
            num_processes=1,
            use_buffers=False,
        )
    )
    td = env.rand_action(env.reset())

    with pytest.raises(WorkerError, match=r"in row 1 during 'step'.*cannot be pickled"):
        env.step(td)

    assert env.reset()["count"].flatten().tolist() == [0, 0, 0]


@pytest.mark.parametrize("batched", [SerialEnv, ParallelEnv])
@once_more_if_late
def test_data_that_does_not_fit_its_spec_is_named(opened, tmp_path, batched):
    env, _ = three(batched, tmp_path, use_buffers=True)
    opened(env)
    td = env.set_seed(0) and env.reset()

    error = told_by(lambda: env.step(acted(env, td, "none", "misfit", "none")))

    assert "row 1 (seed 795726461) during 'step'" in str(error)
    assert "'count' has shape (3,) and dtype torch.float32" in str(error)
    assert "its spec says (1,) and torch.int64" in str(error)
    assert_works(env)


class Widening(gymnasium.Env):
    """Observes more numbers than it says, from its second step on."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.size = 2
        return np.zeros(2, np.float32), {}

    def step(self, action):
        observation = np.zeros(self.size, np.float32)
        self.size += 1
        return observation, 0.0, False, False, {}


@pytest.mark.parametrize("batched", [SerialEnv, partial(ParallelEnv, num_processes=2)])
def test_a_gymnasium_observation_that_does_not_fit_is_named(opened, batched):
    env = opened(batched(3, lambda: GymWrapper(Widening())))

    with pytest.raises(WorkerError, match=r"in row 0 during 'step.*shape \(3,\) into shape \(2,\)"):
        env.rollout(3)

    assert env.rollout(1).shape == (3, 1)


def test_shared_memory_that_is_too_small_is_told_when_the_env_starts(opened, holdings, tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = holdings()
    env, _ = three(ParallelEnv, tmp_path)
    opened(env)

    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(SharedMemoryError, match=r"cannot reserve.*fewer environments"):
            env.reset()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert env.is_closed
    assert holdings() == before
    assert_works(env)


# ---------------------------------------------------------------------------------- time limits


@once_more_if_late
def test_the_timeout_can_be_changed_while_the_env_runs(opened, tmp_path):
    env, orders = three(ParallelEnv, tmp_path, timeout=60.0)
    opened(env)
    env.reset()
    order_fault(orders[2], "visit", "hang")

    env.timeout = 0.5
    error = told_by(lambda: list(env.visit()), 0.5)

    assert env.timeout == 0.5
    assert "did not answer 'call_method' within 0.5 s" in str(error)
    with pytest.raises(ValueError, match=r"timeout is 0, but must be a positive number"):
        env.timeout = 0
    with pytest.raises(ValueError, match=r"timeout is nan"):
        SerialEnv(2, Chaos, timeout=float("nan"))


def test_an_env_without_a_timeout_waits(opened, tmp_path):
    env, _ = three(ParallelEnv, tmp_path, timeout=None)
    opened(env)

    assert_works(env)
    assert env.timeout is None


# ------------------------------------------------------------------------------------- mixed envs


@once_more_if_late
def test_a_fault_in_a_member_leaves_a_mixed_env_usable(opened):
    env = opened(MixedEnv([SerialEnv(1, Chaos), ParallelEnv(2, Chaos, num_processes=2)]))
    td = env.reset()

    told_by(lambda: env.step(acted(env, td, "none", "raise", "none")))
    td = env.reset()
    td = env.step(acted(env, td, "none", "none", "none"))

    assert td["next", "count"].flatten().tolist() == [1, 1, 1]


# ------------------------------------------------------------------------- the parent and its end

SCRIPT = """
import os, signal, sys, time
from envkit import ParallelEnv
from tests.zoo.envs import Chaos
import torch

def act(td, name):
    return td.set("action", torch.full((2, 1), Chaos.FAULTS.index(name)))

env = ParallelEnv(2, Chaos, num_processes=2, timeout=30)
td = env.reset()
print("workers", *env.worker_pids, flush=True)
{ending}
"""

ENDED_BY_CTRL_C = (-signal.SIGINT, 1)
"""Exit statuses; 1 where tabulate is installed: torch then evaluates code at exit, and CPython forgets the interrupt."""

HANG = "print('ready', flush=True)\nenv.step(act(td, 'hang'))\n"


def start_script(tmp_path: Path, ending: str) -> subprocess.Popen:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(ending=ending))
    environ = {name: text for name, text in os.environ.items() if name != "LAZY_LEGACY_OP"}
    return subprocess.Popen(
        [sys.executable, path],
        env={**environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def workers_when_ready(script: subprocess.Popen) -> list[int]:
    assert script.stdout is not None
    workers: list[int] = []
    for line in script.stdout:
        if line.startswith("workers"):
            workers = [int(pid) for pid in line.split()[1:]]
        if line == "ready\n":
            return workers
    raise AssertionError(script.communicate()[1])


def gone(pids: list[int]) -> bool:
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(alive, 5.0)[1]


@pytest.mark.slow
def test_no_worker_survives_a_parent_that_is_killed_while_they_work(tmp_path):
    with start_script(tmp_path, HANG) as script:
        workers = workers_when_ready(script)
        family = [child.pid for child in psutil.Process(script.pid).children(recursive=True)]

        script.kill()

        assert set(workers) <= set(family)
        assert gone(family)


@pytest.mark.slow
def test_ctrl_c_ends_a_script_without_close_and_its_stuck_workers(tmp_path):
    with start_script(tmp_path, HANG) as script:
        workers = workers_when_ready(script)
        time.sleep(0.2)  # let the step begin

        os.killpg(script.pid, signal.SIGINT)
        errors = script.communicate(timeout=PATIENCE_S)[1]

        assert script.returncode in ENDED_BY_CTRL_C
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert gone(workers)


MOMENTS = np.random.default_rng(0)


def interrupt_at_random(call: Callable, times: int) -> int:
    """Repeat a call and interrupt it, at moments that differ; give how often that worked.

    Some libraries swallow an interrupt, or nobody can raise it (in a finalizer).
    """

    def ring(*_):
        raise KeyboardInterrupt

    limit_of_test = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, ring)
    interrupted = 0
    try:
        for pause_s in MOMENTS.uniform(1e-5, 2e-3, times):
            patience = time.monotonic() + 1.0
            try:
                signal.setitimer(signal.ITIMER_REAL, pause_s)
                while time.monotonic() < patience:
                    call()
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                torch.set_grad_enabled(True)  # it may have landed inside torch.no_grad
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *limit_of_test)
    return interrupted


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("use_buffers", "times"),
    [
        (True, 200),
        pytest.param(True, 500, marks=[slow, sweep]),
        pytest.param(False, 100, marks=slow),
        pytest.param(False, 500, marks=[slow, sweep]),
    ],
)
def test_an_interrupt_at_any_moment_leaves_the_workers_usable(opened, tmp_path, use_buffers, times):
    env, _ = three(ParallelEnv, tmp_path, use_buffers=use_buffers, timeout=5.0)
    opened(env)
    pids = env.worker_pids
    td = acted(env, env.reset(), "none", "none", "none")
    for _ in range(8):  # over the end of an episode: what is imported there, is
        env.step_and_maybe_reset(td.clone())

    assert interrupt_at_random(lambda: env.step_and_maybe_reset(td.clone()), times) > 0.8 * times

    assert_works(env)
    assert env.worker_pids == pids


@once_more_if_late
def test_what_failed_in_an_interrupted_step_is_told_by_the_next_call(opened, tmp_path):
    env, _ = three(ParallelEnv, tmp_path)
    opened(env)
    td = env.set_seed(0) and env.reset()
    env._send(acted(env, td, "raise", "none", "none"))  # and never received

    error = told_by(env.reset)

    assert "row 0 (seed 0) during 'step': cannot go on from 0" in str(error)
    assert_works(env)


@pytest.mark.sweep
@pytest.mark.slow
def test_fifty_times_open_and_closed_leaks_nothing(holdings):
    before = holdings()

    for _ in range(50):
        env = ParallelEnv(2, Chaos, num_processes=2)
        env.step(acted(env, env.reset(), "none", "none"))
        env.close()

    assert holdings() == before
