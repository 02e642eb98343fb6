"""Names of entries that are taken are refused when an env is built, whatever kind of env it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from envkit import JaxEnv, RenameTransform, SerialEnv, Timestep, TransformedEnv
from envkit.env.base import EnvBase
from envkit.errors import KeyCollisionError, WorkerError
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.gym.info import default_info_dict_reader
from tests.zoo.envs import Count
from tests.zoo.walkers import Pendulum

LINE = spaces.Box(-1.0, 1.0, (2,), np.float32)


class Names(gymnasium.Env):
    """Observes entries of the given names."""

    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    render_mode = "rgb_array"

    def __init__(self, *names: str, info: str | None = None):
        self.observation_space = spaces.Dict(dict.fromkeys(names, LINE))
        self.info = {} if info is None else {info: 1.0}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), dict(self.info)

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, dict(self.info)

    def render(self):
        return np.zeros((2, 2, 3), np.uint8)


class Named(Pendulum):
    """Observes entries of the given names, and infos."""

    def __init__(self, *names: str, info: bool = False):
        self.names, self.info = names, info

    def shown(self, state, reward=0.0):
        info = {"energy": state[0]} if self.info else {}
        return Timestep(dict.fromkeys(self.names, jnp.zeros(2)), reward, info=info)


def gym_of(name: str) -> EnvBase:
    return GymWrapper(Names("first", name))


def vector_of(name: str) -> EnvBase:
    return GymWrapper(gymnasium.vector.SyncVectorEnv([partial(Names, "first", name)] * 2))


def jax_of(name: str) -> EnvBase:
    return JaxEnv(Named("first", name), batch_size=[2])


def serial_of(name: str) -> EnvBase:
    env = SerialEnv(2, partial(gym_of, name))
    env.start()
    return env


def transformed_of(name: str) -> EnvBase:
    return TransformedEnv(Count(), RenameTransform(["count"], [name]))


@pytest.mark.parametrize(
    "name", ["action", "next", "_step", "_reset", "reward", "done", "truncated"]
)
@pytest.mark.parametrize("make", [gym_of, vector_of, jax_of, serial_of, transformed_of])
def test_a_taken_name_of_an_observation_is_refused_or_shown_apart(
    make: Callable[[str], EnvBase], name
):
    if make in (gym_of, vector_of, serial_of) and not name.startswith("_"):
        assert ("observation", name) in make(name).observation_keys  # apart from what is taken
        return
    if make is transformed_of and name == "truncated":
        pytest.skip("Count ends without saying how")
    with pytest.raises(
        (KeyCollisionError, WorkerError), match=rf"'{name}'.*another name"
    ) as caught:
        make(name).reset()

    assert isinstance(
        caught.value.__cause__ if make is serial_of else caught.value, KeyCollisionError
    )


@pytest.mark.parametrize("make", [gym_of, vector_of, jax_of, serial_of])
def test_state_is_a_name_like_others_where_it_is_not_taken(make):
    assert "observation" in make("state").observation_keys


def test_a_jax_env_observes_nothing_called_info_beside_its_infos():
    with pytest.raises(KeyCollisionError, match=r"'info'.*another name"):
        JaxEnv(Named("info", info=True))

    assert JaxEnv(Named("info")).observation_keys[0] == "info"


def test_pixels_are_not_drawn_over_an_observation_of_that_name():
    with pytest.raises(KeyCollisionError, match=r"'pixels'.*rename the observation"):
        GymWrapper(Names("pixels"), from_pixels=True, pixels_only=False)

    shown = GymWrapper(Names("pixels"), from_pixels=True).rollout(2)["pixels"]
    assert shown.shape == (2, 2, 2, 3)


@pytest.mark.parametrize("name", ["action", "next", "_reset", "first"])
def test_a_taken_name_of_an_info_is_refused(name):
    env = GymWrapper(Names("first", info=name))

    with pytest.raises(KeyCollisionError, match=name):
        env.set_info_dict_reader(default_info_dict_reader([name], ignore_private=False))
    with pytest.warns(UserWarning, match=name):
        env.set_info_dict_reader(ignore_private=False)
    assert env.rollout(2).shape == (2,)
