"""Around pools of Gymnasium's environments, adapters show spaces, infos, rewards and actions as the simulators have them."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FlattenObservation, RecordEpisodeStatistics
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from envkit import (
    AsyncEnvPool,
    CatFrames,
    CatTensors,
    GymEnv,
    GymWrapper,
    MixedEnv,
    ParallelEnv,
    RewardScaling,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    make,
    to_gym_vector,
    to_sb3,
)
from tests.zoo.gym_envs import LostLives, Sampler, Telling


def asynchronous(count, makers):
    makers = makers if isinstance(makers, list) else [makers] * count
    return AsyncEnvPool(makers, backend="threading")


POOLS = {
    "serial": SerialEnv,
    "parallel": partial(ParallelEnv, num_processes=1),
    "TensorDicts": partial(SerialEnv, use_buffers=False),
    "asynchronous": asynchronous,
}
pools = pytest.mark.parametrize("pool", list(POOLS))
MODES = ["next_step", "same_step", "disabled"]


def assert_identical(got, expected):
    """Compare structure, classes, dtypes and values."""
    if isinstance(expected, dict):
        assert isinstance(got, dict) and set(got) == set(expected)
        for name in expected:
            assert_identical(got[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert type(got) is type(expected) and len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_identical(one, other)
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        if expected.dtype == object:
            assert_identical(list(got), list(expected))
        else:
            assert np.array_equal(got, expected)
    else:
        assert type(got) is type(expected) and got == expected


def played(env, steps=12, seed=(1, 2)):
    """Step with sampled actions; rows are reset by hand where the mode asks for that."""
    env.action_space.seed(3)
    shown = [env.reset(seed=None if seed is None else list(seed))]
    for _ in range(steps):
        shown.append(copy.deepcopy(env.step(env.action_space.sample())))
        ended = shown[-1][2] | shown[-1][3]
        if env.metadata["autoreset_mode"] == AutoresetMode.DISABLED and ended.any():
            shown.append(env.reset(options={"reset_mask": ended}))
    return shown


# ------------------------------------------------------------------------------------------- infos

TELLING = [partial(Telling, 2), partial(Telling, 3)]


@pools
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", [False, True])
def test_all_infos_are_laid_out_as_gymnasiums_vector_env_lays_them_out(pool, mode, info):
    makers = [lambda make=make: GymWrapper(make(), info=info) for make in TELLING]
    ours = to_gym_vector(POOLS[pool](2, makers), mode)
    theirs = SyncVectorEnv(TELLING, autoreset_mode=AutoresetMode[mode.upper()])

    for got, expected in zip(played(ours), played(theirs), strict=True):
        assert_identical(got, expected)
    ours.close()


@pools
@pytest.mark.parametrize("info", [False, True])
def test_all_infos_are_those_of_the_vector_env_of_sb3(pool, info):
    makers = [lambda make=make: GymWrapper(Monitor(make()), info=info) for make in TELLING]
    ours = to_sb3(POOLS[pool](2, makers))
    theirs = DummyVecEnv([lambda make=make: Monitor(make()) for make in TELLING])

    ours.reset(), theirs.reset()
    assert_identical(ours.reset_infos, theirs.reset_infos)
    for _ in range(7):
        *_, got = ours.step(np.zeros(2, int))
        *_, expected = theirs.step(np.zeros(2, int))
        for one in (*got, *expected):
            one.get("episode", {}).pop("t", None)  # the time of the clock
        assert_identical(got, expected)
        assert_identical(ours.reset_infos, theirs.reset_infos)
    ours.close()


@pools
def test_episodes_that_a_wrapper_ends_early_are_counted_when_they_are_over(pool):
    def lives(wrapper):
        return LostLives(wrapper(gymnasium.make("CartPole-v1")), every=4)

    def returns(env):
        env.reset(seed=[0, 1])
        sums = []
        for _ in range(60):
            *_, infos = env.step(np.ones(2, int))
            if "episode" in infos:
                sums += infos["episode"]["r"][infos["_episode"]].tolist()
        env.close()
        return sums

    one = partial(lives, RecordEpisodeStatistics)
    assert returns(to_gym_vector(POOLS[pool](2, lambda: GymWrapper(one())))) == returns(
        SyncVectorEnv([one] * 2)
    )


def test_an_evaluation_of_sb3_ends_where_a_wrapper_ends_episodes_early():
    def one():
        return GymWrapper(LostLives(Monitor(gymnasium.make("CartPole-v1")), every=4))

    env = to_sb3(SerialEnv(2, one))
    model = PPO("MlpPolicy", env, n_steps=8, batch_size=16, n_epochs=1, device="cpu")

    _, lengths = evaluate_policy(model, env, 4, return_episode_rewards=True)

    assert len(lengths) == 4 and min(lengths) > 4  # whole games, not lives


def test_rows_of_a_mixed_env_report_the_infos_of_their_simulators():
    members = [SerialEnv(1, lambda make=make: GymWrapper(make())) for make in TELLING]
    env = MixedEnv(members)

    got = played(to_gym_vector(env), seed=None)
    expected = played(SyncVectorEnv(TELLING), seed=None)

    for one, other in zip(got[1:], expected[1:], strict=True):
        assert set(one[-1]) == set(other[-1])
        assert_identical(one[-1].get("count"), other[-1].get("count"))
    env.close()


def test_a_row_that_was_built_again_reports_its_infos(opened):
    class Fragile(Telling):
        def step(self, action):
            if action == 1:
                raise RuntimeError("broken")
            return super().step(action)

    pool = opened(SerialEnv(2, lambda: GymWrapper(Fragile(9)), on_worker_failure="restart"))
    env = to_gym_vector(pool)
    env.reset()
    env.step(np.zeros(2, int))

    *_, truncated, _ = env.step(np.array([1, 0]))
    env.step(np.zeros(2, int))
    *_, infos = env.step(np.zeros(2, int))

    assert truncated.tolist() == [True, False]
    assert infos["count"].tolist() == [1, 4]


def test_two_adapters_of_one_pool_report_the_same(opened):
    pool = opened(ParallelEnv(2, lambda: GymWrapper(Telling(3)), num_processes=1))
    vector, rows = to_gym_vector(pool), to_sb3(pool)

    vector.reset()
    *_, infos = vector.step(np.zeros(2, int))
    rows.reset()
    *_, each = rows.step(np.zeros(2, int))

    assert infos["count"].tolist() == [info["count"] for info in each] == [1, 1]


# ------------------------------------------------------------------------------- spaces and values

BOX = spaces.Box(-1, 1, (3,))
SPACES = {
    "Discrete": spaces.Discrete(5),
    "Discrete from 2": spaces.Discrete(5, start=2),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiDiscrete of equal sizes": spaces.MultiDiscrete([3, 3], start=[1, -2]),
    "MultiBinary": spaces.MultiBinary(3),
    "Box()": spaces.Box(-1, 1, ()),
    "Box of bools": spaces.Box(0, 1, (2,), bool),
    "Box of float64": spaces.Box(-1, 1, (3,), np.float64),
    "image": spaces.Box(0, 255, (2, 2, 3), np.uint8),
    "Dict of one": spaces.Dict(vec=BOX),
    "Dict": spaces.Dict(OrderedDict(speed=BOX, angle=spaces.Discrete(3, start=1))),
    "nested Dict": spaces.Dict(OrderedDict(b=spaces.Dict(z=BOX, a=BOX), a=spaces.Discrete(2))),
    "state": spaces.Dict(state=BOX, goal=BOX),
    "Tuple": spaces.Tuple((BOX, spaces.Discrete(2))),
    "Tuple of one kind": spaces.Tuple((BOX, BOX)),
    "Dict with a Tuple": spaces.Dict(pair=spaces.Tuple((BOX, BOX)), n=spaces.Discrete(2)),
}


@pools
@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("name", list(SPACES))
@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")  # Gymnasium's own numbers
def test_observations_and_actions_are_those_of_the_simulators(name, categorical, pool):
    space = SPACES[name]

    def one():
        return Sampler(copy.deepcopy(space), copy.deepcopy(space))

    ours = to_gym_vector(
        POOLS[pool](2, lambda: GymWrapper(one(), categorical_action_encoding=categorical))
    )
    theirs = SyncVectorEnv([one] * 2)

    for side in ("single_observation_space", "single_action_space"):
        assert getattr(ours, side) == getattr(theirs, side)
        assert str(getattr(ours, side)) == str(getattr(theirs, side))  # the order of keys, too
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    for got, expected in zip(played(ours), played(theirs), strict=True):
        assert_identical(got, expected)
    for got, expected in zip(ours.get_attr("taken"), theirs.get_attr("taken"), strict=True):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert np.array_equal(spaces.flatten(space, one), spaces.flatten(space, other))
    ours.close()


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("name", [name for name in SPACES if "uple" not in name])
def test_sb3_gets_the_spaces_and_observations_of_the_simulators(name, categorical):
    def one():
        return Sampler(copy.deepcopy(SPACES[name]))

    if name == "nested Dict":
        pytest.skip("that library has none")
    ours = to_sb3(SerialEnv(2, lambda: GymWrapper(one(), categorical_action_encoding=categorical)))
    theirs = DummyVecEnv([one] * 2)

    assert ours.observation_space == theirs.observation_space
    assert str(ours.observation_space) == str(theirs.observation_space)
    first, expected = ours.reset(), theirs.reset()
    if isinstance(expected, dict):
        assert list(first) == list(expected)
        assert [value.dtype for value in first.values()] == [
            value.dtype for value in expected.values()
        ]
    else:
        assert first.dtype == expected.dtype and first.shape == expected.shape
    ours.close()


@pools
def test_flat_observations_keep_the_order_of_the_simulator(pool):
    space = spaces.Dict(OrderedDict(speed=BOX, angle=BOX))

    def one():
        return Sampler(copy.deepcopy(space))

    view = to_gym_vector(POOLS[pool](1, lambda: GymWrapper(one())))
    shown = gymnasium.wrappers.vector.FlattenObservation(view).reset(seed=[7])[0]

    assert np.array_equal(shown[0], FlattenObservation(one()).reset(seed=7)[0])
    view.close()


@pools
def test_rewards_are_those_of_the_simulators_in_full(pool):
    class Paid(Sampler):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, 0.1 * self.place, *rest

    ours = to_gym_vector(POOLS[pool](2, lambda: GymWrapper(Paid())))
    scaled = to_gym_vector(
        TransformedEnv(POOLS[pool](2, lambda: GymWrapper(Paid())), RewardScaling(0.0, 3.0))
    )

    for got, three, expected in zip(
        played(ours), played(scaled), played(SyncVectorEnv([Paid] * 2)), strict=True
    ):
        if len(expected) > 2:
            assert got[1].dtype == np.float64 and np.array_equal(got[1], expected[1])
            assert np.allclose(three[1], 3 * expected[1])
    ours.close(), scaled.close()


@pools
def test_samples_of_an_action_space_follow_the_seed_of_the_rows(pool):
    def one():
        env = gymnasium.make("Pendulum-v1")
        env.action_space.seed(4)
        return env

    def samples(env):
        env.reset(seed=[1, 2])
        found = [env.single_action_space.sample() for _ in range(3)]
        env.close()
        return found

    ours = to_gym_vector(POOLS[pool](2, lambda: GymWrapper(one())))

    assert np.array_equal(samples(ours), samples(SyncVectorEnv([one] * 2)))


# -------------------------------------------------------------------------------- behind transforms


def test_entries_of_transforms_stand_beside_those_of_the_simulator():
    space = spaces.Dict(OrderedDict(speed=BOX, angle=spaces.Discrete(3, start=1)))
    pool = SerialEnv(2, lambda: TransformedEnv(GymWrapper(Sampler(space)), StepCounter()))
    view = to_gym_vector(pool)

    shown, _ = view.reset(seed=0)

    assert list(view.single_observation_space) == ["speed", "angle", "step_count"]
    assert view.single_observation_space["angle"] is space["angle"]
    assert view.observation_space.contains(shown)
    lake = to_gym_vector(
        TransformedEnv(SerialEnv(2, lambda: GymEnv("FrozenLake-v1")), StepCounter())
    )
    assert list(lake.single_observation_space) == ["observation", "step_count"]
    assert lake.single_observation_space["observation"] == spaces.Discrete(16)
    assert lake.observation_space.contains(lake.reset()[0])


def test_entries_that_transforms_change_have_spaces_of_their_specs():
    space = spaces.Dict(OrderedDict(speed=BOX, angle=BOX, n=spaces.Discrete(3)))
    pool = SerialEnv(2, lambda: GymWrapper(Sampler(space), categorical_action_encoding=True))
    stacked = to_gym_vector(TransformedEnv(pool, CatFrames(2, -1, in_keys=["angle"])))
    joined = to_gym_vector(TransformedEnv(pool, CatTensors(["speed", "angle"], "flat")))

    assert list(stacked.single_observation_space) == ["speed", "angle", "n"]
    assert stacked.single_observation_space["angle"].shape == (6,)
    assert stacked.observation_space.contains(stacked.reset()[0])
    assert list(joined.single_observation_space) == ["n", "flat"]
    assert joined.observation_space.contains(joined.reset()[0])


@pytest.mark.parametrize("inside", [False, True])
def test_private_memory_of_transforms_is_not_shown(inside):
    def one():
        return GymEnv("CartPole-v1")

    def frames():
        return CatFrames(3, -1, in_keys=["observation"])

    env = (
        SerialEnv(2, lambda: TransformedEnv(one(), frames()))
        if inside
        else TransformedEnv(SerialEnv(2, one), frames())
    )
    view, rows = to_gym_vector(env), to_sb3(env)

    assert view.single_observation_space.shape == rows.observation_space.shape == (12,)
    first = view.reset(seed=0)[0]
    after = view.step(np.zeros(2, int))[0]
    assert np.array_equal(after[:, :8], first[:, 4:])
    PPO("MlpPolicy", rows, n_steps=4, batch_size=8, n_epochs=1, device="cpu").learn(8)
    env.close()


# ----------------------------------------------------------------------------------------- training


def test_a_model_goes_from_the_adapter_to_the_raw_env_and_from_there_to_the_adapter():
    options = {"n_steps": 8, "n_epochs": 1, "device": "cpu"}
    env = to_sb3(make("gym/FrozenLake-v1", 2, backend="serial"))
    raw = gymnasium.make("FrozenLake-v1")
    trained = PPO("MlpPolicy", env, batch_size=16, **options).learn(16)
    theirs = PPO("MlpPolicy", DummyVecEnv([lambda: raw]), batch_size=8, **options).learn(8)
    file = io.BytesIO()
    theirs.save(file)
    file.seek(0)

    action, _ = trained.predict(raw.reset(seed=0)[0])
    loaded = PPO.load(file, env=env).learn(16)

    assert raw.action_space.contains(int(action))
    assert loaded.num_timesteps >= 16
    env.close()


# ---------------------------------------------------------------------------------------- protocol


def test_an_adapter_is_made_by_the_registry_of_gymnasium():
    def make_view(num_envs, **options):
        return to_gym_vector(make("gym/CartPole-v1", num_envs, backend="serial"))

    gymnasium.register("Shown/Pool-v0", vector_entry_point=make_view)
    try:
        env = gymnasium.make_vec(
            "Shown/Pool-v0", num_envs=2, vectorization_mode="vector_entry_point"
        )
        assert env.spec.id == "Shown/Pool-v0" and env.num_envs == 2
        env.close()
    finally:
        gymnasium.registry.pop("Shown/Pool-v0")


def ended(env):
    env.reset()
    while not (step := env.step(np.ones(2, int)))[2].any():
        pass
    return step


MISUSE = {
    "seeds": lambda env: env.reset(seed=[1, 2, 3]),
    "shape of a mask": lambda env: env.reset(options={"reset_mask": np.ones(3, bool)}),
    "dtype of a mask": lambda env: env.reset(options={"reset_mask": np.ones(2)}),
    "empty mask": lambda env: env.reset(options={"reset_mask": np.zeros(2, bool)}),
    "ended rows": lambda env: (ended(env), env.step(np.ones(2, int))),
    "values": lambda env: env.set_attr("gravity", [1.0, 2.0, 3.0]),
    "attribute": lambda env: env.call("nothing_like_it"),
    "closed": lambda env: (env.close(), env.reset()),
}


@pytest.mark.parametrize("name", list(MISUSE))
def test_misuse_raises_errors_of_the_classes_of_gymnasium(name):
    one = partial(gymnasium.make, "CartPole-v1")
    theirs = SyncVectorEnv([one] * 2, autoreset_mode=AutoresetMode.DISABLED)
    ours = to_gym_vector(SerialEnv(2, lambda: GymWrapper(one())), "disabled")
    theirs.reset()
    ours.reset()

    if name == "closed":  # of the pool of processes; the other has no check
        expected: type[Exception] = gymnasium.error.ClosedEnvironmentError
    else:
        with pytest.raises(Exception) as refused:  # noqa: PT011
            MISUSE[name](theirs)
        expected = refused.type

    with pytest.raises(expected):
        MISUSE[name](ours)
    theirs.close(), ours.close()
