"""Policies that are called with tensors: what a plain TensorDictModule gives is what it gives by itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, set_skip_existing
from torch import nn

from envkit import GymEnv, SerialEnv, StepCounter, TransformedEnv
from envkit.env import bound_policy
from envkit.env.bound_policy import bind_policy
from envkit.errors import MissingKeyError, PolicyError
from tests.bridges.compare import assert_same


class AsItIs(TensorDictModule):
    """Does the same, but is no `TensorDictModule` itself, so it is always called with a TensorDict."""


class Torque(nn.Module):
    """An action, and whatever else a function makes of observation and action."""

    def __init__(self, more=None):
        super().__init__()
        self.linear, self.more = nn.Linear(3, 1), more

    def forward(self, observation):
        action = self.linear(observation).tanh()
        return action if self.more is None else self.more(observation, action)

    def doubled(self, observation, by=2.0):
        return self.linear(observation).tanh() * by


class Remembers(nn.Module):
    def forward(self, observation, memory):
        memory = observation if memory is None else memory + observation
        return memory[..., :1].tanh(), memory


def module(cls, out_keys=("action",), more=None, in_keys=("observation",), **options):
    torch.manual_seed(3)
    keys = in_keys if isinstance(in_keys, dict) else list(in_keys)
    return cls(Torque(more), in_keys=keys, out_keys=list(out_keys), **options)


def hooked(cls):
    made = module(cls)
    made.register_forward_hook(lambda self, args, td: td.set("action", td["action"] / 2))
    return made


def selected(cls):
    made = module(cls, ("action", "loc"), lambda o, a: (a, a * 2))
    return made.select_out_keys("action")


def with_a_forward_of_its_own(cls):
    made = module(cls)
    forward = made.forward
    made.forward = lambda td: forward(td).set("action", td["action"] / 2)
    return made


MODULES = {
    "one tensor": module,
    "several": lambda cls: module(
        cls, ("loc", "action", ("of", "scale")), lambda o, a: (a * 2, a, a)
    ),
    "one that is dropped": lambda cls: module(cls, ("_", "action"), lambda o, a: (a * 2, a)),
    "a dict": lambda cls: module(
        cls, ("action", "loc"), lambda o, a: {"loc": a * 2, "action": a, "x": 1}
    ),
    "a tree": lambda cls: module(
        cls, ("action", "tree"), lambda o, a: (a, {"loc": a, "in": {"x": o}})
    ),
    "an array": lambda cls: module(cls, ("action", "loc"), lambda o, a: (a, a.detach().numpy())),
    "what it was given": lambda cls: module(cls, ("action", "seen"), lambda o, a: (a, o)),
    "another observation": lambda cls: module(
        cls, ("action", "observation"), lambda o, a: (a, o * 2)
    ),
    "what it reads again": lambda cls: cls(
        Remembers(), ["observation", "memory"], ["action", "memory"]
    ),
    "something for next": lambda cls: module(cls, ("action", ("next", "loc")), lambda o, a: (a, a)),
    "by keyword": lambda cls: module(cls, in_keys={"observation": "observation"}),
    "by another method": lambda cls: module(cls, method="doubled", method_kwargs={"by": 0.5}),
    "in a new TensorDict": lambda cls: module(cls, inplace=False),
    "strictly": lambda cls: module(cls, strict=True),
    "through a hook": hooked,
    "selected": selected,
    "through a forward of its own": with_a_forward_of_its_own,
}


def pendulums():
    return SerialEnv(2, partial(GymEnv, "Pendulum-v1"))


ENVS = {
    "one": partial(GymEnv, "Pendulum-v1"),
    "on rows": pendulums,
    "step by step": lambda: TransformedEnv(pendulums(), StepCounter()),
}


def ran(policy, make=pendulums, steps=4, **options):
    env = make()
    env.set_seed(0)
    torch.manual_seed(0)
    data = env.rollout(steps, policy, break_when_any_done=False, **options)
    env.close(raise_if_closed=False)
    return data


@pytest.mark.parametrize("way", sorted(ENVS))
@pytest.mark.parametrize("kind", sorted(MODULES))
def test_a_module_gives_what_it_gives_by_itself(kind, way):
    make = MODULES[kind]

    wanted = ran(make(AsItIs), ENVS[way])
    got = ran(make(TensorDictModule), ENVS[way])

    assert_same(got, wanted)


@pytest.mark.parametrize(
    "kind", ["one tensor", "several", "one that is dropped", "what it was given"]
)
def test_a_plain_module_is_never_called_itself(kind, monkeypatch):
    called = []
    monkeypatch.setattr(TensorDictModule, "forward", lambda self, td: called.append(td))

    for make in ENVS.values():
        ran(MODULES[kind](TensorDictModule), make)

    assert not called


def test_on_rows_no_tensordict_is_made_for_a_step(monkeypatch):
    called = []
    monkeypatch.setattr(bound_policy._OnModule, "__call__", lambda self, td: called.append(td))

    data = ran(module(TensorDictModule))

    assert data.shape == (2, 4)
    assert not called


def test_a_hook_that_comes_later_is_heeded():
    env = pendulums()
    policy = module(TensorDictModule)
    act, seen = bind_policy(env, policy), []
    root = TensorDict({"observation": torch.zeros(2, 3)}, [2])

    act(root.copy())
    policy.register_forward_hook(lambda self, args, td: seen.append(td))
    act(root.copy())
    env.rollout(3, policy)
    env.close()

    assert len(seen) == 4


def test_what_is_there_is_not_computed_where_that_is_asked_for():
    root = TensorDict({"observation": torch.zeros(2, 3), "action": torch.ones(2, 1)}, [2])
    env = pendulums()
    act = bind_policy(env, module(TensorDictModule))

    with set_skip_existing(True):
        kept = act(root.copy())["action"]
    computed = act(root.copy())["action"]
    env.close(raise_if_closed=False)

    assert (kept == 1).all()
    assert not (computed == 1).any()


def test_gradients_flow_through_what_a_module_writes():
    policy = module(TensorDictModule, ("action", "loc"), lambda o, a: (a, a * 2))

    ran(policy)["loc"].sum().backward()

    assert policy.module.linear.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("way", sorted(ENVS))
@pytest.mark.parametrize(
    ("out_keys", "more", "error"),
    [
        (["loc"], None, MissingKeyError),
        (["action", "loc"], None, RuntimeError),
        (["action", "loc"], lambda o, a: (a, a, a), RuntimeError),
        (["action"], lambda o, a: a / "2", TypeError),
    ],
)
def test_what_does_not_fit_is_told_as_the_module_itself_tells_it(way, out_keys, more, error):
    messages = []
    for cls in (AsItIs, TensorDictModule):
        with pytest.raises(error) as info:
            ran(module(cls, out_keys, more), ENVS[way])
        messages.append(str(info.value))

    assert messages[0] == messages[1]


def test_an_entry_that_lacks_the_rows_is_refused_as_the_module_itself_refuses_it():
    messages = []
    for cls in (AsItIs, TensorDictModule):
        with pytest.raises(RuntimeError) as info:
            ran(module(cls, ["action", "loc"], lambda o, a: (a, a.sum())))
        messages.append(str(info.value))

    assert messages[0] == messages[1]


def test_a_release_of_tensordict_that_keeps_something_else_is_left_to_itself(monkeypatch):
    policy = module(TensorDictModule)
    env = GymEnv("Pendulum-v1")
    vars(policy)["_arguments"] = vars(policy).pop("_kwargs")
    called = []
    monkeypatch.setattr(
        TensorDictModule, "__call__", lambda self, td: called.append(td) or td.set("action", [0.0])
    )

    bind_policy(env, policy)(env.reset())

    assert len(called) == 1


@pytest.mark.parametrize(
    ("action", "encoding", "advice"),
    [
        (
            torch.ones(2, dtype=torch.int64),
            False,
            r"categorical_action_encoding=True\. Return torch",
        ),
        (
            torch.zeros(2, 2),
            True,
            r"If these are scores of the options, return scores\.argmax\(-1\)",
        ),
        (torch.zeros(2, 5), True, "Return one value for each element"),
    ],
)
def test_the_shape_of_an_action_tells_what_to_return_instead(action, encoding, advice):
    with (
        SerialEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=encoding)) as env,
        pytest.raises(PolicyError, match=advice),
    ):
        env.rollout(2, lambda observation: action)
