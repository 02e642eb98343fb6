"""Masks of actions as Gymnasium spells them: integers that are 0 and 1."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envkit import ActionMask, GymEnv, GymWrapper, SerialEnv, TransformedEnv


def taxi():
    return GymEnv("Taxi-v4", info=True)


class Levers(gymnasium.Env):
    """Shows on one axis, as MaskablePPO reads it, which positions of each lever may be taken; the mask turns by steps."""

    def __init__(self, sizes: list[int]):
        self.sizes = sizes
        self.action_space = spaces.MultiDiscrete(sizes)
        self.observation_space = spaces.Dict(action_mask=spaces.MultiBinary(sum(sizes)))

    def shown(self):
        parts = [np.arange(size) == self.count % size for size in self.sizes]
        return {"action_mask": np.concatenate(parts).astype(np.int8)}

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.shown(), {}

    def step(self, action):
        right = all(
            self.count % size == taken for size, taken in zip(self.sizes, action, strict=True)
        )
        self.count += 1
        return self.shown(), float(right), self.count >= 9, False, {}


@pytest.mark.parametrize("sizes", [[3, 5], [4, 4]])
@pytest.mark.parametrize("categorical", [False, True])
def test_a_flat_mask_of_several_choices_rules_each_of_them(sizes, categorical):
    def make():
        return GymWrapper(Levers(sizes), categorical)

    for env in (
        TransformedEnv(make(), ActionMask()),
        TransformedEnv(SerialEnv(2, make), ActionMask()),
    ):
        data = env.rollout(20, break_when_any_done=False)
        assert bool((data["next", "reward"] == 1).all())


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
