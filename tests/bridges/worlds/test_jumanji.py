"""`JumanjiEnv`: the same numbers as Jumanji stepped by hand, its names, its errors."""

from __future__ import annotations

import jax
import pytest
import torch
from tensordict import TensorDict

from bridges.worlds.jumanji import JumanjiEnv, JumanjiWrapper, env_names, fetching_names
from envkit.env.checks import check_env_specs
from envkit.errors import ArgumentError, ArgumentTypeError, FetchError, OptionError
from tests.bridges.worlds.bare import assert_equals_bare

ROWS = 4


@pytest.fixture(scope="module")
def snake():
    return JumanjiEnv("Snake-v1", batch_size=[ROWS])


def assert_equals_jumanji(env, steps):
    bare = env._env

    def shown(timestep):
        last, over = timestep.last(), (timestep.discount == 0).all()
        return {
            "observation": timestep.observation,
            "reward": timestep.reward,
            "terminated": last & over,
            "truncated": last & ~over,
        }

    def reset(key):
        moment = shown(bare.reset(key)[1])
        return {"observation": moment["observation"]}

    def step(state, action):
        state, timestep = bare.step(state, action.astype(bare.action_spec.dtype))
        return state, shown(timestep)

    return assert_equals_bare(env, steps, jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step)))


def test_snake_equals_jumanji_stepped_by_hand(snake):
    ended = assert_equals_jumanji(snake, steps=100)

    assert ended > 10
