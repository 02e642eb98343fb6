"""Rows of a batch never share an env or a simulator."""

from __future__ import annotations

from functools import partial

import gymnasium
import pytest

from envkit import (
    AsyncEnvPool,
    GymEnv,
    GymWrapper,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from envkit.errors import SharedEnvError, WorkerError
from tests.zoo.walkers import Pendulum

POOLS = {
    "serial": lambda make: SerialEnv(2, make),
    "parallel": lambda make: ParallelEnv(2, make, num_processes=1),
    "threads": lambda make: AsyncEnvPool([make, make], backend="threading"),
}
cartpole = partial(GymEnv, "CartPole-v1")


def same(kind):
    if kind == "simulator":
        simulator = gymnasium.make("CartPole-v1")
        return lambda: GymWrapper(simulator)
    env = cartpole()
    return (lambda: env) if kind == "env" else (lambda: TransformedEnv(env, StepCounter()))


@pytest.mark.parametrize("kind", ["env", "behind a transform", "simulator"])
@pytest.mark.parametrize("pool", POOLS)
def test_a_function_that_gives_the_same_env_or_simulator_twice_is_refused(pool, kind, opened):
    env = opened(POOLS[pool](same(kind)))
    shared = "simulator" if kind == "simulator" else "env"

    with pytest.raises(WorkerError, match=rf"env \d has the same {shared} as env \d.*at each call"):
        env.reset()


def test_a_mixed_env_refuses_the_same_pool_twice(opened):
    pool = opened(SerialEnv(2, cartpole))

    with pytest.raises(SharedEnvError, match="member 1 has the same env as member 0"):
        MixedEnv([pool, pool])
    with pytest.raises(SharedEnvError, match="member 1 has the same env as member 0"):
        MixedEnv([pool, TransformedEnv(pool, StepCounter())])


def test_envs_whose_whole_state_is_in_the_data_may_serve_several_rows(opened):
    env = JaxEnv(Pendulum())
    pool = opened(SerialEnv(2, lambda: env))

    assert pool.rollout(3)["next", "reward"].shape == (2, 3, 1)


def test_an_env_object_is_copied_for_each_row(opened):
    pool = opened(SerialEnv(2, cartpole()))

    assert pool.rollout(3)["next", "reward"].shape[0] == 2
