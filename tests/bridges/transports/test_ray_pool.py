"""Rows in Ray actors are rows like others, and what happens to an actor is told like the end of a process."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from envkit.errors import (
    ArgumentError,
    BusyEnvError,
    ClosedEnvError,
    WorkerError,
    WorkerTimeoutError,
)
from envkit.transport import Field, Layout, Traffic
from tests.transport.hosts import (
    COMMANDS,
    EXIT,
    HANG,
    KILL,
    RAISE_ODD,
    STEP,
    Counter,
    FailsToStart,
    HangsAtStart,
    HangsInClose,
    process_pool,
)

pytestmark = [pytest.mark.slow, pytest.mark.sweep, pytest.mark.timeout(400)]

PATIENCE_S = 20.0
BIG = 300_000  # numbers in a row that do not go along with a message


class Gathers(Counter):
    """Fills ``batch`` from ``weights`` in a call, as a collector does."""

    FIELDS = (Field("weights", (), "float64"), Field("batch", (BIG,), "float64"))
    BOUND = Layout(FIELDS, 2, {"gather": Traffic(("weights",), ("batch",))})

    def bind(self, arrays, rows):
        self.weights, self.batch = arrays["weights"], arrays["batch"]

    def gather(self):
        for row in self.rows:
            self.batch[row] = self.weights[row]
        return self.weights[self.rows.start]

    def seen(self):
        return self.weights[self.rows.start], self.batch[self.rows.start, 0]


class Waits(Counter):
    """A host that answers when a file is there."""

    def wait_for(self, path):
        path.with_suffix(f".asked{self.rows.start}").touch()
        while not path.exists():
            time.sleep(0.001)
        return self.rows.start


def lines_of(error: WorkerError) -> list[str]:
    """Give what an error says, without the traceback."""
    return [line for line in str(error).splitlines() if line.startswith("worker")]


# -------------------------------------------------------------------------------------- what moves


def test_rounds_carry_rows_there_and_back(new_pool):
    pool, arrays = new_pool()
    arrays["value"][:] = [[1], [2], [3], [4]]

    pool.send(STEP)
    pool.recv()
    pool.send(STEP, [1, 2])
    pool.recv()

    assert arrays["value"][:, 0].tolist() == [2, 4, 5, 5]
    assert arrays["value"].flags.writeable


def test_a_call_carries_what_the_layout_says(new_pool):
    pool, arrays = new_pool(Gathers, rows=2, bound=Gathers.BOUND)
    arrays["weights"][:] = 3, 4

    assert pool.call("gather") == [3, 4]
    assert (arrays["batch"] == [[3], [4]]).all()

    arrays["weights"][:] = 5, 6
    assert pool.call("seen") == [(3, 3), (4, 4)]


def test_a_job_carries_rows_of_its_worker_alone(new_pool):
    pool, arrays = new_pool(Gathers, rows=2, bound=Gathers.BOUND)
    arrays["weights"][:] = 3, 4

    job = pool.begin_call(1, "gather")

    assert pool.wait([job], 1, PATIENCE_S) == [job]
    assert pool.outcome(job) == 4
    assert arrays["batch"][:, -1].tolist() == [0, 4]


def test_what_is_laid_is_there_at_the_next_call_and_stays(new_pool):
    pool, _ = new_pool(Gathers, rows=2, bound=Gathers.BOUND)
    laid = np.full(BIG, 7.0)

    for worker in range(2):
        pool.lay(worker, "batch", laid)

    assert pool.call("seen") == pool.call("seen") == [(0, 7)] * 2


@pytest.mark.parametrize("size", [3, BIG])
def test_what_calls_take_and_give_may_be_written_to(new_pool, size):
    pool, _ = new_pool()

    given = pool.call("echo", np.arange(size))[1]

    given += 1
    assert given[-1] == size


# ------------------------------------------------------------------------------------------- jobs


def test_what_is_ready_is_given_while_another_works(new_pool, tmp_path):
    pool, arrays = new_pool(Waits)
    slow = pool.begin_call(0, "wait_for", tmp_path / "go")
    fast = pool.begin(1, STEP)

    assert pool.wait([slow, fast], 1, PATIENCE_S) == [fast]
    assert arrays["value"][:, 0].tolist() == [0, 0, 1, 1]
    assert pool.wait([slow], 1, 0.0) == []
    with pytest.raises(BusyEnvError):
        pool.begin(0, STEP)

    (tmp_path / "go").touch()
    assert pool.wait([slow], 1, PATIENCE_S) == [slow]
    assert pool.outcome(slow) == 0


def test_a_round_that_was_not_received_is_finished_by_the_next(new_pool):
    pool, arrays = new_pool()

    pool.send(RAISE_ODD)
    pool.send(STEP, [0])
    with pytest.raises(WorkerError) as failed:
        pool.recv()

    assert [failure.rows for failure in failed.value.failures] == [(1,), (3,)]
    assert arrays["value"][:, 0].tolist() == [2, 0, 1, 0]


def test_a_call_that_was_interrupted_is_finished_by_the_next(new_pool, tmp_path):
    pool, _ = new_pool(Waits)
    path = tmp_path / "go"

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        pool.call("wait_for", path)
    path.touch()

    assert pool.call("add", 1) == [1, 3]


# ------------------------------------------------------------------------------------------ faults


def test_a_row_that_raises_is_told_as_by_a_process_and_the_others_go_on(new_pool):
    pool, arrays = new_pool()
    measure = process_pool(Counter, 4, 2, commands=COMMANDS)
    errors = []

    measure.start()
    measure.bind(Layout((Field("value", (3,), "float32"), Field("calls", (), "int64")), 4))
    for each in (pool, measure):
        each.seeds[3] = 17
        each.send(RAISE_ODD)
        with pytest.raises(WorkerError) as failed:
            each.recv()
        errors.append(failed.value)
    measure.close()

    assert lines_of(errors[0]) == lines_of(errors[1])
    assert isinstance(errors[0].__cause__, ArithmeticError)
    assert "in step" in str(errors[0])  # the traceback of the worker
    assert arrays["value"][:, 0].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("command", [KILL, EXIT])
def test_a_dead_actor_is_an_error_and_has_a_successor_with_the_same_rows(new_pool, command):
    pool, arrays = new_pool()
    pool.send(STEP)
    pool.recv()

    pool.send(command)
    with pytest.raises(WorkerError, match="worker 0 of 2, which held rows 0-1, was lost") as failed:
        pool.recv()

    assert failed.value.failures[0].kind == "died"
    assert len(pool.pids) == 1
    assert arrays["value"][:, 0].tolist() == [1, 1, 2, 2]
    with pytest.raises(WorkerError, match="was lost"):
        pool.call("add", 1)
    assert pool.restart_worker(0) == range(2)
    pool.send(STEP)
    pool.recv()
    assert arrays["value"][:, 0].tolist() == [2, 2, 3, 3]


def test_an_actor_that_was_killed_while_idle_is_missed_by_the_next_round(new_pool):
    pool, arrays = new_pool()
    os.kill(pool.pids[1], signal.SIGKILL)

    pool.send(STEP)
    with pytest.raises(WorkerError, match="worker 1 of 2"):
        pool.recv()

    assert arrays["value"][:, 0].tolist() == [1, 1, 0, 0]


def test_an_actor_that_hangs_is_killed_at_the_deadline(new_pool):
    pool, _ = new_pool(timeout_s=0.5)
    stuck = psutil.Process(pool.pids[0])

    pool.send(HANG)
    with pytest.raises(WorkerTimeoutError, match=r"'hang' within 0.5 s \(timeout\)"):
        pool.recv()

    assert psutil.wait_procs([stuck], PATIENCE_S)[1] == []
    pool.timeout_s = PATIENCE_S
    pool.restart_worker(0)
    assert pool.call("add", 1) == [1, 3]


def test_a_host_that_fails_to_start_closes_the_pool(new_pool):
    with pytest.raises(WorkerError, match="no licence for rows 2-3") as failed:
        new_pool(FailsToStart)

    assert len(failed.value.failures) == 2


def test_a_start_has_a_deadline(new_pool):
    with pytest.raises(WorkerTimeoutError, match=r"'start' within 1 s \(start_timeout\)"):
        new_pool(HangsAtStart, start_timeout_s=1.0)


def test_an_actor_that_finds_no_place_says_what_there_is(new_pool):
    with pytest.raises(
        WorkerTimeoutError, match=r"asks for {'num_gpus': 8}, and {.*'CPU': 2.0.*} are free"
    ):
        new_pool(actor_options={"num_gpus": 8}, start_timeout_s=0.5)


def test_a_limit_on_building_does_not_count_what_ray_takes_to_start_a_process(new_pool):
    pool, _ = new_pool(prepare=[lambda: time.sleep(4.0)], start_timeout_s=3.0)

    assert pool.call("add", 1) == [1, 3]


def test_an_actor_that_ray_started_anew_has_lost_its_rows(new_pool):
    pool, _ = new_pool(actor_options={"max_restarts": 1})
    os.kill(pool.pids[0], signal.SIGKILL)

    errors = []
    for _ in range(2):
        with pytest.raises(WorkerError, match="worker 0 of 2") as failed:
            pool.call("add", 1)
        errors.append(failed.value)

    assert [error.failures[0].kind for error in errors] == ["died", "died"]


def test_a_result_that_cannot_be_pickled_is_told(new_pool):
    pool, _ = new_pool()

    with pytest.raises(WorkerError, match="of type lock, cannot be pickled"):
        pool.call("bad_result")
    with pytest.raises(ArgumentError, match="what 'echo' is called with cannot be sent"):
        pool.call("echo", threading.Lock())

    assert pool.call("add", 1) == [1, 3]


# -------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("make_host", [Counter, HangsInClose])
def test_close_leaves_no_actor(new_pool, make_host):
    pool, _ = new_pool(make_host)
    actors = [psutil.Process(pid) for pid in pool.pids]

    pool.close()
    pool.close()

    assert psutil.wait_procs(actors, PATIENCE_S)[1] == []
    with pytest.raises(ClosedEnvError, match="is closed"):
        pool.send(STEP)


def test_there_are_as_many_actors_as_the_cluster_has_room_for(new_pool):
    assert len(new_pool(actors=None)[0].rows_of) == 2
    assert len(new_pool(actors=None, actor_options={"num_cpus": 0.5})[0].rows_of) == 4


def test_options_that_ray_refuses_are_told(new_pool):
    with pytest.raises(ArgumentError, match=r"Ray refuses the backend_options {'num_cpus': -1}"):
        new_pool(actor_options={"num_cpus": -1})


def test_another_cluster_than_that_of_the_process_is_refused(new_pool):
    with pytest.raises(ArgumentError, match=r"connected to Ray at .* already"):
        new_pool(address="198.51.100.1:6379")
