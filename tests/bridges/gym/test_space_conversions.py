"""Specs that users register for spaces of other libraries: alone, below other spaces, in rows, and in workers."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from envkit import (
    Bounded,
    Composite,
    GymWrapper,
    NonTensor,
    ParallelEnv,
    SerialEnv,
    Unbounded,
    check_env_specs,
    register_gym_spec_conversion,
)
from envkit.errors import ArgumentTypeError, SpecError
from envkit_bridges.gym import space_conversions


class Mission(gymnasium.Space):
    """Texts, and no Text space."""


class Angle(gymnasium.Space):
    """Angles in degrees, as a list of one int."""


class Guided(gymnasium.Env):
    """Names its step in a space of its own."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: gymnasium.Space, say=str):
        place = spaces.Box(-9, 9, (1,), np.float32)
        self.observation_space = spaces.Dict(place=place, task=spaces.Dict(goal=space))
        self.say = say

    def shown(self):
        goal = {"goal": self.say(self.count)}
        return {"place": np.full(1, self.count, np.float32), "task": goal}

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.shown(), {}

    def step(self, action):
        self.count += 1
        return self.shown(), 0.0, self.count >= 3, False, {}


@pytest.fixture(autouse=True)
def no_conversions(monkeypatch):
    monkeypatch.setattr(space_conversions, "_conversions", {})


def text(space, **kwargs):
    return NonTensor(example_data="")


@pytest.mark.parametrize("name", [Mission, f"{__name__}.Mission", "Mission"], ids=str)
def test_a_space_is_registered_by_its_class_or_a_name_and_so_are_subclasses(name):
    assert register_gym_spec_conversion(name)(text) is text

    for space in (Mission(), type("Special", (Mission,), {})()):
        env = GymWrapper(Guided(space))
        assert isinstance(env.observation_spec["task", "goal"], NonTensor)


@pytest.mark.parametrize(
    "pool", [None, SerialEnv, pytest.param(ParallelEnv, marks=pytest.mark.slow)]
)
def test_objects_of_a_registered_space_are_recorded(pool):
    register_gym_spec_conversion(Mission)(text)

    def make():
        return GymWrapper(Guided(Mission()))

    env = make() if pool is None else pool(2, make)
    check_env_specs(env)
    data = env.rollout(3)
    rows = [data] if pool is None else data.unbind(0)
    env.close()

    assert [[step["next", "task", "goal"] for step in row] for row in rows] == [
        ["1", "2", "3"]
    ] * len(rows)


@pytest.mark.parametrize("pool", [None, SerialEnv])
def test_tensors_of_a_registered_space_lie_in_rows(pool):
    register_gym_spec_conversion(Angle)(
        lambda space, **kwargs: Bounded(-180, 180, (1,), dtype=torch.int64)
    )

    def make():
        return GymWrapper(Guided(Angle(), lambda count: [10 * count]))

    env = make() if pool is None else pool(2, make)
    check_env_specs(env)

    goals = env.rollout(3)["next", "task", "goal"]
    assert goals.dtype == torch.int64 and goals.reshape(-1, 3).tolist()[0] == [10, 20, 30]
    if pool is not None:
        assert env.use_buffers


def test_a_registered_spec_is_asked_before_those_that_are_built_in():
    @register_gym_spec_conversion("spaces.box.Box")
    def wide(space, *, categorical_action_encoding, **kwargs):
        assert categorical_action_encoding and {"dtype", "device", "batch_size"} <= set(kwargs)
        return Unbounded(space.shape, dtype=torch.float64)

    env = GymWrapper(gymnasium.make("CartPole-v1"), True)

    assert env.rollout(2)["observation"].dtype == torch.float64


def test_an_action_of_a_registered_space_reaches_the_simulator_as_its_spec_reads_it():
    class Turned(gymnasium.Env):
        observation_space, action_space = spaces.Box(-9, 9, (1,), np.float32), Angle()

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return action.astype(np.float32), 0.0, False, False, {}

    register_gym_spec_conversion(Angle)(lambda space, **_: Bounded(-9, 9, (1,), dtype=torch.int64))

    for env in (GymWrapper(Turned()), SerialEnv(2, lambda: GymWrapper(Turned()))):
        data = env.rollout(4)
        assert torch.equal(data["next", "observation"], data["action"].float())


def test_a_space_without_a_spec_is_named_with_the_line_that_registers_one():
    with pytest.raises(
        SpecError, match=r"\('task', 'goal'\).*a Mission,.*conversion\(Mission\)\(lambda space"
    ):
        GymWrapper(Guided(Mission()))


@pytest.mark.parametrize(
    "returned", [None, Composite(a=Unbounded(1)), gymnasium.spaces.Discrete(2)]
)
def test_what_is_no_spec_is_refused(returned):
    register_gym_spec_conversion(Mission)(lambda space, **kwargs: returned)

    with pytest.raises(
        SpecError, match=r"(?s)registered for Mission.*'goal'.*must return one spec"
    ):
        GymWrapper(Guided(Mission()))
    with pytest.raises(ArgumentTypeError, match=r"spec_type is .* class of spaces or its name"):
        register_gym_spec_conversion(Mission())
