"""`step_and_maybe_reset` under a `_step` mask, in one call of the workers or the program, against two calls by hand."""

from functools import partial

import pytest
import torch
from tensordict import assert_close

from envkit import (
    Compose,
    GymEnv,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
)
from envkit_bridges.jax.jax_env import JaxEnv
from tests.zoo.jax_drift import Drift

ROWS = 4


def drifting():
    return JaxEnv(Drift(), batch_size=[ROWS], episode_length=3)


def cartpole():
    return GymEnv("CartPole-v1", max_episode_steps=4)


KINDS = {
    "jax": drifting,
    "fused": lambda: TransformedEnv(
        drifting(), Compose(StepCounter(), RewardSum(), VecNorm("observation"))
    ),
    "around jax": lambda: TransformedEnv(drifting(), StepCounter(max_steps=2)),
    "serial": partial(SerialEnv, ROWS, cartpole),
    "parallel": partial(ParallelEnv, ROWS, cartpole, num_processes=1),
    "TensorDicts": partial(SerialEnv, ROWS, cartpole, use_buffers=False),
    "transformed": lambda: TransformedEnv(
        SerialEnv(ROWS, cartpole), Compose(StepCounter(max_steps=3), RewardSum())
    ),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind == "around jax" else ()) for kind in KINDS],
)
def test_one_call_does_what_two_do(kind, opened):
    one, two = (opened(KINDS[kind]()) for _ in range(2))
    draws = torch.Generator().manual_seed(1)
    for env in (one, two):
        env.set_seed(0)
    root, twin = one.reset(), two.reset()

    for turn in range(14):
        one.rand_action(root)
        twin.update(root.select(*one.action_keys))
        if turn % 3:
            mask = torch.rand(ROWS, generator=draws) < 0.6
            if turn == 5:
                mask[:] = False
            root["_step"], twin["_step"] = mask, mask.clone()
        if turn in (4, 8):  # a row that is done and not stepped: it begins anew all the same
            for td in (root, twin):
                td["_step"] = torch.tensor([False, True, True, False])
                td["done"] = td["terminated"] = torch.tensor([[True], [False], [False], [False]])
        data, root = one.step_and_maybe_reset(root)
        by_hand = two.step(twin)
        twin = two.maybe_reset(two.step_mdp(by_hand))

        assert_close(data, by_hand, rtol=0, atol=0)
        assert_close(root, twin, rtol=0, atol=0)
