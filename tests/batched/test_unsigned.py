"""Observations of unsigned integers, which torch stores and cannot pickle, in every exchange."""

from __future__ import annotations

import pickle
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from envkit import ParallelEnv, SerialEnv, check_env_specs
from envkit.batched import env_host
from envkit.specs import Bounded
from envkit.transport import by_value
from envkit_bridges.gym.gym_wrapper import GymWrapper


class Counter(gymnasium.Env):
    """Shows its steps and the largest number of its dtype; ends after three."""

    action_space = spaces.Discrete(2)

    def __init__(self, dtype: str):
        self.most = np.iinfo(dtype).max
        self.observation_space = spaces.Box(0, self.most, (2,), np.dtype(dtype))
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.shown(), {}

    def step(self, action):
        self.steps += 1
        return self.shown(), 1.0, self.steps == 3, False, {}

    def shown(self):
        return np.array([self.steps, self.most], self.observation_space.dtype)


def make(dtype: str) -> GymWrapper:
    return GymWrapper(Counter(dtype))


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_unsigned_observations_cross_processes_as_they_are(dtype, use_buffers):
    rollouts = []
    for batched in (SerialEnv, partial(ParallelEnv, num_processes=1)):
        env = batched(2, partial(make, dtype), use_buffers=use_buffers)
        check_env_specs(env)
        env.set_seed(0)
        rollouts.append(env.rollout(5, break_when_any_done=False))
        env.close()

    shown = rollouts[1]["next", "observation"]
    assert shown.dtype == getattr(torch, dtype)
    assert shown.tolist() == [[[step, np.iinfo(dtype).max] for step in (1, 2, 3, 1, 2)]] * 2
    assert rollouts[0]["observation"].tolist() == rollouts[1]["observation"].tolist()


@pytest.mark.parametrize("dumps", [by_value.dumps, by_value.dumps_by_name])
def test_unsigned_tensors_and_specs_of_them_travel_in_messages(dumps):
    assert env_host
    numbers = torch.tensor([0, 2**16 - 1]).to(torch.uint16)
    spec = Bounded(0, 300, (2,), dtype=torch.uint32)

    arrived, known = pickle.loads(dumps((numbers, spec)))

    assert arrived.dtype == torch.uint16 and arrived.tolist() == [0, 2**16 - 1]
    assert known == spec


def test_other_tensors_travel_as_torch_pickles_them():
    weights = torch.nn.Linear(2, 1).weight
    pair = torch.zeros(2, requires_grad=True), weights

    plain, parameter = pickle.loads(by_value.dumps_by_name(pair))

    assert plain.requires_grad and isinstance(parameter, torch.nn.Parameter)
    assert torch.equal(parameter, weights)
