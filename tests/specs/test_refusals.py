"""What specs refuse, and with which way out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envkit.errors import (
    DeviceNameError,
    EncodingError,
    InputError,
    NotEnumerableError,
    SpecAxisError,
    SpecError,
    SpecMaskError,
    SpecTypeError,
)
from envkit.specs import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Stacked,
    Unbounded,
    make_composite_from_td,
)
from envkit.specs.inputs import ActionInput
from tests.zoo.refusals import assert_refused, each_row

NO_OPTION = torch.zeros(3, dtype=torch.bool)


def tree():
    return Composite(
        pos=Bounded(-1, 1, (4, 3)),
        body=Composite(leg=Categorical(3, (4,)), shape=(4,)),
        shape=(4,),
    )


def envs():
    return torch.stack([Composite(obs=Unbounded(2), a=Unbounded(1)), Composite(obs=Unbounded(3))])


def boxes():
    return torch.stack([Bounded(-1, 0, (3,)), Bounded(4, 5, (3,))])


REFUSALS = [
    # -- building
    ("one-hot of another width", lambda: OneHot(4, shape=(3,)), ValueError, r"n=4.*\(4,\)"),
    ("reversed bounds", lambda: Bounded(1, -1), ValueError, "low=1.*high=-1.*Exchange"),
    (
        "a child of another batch",
        lambda: tree().set(("body", "arm"), Unbounded(3)),
        ValueError,
        r"'body'.*'arm'.*\(3,\).*\(4,\).*expand\(4, 3\)",
    ),
    ("a child that is no spec", lambda: Composite(a=3), TypeError, "'a' is 3.*Pass a spec"),
    ("two batch sizes", lambda: Composite(shape=2, batch_size=3), ValueError, "2.*3.*pass one"),
    (
        "a shape that is no prefix",
        lambda: setattr(tree(), "shape", (4, 3)),
        ValueError,
        r"\(4, 3\).*'body', 'leg'.*prefix",
    ),
    ("too many names", lambda: tree().refine_names("a", "b"), ValueError, "'a', 'b'.*Pass 1"),
    (
        "unlike members of a choice",
        lambda: Choice([Unbounded(2), Unbounded(3)]),
        ValueError,
        r"differ in shape.*\(2,\).*\(3,\).*same kind",
    ),
    (
        "members of unlike dtypes",
        lambda: Choice([Unbounded(2), Unbounded(2, dtype=torch.float64)]),
        ValueError,
        r"differ in dtype.*float32.*float64.*same kind",
    ),
    ("a choice of nothing", lambda: Choice([]), ValueError, "no members.*at least one"),
    ("choices without options", lambda: MultiCategorical([]), ValueError, r"empty nvec.*\[2, 3\]"),
    ("no one-hot vectors", lambda: MultiOneHot([]), ValueError, r"empty nvec.*\[2, 3\]"),
    (
        "the name of a dtype",
        lambda: Unbounded(dtype="float32"),
        TypeError,
        r"'float32' of type str.*torch\.float32",
    ),
    (
        "a dtype of NumPy",
        lambda: Categorical(3, dtype=np.int64),
        TypeError,
        r"numpy\.int64.*torch\.float32",
    ),
    ("a number for a tree", lambda: Composite(3), TypeError, "3 of type int.*shape="),
    (
        "a dict to be described",
        lambda: make_composite_from_td({"a": 1}),
        TypeError,
        r"\{'a': 1\} of type dict.*TensorDict\(entries",
    ),
    (
        "an example for a device",
        lambda: NonTensor((2,), "red"),
        ValueError,
        r"'red' is no device.*NonTensor\(\(2,\), example_data='red'\)",
    ),
    ("an object for a device", lambda: NonTensor((), ["red"]), ValueError, "example_data="),
    # -- keys
    ("a key that is missing", lambda: tree()["body", "arm"], KeyError, "'arm'.*'leg'.*Use one"),
    ("a key through a leaf", lambda: tree().set(("pos", "x"), None), KeyError, "'pos'.*Delete it"),
    ("a deletion of nothing", lambda: tree().__delitem__("arm"), KeyError, "'arm'.*Use one"),
    (
        "a key that is no key",
        lambda: tree().set(3, None),
        ValueError,
        "a key is 3, but must be a string",
    ),
    ("an empty key", lambda: tree().set("", None), ValueError, "'' has an empty part.*Name"),
    (
        "an empty part of a key",
        lambda: tree().set(("body", ""), None),
        ValueError,
        "'body'.*empty part.*Name",
    ),
    ("a key on a leaf", lambda: Unbounded(3)["pos"], TypeError, "'pos'.*only a Composite has keys"),
    ("a key that one member lacks", lambda: envs()["a"], KeyError, "'a'.*'obs'.*Use one"),
    # -- shapes
    ("an axis that is missing", lambda: Unbounded((4, 3)).squeeze(2), IndexError, "2.*-2 to 1"),
    ("an axis of a scalar", lambda: Categorical(3).squeeze(0), IndexError, "0 axes.*Add axes"),
    ("half a one-hot row", lambda: OneHot(4, (2, 4))[:, 0], IndexError, "encodes.*first 1 axes"),
    ("half a code", lambda: OneHot(4)[0], ValueError, "encodes one value.*no other axis"),
    ("a mix of codes", lambda: OneHot(4, (2, 4)).reshape(8), ValueError, r"\(8,\).*\(4,\)"),
    (
        "an expansion of other axes",
        lambda: Unbounded((4, 3)).expand(4, 2),
        ValueError,
        r"\(4, 3\).*\(4, 2\).*expand\(2, 4, 3\)",
    ),
    (
        "a reshape to other sizes",
        lambda: Unbounded((4, 3)).reshape(5),
        ValueError,
        "12 elements.*12",
    ),
    ("a flatten backwards", lambda: Unbounded((4, 3)).flatten(1, 0), ValueError, "1 after end 0"),
    (
        "an index of two arrays",
        lambda: boxes()[[0, 1], [0, 1]],
        RuntimeError,
        r"2 arrays of \[1, 1\].*one axis at a time",
    ),
    ("a member that is missing", lambda: boxes()[2], IndexError, r"\[2\].*from -2 to 1"),
    (
        "a mask of other length",
        lambda: boxes()[torch.tensor([True])],
        IndexError,
        "1 flags.*2 members.*one flag for each",
    ),
    ("no member", lambda: boxes()[2:], RuntimeError, "no member.*at least one"),
    (
        "a ragged axis merged",
        lambda: torch.stack([Unbounded((2,)), Unbounded((3,))]).flatten(),
        RuntimeError,
        r"\(2, -1\).*Reshape the members",
    ),
    (
        "a dynamic stack axis",
        lambda: boxes().make_neg_dim(0),
        RuntimeError,
        "2 members.*Mark another",
    ),
    (
        "a dynamic axis across members",
        lambda: Composite(a=boxes(), shape=2).make_neg_dim(0),
        RuntimeError,
        "'a'.*2 members.*Mark another",
    ),
    (
        "rows of a choice merged",
        lambda: Choice([Bounded(0, 1, (2,)), Bounded(2, 3, (2,))]).expand(4, 2).flatten(),
        ValueError,
        r"\(4, 2\).*\(8,\).*Reshape the\s+members",
    ),
    # -- values
    (
        "other data than a spec was read off",
        lambda: make_composite_from_td(TensorDict(a=torch.zeros(3))).assert_is_in(
            TensorDict(b=torch.zeros(3))
        ),
        AssertionError,
        "entry 'a' is missing",
    ),
    (
        "a value outside",
        lambda: tree().assert_is_in(tree().one().mul_(7)),
        AssertionError,
        "'pos': got tensor.*project",
    ),
    (
        "a value of another dtype",
        lambda: tree().type_check(TensorDict(body={"leg": torch.zeros(4)}, batch_size=[4])),
        TypeError,
        r"'body'.*'leg'.*float32.*int64.*value\.to",
    ),
    (
        "a value of another shape",
        lambda: tree().project(TensorDict(pos=torch.zeros(4, 2), batch_size=[4])),
        ValueError,
        r"'pos'.*\(4, 2\).*\(4, 3\)",
    ),
    ("a list for a tensor", lambda: Unbounded(2).project([1, 2]), TypeError, r"list.*spec\.encode"),
    (
        "a dict for a TensorDict",
        lambda: tree().project({}),
        TypeError,
        r"dict.*'pos'.*spec\.encode",
    ),
    (
        "one part for two members",
        lambda: boxes().project(torch.zeros(1, 3)),
        ValueError,
        "no stack of 2.*one value for each",
    ),
    (
        "a tensor for an object",
        lambda: NonTensor().project(torch.zeros(())),
        TypeError,
        "got Tensor.*Pass an object",
    ),
    (
        "a list of continuous values",
        lambda: Bounded(0, 1).enumerate(),
        NotImplementedError,
        "discrete",
    ),
    (
        "a list of everything",
        lambda: Composite(a=Bounded(0, 255, (8,), dtype=torch.uint8)).enumerate(),
        NotImplementedError,
        "'a'.*too many.*fewer values",
    ),
    (
        "a count of objects",
        lambda: NonTensor().cardinality(),
        NotImplementedError,
        "Leave this entry",
    ),
    ("a word for a shape", lambda: tree().rand("ab"), TypeError, r"'ab'.*rand\(\(3,\)\)"),
    # -- masks
    (
        "a mask that allows nothing",
        lambda: Composite(a=Categorical(3, mask=NO_OPTION)).rand(),
        RuntimeError,
        "'a'.*allows no option.*update_mask",
    ),
    (
        "a mask of another width",
        lambda: Categorical(3).update_mask(NO_OPTION[:2]),
        ValueError,
        r"\(2,\).*\(3,\).*one flag for each",
    ),
    (
        "a mask for unlike rows",
        lambda: MultiCategorical([[2, 3], [4, 5]]).update_mask(torch.ones(5, dtype=torch.bool)),
        ValueError,
        "rows of nvec.*one spec for each row",
    ),
    # -- conversion
    (
        "raw data of another size",
        lambda: Composite(a=Composite(b=Unbounded(2))).encode({"a": {"b": [1, 2, 3]}}),
        RuntimeError,
        r"'a'.*'b'.*3 elements.*\(2,\).*Pass 2",
    ),
    ("raw data of an unknown key", lambda: tree().encode({"vel": 3}), KeyError, "'vel'.*Use one"),
    ("no raw data", lambda: Bounded(0, 1).encode(None), RuntimeError, "None is no number.*Pass"),
    ("no option", lambda: OneHot(4).encode(None), RuntimeError, "None.*Pass option numbers"),
    ("raw data that is no dict", lambda: tree().encode(3), TypeError, "3 of type int.*Pass a dict"),
    (
        "raw data that is no number",
        lambda: Unbounded(1).encode("a"),
        RuntimeError,
        "'a'.*Pass numbers",
    ),
    (
        "an option that does not exist",
        lambda: OneHot(4).encode(7),
        RuntimeError,
        r"\[7\].*from 0 to",
    ),
    (
        "one raw value for two members",
        lambda: boxes().encode([0]),
        RuntimeError,
        "1 raw.*one for each",
    ),
    ("a number for a stack", lambda: boxes().encode(3), RuntimeError, "3 of type int.*Pass a list"),
    (
        "bounds outside a dtype",
        lambda: Composite(a=Bounded(-1, 1)).to(torch.uint8),
        ValueError,
        "'a'.*-1.*0 to 255.*Pass a bound",
    ),
    (
        "a one-hot form of a box",
        lambda: Bounded(0, 1).to_one_hot_spec(),
        TypeError,
        "no choice.*Use a Categorical",
    ),
    # -- stacks
    (
        "unlike classes",
        lambda: torch.stack([Unbounded(2), Categorical(2, (2,))]),
        RuntimeError,
        "Categorical.*Unbounded.*one class",
    ),
    ("nothing", lambda: Stacked(), RuntimeError, "none.*Stack specs"),
    (
        "a leaf with a composite",
        lambda: torch.stack([Unbounded(2), Composite()]),
        RuntimeError,
        "kinds",
    ),
    (
        "a new shape of a stack",
        lambda: setattr(envs(), "shape", ()),
        RuntimeError,
        "before stacking",
    ),
    # -- locks
    ("an edit while locked", lambda: tree().lock_().set("x", None), RuntimeError, "'x'.*unlock_"),
    (
        "an edit below a lock",
        lambda: tree().lock_().set(("body", "x"), None),
        RuntimeError,
        "'body'.*'x'.*set_spec_lock_",
    ),
    (
        "a name instead of another",
        lambda: tree().refine_names("a").refine_names("b"),
        RuntimeError,
        "'a' has a name already.*rename",
    ),
    (
        "an entry called like an attribute",
        lambda: Composite().__setitem__(("a", "device"), None),
        AttributeError,
        "'device'.*attribute.*set",
    ),
    (
        "an int for a key",
        lambda: tree().__setitem__(0, None),
        TypeError,
        "a key is 0, but must be a string",
    ),
    (
        "members of unlike classes",
        lambda: Choice([Unbounded(2), Bounded(0, 1, (2,))]),
        TypeError,
        "several classes.*Bounded.*Unbounded.*one class",
    ),
    (
        "a shape that bounds do not fit",
        lambda: setattr(Bounded([0, 1], [2, 3]), "shape", (3,)),
        ValueError,
        r"\(2,\).*bounds.*\(3,\).*space",
    ),
    (
        "a shape without the encoding axis",
        lambda: setattr(OneHot(3), "shape", (4,)),
        ValueError,
        r"\(4,\).*End the sizes in \(3,\)",
    ),
    (
        "a space of another kind",
        lambda: setattr(Categorical(3), "space", Bounded(0, 1).space),
        TypeError,
        "Categorical cannot take.*Make a spec",
    ),
    (
        "bounds upside down",
        lambda: setattr(Bounded(0, 1).space, "low", torch.tensor(2.0)),
        ValueError,
        "low=2.0 is not below high=1.0",
    ),
    (
        "objects with two counts of axes",
        lambda: NonTensor((2,), batched=True, feature_dims=1),
        ValueError,
        "batched=True and feature_dims=1.*one of them",
    ),
    (
        "objects of more axes than there are",
        lambda: NonTensor((2,), feature_dims=2),
        ValueError,
        "feature_dims=2.*from 0 to 1",
    ),
    (
        "an index that is no tensor of integers",
        lambda: torch.index_select(Unbounded(2), 0, torch.tensor([0.5])),
        TypeError,
        "Pass a tensor of integers",
    ),
    (
        "an index out of range",
        lambda: torch.index_select(Unbounded(2), 0, torch.tensor([-1])),
        IndexError,
        r"\[-1\].*from 0 to 1",
    ),
    (
        "an index into what encodes a value",
        lambda: torch.index_select(Binary(3, (2, 3)), -1, torch.tensor([0])),
        ValueError,
        "encodes one value",
    ),
    (
        "a selection from unlike specs",
        lambda: torch.index_select(torch.stack([Bounded(0, 1), Bounded(0, 2)]), 0, torch.arange(2)),
        NotImplementedError,
        r"stack\[index\]",
    ),
    (
        "a member of a stack exchanged",
        lambda: envs().__setitem__(0, tree()),
        RuntimeError,
        r"index 0.*stack\[i\]\[key\]",
    ),
    (
        "a child unlocked alone",
        lambda: (t := tree().lock_())["body"].unlock_() and t,
        RuntimeError,
        "root of the tree",
    ),
    # -- further values and forms
    (
        "Bounded: domain is 'whole'",
        lambda: Bounded(0, 1, (1,), domain="whole"),
        SpecError,
        "domain is 'whole'",
    ),
    (
        "Bounded: (3,) and (2,)",
        lambda: Bounded(torch.zeros(3), torch.ones(2), (4,)),
        SpecError,
        r"\(3,\) and \(2,\)",
    ),
    ("Bounded: 300", lambda: Bounded(0, 300, (1,), dtype=torch.uint8), SpecError, "300"),
    ("Binary: neither n nor shape", lambda: Binary(), SpecError, "neither n nor shape"),
    ("Binary: n=3 and shape (4,)", lambda: Binary(3, (4,)), SpecError, r"n=3 and shape \(4,\)"),
    (
        "Binary: torch.complex64",
        lambda: Binary(3, dtype=torch.complex64),
        SpecError,
        r"torch\.complex64",
    ),
    ("Categorical: n=5", lambda: Categorical(5, dtype=torch.bool), SpecError, "n=5"),
    ("Categorical: 0 options", lambda: Categorical(0), SpecError, "0 options"),
    ("MultiOneHot: (5,)", lambda: MultiOneHot([2, 2], (5,)), SpecError, r"\(5,\)"),
    ("MultiCategorical: (3,)", lambda: MultiCategorical([2, 2], (3,)), SpecError, r"\(3,\)"),
    (
        "Categorical: torch.float32",
        lambda: Categorical(2, mask=torch.tensor([0.5, 1.0])),
        SpecMaskError,
        r"torch\.float32",
    ),
    ("OneHot: (2, 2)", lambda: OneHot(3).encode(torch.zeros(2, 2)), EncodingError, r"\(2, 2\)"),
    (
        "Unbounded: 3 elements",
        lambda: Unbounded((2,)).encode([1, 2, 3]),
        EncodingError,
        "3 elements",
    ),
    ("Unbounded: (3,)", lambda: Unbounded((2,)).project(torch.zeros(3)), SpecError, r"\(3,\)"),
    ("Unbounded: 'fast'", lambda: Unbounded((2,)).to("fast"), DeviceNameError, "'fast'"),
    (
        "MultiCategorical: too many",
        lambda: MultiCategorical([100] * 9).enumerate(),
        NotEnumerableError,
        "too many",
    ),
    ("Unbounded: 4", lambda: Unbounded((2, 3)).unsqueeze(4), SpecAxisError, "4"),
    ("Unbounded: 2.5", lambda: Unbounded((2,)).rand(2.5), SpecTypeError, r"2\.5"),
    ("Composite: (2,)", lambda: Composite(a=Unbounded((3,)), shape=(2,)), SpecError, r"\(2,\)"),
    # -- others
    (
        "encode refuses another number of elements 1",
        lambda: Unbounded((2,)).encode([[1, 2], [3, 4]]),
        RuntimeError,
        "expand the spec",
    ),
    (
        "encode refuses another number of elements 2",
        lambda: MultiOneHot([2, 3]).encode([3, 0]),
        RuntimeError,
        r"option \[3, 0\] does not exist.*\[2, 3\]",
    ),
    (
        "encode refuses another number of elements 3",
        lambda: Unbounded((2,)).encode([[1], [2, 3]]),
        RuntimeError,
        "lists of one shape",
    ),
    (
        "encode refuses another number of elements 4",
        lambda: Unbounded((2,)).encode({"a": 1}),
        RuntimeError,
        "'a': 1",
    ),
    (
        "encode refuses another number of elements 5",
        lambda: Unbounded((2,)).encode([1, 2, 3]),
        RuntimeError,
        r"has 3 elements.*Pass 2",
    ),
    (
        "encode refuses another number of elements 6",
        lambda: OneHot(4, (2, 4)).encode([1, 2, 3]),
        RuntimeError,
        "option numbers",
    ),
    (
        "what the dtype of the spec cannot hold is refused",
        lambda: ActionInput(Unbounded((2,)), "force").take(
            torch.tensor([0.0, 1e300], dtype=torch.float64)
        ),
        InputError,
        r"'force' is .*1\.e\+300\], but must hold finite numbers",
    ),
    (
        "enumerate refuses what no memory holds 1",
        lambda: Bounded(0, 255, (8,), dtype=torch.uint8).enumerate(),
        NotImplementedError,
        r"18446744073709551616 values.*spec\[0\]",
    ),
    (
        "enumerate refuses what no memory holds 2",
        lambda: Bounded(-(2**63), 2**63 - 1, (1,), dtype=torch.int64).enumerate(),
        NotImplementedError,
        "too many",
    ),
    (
        "project refuses a wrong shape",
        lambda: Bounded(-1, 1, (3,)).project(torch.zeros(2)),
        ValueError,
        "trailing axes",
    ),
    (
        "a mask must be boolean and broadcast",
        lambda: Categorical(3).update_mask(torch.ones(3)),
        ValueError,
        r"torch\.bool",
    ),
]


@each_row(REFUSALS)
def test_it_is_refused_with_a_way_out(call, error, words):
    assert_refused(call, error, words)


def test_an_index_out_of_the_range_of_an_axis_is_an_error_of_torch():
    with pytest.raises(IndexError, match="out of bounds"):
        Unbounded((2, 3))[2]
