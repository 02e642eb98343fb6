"""Values in and out of specs: copies, devices, raw data, NumPy, one-hot rows, indices."""

import pickle

import numpy as np
import pytest
import torch

from envkit.errors import EncodingError
from envkit.specs import (
    Bounded,
    BoundedDiscrete,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
)


def test_a_clone_does_not_share_its_mask():
    spec = Categorical(3)
    twin = spec.clone()

    twin.update_mask(torch.tensor([True, False, False]))

    assert spec.mask is None


def test_to_changes_device_and_dtype():
    spec = Bounded(-1, 1, (2,))

    assert spec.to(torch.float64) == Bounded(-1, 1, (2,), dtype=torch.float64)
    assert type(spec.to(torch.int32)) is BoundedDiscrete
    moved = Categorical(3, mask=torch.tensor([True, True, False])).to("meta")
    assert moved.device.type == moved.mask.device.type == "meta"
    assert spec.cpu() == spec
    assert spec.device.type == "cpu"


@pytest.mark.parametrize(
    "raw",
    [
        *([1, 2, 3], (1, 2, 3), np.arange(1, 4), np.arange(1.0, 4.0)),
        *(torch.arange(1, 4), torch.arange(1.0, 4.0)),
    ],
)
def test_encode_gives_dtype_device_and_shape(raw):
    value = Unbounded((3,)).encode(raw)

    assert value.dtype == torch.float32
    assert value.tolist() == [1, 2, 3]


def test_encode_copies_numpy_data():
    raw = np.zeros(3, np.float32)

    value = Unbounded((3,)).encode(raw)
    raw += 1

    assert value.tolist() == [0, 0, 0]


def test_encode_takes_read_only_and_reversed_arrays():
    raw = np.arange(3)[::-1]
    raw.flags.writeable = False

    assert Unbounded((3,)).encode(raw).tolist() == [2, 1, 0]


def test_encode_adds_the_axis_of_a_scalar():
    assert Unbounded((1,)).encode(2.5).tolist() == [2.5]
    assert Unbounded((4, 1)).encode(np.zeros(4)).shape == (4, 1)


@pytest.mark.parametrize("form", [np.array, torch.tensor, list])
@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        (torch.uint8, 300.0),
        (torch.uint8, -1.0),
        (torch.int64, 0.7),
        (torch.int32, float("nan")),
        (torch.float16, 1e30),
    ],
)
def test_encode_refuses_what_a_cast_would_change(form, dtype, number):
    with pytest.raises(
        EncodingError, match=r"would be .* Pass numbers|out of bounds|cannot convert"
    ):
        Unbounded((1,), dtype=dtype).encode(form([number]))


def test_encode_keeps_whole_numbers_roundings_and_infinities():
    assert Unbounded((2,), dtype=torch.uint8).encode(np.array([3.0, 255.0])).tolist() == [3, 255]
    assert Unbounded((2,), dtype=torch.uint8).encode(torch.tensor([3, 255])).tolist() == [3, 255]
    assert Unbounded((1,)).encode(np.array([0.1])).item() == np.float32(0.1)
    assert Unbounded((1,), dtype=torch.float16).encode([float("inf")]).item() == float("inf")


def test_encode_spells_choices():
    assert OneHot(4).encode(2).tolist() == [False, False, True, False]
    assert OneHot(4).encode(np.array([2])).shape == (4,)
    assert OneHot(3, (2, 3)).encode([2, 0]).int().tolist() == [[0, 0, 1], [1, 0, 0]]
    assert OneHot(3).encode([False, True, False]).tolist() == [False, True, False]
    assert MultiOneHot([2, 3]).encode([1, 2]).int().tolist() == [0, 1, 0, 0, 1]
    assert Categorical(4).encode(2) == 2


def test_encode_checks_the_range_only_when_asked_to(monkeypatch):
    spec = Bounded(-1, 1, (1,))

    assert spec.encode(5.0) == 5.0

    monkeypatch.setenv("CHECK_SPEC_ENCODE", "1")
    with pytest.raises(AssertionError, match="5"):
        spec.encode(5.0)
    with pytest.raises(AssertionError, match="5"):
        spec.to_numpy(torch.tensor([5.0]))
    assert spec.to_numpy(torch.tensor([5.0]), safe=False) == 5
    monkeypatch.setenv("CHECK_SPEC_ENCODE", "0")
    assert spec.encode(5.0) == 5.0


def test_to_numpy_reads_one_hot_values_as_numbers():
    assert OneHot(4).to_numpy(torch.tensor([False, False, True, False])) == 2
    with pytest.raises(AssertionError):
        OneHot(4).to_numpy(torch.zeros(4, dtype=torch.bool), safe=True)


@pytest.mark.parametrize(
    ("categorical", "one_hot"),
    [
        (Categorical(4), OneHot(4)),
        (Categorical(4, (3,)), OneHot(4, (3, 4))),
        (MultiCategorical([2, 3]), MultiOneHot([2, 3])),
        (MultiCategorical([2, 3], (4, 2)), MultiOneHot([2, 3], (4, 5))),
    ],
)
def test_categorical_and_one_hot_specs_are_twins(categorical, one_hot):
    value = categorical.rand((5,))

    spelled = categorical.to_one_hot(value, safe=True)

    assert one_hot.is_in(spelled)
    assert torch.equal(one_hot.to_categorical(spelled), value)
    assert categorical.to_one_hot_spec() == one_hot
    assert one_hot.to_categorical_spec() == categorical
    assert torch.equal(one_hot.to_one_hot(spelled), spelled)
    assert categorical.to_categorical_spec() == categorical


def test_twins_share_the_mask():
    mask = torch.tensor([True, False, True])

    assert Categorical(3, mask=mask).to_one_hot_spec() == OneHot(3, mask=mask)


@pytest.mark.parametrize("spec", [Unbounded((3,)), OneHot(4), Categorical(3), NonTensor()])
def test_memoized_encoding_repeats_the_same_conversions(spec):
    raw = spec.to_numpy(spec.rand())
    plain = spec.encode(raw)
    spec.memoize_encode()

    values = [spec.encode(raw) for _ in range(3)]

    spec.erase_memoize_cache()
    values.append(spec.encode(raw))
    spec.memoize_encode(False)
    values.append(spec.encode(raw))
    for value in values:
        assert spec.to_numpy(value) is raw or np.array_equal(spec.to_numpy(value), raw)
        assert type(value) is type(plain)


def test_memoized_encoding_checks_nothing_any_more():
    spec = Unbounded((2, 1))
    spec.memoize_encode()
    spec.encode([1, 2])

    with pytest.raises(RuntimeError, match="invalid for input of size 3"):  # torch's own words
        spec.encode([1, 2, 3])


def test_a_memoizing_spec_can_be_pickled():
    spec = Unbounded((1,))
    spec.memoize_encode()
    spec.encode(1.0)

    assert pickle.loads(pickle.dumps(spec)).encode(2.0).tolist() == [2.0]


def test_index_picks_what_a_choice_points_at():
    scores = torch.tensor([[10.0, 11.0, 12.0], [20.0, 21.0, 22.0]])

    assert OneHot(3, (2, 3)).index(OneHot(3, (2, 3)).encode([2, 0]), scores).tolist() == [
        [12],
        [20],
    ]
    assert Categorical(3, (2,)).index(torch.tensor([1, 2]), scores).tolist() == [11, 22]
    assert Categorical(3).index(torch.tensor(1), scores[0]) == 11
    assert MultiOneHot([1, 2]).index(MultiOneHot([1, 2]).encode([0, 1]), scores[1]).tolist() == [
        20,
        22,
    ]
    stack = torch.stack([Categorical(3), Categorical(3, mask=torch.tensor([True, True, False]))])
    assert stack.index(torch.tensor([2, 0]), scores).tolist() == [12, 20]
    unlike = torch.stack([OneHot(2), OneHot(3)])
    picked = unlike.index(unlike.encode([1, 2]), [scores[0, :2], scores[1]])
    assert picked.tolist() == [[11], [22]]
    with pytest.raises(ValueError, match="last size is 4"):
        OneHot(4).index(OneHot(4).rand(), scores)
    with pytest.raises(ValueError, match="a value of the spec and a tensor"):
        OneHot(4).index(2, scores)
    with pytest.raises(TypeError, match="no choice"):
        Unbounded(3).index(torch.tensor(2), scores)


def test_a_register_numbers_raw_values_in_the_order_they_come():
    spec = OneHot(3, use_register=True)

    rows = torch.stack([spec.encode(raw) for raw in ("left", "right", "left")])

    assert rows.int().argmax(-1).tolist() == [0, 1, 0]
    assert spec.to_numpy(rows).tolist() == ["left", "right", "left"]
    assert spec.clone().expand(2, 3).encode(["right", "up"]).int().argmax(-1).tolist() == [1, 2]
    assert spec != OneHot(3)
    with pytest.raises(RuntimeError, match=r"'down' is new.*left.*more options"):
        spec.encode("down")
    with pytest.raises(RuntimeError, match="option 2 stands for no value"):
        OneHot(3, use_register=True).to_numpy(torch.tensor([False, False, True]))
