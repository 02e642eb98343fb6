"""Workers that are asked one by one, in threads and in processes."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from envkit.errors import WorkerError, WorkerTimeoutError
from envkit.transport import Threads
from envkit.transport.in_process import Arrivals
from tests.transport.hosts import (
    COMMANDS,
    HANG,
    KILL,
    RAISE_ODD,
    STEP,
    Counter,
    layout,
    process_pool,
    thread_pool,
)

KINDS = {"threads": thread_pool, "processes": process_pool}
SOON_S, PATIENCE_S = 0.2, 20.0


class Waits(Counter):
    """A host that answers when a file is there."""

    def wait_for(self, path):
        while not path.exists():
            time.sleep(0.001)
        return self.rows.start


class Shows(Counter):
    """A host that shows its rows."""

    def values(self):
        return self.value[self.rows.start : self.rows.stop].tolist()


@pytest.fixture(params=KINDS)
def new_pool(request):
    with ExitStack() as stack:

        def start(make_host=Counter, rows=4, workers=4, **options):
            options = {"commands": COMMANDS, "timeout_s": PATIENCE_S, **options}
            pool = KINDS[request.param](make_host, rows, workers, **options)
            stack.callback(pool.close)
            pool.start()
            return pool, pool.bind(layout(rows))

        yield start


def test_jobs_are_done_by_their_workers_alone(new_pool):
    pool, arrays = new_pool()

    jobs = [pool.begin(1, STEP), pool.begin(3, STEP)]
    done = pool.wait(jobs, 2, PATIENCE_S)

    assert set(done) == set(jobs)
    assert [pool.outcome(job) for job in jobs] == [None, None]
    assert arrays["value"][:, 0].tolist() == [0, 1, 0, 1]


def test_a_job_moves_the_rows_that_it_is_for(new_pool):
    pool, arrays = new_pool(rows=6, workers=2)

    jobs = [pool.begin(0, STEP, [0, 2]), pool.begin(1, STEP, [4])]
    pool.wait(jobs, 2, PATIENCE_S)
    pool.wait([pool.begin(1, STEP)], 1, PATIENCE_S)

    assert arrays["value"][:, 0].tolist() == [1, 0, 1, 1, 2, 1]


def test_what_is_laid_for_a_worker_is_in_its_rows_at_its_next_call(new_pool):
    pool, arrays = new_pool(Shows, rows=4, workers=2)

    pool.lay(1, "value", np.array([1, 2, 3], np.float32))
    jobs = [pool.begin_call(worker, "values") for worker in range(2)]

    assert [pool.outcome(job) for job in jobs] == [[[0, 0, 0]] * 2, [[1, 2, 3]] * 2]
    assert arrays["value"].tolist() == [[0, 0, 0]] * 2 + [[1, 2, 3]] * 2


def test_what_is_ready_is_given_while_another_works(new_pool, tmp_path):
    pool, _ = new_pool(Waits)
    slow = pool.begin_call(0, "wait_for", tmp_path / "go")
    fast = pool.begin_call(2, "add", 5)

    assert pool.wait([slow, fast], 1, PATIENCE_S) == [fast]
    assert pool.outcome(fast) == 7
    assert pool.wait([slow], 1, SOON_S) == []

    again = pool.begin_call(2, "add", 6)
    assert pool.wait([slow, again], 1, PATIENCE_S) == [again]
    (tmp_path / "go").touch()
    assert pool.wait([slow], 1, PATIENCE_S) == [slow]
    assert pool.outcome(slow) == 0


def test_all_that_are_ready_are_given(new_pool):
    pool, _ = new_pool()
    jobs = [pool.begin_call(worker, "add", 1) for worker in range(4)]

    assert set(pool.wait(jobs, 4, PATIENCE_S)) == set(jobs)
    assert set(pool.wait(jobs, 1, PATIENCE_S)) == set(jobs)


def test_a_job_that_raises_is_told_by_its_outcome_and_frees_its_worker(new_pool):
    pool, arrays = new_pool()
    jobs = [pool.begin(0, RAISE_ODD), pool.begin(1, RAISE_ODD)]

    pool.wait(jobs, 2, PATIENCE_S)

    assert pool.outcome(jobs[0]) is None
    with pytest.raises(WorkerError, match="ArithmeticError in row 1 during 'raise'"):
        pool.outcome(jobs[1])
    job = pool.begin(1, STEP)
    assert pool.wait([job], 1, PATIENCE_S) == [job]
    assert arrays["value"][:2, 0].tolist() == [1, 1]


def test_a_job_that_hangs_meets_its_own_deadline_alone(new_pool, tmp_path):
    pool, arrays = new_pool(Waits)
    slow = pool.begin_call(0, "wait_for", tmp_path / "go")
    pool.timeout_s = SOON_S
    stuck = pool.begin(1, HANG)
    pool.timeout_s = PATIENCE_S

    assert pool.wait([slow, stuck], 1, PATIENCE_S) == [stuck]
    with pytest.raises(WorkerTimeoutError, match=r"'hang' within 0.2 s \(timeout\)"):
        pool.outcome(stuck)

    (tmp_path / "go").touch()
    assert pool.wait([slow], 1, PATIENCE_S) == [slow]
    if isinstance(pool.backend, Threads):  # it cannot be ended, and would write into the same rows
        with pytest.raises(WorkerTimeoutError):
            pool.restart_worker(1)
        return
    pool.restart_worker(1)
    job = pool.begin(1, STEP)
    pool.wait([job], 1, PATIENCE_S)
    assert pool.outcome(job) is None
    assert arrays["value"][1, 0] == 1


def test_rounds_come_after_jobs_and_jobs_after_rounds(new_pool):
    pool, arrays = new_pool()

    pool.send(STEP)
    pool.recv()
    job = pool.begin(2, STEP)
    pool.wait([job], 1, PATIENCE_S)
    pool.send(STEP, [0, 2])
    pool.recv()

    assert arrays["value"][:, 0].tolist() == [2, 1, 3, 1]


def test_a_killed_worker_fails_its_job_and_every_later_one_until_it_is_replaced():
    pool = process_pool(Counter, 2, 2, commands=COMMANDS, timeout_s=PATIENCE_S)
    try:
        pool.start()
        pool.bind(layout(2))
        killed, other = pool.begin(1, KILL), pool.begin(0, STEP)

        assert set(pool.wait([killed, other], 2, PATIENCE_S)) == {killed, other}
        assert pool.outcome(other) is None
        for job in (killed, pool.begin(1, STEP)):
            pool.wait([job], 1, PATIENCE_S)
            with pytest.raises(WorkerError, match="was ended by signal 9"):
                pool.outcome(job)
        pool.restart_worker(1)
        job = pool.begin(1, STEP)
        pool.wait([job], 1, PATIENCE_S)
        assert pool.outcome(job) is None
    finally:
        pool.close()


def test_hosts_are_made_one_after_the_other_in_threads():
    class Alone(Counter):
        making = 0

        def __init__(self, rows):
            Alone.making += 1
            assert Alone.making == 1
            time.sleep(0.01)  # gives the others the chance
            Alone.making -= 1
            super().__init__(rows)

    pool = thread_pool(Alone, 4, 4, commands=COMMANDS)
    try:
        assert len(pool.start()) == 4
    finally:
        pool.close()


def test_closing_leaves_no_thread_behind():
    before = set(threading.enumerate())
    pool = thread_pool(Counter, 3, 3, commands=COMMANDS)
    pool.start()
    pool.bind(layout(3))
    pool.begin(0, STEP)

    pool.close()

    assert set(threading.enumerate()) == before


def test_who_waits_for_two_answers_is_woken_by_the_second_alone():
    class Counted(Arrivals):
        woken = 0

        def notify_all(self):
            self.woken += 1
            super().notify_all()

    answers = Counted()
    with answers:
        answers.wait_for_some(2, 0.0)

        answers.came()
        after_one = answers.woken
        answers.came()

    assert (after_one, answers.woken) == (0, 1)


def test_ctrl_c_before_the_lock_is_taken_back_is_told_as_such():
    answers = Arrivals()

    def interrupted():
        with answers:
            answers.release()  # as a wait does, whose end a second interrupt may cut
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(RuntimeError), answers:
        answers.release()

    with answers:
        answers.came()
