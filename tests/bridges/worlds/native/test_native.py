"""The world "envkit": its names, what it refuses, and the pendulum in JAX beside the one in torch."""

from __future__ import annotations

import copy
import pickle
import sys
from functools import partial

import pytest
import torch
from tensordict import TensorDict

import envkit
from envkit import Collector, ParallelEnv, PendulumEnv, check_env_specs
from envkit.errors import (
    InputError,
    MissingKeyError,
    MissingLibraryError,
)
from envkit_bridges.worlds import native

ROWS = 4


@pytest.fixture(scope="module")
def twin():
    env = native.build("PendulumJax", batch_size=[ROWS], requires_grad=True)
    env.set_seed(0)
    return env


def test_names_are_sorted():
    names = native.env_names()

    assert names == sorted(names) and "Pendulum" in names


def test_a_library_that_is_missing_is_told_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "chess", None)

    with pytest.raises(MissingLibraryError, match=r"pip install -e '\.\[chess\]'"):
        native.build("Chess")


IN_TORCH = ["Chess", "FinancialRegime", "Pendulum", "TicTacToe"]


@pytest.mark.parametrize("name", IN_TORCH)
def test_each_env_is_made_for_a_batch_whatever_the_default_dtype(name):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        env = envkit.make(f"envkit/{name}", 2)
        check_env_specs(env, seed=0)
    finally:
        torch.set_default_dtype(before)

    assert not env.batch_locked and env.batch_size == (2,)


@pytest.mark.parametrize("name", IN_TORCH)
def test_an_action_of_another_shape_or_kind_is_refused(name):
    env = native.build(name, batch_size=[3])
    root = env.rand_action(env.reset())
    action = root["action"]

    with pytest.raises(InputError, match=r"'action' has shape .*, but the env takes"):
        env.step(root.clone().set("action", torch.stack([action, action], -1)))
    with pytest.raises(InputError, match=r"'action' has dtype torch.complex64, but the env takes"):
        env.step(root.clone().set("action", action.to(torch.complex64)))
    with pytest.raises(MissingKeyError, match="the TensorDict has no 'action'"):
        env.step(root.exclude("action"))


@pytest.mark.parametrize("name", IN_TORCH)
def test_copies_go_on_with_the_same_random_numbers(name):
    env = native.build(name, batch_size=[3])
    env.set_seed(0)
    env.rollout(2)

    others = [copy.deepcopy(env), pickle.loads(pickle.dumps(env))]

    data = env.rollout(4, break_when_any_done=False)
    for other in others:
        again = other.rollout(4, break_when_any_done=False)
        assert again["action"].equal(data["action"])
        for key in env.reward_keys:
            assert again["next"].get(key).equal(data["next"].get(key))


@pytest.mark.slow  # starts workers
@pytest.mark.parametrize("name", IN_TORCH)
def test_each_env_works_in_workers_and_collectors(name, opened):
    env = opened(ParallelEnv(2, partial(native.build, name)))
    check_env_specs(env, seed=0)
    collector = Collector(partial(native.build, name), None, frames_per_batch=20, total_frames=40)

    assert env.rollout(20, break_when_any_done=False).shape == (2, 20)
    assert [batch.shape for batch in collector] == [(20,), (20,)]
    collector.shutdown()


def test_both_pendulums_declare_the_same(twin):
    env = native.build("Pendulum", batch_size=[ROWS])

    for name, leaf in env.observation_spec.items(True, True):
        own = twin.observation_spec[name].cpu()
        assert own.shape == leaf.shape and own.dtype == leaf.dtype and type(own) is type(leaf)
        assert torch.equal(own.space.low, leaf.space.low)
    assert twin.action_spec == env.action_spec and twin.reward_spec == env.reward_spec
    check_env_specs(twin)


def test_both_pendulums_make_the_same_steps_up_to_rounding(twin):
    env = PendulumEnv(seed=0)
    start = env.gen_params(batch_size=[ROWS])
    start["params", "g"] = torch.tensor([10.0, 1.0, 5.0, 9.8])
    root = env.reset(start)

    for _ in range(100):
        action = torch.randn(ROWS, 1) * 3
        ours = env.step(root.set("action", action))
        theirs = twin.step(twin.root_at(root).set("action", action))["next"]
        for name in ("thdot", "reward", ("params", "g")):
            torch.testing.assert_close(theirs[name], ours["next", name], rtol=1e-5, atol=1e-5)
        apart = theirs["th"] - ours["next", "th"]  # pi and -pi are one angle
        assert (apart.sin().abs() < 1e-5).all() and (apart.cos() > 0).all()
        root = env.step_mdp(ours)


def test_both_pendulums_have_the_same_gradients(twin):
    root = PendulumEnv(seed=1).reset(PendulumEnv.gen_params(batch_size=[ROWS]))
    gradients = []
    for env, start in ((PendulumEnv(), root), (twin, twin.root_at(root))):
        action = torch.full((ROWS, 1), 0.3, requires_grad=True)
        first = env.step(start.clone().set("action", action))
        second = env.step(env.step_mdp(first).set("action", action))
        total = first["next", "reward"] + second["next", "reward"]
        gradients += torch.autograd.grad(total.sum(), action)

    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_rows_that_bring_only_parameters_begin_at_a_state_of_their_own(twin):
    params = PendulumEnv.gen_params(g=2.0, batch_size=[ROWS])

    root = twin.root_at(params)

    assert (root["params", "g"] == 2).all() and root["th"].unique().numel() == ROWS
    assert (twin.unpack(root["state"])["params", "g"] == 2).all()
    assert isinstance(root, TensorDict)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (3, "params is 3, of type int"),
        ({"g": "strong"}, "g is 'strong'"),
        ({"m": None}, "m is None"),
    ],
)
def test_parameters_of_the_twin_are_numbers_by_name(params, message):
    with pytest.raises(TypeError, match=message):
        native.build("PendulumJax", params=params)
