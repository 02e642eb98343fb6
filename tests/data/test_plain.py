"""What is saved as tensors, numbers and strings comes back as it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from envkit.data.plain import from_plain, plain
from envkit.errors import ResumeError
from tests.zoo.resumed import as_read_again

DTYPES = [bool, "u1", "u2", "u4", "u8", "i1", "i8", "f2", "f4", "f8", "c16", ">f8", "U3", "S3"]


def again(value):
    return from_plain(as_read_again(plain(value)))


@settings(max_examples=50)
@given(st.data())
def test_arrays_come_back_with_shape_dtype_and_bits(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    array = data.draw(
        hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    )

    found = again(array)

    assert type(found) is np.ndarray and (found.shape, found.dtype) == (array.shape, array.dtype)
    assert found.tobytes() == array.tobytes()


@settings(max_examples=50)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**130), 2**130)
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text() | st.integers(), inner)
        ),
        max_leaves=8,
    )
)
def test_nested_values_come_back(value):
    assert again(value) == value


def test_a_dict_that_looks_like_one_of_ours_comes_back():
    value = {"__kind__": "tuple", "value": [1]}

    assert again(value) == value


def test_generators_go_on_where_they_were():
    one, two = np.random.default_rng(3), np.random.Generator(np.random.MT19937(4))
    torch_one = torch.Generator().manual_seed(5)
    torch.rand(3, generator=torch_one)

    for generator in (one, two):
        other = np.random.Generator(type(generator.bit_generator)())
        other.bit_generator.state = again(generator.bit_generator.state)
        assert other.random() == generator.random()
    assert torch.rand(2, generator=again(torch_one)).equal(torch.rand(2, generator=torch_one))
    state = random.getstate()
    assert again(state) == state
    assert again(np.float32(0.1)) == np.float32(0.1) and type(again(np.float32(0.1))) is np.float32
    assert again(slice(1, 5)) == slice(1, 5)


def test_a_tensordict_comes_back_with_all_that_it_is():
    td = TensorDict(
        {
            "a": torch.rand(2, 3),
            "nested": {
                "b": torch.zeros(2, 3, 1, dtype=torch.bool),
                "deeper": TensorDict({}, [2, 3]),
            },
            "word": NonTensorData("x", batch_size=[2, 3]),
        },
        [2, 3],
        names=["row", "time"],
        device="cpu",
    )

    copied = again(td)

    assert (copied["a"] == td["a"]).all() and copied["nested", "b"].dtype == torch.bool
    assert (copied.batch_size, copied.names, copied.device) == (td.batch_size, td.names, td.device)
    assert copied["word"] == "x" and copied["nested"].batch_size == torch.Size([2, 3])
    assert set(copied.keys(True)) == set(td.keys(True))


def test_stacks_of_unlike_data_come_back():
    parts = [TensorDict({"a": torch.rand(n), "s": NonTensorStack("p", "q")}) for n in (2, 3)]
    lazy = LazyStackedTensorDict(*parts, stack_dim=0)

    found = again(lazy)

    assert isinstance(found, LazyStackedTensorDict) and found.batch_size == lazy.batch_size
    for one, other in zip(found.unbind(0), parts, strict=True):
        assert one["a"].equal(other["a"]) and one["s"] == other["s"]


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.array(["2020-01-01"], "M8[D]"), np.zeros(1, "f4,f4")]
)
def test_what_has_no_plain_form_is_named(value):
    with pytest.raises(ResumeError, match=r"the wish\['deep'\]\[1\] is"):
        plain({"deep": [0, value]}, "the wish")


def test_what_is_given_is_copied():
    tensor, array = torch.zeros(2), np.zeros(2)
    held = plain([tensor, array])

    tensor += 1
    array += 1

    first, second = from_plain(held)
    assert not first.any() and not second.any()
    second += 1
    assert not from_plain(held)[1].any()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_nested_tensors_come_back(dtype):
    parts = [torch.arange(2, dtype=dtype), torch.arange(3, dtype=dtype)]
    nested = torch.nested.nested_tensor(parts)

    found = again(TensorDict({"a": nested}, [2]))["a"]

    assert found.dtype == dtype
    assert all(map(torch.equal, found.unbind(), nested.unbind()))
