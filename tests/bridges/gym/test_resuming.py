"""Gymnasium envs are saved in mid-episode and go on to the same bits, or say that they do not."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from envkit import (
    Compose,
    GymEnv,
    GymWrapper,
    MixedEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
)
from envkit.errors import NotResetError, ResetMaskError, ResumeError
from envkit_bridges.gym.resume import Recorded, digest_of
from tests.zoo.resumed import as_read_again, played, same, twice

TAXI = max(name for name in gymnasium.registry if name.startswith("Taxi-"))
TOYS = ["FrozenLake-v1", TAXI, "CliffWalking-v1", "Blackjack-v1"]
CLASSIC = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"]
MUJOCO = [
    "HalfCheetah-v5",
    "Ant-v5",
    "Hopper-v5",
    "Humanoid-v5",
    "InvertedPendulum-v5",
    "Walker2d-v5",
]

WRAPPED = {
    "limit": lambda env: wrappers.TimeLimit(env, 6),
    "autoreset": wrappers.Autoreset,
    "sticky": lambda env: wrappers.StickyAction(env, 0.4),
    "stacked": lambda env: wrappers.FrameStackObservation(env, 3),
    "delayed": lambda env: wrappers.DelayObservation(env, 2),
    "normalised": lambda env: wrappers.NormalizeReward(wrappers.NormalizeObservation(env)),
    "counted": wrappers.RecordEpisodeStatistics,
}


def small(name: str = "CartPole-v1", **options) -> GymEnv:
    return GymEnv(name, max_episode_steps=9, **options)


@pytest.mark.parametrize("name", [*TOYS, *CLASSIC])
def test_an_env_by_name_goes_on_to_the_same_bits(name, opened):
    assert same(twice(partial(small, name), opened, before=20, after=20))


@pytest.mark.slow
@pytest.mark.parametrize("name", MUJOCO)
def test_an_env_of_mujoco_goes_on_to_the_same_bits(name, opened):
    assert same(twice(partial(GymEnv, name, max_episode_steps=15), opened, before=40, after=20))


@settings(max_examples=20)
@given(before=st.integers(0, 25), seed=st.none() | st.integers(0, 99))
def test_it_does_not_matter_where_a_run_is_cut(before, seed):
    with torch.random.fork_rng(devices=[]):
        assert same(twice(small, lambda env: env, before=before, after=12, seed=seed))


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_go_on_as_well(name, opened):
    make = lambda: GymWrapper(WRAPPED[name](gymnasium.make("CartPole-v1", max_episode_steps=9)))  # noqa: E731

    assert same(twice(make, opened, before=20, after=20))


@pytest.mark.parametrize("mode", gymnasium.vector.AutoresetMode)
def test_vector_envs_go_on_row_by_row(mode, opened):
    make = partial(small, num_envs=3, vector_kwargs={"autoreset_mode": mode})

    assert same(twice(make, opened, before=20, after=20))


@pytest.mark.parametrize(
    "options", [{"frame_skip": 3}, {"info": True}, {"convert_actions_to_numpy": True}]
)
def test_options_do_not_matter(options, opened):
    assert same(twice(partial(small, "Pendulum-v1", **options), opened, before=20, after=20))


def test_a_whole_rollout_is_written_down_too(opened):
    env, other = opened(small()).record_for_resume(), opened(small())
    env.set_seed(1)
    data = env.rollout(21, break_when_any_done=False)
    other.load_state_dict(as_read_again(env.state_dict()))

    one, two = (played(each, each.step_mdp(data[-1]), 15)[0] for each in (env, other))

    assert data["next", "done"].any()
    assert same((one, two))


def test_keywords_of_the_reset_are_kept(opened):
    env, other = opened(small()).record_for_resume(), opened(small())
    start = env.reset(seed=5, options={"low": -0.001, "high": 0.001})
    played(env, start, 3)

    other.load_state_dict(as_read_again(env.state_dict()))

    assert env.unwrapped.state.tolist() == other.unwrapped.state.tolist()


def test_what_was_loaded_can_be_saved_again(opened):
    env, other = opened(small()).record_for_resume(), opened(small())
    env.set_seed(1)
    _, root = played(env, env.reset(), 5)
    other.load_state_dict(env.state_dict())
    _, root = played(other, root, 4)

    env.load_state_dict(as_read_again(other.state_dict()))

    one, two = (played(each, root.clone(), 15)[0] for each in (other, env))
    assert same((one, two))


@pytest.mark.parametrize("name", ["CartPole-v1", "InvertedPendulum-v5"])
def test_a_copy_writes_down_by_itself(name, opened):
    env = opened(small(name)).record_for_resume()
    env.set_seed(1)
    root = env.reset()
    twin = opened(copy.deepcopy(env))
    if name != "CartPole-v1":  # built anew, it begins with a reset
        root = twin.reset()

    _, root = played(twin, root, 5)
    other = opened(small(name))
    other.load_state_dict(as_read_again(twin.state_dict()))

    one, two = (played(each, root.copy(), 12)[0] for each in (twin, other))
    assert same((one, two))


# ------------------------------------------------------------------------------------- its own methods


class Offering(gymnasium.Env):
    """Draws from a generator that nobody knows, and hands its state out."""

    observation_space = spaces.Box(-9, 9, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.numbers = np.random.default_rng()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.numbers.random(1), {}

    def step(self, action):
        return self.numbers.random(1), 1.0, False, False, {}

    def get_state(self):
        return {"numbers": self.numbers.bit_generator.state, "array": np.zeros((2, 0), np.uint8)}

    def set_state(self, state):
        self.numbers.bit_generator.state = state["numbers"]


def test_a_simulator_that_offers_its_state_is_saved_by_it_and_writes_nothing_down(opened):
    make = lambda: GymWrapper(wrappers.TimeLimit(wrappers.OrderEnforcing(Offering()), 9))  # noqa: E731

    env = opened(make()).record_for_resume()

    assert not isinstance(env.core.env, Recorded)
    assert same(twice(make, opened, before=20, after=20))


def test_a_set_state_that_leaves_something_out_is_told(opened):
    class Forgetful(Offering):
        def set_state(self, state):
            pass

    env = opened(GymWrapper(Forgetful()))
    env.reset()

    with pytest.raises(ResumeError, match="get_state now gives something else"):
        opened(GymWrapper(Forgetful())).load_state_dict(env.state_dict())


# -------------------------------------------------------------------------------------------- refusals


class Secretive(gymnasium.Env):
    """Draws from a generator of its own."""

    observation_space = spaces.Box(-9, 9, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self._numbers = np.random.default_rng()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action):
        return self._numbers.random(1), 1.0, False, False, {}


def saved_secretive(opened, make=lambda: GymWrapper(Secretive())):
    env = opened(make()).record_for_resume()
    env.set_seed(1)
    root = played(env, env.reset(), 4)[1]
    return as_read_again(env.state_dict()), root


def test_an_env_with_a_generator_of_its_own_is_told(opened):
    state, _ = saved_secretive(opened)

    with pytest.raises(RuntimeError, match=r"after 4 steps something else came out.*strict=False"):
        opened(GymWrapper(Secretive())).load_state_dict(state)


def test_a_load_that_is_not_strict_truncates_the_episode_and_begins_another(opened):
    state, root = saved_secretive(opened)
    env = opened(GymWrapper(Secretive()))

    env.load_state_dict(state, strict=False)
    data, following = env.step_and_maybe_reset(env.rand_action(root))

    assert data["next", "truncated"].item() and data["next", "done"].item()
    assert not data["next", "terminated"].item() and data["next", "reward"].item() == 0
    assert data["next", "observation"].equal(data["observation"])
    assert following["observation"].item() == 0 and not following["done"].item()
    data, _ = env.step_and_maybe_reset(env.rand_action(following))
    assert data["next", "reward"].item() == 1 and not data["next", "done"].item()


def test_a_vector_env_is_truncated_in_the_same_way(opened):
    make = lambda: GymWrapper(  # noqa: E731
        gymnasium.vector.SyncVectorEnv(
            [Secretive] * 2, autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED
        )
    )
    state, root = saved_secretive(opened, make)
    env = opened(make())
    with pytest.raises(ResumeError, match="something else came out"):
        env.load_state_dict(state)

    env.load_state_dict(state, strict=False)
    data, following = env.step_and_maybe_reset(env.rand_action(root))

    assert data["next", "truncated"].all() and not following["done"].any()
    assert (following["observation"] == 0).all()


def test_sub_envs_that_differ_are_truncated_alone(opened):
    makes = [partial(GymEnv, "CartPole-v1"), partial(GymEnv, "CartPole-v1")]
    env = opened(SerialEnv(2, makes)).record_for_resume()
    env.set_seed(1)
    _, root = played(env, env.reset(), 6)
    state = env.state_dict()
    state["worker1"]["_state"]["simulator"]["end"] += 1
    other = opened(SerialEnv(2, makes))
    with pytest.raises(RuntimeError, match=r"env 1 .*|.*something else came out"):
        other.load_state_dict(state)

    other.load_state_dict(state, strict=False)
    wanted, _ = env.step_and_maybe_reset(env.rand_action(root.clone()))
    data, following = other.step_and_maybe_reset(wanted.exclude("next"))

    assert data["next", "truncated"].flatten().tolist() == [False, True]
    assert data["next", "observation"][0].equal(wanted["next", "observation"][0])
    assert data["next", "observation"][1].equal(root["observation"][1])
    assert not following["done"].any()
    data, _ = other.step_and_maybe_reset(other.rand_action(following))
    assert data["next", "reward"].flatten().tolist() == [1, 1]


MODES = gymnasium.vector.AutoresetMode
UNRECORDED = {
    "by name": small,
    "its own steps": lambda: Own("CartPole-v1"),
    "no generator": lambda: GymWrapper(Secretive()),
    **{
        mode.name: partial(small, num_envs=2, vector_kwargs={"autoreset_mode": mode})
        for mode in MODES
    },
    "out of reach": lambda: GymWrapper(
        wrappers.vector.RecordEpisodeStatistics(
            gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
        )
    ),
}


@pytest.mark.parametrize("kind", UNRECORDED)
def test_an_episode_that_was_not_recorded_is_truncated_with_one_warning(kind, opened):
    env, other = opened(UNRECORDED[kind]()), opened(UNRECORDED[kind]())
    _, root = played(env, env.reset(), 4)

    with pytest.warns(UserWarning, match=r"episodes under way in .*record_for_resume") as warned:
        other.load_state_dict(as_read_again(env.state_dict()))
    data, following = other.step_and_maybe_reset(other.rand_action(root))
    later, _ = other.step_and_maybe_reset(other.rand_action(following))

    assert [one.filename for one in warned] == [__file__]
    assert data["next", "truncated"].all() and not data["next", "terminated"].any()
    assert data["next", "observation"].equal(root["observation"])
    assert not following["done"].any() and not later["next", "truncated"].any()
    assert (later["next", "reward"] == 1).all()


def test_one_env_that_was_reported_truncated_is_not_stepped_before_a_reset(opened):
    env = opened(small())
    root = env.reset()
    with pytest.warns(UserWarning, match="CartPole-v1"):
        env.load_state_dict(env.state_dict())

    data = env.step(env.rand_action(root))

    with pytest.raises(NotResetError, match="GymEnv was not restored by load_state_dict"):
        env.step(env.rand_action(env.step_mdp(data)))
    assert not env.step(env.rand_action(env.reset()))["next", "truncated"].any()


def test_a_module_around_an_env_warns_of_its_episode_when_it_is_loaded(opened):
    env, other = opened(small()), opened(small())
    root = env.reset()

    with pytest.warns(UserWarning, match="episodes under way in GymEnv") as warned:
        nn.ModuleDict({"env": other}).load_state_dict(nn.ModuleDict({"env": env}).state_dict())

    assert [one.filename for one in warned] == [__file__]
    assert other.step(other.rand_action(root))["next", "truncated"].all()


def recording(*transforms) -> TransformedEnv:
    return TransformedEnv(small().record_for_resume(), Compose(*transforms))


INSIDE = {
    "transformed": lambda: recording(VecNorm(["observation"]), StepCounter()),
    "nested": lambda: TransformedEnv(recording(RewardSum()), VecNorm(["observation"])),
    "around a pool": lambda: TransformedEnv(SerialEnv(2, recording), RewardSum()),
    "mixed": lambda: MixedEnv([TransformedEnv(SerialEnv(2, recording)), SerialEnv(1, recording)]),
}


@pytest.mark.parametrize("kind", INSIDE)
def test_an_env_of_envs_is_loaded_through_the_module_around_it(kind, opened):
    envs, others = ([opened(INSIDE[kind]()) for _ in range(2)] for _ in range(2))
    for seed, env in enumerate(envs):
        env.set_seed(seed)
    roots = [played(env, env.reset(), 4)[1] for env in envs]

    nn.ModuleList(others).load_state_dict(as_read_again(nn.ModuleList(envs).state_dict()))

    for env, other, root in zip(envs, others, roots, strict=True):
        assert same(tuple(played(one, root.copy(), 12)[0] for one in (env, other)))


@pytest.mark.parametrize("mode", [MODES.NEXT_STEP, MODES.SAME_STEP])
def test_a_vector_env_that_resets_itself_says_that_it_is_to_be_reset_whole(mode, opened):
    env = opened(small(num_envs=2, vector_kwargs={"autoreset_mode": mode}))
    root = env.reset()
    with pytest.warns(UserWarning, match="CartPole-v1"):
        env.load_state_dict(env.state_dict())

    with pytest.raises(ResetMaskError, match=r"Reset all rows, as after loading a state dict"):
        env.reset(root.set("_reset", torch.tensor([True, False])))

    assert not env.step(env.rand_action(env.reset()))["next", "truncated"].any()


def test_a_new_episode_draws_from_the_generator_that_was_saved(opened):
    env, other = opened(small()), opened(small())
    env.set_seed(3)
    env.rollout(4)
    state = env.state_dict()

    with pytest.warns(UserWarning, match="CartPole-v1"):
        other.load_state_dict(state)

    assert other.reset()["observation"].equal(env.reset()["observation"])


def test_what_was_loaded_without_its_episode_can_be_saved_again(opened):
    env, other, last = (opened(small()) for _ in range(3))
    root = env.reset()
    with pytest.warns(UserWarning, match="CartPole-v1"):
        other.load_state_dict(env.state_dict())

    last.load_state_dict(as_read_again(other.state_dict()))

    assert last.step(last.rand_action(root))["next", "truncated"].item()


def test_rows_of_a_vector_env_that_a_reset_has_shown_go_on(opened):
    env = opened(small(num_envs=2))
    root = env.reset()
    with pytest.warns(UserWarning, match="CartPole-v1"):
        env.load_state_dict(env.state_dict())

    root = env.reset(root.set("_reset", torch.tensor([True, False])))
    data = env.step(env.rand_action(root))

    assert data["next", "truncated"].flatten().tolist() == [False, True]
    assert data["next", "reward"].flatten().tolist() == [1, 0]


def test_an_episode_under_way_is_no_part_of_what_is_recorded(opened):
    env = opened(small())
    env.reset()
    env.record_for_resume()

    with pytest.raises(ResumeError, match=r"began before record_for_resume\(\)"):
        env.state_dict()
    env.reset()
    state = env.state_dict()

    assert "actions" in state["_state"]["simulator"]
    assert "actions" not in env.record_for_resume(False).state_dict()["_state"]["simulator"]


def test_a_refusal_behind_transforms_names_what_saves_them_alone(opened):
    env = opened(TransformedEnv(TransformedEnv(small(), StepCounter()), StepCounter()))
    env.reset()
    env.record_for_resume()

    with pytest.raises(ResumeError, match="began before") as caught:
        env.state_dict()

    assert caught.value.__notes__ == [
        "To save the transforms alone, call env.transform.state_dict()."
    ]
    env.transform.load_state_dict(env.transform.state_dict())


def test_a_step_that_raised_leaves_nothing_to_save(opened):
    class Failing(Secretive):
        def step(self, action):
            raise ValueError("no")

    env = opened(GymWrapper(Failing())).record_for_resume()
    root = env.reset()

    with pytest.raises(ValueError, match="no"):
        env.step(env.rand_action(root))

    with pytest.raises(ResumeError, match="a step of its episode raised"):
        env.state_dict()


def test_transforms_alone_are_no_state_of_a_simulator(opened):
    env = opened(TransformedEnv(small(), StepCounter()))

    with pytest.raises(ResumeError, match=r"simulator of GymEnv.*env.transform.load_state_dict"):
        env.load_state_dict(env.transform.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        opened(small()).load_state_dict({})


@pytest.mark.parametrize(
    "state", [{}, {"key": None}, 3, {"simulator": {}}, {"simulator": {"start": {}}}]
)
def test_what_another_kind_of_env_saved_is_refused(state, opened):
    for env in (small(), small(num_envs=2)):
        with pytest.raises(ResumeError, match=r"not saved by one built alike: it holds"):
            opened(env).load_state_dict({"_state": state})


def test_another_env_or_another_number_of_rows_is_told(opened):
    env = opened(small("Pendulum-v1")).record_for_resume()
    played(env, env.reset(), 3)
    rows = opened(small(num_envs=3)).record_for_resume()
    rows.reset()

    with pytest.raises(ResumeError, match="was played again from its last reset"):
        opened(small()).load_state_dict(env.state_dict())
    with pytest.raises(ResumeError, match="holds 3 rows, but this env has 2"):
        opened(small(num_envs=2)).load_state_dict(rows.state_dict())


def test_an_env_without_known_numbers_is_refused(opened):
    class Old:
        observation_space, action_space = Secretive.observation_space, Secretive.action_space
        metadata: ClassVar[dict] = {}

        @property
        def unwrapped(self):
            return self

        def reset(self, **kwargs):
            return np.zeros(1), {}

        def step(self, action):
            return np.zeros(1), 0.0, False, False, {}

        def close(self):
            pass

    Old.__module__ = "gymnasium.old"
    env = opened(GymWrapper(Old())).record_for_resume()
    env.reset()

    with pytest.raises(ResumeError, match=r"has no np_random.*get_state\(\) and set_state"):
        env.state_dict()


def test_videos_and_rows_that_cannot_be_reached_are_refused(opened):
    library = {
        "__module__": "gymnasium.wrappers.rendering"
    }  # the real one asks for another library
    video = type("RecordVideo", (gymnasium.Wrapper,), library)(gymnasium.make("CartPole-v1"))
    rows = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    wrapped = wrappers.vector.RecordEpisodeStatistics(rows)

    for env, reason in ((video, "RecordVideo around"), (wrapped, "cannot be saved from outside")):
        with pytest.raises(ResumeError, match=reason):
            opened(GymWrapper(env)).record_for_resume().state_dict()


class Own(GymEnv):
    """An env with steps of its own."""

    def _step(self, td):
        return super()._step(td)


def test_a_subclass_with_steps_of_its_own_is_refused(opened):
    env = opened(Own("CartPole-v1")).record_for_resume()
    env.reset()

    with pytest.raises(ResumeError, match="Own overrides one of"):
        env.state_dict()


# ---------------------------------------------------------------------------------------------- digests


def test_a_digest_tells_values_apart_and_not_their_order_in_dicts():
    values = [
        1,
        1.0,
        True,
        "1",
        np.float32(1),
        np.array([1.0, 2.0]),
        np.array([2.0, 1.0]),
        (1, 2),
        {"a": 1},
    ]

    assert len({digest_of(value) for value in values}) == len(values)
    assert digest_of({"a": 1, "b": 2}, 0) == digest_of({"b": 2, "a": 1}, 0)
    assert digest_of(np.arange(6).reshape(2, 3).T, 0) == digest_of(
        np.arange(6).reshape(2, 3).T.copy(), 0
    )
    assert digest_of(torch.ones(2), 5) == digest_of(np.ones(2, np.float32), 5)
    assert digest_of(np.array([1.0, None]), 0) == digest_of([1.0, None], 0)
    assert digest_of(None, 7) == digest_of(object(), 7) == 7


@pytest.mark.parametrize("records", [False, True])
def test_a_new_vector_env_that_was_loaded_resets_the_rows_that_have_ended(opened, records):
    env, other = (opened(GymEnv("CartPole-v1", num_envs=3)) for _ in range(2))
    if records:
        env.record_for_resume()
    env.set_seed(0)
    root = env.reset()
    while not root["done"].any():
        root = env.step_mdp(env.step(env.rand_action(root)))

    with pytest.warns(UserWarning, match="begin") if not records else nullcontext():
        other.load_state_dict(env.state_dict())
    ended = root["done"].flatten().clone()
    again = other.maybe_reset(root)
    following = other.step(other.rand_action(again))["next"]

    assert not again["done"].any()
    assert torch.equal(following["truncated"].flatten(), ~ended & (not records))
