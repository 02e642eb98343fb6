"""What becomes of actions: the conversions that are made, and the values that are refused."""

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
from envkit.specs.inputs import ActionInput
from envkit.specs.stacks import stack

SPECS = {
    "bounded": Bounded(-1.0, 1.0, (2,)),
    "half bounded": Bounded(torch.tensor([0.0, -torch.inf]), torch.tensor([torch.inf, 1.0]), (2,)),
    "bounded integers": Bounded(-1, 2, (2,), dtype=torch.int64),
    "small bounded integers": Bounded(-1, 2, (2,), dtype=torch.int8),
    "unbounded integers": Unbounded((2,), dtype=torch.int32),
    "unbounded unsigned": Unbounded((2,), dtype=torch.uint8),
    "binary": Binary(3, shape=(3,), dtype=torch.int8),
    "binary bools": Binary(2, shape=(2,), dtype=torch.bool),
    "categorical": Categorical(3, shape=()),
    "categorical grid": Categorical(2, shape=(2, 2), dtype=torch.int32),
    "categorical bools": Categorical(2, shape=(1,), dtype=torch.bool),
    "one-hot": OneHot(3, dtype=torch.int64),
    "one-hot bools": OneHot(2, dtype=torch.bool),
    "one-hot grid": OneHot(2, shape=(2, 2), dtype=torch.int64),
    "many-hot": MultiOneHot([2, 1, 3], dtype=torch.int64),
    "multi-categorical": MultiCategorical([2, 3]),
    "unlike bounds": stack([Bounded(-1.0, 1.0, (2,)), Bounded(0.0, 2.0, (2,))], 0),
    "unlike integers": stack(
        [Bounded(0, 1, (2,), dtype=torch.int8), Bounded(0, 2, (2,), dtype=torch.int8)], 0
    ),
}
INTEGERS = [torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.uint16]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def anything(spec, data, dtypes=None) -> torch.Tensor:
    """Draw a value of the shape of a spec: one of its own, or any small numbers."""
    dtype = spec.dtype if dtypes is None else data.draw(st.sampled_from(dtypes))
    if data.draw(st.booleans()):
        return spec.rand().to(dtype)
    numbers = st.integers(-2, 3)
    if dtype.is_floating_point:
        numbers = st.sampled_from([-np.inf, -2.0, -1.0, 0.0, 0.5, 1.0, 2.0, np.inf, np.nan])
    size = spec.shape.numel()
    drawn = data.draw(st.lists(numbers, min_size=size, max_size=size))
    if dtype == torch.uint16:
        return torch.tensor(drawn).abs().to(dtype).reshape(spec.shape)
    return torch.tensor(drawn).to(dtype).reshape(spec.shape)


def taken(spec, value, lead=()) -> torch.Tensor | None:
    """Give what becomes of a value, None where it is refused."""
    try:
        return ActionInput(spec, "action").take(value, lead)
    except InputError:
        return None


def is_allowed(spec, value) -> bool:
    """Say the same slowly: what is continuous must be finite, else the spec must hold it."""
    if spec.dtype.is_floating_point:
        return bool(value.isfinite().all())
    return spec.is_in(value)


@pytest.mark.parametrize("kind", SPECS)
@given(data=st.data())
def test_one_value_is_refused_where_the_spec_does_not_hold_it(kind, data):
    spec = SPECS[kind]
    value = anything(spec, data)

    found = taken(spec, value)

    assert (found is value) if is_allowed(spec, value) else (found is None)


@pytest.mark.parametrize("kind", SPECS)
@given(data=st.data(), count=st.integers(2, 4))
def test_rows_are_refused_where_the_spec_does_not_hold_one_of_them(kind, data, count):
    spec = SPECS[kind]
    values = [anything(spec, data) for _ in range(count)]

    found = taken(spec, torch.stack(values), (count,))

    assert (found is not None) is all(is_allowed(spec, value) for value in values)


@pytest.mark.parametrize(
    "kind", [kind for kind, spec in SPECS.items() if not spec.dtype.is_floating_point]
)
@given(data=st.data())
def test_integers_change_their_dtype_where_the_spec_holds_the_number(kind, data):
    spec = SPECS[kind]
    value = anything(spec, data, INTEGERS)
    wide = value.to(torch.int64)
    number_is_held = torch.equal(wide.to(spec.dtype).to(torch.int64), wide) and spec.is_in(
        wide.to(spec.dtype)
    )

    converted = taken(spec, value)

    assert (converted is not None) is number_is_held
    if converted is not None:
        assert converted.dtype == spec.dtype and torch.equal(converted.to(torch.int64), wide)


@pytest.mark.parametrize("number", [-(2**40), -129, -2, 3, 128, 255, 256, 2**40])
@pytest.mark.parametrize("kind", ["categorical", "unbounded unsigned", "small bounded integers"])
def test_no_integer_wraps_around(kind, number):
    spec = SPECS[kind].cast(torch.int8) if kind == "categorical" else SPECS[kind]
    value = torch.full(spec.shape, number)

    found = taken(spec, value)

    assert found is None or found.tolist() == value.tolist()
    assert (found is None) is not (kind == "unbounded unsigned" and 0 <= number < 256)


@pytest.mark.parametrize(
    "kind", [kind for kind, spec in SPECS.items() if not spec.dtype.is_floating_point]
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_whole_floats_are_the_integers_they_equal(kind, dtype):
    spec = SPECS[kind]
    value = spec.rand()
    if kind == "unbounded integers":
        value = value % 100  # which float16 and bfloat16 hold exactly

    found = taken(spec, value.to(dtype))

    assert found is not None and found.dtype == spec.dtype and torch.equal(found, value)


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind, spec in SPECS.items()
        if not spec.dtype.is_floating_point and "hot" not in kind
    ],
)
@pytest.mark.parametrize("number", [0.7, 0.9999999, 1.0000001, -0.3])
def test_floats_between_integers_are_refused_with_their_row(kind, number):
    spec = SPECS[kind]
    values = torch.stack([spec.rand(), spec.rand()]).double()
    values[1].view(-1)[0] = number

    with pytest.raises(
        InputError, match=r"of row 1 is .*env takes torch.*a cast would change.*Round"
    ):
        ActionInput(spec, "gear").take(values, (2,))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30, -1e30, 2.0**63, 2.0**64])
@pytest.mark.parametrize("kind", ["bounded integers", "unbounded integers", "categorical"])
def test_floats_that_no_integer_equals_are_refused(kind, number):
    spec = SPECS[kind]

    assert taken(spec, torch.full(spec.shape, number, dtype=torch.float64)) is None


def test_a_whole_float_out_of_range_is_refused_as_an_integer_is():
    with pytest.raises(InputError, match=r"is 3\., but must be an integer from 0 to 2"):
        ActionInput(SPECS["categorical"], "action").take(torch.tensor(3.0))


@pytest.mark.parametrize("wanted", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_become_floats_that_hold_them_exactly(dtype, wanted):
    value = torch.tensor([0, 1]).to(dtype)

    found = taken(Bounded(-1.0, 1.0, (2,), dtype=wanted), value)

    assert found is not None and found.dtype == wanted and found.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("wanted", "number"),
    [
        (torch.float32, 2**24 + 1),
        (torch.float16, 2**11 + 1),
        (torch.float16, 10**6),
        (torch.float64, 2**53 + 1),
        (torch.float32, 2**63 - 1),
    ],
)
def test_integers_between_floats_are_refused(wanted, number):
    check = ActionInput(Unbounded((2,), dtype=wanted), "force")

    with pytest.raises(InputError, match=r"a cast would change it.*Pass floats: value\.to"):
        check.take(torch.tensor([0, number]))


def test_complex_numbers_are_no_actions_of_others():
    with pytest.raises(InputError, match=r"dtype torch.complex64, but the env takes torch.float32"):
        ActionInput(SPECS["bounded"], "force").take(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize("wanted", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_rounded_to_the_dtype_of_the_spec(dtype, wanted):
    value = torch.tensor([0.3, 2.0000002], dtype=dtype)

    found = taken(Bounded(-2.0, 2.0, (2,), dtype=wanted), value)

    assert found is not None and found.dtype == wanted
    assert torch.equal(found, value.to(wanted))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["bounded", "half bounded", "unlike bounds"])
def test_nan_and_infinity_are_no_actions(kind, number):
    value = torch.zeros(SPECS[kind].shape)
    value[..., 1] = number

    with pytest.raises(InputError, match=r"(?s)'force' is .*NaN and infinity come from the policy"):
        ActionInput(SPECS[kind], "force").take(value)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["one-hot", "one-hot bools", "one-hot grid", "many-hot"])
@given(data=st.data())
def test_a_float_one_hot_is_taken_where_it_is_one_but_for_rounding(kind, dtype, data):
    spec = SPECS[kind]
    value = spec.rand()
    rounded = value.to(dtype) * data.draw(st.sampled_from([0.995, 1.0, 1.004])) - 0.001

    found = taken(spec, rounded)

    assert found is not None and found.dtype == spec.dtype and torch.equal(found, value)


def test_what_is_a_little_less_than_one_is_chosen():
    value = torch.tensor([[0.0, 0.0, 0.99999994], [1.0000001, 0.0, 0.0]])

    found = taken(OneHot(3, dtype=torch.int64), value, (2,))

    assert found is not None and found.argmax(-1).tolist() == [2, 0]


WRONG = [
    [0.0, 0.0, 0.0],
    [1.0, 1.0, 0.0],
    [torch.nan, 1.0, 0.0],
    [0.0, 1.0, torch.inf],
    [0.2, 0.7, 0.1],
    [3.0, 0.0, 0.0],
    [-1.0, 0.0, 0.0],
    [1.0, -1.0, 0.0],
    [0.97, 0.02, 0.01],
]


@pytest.mark.parametrize("row", WRONG, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("spelled_in", [torch.int64, torch.float32, torch.bool])
def test_floats_that_are_not_one_hot_choose_nothing(row, dtype, spelled_in):
    rule = ActionInput(OneHot(3, dtype=spelled_in), "action")

    with pytest.raises(InputError, match="must be one-hot: a single 1 among 3 entries"):
        rule.take(torch.tensor(row, dtype=dtype))


def test_each_part_of_several_choices_is_one_hot():
    rule = ActionInput(MultiOneHot([2, 3]), "action")

    assert rule.take(torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0])).int().tolist() == [0, 1, 1, 0, 0]
    with pytest.raises(InputError, match=r"one-hot in each of its parts.*OneHotCategorical"):
        rule.take(torch.tensor([0.0, 1.0, 0.5, 0.3, 0.2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_straight_through_estimate_is_taken_in_any_precision(dtype):
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(200, 3, generator=generator).softmax(-1).to(dtype)
    hot = torch.eye(3, dtype=dtype)[torch.arange(200) % 3]

    found = taken(OneHot(3), hot + probabilities - probabilities.detach(), (200,))

    assert found is not None and found.int().argmax(-1).equal(torch.arange(200) % 3)


def test_which_options_a_mask_allows_is_left_to_the_env():
    spec = Categorical(3, shape=(), mask=torch.tensor([True, False, True]))

    found = [taken(spec, torch.tensor(number)) is not None for number in (-1, 0, 1, 2, 3)]

    assert found == [False, True, True, True, False]


def test_the_first_bad_row_is_named_by_its_number():
    check = ActionInput(Bounded(-1, 1, (1,), dtype=torch.int64), "gear")
    rows = torch.tensor([[0], [3], [4]])

    with pytest.raises(InputError, match=r"'gear' of row 1 is \[3\], but must lie between -1 and"):
        check.take(rows, (3,))
    with pytest.raises(InputError, match=r"of row 9 is \[4\]"):
        check.take(rows, (3,), rows=[0, 2], first=7)
    with pytest.raises(InputError, match=r"of row 5 is \[3\]"):
        check.take(rows[1], first=5)
    with pytest.raises(InputError, match=r"of row \(1, 0\) is \[3\]"):
        check.take(rows[[0, 0, 1, 2]].reshape(2, 2, 1), (2, 2))


def test_rows_that_are_not_stepped_are_not_looked_at():
    converted = ActionInput(SPECS["bounded"], "force").take(
        torch.tensor([[torch.nan, 0.0], [0.5, 9.0]]), (2,), rows=[1]
    )

    assert converted[1].tolist() == [0.5, 9.0]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, MissingKeyError, r"no 'force'.*rand_action"),
        (torch.zeros(3), InputError, r"shape \(3,\), but the env takes \(2,\)"),
        (
            torch.zeros(2, dtype=torch.complex64),
            InputError,
            r"complex64.*value.to\(torch.float32\)",
        ),
        (torch.zeros(2, device="meta"), InputError, r"meta device"),
        (
            np.zeros(2, np.float32),
            InputError,
            r"type ndarray, of numpy, but the env takes a tensor.*from_dlpack",
        ),
    ],
)
def test_values_of_another_form_are_refused(value, error, message):
    with pytest.raises(error, match=message):
        ActionInput(Unbounded((2,)), "force").take(value)


def test_a_gradient_flows_through():
    value = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    found = taken(Unbounded((2,)), value)

    assert found is not None and torch.autograd.grad(found.sum(), value)[0].tolist() == [1.0, 1.0]
