"""The rules of masks, done flags and carrying, as properties and as the spec's numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envkit import rules
from envkit.errors import DoneError, ResetMaskError, StepMaskError


@given(batch=hnp.array_shapes(max_dims=2, max_side=3), data=st.data())
def test_choose_replaces_exactly_the_masked_episodes(batch, data):
    mask = data.draw(hnp.arrays(bool, batch))
    kept, fresh = np.zeros((*batch, 2)), np.ones((*batch, 2))

    out = rules.choose(mask, fresh, kept)

    assert (out[mask] == 1).all()
    assert (out[~mask] == 0).all()


@pytest.mark.parametrize("rows", [2, 4])
def test_choose_refuses_a_mask_that_does_not_lead_the_leaf(rows):
    with pytest.raises(ResetMaskError, match=r"Pass a mask of shape \(3,\)"):
        rules.choose(np.ones(rows, bool), np.ones((3, 4)), np.zeros((3, 4)))


@given(batch=hnp.array_shapes(max_dims=2, max_side=3), data=st.data())
def test_what_has_begun_anew_is_not_reset_again(batch, data):
    mask = data.draw(hnp.arrays(bool, (*batch, 2)))
    begun = data.draw(hnp.arrays(bool, batch))

    left = rules.still_to_reset(mask, begun)

    assert (left == (mask & ~begun[..., None])).all()
    assert rules.still_to_reset(mask, None) is mask


@given(batch=hnp.array_shapes(max_dims=3, max_side=3), singleton=st.booleans())
def test_step_mask_drops_only_the_trailing_singleton(batch, singleton):
    mask = np.ones((*batch, 1) if singleton else batch, bool)

    assert rules.step_mask(mask, batch).shape == batch


@pytest.mark.parametrize("mask", [np.ones(2, bool), np.ones((3, 2), bool), np.ones(3)])
def test_step_mask_refuses_other_shapes_and_dtypes(mask):
    with pytest.raises(StepMaskError, match="_step"):
        rules.step_mask(mask, (3,))


@pytest.mark.parametrize(
    ("mask_shape", "done_shape", "batch_ndim", "expected"),
    [
        ((2, 1), (2, 1), 1, (2,)),
        ((2,), (2, 1), 1, (2,)),
        ((2,), (2,), 0, (2,)),
        ((1,), (1,), 1, (1,)),
        ((1,), (1,), 0, ()),
        ((), (1,), 0, ()),
    ],
)
def test_reset_mask_takes_the_shape_of_done_or_that_without_the_singleton(
    mask_shape, done_shape, batch_ndim, expected
):
    mask = np.ones(mask_shape, bool)

    assert rules.reset_mask(mask, done_shape, batch_ndim).shape == expected


def test_reset_mask_refuses_another_shape_and_names_the_level():
    with pytest.raises(ResetMaskError, match=r"agents\._reset"):
        rules.reset_mask(np.ones(3, bool), (2, 1), 1, ("agents",))


def test_the_highest_mask_governs():
    masked = [("a",), ("a", "b"), ("c",)]

    assert rules.governing_level(("a", "b", "x"), masked) == ("a",)
    assert rules.governing_level(("c",), masked) == ("c",)
    assert rules.governing_level(("d",), masked) is None
    assert rules.governing_level(("d",), [(), ("d",)]) == ()


def test_a_mask_over_agents_collapses_for_an_entry_they_share():
    mask = np.array([[False, True], [False, False]])

    assert rules.reduce_mask(mask, (2, 2, 3), 1).tolist() == mask.tolist()
    assert rules.reduce_mask(mask, (2, 5), 1).tolist() == [True, False]


@pytest.mark.parametrize(
    ("returned", "declared", "expected"),
    [
        ({"done": True}, ["done", "terminated"], {"terminated": True}),
        (
            {"done": True},
            ["done", "terminated", "truncated"],
            {"terminated": True, "truncated": None},
        ),
        ({"terminated": True}, ["done", "terminated"], {"done": True}),
        (
            {"terminated": False, "truncated": True},
            ["done", "terminated", "truncated"],
            {"done": True},
        ),
        (
            {"done": True, "terminated": False},
            ["done", "terminated", "truncated"],
            {"truncated": None},
        ),
        ({}, ["done", "terminated"], {"done": None, "terminated": None}),
    ],
)
def test_missing_done_leaves_are_inferred(returned, declared, expected):
    flags = {name: np.array([value]) for name, value in returned.items()}

    inferred = rules.complete_done(flags, declared)

    shown = {name: None if v is None else bool(v[0]) for name, v in inferred.items()}
    assert shown == expected


def test_done_and_truncated_alone_say_too_little():
    flag = np.array([True])

    with pytest.raises(DoneError, match="Return terminated"):
        rules.complete_done({"done": flag, "truncated": flag}, ["done", "terminated", "truncated"])


def test_a_skipped_row_keeps_a_root_value_only_of_the_same_shape():
    assert rules.kept_shape(np.zeros((2, 1)), (2, 1))
    assert not rules.kept_shape(np.zeros((2, 2)), (2, 1))
    assert not rules.kept_shape(np.zeros(2), (2, 1))
    assert not rules.kept_shape(None, (2, 1))
    assert rules.kept_shape(np.zeros((2, 7)), (2, -1))
