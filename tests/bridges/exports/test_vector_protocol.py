"""What Gymnasium's VectorEnv and Stable-Baselines3's VecEnv document, on adapters of pools and of one object."""

from __future__ import annotations

import multiprocessing
import time
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from envkit import (
    BraxEnv,
    GymWrapper,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    check_env_specs,
    to_gym_vector,
    to_sb3,
)
from envkit.errors import ArgumentError, InputError
from envkit.functional import Box, Timestep
from tests.zoo.gym_envs import Informed, Sampler


class Drawn(gymnasium.Env):
    """Shows a number that it draws at a reset; its picture has that brightness. Ends after 3 steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012
    observation_space = spaces.Box(0, 99, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def _shown(self):
        return np.array([self.number], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.steps = float(self.np_random.integers(100)), 0
        return self._shown(), {}

    def step(self, action):
        self.steps += 1
        return self._shown(), 1.0, self.steps == 3, False, {}

    def render(self):
        return np.full((2, 3, 3), self.number, np.uint8)


class Slow(Drawn):
    def step(self, action):
        time.sleep(60 * action)
        return super().step(0)


class Arm(gymnasium.Env):
    """Observes and does what has the same name."""

    observation_space = spaces.Dict(arm=spaces.Box(0, 1, (2,)), count=spaces.Discrete(9))
    action_space = spaces.Dict(arm=spaces.Box(0, 1, (2,)), hand=spaces.Discrete(3))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"arm": np.zeros(2, np.float32), "count": 0}, {}

    def step(self, action):
        return {"arm": action["arm"], "count": int(action["hand"])}, 0.0, False, False, {}


def drawn():
    return GymWrapper(Drawn("rgb_array"))


def brax():
    return BraxEnv("fast", batch_size=[2], device="cpu")


ENVS = {
    "serial": lambda: SerialEnv(2, drawn),
    "parallel": lambda: ParallelEnv(2, drawn, num_processes=1),
    "brax": brax,
}
pools = pytest.mark.parametrize("kind", ["serial", "parallel"])
every = pytest.mark.parametrize("kind", sorted(ENVS))
no_actions = np.zeros(2, int)


@pytest.fixture
def shown(kind):
    """Show an env of a kind in some way; it is closed afterwards."""
    opened = []

    def show(how, **options):
        opened.append(how(ENVS[kind](), **options))
        return opened[-1]

    yield show
    for view in opened:
        view.close()


def sample(view):
    space = getattr(view, "single_action_space", view.action_space)
    return np.stack([space.sample(), space.sample()])


# ------------------------------------------------------------------------------------ order of calls


@every
def test_a_step_before_the_first_reset_needs_a_reset(shown):
    view = shown(to_gym_vector)

    with pytest.raises(ResetNeeded, match="Call reset"):
        view.step(sample(view))

    view.reset()
    assert view.step(sample(view))[1].shape == (2,)


@every
def test_a_closed_vector_env_refuses_all_calls_and_may_be_closed_again(shown):
    view = shown(to_gym_vector)
    view.reset()
    action = sample(view)
    view.close()
    view.close()

    calls = [
        partial(view.step, action),
        view.reset,
        view.render,
        partial(view.call, "reset"),
        partial(view.get_attr, "num_envs"),
        partial(view.set_attr, "x", 1),
    ]
    for call in calls:
        with pytest.raises(ClosedEnvironmentError, match="closed"):
            call()


@pytest.mark.slow
def test_a_worker_that_exceeds_its_deadline_is_a_timeout_of_multiprocessing():
    env = to_gym_vector(ParallelEnv(2, lambda: GymWrapper(Slow()), num_processes=1, timeout=10))
    env.reset()

    with pytest.raises(multiprocessing.TimeoutError) as told:
        env.step(np.ones(2, int))

    assert isinstance(told.value, TimeoutError)
    env.close()


@every
def test_sb3_steps_need_actions_first(shown):
    view = shown(to_sb3)
    view.reset()

    with pytest.raises(InputError, match="step_async"):
        view.step_wait()
    view.step_async(sample(view))
    view.step_wait()
    with pytest.raises(InputError, match="step_async"):
        view.step_wait()


# -------------------------------------------------------------------------------------------- seeds


@pools
@pytest.mark.parametrize("seed", [5, [5, 8]])
def test_rows_take_a_seed_each_as_gymnasium_gives_it(shown, seed):
    ours, theirs = shown(to_gym_vector), SyncVectorEnv([Drawn] * 2)

    pair = [env.reset(seed=seed) for env in (ours, theirs)]

    assert np.array_equal(pair[0][0], pair[1][0])
    assert ours.np_random_seed == theirs.np_random_seed
    assert ours.np_random_seed == ((5, 8) if seed == [5, 8] else (5, 6))
    again = [env.reset() for env in (ours, theirs)]
    assert np.array_equal(again[0][0], again[1][0])


@pools
def test_a_seed_that_is_none_leaves_its_row_alone(shown):
    ours, theirs = shown(to_gym_vector), SyncVectorEnv([Drawn] * 2)
    for env in (ours, theirs):
        env.reset(seed=[5, 8])

    pair = [env.reset(seed=[5, None])[0] for env in (ours, theirs)]

    assert np.array_equal(*pair)


@pools
def test_seeds_beside_a_mask_are_those_of_the_rows_that_are_reset(shown):
    ours = shown(to_gym_vector, autoreset="disabled")
    theirs = SyncVectorEnv([Drawn] * 2, autoreset_mode=AutoresetMode.DISABLED)
    mask = np.array([False, True])
    for env in (ours, theirs):
        env.reset(seed=[5, 8])

    pair = [
        env.reset(seed=[1, 2], options={"reset_mask": mask.copy()})[0] for env in (ours, theirs)
    ]

    assert np.array_equal(*pair)
    assert ours.np_random_seed == theirs.np_random_seed == (5, 2)
    assert ours.step(no_actions)[1].tolist() == [1, 1]


@pools
def test_one_seed_beside_a_mask_seeds_a_row_as_it_does_without_a_mask(shown):
    one, other = (shown(to_gym_vector, autoreset="disabled") for _ in range(2))
    whole = one.reset(seed=4)[0]
    first = other.reset(seed=9)[0]

    part = other.reset(seed=4, options={"reset_mask": np.array([False, True])})[0]

    assert part[0] == first[0] and part[1] == whole[1]
    assert other.np_random_seed[1] == one.np_random_seed[1]


@pytest.mark.parametrize("kind", ["brax"])
def test_rows_of_one_object_know_the_seed_they_were_given_together(shown):
    view = shown(to_gym_vector)

    assert view.np_random_seed == (-1, -1)
    view.reset(seed=3)
    assert view.np_random_seed == (3, 3)
    with pytest.raises(ArgumentError, match=r"seeded together.*SerialEnv"):
        view.reset(seed=[1, 2])
    with pytest.raises(ArgumentError, match="seeded together"):
        view.reset(seed=1, options={"reset_mask": np.array([True, False])})


@pools
def test_a_list_of_another_number_of_seeds_is_refused(shown):
    with pytest.raises(ArgumentError, match="there are 2 rows"):
        shown(to_gym_vector).reset(seed=[1, 2, 3])


# --------------------------------------------------------------------------- what envs say and show


@pools
def test_metadata_spec_and_pictures_are_those_of_the_rows(shown):
    view, rows = shown(to_gym_vector), shown(to_sb3)
    observation, _ = view.reset(seed=[1, 2])
    rows.reset()

    assert view.metadata["render_fps"] == rows.metadata["render_fps"] == 7
    assert view.render_mode == rows.render_mode == "rgb_array"
    assert view.spec is None and len(view.np_random) == 2
    pictures = view.render()
    assert isinstance(pictures, tuple)
    assert [picture.max() for picture in pictures] == observation[:, 0].tolist()
    assert len(rows.get_images()) == 2 and rows.render("rgb_array").shape[-1] == 3


def test_pictures_of_a_mixed_env_are_of_all_rows():
    env = MixedEnv([SerialEnv(1, drawn), SerialEnv(1, drawn)])
    view = to_gym_vector(env)
    observation, _ = view.reset(seed=1)

    pictures = view.render()

    assert [picture.max() for picture in pictures] == observation[:, 0].tolist()
    env.close()


def test_the_spec_of_a_pool_is_that_of_its_envs():
    pool = SerialEnv(2, lambda: GymWrapper(gymnasium.make("CartPole-v1")))
    view = to_gym_vector(pool)

    assert view.spec.id == "CartPole-v1"
    view.close()


@pytest.mark.parametrize("batched", [SerialEnv, partial(ParallelEnv, num_processes=1)])
def test_sb3_knows_the_wrappers_of_single_rows(batched):
    makers = [lambda: GymWrapper(Monitor(Informed())), lambda: GymWrapper(Informed())]
    view = to_sb3(batched(2, makers))
    view.reset()

    assert view.env_is_wrapped(Monitor) == [True, False]
    assert view.env_is_wrapped(Monitor, indices=1) == [False]
    view.close()


def test_a_monitor_inside_counts_for_an_evaluation_of_sb3():
    class Model:
        def predict(self, observation, **options):
            return np.zeros(len(observation), int), None

    view = to_sb3(SerialEnv(2, lambda: GymWrapper(Monitor(Informed(length=4)))))

    rewards, lengths = evaluate_policy(Model(), view, 4, return_episode_rewards=True)

    assert rewards == [4.0] * 4 and lengths == [4] * 4


# ------------------------------------------------------------------------------------ several actions


ARMS = {
    "serial": lambda: SerialEnv(2, lambda: GymWrapper(Arm(), categorical_action_encoding=True)),
    "one-hot": lambda: SerialEnv(2, lambda: GymWrapper(Arm())),
    "parallel": lambda: ParallelEnv(2, lambda: GymWrapper(Arm()), num_processes=1),
    "vector": lambda: GymWrapper(SyncVectorEnv([Arm, Arm])),
}


@pytest.mark.parametrize("kind", sorted(ARMS))
def test_an_action_and_an_observation_may_have_one_name(kind):
    env = ARMS[kind]()
    view = to_gym_vector(env)
    view.reset(seed=0)
    view.action_space.seed(0)

    for _ in range(3):
        action = view.action_space.sample()
        observation, *_ = view.step(action)
        assert np.array_equal(observation["arm"], action["arm"])
        counts = observation["count"]
        assert np.array_equal(counts.argmax(-1) if counts.ndim > 1 else counts, action["hand"])

    assert env.action_keys == [("action", "arm"), ("action", "hand")]
    assert view.single_action_space == Arm.action_space
    view.close()


def test_names_that_do_not_clash_stay_where_they_are():
    class Legs(Arm):
        observation_space = spaces.Dict(legs=spaces.Box(0, 1, (2,)))

        def reset(self, *, seed=None, options=None):
            return {"legs": np.zeros(2, np.float32)}, {}

        def step(self, action):
            return {"legs": action["arm"]}, 0.0, False, False, {}

    env = GymWrapper(Legs())

    assert env.action_keys == ["arm", "hand"]
    assert set(to_gym_vector(SerialEnv(2, lambda: GymWrapper(Legs()))).single_action_space) == {
        "arm",
        "hand",
    }


def test_an_env_whose_names_clash_passes_the_checks_alone():
    env = GymWrapper(Arm())

    check_env_specs(env)
    data = env.rollout(3)
    assert (data["next", "arm"] == data["action", "arm"]).all()


class Echo(gymnasium.Env):
    """Observes the last action and reward under their own names, and its count as the name of a flag."""

    observation_space = spaces.Dict(
        action=spaces.Box(0, 1, (2,)), reward=spaces.Box(-9, 9, (1,)), done=spaces.Discrete(9)
    )
    action_space = spaces.Box(0, 1, (2,))

    def _shown(self, action, reward):
        last = np.array([reward], np.float32)
        return {"action": action, "reward": last, "done": self.steps}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._shown(np.zeros(2, np.float32), 0.0), {}

    def step(self, action):
        self.steps += 1
        reward = float(action.sum())
        return self._shown(action, reward), reward, self.steps == 3, False, {}


def echo():
    return GymWrapper(Echo(), categorical_action_encoding=True)


ECHOES = {
    "serial": lambda: SerialEnv(2, echo),
    "parallel": lambda: ParallelEnv(2, echo, num_processes=1),
    "vector": lambda: GymWrapper(SyncVectorEnv([Echo, Echo]), categorical_action_encoding=True),
}


@pytest.mark.parametrize("kind", sorted(ECHOES))
def test_observations_may_be_called_as_actions_rewards_and_flags(kind):
    view = to_gym_vector(ECHOES[kind]())
    view.reset(seed=0)

    for step in range(1, 4):
        action = view.action_space.sample()
        shown, reward, terminated, *_ = view.step(action)
        assert np.array_equal(shown["action"], action)
        assert np.array_equal(shown["reward"][:, 0], reward)
        assert shown["done"].tolist() == [step] * 2
        assert terminated.tolist() == [step == 3] * 2
    view.close()


def test_an_env_that_observes_its_action_passes_the_checks_alone():
    env = echo()

    check_env_specs(env)
    data = env.rollout(3)

    assert env.action_keys == ["action"]
    assert (data["next", "observation", "action"] == data["action"]).all()
    assert data["observation", "done"].tolist() == [0, 1, 2]


# ------------------------------------------------------------------------------ tuples of unlike kinds


PAIR = spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3, start=1)])
ACTS = spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (1,))])


def pair():
    return GymWrapper(Sampler(PAIR, ACTS), categorical_action_encoding=True)


@pytest.mark.parametrize("batched", [SerialEnv, ParallelEnv])
def test_a_tuple_of_unlike_kinds_is_a_tuple_and_a_dict_for_sb3(batched):
    view = to_gym_vector(batched(2, pair))
    theirs = to_sb3(view.envkit_env)

    shown, _ = view.reset(seed=0)
    view.step(view.action_space.sample())

    assert shown[0].shape == (2, 2)
    assert view.observation_space.contains(shown)
    assert view.single_observation_space == PAIR and view.single_action_space == ACTS
    assert set(theirs.observation_space) == {"observation_0", "observation_1"}
    assert all(ACTS.contains(action) for taken in view.get_attr("taken") for action in taken)
    view.close()


def test_actions_that_lack_a_part_are_told():
    view = to_gym_vector(SerialEnv(2, lambda: GymWrapper(Arm())))
    view.reset()

    with pytest.raises(InputError, match=r"\['arm'\], but must have 'hand'.*sample"):
        view.step({"arm": np.zeros((2, 2), np.float32)})
    with pytest.raises(InputError, match=r"'action', 'arm'.*one action for each row"):
        view.step({"arm": np.zeros((3, 2), np.float32), "hand": no_actions})


def test_sb3_takes_one_dict_for_each_row():
    ours = to_sb3(SerialEnv(2, lambda: GymWrapper(Arm(), categorical_action_encoding=True)))
    theirs = DummyVecEnv([Arm, Arm])
    actions = [{"arm": np.full(2, row, np.float32), "hand": row + 1} for row in range(2)]
    ours.reset(), theirs.reset()

    one, other = ours.step(actions)[0], theirs.step(actions)[0]

    assert np.array_equal(one["arm"], other["arm"])
    assert np.array_equal(one["count"].ravel(), np.asarray(other["count"]).ravel())


class Counted(Drawn):
    """Counts its resets, and ends after as many steps as it is told."""

    def __init__(self, length):
        super().__init__()
        self.length, self.resets = length, 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        _, infos = super().reset(seed=seed)
        if options:
            self.number = options["number"]
        return self._shown(), infos

    def step(self, action):
        shown, reward, _, truncated, infos = super().step(action)
        return shown, reward, self.steps >= self.length, truncated, infos


def side_by_side(kind, lengths=(2, 2, 5)):
    """Give a view and the library's own, reset with the same seeds."""
    ours = to_gym_vector(kind([partial(lambda n: GymWrapper(Counted(n)), n) for n in lengths]))
    theirs = SyncVectorEnv([partial(Counted, n) for n in lengths])
    for env in (ours, theirs):
        env.reset(seed=[1, 2, 3])
    return ours, theirs


def pool_of(makers):
    return SerialEnv(len(makers), makers)


def processes_of(makers):
    return ParallelEnv(len(makers), makers)


RESETS_AFTER_AN_END = {
    "all": {},
    "masked": {"options": {"reset_mask": np.array([True, True, False])}},
    "masked, with one more": {"options": {"reset_mask": np.array([True] * 3)}},
    "seeds of some": {"seed": [None, 8, None]},
}


@pytest.mark.parametrize("keywords", RESETS_AFTER_AN_END.values(), ids=RESETS_AFTER_AN_END.keys())
@pytest.mark.parametrize("kind", [pool_of, processes_of], ids=["in place", "processes"])
def test_a_row_that_ended_begins_once_if_the_caller_resets_it(kind, keywords):
    ours, theirs = side_by_side(kind)
    seen = []
    for env in (ours, theirs):
        shown = [env.step(np.zeros(3, int))[0] for _ in range(2)]
        # the library takes the mask out of the dict
        options = {"options": dict(keywords["options"])} if "options" in keywords else {}
        shown.append(env.reset(**{**keywords, **options})[0])
        shown += [env.step(np.zeros(3, int))[0] for _ in range(7)]
        seen.append(shown)
    resets = [list(env.get_attr("resets")) for env in (ours, theirs)]
    for env in (ours, theirs):
        env.close()

    np.testing.assert_array_equal(*seen)
    if "seed" not in keywords:  # a seed comes after the row has begun without one
        assert resets[0] == resets[1]


def test_rows_that_ended_begin_as_their_caller_asks():
    ours, theirs = side_by_side(pool_of)
    for env in (ours, theirs):
        for _ in range(2):
            env.step(np.zeros(3, int))

    asked = {"seed": [4, 5, 6], "options": {"number": 7}}
    starts = [env.reset(**asked)[0].ravel().tolist() for env in (ours, theirs)]

    assert starts[0] == starts[1] == [7, 7, 7]
    assert ours.reset(seed=3)[0].tolist() == ours.reset(seed=3)[0].tolist()


class Hidden:
    """Draws a level at a reset, and paints it; a stateless env."""

    action_space = Box(-1.0, 1.0, (1,))

    def reset(self, key):
        level = jax.random.randint(key, (), 1, 200)
        return level, Timestep(level.astype(jnp.float32))

    def step(self, state, action):
        return state, Timestep(state.astype(jnp.float32), 0.0)

    def render(self, states):
        return [np.full((2, 3, 3), state, np.uint8) for state in states]


@pytest.fixture(scope="module")
def stateless():
    return to_gym_vector(JaxEnv(Hidden(), batch_size=[3], episode_length=2))


def test_rows_of_a_stateless_env_show_what_they_have_begun(stateless):
    stateless.reset(seed=0)
    for _ in range(2):
        _, _, _, truncated, _ = stateless.step(np.zeros((3, 1), np.float32))
    assert truncated.all()
    begun = stateless.view.root["observation"].numpy()

    np.testing.assert_array_equal(stateless.reset()[0], begun)
    assert (stateless.reset()[0] != begun).any()  # now all have been shown


def test_pictures_of_a_stateless_env_are_of_the_state_of_each_row(stateless):
    stateless.reset(seed=1)
    shown = stateless.step(np.zeros((3, 1), np.float32))[0]

    pictures = stateless.render()

    assert stateless.render_mode == "rgb_array"
    assert isinstance(pictures, tuple) and len(pictures) == 3
    for picture, level in zip(pictures, shown, strict=True):
        assert picture.shape == (2, 3, 3) and picture.dtype == np.uint8 and (picture == level).all()
