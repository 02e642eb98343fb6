"""What gymnasium envs return that is not what their spaces say: taken by one rule on every way.

The ways are a single step, the recorded rollout of one env, rows of a batch here and in workers.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

from envkit import ParallelEnv, SerialEnv
from envkit.errors import EncodingError, WorkerError
from envkit_bridges.gym.gym_wrapper import GymWrapper
from tests.zoo.gym_envs import Says

LINE = spaces.Box(-9.0, 9.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (2, 3), np.uint8)


def stepped(env):
    td = env.reset()
    for _ in range(3):
        td = env.step_mdp(env.step(env.rand_action(td)))


def recorded(env):
    env.rollout(3)


def in_rows(env):
    env = SerialEnv(1, partial(_itself, env))
    env.rollout(3)


def _itself(env):
    return env


WAYS = pytest.mark.parametrize("way", [stepped, recorded, in_rows])


@WAYS
@pytest.mark.parametrize(
    ("space", "observation", "message"),
    [
        (LINE, np.float32(0.5), r"'observation' of shape \(\) into shape \(3,\)"),
        (LINE, np.full(1, 0.5, np.float32), r"'observation' of shape \(1,\) into shape \(3,\)"),
        (LINE, np.zeros((1, 3), np.float32), r"'observation' of shape \(1, 3\) into shape \(3,\)"),
        (LINE, [0.0, 1.0], r"'observation' of shape \(2,\) into shape \(3,\)"),
        (LINE, np.array([0.0, 1e300, 0.0]), r"of dtype float64 into float32.*1\.?e\+300.*not fit"),
        (IMAGE, np.uint8(7), r"'observation' of shape \(\) into shape \(2, 3\)"),
        (IMAGE, np.zeros(3, np.uint8), r"'observation' of shape \(3,\) into shape \(2, 3\)"),
        (IMAGE, np.full((2, 3), 256), r"of dtype int64 into uint8"),
        (IMAGE, np.full((2, 3), 0.5), r"of dtype float64 into uint8"),
        (spaces.MultiBinary(3), np.ones(1, np.int8), r"of shape \(1,\) into shape \(3,\)"),
        (spaces.Discrete(3), 3, r"'observation' is 3, which is not in its space Discrete\(3\)"),
        (spaces.Discrete(3), -1, r"'observation' is -1, which is not in its space"),
        (spaces.MultiDiscrete([2, 3]), np.array([1]), r"of shape \(1,\) into shape \(2,\)"),
        (spaces.MultiDiscrete([2, 3]), np.array([2, 0]), r"is \[2, 0\], which is not in its space"),
        (spaces.Dict(a=LINE), {"a": np.zeros(1, np.float32)}, r"'a' of shape \(1,\) into shape"),
    ],
)
@pytest.mark.parametrize("categorical", [False, True])
def test_an_observation_that_does_not_fit_is_named(way, space, observation, message, categorical):
    env = GymWrapper(Says(space, observation), categorical)

    with pytest.raises((EncodingError, WorkerError), match=f"(?s){message}"):
        way(env)


NESTED = spaces.Dict(a=LINE, b=spaces.Dict(c=LINE))


@WAYS
@pytest.mark.parametrize(
    ("space", "observation", "message"),
    [
        (spaces.Dict(a=LINE, b=LINE), {"a": np.zeros(3, np.float32)}, r"'b': it holds \['a'\]"),
        (spaces.Dict(state=LINE), {}, r"'state': it holds \[\]"),
        (NESTED, {"a": np.zeros(3, np.float32), "b": {}}, r"'b\.c'"),
        (spaces.Dict(a=LINE, b=LINE), np.zeros(3, np.float32), r"'a': it is a ndarray"),
        (spaces.Tuple([LINE, IMAGE]), (np.zeros(3, np.float32),), r"'1': it is a tuple"),
    ],
)
def test_a_member_that_an_observation_lacks_is_named(way, space, observation, message):
    env = GymWrapper(Says(space, observation))

    with pytest.raises((EncodingError, WorkerError), match=f"step.* without {message}"):
        way(env)


def test_a_member_that_the_first_observation_lacks_is_named():
    env = Says(spaces.Dict(a=LINE, b=LINE))
    env.reset = lambda **kwargs: ({"a": np.zeros(3, np.float32)}, {})

    with pytest.raises(EncodingError, match=r"reset of the simulator .* without 'b'"):
        GymWrapper(env).rollout(2)


class Uninformed(Says):
    """Gives None where Gymnasium asks for an info dict."""

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], None

    def step(self, action):
        return *super().step(action)[:-1], None


@pytest.mark.parametrize("info", [False, True])
@WAYS
def test_infos_may_be_none_beyond_the_end_of_an_episode(way, info):
    way(GymWrapper(Uninformed(), info=info))

    data = GymWrapper(Uninformed(), info=info).rollout(9, break_when_any_done=False)

    assert data["next", "done"].flatten().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (LINE, [1.0, 2.0, 3.0]),
        (LINE, np.array([1.0, 2.0, 3.0])),
        (LINE, np.array([1, 2, 3])),
        (LINE, np.float32([[1, 9], [2, 9], [3, 9]])[:, 0]),
        (LINE, torch.tensor([1.0, 2.0, 3.0])),
        (spaces.Box(-9.0, 9.0, (3, 1), np.float32), np.array([[1.0], [2.0], [3.0]])),
        (spaces.MultiDiscrete([4, 4, 4]), (1, 2, 3)),
    ],
)
def test_an_observation_of_another_kind_that_fits_is_taken(space, observation):
    env = SerialEnv(2, lambda: GymWrapper(Says(space, observation), True))

    seen = env.rollout(3)["next", "observation"][:, -1]

    assert seen.reshape(2, 3).tolist() == [[1, 2, 3]] * 2


def test_infinity_is_no_overflow():
    env = SerialEnv(1, lambda: GymWrapper(Says(LINE, np.array([np.inf, -np.inf, 0.0]))))

    assert env.rollout(3)["next", "observation"][0, -1].tolist() == [np.inf, -np.inf, 0.0]


def test_a_number_in_an_array_stands_for_a_scalar():
    space = spaces.Box(-9.0, 9.0, (), np.float32)

    for observation in (np.float32(4.0), np.array([4.0]), 4.0):
        env = SerialEnv(1, partial(lambda seen: GymWrapper(Says(space, seen)), observation))
        assert env.rollout(3)["next", "observation"].flatten()[-1] == 4.0


REWARDS = [np.array([1.5]), np.array(1.5), np.float64(1.5), torch.tensor([1.5]), [1.5]]


@pytest.mark.parametrize("reward", REWARDS, ids=repr)
def test_a_reward_may_be_an_array_of_one_element(reward):
    make = lambda: GymWrapper(Says(reward=reward))  # noqa: E731
    single, batch = make(), SerialEnv(2, make)
    paid = [0.5, 1.5, 1.5]

    recorded = single.rollout(3)["next", "reward"]
    td, one_by_one = single.reset(), []
    for _ in range(3):
        td = single.step(single.rand_action(td))
        one_by_one.append(td["next", "reward"].item())
        td = single.step_mdp(td)

    assert recorded.flatten().tolist() == one_by_one == paid
    assert batch.rollout(3)["next", "reward"][..., 0].tolist() == [paid] * 2


def test_rewards_in_arrays_come_out_of_workers():
    with_arrays = ParallelEnv(3, lambda: GymWrapper(Says(reward=np.array([1.5]))), num_processes=2)

    td = with_arrays.rollout(8, break_when_any_done=False)

    assert td["next", "reward"][..., 0].tolist() == [[0.5, *[1.5] * 5, 0.5, 1.5]] * 3
    with_arrays.close()


@WAYS
def test_a_reward_of_several_numbers_is_named(way):
    env = GymWrapper(Says(reward=np.array([1.0, 2.0])))

    with pytest.raises((EncodingError, WorkerError), match=r"reward of shape \(2,\).*reward_space"):
        way(env)


def test_a_bad_reward_costs_its_own_row_only():
    def make(reward):
        return GymWrapper(Says(reward=reward))

    env = SerialEnv(
        3,
        make,
        create_env_kwargs=[{"reward": 1.0}, {"reward": np.ones(2)}, {"reward": np.ones(1)}],
        on_worker_failure="restart",
    )

    td = env.rollout(3, break_when_any_done=False)

    assert td["next", "truncated"][..., 0].tolist() == [
        [False] * 3,
        [False, True, False],
        [False] * 3,
    ]
    assert td["next", "reward"][:, 1, 0].tolist() == [1.0, 0.0, 1.0]
