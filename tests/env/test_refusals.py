"""What no env can do is refused with what was wrong and what to do instead."""

from __future__ import annotations

from contextlib import closing

import gymnasium
import pytest
import torch
from gymnasium import spaces

from envkit import (
    AsyncEnvPool,
    BraxEnv,
    EnvBase,
    GymEnv,
    GymWrapper,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    PendulumEnv,
    SerialEnv,
    TransformedEnv,
)
from envkit.errors import (
    ArgumentError,
    ClosedEnvError,
    DataTypeError,
    InputError,
    OptionError,
    SpecError,
    WorkerError,
)
from tests.zoo.envs import Count
from tests.zoo.jax_envs import Countdown, NoisyWalk, Pendulum


class Idle(gymnasium.Env):
    """Takes no action at all."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Dict({})


def test_a_simulator_without_actions_is_refused():
    with pytest.raises(SpecError, match=r"action space of .* is Dict\(\), which holds no action"):
        GymWrapper(Idle())


@pytest.mark.parametrize("layout", ["packed", "nested"])
@pytest.mark.parametrize("call", ["step", "reset", "unroll"])
def test_the_state_of_another_env_is_refused(layout, call):
    walk, pendulum = (
        JaxEnv(core(), batch_size=[2], state_layout=layout) for core in (NoisyWalk, Pendulum)
    )
    root = pendulum.rand_action(pendulum.reset()).set("state", walk.reset()["state"])
    calls = {
        "step": lambda: pendulum.step(root),
        "reset": lambda: pendulum.reset(root.set("_reset", torch.tensor([True, False]))),
        "unroll": lambda: pendulum.unroll(root, 3),
    }
    told = {"packed": (InputError, "that of another env"), "nested": (KeyError, "lacks")}
    kind, message = told[layout]

    with pytest.raises(kind, match=message):
        calls[call]()


VECTORISED = {
    "gym": lambda: GymEnv("Pendulum-v1"),
    "serial": lambda: SerialEnv(1, lambda: GymEnv("Pendulum-v1")),
    "jax": lambda: JaxEnv(Pendulum(), batch_size=[1]),
    "mixed": lambda: MixedEnv([JaxEnv(Pendulum(), batch_size=[1])]),
    "transformed": lambda: TransformedEnv(GymEnv("Pendulum-v1")),
}


@pytest.mark.parametrize("name", sorted(VECTORISED))
def test_a_step_under_torch_func_is_refused(name):
    env = VECTORISED[name]()
    root = env.rand_action(env.reset())

    def paid(action):
        return env.step(root.copy().set("action", action))["next", "reward"].sum()

    for transformed, action in (
        (torch.func.grad(paid), root["action"]),
        (torch.vmap(paid), root["action"][None]),
    ):
        with pytest.raises(
            DataTypeError, match=r"'action' is a tensor under .*torch.func.*outside"
        ):
            transformed(action)
    env.step(root)
    env.close(raise_if_closed=False)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_envs": 4}, "takes no keyword 'num_envs'. Did you mean 'batch_size'"),
        ({"batchsize": [4]}, "takes no keyword 'batchsize'. Did you mean 'batch_size'"),
        ({"asymetric_obs": True}, "Did you mean 'asymmetric_obs'"),
        ({"colour": "red"}, "takes no keyword 'colour'. Leave it out"),
    ],
)
def test_a_brax_env_takes_no_keyword_that_it_does_not_know(given, told):
    with pytest.raises(OptionError, match=told):
        BraxEnv("fast", device="cpu", **given)


class Passing(Count):
    """Hands on what it is given, as subclasses do."""

    def __init__(self, **kwargs):
        EnvBase.__init__(self, **kwargs)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (
            lambda: JaxEnv(Countdown(3), batchsize=[4]),
            "JaxEnv takes no keyword 'batchsize'. Did you mean 'batch_size'",
        ),
        (
            lambda: JaxEnv(Countdown(3), requires_grads=True),
            "JaxEnv takes no keyword 'requires_grads'. Did you mean 'requires_grad'",
        ),
        (
            lambda: GymWrapper(gymnasium.make("CartPole-v1"), frameskip=2),
            "GymWrapper takes no keyword 'frameskip'. Did you mean 'frame_skip'",
        ),
        (
            lambda: Passing(devices="cpu"),
            "Passing takes no keyword 'devices'. Did you mean 'device'",
        ),
        (lambda: Passing(colour="red"), "takes no keyword 'colour'. Leave it out. It takes device"),
    ],
)
def test_a_keyword_that_no_env_has_is_refused_with_the_nearest_one(build, told):
    with pytest.raises(OptionError, match=told):
        build()


@pytest.mark.parametrize("make", [PendulumEnv, lambda: SerialEnv(2, PendulumEnv)])
def test_a_reset_to_a_state_must_be_shown_it(make):
    env = make()
    td = env.reset()

    with pytest.raises(ArgumentError, match=r"set_state=True .* select_reset_only=True leaves out"):
        env.reset(td, set_state=True, select_reset_only=True)
    assert torch.equal(env.reset(td.clone(), set_state=True)["th"], td["th"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: SerialEnv(2, Count),
        lambda: ParallelEnv(2, Count),
        lambda: AsyncEnvPool([Count] * 2),
        lambda: GymEnv("CartPole-v1", num_workers=2),
        lambda: TransformedEnv(SerialEnv(2, Count)),
    ],
)
def test_what_never_started_closes_in_silence(make):
    env = make()

    env.close()
    env.close()

    assert env.is_closed


def test_a_batched_env_that_was_started_is_closed_as_often_as_one_likes():
    env = SerialEnv(2, Count)
    env.reset()
    env.close()
    env.close()

    with pytest.raises(ClosedEnvError, match="is not running"):
        env.close(raise_if_closed=True)


def test_the_reason_of_a_failed_start_is_not_hidden_by_closing():
    def fails():
        raise OSError("no licence")

    env = SerialEnv(2, fails)

    with pytest.raises(WorkerError, match="no licence"), closing(env):
        env.reset()
