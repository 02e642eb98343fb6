"""Entries that stack unlike shapes, as Tuple spaces of Gymnasium do: no batch and no view holds them, and says so."""

from __future__ import annotations

import gymnasium
import pytest

import envkit
from envkit import (
    AsyncEnvPool,
    GymEnv,
    GymWrapper,
    SerialEnv,
    make,
    to_gym_vector,
    to_sb3,
    to_torchrl,
)
from envkit.errors import ArgumentError, SpecStackError
from tests.reference.envs.zoo import uneven

TOLD = (
    r"^'observation' in the observation spec stacks the unlike shapes \[\(32,\), \(11,\), \(2,\)\], "
    r"which .* cannot hold\. Turn the Tuple .* into a Dict, .*FlattenObservation"
)


def blackjack() -> GymEnv:
    return GymEnv("Blackjack-v1")


def flat() -> GymWrapper:
    return GymWrapper(gymnasium.wrappers.FlattenObservation(gymnasium.make("Blackjack-v1")))


@pytest.mark.parametrize(
    "show",
    [
        lambda: to_gym_vector(SerialEnv(2, blackjack)),
        lambda: to_sb3(SerialEnv(2, blackjack)),
        lambda: to_torchrl(SerialEnv(2, blackjack)),
        lambda: to_torchrl(blackjack()),
        lambda: SerialEnv(2, blackjack).rollout(2),
        lambda: SerialEnv(2, blackjack, use_buffers=False).reset(),
        lambda: make("gym/Blackjack-v1", 2, backend="serial").reset(),
        lambda: AsyncEnvPool([blackjack], backend="threading").reset(),
    ],
)
def test_unlike_shapes_are_refused_in_one_line(show):
    with pytest.raises(SpecStackError, match=TOLD) as caught:
        show()

    assert "\n" not in str(caught.value)


def test_a_vector_env_of_unlike_shapes_says_what_works():
    with pytest.raises(ArgumentError, match=r"no array form .* flatten a Tuple of unlike shapes"):
        GymEnv("Blackjack-v1", num_envs=2)


def test_a_flattened_tuple_is_shown_by_every_view():
    vector, theirs = to_gym_vector(SerialEnv(2, flat)), to_sb3(SerialEnv(2, flat))

    shown, _ = vector.reset(seed=0)

    assert shown.shape == theirs.reset().shape == (2, 45)
    assert vector.observation_space.contains(shown)
    assert to_torchrl(flat()).rollout(3)["observation"].shape[-1] == 45


def test_agents_that_are_a_stack_of_nodes_go_into_batches():
    env = SerialEnv(2, lambda: uneven(envkit))

    shown = env.reset()["agents"]

    assert [tuple(part["seen"].shape) for part in shown.unbind(1)] == [(2, 2), (2, 3)]
