"""Intrinsic rewards of random network distillation: what they are, which rows count, and how the predictor learns."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tensordict import TensorDict

from envkit import (
    GymEnv,
    RNDTransform,
    RunningMeanStd,
    SerialEnv,
    TransformedEnv,
    evaluate,
)
from envkit.errors import ArgumentError, ArgumentTypeError, MissingKeyError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrl.envs.transforms as theirs
    from torchrl.objectives.rnd import RNDLoss


def networks(features: int = 3) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    return torch.nn.Linear(features, 4), torch.nn.Linear(features, 4)


def pendulum(*transforms):
    return TransformedEnv(GymEnv("Pendulum-v1"), *transforms)


@pytest.mark.parametrize("options", [{}, {"normalize_obs": False, "normalize_reward": False}])
def test_rewards_and_statistics_are_those_of_torchrl(options):
    ours, other = RNDTransform(*networks(), **options), theirs.RNDTransform(*networks(), **options)
    env = pendulum(ours)
    env.set_seed(0)

    data = env.rollout(20)

    other.train()
    for number in range(20):
        following = data[number]["next"].select("observation")
        shown = other._step(data[number], following)["intrinsic_reward"]
        torch.testing.assert_close(
            data["next", "intrinsic_reward"][number], shown, atol=1e-5, rtol=1e-5
        )
    for one, another in ((ours.obs_rms, other.obs_rms), (ours.reward_rms, other.reward_rms)):
        assert (one is None) == (another is None) == bool(options)
        if one is not None:
            torch.testing.assert_close(one.mean, another.mean)
            torch.testing.assert_close(one.var, another.var)


def test_a_row_that_stands_still_does_not_count():
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv("Pendulum-v1")), RNDTransform(*networks()))
    root = env.rand_action(env.reset())

    following = env.step(root.set("_step", torch.tensor([True, False])))["next"]

    norm = env.transform
    assert round(float(norm.obs_rms.count)) == round(float(norm.reward_rms.count)) == 1
    assert following["intrinsic_reward"][1] == 0
    env.close()


def test_evaluation_counts_nothing():
    env = pendulum(RNDTransform(*networks())).record_for_resume()
    env.rollout(3)
    before = copy.deepcopy(env.transform.state_dict())

    evaluate(env, None, episodes=1, max_steps=5, reward_key="reward")

    assert all(
        torch.equal(value, before[name]) for name, value in env.transform.state_dict().items()
    )


def test_a_row_that_is_not_finite_is_left_out_with_a_warning():
    transform = RNDTransform(*networks(1))
    places = torch.tensor([[1.0], [torch.nan]])
    following = TensorDict(observation=places, batch_size=[2])

    with pytest.warns(UserWarning, match="NaN or an infinite number"):
        shown = transform._step(TensorDict(batch_size=[2]), following)

    assert shown["intrinsic_reward"][0].isfinite() and transform.skipped_rows == 1
    assert transform.obs_rms.mean.isfinite().all() and transform.reward_rms.var.isfinite()


def test_a_loss_of_torchrl_makes_rewards_small():
    target, predictor = networks()
    transform = RNDTransform(target, predictor, normalize_reward=False)
    env = pendulum(transform)
    first = env.rollout(50)["next", "intrinsic_reward"].mean()
    loss = RNDLoss(predictor, target, obs_rms=transform.obs_rms, update_fraction=1.0)
    optim = torch.optim.Adam(predictor.parameters(), 0.05)

    data = env.rollout(200)
    for _ in range(100):
        optim.zero_grad()
        loss(data)["loss_predictor"].backward()
        optim.step()

    assert env.rollout(50)["next", "intrinsic_reward"].mean() < 0.1 * first
    assert all(not parameter.requires_grad for parameter in target.parameters())


def test_clones_share_the_statistics():
    transform = RNDTransform(*networks())
    pendulum(transform).reset()

    assert transform.clone().obs_rms is transform.obs_rms


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: RNDTransform(*networks(), in_keys=["a", "b"]),
            ArgumentError,
            "Join several with CatTensors",
        ),
        (
            lambda: RNDTransform(len, networks()[1]),
            ArgumentTypeError,
            "target_network is of type builtin",
        ),
        (lambda: RNDTransform(*networks(), obs_clip=0), ArgumentError, "obs_clip is 0, .*above 0"),
        (lambda: RunningMeanStd((2,), epsilon=0), ArgumentError, "epsilon is 0"),
        (
            lambda: pendulum(RNDTransform(*networks(), in_keys=["pixels"])).reset(),
            MissingKeyError,
            "pixels",
        ),
    ],
)
def test_misuse_is_answered_by_what_to_pass(make, error, message):
    with pytest.raises(error, match=message):
        make()
