"""The same calls in the reference library (TorchRL) and here give the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.reference.compare import OURS, check_same, check_works_alike

LEAVES = {
    "bounded": lambda n: n.Bounded(-1.0, 1.0, (4, 3)),
    "bounded per entry": lambda n: n.Bounded(torch.zeros(4), torch.arange(1.0, 5.0)),
    "bounded integers": lambda n: n.Bounded(0, 3, (4, 2), dtype=torch.int64),
    "unbounded": lambda n: n.Unbounded((4, 3)),
    "unbounded integers": lambda n: n.Unbounded((4, 3), dtype=torch.int32),
    "categorical": lambda n: n.Categorical(3, (4,)),
    "flag": lambda n: n.Categorical(2, (4, 1), dtype=torch.bool),
    "one-hot": lambda n: n.OneHot(3, (4, 3)),
    "multi-categorical": lambda n: n.MultiCategorical([2, 3], (4, 2)),
    "multi-one-hot": lambda n: n.MultiOneHot([2, 3], (4, 5)),
    "binary": lambda n: n.Binary(3, (4, 3)),
    "object": lambda n: n.NonTensor((4,), example_data="a"),
    "composite": lambda n: n.Composite(
        pos=n.Unbounded((4, 3)),
        body=n.Composite(leg=n.Categorical(3, shape=(4,)), shape=(4,)),
        shape=(4,),
    ),
}

OF_ALL = {
    "itself": lambda s: s,
    "dtype and ndim": lambda s: s.ndim,
    "zero": lambda s: s.zero(),
    "one with a prefix": lambda s: s.ones((2,)).shape,
    "shape of a sample": lambda s: s.rand((2, 1)).shape,
    "a sample is inside": lambda s: bool(s.is_in(s.rand())),
    "project what is inside": lambda s: (lambda v: s.project(v) is v)(s.rand()),
    "first row": lambda s: s[0],
    "last row": lambda s: s[-1],
    "slice": lambda s: s[1:3],
    "new axis": lambda s: s[None],
    "list": lambda s: s[[0, 2]],
    "mask": lambda s: s[torch.tensor([True, False, True, True])],
    "out of range": lambda s: s[9],
    "expand": lambda s: s.expand(2, *s.shape),
    "expand with a tuple": lambda s: s.expand((2, *s.shape)),
    "unsqueeze": lambda s: s.unsqueeze(0),
    "squeeze": lambda s: s.unsqueeze(0).squeeze(0),
    "unbind": lambda s: s.unbind(0),
    "stack": lambda s: torch.stack([s, s.clone()]),
    "cast": lambda s: s.to(torch.float64),
    "clone": lambda s: bool(s.clone() == s),
    "device": lambda s: str(s.to("cpu").device),
}


@pytest.mark.parametrize("call", OF_ALL)
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_call_that_all_specs_have_gives_the_same(leaf, call):
    check_same(lambda library: OF_ALL[call](LEAVES[leaf](library)))


def stacked(*specs: Any) -> Any:
    return torch.stack(specs)


CALLS = {
    "reshape of a tree": lambda n: LEAVES["composite"](n).reshape(2, 2),
    "flatten of a tree": lambda n: LEAVES["composite"](n).reshape(2, 2).flatten(0, 1),
    "unflatten of a leaf": lambda n: n.Unbounded((4, 3)).unflatten(0, (2, 2)),
    "keys": lambda n: list(LEAVES["composite"](n).keys()),
    "all keys": lambda n: list(LEAVES["composite"](n).keys(True)),
    "leaf keys": lambda n: list(LEAVES["composite"](n).keys(True, True)),
    "missing key": lambda n: LEAVES["composite"](n)["arm"],
    "missing key with a default": lambda n: LEAVES["composite"](n).get("arm", None),
    "set a nested key": lambda n: n.Composite({("a", "b"): n.Unbounded(3)}),
    "a dict in a dict": lambda n: n.Composite({"a": {"b": n.Unbounded(3)}}),
    "a child of another batch": lambda n: n.Composite(a=n.Unbounded(3), shape=(4,)),
    "set while locked": lambda n: LEAVES["composite"](n).lock_().set("x", None),
    "unlock a child": lambda n: LEAVES["composite"](n).lock_()["body"].unlock_(),
    "a locked spec cloned": lambda n: LEAVES["composite"](n).lock_().clone().is_locked,
    "a wrong one-hot": lambda n: n.OneHot(4, (3,)),
    "a wrong multi-one-hot": lambda n: n.MultiOneHot([2, 3], (4,)),
    "unlike classes": lambda n: torch.stack([n.Unbounded(2), n.Categorical(2, (2,))]),
    "unlike dtypes": lambda n: torch.stack([n.Unbounded(2), n.Unbounded(2, dtype=torch.float64)]),
    "unlike shapes": lambda n: torch.stack([n.Unbounded(2), n.Unbounded(3)]).shape,
    "a member": lambda n: torch.stack([n.Unbounded(2), n.Unbounded(3)])[1],
    "unlike trees": lambda n: stacked(
        n.Composite(a=n.Unbounded(2), b=None), n.Composite(a=n.Unbounded(3))
    ),
    "encode a number": lambda n: n.OneHot(4).encode(2),
    "encode numbers": lambda n: n.MultiCategorical([2, 3]).encode([1, 2]),
    "encode a scalar": lambda n: n.Unbounded((1,)).encode(3.0),
    "encode too much": lambda n: n.Unbounded((2,)).encode(np.zeros(3)),
    "encode outside": lambda n: n.Bounded(-1, 1, (1,)).encode(7),
    "encode a tree": lambda n: n.Composite(a=n.Unbounded(2), b=n.Unbounded(1)).encode(
        {"a": [1, 2]}
    ),
    "encode an unknown key": lambda n: n.Composite(a=n.Unbounded(2)).encode({"b": [1, 2]}),
    "one-hot to numpy": lambda n: n.OneHot(4).to_numpy(n.OneHot(4).encode(2)),
    "to one-hot": lambda n: n.Categorical(4).to_one_hot(torch.tensor(2)),
    "to a one-hot spec": lambda n: n.Categorical(4, (3,)).to_one_hot_spec(),
    "to a categorical spec": lambda n: n.MultiOneHot([2, 3]).to_categorical_spec(),
    "enumerate": lambda n: n.Categorical(3).enumerate(),
    "enumerate several": lambda n: n.MultiCategorical([2, 3]).enumerate().shape,
    "enumerate a box": lambda n: n.Bounded(0, 1).enumerate(),
    "cardinality": lambda n: n.Categorical(5).cardinality(),
    "project a number": lambda n: n.Categorical(5).project(torch.tensor(9)),
    "project a tree": lambda n: n.Composite(a=n.Bounded(0, 1, 3)).project(
        TensorDict(a=torch.full((3,), 7.0))
    ),
    "another dtype": lambda n: n.Unbounded(3).type_check(torch.zeros(3, dtype=torch.int64), "a"),
    "a mask": lambda n: n.Categorical(3, mask=torch.tensor([False, False, True])).rand(),
    "an empty mask": lambda n: n.Categorical(2, mask=torch.zeros(2, dtype=torch.bool)).rand(),
    "a tensor for an object": lambda n: n.NonTensor((2,)).is_in(torch.zeros(2)),
    "a dynamic axis": lambda n: n.Unbounded((-1, 3)).zero((2,)).shape,
    "any size on a dynamic axis": lambda n: n.Unbounded((-1, 3)).is_in(torch.zeros(5, 3)),
    "equal whatever the device is called": lambda n: n.Unbounded(3) == n.Unbounded(3, device="cpu"),
    "one-hot index": lambda n: n.OneHot(3).index(
        torch.tensor([False, False, True]), torch.arange(3.0)
    ),
    "categorical index": lambda n: n.Categorical(3, (2,)).index(
        torch.tensor([2, 0]), torch.arange(3.0)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_the_same(name):
    check_same(CALLS[name])


@pytest.mark.parametrize("is_leaf", [lambda kind: True, lambda kind: False, None])
@pytest.mark.parametrize("view", ["keys", "items", "values"])
def test_what_counts_as_a_leaf_may_be_said(view, is_leaf):
    def listed(n):
        tree = n.Composite(a=n.Composite(b=n.Unbounded(1)), c=n.Categorical(2))
        stack = torch.stack([tree, n.Composite(a=n.Composite(b=n.Unbounded(2)))])
        walks = [(spec, nested) for spec in (tree, stack) for nested in (False, True)]
        return [
            list(getattr(spec, view)(nested, leaves, is_leaf=is_leaf))
            for spec, nested in walks
            for leaves in (False, True)
        ]

    check_works_alike(listed)


def test_a_key_is_in_a_view_of_leaves_that_were_said():
    tree = OURS.Composite(a=OURS.Composite(b=OURS.Unbounded(1)))

    said = tree.keys(True, True, is_leaf=lambda kind: True)

    assert "a" in said and ("a", "b") in said
    assert "a" not in tree.keys(True, True)
