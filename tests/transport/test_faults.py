"""Workers that die, hang or answer nonsense: what is told, how soon, and what is left behind."""

import os
import re
import resource
import signal
import threading
import time
from functools import partial
from itertools import count, islice

import numpy as np
import psutil
import pytest

from envkit.errors import (
    ArgumentError,
    ClosedEnvError,
    OpenFilesError,
    WorkerError,
    WorkerTimeoutError,
)
from envkit.transport import ForkServer, shared_fork_server
from tests.transport.hosts import (
    EXIT,
    HANG,
    KILL,
    RAISE_ODD,
    SEGFAULT,
    STEP,
    Counter,
    ExitsAtStart,
    HangsAtStart,
    HangsInClose,
    StartsLate,
    layout,
    process_pool,
)

METHODS = ["forkserver", "spawn"]  # fork: in a process without JAX, see test_scripts


@pytest.fixture
def soon():
    """Fail a test whose body took 2 s or more."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 2.0


def gone(pid):
    """Wait until no process has this pid, at most 5 s; say whether it worked."""
    try:
        psutil.Process(pid).wait(5.0)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def round_of(pool, command, rows=None):
    pool.send(command, rows)
    with pytest.raises(WorkerError) as caught:
        pool.recv()
    return caught.value


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_exits_in_a_step_is_named_with_rows_command_and_code(new_pool, method):
    pool, arrays = new_pool(start_method=method)

    error = round_of(pool, EXIT)

    assert "worker 0 of 2, which held rows 0-1, exited with code 3 during 'exit'" in str(error)
    assert error.failures[0].exitcode == 3
    assert error.failures[0].rows == (0, 1)
    assert error.failures[0].kind == "died"
    assert arrays["value"][2:, 0].tolist() == [1, 1]  # the other worker finished its rows


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("soon")
def test_a_worker_killed_in_a_step_is_told_with_advice_on_memory(new_pool, method):
    pool, _ = new_pool(start_method=method)

    error = round_of(pool, KILL)

    assert "signal 9 (SIGKILL) during 'kill'" in str(error)
    assert "use fewer workers" in str(error)
    assert error.failures[0].exitcode == -signal.SIGKILL


@pytest.mark.usefixtures("soon")
def test_a_worker_killed_while_idle_is_told_by_the_next_round_that_needs_it(new_pool):
    pool, arrays = new_pool()
    victim = pool.pids[1]
    os.kill(victim, signal.SIGKILL)
    assert gone(victim)

    pool.send(STEP, [0])
    pool.recv()  # it does not need the dead worker
    error = round_of(pool, STEP)

    assert [failure.worker for failure in error.failures] == [1]
    assert arrays["value"][:, 0].tolist() == [2, 1, 0, 0]
    assert len(pool.pids) == 1


def test_every_later_round_that_needs_a_dead_worker_fails_again(new_pool):
    pool, _ = new_pool()
    round_of(pool, KILL)

    error = round_of(pool, STEP)

    assert error.failures[0].command == "kill"
    with pytest.raises(WorkerError):
        pool.call("add", 1)
    assert pool.call("add", 1, workers=[1]) == [3]


@pytest.mark.usefixtures("soon")
def test_a_worker_that_crashes_in_native_code_shows_where(new_pool):
    pool, _ = new_pool()

    error = round_of(pool, SEGFAULT)

    assert "signal 11 (SIGSEGV)" in str(error)
    assert "in step" in error.failures[0].traceback


@pytest.mark.usefixtures("soon")
def test_a_stuck_worker_is_killed_at_the_deadline_and_its_stack_is_shown(new_pool):
    pool, arrays = new_pool()
    stuck, pool.timeout_s = pool.pids[0], 0.5

    error = round_of(pool, HANG)

    assert isinstance(error, WorkerTimeoutError)
    assert "worker 0 of 2, which held rows 0-1, did not answer 'hang' within 0.5 s" in str(error)
    assert "threading.py" in error.failures[0].traceback
    assert "hosts.py" in error.failures[0].traceback
    assert arrays["value"][2:, 0].tolist() == [1, 1]
    assert gone(stuck)


def test_one_deadline_holds_for_all_workers_that_take_no_message(new_pool):
    pool, _ = new_pool(rows=8, processes=8)
    for stopped in pool.pids[1:]:
        os.kill(stopped, signal.SIGSTOP)
    pool.timeout_s, began = 0.5, time.monotonic()

    with pytest.raises(WorkerTimeoutError) as caught:
        pool.call("echo", np.arange(100_000))  # more than a socket takes at once

    assert time.monotonic() - began < pool.timeout_s + 2.0
    assert [failure.worker for failure in caught.value.failures] == list(range(1, 8))
    assert list(caught.value.answers) == [0]


def test_a_signal_handler_of_the_environment_does_not_wake_a_worker(new_pool):
    pool, _ = new_pool()
    pool.call("ring", 0.002)

    while min(pool.call("rung")) < 20:
        pass

    assert pool.call("add", 1) == [1, 3]


def test_two_workers_that_fail_at_once_are_both_told(new_pool):
    pool, _ = new_pool(timeout_s=2.0)
    victims = pool.pids

    pool.send(STEP, [])
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    error = round_of(pool, STEP)

    assert [failure.worker for failure in error.failures] == [0, 1]


def test_a_death_and_an_exception_in_one_round_are_both_told(new_pool):
    class Both(Counter):
        def step(self, command, row):
            super().step(KILL if row == 1 else RAISE_ODD, row)

    pool, arrays = new_pool(Both)

    error = round_of(pool, STEP)

    assert [(f.worker, f.kind, f.rows) for f in error.failures] == [
        (0, "died", (0, 1)),
        (1, "raised", (3,)),
    ]
    assert arrays["value"][2, 0] == 1


def test_a_result_that_cannot_be_pickled_is_an_error_with_a_cure(new_pool):
    pool, _ = new_pool()

    with pytest.raises(WorkerError, match=r"type lock, cannot be pickled.*Return arrays"):
        pool.call("bad_result")

    assert pool.call("add", 1) == [1, 3]


def test_an_exception_that_cannot_be_pickled_is_told_all_the_same(new_pool):
    class Stubborn(Counter):
        def step(self, command, row):
            error = ArithmeticError("with a lock")
            error.lock = threading.Lock()
            raise error

    pool, _ = new_pool(Stubborn, rows=1)

    error = round_of(pool, STEP)

    assert "ArithmeticError in row 0 during 'step': with a lock" in str(error)
    assert error.failures[0].exception is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("soon")
def test_a_worker_that_exits_in_its_constructor_is_told(method):
    pool = process_pool(ExitsAtStart, 2, 2, start_method=method, timeout_s=20.0)

    with pytest.raises(WorkerError, match="exited with code 7 during 'start'"):
        pool.start()

    assert pool.closed


def test_a_constructor_that_hangs_is_told_with_its_stack():
    pool = process_pool(HangsAtStart, 2, 2, start_timeout_s=1.0)

    told = r"'start' within 1 s \(start_timeout\) (.|\n)*in __init__"
    with pytest.raises(WorkerTimeoutError, match=told) as caught:
        pool.start()

    assert len(caught.value.failures) == 2


def test_a_start_has_a_limit_of_its_own(tmp_path):
    os.mkfifo(tmp_path / "gate")
    pool = process_pool(partial(StartsLate, tmp_path / "gate"), 1, 1, timeout_s=0.05)
    opener = threading.Timer(0.5, lambda: (tmp_path / "gate").write_text("go"))
    opener.daemon = True
    opener.start()

    pool.start()
    pool.close()
    opener.join()


def test_building_anew_has_the_limit_of_a_start(new_pool):
    pool, _ = new_pool(timeout_s=0.05, start_timeout_s=20.0, building=("sleep",))

    pool.call("sleep", 0.3)
    os.kill(pool.pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerTimeoutError, match=r"'add' within 0.05 s \(timeout\)"):
        pool.call("add", 1)
    pool.restart_worker(0)
    pool.timeout_s = 20.0

    assert pool.call("add", 1, workers=[0]) == [1]


@pytest.mark.usefixtures("soon")
def test_closing_does_not_wait_for_a_worker_that_is_busy_for_ever(new_pool):
    pool, _ = new_pool()
    pids = pool.pids
    pool.send(HANG)

    pool.close()

    assert all(map(gone, pids))


def test_closing_is_bounded_when_a_host_does_not_close(new_pool):
    pool, _ = new_pool(HangsInClose)
    pids, began = pool.pids, time.monotonic()

    pool.close()

    assert time.monotonic() - began < 6.0
    assert all(map(gone, pids))


def test_a_replaced_worker_serves_the_same_rows_of_the_same_block(new_pool):
    pool, arrays = new_pool()
    pool.send(STEP)
    pool.recv()
    round_of(pool, EXIT, [1])

    description = pool.restart_worker(0)
    pool.send(STEP)
    pool.recv()

    assert description == range(2)
    assert arrays["value"][:, 0].tolist() == [2, 2, 2, 2]
    assert len(pool.pids) == 2


@pytest.mark.parametrize("method", METHODS)
def test_a_living_worker_can_be_replaced_too(new_pool, holdings, method):
    pool, _ = new_pool(start_method=method)
    old = pool.pids[1]
    descriptors = holdings()[0]

    pool.restart_worker(1)

    assert gone(old)
    assert pool.call("add", 1) == [1, 3]
    assert holdings()[0] == descriptors


def test_forking_is_refused_where_jax_was_imported(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jax", threading)

    with pytest.raises(ArgumentError, match=r"JAX has been imported.*Use 'forkserver'"):
        process_pool(Counter, 1, 1, start_method="fork")


def test_an_unknown_start_method_is_refused():
    with pytest.raises(ArgumentError, match=r"'thread' is unknown; use 'forkserver'"):
        process_pool(Counter, 1, 1, start_method="thread")


def test_a_maker_that_cannot_be_pickled_is_refused_with_a_cure():
    lock = threading.Lock()

    with pytest.raises(ArgumentError, match="Build everything inside it"):
        process_pool(lambda rows: lock, 1, 1)


def test_a_pool_is_used_only_after_its_start():
    pool = process_pool(Counter, 1, 1)

    with pytest.raises(ClosedEnvError, match="never started"):
        pool.send(STEP)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_opening_and_closing_twenty_times_leaks_nothing(holdings, method):
    before = holdings()

    for _ in range(20):
        pool = process_pool(Counter, 2, 2, start_method=method, timeout_s=20.0)
        pool.start()
        arrays = pool.bind(layout(2))
        pool.send(STEP)
        pool.recv()
        pool.close()
        del arrays

    files, children, shared = holdings()
    assert files <= before[0] and shared == before[2]
    assert set(children) <= set(before[1])  # of other tests some may have ended meanwhile


@pytest.fixture
def room_for_files():
    """Set how many more files this process may open; the limit of before comes back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def allow(more):
        taken = [int(name) for name in os.listdir("/dev/fd")][:-1]  # one was that of the list
        free = (number for number in count() if number not in taken)
        limit = next(islice(free, more, None))  # the first number that is too high
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit

    yield allow
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("more", "method"),
    [
        *((more, "forkserver") for more in (3, 33)),
        *(
            pytest.param(more, "forkserver", marks=pytest.mark.slow)
            for more in range(8, 45, 5)
            if more != 33
        ),
        *(pytest.param(more, "spawn", marks=pytest.mark.slow) for more in range(3, 45, 5)),
    ],
)
def test_too_few_open_files_are_told_with_the_limit_and_leave_nothing(
    room_for_files, holdings, method, more
):
    before = holdings()
    pool = process_pool(Counter, 16, 16, start_method=method, timeout_s=20.0)

    limit = room_for_files(more)
    with pytest.raises(OpenFilesError) as caught:
        pool.start()

    assert re.search(
        rf"16 worker processes.* is {limit}, \d+ are open, and about \d+ are needed.*ulimit -n 4096.*"
        r"num_processes=",
        str(caught.value),
    )
    assert pool.closed
    del caught
    assert holdings() == before


def test_too_few_open_files_for_the_memory_are_told_too(room_for_files):
    pool = process_pool(Counter, 1, 1, timeout_s=20.0)
    pool.start()

    room_for_files(0)
    with pytest.raises(OpenFilesError, match="1 worker processes"):
        pool.bind(layout(1))

    assert pool.call("add", 1) == [1]
    pool.close()


def test_a_fork_server_that_could_not_be_started_is_started_later(room_for_files):
    server = ForkServer()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)

    room_for_files(3)
    with pytest.raises(OSError, match="Too many open files"):
        server.warm_up()
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    server.warm_up()

    server.close()


@pytest.mark.slow
def test_faults_leak_nothing(new_pool, holdings):
    before = holdings()

    for command in (EXIT, KILL, HANG):
        pool, arrays = new_pool()
        pool.timeout_s = 0.5
        round_of(pool, command)
        pool.close()
        del arrays

    assert holdings() == before


def test_a_pool_that_is_dropped_ends_its_workers(holdings):
    before = holdings()
    pool = process_pool(Counter, 2, 2)
    pool.start()
    pids = pool.pids

    del pool

    assert all(map(gone, pids))
    assert holdings() == before


def step_thrice(pool):
    for _ in range(3):
        pool.send(STEP)
        pool.recv()


@pytest.mark.slow
def test_the_death_of_the_fork_server_is_survived(new_pool):
    pool, _ = new_pool()
    pids = pool.pids
    server = psutil.Process(pids[0]).parent()
    assert server is not None
    server.kill()
    server.wait(5.0)

    with pytest.raises(WorkerError, match="fork server that started it is gone"):
        step_thrice(pool)  # workers that were faster may finish a round
    fresh, _ = new_pool()

    assert fresh.call("add", 1) == [1, 3]
    assert all(map(gone, pids))


def test_a_fork_server_with_too_many_open_files_fails_that_pool_alone(new_pool):
    resource = pytest.importorskip("resource")
    if not hasattr(resource, "prlimit"):
        pytest.skip("needs prlimit")
    pool, _ = new_pool()
    server = psutil.Process(pool.pids[0]).ppid()
    in_use = len(os.listdir(f"/proc/{server}/fd"))
    limits = resource.prlimit(server, resource.RLIMIT_NOFILE)

    for room in (0, 2):
        resource.prlimit(server, resource.RLIMIT_NOFILE, (in_use + room, limits[1]))
        try:
            with pytest.raises(WorkerError, match=r"could not be started: .*open files.*ulimit -n"):
                process_pool(Counter, 1, 1, timeout_s=20.0).start()
        finally:
            resource.prlimit(server, resource.RLIMIT_NOFILE, limits)

    step_thrice(pool)
    fresh, _ = new_pool()
    assert psutil.Process(fresh.pids[0]).ppid() == server


def test_the_fork_server_is_shared_by_pools(new_pool):
    first, _ = new_pool()
    second, _ = new_pool()

    parents = {psutil.Process(pid).ppid() for pid in first.pids + second.pids}

    assert len(parents) == 1
    assert shared_fork_server() is shared_fork_server()
