"""Which gym library names refer to."""

from __future__ import annotations

import types

import gymnasium
import pytest

from envkit_bridges.gym.backend import gym_backend, library_of, set_gym_backend
from envkit_bridges.gym.gym_env import GymEnv
from tests.test_front_door import run_without


@pytest.fixture
def library():
    """A module with gymnasium's interface that notes what it makes."""
    module = types.ModuleType("made")
    module.__dict__.update(vars(gymnasium))
    module.names = []

    def make(name, **kwargs):
        module.names.append(name)
        return gymnasium.make(name, **kwargs)

    module.make = make
    return module


def test_gymnasium_is_the_library_unless_said_otherwise():
    assert gym_backend() is gymnasium
    assert gym_backend("spaces") is gymnasium.spaces
    with set_gym_backend("gymnasium"):
        assert gym_backend().__name__ == "gymnasium"


def test_a_module_may_be_chosen_for_a_while(library):
    with set_gym_backend(library):
        assert gym_backend() is library
        with set_gym_backend("gymnasium"):
            assert gym_backend() is gymnasium
        GymEnv("CartPole-v1")

    assert gym_backend() is gymnasium
    assert library.names == ["CartPole-v1"]


def test_a_function_may_be_given_a_backend(library):
    @set_gym_backend(library)
    def make(name, *, backend=None):
        """Make it."""
        return gym_backend(), GymEnv(name, backend=backend)

    chosen, _ = make("CartPole-v1")
    make("CartPole-v1", backend="gymnasium")

    assert chosen is library
    assert gym_backend() is gymnasium
    assert library.names == ["CartPole-v1"]
    assert make.__doc__ == "Make it."


def test_a_backend_may_be_set_for_good(library):
    try:
        set_gym_backend(library).set()
        GymEnv("CartPole-v1")
        names = GymEnv.available_envs
    finally:
        set_gym_backend("gymnasium").set()

    assert library.names == ["CartPole-v1"]
    assert "CartPole-v1" in names


def test_one_env_may_have_a_backend_of_its_own(library):
    env = GymEnv("Pendulum-v1", backend=library)

    assert library.names == ["Pendulum-v1"]
    assert env.env_name == "Pendulum-v1"
    assert env.libname == "gymnasium"  # the library its simulator is made of
    assert gym_backend() is gymnasium


def test_objects_know_their_library(library):
    class Space(gymnasium.spaces.Discrete):
        pass

    with set_gym_backend(library):
        assert library_of(Space(2)) is gymnasium
        assert library_of(object()) is library


def test_registered_names_are_listed():
    names = GymEnv.available_envs

    assert "CartPole-v1" in names
    assert GymEnv("CartPole-v1").available_envs == names


@pytest.mark.slow
def test_without_the_library_there_are_no_names_and_no_envs():
    done = run_without(
        "gymnasium",
        code="""
        from envkit import GymEnv
        assert GymEnv.available_envs == []
        try:
            GymEnv("CartPole-v1")
        except ImportError as error:
            print(error)
        """,
    )

    assert done.returncode == 0, done.stderr
    assert "[gym]" in done.stdout
