"""Composite specs: trees of specs and the TensorDicts they describe."""

import copy
import gc
import pickle
import re

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from envkit.specs import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    NonTensor,
    OneHot,
    Unbounded,
)


@pytest.fixture
def tree():
    return Composite(
        pos=Unbounded((4, 3)),
        body=Composite(leg=Categorical(3, shape=(4,)), shape=(4,)),
        shape=(4,),
    )


# -- building --------------------------------------------------------------------------


def test_children_are_read_at_any_depth(tree):
    assert tree["pos"] == Unbounded((4, 3))
    assert tree["body", "leg"] is tree["body"]["leg"]
    assert tree.get(("body", "arm"), None) is None
    assert tree.get("pos").shape == (4, 3)
    for key in ("arm", ("body", "arm"), ("pos", "x")):
        with pytest.raises(KeyError, match="Use one of these"):
            tree[key]


def test_children_can_be_set_and_deleted_at_any_depth(tree):
    tree.set("vel", Unbounded((4, 2)))
    tree["body", "arm"] = Unbounded((4, 1))
    tree["new", "deep", "leaf"] = Unbounded((4,))
    del tree["pos"]
    del tree["body", "leg"]

    assert list(tree.keys(True, True)) == [("body", "arm"), "vel", ("new", "deep", "leaf")]
    assert tree["new"].shape == tree["new", "deep"].shape == (4,)
    for key in ("pos", ("body", "leg"), ("vel", "x")):
        with pytest.raises(KeyError):
            del tree[key]


def test_dicts_become_composites_and_tuples_nested_entries():
    tree = Composite({"a": {"b": Unbounded((2,))}, ("c", "d"): Unbounded((2,))}, shape=(2,))

    assert tree["a"] == Composite(b=Unbounded((2,)), shape=(2,))
    assert tree["c", "d"].shape == (2,)
    assert Composite(tree, shape=(2,)) == tree
    assert Composite(batch_size=[2]).shape == (2,)


def test_a_child_must_begin_with_the_shape_of_its_parent(tree):
    with pytest.raises(ValueError, match=r"shape \(3,\).*expand\(4, 3\)"):
        tree["bad"] = Unbounded((3,))
    with pytest.raises(ValueError, match="shape"):
        Composite(a=Composite(shape=(3,)), shape=(4,))
    with pytest.raises(ValueError, match="shape"):
        Composite(a=OneHot(4), shape=(4,))  # the encoding axis is no batch axis
    with pytest.raises(ValueError, match="two names"):
        Composite(shape=(2,), batch_size=(3,))


def test_only_specs_dicts_and_none_can_be_children(tree):
    with pytest.raises(TypeError, match="of type int"):
        tree["bad"] = 3
    with pytest.raises(KeyError, match="leads through 'pos'"):
        tree["pos", "x"] = Unbounded((4,))
    with pytest.raises(ValueError, match="a key is 3, but must be"):
        tree.set(3, Unbounded((4,)))


def test_a_key_may_be_there_without_a_spec(tree):
    tree["none"] = None

    assert "none" in tree.keys()
    assert tree["none"] is None
    assert "none" not in tree.rand()
    assert tree.is_in(tree.zero())
    assert tree[0]["none"] is None
    tree["none", "leaf"] = Unbounded((4,))
    assert tree["none", "leaf"].shape == (4,)


def test_update_merges_and_pop_removes(tree):
    tree.update({"body": {"arm": Unbounded((4, 1))}, "pos": Unbounded((4, 5))})

    assert set(tree["body"].keys()) == {"leg", "arm"}
    assert tree["pos"].shape == (4, 5)
    assert tree.pop(("body", "arm")) == Unbounded((4, 1))
    assert tree.pop("arm", 7) == 7
    with pytest.raises(KeyError):
        tree.pop("arm")
    assert list(tree["body"].keys()) == ["leg"]


def test_separates_removes_keys_into_a_new_composite(tree):
    separated = tree.separates(("body", "leg"), "unknown")

    assert list(separated.keys(True, True)) == [("body", "leg")]
    assert separated.shape == (4,)
    assert list(tree.keys(True, True)) == ["pos"]


def test_separates_takes_keys_without_a_spec_and_defaults(tree):
    tree["none"] = None

    separated = tree.separates("none", "unknown", default=Unbounded((4, 1)))

    assert dict(separated.items()) == {"none": None, "unknown": Unbounded((4, 1))}
    assert "none" not in tree


def test_an_empty_composite_keeps_shape_and_device(tree):
    empty = tree.to("cpu").empty()

    assert empty.is_empty()
    assert empty.shape == (4,)
    assert empty.device == torch.device("cpu")
    assert not tree.is_empty()
    nested = Composite(a=Composite())
    assert not nested.is_empty()
    assert nested.is_empty(recurse=True)
    assert bool(empty)


# -- iteration -------------------------------------------------------------------------


def test_keys_come_in_insertion_order_and_nested_ones_before_their_parent(tree):
    assert list(tree.keys()) == ["pos", "body"]
    assert list(tree.keys(True)) == ["pos", ("body", "leg"), "body"]
    assert list(tree.keys(True, True)) == ["pos", ("body", "leg")]
    assert list(tree.keys(leaves_only=True)) == ["pos"]
    assert [key for key, _ in tree.items(True, True)] == ["pos", ("body", "leg")]
    assert list(tree.values(True)) == [tree["pos"], tree["body", "leg"], tree["body"]]
    assert dict(tree.items()) == {"pos": tree["pos"], "body": tree["body"]}
    assert list(tree) == ["pos", "body"]
    assert len(tree) == 2


def test_keys_answer_membership(tree):
    assert ("body", "leg") in tree.keys(True)
    assert ("body", "leg") not in tree.keys()
    assert "body" in tree.keys(True)
    assert "body" not in tree.keys(True, True)
    assert ("body", "arm") not in tree.keys(True)
    assert ("pos", "x") not in tree.keys(True)
    assert 3 not in tree.keys(True)
    assert tree.keys() == {"pos", "body"}
    assert len(tree.keys(True)) == 3


# -- values ----------------------------------------------------------------------------


def test_values_are_tensordicts_of_the_batch_size(tree):
    for value in (tree.rand((2,)), tree.zero((2,)), tree.one((2,)), tree.sample((2,))):
        assert isinstance(value, TensorDict)
        assert value.batch_size == (2, 4)
        assert value["pos"].shape == (2, 4, 3)
        assert value["body"].batch_size == (2, 4)
        assert value.device is None
    assert tree.to("cpu").rand().device == torch.device("cpu")


def test_values_behave_as_ordinary_tensordicts(tree):
    value = tree.rand()

    value["extra"] = torch.zeros(4)
    stacked = torch.stack([value, value.clone()])

    assert stacked[0]["body", "leg"].shape == (4,)
    assert value.lock_().is_locked


def test_zero_makes_all_leaves_including_objects():
    tree = Composite(a=Unbounded((2,)), text=NonTensor((2,), example_data="hi"), shape=(2,))

    value = tree.zero((3,))

    assert value["text"] == "hi"
    assert value.get("text").batch_size == (3, 2)
    assert tree.is_in(value)
    assert tree.is_in(TensorDict(a=torch.zeros(2), text="you", batch_size=[2]))


def test_data_is_filled_in_place():
    tree = Composite(a=Bounded(2, 3, (2,)), b=Categorical(4), shape=())
    td = TensorDict({"mine": torch.ones(1)})

    filled = [tree.zeros_update(td.copy()), tree.ones_update(td.copy()), tree.rand_update(td)]

    assert [sorted(part.keys()) for part in filled] == [["a", "b", "mine"]] * 3
    assert filled[0]["b"].item() == 0 and filled[1]["b"].item() == 1
    assert filled[2] is td and tree.is_in(td)


def test_enumerate_and_cardinality_span_all_leaves():
    tree = Composite(a=Categorical(2), b=Composite(c=OneHot(3)))

    values = tree.enumerate()

    assert values.batch_size == (6,) == (tree.cardinality(),)
    assert len({(int(v["a"]), int(v["b", "c"].byte().argmax())) for v in values}) == 6
    assert Composite(a=Categorical(2), b=Unbounded()).cardinality() == float("inf")


def test_data_class_and_names_mark_produced_data():
    @tensorclass
    class Data:
        a: torch.Tensor

    named = Composite(a=Unbounded((4,)), shape=(4,), names=["env"], data_cls=Data)

    assert type(named.rand()) is Data
    assert named.rand((2,)).names == [None, "env"]
    assert named.expand(3, 4).names == [None, "env"]
    assert Composite(shape=(4, 5)).refine_names(..., "time").names == [None, "time"]
    with pytest.raises(ValueError, match="has a name already"):
        named.refine_names("other")
    with pytest.raises(ValueError, match="Pass 1"):
        named.names = ["a", "b"]


def test_names_of_a_nested_composite_follow_operations_on_its_parent():
    inner = Composite(x=Unbounded((4, 2, 3)), shape=(4, 2), names=["env", "agent"])
    tree = Composite(inner=inner, shape=(4,), names=["env"])

    assert tree.expand(5, 4)["inner"].names == [None, "env", "agent"]
    assert tree.reshape(2, 2)["inner"].names == [None, None, "agent"]
    assert tree[0]["inner"].names == ["agent"]
    assert tree.unsqueeze(0)["inner"].rand().names == [None, "env", "agent"]
    assert tree.to("cpu").clone().empty().names == ["env"]


# -- testing, repairing, converting ----------------------------------------------------


def test_every_leaf_must_be_present_and_inside(tree):
    value = tree.rand()

    assert tree.is_in(value)
    assert tree.is_in(value.set("extra", torch.zeros(4)))
    assert value in tree
    assert "pos" in tree and ("body", "leg") in tree and "leg" not in tree
    assert not tree.is_in(value.exclude("pos"))
    assert not tree.is_in(value.exclude(("body", "leg")))
    assert not tree.is_in({"pos": value["pos"]})
    assert not tree.is_in(value.clone().set(("body", "leg"), torch.full((4,), 3)))


def test_a_refusal_names_the_entry(tree):
    value = tree.rand()
    value["body", "leg"] = torch.full((4,), 7)

    with pytest.raises(AssertionError, match="at entry 'body': at entry 'leg'"):
        tree.assert_is_in(value)
    with pytest.raises(AssertionError, match="entry 'pos' is missing"):
        tree.assert_is_in(value.exclude("pos"))
    with pytest.raises(AssertionError, match="no TensorDict"):
        tree.assert_is_in(3)


def test_project_exchanges_the_leaves_outside_and_gives_the_tensordict_itself(tree):
    value = tree.rand()
    outside = torch.full((4,), 7)
    value["body", "leg"] = outside
    inside = value["pos"]

    projected = tree.project(value)

    assert projected is value and tree.is_in(value)
    assert value["body", "leg"].tolist() == [2] * 4
    assert outside.tolist() == [7] * 4
    assert value["pos"] is inside


def test_type_check_names_the_entry(tree):
    tree.type_check(tree.rand())
    with pytest.raises(TypeError, match="entry 'pos'"):
        tree.type_check(tree.rand().set("pos", torch.zeros(4, 3, dtype=torch.int64)))
    with pytest.raises(TypeError):
        tree.type_check(torch.zeros(4, dtype=torch.int64), "pos")


def test_encode_and_to_numpy_act_leaf_by_leaf(tree):
    raw = {"pos": np.zeros((4, 3)), "body": {"leg": [0, 1, 2, 0]}}

    value = tree.encode(raw)

    assert tree.is_in(value)
    arrays = tree.to_numpy(value, safe=True)
    assert arrays["body"]["leg"].tolist() == [0, 1, 2, 0]
    assert arrays["pos"].dtype == np.float32
    with pytest.raises(KeyError, match="'vel'"):
        tree.encode({"vel": 3})


def test_conversion_between_families_acts_on_choices_only():
    tree = Composite(a=Categorical(3), b=Composite(c=MultiCategorical([2, 3])), d=Unbounded(2))

    hot = tree.to_one_hot_spec()

    assert hot["a"] == OneHot(3)
    assert hot.to_categorical_spec() == tree
    value = tree.rand()
    assert hot.is_in(tree.to_one_hot(value))
    assert (hot.to_categorical(tree.to_one_hot(value, safe=True)) == value).all()


def test_a_composite_memoizes_encoding():
    tree = Composite(a=Unbounded((1,)), b=Composite(c=Categorical(3)))
    tree.memoize_encode()

    values = [tree.encode({"a": float(i), "b": {"c": i}}) for i in range(3)]
    tree.erase_memoize_cache()

    assert [float(value["a"]) for value in values] == [0, 1, 2]
    assert [int(value["b", "c"]) for value in values] == [0, 1, 2]


# -- shape, device, copies -------------------------------------------------------------


def test_the_shape_can_be_assigned_a_prefix_of_all_leaves():
    tree = Composite(a=Unbounded((4, 3)), b=Composite(c=Unbounded((4,))))

    tree.shape = (4,)

    assert tree.shape == tree["b"].shape == (4,)
    with pytest.raises(ValueError, match="entry 'a'"):
        tree.batch_size = (5,)
    assert tree.shape == (4,)


def test_a_composite_with_a_device_moves_its_children():
    tree = Composite(a=Unbounded((2,)), device="meta")
    tree["b", "c"] = Unbounded((2,))

    assert tree["a"].device == tree["b", "c"].device == tree["b"].device == torch.device("meta")
    assert tree.clear_device_().device is None
    assert tree["b"].device is None
    assert tree.to(torch.float64)["a"].dtype == torch.float64
    assert Composite(a=Unbounded()).to("cpu")["a"].device == torch.device("cpu")


def test_equality_compares_shape_device_and_children(tree):
    assert tree == tree.clone()
    assert tree != tree.to("cpu")
    assert tree != tree.expand(2, 4)
    assert tree != Composite(pos=tree["pos"], shape=(4,))
    reordered = Composite(body=tree["body"], pos=tree["pos"], shape=(4,))
    assert tree == reordered
    assert tree != Unbounded((4,))


def test_copies_are_deep_and_equal(tree):
    for twin in (tree.clone(), copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert twin == tree
        twin["body", "arm"] = Unbounded((4,))
        assert twin != tree


def test_repr_shows_the_tree(tree):
    assert "leg: Categorical(shape=(4,), n=3" in repr(tree)


SHOWN = {
    "composite": (
        lambda: Composite(
            pos=Bounded(-1, 1, (4, 3)),
            body=Composite(text=NonTensor((4,), example_data="a"), shape=(4,)),
            none=None,
            shape=(4,),
        ),
        """\
Composite(
    pos: BoundedContinuous(shape=(4, 3), low=-1.0, high=1.0, device=cpu, dtype=float32),
    body: Composite(
        text: NonTensor(shape=(4,), example_data=a, device=cpu),
        device=None,
        shape=(4,)),
    none: None,
    device=None,
    shape=(4,))""",
    ),
    "stack": (
        lambda: torch.stack([Bounded(-1, 0, (3,)), Bounded(4, 5, (3,))]),
        """\
Stacked(
    0: BoundedContinuous(shape=(3,), low=-1.0, high=0.0, device=cpu, dtype=float32),
    1: BoundedContinuous(shape=(3,), low=4.0, high=5.0, device=cpu, dtype=float32),
    stack_dim=0,
    device=cpu,
    shape=(2, 3))""",
    ),
    "stack of composites": (
        lambda: torch.stack([Composite(obs=Unbounded(2)), Composite(obs=Unbounded(3))]),
        """\
StackedComposite(
    0: Composite(
        obs: UnboundedContinuous(shape=(2,), device=cpu, dtype=float32),
        device=None,
        shape=()),
    1: Composite(
        obs: UnboundedContinuous(shape=(3,), device=cpu, dtype=float32),
        device=None,
        shape=()),
    stack_dim=0,
    device=None,
    shape=(2,))""",
    ),
    "choice": (
        lambda: Choice([Categorical(2), Categorical(3)]),
        """\
Choice(
    0: Categorical(shape=(), n=2, device=cpu, dtype=int64),
    1: Categorical(shape=(), n=3, device=cpu, dtype=int64),
    device=cpu,
    shape=())""",
    ),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_a_person_can_read_a_tree(kind):
    make, text = SHOWN[kind]

    assert repr(make()) == text


def test_a_notebook_shows_a_tree_as_a_table():
    tree = Composite(body=Composite(leg=Categorical(3, (4,)), shape=(4,)), none=None, shape=(4,))

    rows = re.findall("<tr>(.*?)</tr>", tree._repr_html_())
    cells = [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]

    assert cells == [
        ["entry", "spec", "shape", "dtype", "device", "values"],
        ["", "Composite", "(4,)", "", "", ""],
        ["body", "Composite", "(4,)", "", "", ""],
        ["leg", "Categorical", "(4,)", "int64", "cpu", "n=3"],
        ["none", "None", "", "", "", ""],
    ]


# -- locks -----------------------------------------------------------------------------


def test_a_locked_tree_refuses_edits_at_every_level(tree):
    assert tree.lock_() is tree

    assert tree.is_locked
    assert tree["body"].is_locked
    edits = [
        lambda: tree.set("x", Unbounded((4,))),
        lambda: tree.set(("body", "x"), Unbounded((4,))),
        lambda: tree["body"].set("x", Unbounded((4,))),
        lambda: tree.__delitem__("pos"),
        lambda: tree.__delitem__(("body", "leg")),
        lambda: tree.pop("pos"),
        lambda: tree.update({"x": Unbounded((4,))}),
        lambda: tree.separates("pos"),
        lambda: setattr(tree, "shape", ()),
    ]
    for edit in edits:
        with pytest.raises(RuntimeError, match="unlock_"):
            edit()
    assert list(tree.keys(True)) == ["pos", ("body", "leg"), "body"]


def test_unlocking_the_root_unlocks_all(tree):
    tree.lock_()

    assert tree.unlock_() is tree

    tree["body", "arm"] = Unbounded((4,))
    assert not tree["body"].is_locked


def test_a_child_of_a_locked_parent_cannot_be_unlocked_alone(tree):
    tree.lock_()

    with pytest.raises(RuntimeError, match="root of the tree"):
        tree["body"].unlock_()
    assert tree["body"].is_locked


def test_no_tree_is_unlocked_that_shares_a_node_with_another_locked_one(tree):
    other = Composite(inner=Composite(body=tree["body"], shape=(4,)), shape=(4,)).lock_()
    tree.lock_()

    for root in (tree, other):
        with pytest.raises(RuntimeError, match="every tree it is in"):
            root.unlock_()
    assert tree.locked and other.locked and tree["body"].locked
    del other, root
    gc.collect()
    assert not tree.unlock_()["body"].is_locked


def test_locking_goes_down_unless_told_otherwise(tree):
    assert tree.lock_(recurse=None)["body"].is_locked
    assert not tree.unlock_(recurse=None)["body"].is_locked


def test_a_parent_that_is_gone_holds_no_lock():
    body = Composite(leg=Unbounded())
    parent = Composite(body=body).lock_()

    del parent
    gc.collect()

    assert body.is_locked
    assert not body.unlock_().is_locked


def test_lock_without_recursion_leaves_children_open(tree):
    tree.lock_(recurse=False)

    tree["body"].set("arm", Unbounded((4,)))

    assert tree.is_locked


def test_copies_made_by_operations_are_not_locked(tree):
    tree.lock_()

    for twin in (tree.clone(), tree[0], tree.expand(2, 4), tree.to("cpu"), tree.empty()):
        assert not twin.is_locked
        twin["body", "arm"] = None


def test_a_lock_survives_pickling_and_deepcopy(tree):
    tree.lock_()

    for twin in (copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        with pytest.raises(RuntimeError):
            twin["body"].unlock_()
        twin.unlock_()["body", "arm"] = Unbounded((4,))


def test_a_binary_or_bounded_leaf_keeps_its_domain_in_a_tree():
    tree = Composite(a=Binary(3, (2, 3)), b=Bounded(-1, 1, (2,)), shape=(2,))

    assert tree[0]["a"] == Binary(3)
    assert tree[0]["b"] == Bounded(-1, 1)


# -- as the reference does -------------------------------------------------------------


def test_a_child_whose_shape_is_a_prefix_takes_that_of_its_parent():
    inner = Composite(a=Unbounded((3, 4, 2)), deep=Composite(), shape=(3,))

    tree = Composite(inner=inner, empty=Composite(), shape=(3, 4))

    assert tree["inner"].shape == tree["inner", "deep"].shape == tree["empty"].shape == (3, 4)
    assert inner.shape == (3,) and tree["inner"] is not inner
    assert Composite(a=NonTensor((), example_data=1), shape=(3,))["a"].shape == (3,)
    with pytest.raises(ValueError, match=r"at entry 'inner'.*'a'"):
        Composite(inner=Composite(a=Unbounded((3, 2)), shape=(3,)), shape=(3, 4))


def test_names_reach_nested_composites():
    inner = Composite(x=Unbounded((4, 2, 3)), shape=(4, 2), names=["own", "agent"])

    tree = Composite(inner=inner, shape=(4,), names=["env"])

    assert tree["inner"].names == ["env", "agent"]
    tree.lock_().names = ["row"]
    assert tree["inner"].names == tree["inner"].zero().names == ["row", "agent"]


def test_item_assignment_is_no_way_to_assign_an_attribute():
    tree = Composite()

    for name in ("shape", "device", "dtype", "space"):
        with pytest.raises(AttributeError, match=name):
            tree[name] = Unbounded()
    assert tree.set("space", Unbounded())["space"] == Unbounded()


@pytest.mark.parametrize("passed_as", [lambda spec: spec, lambda spec: dict(spec.items())])
def test_an_update_takes_copies(passed_as):
    mine = Composite(low=Bounded(0, 9, (2,)), node=Composite(low=Bounded(0, 9, (2,))))
    theirs = Composite(
        low=Bounded(1, 9, (2,)),
        node=Composite(low=Bounded(1, 9, (2,))),
        new=Composite(low=Bounded(1, 9, (2,))),
    )

    mine.update(passed_as(theirs))
    for key in ("low", ("node", "low"), ("new", "low")):
        theirs[key].space.low -= 1

    for key in ("low", ("node", "low"), ("new", "low")):
        assert mine[key].low.tolist() == [1, 1] and theirs[key].low.tolist() == [0, 0]
