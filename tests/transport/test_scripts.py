"""Pools of whole scripts: no main guard, interpreters that end or are killed, surroundings."""

import errno
import os
import signal
import subprocess
import sys
import time
import warnings

import psutil
import pytest

from tests.transport.hosts import Counter, process_pool

SCRIPT = """
import ctypes, os, sys, threading, time
print("main runs in", os.getpid(), flush=True)
from envkit.transport import Field, Layout, Pool, Processes

class Host:
    def __init__(self, rows): self.rows = rows
    def describe(self): return type(self).__module__
    def bind(self, arrays, rows): self.value = arrays["value"]
    def run(self, command, rows):
        for row in rows:
            if command == 9: threading.Event().wait()
            self.value[row] += 1
            if command == 8: ctypes.PyDLL(None).sleep(60)  # and keep the interpreter
    def call(self, method, *args): return self
    def close(self): pass

pool = Pool(Processes(lambda rows: Host(rows), 4, 2, start_method={method!r}), timeout_s=20)
assert pool.start() == ["__main__", "__main__"]
value = pool.bind(Layout((Field("value", (), "int64"),), 4))["value"]
pool.send(0, [0, 3])
pool.recv()
assert value.tolist() == [1, 0, 0, 1]
assert isinstance(pool.call("anything")[0], Host)
print("workers", *pool.pids, flush=True)
"""

READY = "print('ready', flush=True)\ntime.sleep(60)\n"
BUSY = {
    "idle": "",
    "in Python": "pool.send(9)\n",
    "in native code": "pool.send(8)\nwhile value.tolist() != [2, 0, 1, 1]: time.sleep(0.01)\n",
}
METHODS = ["forkserver", "spawn", "fork"]


def start_script(tmp_path, body, **options):
    """Run a script that finds modules in ``tmp_path``, as do the processes it starts."""
    path = tmp_path / "script.py"
    path.write_text(body)
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(path)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"},
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


def is_quick(busy: str, method: str) -> bool:
    """Whether a case runs by default: the hardest kind of work with the fork server."""
    return method == "forkserver" and busy == "in native code"


@pytest.mark.parametrize(
    ("busy", "method"),
    [
        pytest.param(busy, method, marks=() if is_quick(busy, method) else pytest.mark.slow)
        for busy in BUSY
        for method in METHODS
    ],
)
def test_no_worker_survives_a_parent_that_is_killed(tmp_path, method, busy):
    body = SCRIPT.format(method=method) + BUSY[busy] + READY
    with start_script(tmp_path, body) as script:
        assert script.stdout is not None
        lines = [script.stdout.readline() for _ in range(3)]
        family = [child.pid for child in psutil.Process(script.pid).children(recursive=True)]

        script.kill()

        assert lines[2] == "ready\n"
        assert set(workers_of(lines[1])) <= set(family)
        assert all_gone(family)


@pytest.mark.slow
def test_no_worker_survives_a_parent_whose_fork_lives_on(tmp_path):
    body = SCRIPT.format(method="forkserver") + (
        "fork = os.fork()\nif not fork: time.sleep(60)\nprint('fork', fork, flush=True)\n"
    )
    with start_script(tmp_path, body + READY) as script:
        assert script.stdout is not None
        lines = [script.stdout.readline() for _ in range(4)]
        (fork,) = workers_of(lines[2])
        family = {child.pid for child in psutil.Process(script.pid).children(recursive=True)}

        script.kill()

        assert fork in family
        assert all_gone(family - {fork})
        os.kill(fork, signal.SIGKILL)


def test_a_fork_of_the_parent_is_refused_and_does_no_harm(tmp_path):
    body = SCRIPT.format(method="forkserver") + (
        "child = os.fork()\n"
        "for use in (lambda: pool.send(0), pool.recv, lambda: pool.call('x')):\n"
        "    if child: break\n"
        "    try: use()\n"
        "    except RuntimeError as error: print(type(error).__name__, error, flush=True)\n"
        "if not child: pool.close(); os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "pool.send(0); pool.recv(); print(value.tolist())\n"
    )

    script = start_script(tmp_path, body)
    output, errors = script.communicate(timeout=30)
    lines = output.splitlines()

    assert errors == ""
    refusal = f"ClosedEnvError this pool of workers belongs to process {script.pid}, "
    assert len([line for line in lines if line.startswith(refusal)]) == 3
    assert lines[-1] == "[2, 1, 1, 2]"


def test_a_fork_that_the_machine_refuses_fails_that_pool_alone(tmp_path):
    (tmp_path / "few_processes.py").write_text(
        "import errno, os, pathlib\n"
        "fork = os.fork\n"
        "def refuse():\n"
        f"    if not pathlib.Path({str(tmp_path / 'full')!r}).exists(): return fork()\n"
        "    raise BlockingIOError(errno.EAGAIN, 'no more')\n"
        "os.fork = refuse\n"
    )
    body = SCRIPT.format(method="forkserver").replace(
        "start_method=", "preload=['few_processes'], start_method="
    )
    body += (
        f"open({str(tmp_path / 'full')!r}, 'w').close()\n"
        "other = Pool(Processes(lambda rows: Host(rows), 2, 2), timeout_s=20)\n"
        "try: other.start()\n"
        "except RuntimeError as error: print(error)\n"
        "pool.send(0); pool.recv(); print(value.tolist())\n"
    )

    output, errors = start_script(tmp_path, body).communicate(timeout=30)

    assert errors == ""
    refusal = "worker 1 of 2, which was to hold row 1, could not be started: "
    assert refusal + os.strerror(errno.EAGAIN) in output
    assert "ulimit -u" in output
    assert output.endswith("[2, 1, 1, 2]\n")


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
    process_pool(Counter, 1, 1).close()  # the fork server runs, with what was valid until here
    monkeypatch.setenv("ENVKIT_TEST_VARIABLE", "late")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    pool = process_pool(Counter, 1, 1, start_method=method)

    pool.start()
    ((variable, path, directory),) = pool.call("surroundings", "ENVKIT_TEST_VARIABLE")
    pool.close()

    assert variable == "late"
    assert path == sys.path
    assert directory == str(tmp_path)


@pytest.mark.parametrize("method", METHODS[:2])
def test_workers_start_where_the_working_directory_was_deleted(monkeypatch, tmp_path, method):
    monkeypatch.syspath_prepend("")
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    pool = process_pool(Counter, 1, 1, start_method=method)

    pool.start()
    answers = pool.call("add", 1)
    pool.close()

    assert answers == [1]


@pytest.mark.parametrize("hidden", [False, True])
def test_warnings_are_hidden_before_the_maker_is_imported(monkeypatch, tmp_path, capfd, hidden):
    name = f"warns_{hidden}"
    (tmp_path / f"{name}.py").write_text(
        "import warnings\nfrom tests.transport.hosts import Counter\n"
        "def make(rows): return Counter(rows)\nwarnings.warn('look here')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = __import__(name).make
    pool = process_pool(make, 1, 1, start_method="spawn", hide_warnings=hidden)

    pool.start()
    pool.close()

    assert ("look here" in capfd.readouterr().err) is not hidden


def test_jax_in_workers_defaults_to_the_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    pool = process_pool(Counter, 1, 1)
    pool.start()
    monkeypatch.setenv("ENVKIT_WORKER_JAX_PLATFORMS", "cuda,cpu")
    other = process_pool(Counter, 1, 1)
    other.start()

    platforms = [p.call("surroundings", "JAX_PLATFORMS")[0][0] for p in (pool, other)]
    pool.close()
    other.close()

    assert platforms == ["cpu", "cuda,cpu"]


def test_modules_to_preload_that_are_missing_or_broken_are_skipped(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(str(tmp_path))

    pool = process_pool(Counter, 2, 1, preload=("no_such_module", "broken_module", "json"))
    began = time.monotonic()
    pool.start()
    pool.close()

    assert time.monotonic() - began < 5.0


def test_a_worker_takes_down_what_it_has_made_and_nothing_of_the_server(tmp_path):
    """Finalizers make folders: those of each worker run at its end, those of the server's modules do not."""
    (tmp_path / "kept.py").write_text(
        "import os, weakref\n"
        "class Kept: pass\n"
        "def keep(name, kept=Kept()):\n"
        f"    weakref.finalize(kept, os.mkdir, os.path.join({str(tmp_path)!r}, name))\n"
        "keep('of the server')\n"
    )
    body = SCRIPT.format(method="forkserver").replace(
        "start_method=", "preload=['kept'], start_method="
    )
    body = body.replace("self.rows = rows", "import kept; kept.keep(f'of {rows}')")
    body += f"pool.close(); print(sorted(n for n in os.listdir({str(tmp_path)!r}) if ' ' in n))\n"

    output, errors = start_script(tmp_path, body).communicate(timeout=30)

    assert errors == ""
    assert output.splitlines()[-1] == "['of range(0, 2)', 'of range(2, 4)']"


@pytest.mark.parametrize("method", METHODS)
def test_pools_work_where_linux_only_calls_are_missing(tmp_path, method):
    (tmp_path / "sitecustomize.py").write_text(  # every interpreter runs it first
        "import os, select, sys\nsys.platform = 'another'\n"
        "del os.memfd_create, os.pidfd_open, os.posix_fallocate, os.eventfd, select.epoll\n"
    )

    script = start_script(tmp_path, SCRIPT.format(method=method) + "pool.close()\n")
    output, errors = script.communicate(timeout=30)

    assert errors == ""
    assert all_gone(workers_of(output.splitlines()[-1]))


def test_importing_the_transport_imports_no_heavy_library():
    program = (
        "import sys, envkit.transport; print({'torch', 'jax', 'gymnasium'} & set(sys.modules))"
    )

    output = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=30)

    assert output == "set()\n"
