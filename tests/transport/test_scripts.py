"""Pools of whole scripts: no main guard, interpreters that end or are killed, surroundings."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from envkit.transport import ProcessPool
from tests.transport.hosts import Counter

SCRIPT = """
import os, sys, threading, time
print("main runs in", os.getpid(), flush=True)
from envkit.transport import Field, Layout, ProcessPool

class Host:
    def __init__(self, rows): self.rows = rows
    def describe(self): return type(self).__module__
    def bind(self, arrays, rows): self.value = arrays["value"]
    def run(self, command, rows):
        for row in rows:
            if command == 9: threading.Event().wait()
            self.value[row] += 1
    def call(self, method, *args): return self
    def close(self): pass

pool = ProcessPool(lambda rows: Host(rows), 4, 2, start_method={method!r}, timeout_s=20)
assert pool.start() == ["__main__", "__main__"]
value = pool.bind(Layout((Field("value", (), "int64"),), 4))["value"]
pool.send(0, [0, 3])
pool.recv()
assert value.tolist() == [1, 0, 0, 1]
assert isinstance(pool.call("anything")[0], Host)
print("workers", *pool.pids, flush=True)
"""

METHODS = ["forkserver", "spawn", "fork"]


def start_script(tmp_path, body, **options):
    path = tmp_path / "script.py"
    path.write_text(body)
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def workers_of(line):
    return [int(pid) for pid in line.split()[1:]]


def all_gone(pids, timeout_s=5.0):
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(processes, timeout_s)[1]


@pytest.mark.parametrize("method", METHODS)
def test_a_script_without_main_guard_runs_once_and_may_end_without_close(tmp_path, method):
    script = start_script(tmp_path, SCRIPT.format(method=method))

    output, errors = script.communicate(timeout=30)

    assert script.returncode == 0
    assert errors == ""
    assert output.count("main runs in") == 1
    assert all_gone(workers_of(output.splitlines()[-1]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("busy", [False, True])
def test_no_worker_survives_a_parent_that_is_killed(tmp_path, method, busy):
    ending = "pool.send(9)\n" if busy else ""
    body = SCRIPT.format(method=method) + ending + "print('ready', flush=True)\ntime.sleep(60)\n"
    with start_script(tmp_path, body) as script:
        assert script.stdout is not None
        lines = [script.stdout.readline() for _ in range(3)]
        family = [child.pid for child in psutil.Process(script.pid).children(recursive=True)]

        script.kill()

        assert lines[2] == "ready\n"
        assert set(workers_of(lines[1])) <= set(family)
        assert all_gone(family)


def test_ctrl_c_interrupts_the_parent_and_leaves_the_workers_usable(tmp_path):
    body = SCRIPT.format(method="forkserver") + (
        "try:\n    print('ready', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    pool.send(0); pool.recv(); print(value.tolist())\n"
    )
    with start_script(tmp_path, body, process_group=0) as script:
        assert script.stdout is not None
        while script.stdout.readline() != "ready\n":
            assert script.poll() is None

        os.killpg(script.pid, signal.SIGINT)
        output, errors = script.communicate(timeout=30)

    assert output == "[2, 1, 1, 2]\n"
    assert errors == ""


def test_the_start_method_of_the_caller_stays_unset(tmp_path):
    body = SCRIPT.format(method=None) + (
        "import multiprocessing\nmultiprocessing.set_start_method('spawn')\nprint('free')\n"
    )

    output, errors = start_script(tmp_path, body).communicate(timeout=30)

    assert output.endswith("free\n")
    assert errors == ""


@pytest.mark.parametrize("method", METHODS[:2])
def test_workers_see_the_surroundings_of_the_time_they_start(monkeypatch, tmp_path, method):
    ProcessPool(Counter, 1, 1).close()  # the fork server runs, with what was valid until here
    monkeypatch.setenv("ENVKIT_TEST_VARIABLE", "late")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    pool = ProcessPool(Counter, 1, 1, start_method=method)

    pool.start()
    ((variable, path, directory),) = pool.call("surroundings", "ENVKIT_TEST_VARIABLE")
    pool.close()

    assert variable == "late"
    assert path == sys.path
    assert directory == str(tmp_path)


def test_jax_in_workers_defaults_to_the_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    pool = ProcessPool(Counter, 1, 1)
    pool.start()
    monkeypatch.setenv("ENVKIT_WORKER_JAX_PLATFORMS", "cuda,cpu")
    other = ProcessPool(Counter, 1, 1)
    other.start()

    platforms = [p.call("surroundings", "JAX_PLATFORMS")[0][0] for p in (pool, other)]
    pool.close()
    other.close()

    assert platforms == ["cpu", "cuda,cpu"]


def test_modules_to_preload_that_are_missing_or_broken_are_skipped(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(str(tmp_path))

    pool = ProcessPool(Counter, 2, 1, preload=("no_such_module", "broken_module", "json"))
    began = time.monotonic()
    pool.start()
    pool.close()

    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("method", METHODS)
def test_pools_work_where_linux_only_calls_are_missing(tmp_path, method):
    body = (
        "import os, select\ndel os.memfd_create, os.pidfd_open, os.posix_fallocate, select.epoll\n"
    )

    script = start_script(tmp_path, body + SCRIPT.format(method=method) + "pool.close()\n")
    output, errors = script.communicate(timeout=30)

    assert errors == ""
    assert all_gone(workers_of(output.splitlines()[-1]))


def test_importing_the_transport_imports_no_heavy_library():
    program = (
        "import sys, envkit.transport; print({'torch', 'jax', 'gymnasium'} & set(sys.modules))"
    )

    output = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=30)

    assert output == "set()\n"
