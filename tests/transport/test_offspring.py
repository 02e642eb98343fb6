"""Processes that an env starts in its worker: none outlives that worker, however it ends."""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest

from envkit.errors import WorkerError, WorkerTimeoutError
from tests.transport.hosts import HANG, KILL, RAISE_ODD, Counter, process_pool
from tests.transport.test_scripts import METHODS, start_script

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def all_ended(pids, limit_s=5.0):
    """Wait until no process of these runs; one that nobody has waited for yet counts as ended."""
    end = time.monotonic() + limit_s
    for pid in pids:
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        has_ended = select.select([process], [], [], max(end - time.monotonic(), 0))[0]
        os.close(process)
        if not has_ended:
            return False
    return True


class Breeder(Counter):
    """Starts processes and forgets them."""

    def __init__(self, rows):
        super().__init__(rows)
        pipe = subprocess.PIPE
        simple = subprocess.Popen(["sleep", "60"])
        self.stubborn = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=pipe)
        self.stubborn.stdout.readline()  # it is deaf from now on
        self.offspring = [simple.pid, self.stubborn.pid]

    def describe(self):
        return self.offspring

    def grandchild(self):
        """Start a process whose parent is gone."""
        program = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
        return int(subprocess.check_output([sys.executable, "-c", program]))

    def child_to_be_joined(self):
        context = multiprocessing.get_context("fork")
        process = context.Process(target=time.sleep, args=(60,))
        process.start()
        return process.pid

    def grandchildren_of_a_pool(self):
        self.pool = process_pool(Breeder, 1, 1)
        return [*self.pool.start()[0], *self.pool.pids]


class BreederFails(Breeder):
    def __init__(self, rows):
        super().__init__(rows)
        raise OSError(f"after {self.offspring}")


@pytest.fixture
def bred(new_pool):
    """Start a pool of one worker with offspring, and give the pool and the pids of the latter."""

    def start(**options):
        pool, _ = new_pool(Breeder, 2, 1, **options)
        (pids,) = pool.call("describe")
        assert all(psutil.pid_exists(pid) for pid in pids)
        return pool, pids

    return start


@pytest.mark.parametrize("method", METHODS[:2])
def test_what_a_worker_has_started_ends_with_close(bred, method):
    pool, pids = bred(start_method=method)
    pids += pool.call("grandchild")

    pool.close()

    assert all_ended(pids)


@pytest.mark.slow
def test_a_process_that_python_would_join_ends_with_close(bred):
    pool, pids = bred()
    pids += pool.call("child_to_be_joined")

    pool.close()

    assert all_ended(pids)


@pytest.mark.parametrize("method", METHODS[:2])
def test_what_a_worker_has_started_ends_when_the_worker_is_killed(bred, method):
    pool, pids = bred(start_method=method)

    pool.send(KILL)
    with pytest.raises(WorkerError, match="SIGKILL"):
        pool.recv()

    assert all_ended(pids)


def test_what_a_worker_has_started_ends_at_the_deadline(bred):
    pool, pids = bred()
    pool.timeout_s = 0.5

    pool.send(HANG)
    with pytest.raises(WorkerTimeoutError):
        pool.recv()

    assert all_ended(pids)


def test_what_a_worker_has_started_goes_on_when_a_row_raises(bred):
    pool, pids = bred()

    pool.send(RAISE_ODD)
    with pytest.raises(WorkerError):
        pool.recv()

    assert not any(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids)


def test_what_a_worker_has_started_ends_when_it_cannot_be_built():
    pool = process_pool(BreederFails, 1, 1, timeout_s=20)

    with pytest.raises(WorkerError) as caught:
        pool.start()

    pids = [int(pid) for pid in caught.value.failures[0].message[7:-1].split(",")]
    assert len(pids) == 2 and all_ended(pids)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_what_workers_of_a_worker_have_started_ends_too(bred, end):
    pool, _ = bred()
    (pids,) = pool.call("grandchildren_of_a_pool")

    if end == "kill":
        os.kill(pool.pids[0], signal.SIGKILL)
    pool.close()

    assert len(pids) == 3 and all_ended(pids)


SCRIPT = """
import os, time
from tests.transport.hosts import process_pool
from tests.transport.test_offspring import Breeder
pool = process_pool(Breeder, 1, 1, timeout_s=20)
print(os.getpid(), *pool.start()[0], *pool.pids, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_what_workers_have_started_ends_with_the_group_of_the_parent(tmp_path, number):
    with start_script(tmp_path, SCRIPT, start_new_session=True) as script:
        assert script.stdout is not None
        pids = [int(pid) for pid in script.stdout.readline().split()]

        os.killpg(script.pid, number)  # as a job scheduler or a closing terminal would

        assert len(pids) == 4
        script.wait(5)
        assert all_ended(pids[1:])


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_is_out_of_reach_of_the_terminal(tmp_path, method):
    body = SCRIPT.replace("1, 1,", f"1, 1, start_method={method!r},")
    with start_script(tmp_path, body) as script:
        assert script.stdout is not None
        parent, *_, worker = (int(pid) for pid in script.stdout.readline().split())

        sessions = os.getsid(parent), os.getsid(worker)
        script.terminate()

        assert sessions == (os.getsid(0), worker)
