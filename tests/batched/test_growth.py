"""Nothing grows while an env steps: memory, processes, descriptors, of the parent and its workers."""

from __future__ import annotations

import gc
import os
from functools import partial

import psutil
import pytest

from envkit import GymEnv, ParallelEnv
from tests.zoo.envs import Count

MIB = 2**20
ROWS, PROCESSES = 4, 2
ROOM_MIB = 5


def counts(env: ParallelEnv) -> list[tuple[int, int]]:
    """Give descriptors and threads of this process and of each worker, and the children."""
    processes = [psutil.Process(), *map(psutil.Process, env.worker_pids)]
    children = len(processes[0].children(recursive=True))
    return [(children, 0), *((one.num_fds(), one.num_threads()) for one in processes)]


def resident_mib(env: ParallelEnv) -> list[float]:
    gc.collect()
    pids = [os.getpid(), *env.worker_pids]
    return [psutil.Process(pid).memory_info().rss / MIB for pid in pids]


def drive(env: ParallelEnv, steps: int) -> None:
    """Step half of the way in one recorded rollout after another, and half one by one."""
    for _ in range(steps // 200):
        env.rollout(100, break_when_any_done=False)
        td = env.reset()
        for _ in range(100):
            _, td = env.step_and_maybe_reset(env.rand_action(td))


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "use_buffers", "steps"),
    [
        (partial(GymEnv, "CartPole-v1"), True, 10_000),
        (partial(Count, 30), True, 10_000),
        (partial(Count, 30), False, 1_000),
    ],
    ids=["gym rows", "rows", "tds"],
)
def test_ten_thousand_steps_leave_everything_as_large_as_it_was(make, use_buffers, steps):
    env = ParallelEnv(ROWS, make, num_processes=PROCESSES, use_buffers=use_buffers)
    env.set_seed(0)
    drive(env, 2_000 if use_buffers else 400)
    before, memory = counts(env), resident_mib(env)

    drive(env, steps)
    after, memory_after = counts(env), resident_mib(env)
    env.close()

    assert after == before
    grown = [now - then for now, then in zip(memory_after, memory, strict=True)]
    assert max(grown) < ROOM_MIB, f"grown by {grown} MiB (this process, then its workers)"
