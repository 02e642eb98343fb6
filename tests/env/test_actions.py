"""One action means the same to every kind of env, in whichever dtype a policy wrote it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor

from envkit import (
    Compose,
    Discrete,
    GymEnv,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    SyncDataCollector,
    TransformedEnv,
    compile_policy,
)
from envkit.env.base import EnvBase
from envkit.errors import InputError
from envkit_bridges.gym.gym_wrapper import GymWrapper
from tests.zoo.envs import Count
from tests.zoo.walkers import Chooser, Pendulum

pole = partial(GymEnv, "CartPole-v1")
pole_index = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
pendulum = partial(GymEnv, "Pendulum-v1")
chooser = partial(JaxEnv, Chooser(Discrete(2)), batch_size=[2])
chooser_index = partial(chooser, categorical_action_encoding=True)
swing = partial(JaxEnv, Pendulum(), batch_size=[2])

AROUND: dict[str, Callable[..., EnvBase]] = {
    "alone": lambda make: make(),
    "serial, rows": partial(SerialEnv, 2, use_buffers=True),
    "serial, tds": partial(SerialEnv, 2, use_buffers=False),
    "parallel": partial(ParallelEnv, 2, num_processes=1),
    "parallel, tds": partial(ParallelEnv, 2, num_processes=1, use_buffers=False),
    "mixed": lambda make: MixedEnv([SerialEnv(1, make), SerialEnv(1, make)]),
    "transformed": lambda make: TransformedEnv(SerialEnv(2, make), Compose(RewardSum())),
}


def kinds_of(make: Callable[[], EnvBase], *more: tuple[str, Callable[[], EnvBase]]) -> list:
    around = [pytest.param(partial(wrap, make), id=name) for name, wrap in AROUND.items()]
    return [*around, *(pytest.param(maker, id=name) for name, maker in more)]


HOT = kinds_of(pole, ("vector", partial(pole, num_envs=2)), ("jax", chooser))
INDEX = kinds_of(pole_index, ("vector", partial(pole_index, num_envs=2)), ("jax", chooser_index))
FORCE = kinds_of(pendulum, ("vector", partial(pendulum, num_envs=2)), ("jax", swing))


def steps(make: Callable[[], EnvBase], *actions: torch.Tensor) -> list[TensorDictBase]:
    """Give what follows from each action: all begin at the same root; the last row of each acts alone."""
    env = make()
    outcomes = []
    for action in actions:
        env.set_seed(0)
        root = env.reset()
        passed = action if env.batch_dims else action[-1]
        data, _ = env.step_and_maybe_reset(root.set("action", passed))
        assert data["action"] is passed or torch.equal(data["action"], passed)
        outcomes.append(data["next"])
    env.close()
    return outcomes


def assert_alike(outcomes: list[TensorDictBase]) -> None:
    for other in outcomes[1:]:
        assert (outcomes[0] == other).all()


@pytest.mark.parametrize("make", HOT)
def test_a_one_hot_action_of_any_dtype_is_the_same_choice(make):
    choice = torch.tensor([[0, 1], [0, 1]])
    almost = torch.tensor([[0.0, 0.99999994], [1e-8, 0.99999994]])

    assert_alike(
        steps(
            make,
            choice,
            *(choice.to(dtype) for dtype in (torch.bool, torch.int8, torch.uint8)),
            *(almost.to(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)),
        )
    )


@pytest.mark.parametrize("make", INDEX)
def test_an_index_of_any_integer_dtype_is_the_same_choice(make):
    choice = torch.tensor([0, 1])

    assert_alike(
        steps(make, choice, *(choice.to(d) for d in (torch.bool, torch.int8, torch.int32)))
    )


@pytest.mark.parametrize("make", FORCE)
def test_a_force_of_any_float_dtype_is_the_same_force(make):
    force = torch.tensor([[0.5], [-1.25]])

    assert_alike(
        steps(make, force, *(force.to(d) for d in (torch.float64, torch.float16, torch.bfloat16)))
    )


class Echo(gymnasium.Env):
    """Shows the force that it was given."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return action, 0.0, False, False, {}


def make_echo() -> GymWrapper:
    return GymWrapper(Echo())


def make_vector_echo() -> GymWrapper:
    return GymWrapper(gymnasium.vector.SyncVectorEnv([Echo, Echo]))


@pytest.mark.parametrize("make", kinds_of(make_echo, ("vector", make_vector_echo)))
def test_a_force_beyond_its_bounds_reaches_the_simulator_as_it_is(make):
    force = torch.tensor([[2.0000002], [9.0]])

    (found,) = steps(make, force)

    assert torch.equal(found["observation"], force if found.batch_dims else force[-1])


def test_a_force_beyond_its_bounds_reaches_a_step_in_jax():
    within, beyond = steps(swing, torch.full((2, 1), 2.0), torch.full((2, 1), 9.0))

    dearer = within["reward"] - beyond["reward"]
    assert torch.allclose(dearer, torch.tensor(0.001 * (9.0**2 - 2.0**2)), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "key", "bad"),
    [
        (partial(SerialEnv, 2, pole_index), "action", torch.tensor([300, 1])),
        (chooser_index, "action", torch.tensor([1, 100])),
        (chooser_index, "action", torch.tensor([-1, 1])),
    ],
)
def test_an_index_out_of_range_names_row_and_value(make, key, bad):
    env = make()
    td = env.reset().set(key, bad)
    row = int((bad != 1).nonzero())

    with pytest.raises(InputError, match=rf"'action' of row {row} is {int(bad[row])}, but must be"):
        env.step(td)


def test_rows_of_a_jax_env_that_are_not_stepped_are_not_looked_at():
    env = swing()
    root = env.reset()
    given = torch.tensor([[0.5], [torch.nan]])

    data = env.step(root.set("action", given).set("_step", torch.tensor([True, False])))

    assert torch.equal(data["next", "observation"][1], root["observation"][1])
    with pytest.raises(InputError, match="of row 1"):
        env.step(root.set("_step", torch.tensor([False, True])))


def test_a_row_of_a_batch_of_two_axes_is_named_by_both_indices():
    env = JaxEnv(Pendulum(), batch_size=[2, 3])
    action = torch.zeros(2, 3, 1)
    action[1, 2] = torch.inf

    with pytest.raises(InputError, match=r"'action' of row \(1, 2\) is \[inf\]"):
        env.step(env.reset().set("action", action))


class PassThrough(torch.nn.Module):
    """A one-hot of floats as TorchRL's categorical with gradients gives it: a little off one."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        first = torch.zeros_like(observation[..., :1])
        return torch.cat([first, first, first + 0.99999994], -1)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_policy_with_gradients_chooses_is_what_runs(compiled):
    env = JaxEnv(Chooser(), batch_size=[2])
    policy = TensorDictModule(PassThrough(), in_keys=["observation"], out_keys=["action"])

    data = env.rollout(3, compile_policy(policy) if compiled else policy)

    assert data["next", "observation"].argmax(-1).tolist() == [[2, 2, 2]] * 2


class Scores(torch.nn.Module):
    """Gives the scores of the options, as a network without a distribution after it."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        first = observation[..., :1].float() * 0
        return torch.cat([first - 0.5, first + 2.5, first + 0.25], -1)


RUNS: dict[str, Callable[[EnvBase, TensorDictModule], object]] = {
    "rollout": lambda env, policy: env.rollout(3, policy),
    "rollout through ends": lambda env, policy: env.rollout(3, policy, break_when_any_done=False),
    "collector": lambda env, policy: SyncDataCollector(env, policy, frames_per_batch=4).next(),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("run", RUNS)
def test_scores_are_not_recorded_as_actions(compiled, run):
    env = JaxEnv(Chooser(), batch_size=[2])
    policy = TensorDictModule(Scores(), in_keys=["observation"], out_keys=["action"])
    policy = compile_policy(policy) if compiled else policy

    with pytest.raises(InputError, match=r"is \[-0\.5 , +2\.5 , +0\.25\].*OneHotCategorical"):
        RUNS[run](env, policy)


def test_the_mean_of_a_categorical_distribution_is_no_action():
    env = JaxEnv(Chooser(), batch_size=[2])
    actor = ProbabilisticActor(
        TensorDictModule(Scores(), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.OneHotCategorical,
    )

    with set_exploration_type(ExplorationType.DETERMINISTIC):
        data = env.rollout(3, actor)
    with (
        set_exploration_type(ExplorationType.MEAN),
        pytest.raises(InputError, match="DETERMINISTIC in the place of MEAN"),
    ):
        env.rollout(3, actor)

    assert data["next", "observation"].argmax(-1).tolist() == [[1, 1, 1]] * 2


class Halves(torch.nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation[..., 0] + 0.5


@pytest.mark.parametrize("compiled", [False, True])
def test_floats_between_choices_are_no_index_for_a_jax_env(compiled):
    env = chooser_index()
    policy = TensorDictModule(Halves(), in_keys=["observation"], out_keys=["action"])

    with pytest.raises(InputError, match=r"'action'.*the env takes"):
        env.rollout(3, compile_policy(policy) if compiled else policy)


@pytest.mark.parametrize("make", [pendulum, partial(SerialEnv, 2, pendulum), swing])
def test_actions_written_under_autocast_are_taken(make):
    env = make()
    linear = torch.nn.Linear(3, 1)

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        data = env.rollout(3, linear, break_when_any_done=False)

    assert data["action"].dtype == torch.bfloat16
    assert bool(data["next", "reward"].isfinite().all())
    env.close()


@pytest.mark.parametrize("use_buffers", [True, False])
def test_the_data_of_the_caller_is_not_converted(use_buffers):
    env = SerialEnv(2, Count, use_buffers=use_buffers)
    action = torch.ones(2, 1, dtype=torch.bool)

    data = env.step(env.reset().set("action", action))

    assert data["action"] is action
    assert data["next", "count"].tolist() == [[1], [1]]


@pytest.mark.parametrize("make", HOT)
def test_a_number_of_an_option_is_no_one_hot_row_and_the_error_says_how_to_spell_it(make, opened):
    env = opened(make())
    number = torch.ones(env.batch_size, dtype=torch.int64)
    root = env.reset()

    with pytest.raises(InputError, match=r"one_hot\(action, 2\), or build the env"):
        env.step(root.copy().set("action", number))
    spelled = torch.nn.functional.one_hot(number, 2)
    assert env.step(root.set("action", spelled))["next", "reward"].shape == (*env.batch_size, 1)
