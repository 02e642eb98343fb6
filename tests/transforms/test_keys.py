"""Entries renamed, kept, left out, joined, and viewed in other shapes.

Checklist rows: E22, T06, T07, T08, T12 (CallableTransform: test_transformed_env.py).
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from envkit import (
    Bounded,
    BraxEnv,
    Categorical,
    CatTensors,
    Compose,
    Composite,
    EnvBase,
    ExcludeTransform,
    FlattenObservation,
    GymEnv,
    OneHot,
    PermuteTransform,
    RenameTransform,
    SelectTransform,
    SerialEnv,
    SqueezeTransform,
    Stack,
    StepCounter,
    TrajCounter,
    TransformedEnv,
    Unbounded,
    UnsqueezeTransform,
    check_env_specs,
)
from envkit.errors import (
    ArgumentError,
    KeyCollisionError,
    MissingKeyError,
    NoParentError,
    SpecAxisError,
    SpecError,
)
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.policies import Replay
from tests.zoo.transform_envs import TwoTeams

NONSTOP = {"break_when_any_done": False}
ALL = (True, True)


class Parts(EnvBase):
    """Shows a (1,) = 1, b (2,) = 2 and a 2 by 2 ``board``."""

    def __init__(self, b_dtype=torch.float32):
        super().__init__()
        self.b_dtype = b_dtype
        self.observation_spec = Composite(
            a=Unbounded((1,)), b=Unbounded((2,), dtype=b_dtype), board=Bounded(0.0, 1.0, (2, 2))
        )
        self.action_spec = Categorical(2, shape=(1,))

    def _out(self):
        b = torch.full((2,), 2, dtype=self.b_dtype)
        return TensorDict({"a": torch.ones(1), "b": b, "board": torch.eye(2)})

    def _reset(self, td, **kwargs):
        return self._out()

    def _step(self, td):
        return self._out().set("reward", torch.ones(1)).set("terminated", torch.tensor([False]))

    def _set_seed(self, seed):
        pass


def keys(td) -> list:
    return sorted(map(str, td.keys(*ALL)))


# ------------------------------------------------------------------------------------------- rename


def test_a_reward_can_be_renamed_into_a_node():
    env = TransformedEnv(Count(3), RenameTransform(["reward"], [("nested", "reward")]))

    assert env.reward_key == ("nested", "reward")
    assert env.reward_keys == [("nested", "reward")]
    assert list(env.full_reward_spec.keys(*ALL)) == [("nested", "reward")]
    assert env.rollout(2)["next", "nested", "reward"].flatten().tolist() == [1, 1]
    check_env_specs(env)


def test_an_action_can_be_renamed():
    env = TransformedEnv(Count(3), RenameTransform([], [], ["action"], ["act"]))

    assert env.action_key == "act"
    assert "action" not in env.rollout(2).keys(*ALL)
    check_env_specs(env)
    with pytest.raises(MissingKeyError, match="'act'"):
        env.step(env.reset().set("action", torch.tensor([1])))


def test_what_the_env_reads_back_is_renamed_on_both_sides():
    both = RenameTransform(["count"], [("n", "c")], ["count"], [("n", "c")])
    env = TransformedEnv(StatelessCount(5), both)

    data = env.rollout(9, **NONSTOP)

    assert data["n", "c"].flatten().tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert env.state_keys == [("n", "c")]
    check_env_specs(env)


def test_a_node_can_be_renamed():  # as the reference's guide does with BraxEnv
    both = RenameTransform(["state"], ["s"], ["state"], ["s"])
    env = TransformedEnv(BraxEnv("fast", device="cpu", batch_size=[2], episode_length=3), both)

    data = env.rollout(4, **NONSTOP)

    assert {"s"} <= set(data.keys()) and "state" not in data.keys()
    check_env_specs(env)


def test_an_emptied_node_goes():
    out, back = RenameTransform(["reward"], [("n", "r")]), RenameTransform([("n", "r")], ["reward"])
    env = TransformedEnv(Count(3), Compose(out, back))

    assert list(env.full_reward_spec.keys(True)) == ["reward"]
    assert "n" not in env.rollout(2)["next"].keys()


@pytest.mark.parametrize("names", [["done"], ["done", "terminated"]])
@pytest.mark.parametrize("stop", [NONSTOP, {"break_when_all_done": True}])
def test_done_flags_can_be_renamed_and_still_govern_resets(names, stop):
    bare = SerialEnv(2, [partial(Count, 3), partial(Count, 2)])
    renamed = RenameTransform(names, [("n", name) for name in names])
    env = TransformedEnv(SerialEnv(2, [partial(Count, 3), partial(Count, 2)]), renamed)

    data, expected = env.rollout(6, **stop), bare.rollout(6, **stop)

    assert data["next", "count"].equal(expected["next", "count"])
    assert data["next", "n", "done"].equal(expected["next", "done"])
    check_env_specs(env)


def test_a_partial_reset_by_a_renamed_level_reaches_the_env():
    renamed = RenameTransform(["done", "terminated"], [("n", "done"), ("n", "terminated")])
    env = TransformedEnv(SerialEnv(2, partial(Count, 9)), renamed)
    root = env.step_mdp(env.rand_step(env.reset()))

    fresh = env.reset(root.set(("n", "_reset"), torch.tensor([[True], [False]])))

    assert fresh["count"].flatten().tolist() == [0, 1]
    assert env.rand_step(fresh)["next", "count"].flatten().tolist() == [1, 2]


def test_groups_can_be_renamed_with_all_they_have():
    both = RenameTransform(["a"], ["left"], ["a"], ["left"])
    env = TransformedEnv(TwoTeams(), both)

    data = env.rollout(4, break_when_any_done=False)

    assert ("left", "done") in env.done_keys and ("left", "reward") in env.reward_keys
    assert data["left", "count"].flatten().tolist() == [0, 1, 0, 1]
    check_env_specs(env)


def test_a_copy_leaves_the_entry_under_its_own_name():
    names = ["count", "reward", "done"]
    copied = RenameTransform(names, [("n", name) for name in names], create_copy=True)
    env = TransformedEnv(Count(3), copied)

    following = env.rollout(2)["next"]

    assert all(following[name].equal(following["n", name]) for name in names)
    check_env_specs(env)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((["a"], ["b", "c"]), "1 in_keys.*2 out_keys"),
        ((["a", "b"], ["b", "c"]), r"\['b'\] are in in_keys and in out_keys"),
        (([], [], ["a"], ["b", "c"]), "in_keys_inv"),
        (([], [], ["a"], ["a"]), "in_keys_inv and in out_keys_inv"),
    ],
)
def test_renaming_checks_its_lists(arguments, error):
    with pytest.raises(ValueError, match=error):
        RenameTransform(*arguments)


def test_renaming_checks_that_names_exist_and_are_free():
    with pytest.raises(MissingKeyError, match=r"\['cuont'\].*'count'"):
        _ = TransformedEnv(Count(3), RenameTransform(["cuont"], ["c"])).observation_spec
    with pytest.raises(MissingKeyError, match="'act'"):
        _ = TransformedEnv(Count(3), RenameTransform([], [], ["act"], ["a"])).action_spec
    with pytest.raises(KeyCollisionError, match=r"'reward'.*reward spec"):
        _ = TransformedEnv(Count(3), RenameTransform(["count"], ["reward"])).observation_spec


def test_renaming_works_on_data():
    data = TensorDict({"a": torch.ones(3), "n": {"b": torch.zeros(3)}}, [3])

    out = RenameTransform(["a", ("n", "b")], [("n", "a"), "b"])(data)

    assert keys(out) == ["('n', 'a')", "b"]
    back = RenameTransform([], [], ["a"], [("n", "a")]).inv(out)
    assert keys(back) == ["a", "b"] and keys(out) == ["('n', 'a')", "b"]


# -------------------------------------------------------------------------------- select and exclude


def test_select_keeps_rewards_flags_and_the_named_observations():
    env = TransformedEnv(Parts(), SelectTransform("a"))

    data = env.rollout(2)

    assert set(data.exclude("next").keys()) == {"a", "action", "done", "terminated"}
    assert set(data["next"].keys()) == {"a", "reward", "done", "terminated"}
    check_env_specs(env)


def test_select_keeps_what_the_env_reads_back():
    env = TransformedEnv(StatelessCount(5), Compose(StepCounter(), SelectTransform()))

    data = env.rollout(3)

    assert {"count", "step_count"} <= set(data.keys())
    assert data["next", "step_count"].flatten().tolist() == [1, 2, 3]
    check_env_specs(env)


def test_select_can_leave_rewards_and_flags_out():
    chosen = SelectTransform("a", "done", keep_rewards=False, keep_dones=False)
    env = TransformedEnv(Parts(), chosen)

    assert keys(env.rollout(2)["next"]) == ["a", "done"]
    check_env_specs(env)
    with pytest.raises(ArgumentError, match="no done flag"):
        _ = TransformedEnv(Parts(), SelectTransform(keep_dones=False)).done_spec


def test_select_keeps_whole_nodes():
    env = TransformedEnv(
        Parts(),
        Compose(RenameTransform(["a", "b"], [("n", "a"), ("n", "b")]), SelectTransform("n")),
    )

    assert {("n", "a"), ("n", "b")} == set(env.observation_keys)
    check_env_specs(env)


def test_exclude_leaves_out_what_is_named():
    env = TransformedEnv(Parts(), ExcludeTransform("a", "reward", "terminated"))

    data = env.rollout(2)

    assert set(data.keys()) == {"b", "board", "action", "done", "next"}
    assert env.reward_keys == []
    check_env_specs(env)


def test_exclude_refuses_what_the_env_needs():
    with pytest.raises(MissingKeyError, match="'cuont'"):
        _ = TransformedEnv(Count(3), ExcludeTransform("cuont")).observation_spec
    with pytest.raises(ArgumentError, match="no done flag"):
        _ = TransformedEnv(Count(3), ExcludeTransform("done", "terminated")).done_spec


def copied_action():
    return TransformedEnv(
        GymEnv("CartPole-v1"), RenameTransform([], [], ["action"], ["act"], create_copy=True)
    )


def test_a_copied_action_is_recorded_as_it_acted():
    env = copied_action()
    check_env_specs(env)

    data = env.rollout(12, **NONSTOP)

    assert env.action_keys == ["act"]
    assert torch.equal(data["action"], data["act"])
    assert len(data["act"].unique(dim=0)) == 2


def test_an_action_given_under_its_old_name_is_no_action_beside_a_copy():
    env = copied_action()
    td = env.reset().set("action", env.base_env.action_spec.rand())

    with pytest.raises(MissingKeyError, match="'act'"):
        env.step(td)


def test_a_pool_of_envs_that_copy_actions_records_what_it_was_given():
    env = SerialEnv(2, copied_action)
    check_env_specs(env)

    assert "action" not in env.rollout(3).keys()


DONE_FLAGS = {
    "renamed": (lambda: RenameTransform(["done"], ["ended"]), {"ended", "terminated", "truncated"}),
    "moved": (
        lambda: RenameTransform(["done", "truncated"], ["ended", ("far", "cut")]),
        {"ended", "terminated", ("far", "cut")},
    ),
    "without done": (lambda: ExcludeTransform("done"), {"terminated", "truncated"}),
    "done alone": (lambda: ExcludeTransform("terminated", "truncated"), {"done"}),
}


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("name", DONE_FLAGS)
def test_rows_whose_done_flags_have_other_names_end_as_they_do_alone(name, buffers):
    make, flags = DONE_FLAGS[name]
    actions = torch.arange(60) % 2  # falls after some 30 steps

    def behind(transform):
        base = GymEnv("CartPole-v1", categorical_action_encoding=True)
        return TransformedEnv(base, transform)

    def run(env):
        env.set_seed(1)
        rows = actions.expand(*env.batch_size, 60)
        return env.rollout(60, Replay(rows), **NONSTOP)

    pool = SerialEnv(2, lambda: behind(make()), use_buffers=buffers)
    plain = run(SerialEnv(2, lambda: behind(None)))

    data = run(pool)

    assert set(pool.done_keys) == flags
    assert plain["next", "done"].any()
    assert torch.equal(data["observation"], plain["observation"])
    for key in flags - {("far", "cut")}:
        other = "done" if key == "ended" else key
        assert torch.equal(data["next", key], plain["next", other])


def test_exclude_works_on_the_way_in():
    data = TensorDict({"a": torch.ones(3), "b": torch.zeros(3)}, [3])

    inverse = ExcludeTransform("a", inverse=True)

    assert keys(inverse.inv(data)) == ["b"] and keys(inverse(data)) == ["a", "b"]
    assert keys(ExcludeTransform("a")(data)) == ["b"]
    env = TransformedEnv(Count(3), ExcludeTransform("count", inverse=True))
    check_env_specs(env)


# --------------------------------------------------------------------------------------------- join


def test_tensors_are_joined_in_the_order_of_their_names():
    env = TransformedEnv(Parts(), CatTensors(["b", "a"], "obs"))

    assert env.reset()["obs"].tolist() == [1, 2, 2]
    assert set(env.observation_keys) == {"obs", "board"}
    assert env.observation_spec["obs"] == Unbounded((3,))
    check_env_specs(env)


def test_tensors_are_joined_in_the_given_order_and_may_stay():
    env = TransformedEnv(Parts(), CatTensors(["b", "a"], "obs", sort=False, del_keys=False))

    td = env.reset()

    assert td["obs"].tolist() == [2, 2, 1]
    assert {"a", "b"} <= set(td.keys())


def test_all_entries_with_one_axis_are_joined_but_for_states():
    env = TransformedEnv(Parts(), Compose(StepCounter(), CatTensors()))

    assert env.reset()["observation_vector"].tolist() == [1, 2, 2]
    assert set(env.observation_keys) == {"observation_vector", "board", "step_count"}
    check_env_specs(env)


def test_joining_does_not_take_from_the_env_what_it_reads():
    env = TransformedEnv(StatelessCount(5), CatTensors(["count"], "obs"))

    data = env.rollout(3)

    assert data["obs"].equal(data["count"])
    check_env_specs(env)


def test_missing_axes_are_inserted():
    joined = CatTensors(["a", "c"], "out", dim=-2, unsqueeze_if_oor=True)
    data = TensorDict({"a": torch.ones(5, 2), "c": torch.zeros(5, 3, 2)}, [5])

    assert joined(data)["out"].shape == (5, 4, 2)


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_dtypes_are_promoted_when_joined(order):
    env = TransformedEnv(Parts(torch.int64), CatTensors(order, "obs", sort=False))

    assert env.observation_spec["obs"].dtype == env.reset()["obs"].dtype == torch.float32
    assert sorted(env.reset()["obs"].tolist()) == [1.0, 2.0, 2.0]
    check_env_specs(env)


def test_joining_says_what_is_wrong():
    with pytest.raises(ArgumentError, match="without in_keys must be -1"):
        CatTensors(dim=-2)
    with pytest.raises(ArgumentError, match="dim is 0"):
        CatTensors(["a"], dim=0)
    with pytest.raises(SpecError, match=r"'a': \(1,\).*'board': \(2, 2\)"):
        _ = TransformedEnv(Parts(), CatTensors(["a", "board"])).observation_spec
    with pytest.raises(SpecError, match="have no axis -2 besides the batch"):
        _ = TransformedEnv(Parts(), CatTensors(["a", "b"], dim=-2)).observation_spec
    with pytest.raises(MissingKeyError, match=r"\['c'\].*'a', 'b', 'board'"):
        _ = TransformedEnv(Parts(), CatTensors(["a", "c"])).observation_spec
    with pytest.raises(MissingKeyError, match=r"\['c'\], but the data has \['a'\]"):
        CatTensors(["a", "c"])(TensorDict({"a": torch.ones(1)}))
    with pytest.raises(KeyCollisionError, match="'board'"):
        _ = TransformedEnv(Parts(), CatTensors(["a", "b"], "board")).observation_spec
    with pytest.raises(NoParentError, match="reads them from an environment"):
        CatTensors()(TensorDict({"a": torch.ones(1)}))
    with pytest.raises(MissingKeyError, match="reads back"):
        _ = TransformedEnv(StatelessCount(3), CatTensors()).observation_spec


# ------------------------------------------------------------------------------------------- shapes


def test_shapes_of_observations_rewards_and_actions_change():
    env = TransformedEnv(
        GymEnv("Pendulum-v1"),
        Compose(
            UnsqueezeTransform(-1, in_keys=["observation"], in_keys_inv=["action"]),
            SqueezeTransform(-1, in_keys=["reward"]),
        ),
    )

    data = env.rollout(2)

    assert data["observation"].shape == (2, 3, 1)
    assert data["action"].shape == (2, 1, 1)
    assert data["next", "reward"].shape == (2,)
    assert env.observation_spec["observation"].high[2, 0] == 8
    check_env_specs(env)


def test_a_squeezed_action_is_restored_on_the_way_in():
    env = TransformedEnv(GymEnv("Pendulum-v1"), SqueezeTransform(-1, in_keys_inv=["action"]))

    assert env.action_spec.shape == ()
    check_env_specs(env)


@pytest.mark.parametrize("batch", [(), (4,), (4, 3)])
def test_flattening_and_permuting_leave_the_batch_alone(batch):
    data = TensorDict({"pixels": torch.arange(24).reshape(2, 3, 4).expand(*batch, 2, 3, 4)}, batch)

    flat = FlattenObservation(-3, -2)(data.clone())["pixels"]
    turned = PermuteTransform((-1, -3, -2), in_keys=["pixels"])(data.clone())["pixels"]

    assert flat.shape == (*batch, 6, 4)
    assert turned.equal(data["pixels"].movedim(-1, -3))


@settings(max_examples=20)
@given(
    dims=st.permutations([-3, -2, -1]),
    batch=st.lists(st.integers(1, 3), max_size=2),
)
def test_permuting_in_undoes_permuting_out(dims, batch):
    transform = PermuteTransform(dims, in_keys=["x"], in_keys_inv=["x"])
    data = TensorDict({"x": torch.rand(*batch, 2, 3, 4)}, batch)

    there = transform(data.clone())

    assert transform.inv(there)["x"].equal(data["x"])


def test_positive_axes_count_from_the_first_after_the_batch():
    data = TensorDict({"pixels": torch.zeros(5, 2, 3, 4)}, [5])

    flat = FlattenObservation(0, 1, allow_positive_dim=True)
    inserted = UnsqueezeTransform(0, allow_positive_dim=True, in_keys=["pixels"])

    assert flat(data.clone())["pixels"].shape == (5, 6, 4)
    assert inserted(data.clone())["pixels"].shape == (5, 1, 2, 3, 4)
    env = TransformedEnv(
        SerialEnv(2, Parts), FlattenObservation(0, 1, ["board"], ["flat"], allow_positive_dim=True)
    )
    assert env.observation_spec["flat"].shape == (2, 4)
    check_env_specs(env)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FlattenObservation(0, -1),
        lambda: FlattenObservation(-2, 1),
        lambda: UnsqueezeTransform(0),
        lambda: SqueezeTransform(1),
        lambda: PermuteTransform((0, 1)),
        lambda: PermuteTransform((-1, -3)),
        lambda: UnsqueezeTransform(-1, in_keys=["a"], out_keys=["b", "c"]),
    ],
)
def test_axes_and_keys_are_checked(make):
    with pytest.raises(ArgumentError):
        make()


def test_a_shape_that_does_not_fit_is_named():
    with pytest.raises(SpecAxisError, match=r"shape \(1,\).*0 axes are the batch"):
        _ = TransformedEnv(Parts(), FlattenObservation(-3, -1, ["a"])).observation_spec
    with pytest.raises(MissingKeyError, match=r"reads \['pixels'\], but the env has"):
        _ = TransformedEnv(Parts(), FlattenObservation(-2, -1)).observation_spec
    flip = PermuteTransform((-1,), in_keys_inv=["action"])
    env = TransformedEnv(GymEnv("CartPole-v1"), flip)
    assert isinstance(env.base_env.action_spec, OneHot)
    with pytest.raises(SpecAxisError, match="spells a choice"):
        _ = env.action_spec


def test_no_keys_rename_nothing():
    env = TransformedEnv(Count(3), RenameTransform(in_keys=(), out_keys=()))

    assert env.rollout(2).keys() == Count(3).rollout(2).keys()
    assert RenameTransform((), [])(TensorDict({"a": 1}))["a"] == 1


# ------------------------------------------------------------------------- numbers beside a copied flag


def test_trajectories_are_numbered_beside_a_copy_of_the_done_flag():
    env = TransformedEnv(
        SerialEnv(2, [lambda: Count(2), lambda: Count(3)]),
        Compose(
            RenameTransform(["done"], [("far", "done")], create_copy=True),
            TrajCounter(out_key=("far", "number")),
        ),
    )
    check_env_specs(env)
    env.transform[1].next_number.zero_()

    data = env.rollout(6, **NONSTOP)

    numbers = data["far", "number"].squeeze(-1).tolist()
    assert numbers[0] == [0, 0, 2, 2, 4, 4] or numbers[0] == [0, 0, 2, 2, 3, 3]
    assert len(set(numbers[0]) & set(numbers[1])) == 0
    assert data["next", "far", "done"].squeeze(-1).tolist()[1] == [False, False, True] * 2


def test_numbers_where_no_flag_stands_are_refused():
    with pytest.raises(MissingKeyError, match=r"no done flags at 'near'"):
        _ = TransformedEnv(Count(2), TrajCounter(out_key=("near", "number"))).observation_spec


@pytest.mark.parametrize("is_pool", [False, True])
def test_a_reset_takes_data_that_holds_a_stack(is_pool):
    def make():
        return TransformedEnv(Count(5), CatTensors(["count"], "same", del_keys=False))

    env = TransformedEnv(SerialEnv(2, make) if is_pool else make(), Stack(["count", "same"], "two"))
    root = env.step_mdp(env.rollout(2)[..., -1])

    fresh = env.reset(root.clone())
    mask = torch.ones(*env.batch_size, 1, dtype=torch.bool)
    again = env.reset(root.set("_reset", mask))

    assert fresh["two"].shape == (*env.batch_size, 1, 2)
    assert not fresh["two"].any() and not again["two"].any()
