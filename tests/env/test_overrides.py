"""What a subclass overrides is honoured on every way: alone, behind transforms, in batches, in whole runs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

import envkit
from envkit import (
    GymEnv,
    MixedEnv,
    ParallelEnv,
    RewardScaling,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    UnsqueezeTransform,
)
from envkit.env.base import EnvBase
from envkit.errors import FusionError, SpecError
from tests.zoo.envs import Count
from tests.zoo.jax_envs import Countdown

LENGTH = 3


class Overriding:
    """Overrides what ``names`` says: steps and resets are counted, actions and rewards are told apart."""

    names: frozenset[str] = frozenset()

    def __init__(self, *args, **kwargs):
        self.calls = dict.fromkeys(self.names, 0)
        super().__init__(*args, **kwargs)


def overriding(kind, *names):
    """Give a subclass of an env class that overrides these methods."""

    def step(self, tensordict):
        self.calls["step"] += 1
        td = super(overridden, self).step(tensordict)
        following = td["next"]
        following.set("reward", following["reward"] + 100)
        return td

    def rand_action(self, tensordict=None):
        if tensordict is None:
            tensordict = TensorDict({}, self.batch_size)
        td = super(overridden, self).rand_action(tensordict)
        return td.set("action", chosen(td["action"]))

    def counted(name):
        def method(self, *args, **kwargs):
            self.calls[name] += 1
            return getattr(super(overridden, self), name)(*args, **kwargs)

        return method

    own = {"step": step, "rand_action": rand_action}
    body = {name: own.get(name, counted(name)) for name in names}
    overridden = type(
        f"Own{kind.__name__}", (Overriding, kind), {**body, "names": frozenset(names)}
    )
    return overridden


def chosen(action):
    """Give the action that an overridden `rand_action` always takes."""
    if action.shape[-1] > 1:  # one-hot
        return torch.nn.functional.one_hot(torch.ones(action.shape[:-1]).long(), 2).to(action)
    return torch.ones_like(action)


def make_jax(kind):
    return kind(Countdown(LENGTH), batch_size=[2], categorical_action_encoding=False)


def make_gym(kind):
    return kind("CartPole-v1", max_episode_steps=LENGTH)


def make_count(kind):
    return kind(LENGTH)


MAKERS = {"count": (make_count, Count), "jax": (make_jax, envkit.JaxEnv), "gym": (make_gym, GymEnv)}


def scaled(env):
    return TransformedEnv(env, RewardScaling(0.0, 1.0))


WAYS = {
    "alone": lambda make: make(),
    "transformed": lambda make: scaled(make()),
    "transformed twice": lambda make: TransformedEnv(scaled(make()), StepCounter()),
    "serial": lambda make: SerialEnv(2, make),
    "serial with rows": lambda make: SerialEnv(2, make, use_buffers=True),
    "serial without rows": lambda make: SerialEnv(2, make, use_buffers=False),
    "parallel": lambda make: ParallelEnv(2, make, num_processes=1),
    "transformed serial": lambda make: scaled(SerialEnv(2, make)),
    "mixed": lambda make: MixedEnv([SerialEnv(2, make)] if make().batch_size == () else [make()]),
}


@pytest.fixture(params=[(way, kind) for way in WAYS for kind in MAKERS], ids="-".join)
def build(request):
    """A function that builds an env of a kind whose class overrides some methods."""
    way, name = request.param
    make, kind = MAKERS[name]
    envs = []

    def build(*names):
        env = WAYS[way](partial(make, overriding(kind, *names)))
        envs.append(env)
        return env

    yield build
    for env in envs:
        env.close(raise_if_closed=False)


def test_an_overridden_step_makes_every_step_of_a_rollout(build):
    env = build("step")

    endless = env.rollout(7, break_when_any_done=False)
    to_the_end = env.rollout(7)
    advanced, _ = env.step_and_maybe_reset(env.rand_action(env.reset()))

    for data in (endless, to_the_end, advanced):
        assert (data["next", "reward"] > 99).all()


def test_an_overridden_rand_action_draws_every_action_of_a_rollout(build):
    env = build("rand_action")

    endless = env.rollout(7, break_when_any_done=False)["action"]
    drawn = env.rand_action()["action"]

    assert torch.equal(endless, chosen(endless))
    assert torch.equal(drawn, chosen(drawn))


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize(
    "method", ["reset", "step_mdp", "maybe_reset", "any_done", "step_and_maybe_reset"]
)
def test_what_follows_a_step_is_honoured_in_a_rollout(name, method):
    make, kind = MAKERS[name]
    env = make(overriding(kind, method))

    env.rollout(7, break_when_any_done=False)

    assert env.calls[method] >= 2


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize("rows", [True, False])
def test_a_sub_env_resets_in_its_own_way_where_an_episode_ends(name, rows):
    make, kind = MAKERS[name]
    env = SerialEnv(2, partial(make, overriding(kind, "step_and_maybe_reset")), use_buffers=rows)

    env.rollout(7, break_when_any_done=False)

    assert [calls["step_and_maybe_reset"] for calls in env.calls] == [6, 6]


BATCHES = {
    "serial": (SerialEnv, lambda kind: kind(2, partial(make_gym, GymEnv))),
    "parallel": (ParallelEnv, lambda kind: kind(2, partial(make_gym, GymEnv), num_processes=1)),
    "mixed": (MixedEnv, lambda kind: kind([make_jax(envkit.JaxEnv)])),
    "transformed": (TransformedEnv, lambda kind: kind(make_jax(envkit.JaxEnv), StepCounter())),
}


@pytest.mark.parametrize("name", sorted(BATCHES))
@pytest.mark.parametrize("around", [False, True], ids=["bare", "in a transformed env"])
def test_a_subclass_of_an_env_of_envs_is_honoured_as_well(name, around):
    kind, make = BATCHES[name]
    env = make(overriding(kind, "step", "rand_action"))
    data = (scaled(env) if around else env).rollout(7, break_when_any_done=False)
    env.close(raise_if_closed=False)

    assert (data["next", "reward"] > 99).all()
    assert torch.equal(data["action"], chosen(data["action"]))


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_method_put_on_one_env_is_honoured_as_well(name):
    make, kind = MAKERS[name]
    env, twin = make(kind), scaled(make(kind))
    twin.rollout(2)  # what it runs is decided already

    for one in (env, twin.base_env):
        one.step = paying(one.step)

    for one in (env, twin):
        assert (one.rollout(7, break_when_any_done=False)["next", "reward"] == 101).all()
    del env.step
    assert (env.rollout(7, break_when_any_done=False)["next", "reward"] == 1).all()


def paying(step):
    def more(tensordict):
        td = step(tensordict)
        td["next"].set("reward", td["next"]["reward"] + 100)
        return td

    return more


@pytest.mark.parametrize(
    ("method", "around"),
    [("step", False), ("maybe_reset", False), ("rand_action", False), ("step", True)],
)
def test_unroll_refuses_to_pass_an_override_by(method, around):
    env = make_jax(overriding(envkit.JaxEnv, method))
    env = scaled(env) if around else env

    with pytest.raises(FusionError, match=rf"OwnJaxEnv makes of {method}\. Use rollout"):
        env.unroll(env.reset(), 3)


def test_random_actions_of_another_form_than_the_base_env_draws_are_refused():
    widened = UnsqueezeTransform(-1, in_keys_inv=["action"], out_keys_inv=["action"])
    env = TransformedEnv(make_count(overriding(Count, "rand_action")), widened)

    with pytest.raises(SpecError, match=r"(?s)draws its own random actions.*pass a policy"):
        env.rand_action()


def every_env_class(kind=EnvBase):
    for subclass in kind.__subclasses__():
        yield subclass
        yield from every_env_class(subclass)


def test_no_env_class_of_envkit_slows_itself_down_by_an_override():
    kinds = [
        kind
        for kind in every_env_class()
        if kind.__module__.split(".")[0] in ("envkit", "envkit_bridges")
    ]

    changed = [
        kind.__name__
        for kind in kinds
        if not kind._defined_since.isdisjoint(kind._fast_path_bypasses | {"rand_action"})
    ]

    assert {GymEnv, SerialEnv, ParallelEnv, MixedEnv, envkit.JaxEnv} <= set(kinds)
    assert not changed
