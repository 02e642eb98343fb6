"""Every public member of TorchRL's pools is provided, or is out for a reason, and does what it does there."""

from __future__ import annotations

import gc
import multiprocessing
from functools import partial

import pytest
import torch
import torchrl.envs
import torchrl.envs.async_envs

import envkit
from tests.reference.compare import check_same, check_works_alike, names_out, public_members

pytestmark = pytest.mark.filterwarnings(  # TorchRL's own, of its defaults and its specs
    "ignore::FutureWarning:torchrl", "ignore::UserWarning:torchrl", "ignore::DeprecationWarning"
)

KINDS = {
    "SerialEnv": {},
    "ParallelEnv": {},
    "AsyncEnvPool": {"backend": "threading"},
    "AsyncEnvPool of processes": {"backend": "multiprocessing"},
}


def make(lib):
    return partial(lib.GymEnv, "Pendulum-v1")


def pool(lib, kind: str = "SerialEnv", **options):
    name = kind.split()[0]
    options = {**KINDS[kind], **options}
    if name == "AsyncEnvPool":
        return getattr(lib, name)([make(lib)] * 2, **options)
    return getattr(lib, name)(2, make(lib), **options)


def closed(env, result):
    """Close an env; TorchRL's asynchronous pools say that they are closed while they run."""
    env.close(raise_if_closed=False)
    return result


@pytest.fixture(autouse=True)
def no_pool_is_left() -> None:
    """TorchRL's pools shut down when they are collected, in whichever thread that is, and wait for their workers there.

    Those that a refused program has left would wait for a minute.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    gc.collect()


def marked(name: str, slow: set[str]):
    """Mark what starts processes of TorchRL once more: each of them imports torch and TorchRL."""
    return pytest.param(name, marks=pytest.mark.slow if name in slow else ())


IN_PROCESSES = {"ParallelEnv", "AsyncEnvPool of processes"}


CLASSES = (
    "SerialEnv",
    "ParallelEnv",
    "ThreadingAsyncEnvPool",
    "ProcessorAsyncEnvPool",
)


def missing_of(name: str) -> set[str]:
    theirs = public_members(getattr(torchrl.envs, name), "torchrl")
    return set(
        theirs - public_members(getattr(envkit, name), "envkit") - set(dir(torch.nn.Module()))
    )


def test_every_member_is_provided_or_in_the_table():
    missing = {name: missing_of(name) for name in CLASSES}

    assert set().union(*missing.values()) - names_out("environments") == names_out("pools")
    assert all(len(names) < 25 for names in missing.values())


# ------------------------------------------------------------------------------- a program of each


def configured(lib, kind: str = "ParallelEnv", **options):
    env = pool(lib, kind)
    told = env.configure_parallel(**options) is env
    named = {name: getattr(env, name) for name in options if name in ("num_threads", "daemon")}
    return closed(env, (told, named, env.rollout(2).shape))


def configured_late(lib):
    env = pool(lib)
    env.reset()
    try:
        env.configure_parallel(num_threads=2)
    finally:
        env.close()


def keywords(lib, kind: str = "SerialEnv"):
    env = pool(lib, kind, create_env_kwargs=[{"frame_skip": 1}, {"frame_skip": 2}])
    return closed(env, env.create_env_kwargs)


def alike(lib, kind: str = "SerialEnv", **options):
    env = pool(lib, kind, **options)
    return closed(env, env.rollout(3).shape)


def exchanged(env) -> tuple:
    return env.resolved_exchange, sorted(map(str, env.exchange_keys)), env.exchange


def chosen(lib):
    env = pool(lib, "AsyncEnvPool of processes", exchange="auto")
    return closed(env, exchanged(env))


def counted(lib, **options):
    """Read how data is exchanged, and the counts after one batch of two steps and one that could have had two."""
    env = pool(lib, "AsyncEnvPool of processes", **options)
    root = env.reset()
    env.stats(reset=True)
    env.async_step_send(env.rand_action(root))
    env.async_step_recv(min_get=2)
    env.async_step_send(root[:1].set("action", torch.zeros(1, 1)))
    env.async_step_recv(min_get=1, max_get=2)
    told, after = env.stats(reset=True), env.stats()
    names = ("batches", "items", "avg_batch_size", "batch_fill_ratio", "partial_batch_fraction")
    found = {name: told[name] for name in names} if told else told
    return closed(env, (exchanged(env), found, after.get("items")))


def in_threads(lib):
    env = pool(lib, "AsyncEnvPool", exchange="auto")
    return closed(env, (env.resolved_exchange, env.exchange_keys, env.stats(), env.envs_per_worker))


def attributes_of(lib, kind: str, *names: str):
    env = pool(lib, kind)
    return closed(env, {name: getattr(env, name) for name in names})


PROGRAMS = {
    "configure_parallel": partial(configured, num_threads=2, daemon=True, use_buffers=False),
    "configure_parallel of memory and how processes start": partial(
        configured, shared_memory=False, memmap=True, mp_start_method="spawn"
    ),
    "configure_parallel, both memories": partial(configured, memmap=True, use_buffers=True),
    "configure_parallel of a pool that runs": configured_late,
    "create_env_kwargs": keywords,
    "create_env_kwargs of processes": partial(keywords, kind="ParallelEnv"),
    "create_env_kwargs of threads": partial(keywords, kind="AsyncEnvPool"),
    "attributes": lambda lib: attributes_of(
        lib,
        "ParallelEnv",
        *("pin_memory", "allow_step_when_done", "consolidate", "daemon", "shutdown_timeout"),
        *("num_sub_threads", "serial_for_single", "run_type_checks", "policy_proof"),
    ),
    "attributes of an asynchronous pool": lambda lib: attributes_of(
        lib, "AsyncEnvPool", "backend", "stack", "num_envs", "min_get", "worker_affinity"
    ),
    "run_type_checks": lambda lib: pool(lib).run_type_checks,
    "makers": lambda lib: closed(e := pool(lib, "AsyncEnvPool"), len(e.env_makers)),
    "allow_step_when_done": partial(alike, allow_step_when_done=True),
    "pin_memory": partial(alike, pin_memory=True),
    "consolidate, daemon and shutdown_timeout": partial(
        alike, "ParallelEnv", consolidate=False, daemon=True, shutdown_timeout=2.5
    ),
    "metadata_from_workers of no workers": partial(alike, metadata_from_workers=True),
    "metadata_from_workers": partial(
        alike, "ParallelEnv", metadata_from_workers=True, use_buffers=False
    ),
    "exchange in memory, and stats": partial(counted, exchange="shm"),
    "exchange by messages, and stats": partial(counted, exchange="queue"),
    "exchange of the library's choice": chosen,
    "exchange of no such name": partial(alike, "AsyncEnvPool", exchange="pigeons"),
    "exchange of threads": in_threads,
    "exchange in memory of threads": partial(alike, "AsyncEnvPool", exchange="shm"),
    "envs_per_worker of processes": partial(
        alike, "AsyncEnvPool of processes", envs_per_worker=2, exchange="queue"
    ),
    "envs_per_worker of threads": partial(alike, "AsyncEnvPool", envs_per_worker=2),
    "envs_per_worker of 0": partial(alike, "AsyncEnvPool", envs_per_worker=0),
    "worker_affinity of threads": partial(alike, "AsyncEnvPool", worker_affinity=[[0], [0]]),
    "worker_affinity of too few": partial(
        alike, "AsyncEnvPool of processes", worker_affinity=[[0]]
    ),
    "worker_affinity of no core": partial(
        alike, "AsyncEnvPool of processes", worker_affinity=[[0], []]
    ),
    "worker_affinity of a core that is not there": partial(
        alike, "AsyncEnvPool of processes", worker_affinity=[[0], [9999]]
    ),
    "worker_affinity of text": partial(
        alike, "AsyncEnvPool of processes", worker_affinity=[["0"], [0]]
    ),
}


USUAL = {"configure_parallel", "exchange in memory, and stats", "attributes"}


FURTHER = {  # options beside those of the usual programs
    "configure_parallel of memory and how processes start",
    "configure_parallel, both memories",
    "exchange of the library's choice",
}


@pytest.mark.parametrize("name", [marked(name, FURTHER) for name in PROGRAMS])
def test_a_pool_does_what_torchrls_does(name):
    (check_works_alike if name in USUAL else check_same)(PROGRAMS[name])
