"""What holds for random specs: names of axes, stacks, reshapes, and the way to gymnasium and back."""

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from envkit.errors import SpecError
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
from envkit_bridges.gym.codecs import codec_of, space_of
from tests.specs.strategies import BOXES, CHOICES, leaves

few = settings(max_examples=40)

batches = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


# -- leaves ----------------------------------------------------------------------------


@given(spec=leaves(batches), data=st.data())
@few
def test_shape_operations_on_a_leaf_commute_with_sampling(spec, data):
    assume(not isinstance(spec, Choice))  # it refuses to merge rows with values
    free = spec.ndim - spec._encoding_ndim
    axis = data.draw(st.integers(0, free - 1))
    rest = tuple(spec.shape[free:])
    operation = data.draw(
        st.sampled_from(
            [
                lambda x: x.unsqueeze(axis),
                lambda x: x.squeeze(axis),
                lambda x: x.flatten(0, axis),
                lambda x: x.reshape(-1, *rest),
                lambda x: x.reshape((1, *x.shape[::-1][len(rest) :], *rest)),
                lambda x: x.unflatten(axis, (1, -1)),
                lambda x: x.expand(2, 1, *x.shape),
                lambda x: x.unbind(axis)[-1],
                lambda x: torch.stack([x, x], axis),
            ]
        )
    )

    changed, sample = operation(spec), operation(spec.rand())

    assert changed.shape == sample.shape
    assert changed.is_in(sample)
    assert changed.rand().shape == sample.shape


@given(spec=leaves(kinds=BOXES))
@few
def test_no_sample_is_nearer_than_the_projection(spec):
    noise = torch.randn(spec.shape, dtype=spec.dtype) * 3

    nearest = spec.project(noise)

    for other in spec.rand((20,)):
        assert ((nearest - noise).abs() <= (other - noise).abs()).all()


@given(spec=leaves(kinds=CHOICES))
@few
def test_choices_convert_there_and_back(spec):
    value = spec.rand((2,))

    hot, numbers = spec.to_one_hot(value), spec.to_categorical(value)
    assert torch.equal(spec.to_one_hot_spec().to_categorical(hot), numbers)
    assert torch.equal(spec.to_categorical_spec().to_one_hot(numbers), hot)


# -- names -----------------------------------------------------------------------------


@given(shape=batches, data=st.data())
@few
def test_names_follow_shape_operations_as_those_of_a_tensordict(shape, data):
    names = data.draw(
        st.lists(
            st.sampled_from(["a", "b", "c", None]),
            min_size=len(shape),
            max_size=len(shape),
            unique_by=lambda n: n or object(),
        )
    )
    assume(any(names))
    tree = Composite(x=Unbounded((*shape, 2)), shape=shape, names=names)
    axis = data.draw(st.integers(0, len(shape) - 1))
    operation = data.draw(
        st.sampled_from(
            [
                lambda x: x[0],
                lambda x: x[..., 0],
                lambda x: x[:1],
                lambda x: x[None, :1],
                lambda x: x[[0]],
                lambda x: x[torch.ones((*shape, 1)[:2], dtype=torch.bool)] if shape[1:] else x,
                lambda x: x.unsqueeze(axis),
                lambda x: x.squeeze(axis),
                lambda x: x.expand(2, *shape),
                lambda x: x.flatten(0, axis) if axis and 1 not in shape else x,
                lambda x: x.unbind(axis)[0],
                lambda x: torch.stack([x, x], axis),
            ]
        )
    )
    changed, sample = operation(tree), operation(tree.rand())

    assert changed.shape == sample.batch_size
    assert changed.names == sample.names
    assert changed.rand().names == changed.names


def test_a_stack_of_unlike_composites_has_names():
    members = [Composite(x=Unbounded((3, i)), shape=(3,), names=["time"]) for i in (1, 2)]
    stack = torch.stack(members)

    assert stack.names == [None, "time"]
    stack.names = ["env", "time"]
    for same in (stack, stack.clone(), stack.to("cpu")):
        assert same.rand((2,)).names == [None, "env", "time"]
    assert stack[0].names == ["time"]
    assert stack[:, 0].names == ["env"]
    assert stack.unsqueeze(1).names == ["env", None, "time"]
    assert stack.flatten(0, 1).names == [None]
    assert stack.refine_names("env", ...).names == ["env", "time"]
    assert "names=['env', 'time']" in repr(stack)


# -- stacks ----------------------------------------------------------------------------


def divisors(count):
    return [n for n in range(1, count + 1) if count % n == 0]


@st.composite
def reshapes(draw, count):
    """Draw sizes whose product is ``count``."""
    sizes = []
    while count > 1 and len(sizes) < 4:
        sizes.append(draw(st.sampled_from(divisors(count))))
        count //= sizes[-1]
    return (*sizes, count) if count > 1 or not sizes else tuple(sizes)


@given(shape=batches, members=st.integers(1, 3), data=st.data())
@few
def test_reshaping_a_stack_commutes_with_its_bounds(shape, members, data):
    dim = data.draw(st.integers(0, len(shape)))
    lows = torch.arange(members * np.prod(shape)).float().reshape(members, *shape)
    stack = torch.stack([Bounded(low, low + 0.5) for low in lows], dim)
    dense = Bounded(torch.stack(list(lows), dim), torch.stack(list(lows), dim) + 0.5)
    sizes = data.draw(reshapes(dense.numel()))

    changed = stack.reshape(sizes)

    assert changed.shape == sizes
    assert changed.is_in(dense.reshape(sizes).rand())
    assert dense.reshape(sizes).is_in(changed.rand())


@given(shape=batches, members=st.integers(2, 3), data=st.data())
@few
def test_reshaping_a_stack_of_composites_commutes_with_sampling(shape, members, data):
    dim = data.draw(st.integers(0, len(shape)))
    stack = torch.stack(
        [
            Composite(n=Categorical(i + 1, shape), m=Unbounded((*shape, i)), shape=shape)
            for i in range(members)
        ],
        dim,
    )
    sizes = data.draw(reshapes(members * int(np.prod(shape))))

    changed = stack.reshape(sizes)

    assert changed.shape == sizes
    assert changed.is_in(changed.rand())
    assert changed["n"].is_in(stack.rand()["n"].reshape(sizes))


def test_ragged_members_keep_their_own_axis_when_rows_are_merged():
    stack = torch.stack([Unbounded((5, 2)), Unbounded((5, 3))])

    merged = stack.flatten(0, 1)

    assert merged.shape == (10, -1)
    assert [merged[i].shape for i in (4, 5)] == [(2,), (3,)]
    assert merged.unflatten(0, (2, 5)) == stack


# -- gymnasium -------------------------------------------------------------------------


SPECS = {
    "box": Bounded(-1.0, 2.0, (3,)),
    "box per entry": Bounded([0.0, 1.0], [2.0, 3.0], dtype=torch.float64),
    "pixels": Bounded(0, 200, (2, 2), dtype=torch.uint8),
    "unbounded": Unbounded((3,)),
    "integers": Unbounded((3,), dtype=torch.int16),
    "hashes": Bounded(1, 200, (2,), dtype=torch.uint64),
    "categorical": Categorical(4),
    "categoricals": Categorical(4, (3,)),
    "multi-categorical": MultiCategorical([2, 3]),
    "text": NonTensor(example_data="a"),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_comes_back_from_its_gymnasium_space(name):
    spec = SPECS[name]
    space = space_of(spec)

    back = codec_of(space, categorical=True, key="x").spec()["x"]

    assert back == spec or isinstance(spec, NonTensor)
    if not isinstance(spec, NonTensor):
        for _ in range(5):
            assert space.contains(spec.to_numpy(spec.rand()))
            assert spec.is_in(spec.encode(space.sample()))


SPACED = ("cube", "box", "half-open", "integers", "integer box", "free", "bytes", "categorical")


@given(spec=leaves(batches, (*SPACED, "numbers")), data=st.data())
@few
def test_a_random_spec_and_its_gymnasium_space_hold_the_same_values(spec, data):
    assume(not isinstance(spec, Categorical) or spec.shape != (1,))  # Discrete holds bare numbers
    space = space_of(spec)
    space.seed(data.draw(st.integers(0, 9)))

    back = codec_of(space, categorical=True, key="x").spec()["x"]

    assert space.contains(spec.to_numpy(spec.rand()))
    assert spec.is_in(spec.encode(space.sample()))
    assert back.dtype == spec.dtype
    assert back.is_in(spec.rand().reshape(back.shape))
    assert spec.is_in(back.rand().reshape(spec.shape))


@given(spec=leaves(kinds=("one-hot", "one-hots", "binary")))
@few
def test_a_value_spelled_as_a_row_lies_in_the_box_of_its_spec(spec):
    space = space_of(spec)

    assert space.shape == spec.shape
    assert space.contains(spec.rand().numpy().astype(space.dtype))
    assert not spec.numel() or not space.contains(np.full(spec.shape, 2, space.dtype))


@pytest.mark.parametrize("kind", ["either", "stack"])
def test_a_spec_without_a_gymnasium_space_says_so(kind):
    spec = {
        "either": Choice([Bounded(0, 1), Bounded(2, 3)]),
        "stack": torch.stack([Categorical(2), Categorical(3)]),
    }[kind]

    with pytest.raises(SpecError, match=f"{type(spec).__name__} has no gymnasium space"):
        space_of(spec)


def test_a_tree_comes_back_from_its_gymnasium_space():
    tree = Composite({name: spec for name, spec in SPECS.items() if name != "text"})

    space = space_of(tree)

    assert isinstance(space, gymnasium.spaces.Dict)
    assert codec_of(space, categorical=True, key="x").spec() == tree
    assert tree.is_in(tree.encode(space.sample()))


@pytest.mark.parametrize("spec", [OneHot(4, dtype=torch.int64), Binary(3)])
def test_one_hot_and_binary_values_lie_in_their_box(spec):
    space = space_of(spec)

    for value in spec.rand((5,)):
        assert space.contains(value.numpy())
