"""Every gymnasium space: its spec, and its values through rows and back."""

from __future__ import annotations

from inspect import signature

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit.errors import EncodingError, SpecError
from envkit.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
)
from envkit_bridges.gym.codecs import Codec, codec_of, space_of
from tests.zoo.gym_envs import same

INF = np.inf


def blank_rows(codec: Codec, count: int) -> dict:
    return {
        path: torch.zeros(count, *leaf.spec.shape, dtype=leaf.spec.dtype).numpy()
        for path, (leaf, _) in codec.leaves.items()
    }


def write_all(codec: Codec, values: list) -> dict:
    rows = blank_rows(codec, len(values))
    for index, value in enumerate(values):
        codec.writer({path: row[index, ...] for path, row in rows.items()})(value)
    return rows


# ------------------------------------------------------------------------------------ round trips

shapes = st.sampled_from([(), (1,), (3,), (2, 2)])
bounds = st.sampled_from([(-INF, INF), (-1.5, 2.0), (0.0, INF), (-INF, 0.0)])
counts = st.lists(st.integers(1, 4), min_size=1, max_size=3)
float_boxes = st.builds(
    lambda shape, ends, dtype: spaces.Box(*ends, shape, dtype),
    shapes,
    bounds,
    st.sampled_from([np.float32, np.float64]),
)
integer_boxes = st.builds(
    lambda shape, ends, dtype: spaces.Box(*ends, shape, dtype),
    shapes,
    st.sampled_from([(0, 9), (3, 4)]),
    st.sampled_from([np.uint8, np.int32, np.int64]),
)
discretes = st.builds(
    lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)
)
multi_discretes = st.builds(
    lambda nvec, start: spaces.MultiDiscrete(nvec, start=[start] * len(nvec)),
    counts,
    st.integers(-2, 2),
)
grids = st.builds(
    lambda nvec, start: spaces.MultiDiscrete(np.array(nvec), start=np.full((2, 2), start)),
    st.sampled_from([[[3, 3], [3, 3]], [[2, 3], [4, 1]]]),
    st.integers(-2, 2),
)
multi_binaries = st.builds(spaces.MultiBinary, st.sampled_from([1, 3, [2, 3], [1, 1]]))
bool_boxes = st.builds(lambda shape: spaces.Box(0, 1, shape, bool), shapes)
boxes = st.one_of(float_boxes, integer_boxes, bool_boxes)
leaf_spaces = st.one_of(boxes, discretes, multi_discretes, grids, multi_binaries)
tuples = st.builds(
    lambda member, count: spaces.Tuple([member] * count), leaf_spaces, st.integers(1, 3)
)
names = st.sampled_from(["state", "observation", "pixels", "a", "b"])
dicts = st.dictionaries(names, st.one_of(leaf_spaces, tuples), min_size=1, max_size=3)
nested = st.dictionaries(
    names, st.one_of(leaf_spaces, dicts.map(spaces.Dict)), min_size=1, max_size=3
)
any_space = st.one_of(leaf_spaces, tuples, dicts.map(spaces.Dict), nested.map(spaces.Dict))

texts = st.builds(spaces.Text, st.integers(1, 5))
ragged = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(
    lambda sizes: spaces.Tuple([spaces.Box(-1, 1, (size,)) for size in sizes])
)
tuples_of_dicts = st.builds(
    lambda member, count: spaces.Tuple([spaces.Dict(member)] * count), dicts, st.integers(1, 2)
)
sequences = st.builds(
    lambda element: spaces.Sequence(element, stack=True),
    st.one_of(leaf_spaces, dicts.map(spaces.Dict)),
)
loose = st.one_of(texts, ragged, tuples_of_dicts, sequences)
any_loose_space = st.one_of(
    loose, st.dictionaries(names, st.one_of(loose, leaf_spaces), min_size=1).map(spaces.Dict)
)


@settings(max_examples=200)
@given(space=any_space, categorical=st.booleans(), seed=st.integers(0, 99))
def test_values_come_back_from_their_rows(space, categorical, seed):
    space.seed(seed)
    values = [space.sample() for _ in range(3)]
    codec = codec_of(space, categorical=categorical, key="value")

    rows = write_all(codec, values)
    back = codec.read(rows)

    assert all(map(same, values, back))
    assert all(space.contains(value) for value in back)


@settings(max_examples=100)
@given(
    space=st.one_of(
        leaf_spaces, st.dictionaries(names, leaf_spaces, min_size=1, max_size=2).map(spaces.Dict)
    ),
    categorical=st.booleans(),
    seed=st.integers(0, 99),
)
def test_arrays_of_values_become_the_rows_that_each_of_them_becomes(space, categorical, seed):
    space.seed(seed)
    values = [space.sample() for _ in range(3)]
    codec = codec_of(space, categorical=categorical, key="value")
    together = concatenate(space, values, create_empty_array(space, 3))

    rows = codec.encode_arrays(together)
    back = codec.decode_arrays(rows)

    wanted = write_all(codec, values)
    assert all(np.array_equal(rows[path], row) for path, row in wanted.items())
    assert all(rows[path].numpy().dtype == row.dtype for path, row in wanted.items())
    assert same(back, together)


def test_arrays_that_are_none_of_the_space_are_refused():
    index = codec_of(spaces.Discrete(3, start=2), categorical=True, key="choice")
    box = codec_of(spaces.Box(0, 9, (2,), np.uint8), categorical=True, key="box")

    with pytest.raises(EncodingError, match=r"'choice' is 5, which is not in its space"):
        index.encode_arrays(np.array([2, 5], np.int32))
    with pytest.raises(EncodingError, match=r"'box' of shape \(3,\) into shape \(2,\)"):
        box.encode_arrays(np.zeros((4, 3), np.uint8))
    with pytest.raises(EncodingError, match="does not fit"):
        box.encode_arrays(np.full((4, 2), 256))


@pytest.mark.filterwarnings("ignore:.*Casting input x")  # gymnasium's, of its own sequences
@settings(max_examples=200)
@given(
    space=st.one_of(any_space, any_loose_space),
    categorical=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_come_back_from_the_data_of_a_tensordict(space, categorical, seed):
    space.seed(seed)
    value = space.sample()
    codec = codec_of(space, categorical=categorical, key="value")

    data = codec.encode(value)
    back = codec.decode(data)

    assert same(value, back)
    assert space.contains(back)
    assert all(codec.spec()[path].is_in(entry) for path, entry in data.items())


@settings(max_examples=200)
@given(space=any_space, categorical=st.booleans(), seed=st.integers(0, 99))
def test_rows_lie_in_the_spec(space, categorical, seed):
    space.seed(seed)
    codec = codec_of(space, categorical=categorical, key="value")
    spec = codec.spec()

    rows = write_all(codec, [space.sample()])

    for path, row in rows.items():
        assert spec[path].is_in(torch.from_numpy(row[0, ...]))


@settings(max_examples=100)
@given(space=any_space, categorical=st.booleans())
def test_samples_of_the_spec_are_values_of_the_space(space, categorical):
    codec = codec_of(space, categorical=categorical, key="value")
    spec = codec.spec()

    rows = {path: spec[path].rand((2,)).numpy() for path in codec.leaves}

    assert all(space.contains(value) for value in codec.read(rows))


def test_tuple_members_of_other_bounds_share_a_stacked_spec():
    space = spaces.Tuple([spaces.Discrete(2, start=1), spaces.Discrete(4)])
    codec = codec_of(space, categorical=True, key="value")

    rows = write_all(codec, [(2, 3)])

    assert rows[("value",)].tolist() == [[1, 3]]
    assert codec.read(rows) == [(2, 3)]
    assert codec.spec()["value"].is_in(torch.tensor([1, 3]))
    assert not codec.spec()["value"].is_in(torch.tensor([3, 1]))


def test_values_read_from_rows_are_copies():
    codec = codec_of(spaces.Box(-1, 1, (2,)), categorical=False, key="value")
    rows = {("value",): np.zeros((1, 2), np.float32)}

    (value,) = codec.read(rows)
    rows[("value",)][:] = 1

    assert value.tolist() == [0, 0]


# ------------------------------------------------------------------------------------------ specs


NARROW = []
if "dtype" in signature(spaces.Discrete).parameters:  # from Gymnasium 1.3 on
    narrow = spaces.Discrete(3, dtype=np.int32)
    NARROW = [(narrow, OneHot(3, dtype=torch.int64), Categorical(3, shape=(), dtype=torch.int32))]


@pytest.mark.parametrize(
    ("space", "one_hot", "categorical"),
    [
        (
            spaces.Discrete(3),
            OneHot(3, dtype=torch.int64),
            Categorical(3, shape=(), dtype=torch.int64),
        ),
        (
            spaces.Discrete(3, start=-1),
            OneHot(3, dtype=torch.int64),
            Categorical(3, shape=(), dtype=torch.int64),
        ),
        *NARROW,
        (
            spaces.MultiDiscrete([2, 3]),
            MultiOneHot([2, 3], dtype=torch.int64),
            MultiCategorical([2, 3]),
        ),
        (
            spaces.MultiDiscrete([2, 2]),
            OneHot(2, shape=(2, 2), dtype=torch.int64),
            Categorical(2, shape=(2,)),
        ),
        (spaces.MultiBinary(4), Binary(4, dtype=torch.int8), Binary(4, dtype=torch.int8)),
        (
            spaces.MultiBinary([2, 3]),
            Binary(3, shape=(2, 3), dtype=torch.int8),
            Binary(3, shape=(2, 3), dtype=torch.int8),
        ),
        (
            spaces.Box(-2, 2, (3,), np.float64),
            Bounded(-2, 2, (3,), dtype=torch.float64),
            Bounded(-2, 2, (3,), dtype=torch.float64),
        ),
        (spaces.Box(-2, 2, ()), Bounded(-2, 2, (1,)), Bounded(-2, 2, (1,))),
        (spaces.Box(-INF, INF, (3,)), Unbounded((3,)), Unbounded((3,))),
        (
            spaces.Box(0, 255, (4, 4, 3), np.uint8),
            Unbounded((4, 4, 3), dtype=torch.uint8),
            Unbounded((4, 4, 3), dtype=torch.uint8),
        ),
        (
            spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (2,))]),
            Bounded(-1, 1, (2, 2)),
            Bounded(-1, 1, (2, 2)),
        ),
    ],
    ids=lambda value: str(value)[:40].split("\n")[0],
)
def test_each_space_has_its_spec_in_both_encodings(space, one_hot, categorical):
    specs = [codec_of(space, categorical=flag, key="k").spec()["k"] for flag in (False, True)]

    assert specs[0] == one_hot
    assert specs[1] == categorical


@pytest.mark.parametrize(
    ("members", "keys"),
    [
        ([spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (2,), np.float64)], ["0", "1"]),
        ([spaces.Box(-1, 1, (2,)), spaces.Discrete(2)], ["0", "1"]),
        ([spaces.Text(2), spaces.Text(3)], ["0", "1"]),
        ([spaces.Dict(a=spaces.Discrete(2)), spaces.Discrete(2)], ["1", ("0", "a")]),
        (
            [spaces.Dict(a=spaces.Discrete(2)), spaces.Dict(b=spaces.Discrete(2))],
            [("0", "a"), ("1", "b")],
        ),
        (
            [spaces.Tuple([spaces.Discrete(2), spaces.Text(2)]), spaces.Discrete(2)],
            ["1", ("0", "0"), ("0", "1")],
        ),
        ([spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)]), spaces.Discrete(2)], ["0", "1"]),
    ],
)
@pytest.mark.parametrize("key", ["observation", "action"])
def test_members_of_a_tuple_that_do_not_stack_are_entries(members, keys, key):
    space = spaces.Tuple(members, seed=0)
    codec = codec_of(space, categorical=True, key=key)
    value = space.sample()

    assert sorted(codec.spec()[key].keys(True, True), key=str) == sorted(keys, key=str)
    assert same(codec.decode(codec.encode(value)), value)


@pytest.mark.parametrize(
    ("space", "keys"),
    [
        (spaces.Dict(state=spaces.Discrete(2), a=spaces.Discrete(2)), ["a", "observation"]),
        (
            spaces.Dict(state=spaces.Discrete(2), observation=spaces.Discrete(2)),
            ["observation", "state"],
        ),
        (
            spaces.Dict(a=spaces.Dict(b=spaces.Discrete(2), c=spaces.Discrete(2))),
            [("a", "b"), ("a", "c")],
        ),
    ],
)
def test_dict_spaces_keep_their_keys_but_state_becomes_observation(space, keys):
    spec = codec_of(space, categorical=True, key="observation").spec()

    assert isinstance(spec, Composite)
    assert sorted(spec.keys(True, True)) == keys


def test_a_hot_row_is_overwritten_as_a_whole():
    codec = codec_of(spaces.MultiDiscrete([2, 3]), categorical=False, key="k")
    row = {("k",): np.ones(5, np.int64)}

    codec.writer(row)(np.array([1, 0]))

    assert row[("k",)].tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("space", "spec"),
    [
        (
            spaces.MultiDiscrete(np.array([[3, 3], [3, 3]])),
            OneHot(3, shape=(2, 2, 3), dtype=torch.int64),
        ),
        (
            spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
            MultiOneHot([2, 3, 4, 5], dtype=torch.int64),
        ),
        (spaces.Text(5), NonTensor(shape=(), example_data="0")),
        (spaces.Sequence(spaces.Box(-1, 1, (2,)), stack=True), Bounded(-1, 1, (-1, 2))),
        (
            spaces.Sequence(spaces.Discrete(3), stack=True),
            OneHot(3, shape=(-1, 3), dtype=torch.int64),
        ),
        (
            spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (3,))]),
            torch.stack([Bounded(-1, 1, (2,)), Bounded(-1, 1, (3,))]),
        ),
        (
            spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]),
            torch.stack([OneHot(2, dtype=torch.int64), OneHot(3, dtype=torch.int64)]),
        ),
        (
            spaces.Tuple([spaces.Dict(a=spaces.Box(-1, 1, (2,)))] * 2),
            torch.stack([Composite(a=Bounded(-1, 1, (2,)))] * 2),
        ),
        (
            spaces.Tuple([spaces.Tuple([spaces.Discrete(2)] * 3)] * 2),
            OneHot(2, shape=(2, 3, 2), dtype=torch.int64),
        ),
    ],
    ids=lambda value: str(value)[:40].split("\n")[0],
)
def test_spaces_of_several_values_are_stacked(space, spec):
    assert codec_of(space, categorical=False, key="k").spec()["k"] == spec


def test_a_sequence_of_dicts_gives_each_entry_a_leading_axis():
    element = spaces.Dict(a=spaces.Box(-1, 1, (2,)), state=spaces.Discrete(3))

    spec = codec_of(spaces.Sequence(element, stack=True), categorical=True, key="k").spec()

    assert {key: spec[key].shape for key in spec.keys()} == {"a": (-1, 2), "observation": (-1,)}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_sequence_has_as_many_values_as_it_has(count):
    codec = codec_of(
        spaces.Sequence(spaces.Box(-1, 1, (2,)), stack=True), categorical=True, key="k"
    )
    value = np.ones((count, 2), np.float32)

    data = codec.encode(value)
    back = codec.decode(data)

    assert data["k",].shape == (count, 2)
    assert data["k",].dtype == torch.float32
    assert same(np.asarray(back).reshape(-1, 2), value)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Graph(spaces.Discrete(2), spaces.Discrete(2)),
        spaces.OneOf([spaces.Discrete(2), spaces.Box(-1, 1, (2,))]),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Sequence(spaces.Text(2), stack=True),
        spaces.Tuple([]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_spaces_without_a_counterpart_are_refused_with_advice(space):
    with pytest.raises(SpecError, match=r"Gymnasium|stack=True|Give it a member"):
        codec_of(space, categorical=False, key="k")


def test_values_without_rows_are_not_written_into_any():
    codec = codec_of(spaces.Text(5), categorical=False, key="k")

    assert not codec.has_rows
    with pytest.raises(SpecError, match="no array form"):
        codec.writer({("k",): np.zeros(1)})("abc")


@pytest.mark.parametrize(
    ("spec", "space"),
    [
        (Categorical(3, shape=()), spaces.Discrete(3)),
        (MultiCategorical([2, 3]), spaces.MultiDiscrete([2, 3])),
        (Bounded(-1, 1, (2,)), spaces.Box(-1, 1, (2,))),
        (Unbounded((2,), dtype=torch.float64), spaces.Box(-INF, INF, (2,), np.float64)),
        (Unbounded((2,), dtype=torch.uint8), spaces.Box(0, 255, (2,), np.uint8)),
        (Composite(a=Categorical(2, shape=())), spaces.Dict(a=spaces.Discrete(2))),
    ],
    ids=["discrete", "multi-discrete", "box", "unbounded", "bytes", "dict"],
)
def test_specs_have_gymnasium_spaces(spec, space):
    assert space_of(spec) == space


def test_an_entry_called_state_is_an_observation_but_no_action():
    space = spaces.Dict(state=spaces.Discrete(3))

    observed, acted = (
        codec_of(space, categorical=True, key=key).spec() for key in ("observation", "action")
    )

    assert list(observed.keys()) == ["observation"]
    assert list(acted.keys()) == ["state"]
