"""`PendulumEnv`: the equations worked by hand, parameters in the data, gradients, resets of a part."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envkit import PendulumEnv, SerialEnv, StepCounter, TransformedEnv, check_env_specs
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    DeviceNameError,
    InputError,
    MissingKeyError,
)


def at(th, thdot, action, **params):
    """Give the data of one pendulum."""
    td = PendulumEnv.gen_params()
    td["params"].update({name: torch.tensor(value) for name, value in params.items()})
    return td.update(
        {"th": torch.tensor(th), "thdot": torch.tensor(thdot), "action": torch.tensor([action])}
    )


@pytest.mark.parametrize("options", [{}, {"batch_size": [3]}], ids=str)
def test_a_pendulum_does_what_its_specs_say(options):
    check_env_specs(PendulumEnv(**options), seed=0)


def test_a_horizontal_pendulum_falls_as_worked_by_hand():
    following = PendulumEnv().step(at(math.pi / 2, 0.0, 0.0, g=10.0))["next"]

    assert following["thdot"].item() == pytest.approx(0.75)
    assert following["th"].item() == pytest.approx(math.pi / 2 + 0.0375)
    assert following["reward"].item() == pytest.approx(-((math.pi / 2) ** 2))
    assert not following["done"].any()


def test_torque_and_speed_are_clipped_to_what_the_data_says():
    following = PendulumEnv().step(at(0.0, 1.0, 5.0, max_torque=1.5, max_speed=1.1, m=2.0, l=0.5))[
        "next"
    ]

    assert following["thdot"].item() == pytest.approx(1.1)  # 1 + 3 * 1.5 / (2 * 0.25) * 0.05 = 1.45
    assert following["reward"].item() == pytest.approx(-(0.1 + 0.001 * 1.5**2))


def test_parameters_of_each_row_last_through_a_rollout():
    env = PendulumEnv(seed=0)
    start = env.gen_params(batch_size=[5])
    start["params", "g"] = torch.arange(5.0)

    data = env.rollout(3, tensordict=start)

    assert data.shape == (5, 3)
    assert data["next", "params", "g"].equal(torch.arange(5.0)[:, None].expand(5, 3))
    assert (data["th"].abs() <= math.pi + 1e-6).all() and (data["thdot"][:, 0].abs() <= 1).all()


def test_the_constructors_parameters_are_those_of_rows_that_bring_none():
    env = PendulumEnv(
        PendulumEnv.gen_params(g=3.0).update({"params": {"max_torque": torch.tensor(0.5)}})
    )

    assert env.reset()["params", "g"] == 3
    assert env.reset(env.gen_params(g=4.0))["params", "g"] == 4
    assert env.action_spec.space.high.item() == 0.5


def test_parameters_after_a_step_are_apart_from_those_before():
    env = PendulumEnv(seed=0)
    td = env.step(env.rand_action(env.reset()))

    td["next", "params", "g"].fill_(3.0)

    assert td["params", "g"] == 10 and env.step_mdp(td)["params", "g"] == 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_default_parameters_are_finite(value):
    td_params = PendulumEnv.gen_params().update({"params": {"l": torch.tensor(value)}})

    with pytest.raises(
        InputError, match=r"\('params', 'l'\) of td_params is (nan|inf).*leave it out for 1"
    ):
        PendulumEnv(td_params)


def test_parameters_of_rows_have_names():
    with pytest.raises(
        InputError, match=r"'params' is of type Tensor.*\['dt', 'g'.*gen_params\(batch_size="
    ):
        PendulumEnv().reset(TensorDict({"params": torch.zeros(3)}, [3]))
    with pytest.raises(MissingKeyError, match=r"has no .*\('params', 'g'\)"):
        PendulumEnv().step(TensorDict({"params": torch.zeros(()), "action": torch.zeros(1)}))


def test_parameters_that_are_no_defaults_are_refused():
    with pytest.raises(BatchSizeError, match=r"reset\(env\.gen_params\(batch_size="):
        PendulumEnv(PendulumEnv.gen_params(batch_size=[2]))
    with pytest.raises(MissingKeyError, match=r"must hold 'params' with some of \['dt', 'g'"):
        PendulumEnv(TensorDict({"params": {"gravity": torch.tensor(1.0)}}))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"g": "strong"}, ArgumentTypeError, "g is 'strong', but must be a finite number"),
        ({"g": None}, ArgumentTypeError, "g is None"),
        ({"g": True}, ArgumentTypeError, "g is True"),
        (
            {"g": torch.ones(3)},
            ArgumentTypeError,
            r"rows of unlike gravity: params\['params', 'g'\]",
        ),
        ({"g": float("nan")}, ArgumentError, "g is nan"),
        ({"batch_size": 3}, ArgumentTypeError, r"Pass batch_size=\[3\]"),
        ({"device": "moon"}, DeviceNameError, "device is 'moon'"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(params, error, message):
    with pytest.raises(error, match=message):
        PendulumEnv.gen_params(**params)


def test_gravity_may_be_a_number_of_any_library():
    for g in (3, np.float64(3), torch.tensor(3.0), np.array(3)):
        assert PendulumEnv.gen_params(g)["params", "g"].equal(torch.tensor(3.0))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"params": {"g": torch.ones(5, 1)}}, r"'g'\) has shape \(5, 1\).*batch size \(5,\)"),
        (
            {"th": torch.ones(5, 1), "thdot": torch.ones(5)},
            r"'th' has shape \(5, 1\).*takes \(5,\)",
        ),
    ],
)
def test_a_reset_takes_one_number_for_each_row(entries, message):
    with pytest.raises(InputError, match=message):
        PendulumEnv().reset(TensorDict(entries, [5]))


def test_gradients_flow_to_action_state_and_parameters():
    root = at(1.0, 0.5, 0.3)
    inputs = [root["action"], root["th"], root["params", "g"], root["params", "m"]]
    for value in inputs:
        value.requires_grad_()

    total = 0.0
    env = PendulumEnv()
    for _ in range(3):
        root = env.step_mdp(stepped := env.step(root)).set("action", inputs[0])
        total = total + stepped["next", "reward"].sum()
    gradients = torch.autograd.grad(total, inputs)

    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in gradients)


def test_gradients_are_those_of_torch_func_too():
    env, root = PendulumEnv(), at(1.0, 0.5, 0.3)

    def reward(action):
        td = env.step(root.clone().set("action", action))
        return env.step(env.step_mdp(td).set("action", action))["next", "reward"].sum()

    action = torch.tensor([0.3], requires_grad=True)
    (expected,) = torch.autograd.grad(reward(action), action)
    assert torch.func.grad(reward)(torch.tensor([0.3])).allclose(expected)
    assert torch.func.vmap(reward)(torch.tensor([[0.3], [1.0]])).shape == (2,)


def test_an_action_of_another_float_dtype_makes_the_same_step():
    double = at(1.0, 0.5, 0.3)
    double["action"] = double["action"].double()

    following = PendulumEnv().step(double)["next"]

    assert following["th"].equal(PendulumEnv().step(at(1.0, 0.5, 0.3))["next", "th"])
    assert following["reward"].dtype == torch.float32


def test_a_given_state_is_kept_where_a_reset_asks_for_it():
    env = PendulumEnv(seed=0)
    state = at(0.25, -0.5, 0.0).exclude("action")

    assert env.reset(state.clone(), set_state=True)["th"] == 0.25
    assert env.reset(state.clone())["thdot"] == -0.5
    assert env.reset(state.clone(), set_state=False)["th"] != 0.25


def test_rows_that_are_not_reset_or_stepped_stay():
    env = PendulumEnv(seed=0)
    root = env.rand_action(env.reset(env.gen_params(batch_size=[3])))
    first, second = torch.tensor([True, False, False]), torch.tensor([False, True, True])

    again = env.reset(root.clone().set("_reset", first), set_state=False)
    following = env.step(root.clone().set("_step", second))["next"]
    whole = env.step(root.clone())["next"]

    assert (again["th"] != root["th"]).equal(first)
    assert following["th"][1:].equal(whole["th"][1:]) and following["th"][0] == root["th"][0]
    assert following["reward"].flatten().tolist() == [0, *whole["reward"].flatten().tolist()[1:]]


def test_a_seed_decides_states_and_a_state_dict_goes_on_with_them():
    one, other = PendulumEnv(seed=3), PendulumEnv(seed=4)
    other.set_seed(3)
    assert one.rollout(3)["th"].equal(other.rollout(3)["th"])

    other = PendulumEnv(seed=5)
    other.load_state_dict(one.state_dict())

    assert one.rollout(3)["th"].equal(other.rollout(3)["th"])
    assert not PendulumEnv(seed=3).reset()["th"].equal(PendulumEnv(seed=4).reset()["th"])


def test_pendulums_work_as_rows_and_under_transforms():
    env = TransformedEnv(SerialEnv(2, PendulumEnv), StepCounter(4))
    check_env_specs(env, seed=0)

    data = env.rollout(9, break_when_any_done=False)

    assert data.shape == (2, 9)
    assert data["next", "truncated"].sum() == 4
