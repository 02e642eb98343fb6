"""Masks of actions as Gymnasium spells them: integers that are 0 and 1."""

from __future__ import annotations

import pytest

from envkit import ActionMask, GymEnv, SerialEnv, TransformedEnv


def taxi():
    return GymEnv("Taxi-v4", info=True)


MADE = {
    "alone": lambda: TransformedEnv(taxi(), ActionMask()),
    "around a batch": lambda: TransformedEnv(SerialEnv(3, taxi), ActionMask()),
    "inside a batch": lambda: SerialEnv(3, lambda: TransformedEnv(taxi(), ActionMask())),
}


@pytest.mark.parametrize("kind", MADE)
def test_random_actions_are_those_that_the_mask_of_integers_allows(kind):
    env = MADE[kind]()
    env.set_seed(0)

    data = env.rollout(50, break_when_any_done=False)

    mask, action = data["action_mask"], data["action"]
    assert not mask.dtype.is_floating_point and 0 < mask.float().mean() < 1
    assert mask.bool()[action.bool()].all()
    env.close()
