"""What an env declares and gives has the simulator's dtypes, whatever torch and JAX have by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch

from envkit import (
    Box,
    Compose,
    GymEnv,
    JaxEnv,
    MixedEnv,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    Timestep,
    TransformedEnv,
    check_env_specs,
)
from envkit.env.base import EnvBase
from tests.zoo.envs import Count
from tests.zoo.walkers import Pendulum, Walker

pendulum = partial(GymEnv, "Pendulum-v1")
swing = partial(JaxEnv, Pendulum(), batch_size=[2], episode_length=3)


def transformed(base: EnvBase) -> EnvBase:
    return TransformedEnv(base, Compose(RewardSum(), StepCounter(), RewardScaling(0.0, 2.0)))


KINDS: dict[str, Callable[[], EnvBase]] = {
    "gym": pendulum,
    "vector": partial(GymEnv, "Pendulum-v1", num_envs=2),
    "jax": swing,
    "serial": partial(SerialEnv, 2, pendulum),
    "serial, tds": partial(SerialEnv, 2, pendulum, use_buffers=False),
    "serial of jax": partial(SerialEnv, 2, partial(JaxEnv, Pendulum())),
    "mixed": lambda: MixedEnv([SerialEnv(1, pendulum), SerialEnv(1, pendulum)]),
    "transformed": lambda: transformed(SerialEnv(2, pendulum)),
    "fused": lambda: transformed(swing()),
}


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def dtypes_of(env: EnvBase) -> set[torch.dtype]:
    """Check that specs and data agree, and give the floating dtypes of what the simulator makes."""
    check_env_specs(env)
    data = env.rollout(4, break_when_any_done=False)
    keys = ["observation", "action", ("next", "observation"), ("next", "reward")]
    return {data[key].dtype for key in keys}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind == "jax" else ()) for kind in KINDS],
)
def test_the_default_dtype_of_torch_changes_nothing_that_a_simulator_gives(float64, kind):
    env = KINDS[kind]()

    assert dtypes_of(env) == {torch.float32}
    env.close()


def test_a_torch_env_without_a_reward_spec_is_paid_in_the_default_dtype(float64):
    env = Count()

    check_env_specs(env)
    assert env.rollout(2)["next", "reward"].dtype == torch.float64


# ----------------------------------------------------------------------------------- 64 bits in JAX


class Wide:
    """Counts in float64 where JAX has it."""

    action_space = Box(-1.0, 1.0, (2,))

    def reset(self, key):
        state = jax.random.uniform(key, (2,), dtype=jnp.result_type(float))
        return state, Timestep(state)

    def step(self, state, action):
        state = state + action
        return state, Timestep(state, state.sum(), terminated=state.sum() > 1.5)


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("make", [Wide, Walker])
def test_whole_runs_compile_where_jax_has_64_bits(x64, make):
    env = JaxEnv(make(), batch_size=[2], episode_length=3)

    check_env_specs(env)
    env.set_seed(0)
    nonstop = env.rollout(7, break_when_any_done=False)
    env.set_seed(0)
    stopped = env.rollout(7)

    assert nonstop["next", "reward"].dtype == torch.float32
    assert nonstop["next", "truncated"].any()
    assert torch.equal(stopped["action"], nonstop["action"][:, : stopped.shape[-1]])
    if make is Wide:
        assert env.observation_spec["observation"].dtype == torch.float64


@pytest.mark.slow
def test_transforms_are_part_of_runs_where_jax_has_64_bits(x64):
    env = transformed(JaxEnv(Wide(), batch_size=[2], episode_length=3))

    check_env_specs(env)
    data = env.rollout(4, break_when_any_done=False)

    assert data["next", "step_count"].squeeze(-1)[:, 0].tolist() == [1, 1]
