"""Modules as transforms."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from envkit import (
    Bounded,
    Compose,
    GymEnv,
    ModuleTransform,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    Unbounded,
    check_env_specs,
)
from envkit.errors import ArgumentError, MissingKeyError
from tests.zoo.envs import StatelessCount
from tests.zoo.shaped_envs import Several


class Encoder(nn.Module):
    """Four numbers to two."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, observation):
        return self.linear(observation)


def encoder(**options) -> ModuleTransform:
    return ModuleTransform(Encoder(), in_keys="observation", out_keys="code", **options)


def cartpole(transform) -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), transform)


# ------------------------------------------------------------------------------------ what it computes


@pytest.mark.rounding
def test_a_module_sees_every_reset_and_every_step():
    transform = encoder(no_grad=True)
    env = cartpole(transform)

    data = env.rollout(5)

    with torch.no_grad():  # all steps at once are rounded apart from one after the other
        for part in (data, data["next"]):
            torch.testing.assert_close(part["code"], transform.module.module(part["observation"]))


def test_gradients_are_kept_unless_told_otherwise():
    assert cartpole(encoder()).rollout(2)["next", "code"].requires_grad
    assert not cartpole(encoder(no_grad=True)).rollout(2)["next", "code"].requires_grad


def test_a_module_may_change_an_entry_in_place():
    module = TensorDictModule(lambda reward: reward * 10, ["reward"], ["reward"])

    data = cartpole(ModuleTransform(module)).rollout(3)

    assert data["next", "reward"].flatten().tolist() == [10.0, 10.0, 10.0]


def test_a_module_may_read_rewards_and_write_beside_them():
    module = TensorDictModule(lambda r, x: r + x[..., :1], ["reward", "observation"], ["mixed"])
    env = cartpole(ModuleTransform(module, reward_spec_transform=declare_mixed))

    data = env.rollout(3)

    assert env.reward_keys == ["mixed", "reward"]
    assert data["next", "mixed"].equal(
        data["next", "reward"] + data["next", "observation"][..., :1]
    )
    check_env_specs(env)


def declare_mixed(spec):
    spec["mixed"] = Unbounded((1,))
    return spec


def test_a_module_may_decode_actions():
    module = TensorDictModule(lambda raw: raw.tanh() * 2, ["raw"], ["action"])
    env = TransformedEnv(
        GymEnv("Pendulum-v1"),
        ModuleTransform(module, inverse=True, action_spec_transform=declare_raw),
    )

    data = env.rollout(3)

    assert env.action_keys == ["raw"]
    assert set(data.keys()) >= {"raw"} and "action" not in data.keys()
    check_env_specs(env)


def declare_raw(spec):
    del spec["action"]
    spec["raw"] = Unbounded((1,))
    return spec


def test_rows_that_are_left_out_are_not_shown_to_the_module():
    seen = []

    def look(count):
        seen.append(count.shape[0])
        return count.float()

    module = TensorDictModule(look, ["count"], ["twice"])
    env = TransformedEnv(StatelessCount(5, batch_size=[4]), ModuleTransform(module))
    td = env.rand_action(env.reset())
    seen.clear()

    env.step(td.set("_step", torch.tensor([True, False, True, False])))

    assert seen == [2]


# ------------------------------------------------------------------------------------------- specs


@pytest.mark.parametrize("batch", [False, True])
def test_what_a_module_writes_is_declared_from_a_trial(batch):
    env = SerialEnv(2, lambda: cartpole(encoder())) if batch else cartpole(encoder())

    assert env.observation_spec["code"].shape == (*env.batch_size, 2)
    check_env_specs(env)
    env.close()


def test_a_nested_entry_is_declared_in_its_node():
    module = TensorDictModule(
        lambda x: x.sum(-1, keepdim=True), [("deep", "twice")], [("deep", "sum")]
    )

    env = TransformedEnv(Several(), ModuleTransform(module))

    assert env.observation_spec["deep", "sum"].shape == (1,)
    check_env_specs(env)


@pytest.mark.parametrize(
    "change", [Bounded(-5.0, 5.0, (4,)), lambda spec: Bounded(-5.0, 5.0, (4,))]
)
def test_a_spec_may_be_said(change):
    module = TensorDictModule(lambda x: x.clamp(-5, 5), ["observation"], ["observation"])

    env = cartpole(ModuleTransform(module, observation_spec_transform=change))

    assert isinstance(env.observation_spec["observation"], Bounded)
    check_env_specs(env)


def test_the_trial_leaves_no_traces():
    norm = nn.BatchNorm1d(1)
    module = TensorDictModule(lambda x: norm(x.float()), ["count"], ["normal"])
    module.add_module("norm", norm)
    transform = ModuleTransform(module, no_grad=True)
    env = TransformedEnv(StatelessCount(5, batch_size=[4]), transform)

    assert env.observation_spec["normal"].shape == (4, 1)

    assert norm.num_batches_tracked == 0
    assert not transform.training  # in an env


# ------------------------------------------------------------------------------------- as a module


def test_its_parameters_are_those_of_the_env():
    env = cartpole(Compose(encoder(), StepCounter()))

    assert sum(parameter.numel() for parameter in env.parameters()) == 10
    twin = cartpole(Compose(encoder(), StepCounter()))
    twin.transform.load_state_dict(env.transform.state_dict())
    assert all(map(torch.equal, env.parameters(), twin.parameters()))


def test_a_module_is_made_where_the_env_lives():
    calls = []

    def make():
        calls.append(1)
        return TensorDictModule(Encoder(), ["observation"], ["code"])

    env = cartpole(ModuleTransform(module_factory=make))

    assert calls == [1]
    assert env.rollout(2)["code"].shape == (2, 2)


def test_it_transforms_recorded_data():
    transform = encoder()
    data = GymEnv("CartPole-v1").rollout(3)

    assert transform(data)["code"].shape == (3, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_data_is_brought_to_the_module_and_back():
    data = cartpole(encoder(device="cuda")).rollout(3)

    assert data["code"].device == data["observation"].device == torch.device("cpu")


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("keywords", [{}, {"module": Encoder(), "module_factory": Encoder}])
def test_one_module_is_needed(keywords):
    with pytest.raises(ArgumentError, match="one of them"):
        ModuleTransform(**keywords)


@pytest.mark.parametrize("keywords", [{}, {"in_keys": ["observation"]}, {"out_keys": ["code"]}])
def test_a_module_on_tensors_needs_keys(keywords):
    with pytest.raises(ArgumentError, match="Encoder does not say which entries"):
        ModuleTransform(Encoder(), **keywords)


def test_an_entry_nobody_has_is_named():
    transform = ModuleTransform(Encoder(), in_keys="pixels", out_keys="code")

    with pytest.raises(MissingKeyError, match=r"reads \['pixels'\].*'observation'"):
        cartpole(transform).observation_spec  # noqa: B018
    with pytest.raises(MissingKeyError, match=r"reads \['pixels'\].*data has"):
        transform(GymEnv("CartPole-v1").rollout(3))
