"""Vector envs of Stable-Baselines3: ours step by step beside the library's own, and training on them."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit import (
    GymWrapper,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    make,
    to_sb3,
)
from envkit.data.paths import nest
from envkit.errors import ArgumentError, ArgumentTypeError, InputError
from tests.bridges.exports.test_gym_vector import LENGTHS, Drawn, Walk
from tests.zoo.envs import Count

sb3 = pytest.importorskip("stable_baselines3")
from stable_baselines3 import PPO  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize  # noqa: E402


def walks():
    def wrapped(length):
        return GymWrapper(Walk(length)).set_info_dict_reader()

    return SerialEnv(len(LENGTHS), [partial(wrapped, length) for length in LENGTHS])


def ours():
    return to_sb3(walks(), info_keys=["place"])


def theirs():
    return DummyVecEnv([partial(Walk, length) for length in LENGTHS])


def played(env, program):
    return [(env.reset(),), *(env.step(np.array(actions)) for actions in program)]


def assert_same(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        if isinstance(other, list):
            for info, known in zip(one, other, strict=True):
                assert info.keys() == known.keys()
                for name in known:
                    assert np.allclose(np.squeeze(info[name]), known[name])
        else:
            assert one.dtype == other.dtype and np.allclose(one, other)


@settings(max_examples=12)
@given(st.lists(st.tuples(*[st.integers(0, 2)] * len(LENGTHS)), max_size=20))
def test_steps_are_those_of_the_librarys_own_vector_env(program):
    for got, expected in zip(played(ours(), program), played(theirs(), program), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("wrapper", [VecMonitor, VecNormalize])
def test_the_librarys_wrappers_give_the_same_around_both(wrapper):
    program = np.random.default_rng(0).integers(0, 3, (30, 3))

    told = played(wrapper(ours()), program), played(wrapper(theirs()), program)

    for (*got, infos), (*expected, known) in zip(told[0][1:], told[1][1:], strict=True):
        assert_same(got, expected)
        for info, other in zip(infos, known, strict=True):
            assert info.keys() == other.keys()
            if "episode" in other:
                assert all(
                    info["episode"][name] == pytest.approx(other["episode"][name]) for name in "rl"
                )


def test_spaces_are_those_of_one_row():
    view, twin = ours(), theirs()

    assert view.observation_space == twin.observation_space
    assert view.action_space == twin.action_space
    assert view.num_envs == twin.num_envs
    assert view.observation_space.contains(view.reset()[0])


def test_it_shows_the_env_it_is_made_of():
    env = ours()

    assert repr(env) == f"to_sb3({env.envkit_env!r})"
    env.close()


def test_a_seed_repeats(opened):
    view = to_sb3(opened(make("gym/CartPole-v1", 3, backend="serial")))
    actions = np.random.default_rng(0).integers(0, 2, (20, 3))

    runs = []
    for _ in range(2):
        view.seed(7)
        runs.append([view.reset(), *(view.step(action)[0] for action in actions)])

    assert all(np.array_equal(one, other) for one, other in zip(*runs, strict=True))
    assert not np.array_equal(view.reset(), runs[0][0])  # a seed is used once


def test_one_seed_is_counted_up_from_row_to_row_as_there(opened):
    view = to_sb3(opened(make("gym/CartPole-v1", 3, backend="serial")))
    theirs = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 3)

    assert view.seed(7) == theirs.seed(7) == [7, 8, 9]
    assert np.array_equal(view.reset(), theirs.reset())


def test_a_time_limit_is_told_apart_from_an_end(opened):
    view = to_sb3(opened(make("gym/CartPole-v1", 2, backend="serial", max_episode_steps=3)))
    view.seed(0)
    first = view.reset()

    for _ in range(3):
        observation, rewards, done, infos = view.step(np.array([0, 1]))

    assert done.all() and rewards.dtype == np.float32
    assert all(info["TimeLimit.truncated"] for info in infos)
    assert not np.array_equal(infos[0]["terminal_observation"], observation[0])
    assert observation.shape == first.shape


def test_several_observations_are_a_flat_dict():
    view = to_sb3(TransformedEnv(walks(), StepCounter()))

    observation = view.reset()

    names = {"observation", "step_count"}
    assert set(observation) == set(view.observation_space.spaces) == names


class Named(gymnasium.Env):
    """Shows the number 1 at the first of some paths, 2 at the second, and so on."""

    action_space = spaces.Discrete(2)

    def __init__(self, *paths):
        self.shown = {path: np.full(1, number, np.float32) for number, path in enumerate(paths, 1)}
        self.observation_space = self._nested({path: spaces.Box(0, 9, (1,)) for path in paths})

    def _nested(self, leaves):
        tree = nest(leaves)
        return spaces.Dict(
            {
                name: spaces.Dict(part) if isinstance(part, dict) else part
                for name, part in tree.items()
            }
        )

    def reset(self, *, seed=None, options=None):
        return nest(self.shown), {}

    def step(self, action):
        return nest(self.shown), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ([("agent", "place"), ("agent", "speed")], ["agent_place", "agent_speed"]),
        ([("a", "b"), ("a_b",), ("a_b_",)], ["a_b__", "a_b", "a_b_"]),
        ([("values",), ("type",), ("x.y",)], ["values_", "type_", "x_y"]),
        ([("a", "b_c"), ("a_b", "c"), ("top",)], ["a_b_c", "a_b_c_", "top"]),
    ],
)
def test_names_are_such_that_a_network_can_be_built(paths, names):
    env = to_sb3(SerialEnv(2, lambda: GymWrapper(Named(*paths))))

    model = PPO("MultiInputPolicy", env, n_steps=4, batch_size=8, n_epochs=1, device="cpu")
    model.learn(8)

    shown = env.reset()
    assert {name: shown[name][0, 0] for name in shown} == {
        name: number for number, name in enumerate(names, 1)
    }
    assert env.observation_space.contains({name: shown[name][0] for name in shown})


def test_pictures_of_a_pool_are_tiled():
    view = to_sb3(SerialEnv(2, lambda: GymWrapper(Drawn(3), from_pixels=False)))
    view.reset()

    assert view.render().shape == (4, 2, 3)


def test_attributes_and_methods_are_those_of_each_row():
    view = ours()

    assert view.get_attr("length") == list(LENGTHS)
    assert view.get_attr("length", [0, 2]) == [LENGTHS[0], LENGTHS[2]]
    assert view.has_attr("length") and not view.has_attr("nothing_like_it")
    assert view.env_is_wrapped(Monitor) == [False] * 3
    view.set_attr("mark", 4)
    view.set_attr("mark", 5, indices=[0])
    assert view.get_attr("mark") == [5, 4, 4]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: to_sb3(Walk(3)), ArgumentTypeError, "env is .*must be an env of envkit"),
        (lambda: to_sb3(Count()), ArgumentError, "num_envs"),
        (lambda: played(ours(), [[0, 1]]), InputError, r"shape \(2,\)"),
    ],
)
def test_a_mistake_is_told_with_its_cure(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --------------------------------------------------------------------------------------- training


def random_return(env, steps=400):
    data = env.rollout(steps, break_when_any_done=False)
    ends = data["next", "done"].sum()
    return float(data["next", "reward"].sum() / ends)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_ppo_with_normalised_observations_learns_on_brax(seed):
    env = make("brax/inverted_pendulum", 64, max_episode_steps=200, seed=seed)
    at_random = random_return(env)
    model = sb3.PPO(
        "MlpPolicy",
        VecNormalize(to_sb3(env)),
        n_steps=64,
        batch_size=512,
        n_epochs=6,
        seed=seed,
        device="cpu",
    )

    model.learn(120_000)

    normalised = model.get_env()
    normalised.training = normalised.norm_reward = False
    reached, _ = evaluate_policy(model, normalised, n_eval_episodes=64, warn=False)
    assert reached >= 2 * at_random


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_ppo_learns_on_a_pool_of_processes(seed, opened):
    env = opened(make("gym/CartPole-v1", 8, seed=seed))
    at_random = random_return(env)
    model = sb3.PPO("MlpPolicy", to_sb3(env), n_steps=128, batch_size=256, seed=seed, device="cpu")

    model.learn(30_000)

    reached, _ = evaluate_policy(model, VecMonitor(model.get_env()), n_eval_episodes=24)
    assert reached >= 2 * at_random
