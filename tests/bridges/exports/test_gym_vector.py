"""Vector envs of Gymnasium: ours step by step beside the library's own, in every autoreset mode."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit import (
    Composite,
    GymWrapper,
    ParallelEnv,
    PendulumEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    Unbounded,
    evaluate,
    make,
    to_gym_vector,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BusyError,
    DoneError,
    EncodingError,
    InputError,
    MissingKeyError,
    NotResetError,
    WorkerError,
)
from envkit_bridges.jax.jax_env import JaxEnv
from tests.zoo.cleanrl_ppo import train
from tests.zoo.envs import Count
from tests.zoo.jax_drift import Drift
from tests.zoo.torch_envs import TorchPendulum

MODES = ["next_step", "same_step", "disabled"]


class Walk(gymnasium.Env):
    """A walk along a line; ends beyond 3 steps to the right, and is cut after ``length`` steps."""

    observation_space = gymnasium.spaces.Box(-20, 20, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, length: int):
        self.length = length

    def _shown(self):
        return np.array([self.place, self.steps], np.float32), {"place": float(self.place)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = 0, 0
        return self._shown()

    def step(self, action):
        self.place += int(action) - 1
        self.steps += 1
        observation, info = self._shown()
        return observation, self.place / 2, self.place >= 3, self.steps >= self.length, info


LENGTHS = (2, 5, 7)


def walks(**options):
    def wrapped(length):
        return GymWrapper(Walk(length)).set_info_dict_reader()

    makers = [partial(wrapped, length) for length in LENGTHS]
    return SerialEnv(len(LENGTHS), makers, **options)


def ours(mode, use_buffers=None, **options):
    return to_gym_vector(walks(use_buffers=use_buffers), mode, info_keys=["place"], **options)


def theirs(mode):
    makers = [lambda length=length: Walk(length) for length in LENGTHS]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode.upper()])


def assert_equal(left, right):
    if isinstance(right, dict):
        assert left.keys() == right.keys()
        for name in right:
            assert_equal(left[name], right[name])
    elif isinstance(right, np.ndarray) and right.dtype == object:
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    elif right is None:
        assert left is None
    else:
        assert left.dtype == right.dtype and np.array_equal(left, right)


def played(env, program):
    """Step as a program says; ended rows are reset by hand where the mode asks for that."""
    outcomes = [env.reset()]
    disabled = env.metadata["autoreset_mode"] == AutoresetMode.DISABLED
    for actions in program:
        outcomes.append(copy.deepcopy(env.step(np.array(actions))))
        ended = outcomes[-1][2] | outcomes[-1][3]
        if disabled and ended.any():
            outcomes.append(env.reset(options={"reset_mask": ended}))
    return outcomes


@pytest.mark.parametrize("use_buffers", [None, False], ids=["in place", "TensorDicts"])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12)
@given(st.lists(st.tuples(*[st.integers(0, 2)] * len(LENGTHS)), max_size=20))
def test_every_mode_gives_what_gymnasiums_own_vector_env_gives(mode, use_buffers, program):
    for got, expected in zip(
        played(ours(mode, use_buffers), program), played(theirs(mode), program), strict=True
    ):
        assert len(got) == len(expected)
        *values, infos = expected
        for one, other in zip(got, values, strict=False):
            assert_equal(one, other)
        assert_infos(got[-1], infos)


def assert_infos(got, expected):
    """Compare infos where somebody has one: what others hold there means nothing."""
    names = {name for name in expected if not name.startswith("_")}
    assert {name for name in got if not name.startswith("_")} == names
    for name in names:
        mask = expected[f"_{name}"]
        assert np.array_equal(got[f"_{name}"], mask)
        if isinstance(expected[name], dict):
            assert_infos(got[name], expected[name])
            continue
        for row in np.flatnonzero(mask):
            assert np.array_equal(np.squeeze(got[name][row]), expected[name][row])


@pytest.mark.parametrize("mode", MODES)
def test_spaces_and_metadata_are_those_of_the_library(mode):
    view, twin = ours(mode), theirs(mode)

    assert view.single_action_space == twin.single_action_space
    assert view.action_space == twin.action_space
    assert view.single_observation_space == twin.single_observation_space
    assert view.observation_space == twin.observation_space
    assert view.metadata["autoreset_mode"] == twin.metadata["autoreset_mode"]
    assert view.num_envs == twin.num_envs == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "wrapper",
    [
        wrappers.RecordEpisodeStatistics,
        wrappers.NormalizeReward,
        pytest.param(wrappers.NormalizeObservation, id="NormalizeObservation"),
        wrappers.ClipAction,
    ],
)
def test_the_librarys_wrappers_run_in_the_modes_that_they_support(mode, wrapper):
    if wrapper is wrappers.ClipAction:
        return _clipped(mode)
    if wrapper is wrappers.RecordEpisodeStatistics and mode == "disabled":
        return _counted_by_row(wrapper(ours(mode)))
    try:
        around_theirs = wrapper(theirs(mode))
    except (AssertionError, ValueError) as refused:
        with pytest.raises(type(refused)):
            wrapper(ours(mode))
        return None
    around_ours = wrapper(ours(mode))
    program = np.random.default_rng(0).integers(0, 3, (30, 3))

    for got, expected in zip(
        played(around_ours, program), played(around_theirs, program), strict=True
    ):
        for one, other in zip(got[:-1], expected[:-1], strict=True):
            assert np.allclose(one, other, atol=1e-6)
        if "episode" in expected[-1]:
            assert np.array_equal(got[-1]["_episode"], expected[-1]["_episode"])
            for name in ("r", "l"):
                assert np.allclose(got[-1]["episode"][name], expected[-1]["episode"][name])
    return None


def _clipped(mode):
    env = wrappers.ClipAction(to_gym_vector(make("gym/Pendulum-v1", 2, backend="serial"), mode))
    env.reset(seed=0)
    observation, *_ = env.step(np.full((2, 1), 9.0, np.float32))
    assert observation.shape == (2, 3)


def _counted_by_row(env):
    """Compare with sums by hand: around the library's own env the wrapper forgets rows that were not reset."""
    returns, lengths = np.zeros(3), np.zeros(3, int)
    env.reset()
    for actions in np.random.default_rng(0).integers(0, 3, (30, 3)):
        _, rewards, terminated, truncated, infos = env.step(actions)
        returns, lengths, ended = returns + rewards, lengths + 1, terminated | truncated
        if ended.any():
            assert np.array_equal(infos["_episode"], ended)
            assert np.array_equal(infos["episode"]["r"][ended], returns[ended])
            assert np.array_equal(infos["episode"]["l"][ended], lengths[ended])
            returns, lengths = returns * ~ended, lengths * ~ended
            env.reset(options={"reset_mask": ended})


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_rows_in_workers_and_rows_of_a_program_keep_to_the_modes(mode, opened):
    for env in (
        opened(
            ParallelEnv(
                2, [lambda: GymWrapper(Walk(2)), lambda: GymWrapper(Walk(3))], num_processes=1
            )
        ),
        JaxEnv(Drift(), batch_size=[2], episode_length=3),
    ):
        view = to_gym_vector(env, mode)
        view.reset(seed=0)
        action = view.action_space.sample() * 0
        ends = [view.step(action) for _ in range(8)]
        done = np.array([step[2] | step[3] for step in ends])

        assert done.any(0).all()
        for before, (observations, rewards, *_, infos) in zip(done, ends[1:], strict=False):
            assert (mode == "same_step") or (rewards[before] == 0).all()
            assert ("final_obs" in infos) <= (mode == "same_step")
            assert view.observation_space.contains(observations)
        assert "state" not in str(view.observation_space)


def test_a_seed_repeats_and_the_data_is_that_of_the_env(opened):
    env = opened(make("gym/CartPole-v1", 3, backend="serial"))
    view = to_gym_vector(env, "same_step")
    actions = np.random.default_rng(0).integers(0, 2, (20, 3))

    runs = []
    for _ in range(2):
        first, _ = view.reset(seed=5)
        runs.append([first, *(view.step(action)[0] for action in actions)])
    td, observations = env.reset(seed=5), []
    for action in actions:
        observations.append(td["observation"].numpy())
        td["action"] = env.action_spec.encode(torch.as_tensor(action))
        td = env.step_and_maybe_reset(td)[1]

    for one, other, bare in zip(*runs, [*observations, td["observation"].numpy()], strict=True):
        assert np.array_equal(one, other) and np.array_equal(one, bare)


def test_without_numpy_everything_is_a_tensor():
    view = ours("same_step", to_numpy=False)
    first, _ = view.reset()

    observations, rewards, terminated, truncated, infos = view.step(
        torch.ones(3, dtype=torch.int64)
    )
    view.step(torch.ones(3, dtype=torch.int64))

    values = (first, observations, rewards, terminated, truncated, infos["place"])
    assert all(isinstance(value, torch.Tensor) for value in values)


def test_several_observations_are_a_dict_and_infos_can_be_taken_out_of_it():
    env = TransformedEnv(SerialEnv(2, lambda: GymWrapper(Walk(3))), StepCounter())
    both = to_gym_vector(env)

    assert set(both.single_observation_space.spaces) == {"observation", "step_count"}
    assert both.observation_space.contains(both.reset()[0])
    alone = to_gym_vector(env, info_keys=["step_count"])
    observation, infos = alone.reset()
    assert alone.observation_space.contains(observation)
    assert infos["step_count"].shape == (2, 1) and infos["_step_count"].all()


def test_what_a_view_gave_stays_as_it_is(opened):
    view = to_gym_vector(opened(make("gym/CartPole-v1", 2, backend="serial")), "same_step")
    view.reset(seed=0)
    kept = [view.step(np.zeros(2, int))[0] for _ in range(3)]
    before = [one.copy() for one in kept]

    for _ in range(20):
        view.step(np.ones(2, int))

    for one, as_it_was in zip(kept, before, strict=True):
        assert np.array_equal(one, as_it_was)


@pytest.mark.parametrize("mode", MODES)
def test_whoever_changes_what_a_view_gave_changes_nothing_else(mode):
    """The state of this env lies among its observations, and is read by its next step."""
    twins = [to_gym_vector(PendulumEnv(batch_size=[2]), mode, info_keys=["params"]) for _ in "ab"]
    shown = [twin.reset(seed=0) for twin in twins]
    action = np.ones((2, 1), np.float32)

    for _ in range(3):
        observations, infos = shown[0][0], shown[0][-1]["params"]
        for name in ("th", "thdot"):
            observations[name][:] = 0.5
        infos["g"][:] = 0.0
        shown = [twin.step(action) for twin in twins]

        assert_equal(shown[0][0], shown[1][0])


def test_integers_are_numbers_where_the_action_space_holds_floats():
    view = to_gym_vector(PendulumEnv(batch_size=[2]), info_keys=["params"])
    view.reset(seed=0)
    by_float = view.step(np.ones((2, 1), np.float32))[1]
    view.reset(seed=0)

    assert np.array_equal(view.step(np.ones((2, 1), int))[1], by_float)


def test_the_env_may_be_used_in_other_ways_between_the_steps_of_a_view():
    view, twin = ours("next_step"), theirs("next_step")
    env, actions = view.envkit_env.record_for_resume(), np.ones(3, int)
    view.reset(seed=0)
    twin.reset()
    for _ in range(2):
        view.step(actions)
        twin.step(actions)

    evaluate(env, lambda td: env.rand_action(td), 3)  # which puts it back

    for _ in range(6):  # row 0 had ended before
        assert_equal(view.step(actions)[0], twin.step(actions)[0])


@pytest.mark.parametrize(
    ("make_view", "error", "message"),
    [
        (
            lambda: to_gym_vector(gymnasium.make("CartPole-v1")),
            ArgumentTypeError,
            "must be an env of envkit. Wrap it: GymWrapper",
        ),
        (
            lambda: to_gym_vector(Count()),
            ArgumentError,
            r"batch size of this Count is \(\).*num_envs",
        ),
        (
            lambda: to_gym_vector(SerialEnv(2, Halves)),
            ArgumentError,
            "'count', whose dtype is torch.bfloat16",
        ),
        (lambda: ours("never"), ArgumentError, "'disabled', 'next_step' or 'same_step'"),
        (lambda: ours("next_step", to_numpy="yes"), ArgumentTypeError, "to_numpy"),
        (
            lambda: to_gym_vector(SerialEnv(2, Count), info_keys=["nothing"]),
            MissingKeyError,
            "info_keys names 'nothing'.*'count'",
        ),
        (
            lambda: to_gym_vector(SerialEnv(2, Count), info_keys=["count"]),
            ArgumentError,
            "no observation",
        ),
        (
            lambda: to_gym_vector(TransformedEnv(GymWrapper(TorchPendulum()), RewardSum())),
            ArgumentError,
            "TorchVectorWrapper steps all its rows.*autoreset='same_step' or 'disabled'",
        ),
        (
            lambda: to_gym_vector(
                GymWrapper(wrappers.RecordEpisodeStatistics(SyncVectorEnv([partial(Walk, 3)] * 2)))
            ),
            ArgumentError,
            "GymWrapper steps all its rows.*autoreset='same_step' or 'disabled'",
        ),
        (lambda: ours("next_step").step(np.zeros(3, int)), NotResetError, "Call reset"),
        (lambda: begun().step(np.zeros(2, int)), InputError, r"shape \(2,\).*\(3,\)"),
        (lambda: begun().step(object()), ArgumentTypeError, "Pass numbers, an array or a tensor"),
        (lambda: begun().reset(seed=[1, 2]), ArgumentError, "there are 3 rows"),
        (lambda: begun().reset(seed=[1, 2, -3]), ArgumentError, "seed is -3"),
        (
            lambda: begun().step(np.array([0.6, 1.0, 1.2])),
            InputError,
            "dtype torch.float64.*Pass integers",
        ),
        (
            lambda: begun().step([[0], [1, 1], [1]]),
            ArgumentTypeError,
            "Pass numbers, an array or a tensor",
        ),
        (lambda: begun().reset(options={"reset_mask": np.zeros(3, bool)}), ArgumentError, "0 rows"),
        (lambda: begun().reset(options={"reset_mask": np.zeros(2, bool)}), ArgumentError, "shape"),
    ],
)
def test_a_mistake_is_told_with_its_cure(make_view, error, message):
    with pytest.raises(error, match=message):
        make_view()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_while_another_thread_uses_the_env_is_refused(mode):
    view = ours(mode)
    view.reset()
    with ThreadPoolExecutor(1) as other, view.envkit_env._in_use:
        stepped = other.submit(view.step, np.ones(3, int))

        with pytest.raises(BusyError, match="in use by thread"):
            stepped.result()


class Fragile(Walk):
    """Breaks at a step to the left."""

    def step(self, action):
        if action == 0:
            raise RuntimeError("broken")
        return super().step(action)


@pytest.mark.parametrize("use_buffers", [None, False], ids=["in place", "TensorDicts"])
@pytest.mark.parametrize("mode", MODES)
def test_after_a_step_that_failed_only_a_reset_goes_on(mode, use_buffers):
    env = SerialEnv(2, lambda: GymWrapper(Fragile(3)), use_buffers=use_buffers)
    view = to_gym_vector(env, mode)
    view.reset()
    with pytest.raises(InputError):
        view.step(np.zeros((2, 3), int))  # codes that are not one-hot
    view.step(np.array([1, 1]))  # nothing had moved
    with pytest.raises(WorkerError, match="broken"):
        view.step(np.array([1, 0]))

    with pytest.raises(NotResetError, match=r"the step before failed.*Call reset\(\) first"):
        view.step(np.array([1, 1]))

    view.reset()
    assert view.step(np.array([1, 1]))[0].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("use_buffers", [None, False], ids=["in place", "TensorDicts"])
def test_the_action_of_a_row_that_begins_anew_may_be_anything(use_buffers):
    view = ours("next_step", use_buffers)
    view.reset()
    for _ in range(2):
        view.step(np.ones(3, int))  # row 0 ends

    assert view.step(np.array([9, 1, 1]))[0][:, 1].tolist() == [0, 3, 3]
    with pytest.raises(EncodingError):
        view.step(np.array([9, 1, 1]))


def test_a_refused_action_leaves_no_mask_behind():
    view = ours("next_step", use_buffers=False)
    view.reset()
    for _ in range(2):
        view.step(np.ones(3, int))  # row 0 ends
    with pytest.raises(InputError):
        view.step(np.zeros((3, 3), int))  # codes that are not one-hot

    view.reset(options={"reset_mask": np.array([True, False, False])})

    assert view.step(np.ones(3, int))[0][:, 1].tolist() == [1, 3, 3]


class Halves(Count):
    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(count=Unbounded((1,), dtype=torch.bfloat16))


def test_a_pool_renders_as_its_envs_do():
    view = to_gym_vector(SerialEnv(2, lambda: GymWrapper(Drawn(3), from_pixels=False)))
    view.reset()

    assert view.render_mode == "rgb_array"
    pictures = view.render()
    assert (
        isinstance(pictures, tuple) and [picture.shape for picture in pictures] == [(2, 2, 3)] * 2
    )


class Drawn(Walk):
    render_mode = "rgb_array"

    def render(self):
        return np.zeros((2, 2, 3), np.uint8)


def begun():
    view = ours("disabled")
    view.reset()
    return view


def test_a_row_that_has_ended_is_not_stepped_where_nobody_resets_it():
    view = begun()
    for _ in range(2):
        view.step(np.ones(3, int))

    with pytest.raises(DoneError, match=r"rows \[0\].*reset_mask"):
        view.step(np.ones(3, int))

    view.reset(options={"reset_mask": np.array([True, False, False])})
    assert view.step(np.ones(3, int))[0].shape == (3, 2)


def test_rows_are_reset_by_hand_as_in_the_library_in_every_mode():
    mask, actions = np.array([True, False, True]), np.ones(3, int)
    for mode in MODES:
        envs = ours(mode), theirs(mode)
        outcomes = []
        for env in envs:
            env.reset()
            env.step(actions)
            reset, _ = env.reset(options={"reset_mask": mask.copy()})
            outcomes.append(
                [reset.copy(), *(copy.deepcopy(env.step(actions)[:4]) for _ in range(2))]
            )

        assert np.array_equal(outcomes[0][0], outcomes[1][0])
        for got, expected in zip(outcomes[0][1:], outcomes[1][1:], strict=True):
            assert all(np.array_equal(*pair) for pair in zip(got, expected, strict=True))


def test_a_row_that_waits_for_its_reset_is_not_left_out_of_one_by_hand():
    view = ours("next_step")
    view.reset()
    for _ in range(2):
        view.step(np.ones(3, int))

    with pytest.raises(ArgumentError, match=r"leaves out rows \[0\].*Choose them too"):
        view.reset(options={"reset_mask": np.array([False, True, False])})

    observations, _ = view.reset(options={"reset_mask": np.array([True, True, False])})
    assert observations[:, 1].tolist() == [0, 0, 2]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_an_algorithm_in_one_file_learns_in_both_modes(mode, opened):
    env = opened(make("gym/CartPole-v1", 8, backend="serial"))

    returns = train(to_gym_vector(env, mode), 2560, seed=0)

    assert np.mean(returns[-40:]) >= 2 * np.mean(returns[:40])
