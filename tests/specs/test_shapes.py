"""Shape operations on leaf specs and on trees of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit.specs import (
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    NonTensor,
    OneHot,
    Unbounded,
)
from tests.specs.strategies import leaves

few = settings(max_examples=40)

batches = st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)


@st.composite
def trees(draw):
    """Draw a composite with a batch of one or two axes, a leaf and a nested leaf."""
    shape = draw(batches)
    leading = st.lists(st.integers(1, 3), max_size=1).map(lambda rest: (*shape, *rest))
    inner = Composite(leaf=draw(leaves(leading)), shape=shape)
    return Composite(leaf=draw(leaves(leading)), inner=inner, shape=shape)


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        (0, (3,)),
        (-1, (3,)),
        (slice(1, 3), (2, 3)),
        ((..., slice(None, 1)), (4, 1)),
        ((..., 0), (4,)),
        ((None, 0), (1, 3)),
        ((), (4, 3)),
        ([0, 2], (2, 3)),
        (torch.tensor([0, 1, 1]), (3, 3)),
        (torch.tensor([True, False, True, True]), (3, 3)),
        ((0, 0), ()),
    ],
)
def test_a_leaf_is_indexed_as_a_tensor_is(index, shape):
    low = -torch.arange(12.0).reshape(4, 3)
    spec = Bounded(low, 1)

    indexed = spec[index]

    assert tuple(indexed.shape) == shape
    assert torch.equal(indexed.low, low[index])
    assert indexed.rand().shape == shape


def test_an_index_out_of_range_is_an_index_error():
    with pytest.raises(IndexError):
        Unbounded((2,))[2]
    with pytest.raises(IndexError):
        Unbounded((2,))[0, 0]
    assert [spec.shape for spec in Unbounded((2, 3))] == [(3,), (3,)]


def test_the_encoding_axis_cannot_be_indexed_away():
    spec = OneHot(4, (3, 4))

    assert spec[0] == OneHot(4)
    assert spec[..., :] == spec
    for index in ((0, 0), (..., 0), (slice(None), slice(0, 2))):
        with pytest.raises(ValueError, match="first 1 axes"):
            spec[index]
    with pytest.raises(ValueError, match="encoding axis"):
        spec.unsqueeze(-1)
    with pytest.raises(ValueError, match="encodes a value"):
        spec.reshape(12)


def test_a_mask_follows_the_shape():
    mask = torch.tensor([[True, False, True], [False, True, False]])
    spec = Categorical(3, (2,), mask=mask)

    assert spec[1].rand((5,)).tolist() == [1] * 5
    assert torch.equal(spec.unsqueeze(0).mask, mask[None])
    assert torch.equal(OneHot(3, (2, 3), mask=mask)[0].mask, mask[0])


def test_expand_adds_leading_axes_and_grows_axes_of_one():
    spec = Bounded(-1, 1, (1, 3))

    assert spec.expand(5, 4, 3).shape == (5, 4, 3)
    assert spec.expand((2, 1, 3)).rand().shape == (2, 1, 3)
    assert spec.expand(2, -1, 3).shape == (2, 1, 3)
    assert spec.expand(torch.Size((4, 3))).low.shape == (4, 3)
    for sizes in ((4, 2), (3,), (3, 4)):
        with pytest.raises(ValueError, match=r"expand"):
            spec.expand(*sizes)


def test_squeeze_and_unsqueeze_work_as_for_tensors():
    assert Unbounded((4, 1, 3, 1)).squeeze().shape == (4, 3)
    assert Unbounded((4, 1, 3, 1)).squeeze(1).shape == (4, 3, 1)
    assert Unbounded((4, 1)).squeeze(0).shape == (4, 1)
    assert Unbounded((4, 3)).unsqueeze(-1).shape == (4, 3, 1)
    assert Unbounded((4, 3)).unsqueeze(0).shape == (1, 4, 3)
    with pytest.raises(ValueError, match="does not exist"):
        Unbounded((4, 3)).unsqueeze(3)


def test_reshape_flatten_and_unflatten_work_as_for_tensors():
    spec = Bounded(torch.arange(6.0).reshape(2, 3), 9)

    assert torch.equal(spec.reshape(3, 2).low, torch.arange(6.0).reshape(3, 2))
    assert spec.view(-1).shape == (6,)
    assert spec.flatten().shape == (6,)
    assert spec.flatten(0, 1).unflatten(0, (2, -1)) == spec
    assert OneHot(4, (2, 3, 4)).flatten(0, 1).shape == (6, 4)
    with pytest.raises(ValueError, match="product is 6"):
        spec.reshape(4)
    with pytest.raises(ValueError, match="after end"):
        spec.flatten(1, 0)


def test_unbind_gives_a_tuple_of_specs():
    assert Bounded([-1.0, -2.0], 1).unbind() == (Bounded(-1, 1), Bounded(-2, 1))
    assert len(Unbounded((4, 3)).unbind(1)) == 3
    assert Unbounded((4, 3)).unbind(-1)[0].shape == (4,)


def test_a_dynamic_axis_makes_data_of_size_one_and_accepts_any_size():
    spec = Bounded(-1, 1, (4, 3)).make_neg_dim(1)

    assert spec.shape == (4, -1)
    assert spec.rand((2,)).shape == (2, 4, 1)
    assert spec.zero().shape == (4, 1)
    assert spec.is_in(torch.zeros(4, 7))
    assert not spec.is_in(torch.zeros(5, 7))
    assert spec[0].shape == (-1,)
    assert spec.unsqueeze(0).shape == (1, 4, -1)
    assert spec.expand(2, 4, -1).shape == (2, 4, -1)
    assert spec.flatten().shape == (-1,)
    assert Unbounded((-1, 3)).rand().shape == (1, 3)
    assert Composite(a=spec, shape=(4,))[0]["a"].shape == (-1,)


@given(spec=leaves(batches), data=st.data())
@few
def test_a_sample_of_an_indexed_leaf_has_the_shape_of_an_indexed_sample(spec, data):
    index = data.draw(st.sampled_from([0, -1, slice(None), slice(0, 1), None, ..., [0], (0, None)]))

    assert spec[index].rand().shape == spec.rand()[index].shape
    assert spec[index].is_in(spec[index].rand())


@given(tree=trees(), data=st.data())
@few
def test_indexing_a_tree_commutes_with_sampling(tree, data):
    index = data.draw(st.sampled_from([0, -1, slice(None), slice(0, 1), None, [0], (0, None)]))

    indexed, sample = tree[index], tree.rand()[index]

    assert indexed.shape == sample.batch_size
    assert indexed.is_in(sample) or index is None  # a wider box cannot exclude its own sample
    for key in tree.keys(True, True):
        assert indexed[key].shape == sample[key].shape


@given(tree=trees(), lead=st.lists(st.integers(1, 3), max_size=2).map(tuple))
@few
def test_expanding_a_tree_commutes_with_sampling(tree, lead):
    expanded = tree.expand(*lead, *tree.shape)

    assert expanded.shape == (*lead, *tree.shape)
    assert expanded.is_in(tree.rand(lead))
    assert tree.is_in(expanded.rand())


@given(tree=trees(), copies=st.integers(1, 3), data=st.data())
@few
def test_stacking_equal_trees_commutes_with_sampling(tree, copies, data):
    dim = data.draw(st.integers(0, tree.ndim))

    stacked = torch.stack([tree.clone() for _ in range(copies)], dim)

    assert type(stacked) is Composite
    assert stacked.is_in(torch.stack([tree.rand() for _ in range(copies)], dim))
    assert stacked[(slice(None),) * dim + (0,)] == tree


@given(tree=trees())
@few
def test_shape_operations_on_a_tree_touch_batch_axes_only(tree):
    sample = tree.rand()
    before, after = tree.unsqueeze(0), tree.unsqueeze(-1)

    assert before.is_in(sample.unsqueeze(0))
    assert after.is_in(sample.unsqueeze(-1))
    assert after.squeeze(-1) == tree
    assert tree.flatten().is_in(sample.reshape(-1))
    assert tree.flatten().unflatten(0, tree.shape) == tree
    assert tree.unbind(0)[0].is_in(sample[0])


def test_a_composite_inserts_an_axis_inside_each_leaf():
    tree = Composite(a=Unbounded((4, 3)), shape=(4,))

    assert tree.unsqueeze(-1)["a"].shape == (4, 1, 3)
    assert tree.unsqueeze(-1).shape == (4, 1)
    assert tree.reshape(2, 2)["a"].shape == (2, 2, 3)
    assert tree[(0,) * tree.ndim]["a"].shape == (3,)
    assert tree[()] == tree
    with pytest.raises(IndexError):
        tree[0, 0]


def test_choices_and_objects_follow_shape_operations():
    choice = Choice([Categorical(2, (4,)), Categorical(3, (4,))])

    assert choice[0] == Choice([Categorical(2), Categorical(3)])
    assert choice.expand(2, 4).rand().shape == (2, 4)
    assert choice.make_neg_dim(0).shape == (-1,)
    assert NonTensor((2, 3)).flatten().shape == (6,)
    assert MultiCategorical([[2, 3], [4, 5]])[1] == MultiCategorical([4, 5])
