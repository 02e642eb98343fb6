"""Envs written for the reference API work once the names they import come from envkit."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from envkit import (
    Categorical,
    CatTensors,
    Compose,
    Composite,
    EnvBase,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    Unbounded,
    UnsqueezeTransform,
    check_env_specs,
)
from envkit.errors import SpecError
from tests.transforms.test_reference_style import SinTransform
from tests.zoo.reference_style_envs import Herd, Older, OlderInstance, OldestOfAll, Spring, Wrapped

ALL = [Spring, Wrapped, Herd, Older, OlderInstance, OldestOfAll]


@pytest.mark.parametrize("make", ALL)
def test_it_does_what_its_specs_say(make):
    check_env_specs(make(), seed=0)


@pytest.mark.parametrize("make", ALL)
def test_it_runs_alone_transformed_and_in_a_batch(make):
    batch = SerialEnv(2, make)

    for env, size in ((make(), ()), (TransformedEnv(make(), StepCounter(4)), ()), (batch, (2,))):
        data = env.rollout(9, break_when_any_done=False)
        assert data.shape == (*size, 9)
        check_env_specs(env)
    batch.close()


@pytest.mark.parametrize("make", ALL)
def test_two_instances_share_no_specs(make):
    first, second = make(), make()

    first.observation_spec = Composite(other=Unbounded((1,)))

    assert "other" not in second.observation_spec.keys()
    assert "other" not in make().observation_spec.keys()
    assert first.is_spec_locked and second.is_spec_locked


# ------------------------------------------------------------------------------------------- spring


def test_parameters_say_how_many_springs_there_are():
    env = Spring(seed=0)
    params = env.gen_params(batch_size=[5])
    params["params", "k"] = torch.arange(5.0)

    data = env.rollout(3, tensordict=params)

    assert not env.batch_locked
    assert data.shape == (5, 3)
    assert data["params", "k"][:, 2].tolist() == [0, 1, 2, 3, 4]
    assert data["next", "reward"].shape == (5, 3, 1)


def test_a_rollout_of_springs_goes_on_by_hand():
    env = Spring(seed=0)
    td = env.reset(env.gen_params(batch_size=[4]))

    for _ in range(3):
        data, td = env.step_and_maybe_reset(env.rand_action(td))

    assert data["next"].batch_size == (4,)
    assert set(td.keys()) == {"x", "v", "params", "done", "terminated"}


def test_a_seed_repeats_the_springs():
    starts = [Spring(seed=3).reset(Spring.gen_params([2]))["x"] for _ in range(2)]

    assert starts[0].equal(starts[1])


def test_gradients_flow_through_the_springs():
    env = Spring(seed=0)
    push = torch.nn.Parameter(torch.zeros(1))

    env.rollout(5, lambda td: td.set("action", push))["next", "reward"].sum().backward()

    assert push.grad.abs() > 0


def test_a_policy_learns_through_springs_behind_transforms():
    env = TransformedEnv(
        Spring(seed=0),
        Compose(
            UnsqueezeTransform(dim=-1, in_keys=["x", "v"], in_keys_inv=["x", "v"]),
            SinTransform(in_keys=["x"], out_keys=["sine"]),
            CatTensors(["sine", "x", "v"], out_key="observation", del_keys=False),
        ),
    )
    check_env_specs(env)
    net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    optim = torch.optim.Adam(net.parameters(), lr=2e-2)

    means = []
    for _ in range(20):
        start = env.reset(env.gen_params(batch_size=[16]))
        data = env.rollout(30, policy, tensordict=start, auto_reset=False)
        mean = data["next", "reward"].mean()
        optim.zero_grad()
        (-mean).backward()
        optim.step()
        means.append(mean.item())

    assert data.shape == (16, 30) and data["x"].shape == (16, 30, 1)
    assert data["observation"].equal(torch.cat([data["sine"], data["v"], data["x"]], -1))
    torch.testing.assert_close(data["sine"], data["x"].sin())
    assert sum(means[-5:]) > sum(means[:5])


def test_rows_of_springs_can_be_left_out():
    env = Spring(seed=0)
    td = env.rand_action(env.reset(env.gen_params([3])))
    mask = torch.tensor([True, False, True])

    following = env.step(td.set("_step", mask))["next"]

    assert following["x"][1] == td["x"][1] and following["reward"][1] == 0
    assert (following["x"][mask] != td["x"][mask]).all()


# ------------------------------------------------------------------------------------------ wrapper


def test_the_simulator_is_found_behind_the_wrapper():
    env = Wrapped(floors=3)

    assert env.floors == 3
    assert env.reset(floor=2)["observation"].item() == 2
    assert env._env.floor == env.floor == 2
    assert env.device == torch.device("cpu")


def test_a_wrapper_of_an_object():
    from tests.zoo.reference_style_envs import Lift

    lift = Lift(2)

    assert Wrapped(lift)._env is lift
    with pytest.raises(TypeError, match="Lift"):
        Wrapped(env=3)


def test_rewards_and_flags_of_a_simulator_get_their_shape():
    env = Wrapped(floors=1)

    following = env.step(env.reset(floor=0).set("action", torch.tensor(1)))["next"]

    assert following["reward"].tolist() == [1.0]
    assert following["done"].tolist() == following["terminated"].tolist() == [True]


# ------------------------------------------------------------------------------------------- agents


def test_keys_of_agents_are_nested():
    env = Herd()

    assert env.action_keys == [("dog", "action"), ("sheep", "action")]
    assert env.reward_keys == [("dog", "reward"), ("sheep", "reward")]
    assert env.done_keys == ["done", "terminated"]
    assert env.rollout(3)["next", "sheep", "reward"].shape == (3, 3, 1)
    assert env.rollout(9).shape == (6,)


# ---------------------------------------------------------------------------------------- __new__


def test_specs_declared_in_new_are_those_of_the_env():
    env = Older(batch_size=[2])

    assert env.observation_spec["observation"].shape == (2, 3)
    assert env.action_spec.shape == (2, 3)
    assert env.done_keys == ["done", "terminated"]
    assert env.rollout(9).shape == (2, 5)
    assert Older(maxstep=3).rollout(9).shape == (3,)


def test_a_spec_passed_to_new_counts():
    spec = Composite(observation=Unbounded((3,), dtype=torch.float64))

    assert Older(observation_spec=spec).observation_spec["observation"].dtype == torch.float64


def test_a_leaf_declared_in_new_is_wrapped():
    env = OlderInstance()

    assert env.action_keys == ["action"] and env.state_keys == ["level"]
    assert not env.batch_locked
    assert env.rollout(2, tensordict=TensorDict(batch_size=[7])).shape == (7, 2)


def test_what_is_left_out_is_completed():
    env = OldestOfAll()

    assert env.state_keys == []
    assert env.reward_keys == ["reward"]
    assert env.done_keys == ["done", "terminated"]


@pytest.mark.parametrize(
    ("side", "spec", "message"),
    [
        (
            "_output_spec",
            Composite(observation_spec=Unbounded((1,))),
            r"holds \['observation_spec'\].*full_observation_spec",
        ),
        (
            "_input_spec",
            Composite(full_action_spec=Composite(action=Categorical(2, shape=(1,)))),
            r"action_spec has shape \(\).*batch size \(2,\)",
        ),
    ],
)
def test_what_is_declared_wrongly_is_named(side, spec, message):
    class Wrong(OldestOfAll):
        pass

    setattr(Wrong, side, spec)

    with pytest.raises(SpecError, match=message):
        Wrong(batch_size=[2] if side == "_input_spec" else None)


def test_an_abstract_env_stays_abstract():
    class Half(EnvBase):
        def __new__(cls, *args, **kwargs):
            return super().__new__(cls, *args, **kwargs)

    with pytest.raises(TypeError, match="abstract"):
        Half()
