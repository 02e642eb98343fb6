"""Rewards divided by the deviation of discounted returns, beside Gymnasium's and SB3's wrappers."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch

from envkit import (
    CentredRewardWarning,
    Compose,
    EnvCreator,
    GymWrapper,
    NormalizeReward,
    RewardSum,
    SerialEnv,
    TransformedEnv,
    VecNorm,
    VecNormV2,
    evaluate,
)
from envkit.errors import ArgumentError, MissingKeyError
from tests.zoo.envs import Count

ROWS, STEPS, GAMMA = 3, 40, 0.9


class Paid(gymnasium.Env):
    """Pays by row and step; an episode ends after some steps."""

    observation_space = gymnasium.spaces.Box(0, 1e3, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, row: int, length: int = 1000, *, terminates: bool = False):
        self.row, self.length, self.terminates, self.t = row, length, terminates, 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        over = self.t >= self.length
        reward = float(np.sin(self.t) * (self.row + 1) - 0.3)
        return np.full(1, self.t, np.float32), reward, over and self.terminates, over, {}


def makers(*lengths: int):
    return [partial(Paid, row, length) for row, length in enumerate(lengths)]


def divided(*lengths: int, **keywords) -> TransformedEnv:
    env = SerialEnv(
        len(lengths), [lambda make=make: GymWrapper(make()) for make in makers(*lengths)]
    )
    return TransformedEnv(env, NormalizeReward(gamma=GAMMA, **keywords))


def rewards(env, steps: int = STEPS) -> np.ndarray:
    return env.rollout(steps, break_when_any_done=False)["next", "reward"][..., 0].numpy().T


def test_rewards_are_those_of_gymnasium_until_an_episode_ends():
    theirs = gymnasium.wrappers.vector.NormalizeReward(
        gymnasium.vector.SyncVectorEnv(makers(1000, 1000, 1000)), gamma=GAMMA
    )
    theirs.reset()
    act = np.zeros(ROWS, int)
    expected = [theirs.step(act)[1] for _ in range(STEPS)]
    env = divided(1000, 1000, 1000)

    found = rewards(env)

    np.testing.assert_allclose(found, expected, rtol=1e-5)
    theirs.update_running_mean = False
    env.transform.freeze()
    theirs.reset()
    expected = [theirs.step(act)[1] for _ in range(5)]
    np.testing.assert_allclose(rewards(env, 5), expected, rtol=1e-5)
    env.close()
    theirs.close()


@pytest.mark.parametrize("clip", [10.0, 0.5])
def test_rewards_are_those_of_stable_baselines_over_ends_of_episodes(clip):
    common = pytest.importorskip("stable_baselines3.common.vec_env")
    lengths = (7, 11, 1000)
    theirs = common.VecNormalize(
        common.DummyVecEnv(makers(*lengths)), norm_obs=False, gamma=GAMMA, clip_reward=clip
    )
    theirs.reset()
    expected = [theirs.step(np.zeros(ROWS, int))[1] for _ in range(STEPS)]

    found = rewards(env := divided(*lengths, clip=clip))

    np.testing.assert_allclose(found, expected, rtol=1e-4)
    held = env.transform.statistics["reward"]
    assert held["weight"].item() == pytest.approx(ROWS * STEPS, abs=1e-3)
    assert held["mean"].item() == pytest.approx(float(theirs.ret_rms.mean), rel=1e-5)
    env.close()


def test_rows_that_a_mask_leaves_out_count_nothing_and_keep_their_total():
    env = divided(1000, 1000)
    root = env.step_mdp(env.rand_step(env.reset()))
    before = root["_discounted_reward"].clone()

    td = env.rand_action(root).set("_step", torch.tensor([True, False]))
    after = env.step_mdp(env.step(td))

    assert env.transform.statistics["reward", "weight"].item() == pytest.approx(3, abs=1e-3)
    assert after["_discounted_reward"][1].equal(before[1])
    assert not after["_discounted_reward"][0].equal(before[0])
    reset = env.reset(after.set("_reset", torch.tensor([[False], [True]])))
    assert reset["_discounted_reward"].ne(0).flatten().tolist() == [True, False]
    env.close()


def test_copies_of_one_creator_learn_together():
    creator = EnvCreator(lambda: TransformedEnv(GymWrapper(Paid(0)), NormalizeReward(gamma=GAMMA)))
    env = SerialEnv(2, creator)

    env.rollout(6)

    (weight,) = (x for name, x in creator.state_dict().items() if name.endswith("weight"))
    assert weight.item() == pytest.approx(12, abs=1e-3)
    env.close()


def test_a_judged_policy_teaches_nothing_and_sums_go_first():
    base = SerialEnv(1, lambda: GymWrapper(Paid(0, 8)))
    env = TransformedEnv(base, Compose(RewardSum(), NormalizeReward()))
    data = env.rollout(5)
    held = env.transform.state_dict()
    paid = [np.sin(t) - 0.3 for t in range(1, 6)]

    with (
        pytest.warns(UserWarning, match="ends the episodes"),
        pytest.warns(UserWarning, match=r"sums 'reward' as NormalizeReward.*reward_key='reward'"),
    ):
        found = evaluate(env, None, 2)

    assert found.changed_by == ("NormalizeReward",) and "by NormalizeReward" in repr(found)
    assert held and all(env.transform.state_dict()[key].equal(held[key]) for key in held)
    assert data["next", "episode_reward"][0, -1].item() == pytest.approx(sum(paid), rel=1e-5)
    env.close()


def test_integers_are_divided_and_a_total_that_is_not_finite_is_left_out():
    class Whole(Count):
        def _step(self, td):
            out = super()._step(td)
            return out.set("reward", torch.full((1,), float("nan") if self.c == 2 else 1.0))

    env = TransformedEnv(SerialEnv(1, Whole), NormalizeReward())
    with pytest.warns(UserWarning, match="NormalizeReward.*NaN"):
        data = env.rollout(3)

    assert env.transform.skipped_rows == 2
    assert data["next", "reward"].isnan().flatten().tolist() == [False, True, False]
    env.close()


@pytest.mark.parametrize("norm", [VecNorm, VecNormV2])
def test_a_transform_that_takes_the_mean_of_a_reward_away_warns_once(norm):
    env = TransformedEnv(SerialEnv(2, Count), norm(["reward"]))

    with pytest.warns(
        CentredRewardWarning, match=r"mean of \['reward'\].*NormalizeReward\(\)"
    ) as told:
        env.rollout(3)

    assert len(told) == 1
    env.close()


def test_a_centred_reward_under_another_name_is_no_news():
    env = TransformedEnv(SerialEnv(2, Count), VecNorm(["reward"], ["centred"]))

    assert (env.rollout(3)["next", "reward"] == 1).all()
    env.close()


def test_what_does_not_fit_is_named():
    with pytest.raises(ArgumentError, match="gamma is 2"):
        NormalizeReward(gamma=2)
    with pytest.raises(ArgumentError, match="epsilon is -1"):
        NormalizeReward(epsilon=-1)
    with pytest.raises(ArgumentError, match="clip is 0"):
        NormalizeReward(clip=0)
    with pytest.raises(ArgumentError, match="2 out_keys"):
        NormalizeReward(out_keys=["a", "b"])
    with pytest.raises(MissingKeyError, match=r"reads \['payoff'\].*'reward'"):
        _ = TransformedEnv(Count(), NormalizeReward("payoff")).reward_spec
