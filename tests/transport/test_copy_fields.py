"""What requests read and write, copied between the arrays of two sides."""

from __future__ import annotations

import numpy as np
import pytest

from envkit.errors import ArgumentError
from envkit.transport import Field, Layout, Traffic
from envkit.transport.copy_fields import MovingRows

STEP, RESET = 1, 2
ROWS, OWN = 5, range(1, 4)

FIELDS = (
    Field("slot", (), "int64"),
    Field("in", (2,), "float32", slots=3),
    Field("out", (), "int64", slots=4, ahead=1),
)
LAYOUT = Layout(
    FIELDS, ROWS, {STEP: Traffic(("slot", "in"), ("out",)), "look": Traffic((), ("out",))}, "slot"
)


def sides(layout: Layout) -> tuple[MovingRows, dict, MovingRows, dict]:
    """Make two sides, of which the first holds 0, 1, 2, ... and the second zeros."""
    ours, theirs = layout.zeros(), layout.zeros()
    for array in ours.values():
        array[...] = np.arange(array.size).reshape(array.shape)
    return MovingRows(layout, ours, OWN), ours, MovingRows(layout, theirs, OWN), theirs


def test_inputs_are_those_of_the_moment_and_of_the_workers_rows():
    here, ours, there, theirs = sides(LAYOUT)
    ours["slot"][:] = 2

    there.take_inputs(STEP, here.moment, here.inputs(STEP, here.moment))

    assert theirs["slot"].tolist() == [0, 2, 2, 2, 0]
    expected = np.zeros_like(ours["in"])
    expected[2, 1:4] = ours["in"][2, 1:4]
    assert np.array_equal(theirs["in"], expected)
    assert not theirs["out"].any()


def test_outputs_lie_ahead_of_the_moment_in_the_rows_that_were_asked_for():
    there, theirs, here, ours = sides(LAYOUT)

    here.take_outputs(STEP, 1, [1, 3], there.outputs(STEP, 1, [1, 3]))

    expected = np.zeros_like(ours["out"])
    expected[2, [1, 3]] = theirs["out"][2, [1, 3]]
    assert np.array_equal(ours["out"], expected)
    assert not ours["in"].any()


def test_a_request_without_traffic_moves_nothing():
    here, _, _, _ = sides(LAYOUT)

    assert here.inputs(RESET, 0) == here.outputs(RESET, 0, None) == here.inputs("look", 0) == []


def test_a_layout_that_does_not_say_moves_all_slots_of_all_fields_both_ways():
    layout = Layout(FIELDS, ROWS)
    here, ours, there, theirs = sides(layout)

    there.take_inputs("any", here.moment, here.inputs("any", here.moment))

    assert here.moment is None
    for name, array in theirs.items():
        own = (slice(None), slice(1, 4)) if array.shape[0] != ROWS else slice(1, 4)
        assert np.array_equal(array[own], ours[name][own])
    assert len(here.outputs("any", None, None)) == len(FIELDS)


def test_everything_goes_to_a_side_that_begins_anew():
    here, ours, there, theirs = sides(LAYOUT)

    there.take_everything(here.everything())

    assert np.array_equal(theirs["out"][:, 1:4], ours["out"][:, 1:4])
    assert not theirs["out"][:, [0, 4]].any()


def test_traffic_speaks_of_fields_that_there_are():
    with pytest.raises(ArgumentError, match=r"fields \['reward'\], but the layout has \['slot'\]"):
        Layout((FIELDS[0],), ROWS, {STEP: Traffic(("reward",))})
