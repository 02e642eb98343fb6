"""Scripts that use workers inside processes which multiprocessing has started."""

import os
import subprocess
import sys

import cloudpickle
import pytest

from envkit.transport import by_value

SCRIPT = """
import multiprocessing, pickle, sys
from concurrent.futures import ProcessPoolExecutor
from envkit.transport import Pool, Processes

class Odd(Exception):
    pass

class Host:
    def __init__(self, rows): self.rows = rows
    def describe(self): return self
    def run(self, command, rows): pass
    def call(self, method, *args): return [Odd(arg) for arg in args]
    def close(self): pass

def make(rows):
    return Host(rows)

def work(method):
    pool = Pool(Processes(make, 2, 2, start_method=method), timeout_s=40)
    hosts = pool.start()
    answers = pool.call("anything", 7)
    pool.close()
    assert all(type(host) is Host for host in hosts)
    assert all(type(odd) is Odd and odd.args == (7,) for (odd,) in answers)
    print("fine in", __name__, flush=True)

if __name__ == "__main__":
    how, method = sys.argv[1:]
    if how == "executor":
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            executor.submit(work, method).result(60)
    else:
        process = multiprocessing.get_context(how).Process(target=work, args=(method,), daemon=True)
        process.start()
        process.join(60)
        sys.exit(process.exitcode)
"""


@pytest.mark.parametrize(
    ("how", "method"),
    [("spawn", "forkserver"), ("spawn", "spawn"), ("forkserver", None), ("executor", None)],
)
def test_what_a_script_defines_reaches_workers_of_a_process_that_it_started(tmp_path, how, method):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("sys.argv[1:]", f"{how!r}, {method!r}"))

    done = subprocess.run(
        [sys.executable, "-W", "error", path],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "fine in __mp_main__\n"


def test_cloudpickle_is_left_as_it_was():
    before = cloudpickle.list_registry_pickle_by_value()

    by_value.dumps(lambda: 1)

    assert cloudpickle.list_registry_pickle_by_value() == before
