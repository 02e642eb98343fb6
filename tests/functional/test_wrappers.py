"""Time limits, frame skip, and how one environment's output is brought into form."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import FrozenInstanceError, dataclass, is_dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces

import envkit.functional
from envkit import JaxEnv
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    KeyCollisionError,
    StateStructureError,
)
from envkit.functional import (
    BatchedEnv,
    Box,
    Discrete,
    FrameSkip,
    Metrics,
    MultiDiscrete,
    TimeLimit,
    Timestep,
    WithoutInfo,
    normalize,
    sample_space,
)
from envkit.functional.core import done_of
from envkit.functional.spaces import choose_allowed
from envkit.functional.structure import conform
from envkit.specs import Bounded
from tests.zoo.jax_envs import Countdown, Nim, NoisyWalk, Pendulum, Sled, Team

KEY = jax.random.PRNGKey(0)


def play(env, steps, action=0):
    state, _ = env.reset(KEY)
    timesteps = []
    for _ in range(steps):
        state, timestep = env.step(state, action)
        timesteps.append(normalize(timestep))
    return timesteps


def test_what_a_step_leaves_out_neither_pays_nor_ends():
    timestep = normalize(Timestep({"a": 1.0}))

    assert (timestep.reward, timestep.terminated, timestep.truncated) == (0.0, False, False)
    assert not done_of(timestep)


def test_time_limit_truncates_an_unfinished_episode():
    first, second = play(TimeLimit(Countdown(start=9), limit=2), steps=2)

    assert not first.truncated
    assert second.truncated
    assert not second.terminated


def test_an_episode_that_ends_on_its_last_step_is_terminated_not_truncated():
    last = play(TimeLimit(Countdown(start=2), limit=2), steps=2)[-1]

    assert last.terminated
    assert not last.truncated


def test_a_time_limit_of_none_only_counts():
    env = TimeLimit(Countdown(start=9), limit=None)
    state, _ = env.reset(KEY)
    for _ in range(3):
        state, timestep = env.step(state, 0)

    assert state.elapsed == 3
    assert not timestep.truncated


def test_a_time_limit_below_one_step_is_refused():
    with pytest.raises(ArgumentError, match="None for no limit"):
        TimeLimit(Countdown(3), limit=0)


def test_wrappers_forward_the_spaces():
    env = FrameSkip(TimeLimit(Pendulum(), 5), 2)

    assert env.action_space == Pendulum.action_space
    assert env.observation_space is None


def test_frame_skip_sums_the_rewards():
    (only,) = play(FrameSkip(Countdown(start=9), frames=4), steps=1)

    assert only.reward == 4.0
    assert only.observation == 5.0


def test_frame_skip_stops_where_the_episode_ends():
    (only,) = play(FrameSkip(Countdown(start=3), frames=5), steps=1)

    assert only.reward == 3.0
    assert only.observation == 0.0
    assert only.terminated


def test_frame_skip_stops_where_the_episode_is_cut_short():
    (only,) = play(FrameSkip(TimeLimit(Countdown(start=9), 2), frames=5), steps=1)

    assert only.reward == 2.0
    assert only.observation == 7.0
    assert only.truncated and not only.terminated


@pytest.mark.parametrize("frames", [0, 1.5, "2"])
def test_frame_skip_takes_only_a_positive_integer(frames):
    with pytest.raises(ValueError, match=r"at least 1.*Pass action_repeat=1"):
        FrameSkip(Countdown(3), frames)


def test_infos_are_shown_as_metrics_zero_where_only_a_step_gives_them():
    env = Metrics(Sled())

    state, root = env.reset(KEY)
    _, timestep = env.step(state, jnp.array([0.5]))

    assert root.observation["metrics"] == {"work": 0.0} and root.info == timestep.info == {}
    assert (
        root.observation["observation"].shape == timestep.observation["observation"].shape == (2,)
    )
    assert timestep.observation["metrics"]["work"] == 0.5 * timestep.reward


def test_metrics_stand_beside_the_entries_of_an_observation():
    _, root = Metrics(NoisyWalk()).reset(KEY)

    assert set(root.observation) == {"place", "far", "metrics"}


def test_an_observation_that_is_called_metrics_is_refused():
    @dataclass(frozen=True)
    class Named(Countdown):
        def step(self, state, action):
            state, timestep = super().step(state, action)
            return state, replace(timestep, observation={"metrics": timestep.observation})

    with pytest.raises(KeyCollisionError, match="another name, or leave metrics out"):
        Metrics(Named(3)).step(jnp.int32(3), 0)


def test_infos_can_be_left_out():
    state, _ = WithoutInfo(Sled()).reset(KEY)

    assert WithoutInfo(Sled()).step(state, jnp.array([0.5]))[1].info == {}


def test_python_numbers_become_arrays_of_fixed_dtype():
    timestep = normalize(Timestep({"a": 1.0, "b": 2}, 1, True, info={"c": True}))

    assert timestep.observation["a"].dtype == jnp.float32
    assert timestep.observation["b"].dtype == jnp.int32
    assert timestep.reward.dtype == jnp.float32
    assert timestep.terminated.dtype == timestep.truncated.dtype == jnp.bool_
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(timestep))


def test_nothing_becomes_float64_when_x64_is_on():
    with jax.enable_x64(True):
        timestep = normalize(Timestep({"a": 1.0}, 1.0))

        assert timestep.observation["a"].dtype == timestep.reward.dtype == jnp.float32


def test_a_reward_with_one_element_is_a_scalar_and_a_longer_one_an_error():
    assert normalize(Timestep(0.0, jnp.ones(1))).reward.shape == ()
    with pytest.raises(StateStructureError, match="single environment"):
        normalize(Timestep(0.0, jnp.ones(3)))


@dataclass(frozen=True)
class Drifting:
    """Returns from step a state that differs from that of reset by ``change``."""

    change: object
    action_space = Discrete(2)

    def reset(self, key):
        return {"count": jnp.int32(0), "aim": jnp.zeros(2)}, Timestep(0.0)

    def step(self, state, action):
        return {**state, **self.change}, Timestep(0.0, 1.0)


def step_once(env):
    rows = BatchedEnv(env)
    state, _ = rows.init(KEY, 2)
    return rows.step(state, jnp.zeros(2, jnp.int32))[0].inner


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new": 1.0}, r"state.inner\['new'\] appears only after step"),
        ({"aim": jnp.zeros(3)}, r"state.inner\['aim'\] has shape \(3,\)"),
        ({"count": 0.5}, r"state.inner\['count'\] has dtype float32"),
        ({"aim": (0.0, 1.0)}, r"state.inner\['aim'\] exists only after reset"),
    ],
)
def test_a_state_that_changes_between_reset_and_step_is_named(change, message):
    with pytest.raises(StateStructureError, match=message):
        step_once(Drifting(change))


def test_a_random_key_and_a_number_do_not_stand_for_each_other():
    key, number = jax.random.key(0), jnp.int32(0)

    for after, before in ((key, number), (number, key), (jnp.bool_(True), key)):
        with pytest.raises(StateStructureError, match=r"state\['a'\] has dtype .* cannot hold"):
            conform({"a": after}, {"a": before}, what="state")


def test_integer_widths_that_drift_are_cast_back():
    state = step_once(Drifting({"count": jnp.int8(3), "aim": jnp.ones(2, jnp.int32)}))

    assert state["count"].dtype == jnp.int32
    assert state["aim"].dtype == jnp.float32


def test_samples_lie_in_their_space():
    space = {
        "box": Box(jnp.array([-1.0, 2.0]), 3.0),
        "free": Box(-jnp.inf, jnp.array([jnp.inf, 0.0])),
        "pick": Discrete(4),
        "byte": Box(0, 255, (50,), jnp.uint8),
    }

    drawn = sample_space(space, KEY, (200,))

    assert drawn["box"].dtype == jnp.float32
    assert (drawn["box"] >= jnp.array([-1.0, 2.0])).all()
    assert (drawn["box"] <= 3.0).all()
    assert (drawn["free"][:, 1] <= 0).all()
    assert set(drawn["pick"].tolist()) == {0, 1, 2, 3}
    assert drawn["byte"].dtype == jnp.uint8
    assert drawn["byte"].max() == 255


@pytest.mark.parametrize(
    "space",
    [
        Box(-1.0, jnp.array([1.0, 2.0])),
        Box(-jnp.inf, jnp.array([jnp.inf, 0.0])),
        Box(0, 255, (3,), jnp.uint8),
        Discrete(5),
        MultiDiscrete((2, 300)),
        {"a": Discrete(3), "b": (Box(0.0, 1.0),)},
    ],
    ids=["bounded", "tails", "bytes", "discrete", "multi-discrete", "tree"],
)
def test_the_first_of_many_draws_do_not_depend_on_how_many_there_are(space):
    few, many, one = (sample_space(space, KEY, batch) for batch in ((3,), (50,), ()))

    for some, all_, single in zip(*map(jax.tree.leaves, (few, many, one)), strict=True):
        assert np.array_equal(some, all_[:3])
        assert some.shape[1:] == single.shape and some.dtype == single.dtype
        assert len(np.unique(all_, axis=0)) > 1


def test_a_bound_that_is_missing_leaves_a_tail_on_its_side():
    inf = jnp.inf
    box = Box([0, 2, -inf, -inf, -1], [inf, inf, 3, inf, 4])

    drawn = jax.vmap(box.sample)(jax.random.split(KEY, 4000))

    # exponential above 0, above 2 and below 3, normal, uniform over [-1, 4]
    assert drawn.mean(0) == pytest.approx([1, 3, 2, 0, 1.5], abs=0.1)
    assert drawn.std(0) == pytest.approx([1, 1, 1, 1, 5 / 12**0.5], abs=0.1)
    assert ((box.low <= drawn) & (drawn <= box.high)).all()


def test_integers_are_drawn_up_to_both_bounds_and_near_the_largest_there_is():
    largest = 2**31 - 1
    few = Box(-1, 1, (200,), jnp.int8).sample(KEY)
    large = Box(largest - 2, largest, (200,), jnp.int32).sample(KEY)

    assert set(few.tolist()) == {-1, 0, 1}
    assert {largest - 2, largest - 1} <= set(large.tolist()) <= set(range(largest - 2, 2**31))


def test_spaces_are_equal_by_value():
    box = Box(0, 1, (2,))

    assert box == Box([0, 0], [1, 1])
    assert hash(box) == hash(Box([0, 0], [1, 1]))
    for other in (Box(0, 2, (2,)), Box(-1, 1, (2,)), Box(0, 1, (3,)), Box(0, 1, (2,), "int32")):
        assert box != other
    assert box != "a box" and box != Discrete(2)


def dataclasses_of(package):
    kinds = []
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        kinds += [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and is_dataclass(value)
            and value.__module__ == module.__name__
        ]
    return kinds


@pytest.mark.parametrize("kind", dataclasses_of(envkit.functional), ids=lambda kind: kind.__name__)
def test_envs_states_and_spaces_are_values_that_nobody_can_change(kind):
    value = object.__new__(kind)

    with pytest.raises(FrozenInstanceError):
        value.anything = 1


def test_a_box_with_swapped_bounds_is_refused():
    with pytest.raises(ArgumentError, match="Swap them"):
        Box(1.0, -1.0)
    assert Box(1.0, 1.0).sample(KEY) == 1.0


def test_a_discrete_space_has_a_value():
    with pytest.raises(ArgumentError, match="n of Discrete is 0"):
        Discrete(0)
    assert Discrete(1).sample(KEY) == 0


def test_samples_have_the_shape_and_dtype_that_their_space_names():
    for space in (Discrete(3), Box(0, 9, (2,), "int8"), Box(0, 1)):
        drawn = space.sample(KEY)

        assert (drawn.shape, drawn.dtype) == (space.shape, space.dtype)


def test_a_dict_observation_keeps_its_keys():
    _, timestep = BatchedEnv(NoisyWalk()).init(KEY, 3)

    assert timestep.observation["place"].shape == (3, 2)
    assert timestep.observation["far"].dtype == jnp.bool_


# ------------------------------------------------------------------------- rewards of several components


def test_an_env_that_declares_components_is_paid_each_of_them_through_its_wrappers():
    env = FrameSkip(TimeLimit(Team(end=9), limit=20), frames=3)

    state, _ = env.reset(KEY)
    _, timestep = env.step(jax.tree.map(jnp.zeros_like, state), jnp.array([2, 1]))

    assert env.reward_shape == (2,)
    assert timestep.reward.tolist() == [6.0, 3.0]
    assert timestep.reward.dtype == jnp.float32


def test_a_number_counts_for_every_component_and_another_shape_is_refused():
    assert normalize(Timestep(0.0, reward=2), (3,)).reward.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(StateStructureError, match=r"\(2,\).*reward_shape=\(3,\)"):
        normalize(Timestep(0.0, reward=jnp.zeros(2)), (3,))
    with pytest.raises(StateStructureError, match=r"reward_shape = \(k,\)"):
        normalize(Timestep(0.0, reward=jnp.zeros(2)))


def test_rewards_by_name_go_through_wrappers_and_other_names_are_refused():
    env = FrameSkip(TimeLimit(Nim(stones=6), limit=20), frames=2)

    state, _ = env.reset(KEY)
    _, timestep = env.step(state, 2)

    turn = int(state.inner["turn"])
    assert env.reward_shape == {"reward": (), "paid": {"player": (2,)}}
    assert timestep.terminated and timestep.reward["reward"] == 1
    assert timestep.reward["paid"]["player"].tolist() == ([-1, 1] if turn == 0 else [1, -1])
    assert normalize(Timestep(0.0), {"a": (), "b": (2,)}).reward["b"].tolist() == [0, 0]
    with pytest.raises(StateStructureError, match=r"rewards are \['c'\].*Return one for each"):
        normalize(Timestep(0.0, {"c": 1.0}), {"a": (), "b": (2,)})


def allowed_draws(space, masks, rows=4000):
    return choose_allowed(space, sample_space(space, KEY, (rows,), masks), masks)


def test_of_a_choice_with_a_mask_every_allowed_option_is_equally_likely():
    flags = jnp.array([[1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]] * 4000, bool)
    space = {"many": MultiDiscrete((3, 6, 4)), "free": Discrete(2)}

    drawn = allowed_draws(space, {("many",): flags})

    counts = [np.bincount(column, minlength=6) / 4000 for column in drawn["many"].T]
    assert drawn["many"].dtype == jnp.int32 and drawn["many"].shape == (4000, 3)
    np.testing.assert_allclose(counts[0][:3], [1, 0, 0], atol=0.03)
    np.testing.assert_allclose(counts[1], [1 / 2, 1 / 2, 0, 0, 0, 0], atol=0.03)
    np.testing.assert_allclose(counts[2][:4], [1 / 4] * 4, atol=0.03)
    assert (drawn["free"] == sample_space(space, KEY, (4000,))["free"]).all()


def test_where_a_mask_allows_no_option_all_of_them_may_be_drawn():
    drawn = allowed_draws(Discrete(3), {(): jnp.zeros((4000, 3), bool)})

    np.testing.assert_allclose(np.bincount(drawn) / 4000, [1 / 3] * 3, atol=0.03)


def test_masked_draws_of_a_row_do_not_depend_on_how_many_rows_there_are():
    flags = jax.random.bernoulli(KEY, 0.5, (50, 7))

    few, many = (allowed_draws(Discrete(7), {(): flags[:rows]}, rows) for rows in (3, 50))

    assert np.array_equal(few, many[:3]) and len(np.unique(many)) > 3


def test_a_mask_of_another_size_is_refused():
    with pytest.raises(
        StateStructureError, match=r"shape \(4,\) in each row.* 3 options\. Observe"
    ):
        allowed_draws(Discrete(3), {(): jnp.ones((2, 4), bool)}, 2)


def test_several_choices_are_drawn_each_within_its_own_options():
    space = MultiDiscrete([3, 1, 2])

    drawn = jax.vmap(space.sample)(jax.random.split(KEY, 200))

    assert drawn.shape == (200, 3) and drawn.dtype == jnp.int32
    assert [set(column.tolist()) for column in drawn.T] == [{0, 1, 2}, {0}, {0, 1}]
    with pytest.raises(ArgumentError, match=r"nvec\[1\] of MultiDiscrete is 0, .*at least 1"):
        MultiDiscrete((2, 0))


@pytest.mark.parametrize(
    ("low", "high"),
    [(-np.inf, np.inf), (0.5, np.inf), (-np.inf, 0.5), (-3e38, 3e38), (-1.0, 2.0)],
)
def test_a_box_and_its_spec_draw_from_one_distribution_and_gymnasium_from_the_same(low, high):
    bounds = np.float32(low), np.float32(high)
    space = spaces.Box(*bounds, (4000,), np.float32, seed=0)
    spec = Bounded(torch.tensor(bounds[0]), torch.tensor(bounds[1]), (4000,))

    drawn = [
        np.asarray(Box(*bounds).sample(KEY, (4000,))),
        spec.rand((), torch.Generator().manual_seed(0)).numpy(),
        space.sample(),
    ]

    parts = np.linspace(0.05, 0.95, 10)
    first, *others = (np.quantile(values.astype(float), parts) for values in drawn)
    assert all(((values >= low) & (values <= high)).all() for values in drawn)
    for other in others:
        np.testing.assert_allclose(other, first, atol=0.1 * (first[-1] - first[0]))


# --------------------------------------------------------------------------- envs written as for Gymnasium


class Written:
    """An env whose parts are replaced by what a test writes."""

    action_space = Box(-1.0, 1.0, (1,))

    def reset(self, key):
        return {}, Timestep(jnp.zeros(2))

    def step(self, state, action):
        return state, Timestep(jnp.zeros(2) + jnp.sum(action))


SPACES = {
    "box": (spaces.Box(-2, 3, (2,)), Box(-2.0, 3.0, (2,))),
    "discrete": (spaces.Discrete(3), Discrete(3)),
    "choices": (spaces.MultiDiscrete([2, 3]), MultiDiscrete((2, 3))),
    "dict": (
        spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (1,))),
        {"a": Discrete(2), "b": Box(0.0, 1.0, (1,))},
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_spaces_of_gymnasium_are_taken(name):
    theirs, ours = SPACES[name]
    envs = []
    for space in (theirs, ours):
        env = Written()
        env.action_space = space
        envs.append(TimeLimit(env, 9))

    assert envs[0].action_space == envs[1].action_space
    assert (
        JaxEnv(envs[0].env, batch_size=[2]).action_spec
        == JaxEnv(envs[1].env, batch_size=[2]).action_spec
    )


@pytest.mark.parametrize(
    "space",
    [spaces.Discrete(3, start=1), spaces.MultiDiscrete([[2, 2], [2, 2]])],
)
def test_spaces_of_gymnasium_that_count_otherwise_are_refused(space):
    env = Written()
    env.action_space = space

    with pytest.raises(ArgumentError, match=r"counts options from 0, on one axis.*shift"):
        JaxEnv(env, batch_size=[2])


RETURNED = {
    "five": lambda state: (state, jnp.zeros(2), 0.0, False, {}),
    "four": lambda state: (state, jnp.zeros(2), 0.0, False),
    "an array": lambda state: (state, jnp.zeros(2)),
    "one": lambda state: Timestep(jnp.zeros(2)),
}


@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED.keys())
@pytest.mark.parametrize("method", ["reset", "step"])
def test_what_is_no_state_and_timestep_is_named(method, returned):
    env = Written()
    setattr(env, method, lambda state, action=None: returned(state))

    with pytest.raises(
        StateStructureError,
        match=rf"{method} of the environment returned .* a Timestep\. Return \(",
    ):
        JaxEnv(env, batch_size=[2]).rollout(1)


def test_a_class_is_no_env():
    with pytest.raises(
        ArgumentTypeError, match=r"the class Written, .*JaxEnv\(Written\(\), \.\.\.\)"
    ):
        JaxEnv(Written)
