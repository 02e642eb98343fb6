"""`GymnaxEnv`: the same numbers as gymnax stepped by hand, its params as an argument, its names, its errors."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from envkit import OneHot, RewardSum, TransformedEnv
from envkit.errors import ArgumentError, ArgumentTypeError, FetchError, OptionError
from envkit_bridges.worlds.gymnax import GymnaxEnv, GymnaxWrapper, env_names, fetching_names
from tests.bridges.compare import assert_same
from tests.bridges.worlds.libraries import assert_equals_gymnax

ROWS = 4


@pytest.fixture(scope="module")
def cartpole():
    return GymnaxEnv("CartPole-v1", batch_size=[ROWS], categorical_action_encoding=True)


@pytest.fixture
def default_params(cartpole):
    """Whatever a test assigns, the next one starts from the library's."""
    yield cartpole._env.default_params
    cartpole.params = cartpole._env.default_params


# ------------------------------------------------------------------------------------------- the end


@pytest.mark.slow
def test_the_time_limit_of_the_params_truncates_and_a_fall_terminates(cartpole, default_params):
    cartpole.params = default_params.replace(max_steps_in_episode=20)
    cartpole.set_seed(0)

    data = cartpole.rollout(200, break_when_any_done=False)

    terminated, truncated = data["next", "terminated"], data["next", "truncated"]
    assert terminated.any() and truncated.any() and not (terminated & truncated).any()
    time = cartpole.unpack(data["next", "state"])["time"]
    assert torch.equal(time[..., None] >= 20, truncated | (terminated & (time[..., None] >= 20)))


# ---------------------------------------------------------------------------------------- the params


@pytest.mark.slow
def test_params_are_assigned_without_compiling_anew(cartpole, default_params):
    cartpole.set_seed(0)
    cartpole.rollout(9, break_when_any_done=False)
    traces = cartpole.traces

    cartpole.params = default_params.replace(gravity=40.0)
    assert_equals_gymnax(cartpole, steps=20)
    cartpole.set_seed(0)
    cartpole.rollout(9, break_when_any_done=False)

    known = {"restart", "advance", "step"}
    assert {k: v for k, v in cartpole.traces.items() if k not in known} == {
        k: v for k, v in traces.items() if k not in known
    }
    other = GymnaxEnv("CartPole-v1", batch_size=[ROWS], env_params=cartpole.params)
    copy = pickle.loads(pickle.dumps(cartpole))
    assert [env.params.gravity for env in (other, cartpole, copy)] == [40.0] * 3


@pytest.mark.slow
def test_equal_envs_share_programs_whatever_their_params(cartpole, default_params):
    heavy = default_params.replace(gravity=40.0)
    cartpole.set_seed(0)
    cartpole.rollout(9, break_when_any_done=False)
    twin = GymnaxEnv(
        "CartPole-v1", batch_size=[ROWS], categorical_action_encoding=True, env_params=heavy
    )

    twin.set_seed(0)
    shared = twin.rollout(9, break_when_any_done=False)
    cartpole.params = heavy
    cartpole.set_seed(0)

    assert twin.traces == {}
    assert_same(cartpole.rollout(9, break_when_any_done=False), shared)


@pytest.mark.slow
def test_transforms_inside_the_programs_see_assigned_params(cartpole, default_params):
    summed = TransformedEnv(cartpole, RewardSum())
    summed.set_seed(0)
    light = summed.rollout(9, break_when_any_done=False)

    cartpole.params = default_params.replace(force_mag=100.0)
    summed.set_seed(0)
    strong = summed.rollout(9, break_when_any_done=False)

    assert torch.equal(light["observation"][:, 0], strong["observation"][:, 0])
    assert not torch.equal(light["observation"][:, 1], strong["observation"][:, 1])


@pytest.mark.slow
def test_rows_with_params_of_their_own_keep_them_from_episode_to_episode():
    env = GymnaxEnv("CartPole-v1", batch_size=[3], params_per_row=True, state_layout="nested")
    env.set_seed(0)
    root = env.reset()
    limits = torch.tensor([3, 5, 500], dtype=torch.int32)
    root["state", "params", "max_steps_in_episode"] = limits

    data, _ = env.unroll(root, 30, record_state=True)

    assert (data["state", "params", "max_steps_in_episode"] == limits[:, None]).all()
    assert data["next", "truncated"].sum(1).squeeze(-1).tolist()[:2] == [10, 6]
    assert data["next", "terminated"][2].any() and not data["next", "truncated"][2].any()
    again = env.step(data[:, 4].select("state", "action").clone())
    assert_same(again["next"].select("observation"), data["next"][:, 4].select("observation"))


@pytest.mark.slow
def test_params_are_drawn_for_each_row_by_domain_randomisation():
    def f(key, params):
        return params.replace(gravity=jax.random.uniform(key, (), minval=5.0, maxval=15.0))

    env = GymnaxEnv("CartPole-v1", batch_size=[64], randomize=f, state_layout="nested")
    env.set_seed(0)

    root = env.reset()

    drawn = root["state", "params", "gravity"]
    assert set(root["state", "params"].keys()) == {"gravity"}
    assert len(drawn.unique()) == 64 and (drawn > 5).all() and (drawn < 15).all()


def test_params_of_another_kind_are_refused(cartpole, default_params):
    with pytest.raises(ArgumentTypeError, match=r"env\.params\.replace"):
        cartpole.params = {"gravity": 1.0}
    with pytest.raises(ArgumentTypeError, match=r"params\.gravity is float32\[2\]"):
        cartpole.params = default_params.replace(gravity=jnp.ones(2))
    assert cartpole.params is default_params or cartpole.params == default_params


def test_params_that_change_the_actions_are_refused():
    env = GymnaxEnv("Pendulum-v1")

    with pytest.raises(ArgumentError, match="action space"):
        env.params = env.params.replace(max_torque=5.0)


# -------------------------------------------------------------------- what stateless envs can do


@pytest.mark.slow
def test_gradients_flow_through_envs_whose_library_lets_them():
    import gymnax

    bare = gymnax.make("Pendulum-v1")[0].with_transition_gradients()
    env = GymnaxWrapper(bare, batch_size=[2], requires_grad=True)
    env.set_seed(0)
    action = torch.zeros(2, 1, requires_grad=True)

    following = env.step(env.reset().set("action", action))["next"]
    following["observation"].sum().backward()

    assert (action.grad != 0).all()


@pytest.mark.slow
def test_dict_observations_and_bool_planes_are_entries():
    gymnax = pytest.importorskip("gymnax")
    from gymnax.environments import environment, spaces

    class Planes(environment.Environment[Any, Any]):
        def step_env(self, key, state, action, params):
            state = state.replace(time=state.time + 1)
            return self.seen(state), state, jnp.float32(1), state.time >= 3, {"moves": state.time}

        def reset_env(self, key, params):
            state = environment.EnvState(time=0)
            return self.seen(state), state

        def seen(self, state):
            planes = jnp.zeros((4, 4, 2), bool).at[state.time % 4].set(True)
            return {"planes": planes, "clock": {"time": jnp.float32(state.time)}}

        def action_space(self, params):
            return spaces.Discrete(2)

    assert gymnax.__name__ == "gymnax"
    env = GymnaxWrapper(Planes(), batch_size=[2], metrics=True, env_params=Long(9))
    env.set_seed(0)

    data = env.rollout(4, break_when_any_done=False)

    assert data["planes"].dtype == torch.bool and data["planes"].shape == (2, 4, 4, 4, 2)
    assert data["clock", "time"][0].tolist() == [0, 1, 2, 0]
    assert data["next", "metrics", "moves"][0].tolist() == [1, 2, 3, 1]
    assert data["metrics", "moves"][0].tolist() == [0, 1, 2, 0]


def Long(steps):
    from gymnax.environments.environment import EnvParams

    return EnvParams(max_steps_in_episode=steps)


def test_a_stored_state_is_drawn(cartpole, default_params):
    cartpole.set_seed(0)
    td = cartpole.reset()
    state = cartpole.unpack(td["state"])
    state["x"].copy_(torch.tensor([-1.0, 1.0, 0.0, 0.0]))

    first, second = (cartpole.render(td, row=row) for row in (0, 1))
    cartpole.params = default_params.replace(length=1.0)
    longer = cartpole.render(td, row=0)

    assert first.dtype == torch.uint8 and first.ndim == 3 and first.shape[-1] == 3
    assert not torch.equal(first, second)
    assert not torch.equal(first, longer)
    with pytest.raises(
        OptionError, match=r"render of CartPole takes no keyword 'height'.*takes none"
    ):
        cartpole.render(td, height=84)


# --------------------------------------------------------------------------------- names and errors


def test_wrong_keywords_are_told():
    with pytest.raises(ArgumentTypeError, match=r"env\.params\.replace"):
        GymnaxEnv("CartPole-v1", env_params=3)
    for flag in ("metrics", "requires_grad", "params_per_row", "categorical_action_encoding"):
        with pytest.raises(ArgumentTypeError, match=f"{flag} is 'no', but must be a bool"):
            GymnaxEnv("CartPole-v1", **{flag: "no"})


def test_wrappers_of_gymnax_are_refused(cartpole):
    from gymnax.wrappers.purerl import LogWrapper

    with pytest.raises(ArgumentError, match="LogWrapper is one of gymnax's wrappers"):
        GymnaxWrapper(LogWrapper(cartpole._env))


def test_what_cannot_be_fetched_is_told(monkeypatch):
    import gymnax

    def offline(name):
        raise FileNotFoundError("no such host")

    monkeypatch.setattr(gymnax, "make", offline)
    assert fetching_names() == {"MNISTBandit-bsuite"}
    with pytest.raises(FetchError, match=r"'MNISTBandit-bsuite' of gymnax is made.*no such host"):
        GymnaxEnv("MNISTBandit-bsuite")


def test_attributes_of_the_simulator_are_found_and_actions_are_one_hot_by_default(cartpole):
    assert cartpole.num_actions == 2 and "Breakout-MinAtar" in env_names()
    assert GymnaxEnv("CartPole-v1").action_spec == OneHot(2, (2,), dtype=torch.int64)
