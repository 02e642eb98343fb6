"""Masks of actions through vector envs: the protocol of MaskablePPO, and the algorithm itself."""

from __future__ import annotations

import numpy as np
import pytest

from envkit import ExcludeTransform, JaxEnv, make, to_gym_vector, to_sb3
from envkit.errors import NotResetError
from tests.zoo.jax_envs import Countdown

sb3_contrib = pytest.importorskip("sb3_contrib")
vec_env = pytest.importorskip("stable_baselines3.common.vec_env")


def tic_tac_toe():
    # an illegal move is an error of this env
    game = make("pgx/tic_tac_toe", 3, transforms=[ExcludeTransform("player_reward")])
    return to_sb3(game, info_keys=["current_player"])


def test_masks_are_those_of_the_observation_that_is_shown():
    game = tic_tac_toe()
    env = vec_env.VecMonitor(game)
    env.seed(0)
    seen = env.reset()
    ends = 0

    for _ in range(20):
        masks = np.stack(env.env_method("action_masks"))
        assert masks.dtype == bool and masks.shape == (3, 9)
        np.testing.assert_array_equal(masks, seen["action_mask"])
        np.testing.assert_array_equal(env.env_method("action_masks", indices=[2])[0], masks[2])
        np.testing.assert_array_equal(env.get_attr("action_masks")[1](), masks[1])
        seen, _, done, _ = env.step(masks.argmax(1))
        ends += done.sum()

    assert env.has_attr("action_masks") and ends


def test_a_loop_of_gymnasium_asks_by_call():
    game = make("pgx/tic_tac_toe", 3, transforms=[ExcludeTransform("player_reward")])
    envs = to_gym_vector(game)
    with pytest.raises(NotResetError, match="Call reset"):
        envs.call("action_masks")
    seen, _ = envs.reset(seed=0)

    np.testing.assert_array_equal(np.stack(envs.call("action_masks")), seen["action_mask"])


def test_an_env_without_masks_has_no_such_method():
    env = to_sb3(JaxEnv(Countdown(3), batch_size=[2]))
    env.reset()

    assert not env.has_attr("action_masks")
    with pytest.raises(AttributeError, match="action_masks"):
        env.env_method("action_masks")


def test_maskable_ppo_takes_allowed_actions_alone():
    env = tic_tac_toe()

    model = sb3_contrib.MaskablePPO(
        "MultiInputPolicy", env, n_steps=32, batch_size=32, device="cpu"
    )

    assert model.learn(96).num_timesteps == 96
