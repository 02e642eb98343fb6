"""Batched envs on Ray actors give the data of worker processes, and lose what those lose.

`tests/test_contract.py` and `tests/test_programs.py` run their kinds on Ray too.
"""

from __future__ import annotations

import os
import pickle
import signal
from functools import partial

import psutil
import pytest
import torch
from tensordict import TensorDictBase

from envkit import (
    AsyncEnvPool,
    GymEnv,
    ParallelEnv,
    RayAsyncEnvPool,
    SerialEnv,
    TransformedEnv,
    VecNormV2,
    evaluate,
)
from envkit.env.seeding import restart_seed
from envkit.errors import WorkerError, WorkerTimeoutError
from tests.zoo.envs import Chaos
from tests.zoo.ray_cluster import begin_ray, on_ray

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SEED, STEPS = 3, 12
make_cartpole = partial(GymEnv, "CartPole-v1", max_episode_steps=5)
with_and_without_buffers = pytest.mark.parametrize(
    "use_buffers", [True, False], ids=["buffers", "tds"]
)
in_one_way = pytest.mark.parametrize(
    "use_buffers", [True, pytest.param(False, marks=pytest.mark.sweep)], ids=["buffers", "tds"]
)


def faults(*names: str) -> torch.Tensor:
    """Give the actions that make the rows of `Chaos` go wrong."""
    return torch.tensor([[Chaos.FAULTS.index(name)] for name in names])


def equal(left: TensorDictBase, right: TensorDictBase) -> bool:
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    return all(torch.equal(left[key], right[key]) for key in left.keys(True, True))


def play(env) -> list[TensorDictBase]:
    """Roll out, step a part, reset a part."""
    env.set_seed(SEED)
    torch.manual_seed(SEED)
    data = [env.rollout(STEPS, break_when_any_done=False)]
    td = env.rand_action(env.reset())
    data.append(env.step(td.set("_step", torch.tensor([True, False, True]))).clone())
    td = env.step_mdp(data[-1])
    data.append(env.reset(td.set("_reset", torch.tensor([[False], [True], [False]]))).clone())
    data.append(env.step_and_maybe_reset(env.rand_action(td))[1])
    return data


# ------------------------------------------------------------------------------------ the same data


def test_rows_that_are_lost_are_the_same(opened):
    def act(td):
        falls = (td["count"] == 2) & (td["draw"] > 0.5)
        return td.set("action", torch.where(falls, Chaos.FAULTS.index("raise"), 0))

    options = {"num_processes": 2, "on_worker_failure": "restart", "max_restarts": 40}
    runs = []
    for batched in (ParallelEnv, on_ray):
        env = opened(batched(3, partial(Chaos, 4), **options))
        env.set_seed(SEED)
        runs.append(env.rollout(70, act, break_when_any_done=False))

    assert runs[0]["next", "truncated"].any()
    assert equal(*runs)


@pytest.mark.parametrize("make", [make_cartpole, partial(Chaos, 4)], ids=["gym", "custom"])
@with_and_without_buffers
def test_the_batches_are_those_of_processes(opened, make, use_buffers):
    def act(td):  # Chaos does what its actions say
        return td.set("action", torch.zeros(3, 1, dtype=torch.int64))

    policy = act if make is not make_cartpole else None
    runs = []
    for batched in (ParallelEnv, on_ray):
        env = opened(batched(3, make, num_processes=2, use_buffers=use_buffers))
        env.set_seed(SEED)
        torch.manual_seed(SEED)
        runs.append([env.rollout(STEPS, policy, break_when_any_done=False)])
        runs[-1] += play(env) if policy is None else []

    assert all(equal(ours, theirs) for ours, theirs in zip(*runs, strict=True))


def test_an_asynchronous_pool_gives_the_data_of_one_in_threads(opened):
    begin_ray()
    runs = []
    for backend in ("threading", "ray"):
        pool = opened(AsyncEnvPool([make_cartpole] * 2, backend=backend))
        pool.set_seed(SEED)
        torch.manual_seed(SEED)
        td = pool.reset()
        for _ in range(STEPS):
            pool.async_step_and_maybe_reset_send(pool.rand_action(td))
            data, td = pool.async_step_and_maybe_reset_recv(min_get=2)
            runs.append(data.exclude("env_index"))

    assert isinstance(pool, RayAsyncEnvPool)
    assert all(equal(runs[step], runs[step + STEPS]) for step in range(STEPS))


def test_attributes_and_states_reach_the_actors(opened):
    env = opened(on_ray(2, Chaos, num_processes=2))
    env.set_seed(SEED)
    env.reset()

    assert list(env.n) == [7, 7]
    assert env.visit() == [0, 0]
    assert len(set(env.worker_pids)) == 2
    env.load_state_dict(env.state_dict())


def test_an_env_starts_again_after_close_and_after_a_journey_as_a_pickle(opened):
    env = opened(on_ray(2, Chaos, backend_options={"num_cpus": 0.5}))
    env.set_seed(SEED)
    first = env.reset()
    env.close()
    copy = opened(pickle.loads(pickle.dumps(env)))

    assert equal(env.reset(), first)
    assert copy.backend == "ray" and copy.backend_options == {"num_cpus": 0.5}
    assert equal(copy.reset(), first)
    assert repr(copy).endswith("backend='ray')")


# ------------------------------------------------------------------------------------------ faults


@in_one_way
def test_an_env_that_raises_is_named_with_its_seed(opened, use_buffers):
    env = opened(on_ray(3, Chaos, num_processes=2, use_buffers=use_buffers))
    env.set_seed(SEED)

    td = env.reset().set("action", faults("none", "none", "raise"))
    with pytest.raises(WorkerError, match=r"ValueError in row 2 \(seed \d+\) during 'step'"):
        env.step(td)

    assert torch.equal(env.reset()["count"], torch.zeros(3, 1, dtype=torch.int64))


def test_a_killed_actor_is_an_error_and_the_env_opens_again(opened):
    env = opened(on_ray(2, Chaos, num_processes=2))
    td = env.reset()

    with pytest.raises(
        WorkerError, match="worker 1 of 2, which held row 1, was lost during 'step'"
    ):
        env.step(td.set("action", faults("none", "kill")))

    env.close()
    assert env.reset()["count"].tolist() == [[0], [0]]


def test_an_env_that_hangs_meets_the_deadline(opened):
    env = opened(on_ray(2, Chaos, num_processes=2))
    td = env.reset().set("action", faults("none", "hang"))
    env.timeout = 0.5

    with pytest.raises(WorkerTimeoutError, match=r"'step' within 0.5 s \(timeout\)"):
        env.step(td)


@pytest.mark.parametrize("fault", [pytest.param("raise", marks=pytest.mark.sweep), "kill"])
@in_one_way
def test_with_restart_a_lost_row_is_truncated_and_no_other_row_notices(opened, fault, use_buffers):
    options = {"on_worker_failure": "restart", "num_processes": 2, "use_buffers": use_buffers}
    env, calm = opened(on_ray(2, Chaos, **options)), SerialEnv(2, Chaos)
    roots = []
    for each in (env, calm):
        each.set_seed(SEED)
        roots.append(each.reset())
    data = []

    for step in range(4):
        name = fault if step == 1 else "none"
        both = zip((env, calm), roots, (faults("none", name), faults("none", "none")), strict=True)
        moved = [each.step_and_maybe_reset(td.set("action", acts)) for each, td, acts in both]
        roots = [root for _, root in moved]
        data.append([done for done, _ in moved])

    for ours, theirs in data:
        assert equal(ours[0].exclude("action"), theirs[0].exclude("action"))
    lost = data[1][0][1]["next"]
    assert lost["truncated"].item() and lost["count"].item() == 1
    fresh = torch.Generator().manual_seed(restart_seed(SEED, 1, 1))
    assert data[2][0][1]["draw"].item() == torch.rand(1, generator=fresh).item()
    assert data[3][0][1]["next", "count"].item() == 2


def test_a_lost_row_keeps_what_was_known_of_it_until_it_is_told(opened):
    """A worker's successor has arrays of its own; they begin as ours are."""
    options = {"on_worker_failure": "restart", "num_processes": 1}
    env = opened(on_ray(2, Chaos, **options))
    env.set_seed(SEED)
    td = env.step_mdp(env.step(env.reset().set("action", faults("none", "none"))))

    os.kill(env.worker_pids[0], signal.SIGKILL)
    root = env.reset(td.set("_reset", torch.tensor([[True], [False]])))

    assert root["count"].tolist() == [[0], [1]]
    following = env.step(root.set("action", faults("none", "none")))["next"]
    assert following["truncated"].flatten().tolist() == [False, True]
    assert following["count"].tolist() == [[1], [1]]


def test_close_leaves_no_actor(opened):
    env = opened(on_ray(2, Chaos, num_processes=2))
    actors = [psutil.Process(pid) for pid in env.worker_pids]

    env.close()

    assert psutil.wait_procs(actors, 20.0)[1] == []


# ----------------------------------------------------------------------- an env that a policy is judged in


def test_an_evaluation_moves_nothing_in_actors(opened):
    def make():
        base = GymEnv("Pendulum-v1", max_episode_steps=10)
        return TransformedEnv(base, VecNormV2(in_keys=["observation"]))

    envs = [opened(on_ray(2, make, num_processes=2)) for _ in range(2)]
    runs = []
    for judged, env in enumerate(envs):
        env.record_for_resume()
        env.set_seed(SEED)
        env.rollout(5, break_when_any_done=False)
        root = env.reset()
        if judged:
            evaluate(env, env.rand_action, 4, seed=9, max_steps=6)
        action = torch.full((2, 1), 0.5)
        runs.append([root, env.step(root.clone().set("action", action)), env.reset()])

    assert all(equal(left, right) for left, right in zip(*runs, strict=True))
