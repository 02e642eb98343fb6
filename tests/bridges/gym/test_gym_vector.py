"""Gymnasium's vector envs: the data of single envs, whatever autoreset does."""

from __future__ import annotations

import copy
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit import Composite, SerialEnv, Unbounded, check_env_specs, to_gym_vector
from envkit.env.seeding import seed_chain
from envkit.errors import (
    ArgumentError,
    BatchSizeError,
    EncodingError,
    InputError,
    ResetMaskError,
    StepMaskError,
)
from envkit_bridges.gym.gym_env import GymEnv
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.gym.info import default_info_dict_reader
from tests.zoo.gym_envs import Informed, Sampler

MODES = list(AutoresetMode)
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
RESETTING = [mode for mode in MODES if mode != AutoresetMode.DISABLED]


def vector(name: str, count: int, mode: AutoresetMode, **kwargs) -> GymEnv:
    return GymEnv(name, num_envs=count, vector_kwargs={"autoreset_mode": mode}, **kwargs)


def counting(lengths: list[int], mode: AutoresetMode, **kwargs) -> GymWrapper:
    envs = [partial(Informed, length=length) for length in lengths]
    return GymWrapper(SyncVectorEnv(envs, autoreset_mode=mode), **kwargs)


def assert_same(left, right) -> None:
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        torch.testing.assert_close(left[key], right[key], rtol=0, atol=0, equal_nan=True)
        assert left[key].dtype == right[key].dtype


# ------------------------------------------------------------------------------------------ parity


@modes
@pytest.mark.parametrize(
    ("name", "steps"), [("CartPole-v1", 80), ("Pendulum-v1", 30), ("FrozenLake-v1", 40)]
)
def test_a_vector_env_gives_the_bits_of_single_envs(name, steps, mode):
    ours = vector(name, 3, mode, max_episode_steps=20)
    serial = SerialEnv(3, lambda: GymEnv(name, max_episode_steps=20))

    runs = []
    for env in (ours, serial):
        following = env.set_seed(7)
        first = env.rollout(steps, break_when_any_done=False)
        second = env.rollout(steps, break_when_any_done=False)  # episodes were left half done
        third = env.rollout(60)
        runs.append((following, first, second, third))
        env.close()

    assert runs[0][0] == runs[1][0] == seed_chain(7, 3)[1]
    for left, right in zip(runs[0][1:], runs[1][1:], strict=True):
        assert_same(left, right)
    assert runs[0][1]["next", "done"].sum() >= 3


@modes
def test_a_run_that_goes_on_after_an_end_gives_the_bits_of_single_envs(mode):
    ours = vector("CartPole-v1", 3, mode)
    serial = SerialEnv(3, lambda: GymEnv("CartPole-v1"))

    runs = []
    for env in (ours, serial):
        env.set_seed(1)
        first = env.rollout(60)
        root = env.step_mdp(first[:, -1])
        runs.append((first, env.rollout(40, auto_reset=False, tensordict=root)))
        env.close()

    for left, right in zip(*runs, strict=True):
        assert_same(left, right)
    assert runs[0][0]["next", "done"][:, -1].any()


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    mode=st.sampled_from(MODES),
    steps=st.integers(1, 15),
)
def test_no_step_ignores_its_action_and_next_holds_the_last_observation(lengths, mode, steps):
    data = counting(lengths, mode).rollout(steps, break_when_any_done=False)

    for row, length in enumerate(lengths):
        count = [step % length for step in range(steps)]
        assert data["observation"][row].flatten().tolist() == count
        assert data["next", "observation"][row].flatten().tolist() == [c + 1 for c in count]
        assert data["next", "reward"][row].flatten().tolist() == [1.0] * steps
        assert data["next", "done"][row].flatten().tolist() == [c + 1 == length for c in count]


@modes
def test_the_mode_is_that_of_the_vector_env_whatever_was_made_since(mode):
    env = SyncVectorEnv([partial(Informed, length=2)] * 2, autoreset_mode=mode)
    for other in MODES:  # each writes its mode into the metadata of the class
        SyncVectorEnv([partial(Informed, length=2)], autoreset_mode=other)
        data = GymWrapper(env).rollout(4, break_when_any_done=False)
        assert data["next", "observation"].flatten(1).tolist() == [[1, 2, 1, 2]] * 2


@modes
def test_all_done_freezes_rows_as_it_does_for_single_envs(mode):
    data = counting([2, 4], mode).rollout(9, break_when_all_done=True)

    assert data["next", "observation"].squeeze(-1).tolist() == [[1, 2, 2, 2], [1, 2, 3, 4]]
    assert data["next", "done"].squeeze(-1).int().tolist() == [[0, 1, 1, 1], [0, 0, 0, 1]]


@modes
def test_a_frozen_row_begins_anew_at_its_reset(mode):
    env = counting([2, 8], mode)
    td = env.rollout(5, break_when_all_done=True)[:, -1]

    root = env.reset(env.step_mdp(td).set("_reset", torch.tensor([True, False])))
    data = env.rollout(2, auto_reset=False, tensordict=root, break_when_any_done=False)

    assert root["observation"].flatten().tolist() == [0, 5]
    assert data["next", "observation"].squeeze(-1).tolist() == [[1, 2], [6, 7]]


@modes
def test_an_async_vector_env_gives_the_bits_of_single_envs(mode):
    kwargs = {"autoreset_mode": mode, "context": "spawn"}  # forking is unsafe beside JAX
    ours = GymEnv("CartPole-v1", num_envs=2, vectorization_mode="async", vector_kwargs=kwargs)
    serial = SerialEnv(2, lambda: GymEnv("CartPole-v1"))

    runs = []
    for env in (ours, serial):
        env.set_seed(7)
        first = env.rollout(60, break_when_any_done=False)
        runs.append((first, env.rollout(40)))
        env.close()

    for left, right in zip(*runs, strict=True):
        assert_same(left, right)


def test_vector_envs_can_be_batched():
    env = SerialEnv(2, lambda: vector("CartPole-v1", 3, AutoresetMode.DISABLED))
    twin = SerialEnv(2, lambda: SerialEnv(3, lambda: GymEnv("CartPole-v1")))

    runs = []
    for batched in (env, twin):
        batched.set_seed(2)
        runs.append(batched.rollout(40, break_when_any_done=False))
        batched.close()

    assert runs[0].shape == (2, 3, 40)
    assert_same(*runs)


# ------------------------------------------------------------------------------------------- layout


@modes
@pytest.mark.parametrize("categorical", [True, False])
def test_specs_have_the_row_axis_in_front(mode, categorical):
    env = vector("CartPole-v1", 4, mode, categorical_action_encoding=categorical)

    check_env_specs(env, seed=0)

    assert env.batch_size == (4,)
    assert env.batch_locked
    assert env.action_spec.shape == ((4,) if categorical else (4, 2))
    assert env.reward_spec.shape == (4, 1)
    assert env.single_observation_spec["observation"].shape == (4,)
    assert env.num_envs == 4  # looked up on the simulator
    assert env.env_name == "CartPole-v1"


def test_dict_spaces_and_starts_travel_by_row():
    spaces = gymnasium.spaces
    observation = spaces.Dict(
        state=spaces.Box(-1, 1, (2,), np.float64), level=spaces.Discrete(4, start=-2)
    )
    action = spaces.Dict(wheel=spaces.Box(-1, 1, (1,)), gear=spaces.MultiDiscrete([2, 3]))
    env = GymWrapper(
        SyncVectorEnv([lambda: Sampler(observation, action)] * 2), categorical_action_encoding=True
    )

    check_env_specs(env, seed=0)
    data = env.rollout(6, break_when_any_done=False)

    assert data["observation"].shape == (2, 6, 2)
    assert data["observation"].dtype == torch.float64
    assert data["gear"].shape == (2, 6, 2)


def test_frames_are_skipped_in_each_row():
    ours = vector("CartPole-v1", 2, AutoresetMode.DISABLED, frame_skip=3)
    serial = SerialEnv(2, lambda: GymEnv("CartPole-v1", frame_skip=3))

    runs = []
    for env in (ours, serial):
        env.set_seed(3)
        runs.append(env.rollout(30, break_when_any_done=False))
        env.close()

    assert_same(*runs)
    assert runs[0]["next", "reward"].max() == 3


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_pixels_are_rendered_by_row(mode):
    env = vector("CartPole-v1", 2, mode, from_pixels=True)

    data = env.rollout(2)
    env.close()

    assert data["pixels"].dtype == torch.uint8
    assert data["pixels"].shape == (2, 2, 400, 600, 3)
    assert "observation" not in data


# ------------------------------------------------------------------------------------- resets, seeds


@settings(max_examples=25)
@given(mask=st.lists(st.booleans(), min_size=3, max_size=3), steps=st.integers(1, 3))
def test_any_mask_may_be_reset_where_autoreset_is_disabled(mask, steps):
    env = counting([9, 9, 9], AutoresetMode.DISABLED)
    td = env.step_mdp(env.rollout(steps)[:, -1])

    if not any(mask):
        return
    root = env.reset(td.set("_reset", torch.tensor(mask)))
    data = env.step(env.rand_action(root))

    expected = [0 if selected else steps for selected in mask]
    assert data["observation"].flatten().tolist() == expected
    assert data["next", "observation"].flatten().tolist() == [count + 1 for count in expected]


@pytest.mark.parametrize("mode", RESETTING, ids=lambda mode: mode.name)
@pytest.mark.parametrize("mask", [[True, True, False], [False, True, False], [False, False, True]])
def test_a_mask_that_is_not_that_of_the_ended_rows_is_refused(mode, mask):
    env = counting([2, 9, 9], mode)
    td = env.step_mdp(env.rollout(2)[:, -1])

    with pytest.raises(ResetMaskError, match=r"only the rows that have ended can be, here \[0\]"):
        env.reset(td.set("_reset", torch.tensor(mask)))


@modes
def test_a_mask_that_selects_nothing_resets_nothing(mode):
    env = counting([1, 9], mode)
    td = env.step_mdp(env.rand_step(env.reset()))
    before = td.clone()

    root = env.reset(td.set("_reset", torch.tensor([False, False])))

    assert before["done"].squeeze(-1).tolist() == [True, False]
    assert (root == before).all()


@modes
def test_an_ended_row_must_be_reset_before_it_is_stepped(mode):
    env = counting([1, 9], mode)
    td = env.step_mdp(env.rollout(1)[:, -1])

    with pytest.raises(StepMaskError, match=r"rows \[0\] have ended and were not reset"):
        env.step(env.rand_action(td))


@modes
@pytest.mark.parametrize("spoil", [lambda a: a[:, :1], lambda a: a * 0], ids=["shape", "value"])
def test_a_refused_step_that_left_rows_out_leaves_nothing_behind(mode, spoil):
    ours, twin = (counting([2, 9], mode) for _ in range(2))
    for env in (ours, twin):
        env.set_seed(0)
        td = env.rollout(2, break_when_any_done=False)[:, -1]
    td = ours.rand_action(ours.step_mdp(td))
    td.set("_step", ~td["done"].squeeze(-1)).set("action", spoil(td["action"]))
    assert td["_step"].tolist() == [False, True]

    with pytest.raises(InputError):
        ours.step(td)

    left, right = (
        env.rollout(4, lambda td: td.set("action", torch.eye(2, dtype=torch.int64)))
        for env in (ours, twin)
    )
    assert_same(left, right)
    assert left["next", "done"][:, :, 0].tolist() == [[False, True], [False, False]]


@modes
@pytest.mark.parametrize("name", ["CartPole-v1", "FrozenLake-v1"])
def test_rows_that_a_mask_leaves_out_stand_still_as_those_of_single_envs_do(name, mode):
    ours = vector(name, 3, mode, max_episode_steps=6)
    serial = SerialEnv(3, lambda: GymEnv(name, max_episode_steps=6))
    generator = torch.Generator().manual_seed(1)
    masks = torch.rand(40, 3, generator=generator) < 0.6
    masks[:2] = torch.tensor([[True, False, True], [False, False, False]])

    runs = []
    for env in (ours, serial):
        env.set_seed(7)
        td, steps = env.reset(), []
        for mask in masks:
            td = env.rand_action(td).set("_step", mask)
            td["action"][~mask] = 0  # where nobody acts, nothing is looked at
            data = env.step(td)
            steps.append(data.clone())
            td = env.maybe_reset(env.step_mdp(data))
        runs.append(torch.stack(steps, 1))
        env.close()

    assert_same(*runs)
    assert runs[0]["next", "done"].sum() >= 3


SPACES = gymnasium.spaces
WITHOUT_ZERO = {
    "discrete": SPACES.Discrete(4, start=1),
    "choices": SPACES.MultiDiscrete([3, 4], start=[1, -9]),
    "tuple": SPACES.Tuple([SPACES.Discrete(3, start=5), SPACES.Box(1, 2, (2,))]),
    "dict": SPACES.Dict(
        level=SPACES.Discrete(3, start=5),
        place=SPACES.Box(1, 2, (2,)),
        deep=SPACES.Dict(a=SPACES.Discrete(2, start=7)),
    ),
}


@modes
@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("space", WITHOUT_ZERO.values(), ids=WITHOUT_ZERO.keys())
def test_rows_may_stand_still_where_zero_is_outside_the_space(space, categorical, mode):
    def sampler():
        return Sampler(copy.deepcopy(space))

    encoding = {"categorical_action_encoding": categorical}
    ours = GymWrapper(SyncVectorEnv([sampler] * 2, autoreset_mode=mode), **encoding)
    serial = SerialEnv(2, lambda: GymWrapper(sampler(), **encoding))

    runs = []
    for env in (ours, serial):
        env.set_seed(3)
        td, steps = env.reset(), []
        for mask in ([True, False], [False, False], [False, True], [True, True]) * 3:
            data = env.step(env.rand_action(td).set("_step", torch.tensor(mask)))
            steps.append(data.exclude("action"))
            td = env.maybe_reset(env.step_mdp(data))
        runs.append(torch.stack(steps, 1))

    assert_same(*runs)
    assert runs[0]["next", "done"].any()


@pytest.mark.parametrize("space", WITHOUT_ZERO.values(), ids=WITHOUT_ZERO.keys())
def test_rows_that_begin_anew_wait_a_step_where_zero_is_outside_the_space(space):
    def sampler():
        return Sampler(copy.deepcopy(space))

    view = to_gym_vector(GymWrapper(SyncVectorEnv([sampler] * 2)), "next_step")
    view.reset()

    flags = [view.step(view.action_space.sample())[2].tolist() for _ in range(6)]

    assert flags == [[step == 3] * 2 for step in range(6)]


@modes
def test_rows_that_waited_for_others_begin_as_those_of_single_envs_do(mode):
    runs = []
    for env in (vector("CartPole-v1", 3, mode), SerialEnv(3, lambda: GymEnv("CartPole-v1"))):
        env.set_seed(7)
        runs.append([env.rollout(99, break_when_all_done=True) for _ in range(2)])
        env.close()

    for left, right in zip(*runs, strict=True):
        assert_same(left, right)


def wrapped_in_a_counter():
    envs = [partial(Informed, length=9)] * 2
    return gymnasium.wrappers.vector.RecordEpisodeStatistics(
        SyncVectorEnv(envs, autoreset_mode=AutoresetMode.DISABLED)
    )


def of_processes():
    kwargs = {"autoreset_mode": AutoresetMode.DISABLED, "context": "spawn"}
    return gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="async", vector_kwargs=kwargs)


@pytest.mark.parametrize("make", [wrapped_in_a_counter, of_processes])
def test_a_vector_env_that_steps_all_its_rows_says_so_when_a_running_one_is_left_out(make):
    env = GymWrapper(make())
    td = env.rand_action(env.reset()).set("_step", torch.tensor([True, False]))

    with pytest.raises(StepMaskError, match=r"rows \[1\].*only \[\].*SyncVectorEnv.*SerialEnv"):
        env.step(td)
    env.close()


def test_infos_that_are_tuples_of_other_lengths_are_those_of_the_simulator():
    class Named(gymnasium.vector.VectorEnv):
        metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}  # noqa: RUF012
        num_envs = 2
        single_observation_space = observation_space = SPACES.Box(-9, 9, (1,))
        single_action_space = SPACES.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.steps = 0
            return np.zeros((2, 1), np.float32), {"names": ("a", "b")}

        def step(self, action):
            self.steps += 1
            over, info = np.array([self.steps == 2, False]), {"names": ("a", "b")}
            if over.any():
                info["final_obs"] = np.array([np.ones(1, np.float32), None], dtype=object)
                info["final_info"] = {"names": ("a",)}
            return np.zeros((2, 1), np.float32), np.ones(2), over, np.zeros(2, bool), info

    data = GymWrapper(Named()).rollout(4, break_when_any_done=False)

    assert data["next", "done"].sum() == 1


@modes
def test_reset_keywords_reset_every_row_for_real(mode):
    env = vector("CartPole-v1", 2, mode)
    env.rollout(30, break_when_any_done=False)

    first = env.reset(seed=5)["observation"]
    second = env.reset(seed=5)["observation"]

    bare = [gymnasium.make("CartPole-v1").reset(seed=seed)[0] for seed in (5, 6)]
    np.testing.assert_array_equal(first.numpy(), np.stack(bare))
    assert first.equal(second)


def test_a_static_seed_goes_to_every_row():
    env = vector("CartPole-v1", 2, AutoresetMode.DISABLED)

    following = env.set_seed(4, static_seed=True)
    td = env.reset()

    assert following == 4
    assert td["observation"][0].equal(td["observation"][1])


# -------------------------------------------------------------------------------------------- infos


@modes
def test_infos_are_those_of_the_steps_taken(mode):
    env = counting([2, 3], mode)
    env.set_info_dict_reader(default_info_dict_reader(["x"]))

    data = env.rollout(5, break_when_any_done=False)

    assert data["next", "x"].tolist() == [[1, 2, 1, 2, 1], [1, 2, 3, 1, 2]]


# ------------------------------------------------------------------------------------ rows of memory

ARRAYS = {
    **WITHOUT_ZERO,
    "number": SPACES.Box(-1, 1, (), np.float64),
    "bits": SPACES.MultiBinary((2, 2)),
    "small": SPACES.Discrete(3, dtype=np.int32),
    "bytes": SPACES.Box(0, 255, (2, 3), np.uint8),
    "alike": SPACES.Tuple([SPACES.Box(-1, 1, (2,)), SPACES.Box(-1, 1, (2,))]),
}


# Gymnasium's vector envs hand numbers of no axes on as scalars, of which its spaces warn.
@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("space", ARRAYS.values(), ids=ARRAYS.keys())
def test_steps_in_memory_give_the_bits_of_steps_with_tensordicts(space, categorical, mode):
    def run(**options):
        simulators = [Sampler(copy.deepcopy(space), copy.deepcopy(space)) for _ in range(3)]
        env = GymWrapper(
            SyncVectorEnv([lambda one=one: one for one in simulators], autoreset_mode=mode),
            categorical_action_encoding=categorical,
            **options,
        )
        env.set_seed(3)
        root, data = env.reset(), []
        for _ in range(6):
            stepped, root = env.step_and_maybe_reset(env.rand_action(root))
            data.append(stepped)
        data += [env.rollout(9, break_when_any_done=False), env.rollout(9)]
        return data, [one.taken for one in simulators]

    (ours, taken), (general, others) = run(), run(run_type_checks=True)

    for left, right in zip(ours, general, strict=True):
        assert_same(left, right)
    assert str(taken) == str(others)  # what is kept of an action is not overwritten


def test_a_vector_env_is_stepped_in_memory_where_that_holds_all():
    assert counting([2, 3], AutoresetMode.DISABLED)._row is not None

    env = counting([2, 3], AutoresetMode.DISABLED)
    env.rollout(2)
    env.set_info_dict_reader(default_info_dict_reader(["x"]))
    assert env._row is None
    assert counting([2, 3], AutoresetMode.SAME_STEP)._row is None


def test_answers_may_be_lists_and_tensors():
    class Listing(Resetting):
        def step(self, actions):
            observations, rewards, terminated, truncated, infos = super().step(actions)
            flags = torch.from_numpy(terminated), torch.from_numpy(truncated)
            return observations.tolist(), rewards.tolist(), *flags, infos

    runs = [
        GymWrapper(kind(AutoresetMode.DISABLED)).rollout(5, policy=still)
        for kind in (Listing, Resetting)
    ]

    assert_same(*runs)


def still(observation):
    return torch.tensor([[1, 0], [1, 0]])


@pytest.mark.parametrize("part", ["reward", "done", "observation", "dtype"])
def test_specs_that_were_assigned_are_followed(part):
    env, general = (
        counting([2, 3], AutoresetMode.DISABLED, run_type_checks=checks) for checks in (False, True)
    )
    for one in (env, general):
        one.rollout(1)
        shown = one.observation_spec["observation"]
        if part == "reward":
            one.reward_spec = Composite(bonus=Unbounded((2, 1)), shape=(2,))
        elif part == "done":
            one.done_spec = Composite(done=one.full_done_spec["done"].clone(), shape=(2,))
        elif part == "observation":
            one.observation_spec = Composite(shape=(2,))
        else:
            one.observation_spec = Composite(observation=shown.to(torch.float64), shape=(2,))

    assert env._row is None
    if part not in ("observation", "dtype"):  # of which type checks know nothing
        assert_same(env.rollout(2, policy=still), general.rollout(2, policy=still))


def test_memory_that_is_made_in_inference_mode_is_used_outside_too():
    env = counting([4, 5], AutoresetMode.DISABLED)
    with torch.inference_mode():
        env.rollout(2)

    assert env.rollout(2).shape == (2, 2)


def test_observations_that_a_vector_env_writes_in_place_are_copied():
    env = GymWrapper(SyncVectorEnv([partial(Informed, length=9)] * 2, copy=False))

    seen = env.rollout(4)["observation"]

    assert seen.unbind(1)[0].tolist() != seen.unbind(1)[1].tolist()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({1: np.ones(3)}, "reward"),
        ({1: np.array(["a", "b"])}, "reward"),
        ({2: np.array([0.5, 0])}, "terminated"),
        ({3: np.array(["no", "no"])}, "truncated"),
        ({2: np.array([True])}, "terminated of shape"),
        ({3: False}, "truncated of shape"),
        ({0: np.zeros((2, 3), np.float32)}, "shape"),
        ({0: np.zeros((1, 1), np.float32)}, "has 2 rows"),
    ],
    ids=["rewards", "texts", "half", "no", "one", "number", "observations", "rows"],
)
def test_a_vector_env_that_answers_with_another_form_is_told_so(answer, words):
    class Wrong(Resetting):
        def step(self, actions):
            return tuple(
                answer.get(place, part) for place, part in enumerate(super().step(actions))
            )

    env = GymWrapper(Wrong(AutoresetMode.DISABLED))
    assert env._row is not None

    with pytest.raises(EncodingError, match=words):
        env.rollout(2)


# ------------------------------------------------------------------------------------------ refusals


def test_an_env_that_hides_its_resets_is_refused():
    with pytest.raises(ArgumentError, match="vectorization_mode='sync'"):
        GymEnv("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")


class Resetting(VectorEnv):
    """Counts its steps in two rows, and resets rows itself in ``mode``; what ends is lost."""

    num_envs, single_action_space = 2, gymnasium.spaces.Discrete(2)
    single_observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = batch_space(single_action_space, 2)
    observation_space = batch_space(single_observation_space, 2)

    def __init__(self, autoreset_mode: AutoresetMode, infos=None):
        self.metadata = {"autoreset_mode": autoreset_mode}
        self.infos = infos

    def reset(self, *, seed=None, options=None):
        self.count = np.zeros((2, 1), np.float32)
        return self.count.copy(), {}

    def step(self, actions):
        self.count += 1
        over = self.count[:, 0] >= [3, 9]
        self.count[over] = 0
        return self.count.copy(), np.ones(2), over, np.zeros(2, bool), self.infos


@pytest.mark.parametrize(
    "infos", [None, {}, {"final_obs": np.full(2, None)}, {"final_info": {}}], ids=repr
)
def test_a_reset_in_the_same_step_without_the_last_observation_is_refused(infos):
    env = GymWrapper(Resetting(AutoresetMode.SAME_STEP, infos))
    env.rollout(2)

    with pytest.raises(EncodingError, match=r"rows \[0\] and reset them.*infos\['final_obs'\]"):
        env.rollout(3)


@pytest.mark.parametrize("names", [["count"], []])
def test_the_last_observations_may_be_arrays_by_name(names):
    class Named(Resetting):
        single_observation_space = gymnasium.spaces.Dict(count=Resetting.single_observation_space)
        observation_space = batch_space(single_observation_space, 2)

        def reset(self, **kwargs):
            return {"count": super().reset(**kwargs)[0]}, {}

        def step(self, actions):
            last = self.count + 1
            count, *result, _ = super().step(actions)
            return {"count": count}, *result, {"final_obs": dict.fromkeys(names, last)}

    env = GymWrapper(Named(AutoresetMode.SAME_STEP))
    if not names:
        with pytest.raises(EncodingError, match="without 'count'"):
            env.rollout(4)
        return
    data = env.rollout(4, break_when_any_done=False)

    assert data["next", "count"].squeeze(-1).tolist() == [[1, 2, 3, 1], [1, 2, 3, 4]]


def test_the_way_to_another_mode_is_shown_where_the_env_takes_one():
    class Fixed(Resetting):
        def __init__(self):
            self.metadata, self.infos = {"autoreset_mode": AutoresetMode.NEXT_STEP}, None

    with pytest.raises(ArgumentError, match=r"Resetting\(.*autoreset_mode=.*SAME_STEP\)"):
        GymWrapper(Resetting(AutoresetMode.NEXT_STEP))
    GymWrapper(Resetting(AutoresetMode.SAME_STEP))
    with pytest.raises(ArgumentError, match=r"GymEnv\(id, num_envs=n[^.]*\)\.$"):
        GymWrapper(Fixed())


def test_pixels_with_autoreset_in_the_same_step_are_refused():
    with pytest.raises(ArgumentError, match="autoreset_mode"):
        vector("CartPole-v1", 2, AutoresetMode.SAME_STEP, from_pixels=True)


def test_frame_skip_of_a_ready_vector_env_is_refused():
    with pytest.raises(ArgumentError, match=r"GymEnv\(\.\.\., num_envs=n, frame_skip=k\)"):
        counting([9], AutoresetMode.DISABLED, frame_skip=2)


def test_spaces_without_rows_are_refused():
    text = gymnasium.spaces.Text(3)
    env = SyncVectorEnv([lambda: Sampler(text)])

    with pytest.raises(ArgumentError, match="SerialEnv"):
        GymWrapper(env)


@pytest.mark.parametrize(("num_envs", "batch_size"), [(0, [3]), (2, [3])])
def test_another_batch_size_is_refused(num_envs, batch_size):
    with pytest.raises(BatchSizeError, match="num_envs=n"):
        GymEnv("CartPole-v1", num_envs=num_envs, batch_size=batch_size)


def test_a_negative_number_of_envs_is_refused():
    with pytest.raises(ValueError, match="num_envs is -1"):
        GymEnv("CartPole-v1", num_envs=-1)
