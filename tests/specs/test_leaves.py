"""Leaf specs: what they make, accept and repair."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit.errors import ArgumentError, SpecMaskError
from envkit.specs import (
    Binary,
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    BoxList,
    Categorical,
    CategoricalBox,
    Choice,
    ContinuousBox,
    DiscreteBox,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)
from tests.specs.kinds import KINDS
from tests.specs.strategies import leaves, shapes

few = settings(max_examples=40)

ONE_OF_EACH = {
    "bounded": Bounded(-1, 1, (4, 3)),
    "bounded per entry": Bounded([-1.0, 0.0], [1.0, 5.0]),
    "bounded integers": Bounded(0, 255, (4, 2), dtype=torch.uint8),
    "bounded depths": Bounded(100, 60_000, (4, 2), dtype=torch.uint16),
    "bounded hashes": Bounded(5, 2**64 - 2, (4, 2), dtype=torch.uint64),
    "bounded amplitudes": Bounded(-1 - 1j, 1 + 2j, (4, 2), dtype=torch.complex64),
    "unbounded": Unbounded((4, 3)),
    "unbounded integers": Unbounded((4, 3), dtype=torch.int64),
    "categorical": Categorical(3, (4,)),
    "flag": Categorical(2, (4,), dtype=torch.bool),
    "one-hot": OneHot(3, (4, 3)),
    "multi-categorical": MultiCategorical([2, 3]),
    "multi-one-hot": MultiOneHot([2, 3]),
    "binary": Binary(4),
    "choice": Choice([Bounded(-1, 0, (2,)), Bounded(3, 4, (2,))]),
}

each_leaf = pytest.mark.parametrize("spec", ONE_OF_EACH.values(), ids=ONE_OF_EACH.keys())


@pytest.mark.parametrize(
    ("spec", "shape", "dtype"),
    [
        (Bounded(-1, 1), (), torch.float32),
        (Bounded(torch.zeros(3), 1), (3,), torch.float32),
        (Unbounded(), (1,), torch.float32),
        (Unbounded(2), (2,), torch.float32),
        (Categorical(4), (), torch.int64),
        (OneHot(4), (4,), torch.bool),
        (MultiCategorical([2, 3]), (2,), torch.int64),
        (MultiOneHot([2, 3]), (5,), torch.bool),
        (Binary(4), (4,), torch.int8),
        (NonTensor(), (), None),
    ],
)
def test_a_leaf_has_the_documented_default_shape_and_dtype(spec, shape, dtype):
    assert (tuple(spec.shape), spec.dtype, spec.device) == (shape, dtype, torch.device("cpu"))


def test_the_dtype_selects_the_class_and_the_domain():
    assert type(Bounded(0, 1)) is BoundedContinuous
    assert type(Bounded(0, 1, dtype=torch.int32)) is BoundedDiscrete
    assert type(Unbounded(dtype=torch.float64)) is UnboundedContinuous
    assert type(Unbounded(dtype=torch.bool)) is UnboundedDiscrete
    assert type(Bounded(0, 1, domain="discrete")) is BoundedDiscrete
    assert isinstance(BoundedDiscrete(0, 3), Bounded)
    assert Bounded(0, 1).domain == "continuous"
    assert Categorical(3).domain == "discrete"


def test_the_space_describes_the_domain():
    assert torch.equal(Bounded(-1, 1, (2,)).space.low, torch.tensor([-1.0, -1.0]))
    assert Bounded(-1, 1, (2,)).space == ContinuousBox(-torch.ones(2), torch.ones(2))
    assert Categorical(5).space.n == 5
    assert [box.n for box in MultiOneHot([2, 3]).space] == [2, 3]
    assert [box.n for box in MultiCategorical([2, 3]).space] == [2, 3]
    assert Binary(4).space.n == 4
    assert NonTensor().space is None
    assert Unbounded((2,), dtype=torch.uint8).space.high.tolist() == [255, 255]
    assert DiscreteBox is CategoricalBox
    assert MultiCategorical([2, 3]).space == BoxList.from_nvec([2, 3])
    assert BoxList.from_nvec(torch.tensor([[2], [3]]))[1][0] == CategoricalBox(3)
    for space in (BoxList.from_nvec([2, 3]), Bounded(-1, 1, (2,)).space, Binary(4).space):
        assert space.clone() == space.to("cpu") == space


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: OneHot(4, shape=(3,)), r"Pass shape \(4,\)"),
        (lambda: MultiOneHot([2, 3], shape=(4,)), r"Pass shape \(5,\)"),
        (lambda: Bounded(1, 0), "Exchange the bounds"),
        (lambda: Bounded(torch.zeros(3), 1, shape=(2,)), "arrays of the spec's shape"),
        (lambda: Bounded(0, 300, dtype=torch.uint8), "outside the range of torch.uint8"),
        (lambda: Bounded(0, 1, domain="discrete", dtype=torch.float32), "contradicts"),
        (lambda: BoundedDiscrete(0, 1, dtype=torch.float32), "contradicts"),
        (lambda: Unbounded(domain="smooth"), "'continuous' or 'discrete'"),
        (lambda: Bounded(0, 1j, dtype=torch.float32), "complex dtype"),
        (lambda: Binary(2, dtype=torch.complex64), "a real one"),
        (lambda: OneHot(2, dtype=torch.complex64), "integer dtype"),
        (lambda: Categorical(2.5), "whole number"),
        (lambda: Categorical(0), "at least one"),
        (lambda: Categorical(3, dtype=torch.bool), "integer dtype"),
        (lambda: Binary(), "Binary"),
        (lambda: Binary(3, (4,)), r"shape \(3,\)"),
        (lambda: Choice([]), "at least one spec"),
        (lambda: Choice([Unbounded(1), Unbounded(2)]), "same kind"),
    ],
)
def test_a_spec_that_describes_nothing_is_refused_with_advice(make, advice):
    with pytest.raises(ValueError, match=advice):
        make()


def test_specs_are_equal_when_type_shape_dtype_device_and_domain_agree():
    assert Bounded(-1, 1, (2,)) == Bounded([-1, -1], [1, 1])
    assert Unbounded((2,)) != Unbounded((3,))
    assert Unbounded((2,)) != Unbounded((2,), dtype=torch.float64)
    assert Bounded(-1, 1, (2,)) != Bounded(-1, 2, (2,))
    assert Unbounded((2,)) != Unbounded((2,), device="meta")
    assert Categorical(3) != Categorical(4)
    assert Categorical(3) != Categorical(3, mask=torch.tensor([True, True, False]))
    assert OneHot(4) != Categorical(4)
    assert Unbounded((2,)) != 3


# -- making values ---------------------------------------------------------------------


def test_the_shape_given_to_rand_is_a_prefix():
    assert Bounded(-1, 1, shape=(4, 3)).rand((2,)).shape == (2, 4, 3)


@given(spec=leaves(), prefix=shapes)
@few
def test_a_sample_is_in_its_spec(spec, prefix):
    value = spec.rand(prefix)

    assert value.shape == (*prefix, *spec.shape)
    assert value.dtype == spec.dtype
    assert spec.is_in(value)
    assert value in spec


@given(spec=leaves(), prefix=shapes)
@few
def test_zero_and_one_fill_shape_and_dtype_only(spec, prefix):
    for value, fill in ((spec.zero(prefix), 0), (spec.ones(prefix), 1)):
        assert value.shape == (*prefix, *spec.shape)
        assert value.dtype == spec.dtype
        assert (value == fill).all()


def test_zeros_may_lie_outside_the_domain():
    assert Bounded(1, 2, shape=(1,)).zero() == 0
    assert not Bounded(1, 2, shape=(1,)).is_in(torch.zeros(1))
    assert not OneHot(4).is_in(OneHot(4).zero())


@given(
    low=st.floats(width=32, allow_nan=False),
    high=st.floats(width=32, allow_nan=False),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
@few
def test_a_bounded_sample_is_finite_and_inside_for_any_bounds(low, high, dtype):
    bounds = torch.tensor([low, high], dtype=torch.float64).to(dtype)
    if bounds.isinf().all() and bounds[0] == bounds[1]:  # no finite number lies in [inf, inf]
        return
    spec = Bounded(bounds.min(), bounds.max(), (50,), dtype=dtype)

    value = spec.rand()

    assert value.isfinite().all()
    assert spec.is_in(value)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
)
def test_integers_are_drawn_from_the_whole_range_of_the_dtype(dtype):
    torch.manual_seed(0)

    values = Unbounded((2000,), dtype=dtype).rand()

    middle = 0.5 if dtype in (torch.bool,) else (127.5 if dtype is torch.uint8 else 0)
    assert 0.4 < (values.double() > middle).double().mean() < 0.6


@pytest.mark.parametrize(
    "make",
    [
        lambda: Bounded(0, 1, (2,), device="meta"),
        lambda: Bounded(0, 5, (2,), device="meta", dtype=torch.int64),
        lambda: Bounded(torch.zeros(2, device="meta"), 1.0),
        lambda: Bounded(0, torch.ones(2, device="meta", dtype=torch.int64), dtype=torch.int64),
        lambda: MultiCategorical([3, 4], device="meta"),
    ],
)
def test_numbers_of_a_spec_are_not_taken_from_the_meta_device(make):
    with pytest.raises(ArgumentError, match=r"meta device.*Make it on 'cpu' or an accelerator"):
        make()


@pytest.mark.parametrize("spec", [Bounded(0, 1, (2,)), MultiCategorical([3, 4])])
def test_a_spec_that_went_to_the_meta_device_is_printed_without_its_numbers(spec):
    assert "=unknown" in repr(spec.to("meta")) and "meta" in repr(spec.to("meta"))


def test_integer_bounds_are_both_reached():
    torch.manual_seed(0)

    assert Bounded(3, 5, dtype=torch.int64).rand((100,)).unique().tolist() == [3, 4, 5]
    spread = Bounded([0, 10], [1, 12], dtype=torch.int64).rand((100,))
    assert spread[:, 0].unique().tolist() == [0, 1]
    assert spread[:, 1].unique().tolist() == [10, 11, 12]


def test_unbounded_floats_are_standard_normal():
    torch.manual_seed(0)

    values = Unbounded((5000,)).rand()

    assert abs(values.mean()) < 0.1
    assert abs(values.std() - 1) < 0.1


def test_infinite_bounds_of_integers_become_the_ends_of_the_range():
    spec = Bounded(-float("inf"), float("inf"), (2,), dtype=torch.int64)

    assert spec.low.tolist() == [-(2**63)] * 2
    assert spec.high.tolist() == [2**63 - 1] * 2
    assert spec.is_in(spec.rand())


def test_enumerate_lists_all_values_on_a_new_first_axis():
    assert Categorical(3).enumerate().tolist() == [0, 1, 2]
    assert OneHot(4).enumerate().shape == (4, 4)
    assert OneHot(4).enumerate().int().tolist() == torch.eye(4).int().tolist()
    assert MultiCategorical([2, 3]).enumerate().shape == (6, 2)
    assert MultiCategorical([2, 3]).enumerate()[4].tolist() == [1, 1]
    assert MultiOneHot([2, 3]).enumerate().shape == (6, 5)
    assert Binary(3).enumerate().shape == (8, 3)
    assert Bounded(1, 3, dtype=torch.int32).enumerate().tolist() == [1, 2, 3]
    assert Choice([Categorical(2), Categorical(3)]).enumerate().tolist() == [0, 1, 2]
    assert torch.stack([Categorical(2), Categorical(3)]).enumerate().tolist() == [
        [i, j] for i in range(2) for j in range(3)
    ]


@each_leaf
def test_enumerate_agrees_with_cardinality(spec):
    if spec.cardinality() == float("inf"):
        with pytest.raises(NotImplementedError, match="discrete"):
            spec.enumerate()
    elif spec.cardinality() < 1000:
        values = spec.enumerate()
        assert len(values) == len(values.unique(dim=0)) == spec.cardinality()
        assert spec.is_in(values)


def test_cardinality_counts_the_values_of_one_position():
    assert Categorical(5).cardinality() == 5
    assert MultiCategorical([2, 3]).cardinality() == 6
    assert Categorical(3, (2,)).cardinality() == OneHot(3, (2, 3)).cardinality() == 3
    assert MultiOneHot([2, 3], (7, 5)).cardinality() == 6
    assert Binary(3, (2, 3)).cardinality() == 8
    assert Bounded(0, 2, (2,), dtype=torch.int64).cardinality() == 9
    assert Bounded(0, 1).cardinality() == float("inf")
    assert Choice([Categorical(2), Categorical(3)]).cardinality() == 3
    with pytest.raises(NotImplementedError):
        NonTensor().cardinality()


# -- testing and repairing -------------------------------------------------------------


def test_is_in_wants_the_dtype_and_the_trailing_shape_and_never_raises():
    spec = Bounded(-1, 1, (3,))

    assert spec.is_in(torch.zeros(3))
    assert spec.is_in(torch.zeros(5, 3))
    assert not spec.is_in(torch.zeros(2))
    assert not spec.is_in(torch.zeros(()))
    assert not spec.is_in(torch.zeros(3, dtype=torch.float64))
    assert not spec.is_in(torch.tensor([0.0, 0.0, 1.1]))
    assert not spec.is_in(torch.tensor([0.0, 0.0, float("nan")]))
    assert not spec.is_in("three")
    assert not spec.is_in(None)


def test_a_one_hot_value_has_exactly_one_active_entry():
    spec = OneHot(3)

    assert spec.is_in(torch.tensor([False, True, False]))
    assert not spec.is_in(torch.tensor([True, True, False]))
    assert not OneHot(3, dtype=torch.int64).is_in(torch.tensor([0, 2, 0]))
    assert not MultiOneHot([2, 2]).is_in(torch.tensor([True, True, False, False]))


@given(spec=leaves(), seed=st.integers(0, 1000), scale=st.sampled_from([0, 1, 7, 1000]))
@few
def test_project_lands_inside_and_is_idempotent(spec, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    noise = (torch.randn((2, *spec.shape), generator=generator) * scale).to(spec.dtype)

    projected = spec.project(noise)

    assert spec.is_in(projected)
    assert spec.project(projected) is projected


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (Bounded(-1, 1, (2,)), [0.0, 0.0]),
        (Bounded(2, 5, (2,)), [2.0, 2.0]),
        (Bounded(-5, -2, (2,), dtype=torch.float64), [-2.0, -2.0]),
        (Bounded(-1 - 1j, 1 + 1j, (2,), dtype=torch.complex64), [0j, 0j]),
        (torch.stack([Bounded(2, 5), Bounded(-5, -2)]), [2.0, -2.0]),
        (Choice([Bounded(2, 5, (2,)), Bounded(7, 8, (2,))]), [2.0, 2.0]),
        (Binary(2, dtype=torch.float32), [0.0, 0.0]),
        (Categorical(3, (2,), dtype=torch.float32), [0.0, 0.0]),
        (OneHot(2, dtype=torch.float32), [1.0, 0.0]),
        (MultiCategorical([2, 3], dtype=torch.float32), [0.0, 0.0]),
    ],
)
def test_project_takes_nan_for_zero_and_lands_inside(spec, value):
    projected = spec.project(torch.full((2,), torch.nan, dtype=spec.dtype))

    assert projected.tolist() == value
    assert spec.is_in(projected)
    assert not spec.is_in(torch.full((2,), torch.nan, dtype=spec.dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["rand", "zero", "one"])
def test_an_int_is_one_axis_in_front(kind, call):
    spec = KINDS[kind]

    made = getattr(spec, call)(3)

    assert len(made) == 3
    assert type(made) is type(getattr(spec, call)((3,)))


def test_project_gives_the_nearest_value():
    assert Categorical(5).project(torch.tensor(9)) == 4
    assert Bounded(-1, 1, (2,)).project(torch.tensor([-3.0, 0.5])).tolist() == [-1.0, 0.5]
    masked = Categorical(5, mask=torch.tensor([True, False, False, False, True]))
    assert masked.project(torch.tensor(3)) == 4
    assert masked.project(torch.tensor(1)) == 0
    one_hot = OneHot(3, mask=torch.tensor([True, False, True]))
    assert one_hot.project(torch.tensor([False, True, False])).tolist() in (
        [True, False, False],
        [False, False, True],
    )
    assert Bounded(0, 3, dtype=torch.int64).project(torch.tensor(7)) == 3
    assert Binary(2).project(torch.tensor([-4, 9], dtype=torch.int8)).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_integers_can_be_bounded(dtype):
    spec = Bounded(10, [20, 200], dtype=dtype)

    assert spec.is_in(spec.rand((50,)))
    assert not spec.is_in(spec.zero())
    assert spec.project(spec.zero()).tolist() == [10, 10]


def test_unsigned_64_bit_bounds_keep_every_digit():
    spec = Bounded([1, 2**63 + 1], [3, 2**64 - 1], dtype=torch.uint64)

    assert spec.low.tolist() == [1, 2**63 + 1]
    assert spec.cardinality() == 3 * (2**63 - 1)
    assert spec.is_in(torch.tensor([2, 2**63 + 1], dtype=torch.uint64))
    assert not spec.is_in(torch.tensor([2, 2**63], dtype=torch.uint64))
    assert spec.project(torch.tensor([9, 9], dtype=torch.uint64)).tolist() == [3, 2**63 + 1]
    assert Unbounded((2000,), dtype=torch.uint64).rand().double().median() > 2**62


def test_a_complex_box_bounds_real_and_imaginary_part():
    spec = Bounded(-1, 1 + 2j, (2,), dtype=torch.complex128)

    assert type(spec) is BoundedContinuous
    assert spec.is_in(torch.tensor([1j, 1 + 2j], dtype=torch.complex128))
    assert not spec.is_in(torch.tensor([1j, -1j], dtype=torch.complex128))
    assert spec.project(torch.tensor([5 - 5j, 3j], dtype=torch.complex128)).tolist() == [1, 2j]
    assert spec.unsqueeze(0).low.tolist() == [[-1, -1]]
    assert spec.cardinality() == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.uint64, torch.int8])
def test_a_categorical_holds_whole_numbers_of_any_dtype(dtype):
    spec = Categorical(3, (2,), dtype=dtype)

    assert spec.is_in(torch.tensor([0, 2]).to(dtype))
    assert not spec.is_in(torch.tensor([0, 3]).to(dtype))
    if dtype.is_floating_point:
        assert not spec.is_in(torch.tensor([0.5, 1.0]))
        assert spec.project(torch.tensor([0.6, 7.0])).tolist() == [1, 2]


def test_assert_is_in_says_what_is_wrong():
    spec = Bounded(-1, 1, (3,))

    with pytest.raises(AssertionError, match=r"got shape \(2,\)"):
        spec.assert_is_in(torch.zeros(2))
    with pytest.raises(AssertionError, match=r"got dtype torch\.int64.*project"):
        spec.assert_is_in(torch.zeros(3, dtype=torch.int64))
    spec.assert_is_in(torch.zeros(3))


def test_type_check_looks_at_the_dtype_only():
    spec = Bounded(-1, 1, (3,))

    spec.type_check(torch.full((7,), 9.0))
    with pytest.raises(TypeError, match=r"entry 'a' has dtype torch\.int64"):
        spec.type_check(torch.zeros(3, dtype=torch.int64), "a")


# -- masks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "mask"),
    [
        (Categorical(3), torch.tensor([True, False, True])),
        (OneHot(3), torch.tensor([True, False, True])),
        (MultiCategorical([2, 3]), torch.tensor([False, True, True, False, True])),
        (MultiOneHot([2, 3]), torch.tensor([False, True, True, False, True])),
    ],
)
def test_a_mask_rules_sampling_testing_projection_and_enumeration(spec, mask):
    everything = spec.enumerate()
    spec.update_mask(mask)

    allowed = spec.enumerate(use_mask=True)

    inside = [value for value in everything if spec.is_in(value)]
    assert 0 < len(inside) < len(everything)
    assert torch.equal(allowed, torch.stack(inside))
    assert len(spec.enumerate()) == len(everything)
    assert spec.is_in(spec.rand((50,)))
    assert spec.is_in(spec.project(everything))
    assert {str(v.tolist()) for v in spec.rand((300,))} == {str(v.tolist()) for v in allowed}


def test_a_batch_lists_what_all_its_rows_allow():
    spec = Categorical(3, (2,), mask=[[True, False, True], [False, True, True]])

    assert spec.enumerate().tolist() == [[0, 0], [1, 1], [2, 2]]
    assert spec.enumerate(use_mask=True).tolist() == [[2, 2]]


def test_what_is_listed_may_be_written_to():
    values = Categorical(3, (2,)).enumerate()

    values[0, 0] = 2

    assert values.tolist() == [[2, 0], [1, 1], [2, 2]]


def test_a_mask_that_allows_nothing_is_an_error_at_sampling_time():
    spec = Categorical(2, (2,))

    spec.update_mask(torch.tensor([[True, True], [False, False]]))

    with pytest.raises(ValueError, match="allows no option"):
        spec.rand()


@pytest.mark.parametrize("spec", [Categorical(4, (2,)), OneHot(4, (2, 4))])
@pytest.mark.parametrize("rows", [(), (3,), (3, 5)])
def test_the_options_of_several_choices_may_lie_on_one_axis_of_the_mask(spec, rows):
    mask = torch.rand(*rows, 2, 4) < 0.5
    mask[..., 1] = True
    flat, square = spec.expand(*rows, *spec.shape), spec.expand(*rows, *spec.shape)

    flat.update_mask(mask.flatten(-2))
    square.update_mask(mask)

    assert torch.equal(flat.mask, square.mask)
    with pytest.raises(SpecMaskError):
        flat.update_mask(mask.flatten(-2)[..., :7])


def test_a_mask_can_be_lifted():
    spec = Categorical(3, mask=torch.tensor([True, False, False]))

    spec.update_mask(None)

    assert spec == Categorical(3)


# -- non-tensors -----------------------------------------------------------------------


def test_non_tensor_specs_make_the_example_and_accept_any_object():
    spec = NonTensor(shape=(4,), example_data="a")

    for value in (spec.rand((2,)), spec.zero((2,)), spec.one((2,))):
        assert value.data == "a"
        assert value.batch_size == (2, 4)
        assert spec.is_in(value)
    assert spec.is_in("anything")
    assert spec.is_in(np.zeros(3))
    assert not spec.is_in(torch.zeros(4))
    assert spec.expand(3, 4).shape == (3, 4)
    assert spec[0].shape == ()
    assert spec.encode("b").data == "b"
    assert NonTensor((2,), example_data="a", batched=True).rand().tolist() == ["a", "a"]
    with pytest.raises(NotImplementedError):
        spec.enumerate()
    with pytest.raises(TypeError):
        spec.project(torch.zeros(4))


# ------------------------------------------------------------------------------------------ in a trace


class Calling(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def exported(function, *args):
    return torch.export.export(Calling(function), args, strict=False).module()


@pytest.mark.parametrize(
    "spec", [Bounded(-1, 1, (3,)), Unbounded((3,)), OneHot(3, dtype=torch.float32)]
)
def test_a_traced_projection_is_the_one_that_looks_at_values(spec):
    values = torch.tensor([[0.5, -2.0, 3.0], [0.0, 1.0, 0.0], [float("nan"), 1.0, -0.5]])

    traced = exported(spec.project, torch.zeros(3, 3))

    for value in (values, values[1:2].expand(3, 3)):
        torch.testing.assert_close(traced(value), spec.project(value), equal_nan=True)


def test_a_box_that_was_traced_draws_within_its_bounds_and_keeps_nothing_of_the_trace():
    low = torch.tensor([-1.0, 0.1, torch.finfo(torch.float32).min])
    spec = Bounded(low, torch.tensor([0.3, 0.2, torch.finfo(torch.float32).max]))

    traced = exported(lambda x: x + spec.rand((1000,)), torch.zeros(1000, 3))

    assert spec.is_in(traced(torch.zeros(1000, 3)))
    assert spec.is_in(spec.rand((1000,)))
    assert type(spec.rand()) is torch.Tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_no_bounds_are_exceeded_by_rounding(dtype):
    torch.manual_seed(0)
    ends = torch.randn(2, 20_000) * 10.0 ** torch.randint(-4, 4, (2, 20_000))
    low, high = ends.to(dtype).sort(0)[0]

    drawn = Bounded(low, high, dtype=dtype).rand((50,))

    assert (drawn >= low).all() and (drawn <= high).all()


def test_a_mask_cannot_be_changed_by_an_exported_program():
    spec = Categorical(3)

    with pytest.raises(SpecMaskError, match="while torch exports a program"):
        exported(lambda x: spec.update_mask(x > 0), torch.ones(3))

    assert spec.mask is None


@pytest.mark.parametrize(
    ("spec", "value", "nearest"),
    [
        (Bounded(0, 255, (1,), dtype=torch.uint8), 300.0, 255),
        (Bounded(-10, 10, (1,), dtype=torch.int8), 200, 10),
        (Bounded(0, 10, (1,), dtype=torch.int64), float("inf"), 10),
        (Categorical(5, shape=(1,)), 1e30, 4),
    ],
)
def test_a_value_beyond_the_range_of_a_dtype_is_projected_to_the_nearest_and_does_not_wrap(
    spec, value, nearest
):
    assert spec.project(torch.tensor([value])).tolist() == [nearest]


def test_fractions_are_projected_to_the_option_of_the_largest():
    assert OneHot(3).project(torch.tensor([0.1, 0.9, 0.3])).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
@pytest.mark.parametrize("spec", [Categorical(4), OneHot(4)])
def test_a_mask_may_be_spelled_in_integers(spec, dtype):
    spec = spec.clone()
    spec.update_mask(torch.tensor([0, 1, 0, 0], dtype=dtype))

    drawn = spec.rand((20,))

    assert (drawn if drawn.ndim == 1 else drawn.long().argmax(-1)).eq(1).all()


@pytest.mark.parametrize("mask", [[0, 2, 0, 0], [0.0, 1.0, 0.0, 0.0], [0, 1, 0]])
def test_what_is_no_mask_is_refused(mask):
    with pytest.raises(SpecMaskError, match="integers that are 0 and 1"):
        Categorical(4).update_mask(torch.tensor(mask))
