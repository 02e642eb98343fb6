"""What of a leaf can be assigned, and that everything it does follows."""

import numpy as np
import pytest
import torch

from envkit.specs import (
    Binary,
    Bounded,
    BoundedDiscrete,
    Categorical,
    CategoricalBox,
    Choice,
    Composite,
    ContinuousBox,
    MultiCategorical,
    NonTensor,
    OneHot,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (Bounded(-1, 1, (2,)), (5, 3)),
        (Bounded([0, 1], [2, 3]), (4, 2)),
        (Bounded(0, 3, (), dtype=torch.int64), (2,)),
        (Unbounded((2,)), (3, 2)),
        (Categorical(3, mask=[True, False, True]), (4,)),
        (OneHot(3, (2, 3), mask=[True, False, True]), (5, 3)),
        (MultiCategorical([2, 3]), (4, 2)),
        (Binary(3), (2, 3)),
        (NonTensor((), example_data="a"), (2,)),
        (Choice([Categorical(2), Categorical(3)]), (4,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_shape_can_be_assigned_and_bounds_and_masks_follow(spec, shape):
    spec = spec.clone()
    spec.rand()

    spec.shape = shape

    assert spec.shape == torch.Size(shape)
    assert spec.rand((6,)).shape == (6, *shape)
    assert spec.is_in(spec.rand((6,)))
    assert spec.expand(2, *shape)[0] == spec


def test_a_shape_with_a_dynamic_axis_can_be_assigned():
    spec = Bounded(-1, 1, (4, 3))

    spec.shape = (-1, 3)

    assert spec.rand().shape == (1, 3)
    assert spec.is_in(torch.zeros(7, 3))


def test_dtype_and_device_can_be_assigned():
    spec = Bounded(-1, 1, (2,))

    spec.dtype = torch.int32
    assert type(spec) is BoundedDiscrete
    assert spec == Bounded(-1, 1, (2,), dtype=torch.int32)
    assert spec.rand().dtype == torch.int32

    spec.device = "meta"
    assert spec.zero().device.type == spec.space.low.device.type == "meta"


def test_bounds_can_be_exchanged_or_written_to():
    spec = Bounded(-1, 1, (2,))
    spec.rand()

    spec.space = ContinuousBox(torch.full((2,), 4.0), torch.full((2,), 5.0))
    assert (spec.rand((50,)) >= 4).all()

    spec.space.low[0] = 3
    assert spec.low.tolist() == [3, 4]
    spec.space.high = torch.tensor([3.5, 4.5])
    drawn = spec.rand((50,))
    assert spec.is_in(drawn)
    assert (drawn[:, 0] < 4).all() and (drawn[:, 1] >= 4).all()
    assert spec.project(torch.tensor([0.0, 9.0])).tolist() == [3, 4.5]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.uint8, torch.complex64])
def test_what_is_written_into_bounds_counts_at_the_next_draw(dtype):
    spec = Bounded(0, 1, (2,), dtype=dtype)
    spec.rand()

    spec.low[:] = 1

    assert (spec.rand((20,)) == 1).all() or dtype.is_complex
    assert spec.is_in(spec.rand((20,)))


def test_writing_into_the_bounds_of_one_spec_changes_no_other():
    spec = Bounded(-1, 1, (2,))
    others = [spec.clone(), spec.expand(3, 2), spec[None], Composite(a=spec, shape=(2,)).expand(2)]

    spec.space.low[0] = -5

    assert others[0] == Bounded(-1, 1, (2,))
    assert others[1] == Bounded(-1, 1, (3, 2))
    assert others[2] == Bounded(-1, 1, (1, 2))
    assert others[3]["a"] == Bounded(-1, 1, (2,))
    spec.clone().space.low[1] = -7
    assert spec.low.tolist() == [-5, -1]


def test_options_can_be_exchanged():
    number, several = Categorical(3, (2,), mask=[True, False, True]), MultiCategorical([2, 3])

    number.space = CategoricalBox(5)
    several.space = MultiCategorical([4, 4]).space

    assert number == Categorical(5, (2,))
    assert several == MultiCategorical([4, 4])
    with pytest.raises(ValueError, match="n=4"):
        OneHot(3).space = CategoricalBox(4)


def test_a_domain_can_be_noted():
    spec = Unbounded((2,))

    spec.domain = "discrete"

    assert spec.domain == "discrete" and spec.clone().domain == "discrete"
    assert Unbounded((2,)).domain == "continuous"


def test_a_leaf_changed_in_a_locked_tree_is_changed_there():
    tree = Composite(a=Unbounded((2,))).lock_()

    tree["a"].shape = (3,)

    assert tree.rand()["a"].shape == (3,)


def test_the_dtype_asks_for_the_class_of_an_unbounded_spec():
    assert type(UnboundedDiscrete(3, dtype=torch.float64)) is UnboundedContinuous
    assert UnboundedContinuous((3,), dtype=torch.int8) == Unbounded(3, dtype=torch.int8)
    assert type(UnboundedDiscrete(3)) is UnboundedDiscrete
    assert UnboundedDiscrete(3).dtype == torch.int64


def test_no_shape_is_the_shape_of_one_value():
    assert Categorical(3, shape=None).shape == ()
    for spec in (Unbounded(2), OneHot(3), NonTensor((2,)), Composite(a=Unbounded(2))):
        for make in (spec.rand, spec.sample, spec.zero, spec.zeros, spec.one, spec.ones):
            assert make(None).shape == spec.shape


def test_to_nothing_changes_nothing():
    for spec in (
        Unbounded(2),
        Composite(a=Unbounded(2)),
        torch.stack([Unbounded(2), Unbounded(3)]),
    ):
        assert spec.to(None) is spec


def test_a_new_axis_may_be_dynamic():
    spec = Bounded([0, 1], [2, 3]).expand(-1, 2)

    assert spec.shape == (-1, 2)
    assert spec.rand((4,)).shape == (4, 1, 2)
    assert spec.is_in(torch.ones(9, 2))
    assert Unbounded((-1, 3)).expand(2, -1, 3).shape == (2, -1, 3)


def test_examples_of_objects_tell_specs_apart():
    arrays = [NonTensor((), example_data=np.array([1, i])) for i in (1, 1, 2)]

    assert NonTensor((), example_data="a") != NonTensor((), example_data="b")
    assert arrays[0] == arrays[1] != arrays[2]


def test_objects_can_have_axes_of_their_own():
    spec = NonTensor((2, 3), example_data="a", feature_dims=1)

    value = spec.rand((4,))

    assert value.batch_size == (4, 2, 3)
    assert value[0, 0].data == "a" and value[0, 0].batch_size == (3,)
    assert spec.is_in(value)
    assert spec.feature_dims == spec.expand(5, 2, 3).feature_dims == 1
    assert NonTensor((2, 3)).feature_dims == 2 and not spec.batched


def test_torch_index_select_takes_specs():
    box = Bounded(torch.zeros(3, 2), torch.arange(6.0).reshape(3, 2) + 1)
    index = torch.tensor([2, 0])

    assert torch.index_select(box, 0, index) == Bounded(0, torch.tensor([[5.0, 6], [1, 2]]))
    masked = Categorical(2, (2,), mask=[[True, False], [False, True]])
    assert torch.index_select(masked, 0, torch.tensor(1)).mask.tolist() == [[False, True]]
    assert torch.index_select(MultiCategorical([2, 3]), -1, torch.tensor([1])).nvec.tolist() == [3]
    tree = Composite(a=Unbounded((3, 2)), b=Composite(shape=(3,)), shape=(3,), names=["row"])
    selected = torch.index_select(tree, 0, index)
    assert selected.shape == selected["b"].shape == (2,)
    assert selected["a"].shape == (2, 2) and selected.names == ["row"]
