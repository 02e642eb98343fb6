"""The quick check of inputs: it agrees with ``is_in``, and names what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from envkit.errors import InputError, MissingKeyError
from envkit.specs import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)
from envkit.specs.inputs import InputCheck
from envkit.specs.stacked import stack

SPECS = {
    "bounded": Bounded(-1.0, 1.0, (2,)),
    "half bounded": Bounded(torch.tensor([0.0, -torch.inf]), torch.tensor([torch.inf, 1.0]), (2,)),
    "bounded integers": Bounded(-1, 2, (2,), dtype=torch.int64),
    "unbounded integers": Unbounded((2,), dtype=torch.int32),
    "binary": Binary(3, shape=(3,), dtype=torch.int8),
    "binary bools": Binary(2, shape=(2,), dtype=torch.bool),
    "categorical": Categorical(3, shape=()),
    "categorical grid": Categorical(2, shape=(2, 2), dtype=torch.int32),
    "categorical bools": Categorical(2, shape=(1,), dtype=torch.bool),
    "masked categorical": Categorical(3, shape=(), mask=torch.tensor([True, False, True])),
    "one-hot": OneHot(3, dtype=torch.int64),
    "one-hot bools": OneHot(2, dtype=torch.bool),
    "one-hot grid": OneHot(2, shape=(2, 2), dtype=torch.int64),
    "many-hot": MultiOneHot([2, 1, 3], dtype=torch.int64),
    "multi-categorical": MultiCategorical([2, 3]),
    "unlike bounds": stack([Bounded(-1.0, 1.0, (2,)), Bounded(0.0, 2.0, (2,))], 0),
}


def anything(spec, data) -> torch.Tensor:
    """Draw a value of the form of a spec: one of its own, or any small numbers."""
    if data.draw(st.booleans()):
        return spec.rand()
    numbers = st.integers(-2, 3) if spec.dtype != torch.bool else st.booleans()
    if spec.dtype.is_floating_point:
        numbers = st.sampled_from([-np.inf, -2.0, -1.0, 0.0, 0.5, 1.0, 2.0, np.inf, np.nan])
    size = spec.shape.numel()
    drawn = data.draw(st.lists(numbers, min_size=size, max_size=size))
    return torch.tensor(drawn, dtype=spec.dtype).reshape(spec.shape)


def is_refused(call, value) -> bool:
    try:
        call(value)
    except InputError:
        return True
    return False


@pytest.mark.parametrize("kind", SPECS)
@given(data=st.data())
def test_one_value_is_refused_where_the_spec_does_not_hold_it(kind, data):
    spec = SPECS[kind]
    value = anything(spec, data)

    assert is_refused(InputCheck(spec, "action").row, value) is not spec.is_in(value)


@pytest.mark.parametrize("kind", SPECS)
@given(data=st.data(), count=st.integers(2, 4))
def test_rows_are_refused_where_the_spec_does_not_hold_one_of_them(kind, data, count):
    spec = SPECS[kind]
    values = [anything(spec, data) for _ in range(count)]

    refused = is_refused(InputCheck(spec, "action").rows, torch.stack(values))

    assert refused is not all(spec.is_in(value) for value in values)


def test_the_first_bad_row_is_named_by_its_number():
    check = InputCheck(Bounded(-1.0, 1.0, (1,)), "force")
    rows = np.array([[0.0], [3.0], [4.0]], np.float32)

    with pytest.raises(
        InputError, match=r"'force' of row 1 is \[3.\], but must lie between -1 and"
    ):
        check.require(rows)
    with pytest.raises(InputError, match=r"of row 7 is \[3.\]"):
        check.require(rows, [4, 7, 9])


def test_nan_is_no_input_of_an_unbounded_spec():
    check = InputCheck(Unbounded((2,)), "force")

    with pytest.raises(InputError, match=r"must be a number. NaN comes from the policy"):
        check.row(torch.tensor([0.0, torch.nan]))

    assert check.row(torch.tensor([0.0, torch.inf])).tolist() == [[0.0, np.inf]]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, MissingKeyError, r"no 'force'.*rand_action"),
        (torch.zeros(3), InputError, r"shape \(3,\), but the env takes \(2,\)"),
        (torch.zeros(2, dtype=torch.float64), InputError, r"float64.*value.to\(torch.float32\)"),
        (torch.zeros(2, device="meta"), InputError, r"meta device"),
    ],
)
def test_values_of_another_form_are_refused(value, error, message):
    with pytest.raises(error, match=message):
        InputCheck(Unbounded((2,)), "force").row(value)


def test_a_value_may_require_a_gradient():
    value = torch.zeros(2, requires_grad=True)

    assert InputCheck(Unbounded((2,)), "force").row(value).shape == (1, 2)
