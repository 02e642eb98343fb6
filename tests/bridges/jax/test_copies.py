"""Stateless envs are copied and pickled: a copy goes on as the original would."""

from __future__ import annotations

import copy
import pickle

import cloudpickle
import pytest
import torch

from envkit.transforms.core.transformed_env import TransformedEnv
from envkit.transforms.episodes import StepCounter
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.worlds.brax import BraxEnv, BraxWrapper
from tests.bridges.compare import assert_same
from tests.zoo.walkers import Pendulum

KINDS = {
    "jax": lambda: JaxEnv(Pendulum(), batch_size=[3], episode_length=5),
    "fused": lambda: TransformedEnv(JaxEnv(Pendulum(), batch_size=[3]), StepCounter(4)),
    "brax by name": lambda: BraxEnv("fast", batch_size=[3], device="cpu", episode_length=5),
    "brax object": lambda: BraxWrapper(
        BraxEnv("fast", device="cpu")._env, batch_size=[3], device="cpu"
    ),
}
COPIES = {
    "copied": copy.deepcopy,
    "pickled": lambda env: pickle.loads(pickle.dumps(env)),
    "by value": lambda env: cloudpickle.loads(cloudpickle.dumps(env)),
}


RARER = ("brax object", "fused")  # compile most


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("jax", "copied"),
        ("jax", "by value"),
        *(
            pytest.param(kind, "pickled", marks=pytest.mark.slow if kind in RARER else ())
            for kind in KINDS
        ),
    ],
)
def test_a_copy_goes_on_as_the_original_would(kind, way):
    env = KINDS[kind]()
    env.set_seed(4)
    td = env.rollout(2, break_when_any_done=False)

    twin = COPIES[way](env)

    assert twin.specs == env.specs
    assert_same(*(e.rollout(2, break_when_any_done=False) for e in (env, twin)))
    assert_same(
        *(e.step(env.step_mdp(td[:, -1]).set("action", torch.zeros(3, 1))) for e in (env, twin))
    )


def test_most_brax_envs_cannot_be_pickled_but_those_made_by_name_are_built_again():
    env = BraxEnv("inverted_pendulum", backend="spring", batch_size=[3], device="cpu")

    twin = pickle.loads(pickle.dumps(env))

    assert twin.sys is not env.sys and twin.specs == env.specs
    assert copy.deepcopy(env).sys is env.sys
