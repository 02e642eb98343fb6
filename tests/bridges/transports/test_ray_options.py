"""What is said about Ray is checked before anything starts."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from functools import partial

import psutil
import pytest

from envkit import AsyncEnvPool, ParallelEnv, SerialEnv
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingLibraryError,
    OptionError,
    UnsupportedError,
)
from tests.zoo.envs import Count

parallel = partial(ParallelEnv, 2, Count)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (partial(parallel, backend="slurm"), ArgumentError, r"must be 'process' or 'ray'"),
        (
            partial(parallel, backend="ray", backend_options={"cpus": 1}),
            OptionError,
            "takes no keyword 'cpus'. Did you mean 'num_cpus'",
        ),
        (partial(parallel, backend="ray", backend_options=1), ArgumentTypeError, "must be a dict"),
        (partial(parallel, backend_options={"num_cpus": 1}), OptionError, "has no options"),
        (
            partial(parallel, backend="ray", mp_start_method="spawn"),
            OptionError,
            "mp_start_method and memmap are about processes",
        ),
        (
            partial(ParallelEnv, 1, Count, backend="slurm", serial_for_single=True),
            ArgumentError,
            "'slurm'",
        ),
        (
            partial(AsyncEnvPool, [Count], backend="threading", backend_options={"num_cpus": 1}),
            OptionError,
            "backend='threading' has no options",
        ),
        (partial(AsyncEnvPool, [Count], backend="slurm"), UnsupportedError, "'ray'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_is_refused_by_the_constructor(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [partial(parallel, backend="ray"), partial(AsyncEnvPool, [Count], backend="ray")],
    ids=["parallel", "asynchronous"],
)
def test_a_missing_ray_names_the_extra(make, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("envkit_bridges.transports.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(
        MissingLibraryError, match=r"'ray' is not installed.*pip install -e '\.\[ray\]'"
    ):
        make()


def test_one_sub_env_may_be_served_by_this_process():
    env = ParallelEnv(
        1, Count, backend="ray", backend_options={"num_cpus": 1}, serial_for_single=True
    )

    assert isinstance(env, SerialEnv)


SCRIPT = """
import ray
from envkit import ParallelEnv
from tests.zoo.envs import Count

env, other = ParallelEnv(1, Count, backend="ray"), ParallelEnv(1, Count, backend="ray")
assert not ray.is_initialized()
env.start(), other.start()
env.close()
assert ray.is_initialized()
other.close()
assert not ray.is_initialized()
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=10**8)
env.start(), env.close()
assert ray.is_initialized()
"""


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ray_ends_with_the_last_env_if_an_env_began_it(monkeypatch):
    monkeypatch.setenv("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(150 * 10**6))

    subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], check=True, timeout=360)


NOT_CLOSED = """
import ray
from envkit import ParallelEnv
from tests.zoo.envs import Count
from tests.zoo.ray_cluster import begin_ray

begin_ray()
env = ParallelEnv(1, Count, backend="ray")
env.reset()
print(*env.worker_pids)
"""


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_program_that_ends_without_close_leaves_no_actor():
    script = [sys.executable, "-W", "ignore", "-c", NOT_CLOSED]

    ended = subprocess.run(script, check=True, timeout=360, stdout=subprocess.PIPE)

    (pid,) = map(int, ended.stdout.split())
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(20.0)
    assert not psutil.pid_exists(pid)
