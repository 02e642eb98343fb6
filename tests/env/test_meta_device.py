"""Devices that nothing can be delivered to, the meta device and cards that are not there, are refused before anything moves."""

from __future__ import annotations

import pytest
import torch

import envkit
from envkit import DeviceCastTransform, GymEnv, MixedEnv, ParallelEnv, SerialEnv, TransformedEnv
from envkit.errors import ArgumentError, ArgumentTypeError, DeviceNameError
from tests.envs.model_based.models import Hidden, linear


def cartpole(**options) -> GymEnv:
    return GymEnv("CartPole-v1", **options)


KINDS = {
    "gym": cartpole,
    "serial": lambda **options: SerialEnv(2, cartpole, **options),
    "parallel": lambda **options: ParallelEnv(2, cartpole, **options),
    "mixed": lambda **options: MixedEnv([SerialEnv(2, cartpole)], **options),
}


BUILT = KINDS | {
    "pendulum": envkit.PendulumEnv,
    "tictactoe": envkit.TicTacToeEnv,
    "chess": envkit.ChessEnv,
    "trading": envkit.FinancialRegimeEnv,
    "tokens": lambda **options: envkit.LLMHashingEnv(8, **options),
    "model": lambda **options: Hidden(linear(), **options),
    "made": lambda **options: envkit.make("dm_control/cartpole/swingup", **options),
}


@pytest.mark.parametrize("kind", list(BUILT))
def test_an_env_that_simulates_is_not_built_for_the_meta_device(kind):
    with pytest.raises(ArgumentError, match=r"was given the meta device, .* Pass 'cpu' or an acc"):
        BUILT[kind](device="meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("kind", list(BUILT))
def test_an_env_is_not_built_for_a_card_where_there_is_none(kind):
    with pytest.raises(DeviceNameError, match=r"was given 'cuda:0', but torch sees no GPU.*'cpu'"):
        BUILT[kind](device="cuda")


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_env_moves_to_no_card_that_is_not_there(kind):
    env = KINDS[kind]()

    with pytest.raises(DeviceNameError, match=r"was given 'cuda:63', but torch sees"):
        env.to("cuda:63")

    assert "cuda" not in repr(env)


@pytest.mark.parametrize("device", [2.5, ["cpu"]])
def test_what_names_no_device_is_told(device):
    with pytest.raises(ArgumentTypeError, match=r"device is .* but must be a torch.device or its"):
        cartpole(device=device)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_cast_to_a_card_that_is_not_there_is_refused_before_data_comes():
    env = TransformedEnv(cartpole(), DeviceCastTransform("cuda"))

    with pytest.raises(DeviceNameError, match=r"DeviceCastTransform was given 'cuda:0'.*no GPU"):
        env.reset()
