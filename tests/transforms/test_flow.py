"""What is stepped, how often, and from where."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from envkit import (
    BinarizeReward,
    Binary,
    Bounded,
    Compose,
    Composite,
    ConditionalSkip,
    FrameSkipTransform,
    GymEnv,
    MixedEnv,
    NoopResetEnv,
    ParallelEnv,
    PixelRenderTransform,
    RemoveEmptySpecs,
    RewardClipping,
    SerialEnv,
    SignTransform,
    StepCounter,
    Transform,
    TransformedEnv,
    Unbounded,
    VecNormV2,
    check_env_specs,
)
from envkit.env.base import EnvBase
from tests.transforms.test_transformed_env import Halved, Mean
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.transform_envs import Drawn, Hollow, TwoTeams

NONSTOP = {"break_when_any_done": False}


def values(td, *key) -> list:
    return td[key].squeeze(-1).tolist()


class EverySecond:
    """True at every second call, or True for row 0 then."""

    def __init__(self, rows=None):
        self.calls, self.rows = 0, rows

    def __call__(self, td):
        self.calls += 1
        skips = self.calls % 2 == 0
        return skips if self.rows is None else torch.tensor([skips, *[False] * (self.rows - 1)])


# ----------------------------------------------------------------------------------- ConditionalSkip


def test_example_d_every_second_step_is_skipped():
    env = TransformedEnv(Count(50), ConditionalSkip(EverySecond()))

    data = env.rollout(6)

    assert values(data, "count") == [0, 1, 1, 2, 2, 3]
    assert values(data, "next", "count") == [1, 1, 2, 2, 3, 3]
    assert values(data, "next", "reward") == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    "make", [lambda: SerialEnv(2, partial(Count, 50)), lambda: StatelessCount(50, batch_size=[2])]
)
def test_rows_are_skipped_one_by_one(make):
    env = TransformedEnv(make(), ConditionalSkip(EverySecond(2)))

    data = env.rollout(6)

    assert values(data, "next", "count") == [[1, 1, 2, 2, 3, 3], [1, 2, 3, 4, 5, 6]]


def test_a_skip_calls_no_forward_transform():
    mean = Mean()
    env = TransformedEnv(Count(50), Compose(mean, ConditionalSkip(EverySecond())))

    env.rollout(6)

    assert mean.calls == 3


def test_a_skip_narrows_the_mask_it_is_given():
    env = TransformedEnv(
        SerialEnv(3, partial(Count, 9)), ConditionalSkip(lambda td: td["count"] < 0)
    )
    td = env.rand_action(env.reset()).set("_step", torch.tensor([[True], [False], [True]]))

    assert values(env.step(td), "next", "count") == [1, 0, 1]


def test_a_condition_of_another_size_is_refused():
    env = TransformedEnv(SerialEnv(3, partial(Count, 9)), ConditionalSkip(lambda td: torch.ones(2)))

    with pytest.raises(RuntimeError, match=r"shape \(2,\)"):
        env.rand_step(env.reset())


@pytest.mark.parametrize("answer", ["yes", None, 1])
def test_a_condition_that_gives_no_bool_is_refused(answer):
    env = TransformedEnv(Count(9), ConditionalSkip(lambda td: answer))

    with pytest.raises(TypeError, match=rf"returned {answer!r} of type.*must return bools"):
        env.rand_step(env.reset())


# -------------------------------------------------------------------------------- FrameSkipTransform


def test_an_action_is_repeated_and_the_rewards_are_added():
    env = TransformedEnv(Count(5), FrameSkipTransform(2))

    data = env.rollout(9)

    assert values(data, "next", "count") == [2, 4, 5]
    assert values(data, "next", "reward") == [2, 2, 1]
    check_env_specs(env)


@pytest.mark.parametrize("skipped_by", ["transform", "gymnasium"])
def test_the_repeated_action_is_the_one_that_was_given(skipped_by):
    transforms = [Halved(), FrameSkipTransform(3)] if skipped_by == "transform" else [Halved()]
    frame_skip = 1 if skipped_by == "transform" else 3
    env = TransformedEnv(GymEnv("Pendulum-v1", frame_skip=frame_skip), Compose(*transforms))
    env.set_seed(0)
    td = env.reset().set("action", torch.tensor([3.0]))

    out = env.step(td)["next"]

    bare = GymEnv("Pendulum-v1")
    bare.set_seed(0)
    root, total = bare.reset(), 0
    for _ in range(3):
        data = bare.step(root.set("action", torch.tensor([1.5])))
        root, total = bare.step_mdp(data), total + data["next", "reward"]
    assert out["observation"].allclose(root["observation"])
    assert out["reward"].allclose(total)


def test_each_row_stops_at_its_own_end():
    env = TransformedEnv(
        SerialEnv(2, [partial(Count, 5), partial(Count, 3)]), FrameSkipTransform(2)
    )

    data = env.rollout(4, **NONSTOP)

    assert values(data, "next", "count") == [[2, 4, 5, 2], [2, 3, 2, 3]]
    assert values(data, "next", "reward") == [[2, 2, 1, 2], [2, 1, 2, 1]]


def test_transforms_before_it_see_every_frame():
    env = TransformedEnv(
        StatelessCount(50, batch_size=[2]), Compose(StepCounter(3), FrameSkipTransform(2))
    )

    data = env.rollout(4, **NONSTOP)

    assert values(data, "next", "step_count") == [[2, 3, 2, 3]] * 2
    check_env_specs(env)


def test_skipped_rows_are_not_repeated():
    env = TransformedEnv(SerialEnv(2, partial(Count, 50)), FrameSkipTransform(3))
    td = env.rand_action(env.reset()).set("_step", torch.tensor([False, True]))

    assert values(env.step(td), "next", "count") == [0, 3]


def test_actions_are_repeated_at_least_once_and_episodes_begin_with_none_or_more():
    with pytest.raises(ValueError, match="at least 1"):
        FrameSkipTransform(0)
    with pytest.raises(ValueError, match="a number of steps"):
        NoopResetEnv(-1)
    for random in (True, False):
        assert TransformedEnv(Count(3), NoopResetEnv(0, random)).reset()["count"] == 0


# -------------------------------------------------------------------------------------- NoopResetEnv


@pytest.mark.parametrize(
    "make",
    [
        partial(Count, 9),
        partial(SerialEnv, 3, partial(Count, 9)),
        partial(StatelessCount, 9, batch_size=[3]),
    ],
)
def test_episodes_begin_after_a_few_random_actions(make):
    env = TransformedEnv(make(), NoopResetEnv(4, random=False))

    assert (env.reset()["count"] == 4).all()
    check_env_specs(env)


def test_the_number_of_actions_is_drawn_for_each_row_from_the_seed():
    env = TransformedEnv(SerialEnv(20, partial(Count, 9)), NoopResetEnv(4))
    env.set_seed(0)
    first = env.reset()["count"]
    env.set_seed(0)

    assert first.equal(env.reset()["count"])
    assert set(first.flatten().tolist()) == {1, 2, 3, 4}


def test_rows_that_go_on_take_no_extra_action():
    env = TransformedEnv(SerialEnv(2, partial(Count, 9)), NoopResetEnv(3, random=False))
    root = env.step_mdp(env.rand_step(env.reset()))

    out = env.reset(root.set("_reset", torch.tensor([True, False])))

    assert values(out, "count") == [3, 4]
    assert env.base_env.c == [3, 4]


def test_an_episode_that_ends_meanwhile_begins_anew():
    env = TransformedEnv(Count(3), NoopResetEnv(5, random=False))

    assert env.reset()["count"].tolist() == [2]


def poles() -> GymEnv:
    return GymEnv("CartPole-v1", max_episode_steps=9)  # shorter than some beginnings


def mixed(inside: bool) -> EnvBase:
    members = [
        counts(SerialEnv(2, partial(Count, 3)), inside),
        counts(StatelessCount(3, batch_size=[2]), inside),
    ]
    return counts(MixedEnv(members), not inside)


def counts(env: EnvBase, begins: bool) -> EnvBase:
    return TransformedEnv(env, NoopResetEnv(6)) if begins else env


WAYS = {
    "inside rows": lambda: SerialEnv(3, lambda: counts(poles(), True), use_buffers=True),
    "inside workers": lambda: ParallelEnv(3, lambda: counts(poles(), True)),
    "around sub-envs": lambda: counts(SerialEnv(3, poles), True),
    "around workers": lambda: counts(ParallelEnv(3, poles), True),
    "around a vector env": lambda: counts(
        GymEnv("CartPole-v1", num_envs=3, max_episode_steps=9), True
    ),
}


def played(env: EnvBase, static: bool) -> TensorDict:
    """Play from a seed, with resets of single rows among the steps, and close the env."""
    env.set_seed(4, static_seed=static)
    first = env.rollout(15, **NONSTOP)
    env.reset()
    second = env.rollout(15, lambda td: td.set("action", first["action"][..., 0, :]), **NONSTOP)
    env.close()
    return second.exclude("state", ("next", "state"))


@pytest.fixture(scope="module")
def beginnings() -> dict[bool, TensorDict]:
    """Play with the transform inside of each sub-env, with seeds of a chain and with one for all."""
    make = partial(SerialEnv, 3, lambda: counts(poles(), True), use_buffers=False)
    return {static: played(make(), static) for static in (False, True)}


@pytest.mark.parametrize(
    ("way", "static"),
    [*((way, False) for way in WAYS), ("around sub-envs", True), ("around a vector env", True)],
)
def test_beginnings_are_the_same_inside_of_sub_envs_and_around_them(beginnings, way, static):
    data, expected = played(WAYS[way](), static), beginnings[static]

    assert set(data.keys(True, True)) == set(expected.keys(True, True))
    assert (data == expected).all()
    assert data["next", "done"].sum() > 3


def test_beginnings_are_the_same_inside_of_members_and_around_them():
    within, without = (played(mixed(inside), False) for inside in (True, False))

    assert (within == without).all()


# ---------------------------------------------------------------------------------- RemoveEmptySpecs


def test_nodes_without_leaves_leave_specs_and_data_and_return_for_the_env():
    env = TransformedEnv(Hollow(), RemoveEmptySpecs())

    data = env.rollout(3)

    assert set(data.keys(True)) >= {"count", "next"}
    assert not {"extra", "options"} & set(data.keys()) and "extra" not in data["next"].keys()
    assert list(env.observation_spec.keys()) == ["count"] and env.state_spec.is_empty()
    assert env.base_env.options_seen is not None
    check_env_specs(env)


def test_without_empty_nodes_such_an_env_works_in_a_batch():
    env = SerialEnv(2, lambda: TransformedEnv(Hollow(), RemoveEmptySpecs()))

    assert env.rollout(3).shape == (2, 3)


def test_nodes_with_leaves_stay():
    env = TransformedEnv(TwoTeams(), RemoveEmptySpecs())

    assert env.observation_keys == [("a", "count"), ("b", "count")]
    check_env_specs(env)


# ------------------------------------------------------------------------------ PixelRenderTransform


def test_the_last_frame_of_an_episode_is_drawn_before_the_reset():
    env = TransformedEnv(Drawn(), PixelRenderTransform())
    root = env.reset()

    for _ in range(4):
        data, root = env.step_and_maybe_reset(env.rand_action(root))

    assert data["next", "done"] and (data["next", "pixels"] == 4).all()
    assert (root["pixels"] == 0).all()


def test_frames_are_drawn_after_resets_and_steps():
    env = TransformedEnv(Drawn(), PixelRenderTransform(scale=2))

    data = env.rollout(3)

    assert data["pixels"].shape == (3, 2, 2, 3) and data["pixels"].dtype == torch.uint8
    assert data["pixels"][:, 0, 0, 0].tolist() == [0, 2, 4]
    assert data["next", "pixels"][:, 0, 0, 0].tolist() == [2, 4, 6]
    check_env_specs(env)


def test_a_mistake_in_preproc_does_not_reset_the_simulator():
    base = Drawn()
    base.rand_step(base.step_mdp(base.rand_step(base.reset())))

    env = TransformedEnv(base, PixelRenderTransform(preproc=lambda frame: frame["nothing"]))

    with pytest.raises(IndexError):
        _ = env.observation_spec
    assert base.count == 2


class DrawsAll(SerialEnv):
    """Draws one picture of all its sub-envs, as simulators with many rows do."""

    def draw(self, *seen):
        return (*seen[0].keys(),) if seen else self.render()[0]


@pytest.mark.parametrize("as_non_tensor", [True, None])
def test_a_picture_of_all_rows_is_recorded_as_an_object(as_non_tensor):
    transform = PixelRenderTransform(as_non_tensor=as_non_tensor, render_method="draw")
    env = TransformedEnv(DrawsAll(3, Drawn), transform)

    data = env.rollout(4)

    assert env.reset().get("pixels").batch_size == (3,)
    assert data[0, 1]["pixels"].shape == (2, 2, 3)
    check_env_specs(env)


def test_pictures_of_any_form_are_recorded_as_objects():
    transform = PixelRenderTransform(["drawn"], lambda frame: {"frame": frame}, as_non_tensor=True)
    env = TransformedEnv(Drawn(), transform)

    data = env.rollout(3)

    assert [step["frame"][0, 0, 0] for step in data["next", "drawn"]] == [1, 2, 3]
    check_env_specs(env)


def test_what_is_drawn_may_depend_on_the_data():
    transform = PixelRenderTransform(None, None, True, "draw", True)
    env = TransformedEnv(DrawsAll(2, Drawn), transform)

    assert (
        "count" in env.reset()[0]["pixels"] and "reward" in env.rollout(2)[0, 0]["next", "pixels"]
    )


def test_frames_of_sub_envs_are_stacked():
    env = TransformedEnv(
        SerialEnv(2, Drawn), PixelRenderTransform(["frames"], preproc=lambda a: a[..., :1])
    )

    assert env.rollout(3)["frames"].shape == (2, 3, 2, 2, 1)


# ------------------------------------------------------------------------ bounds of summed rewards


@pytest.mark.parametrize(
    ("transforms", "low", "high"),
    [
        ([RewardClipping(-1.0, 0.5)], -3.0, 1.5),
        ([RewardClipping(0.25, 2.0)], 0.25, 6.0),
        ([SignTransform(["reward"])], -3.0, 3.0),
        ([BinarizeReward()], 0, 3),
    ],
)
def test_summed_rewards_lie_in_the_bounds_of_the_sum(transforms, low, high):
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(*transforms, FrameSkipTransform(3)))

    check_env_specs(env)

    space = env.reward_spec.space
    assert (space.low, space.high) == (low, high)


def test_sums_beyond_a_dtype_are_bounded_by_it_and_unbounded_rewards_stay_so():
    huge = Bounded(-3e38, 3e38, (1,))
    small = Bounded(0, 100, (1,), dtype=torch.int8)
    spec = Composite(a=huge, b=small, c=Unbounded((1,)), d=Binary(1, (1,), dtype=torch.bool))

    summed = FrameSkipTransform(4).transform_reward_spec(spec)

    most = torch.finfo(torch.float32).max
    assert (summed["a"].low, summed["a"].high) == (-most, most)
    assert (summed["b"].low, summed["b"].high) == (0, 127)
    assert isinstance(summed["c"], Unbounded) and isinstance(summed["d"], Unbounded)


def test_steps_of_a_transform_teach_the_statistics_before_it():
    norm = VecNormV2(["count"])
    env = TransformedEnv(Count(50), Compose(norm, NoopResetEnv(3, random=False)))

    env.reset()
    assert norm.kept["count"].count.item() == 1 + 3

    norm.freeze()
    env.reset()
    assert norm.kept["count"].count.item() == 1 + 3


class Counted(Transform):
    """A user's transform that counts its calls in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def _call(self, next_td):
        self.calls += 1
        return next_td


def test_steps_of_a_transform_go_through_those_before_it_and_not_through_copies():
    counted = Counted()
    env = TransformedEnv(Count(50), Compose(counted, FrameSkipTransform(4)))

    env.step(env.rand_action(env.reset()))

    assert counted.calls == 4
