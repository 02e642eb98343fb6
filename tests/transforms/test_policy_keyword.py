"""Envs that adapt to a policy with memory."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from envkit import (
    Bounded,
    Compose,
    Composite,
    GymEnv,
    InitTracker,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    Unbounded,
    check_env_specs,
    get_env_transforms_from_module,
)
from tests.zoo.envs import Count
from tests.zoo.transform_envs import SelfResetting


class Memory(nn.Module):
    """A GRU policy: reads ``count``, ``is_init`` and its hidden state, writes the next one."""

    def __init__(self, name="hidden", init_key="is_init"):
        super().__init__()
        self.cell = nn.GRUCell(1, 3).requires_grad_(False)
        self.name, self.init_key = name, init_key

    def make_tensordict_primer(self):
        return TensorDictPrimer({self.name: Unbounded((3,))}, expand_specs=True)

    def forward(self, tensordict):
        batch = tensordict.batch_size
        count, hidden = tensordict["count"].float(), tensordict[self.name]
        hidden = torch.where(tensordict[self.init_key], 0.0, hidden)
        new = self.cell(count.reshape(-1, 1), hidden.reshape(-1, 3)).reshape(*batch, 3)
        tensordict["action"] = (new.sum(-1, keepdim=True) > 0).long()
        return tensordict.set(("next", self.name), new)


def kinds(env) -> list[str]:
    return [type(transform).__name__ for transform in env.transform.flat()]


def test_the_keyword_wraps_the_env():
    env = Count(5, policy=Memory())

    assert type(env) is TransformedEnv and kinds(env) == ["InitTracker", "TensorDictPrimer"]
    assert "policy" not in inspect.signature(Count.__init__).parameters
    assert {"is_init", "hidden"} <= set(env.reset().keys())
    check_env_specs(env)


def test_every_recurrent_part_has_a_primer():
    policy = nn.ModuleList([Memory("first"), nn.Sequential(Memory("second"))])

    env = Count(5, policy=policy)

    assert kinds(env) == ["InitTracker", "TensorDictPrimer", "TensorDictPrimer"]
    assert {"first", "second"} <= set(env.reset().keys())


def test_a_second_pass_adds_nothing():
    env = Count(5, policy=Memory())

    again = TransformedEnv(env.base_env, env.transform.clone(), policy=Memory())

    assert kinds(again) == ["InitTracker", "TensorDictPrimer"]
    assert kinds(TransformedEnv(env, policy=Memory())) == []


def test_what_sub_envs_have_is_not_added_again():
    policy = Memory()

    env = SerialEnv(2, lambda: Count(5, policy=policy), policy=policy)

    assert type(env) is SerialEnv
    assert env.reset()["is_init"].shape == (2, 1)
    assert type(SerialEnv(2, partial(Count, 5), policy=policy)) is TransformedEnv


def test_a_marker_of_another_name_is_not_recognised():
    env = TransformedEnv(Count(5), InitTracker("first"), policy=Memory())

    assert {"first", "is_init"} <= set(env.reset().keys())


@pytest.mark.parametrize("policy", [lambda: Memory(), nn.Linear(1, 1), None])
def test_what_has_no_memory_changes_nothing(policy):
    assert type(Count(5, policy=policy)) is Count
    assert len(get_env_transforms_from_module(policy)) == 0


def test_the_transforms_can_be_had_for_wiring_by_hand():
    transforms = get_env_transforms_from_module(Memory(init_key="new"), init_key="new")

    assert isinstance(transforms, Compose)
    assert [type(t) for t in transforms] == [InitTracker, TensorDictPrimer]
    assert "new" in TransformedEnv(Count(5), transforms).reset().keys()


def test_a_recurrent_policy_remembers_within_an_episode_and_not_beyond():
    policy = Memory()
    env = SerialEnv(2, [partial(Count, 2), partial(Count, 3)], policy=policy)

    data = env.rollout(5, policy, break_when_any_done=False)

    begins = data["is_init"].squeeze(-1)
    assert begins.tolist() == [[True, False, True, False, True], [True, False, False, True, False]]
    assert not data["hidden"][begins].any()
    later = ~begins[:, 1:]
    assert data["hidden"][:, 1:][later].equal(data["next", "hidden"][:, :-1][later])
    assert data["next", "hidden"].any(-1).all()


def test_both_keywords_go_together():
    env = SelfResetting(2, auto_reset=True, policy=Memory())

    data = env.rollout(5, Memory(), break_when_any_done=False)

    assert data["is_init"].flatten().tolist() == [True, False, True, False, True]


class Foreign(Memory):
    """Its primer is one only in what it has."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def make_tensordict_primer(self):
        known = {"default_value": 0.0, "random": False, "expand_specs": True}
        return SimpleNamespace(
            primers=Composite(hidden=Bounded(2.0, 3.0, (3,))),
            **{**known, "single_default_value": False, **self.options},
        )


@pytest.mark.parametrize(
    "options",
    [
        {"default_value": 2.5},
        {"default_value": {"hidden": 2.5}},
        {"default_value": lambda: torch.full((3,), 2.5)},
        {"default_value": lambda: {"hidden": 2.5}, "single_default_value": True},
        {"default_value": None, "random": True},
    ],
)
def test_primers_of_other_libraries_begin_as_they_say(options):
    hidden = SerialEnv(2, partial(Count, 5), policy=Foreign(**options)).reset()["hidden"]

    assert hidden.shape == (2, 3) and bool((hidden >= 2).all() and (hidden <= 3).all())
    assert options.get("random") or bool((hidden == 2.5).all())


@pytest.mark.parametrize("kind", ["GRUModule", "LSTMModule"])
def test_recurrent_modules_of_the_reference_are_primed(kind):
    modules = pytest.importorskip("torchrl.modules")
    hidden = ["hidden"] if kind == "GRUModule" else ["hidden", "cell"]
    recurrent = getattr(modules, kind)(
        input_size=3,
        hidden_size=4,
        in_keys=["observation", *hidden],
        out_keys=["seen", *(("next", name) for name in hidden)],
    )
    acting = TensorDictModule(nn.Linear(4, 1), in_keys=["seen"], out_keys=["action"])
    policy = TensorDictSequential(recurrent, acting).requires_grad_(False)

    env = SerialEnv(2, lambda: TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(3)), policy=policy)
    data = env.rollout(5, policy, break_when_any_done=False)

    begins = data["is_init"].squeeze(-1)
    assert begins.tolist() == [[True, False, False, True, False]] * 2
    for name in hidden:
        assert data[name].shape == (2, 5, 1, 4) and not data[name][begins].any()
        later = ~begins[:, 1:]
        assert data[name][:, 1:][later].equal(data["next", name][:, :-1][later])
        assert data["next", name].any(-1).all()
