"""Stacks of specs that do not agree, and helpers for whole specs."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from envkit.specs import (
    Bounded,
    Categorical,
    Composite,
    MultiOneHot,
    NonTensor,
    OneHot,
    Stacked,
    StackedComposite,
    Unbounded,
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
    make_composite_from_td,
)


@pytest.fixture
def bounds():
    """Two boxes of one shape."""
    return torch.stack([Bounded(-1, 0, (3,)), Bounded(4, 5, (3,))])


@pytest.fixture
def ragged():
    return torch.stack([Bounded(-1, 0, (2,)), Bounded(4, 5, (3,))])


@pytest.fixture
def envs():
    """Two envs with an observation of different size; the first alone has ``a``."""
    first = Composite(obs=Unbounded((2,)), a=Unbounded((1,)), n=Composite(x=Categorical(2)))
    second = Composite(obs=Unbounded((3,)), n=Composite(x=Categorical(3)))
    return torch.stack([first, second])


# -- leaves ----------------------------------------------------------------------------


def test_equal_leaves_stack_to_an_ordinary_spec():
    spec = Bounded(-1, 1, (3,))

    assert torch.stack([spec, spec.clone()]) == Bounded(-1, 1, (2, 3))
    assert torch.stack([spec, spec], -1).shape == (3, 2)
    assert torch.stack([OneHot(4)] * 3).shape == (3, 4)
    assert torch.stack([NonTensor(example_data="a"), NonTensor(example_data="b")]).shape == (2,)


def test_a_stack_of_unlike_leaves_gives_its_members_back(ragged):
    assert type(ragged) is Stacked
    assert ragged.shape == (2, -1)
    assert ragged[0] == Bounded(-1, 0, (2,))
    assert ragged[-1] == Bounded(4, 5, (3,))
    assert ragged.unbind(0) == ragged.members
    assert ragged[1, :2] == Bounded(4, 5, (2,))
    assert ragged[:1] == Bounded(-1, 0, (1, 2))
    assert ragged[[1, 0]][0] == ragged[1]
    assert ragged[torch.tensor([False, True])].shape == (1, 3)


def test_members_of_one_shape_make_one_tensor(bounds):
    value = bounds.rand((5,))

    assert value.shape == (5, 2, 3)
    assert bounds.is_in(value)
    assert not bounds.is_in(value.flip(1))
    assert bounds.zero().shape == (2, 3)
    assert bounds.project(bounds.zero()).tolist() == [[0] * 3, [4] * 3]
    assert bounds.to_numpy(value).shape == (5, 2, 3)
    assert torch.equal(bounds.encode(value[0].numpy()), value[0])
    assert bounds.space[1].low.tolist() == [4] * 3


def test_members_of_unlike_shapes_make_a_ragged_container(ragged):
    value = ragged.rand()

    assert [part.shape for part in value.unbind()] == [(2,), (3,)]
    assert ragged.is_in(value)
    assert not ragged.is_in(torch.zeros(2, 2))
    assert ragged.is_in(ragged.project(ragged.zero()))
    assert [a.shape for a in ragged.to_numpy(value)] == [(2,), (3,)]
    assert ragged.is_in(ragged.encode([[-1, 0], [4, 4, 4]]))
    with pytest.raises(RuntimeError, match="one for each member"):
        ragged.encode([[0, 0]])
    with pytest.raises(AssertionError, match="in member 1"):
        ragged.assert_is_in(ragged.zero())


@pytest.mark.parametrize(
    "specs",
    [
        [Unbounded(2), Categorical(2, (2,))],
        [Unbounded(2), Bounded(0, 1, (2,))],
        [Unbounded(2), Unbounded(2, dtype=torch.float64)],
        [Unbounded(2), Unbounded((2, 2))],
        [Unbounded(2), Composite()],
        [Composite(), Composite(shape=(2,))],
    ],
)
def test_unlike_kinds_do_not_stack(specs):
    with pytest.raises(RuntimeError, match="one class, dtype, device"):
        torch.stack(specs)


def test_a_stack_follows_shape_operations(bounds, ragged):
    assert bounds.unsqueeze(0).shape == (1, 2, 3)
    assert bounds.unsqueeze(1)[:, 0] == bounds
    assert bounds.unsqueeze(-1).shape == (2, 3, 1)
    assert bounds.unsqueeze(0).squeeze(0) == bounds
    assert bounds.expand(4, 2, 3)[0] == bounds
    assert ragged.expand(4, 2, -1)[0] == ragged
    assert bounds[:, 0][1] == Bounded(4, 5)
    assert bounds[None, 1].shape == (1, 3)
    assert torch.stack([bounds, bounds]).shape == (2, 2, 3)
    assert bounds.make_neg_dim(1).shape == (2, -1)
    assert bounds.cast(torch.float64).to(torch.float32) == bounds


def test_a_stack_of_choices_converts_and_masks():
    spec = torch.stack([Categorical(2), Categorical(3)])
    value = spec.rand()

    assert spec.to_one_hot_spec()[1] == OneHot(3)
    assert [len(v) for v in spec.to_one_hot(value).unbind()] == [2, 3]
    assert spec.cardinality() == 6
    same = torch.stack([Categorical(3), Categorical(3, mask=torch.tensor([True, True, False]))])
    same.update_mask(torch.tensor([[True, False, False], [False, False, True]]))
    assert same.rand().tolist() == [0, 2]
    same.update_mask(None)
    assert same[0] == same[1]


def test_stacks_are_copied_and_compared(bounds, envs):
    for spec in (bounds, envs):
        for twin in (spec.clone(), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
            assert twin == spec
        assert spec.to("cpu")[0] == spec[0].to("cpu")
        assert spec != spec[0]
        assert "stack_dim=0" in repr(spec)


# -- composites ------------------------------------------------------------------------


def test_unlike_composites_show_the_keys_all_members_share(envs):
    assert type(envs) is StackedComposite
    assert isinstance(envs, Composite)
    assert envs.shape == (2,)
    assert list(envs.keys()) == ["obs", "n"]
    assert list(envs.keys(True, True)) == ["obs", ("n", "x")]
    assert envs["obs"].shape == (2, -1)
    assert envs["n", "x"][1] == Categorical(3)
    assert list(envs[0].keys()) == ["obs", "a", "n"]
    assert list(envs[1].keys()) == ["obs", "n"]
    for key in ("a", ("n", "y")):
        with pytest.raises(KeyError):
            envs[key]
    assert envs.get("a", None) is None


def test_equal_composites_stack_to_an_ordinary_composite():
    tree = Composite(a=Unbounded((3,)))

    assert torch.stack([tree, tree.clone()]) == Composite(a=Unbounded((2, 3)), shape=(2,))


def test_unlike_composites_make_lazy_stacks(envs):
    for value in (envs.rand((4,)), envs.zero((4,)), envs.one((4,))):
        assert isinstance(value, LazyStackedTensorDict)
        assert value.batch_size == (4, 2)
        assert value[:, 0]["a"].shape == (4, 1)
        assert value[:, 1]["obs"].shape == (4, 3)


def test_membership_is_decided_member_by_member(envs):
    value = envs.rand((4,))

    assert envs.is_in(value)
    assert envs.is_in(envs.rand())
    assert not envs.is_in(LazyStackedTensorDict(*value.unbind(1)[::-1], stack_dim=1))
    value[:, 1]["n", "x"] = torch.full((4,), 9)
    assert not envs.is_in(value)
    with pytest.raises(AssertionError, match="in member 1: at entry 'n'"):
        envs.assert_is_in(value)
    assert envs.is_in(envs.project(value))
    assert not envs.is_in(TensorDict())
    assert not envs.is_in(3)


def test_stacked_composites_convert_member_by_member(envs):
    raws = envs.to_numpy(envs.rand())

    assert raws["a"][0].shape == (1,) and raws["a"][1] is None
    assert [raw.shape for raw in raws["obs"]] == [(2,), (3,)]
    assert raws["n"]["x"].shape == (2,)
    assert envs.is_in(envs.encode(raws))
    shared = torch.stack([Composite(x=Bounded(0, 1)), Composite(x=Bounded(0, 2))])
    assert shared.encode({"x": np.array([0.5, 1.5])})["x"].tolist() == [0.5, 1.5]
    assert envs.to_one_hot_spec()[1]["n", "x"] == OneHot(3)


def test_stacked_composites_follow_shape_operations(envs):
    assert envs.expand(5, 2)[0] == envs
    assert envs.unsqueeze(-1).shape == (2, 1)
    assert envs.unsqueeze(-1)[1]["obs"].shape == (1, 3)
    assert envs.unbind() == (envs[0], envs[1])
    assert envs[(0,) * envs.ndim] == envs[0]


def test_edits_of_a_stack_reach_its_members(envs):
    envs["n", "y"] = Bounded(torch.tensor([[0.0], [1.0]]), 2)
    envs.set("extra", Composite(z=Unbounded((2, 4)), shape=(2,)))

    assert envs[1]["n", "y"] == Bounded(1, 2, (1,))
    assert envs["extra", "z"] == Unbounded((2, 4))
    del envs["obs"]
    assert list(envs[0].keys()) == ["a", "n", "extra"]
    del envs["a"]
    assert list(envs[0].keys()) == ["n", "extra"]
    with pytest.raises(KeyError):
        del envs["a"]


def test_a_member_taken_out_of_a_stack_is_the_one_in_it(bounds, envs):
    envs[0]["late"] = Unbounded((2,))
    envs[1]["late"] = Unbounded((2,))

    assert envs["late"] == Unbounded((2, 2))
    assert all(spec[-1] is spec.members[-1] is spec.unbind()[-1] for spec in (bounds, envs))
    assert bounds.dim == bounds.stack_dim == 0
    assert len(bounds) == len(envs) == 2
    assert len(torch.stack([Bounded(0, i + 1, (3,)) for i in range(2)], 1)) == 3


def test_a_lock_on_a_stack_reaches_its_members(envs):
    members = envs.members
    envs.lock_()

    for edit in (
        lambda: envs.set("x", None),
        lambda: envs["n"].set("y", None),
        lambda: members[0].set("x", None),
        lambda: envs.pop("obs"),
    ):
        with pytest.raises(RuntimeError, match="locked"):
            edit()
    assert not envs.clone().is_locked
    envs.unlock_()
    envs.set("x", None)
    assert envs["x"] is None


def test_keys_of_unlike_leaf_kinds_can_be_listed():
    stack = torch.stack([Composite(action=Categorical(2)), Composite(action=Bounded(-1, 1))])

    assert list(stack.keys(True, True)) == ["action"]
    assert stack.is_in(stack.rand())
    with pytest.raises(RuntimeError, match=r"stack\[i\]\[key\]"):
        stack["action"]


def test_a_key_with_a_spec_in_some_members_only_is_not_stacked():
    stack = torch.stack([Composite(a=None, b=Unbounded()), Composite(a=Unbounded(), b=Unbounded())])

    assert stack["b"].shape == (2, 1)
    with pytest.raises(RuntimeError, match="'a' has no spec in member 0"):
        stack["a"]


def test_a_stack_with_exclusive_leaves_is_not_empty():
    stack = torch.stack([Composite(a=Unbounded()), Composite(b=Unbounded())])

    assert list(stack.keys()) == []
    assert not stack.is_empty()
    assert torch.stack([Composite(a=Composite()), Composite(b=Composite())]).is_empty(recurse=True)


def test_stacks_of_stacks_and_ordinary_specs_stack():
    unlike = torch.stack([Bounded(0, 1, (2,)), Bounded(0, 2, (2,))])

    stack = torch.stack([unlike, Bounded(0, 1, (2, 2))])

    assert stack.shape == (2, 2, 2)
    assert stack.is_in(stack.rand((3,)))
    assert stack[0] == unlike


def test_objects_of_unlike_batches_make_a_stack_of_objects():
    stack = torch.stack([NonTensor((2,), example_data="a"), NonTensor((3,), example_data="b")])

    assert stack.is_in(stack.rand())
    assert stack.to_numpy(stack.encode(["x", "y"])) == ["x", "y"]


# -- helpers ---------------------------------------------------------------------------


def test_consolidation_gives_all_members_the_same_keys(envs):
    whole = consolidate_spec(envs)

    assert not check_no_exclusive_keys(envs)
    assert check_no_exclusive_keys(whole)
    assert whole[1]["a"].shape == (0,)
    assert whole["a"].shape == (2, -1)
    assert whole.is_in(whole.rand())
    assert list(envs[1].keys()) == ["obs", "n"]


def test_a_placeholder_is_empty_where_the_size_is_known_and_dynamic_where_it_is_not():
    first = Composite(fixed=Unbounded((3, 2)), dynamic=Unbounded((-1, 2)), number=Categorical(2))
    whole = consolidate_spec(torch.stack([first, Composite(none=None)]))

    assert whole[1]["fixed"].shape == (0, 0)
    assert whole[1]["dynamic"].shape == (-1, 0)
    assert whole[1]["number"] == Categorical(2)
    assert whole[0]["none"] is None
    assert whole.is_in(whole.rand())


def test_placeholders_follow_the_batch_of_their_member_and_the_shape_of_nested_composites():
    agents = Composite(x=Unbounded((2, 5, 4)), shape=(2, 5))
    ragged = torch.stack([Unbounded((2, 3)), Unbounded((2, 4))], 1)
    first = Composite(agents=agents, ragged=ragged, shape=(2,))

    whole = consolidate_spec(torch.stack([first, Composite(shape=(2,))], 1))

    assert whole[:, 1]["agents"].shape == (2, 0)
    assert whole[:, 1]["agents", "x"].shape == (2, 0, 0)
    assert whole[:, 1]["ragged"].shape == (2, 2, 0)
    assert whole.is_in(whole.rand())


def test_consolidation_goes_into_nested_composites():
    stack = torch.stack(
        [
            Composite(n=Composite(x=Unbounded((2, 3)), shape=(2,)), shape=(2,)),
            Composite(n=Composite(y=MultiOneHot([2, 3], (2, 4, 5)), shape=(2,)), shape=(2,)),
        ]
    )
    tree = Composite(deep=stack, shape=(2,))

    whole = consolidate_spec(tree)

    assert not check_no_exclusive_keys(tree)
    assert check_no_exclusive_keys(whole)
    assert whole["deep"][1]["n", "x"].shape == (2, 0)
    assert check_no_exclusive_keys(tree, recurse=False)
    assert whole["deep"][0]["n", "y"].shape == (2, 0, 5)


def test_lazy_specs_are_found_at_any_depth(envs, bounds):
    assert contains_lazy_spec(envs)
    assert contains_lazy_spec(bounds)
    assert contains_lazy_spec(Composite(a=Composite(b=bounds)))
    assert not contains_lazy_spec(Composite(a=Composite(b=Unbounded()), c=None))


def test_a_spec_is_read_off_a_tensordict():
    td = TensorDict(
        a=torch.zeros(4, 3),
        b=torch.zeros(4, dtype=torch.bool),
        n=TensorDict(c=torch.zeros(4, 2, dtype=torch.int64), batch_size=[4]),
        text="hello",
        batch_size=[4],
    )

    spec = make_composite_from_td(td)

    assert spec["a"] == Unbounded((4, 3))
    assert spec["b"] == Unbounded((4,), dtype=torch.bool)
    assert spec["n"] == Composite(c=Unbounded((4, 2), dtype=torch.int64), shape=(4,))
    assert spec["text"] == NonTensor((4,), example_data="hello")
    assert spec.is_in(td)
    assert make_composite_from_td(td, dynamic_shape=True)["a"].shape == (4, -1)


def test_scalars_read_off_a_tensordict_get_an_axis():
    td = TensorDict(a=torch.zeros(()))

    assert make_composite_from_td(td)["a"].shape == (1,)
    assert make_composite_from_td(td, unsqueeze_null_shapes=False)["a"].shape == ()


def test_a_lazy_stack_is_read_as_a_stack_of_specs(envs):
    spec = make_composite_from_td(envs.rand())

    assert type(spec) is StackedComposite
    assert list(spec[0].keys()) == ["obs", "a", "n"]


@tensorclass
class Pose:
    position: torch.Tensor
    frame: str = "world"


@tensorclass
class Arm:
    pose: Pose
    torque: torch.Tensor


def test_a_spec_read_off_a_tensorclass_makes_it_again():
    pose = Pose(position=torch.zeros(4, 3), batch_size=[4])
    arm = Arm(pose=pose, torque=torch.zeros(4), batch_size=[4])

    spec = make_composite_from_td(arm)

    assert (spec.data_cls, spec["pose"].data_cls) == (Arm, Pose)
    assert spec["pose", "frame"] == NonTensor((4,), example_data="world")
    assert spec.is_in(arm) and not spec.is_in(arm.to_tensordict())
    assert isinstance(spec.rand((2,)).pose, Pose)
    assert spec.project(arm) is arm
    assert spec != make_composite_from_td(arm.to_tensordict())
    mixed = make_composite_from_td(TensorDict(arm=arm, batch_size=[4]))
    assert (mixed.data_cls, mixed["arm"].data_cls) == (None, Arm)


def test_a_stack_of_specs_of_tensorclasses_makes_stacks_of_them():
    stack = torch.stack(
        [make_composite_from_td(Pose(position=torch.zeros(n), batch_size=[])) for n in (2, 3)]
    )

    value = stack.rand()

    assert stack.is_in(value)
    assert [type(part) for part in value.unbind(0)] == [Pose, Pose]


def test_placeholders_keep_the_sizes_on_which_unlike_members_agree():
    shapes = {"a": (2, 3), "b": (2, 4)}
    members = [Composite(x=Unbounded(shape)) for shape in shapes.values()]

    unlike = consolidate_spec(torch.stack([*members, Composite(y=Unbounded(1))]))
    alike = consolidate_spec(torch.stack([members[0], members[0], Composite(y=Unbounded(1))]))

    assert unlike[2]["x"].shape == (2, 0)
    assert alike[2]["x"].shape == (0, 0)
    rows = torch.stack([Unbounded((3, 2)), Unbounded((4, 2))])
    pair = torch.stack([Composite(x=rows, shape=(2,)), Composite(y=Unbounded((2, 1)), shape=(2,))])
    assert consolidate_spec(pair)[1]["x"].shape == (2, 0, 2)


def test_consolidation_goes_no_deeper_than_asked_for():
    pair = torch.stack([Composite(a=Unbounded(1)), Composite(b=Unbounded(1))])
    entry = Composite(pair=pair, shape=(2,))
    nested = torch.stack(
        [pair, torch.stack([Composite(a=Unbounded(1)), Composite(c=Unbounded(1))])]
    )

    shallow = consolidate_spec(entry, recurse_through_entries=False)
    flat = consolidate_spec(nested, recurse_through_stack=False)

    assert not check_no_exclusive_keys(shallow) and check_no_exclusive_keys(consolidate_spec(entry))
    assert flat == nested
    assert list(consolidate_spec(nested)[1][0].keys()) == ["a", "c", "b"]


def test_a_placeholder_of_a_stack_cuts_only_the_axes_along_which_its_members_differ():
    uneven = torch.stack([Unbounded((2, 5, n, 7)) for n in (6, 7, 8)], 1)
    even = torch.stack([Bounded(0, n, (2, 5)) for n in (1, 2)], 1)
    envs = torch.stack([Composite(x=uneven, y=even, shape=(2,)), Composite(shape=(2,))])

    whole = consolidate_spec(envs)

    assert whole["x"].shape == (2, 2, 3, 5, -1, 7)
    assert whole[1]["x"].shape == (2, 3, 5, 0, 7)
    assert whole[1]["y"].shape == (2, 2, 0)
