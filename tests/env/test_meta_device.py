"""The meta device holds no data: what simulators give cannot be delivered there, and is refused before anything moves."""

from __future__ import annotations

import pytest

from envkit import GymEnv, MixedEnv, ParallelEnv, SerialEnv
from envkit.errors import ArgumentError


def cartpole(**options) -> GymEnv:
    return GymEnv("CartPole-v1", **options)


KINDS = {
    "gym": cartpole,
    "serial": lambda **options: SerialEnv(2, cartpole, **options),
    "parallel": lambda **options: ParallelEnv(2, cartpole, **options),
    "mixed": lambda **options: MixedEnv([SerialEnv(2, cartpole)], **options),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_env_that_simulates_is_not_built_for_the_meta_device(kind):
    with pytest.raises(ArgumentError, match=r"was given the meta device, .* Pass 'cpu' or an acc"):
        KINDS[kind](device="meta")


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_env_that_simulates_stays_where_it_is(kind):
    env = KINDS[kind]()

    with pytest.raises(ArgumentError, match="was given the meta device, which holds no data"):
        env.to("meta")

    assert "meta" not in repr(env)


def test_no_member_of_a_mixed_env_moves():
    env = MixedEnv([SerialEnv(2, cartpole), SerialEnv(1, cartpole)])

    with pytest.raises(ArgumentError, match="MixedEnv was given the meta device"):
        env.to("meta")

    assert env.rollout(2)["observation"].shape == (3, 2, 4)
    env.close()
