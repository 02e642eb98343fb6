"""Every method of every kind of spec, and every dtype of every kind of leaf.

Each check takes a spec whose first axis has size 4.
"""

import copy
import pickle
from html.parser import HTMLParser

import pytest
import torch

from envkit.specs import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Stacked,
    Unbounded,
)
from tests.specs.kinds import DTYPES, KINDS, TENSOR_KINDS

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def size_of(value):
    return tuple(getattr(value, "batch_size", value.shape))


# -- values ----------------------------------------------------------------------------


@check
def a_sample_is_in_the_spec(spec):
    for value in (spec.rand(), spec.rand((2,)), spec.sample((1, 2))):
        assert spec.is_in(value) and value in spec and spec.contains(value)
        spec.assert_is_in(value)
        spec.type_check(value)


@check
def a_sample_has_the_prefix_and_the_shape(spec):
    assert size_of(spec.rand((2, 1))) == (2, 1, *spec.shape) or -1 in spec.shape


@check
def a_seeded_generator_repeats_a_sample(spec):
    first, second = (spec.rand((3,), torch.Generator().manual_seed(7)) for _ in range(2))

    assert str(spec.to_numpy(first)) == str(spec.to_numpy(second))


@check
def zeros_and_ones_have_the_shape(spec):
    for make in (spec.zero, spec.zeros, spec.one, spec.ones):
        assert size_of(make((2,))) == (2, *spec.shape)


@check
def strangers_are_not_in_the_spec(spec):
    for value in (None, "text", 3, [], torch.zeros(7, dtype=torch.complex64), torch.zeros(())):
        is_object = spec.dtype is None and not isinstance(spec, Composite)
        assert spec.is_in(value) == (is_object and not isinstance(value, torch.Tensor))


@check
def project_keeps_what_is_inside_and_repairs_the_rest(spec):
    value = spec.rand()
    assert spec.project(value) is value
    assert spec.is_in(spec.project(spec.zero((2,))))


@check
def cardinality_counts_what_enumerate_lists(spec):
    row = spec[0]
    try:
        values, count = row.enumerate(), row.cardinality()
    except NotImplementedError:
        return  # see UNCOUNTED
    assert len(values) == count
    allowed = row.enumerate(use_mask=True)
    assert row.is_in(allowed) and 0 < len(allowed) <= count


UNCOUNTED = {  # objects, and what has no end
    *("bounded", "unbounded", "unbounded integers", "choice", "stack"),
    *("object", "composite", "stack of composites"),
}


def test_all_other_kinds_are_counted():
    refused = set()
    for name, spec in KINDS.items():
        try:
            spec[0].enumerate()
        except NotImplementedError:
            refused.add(name)

    assert refused == UNCOUNTED


# -- shape -----------------------------------------------------------------------------


@check
def indexing_works_as_for_tensors(spec):
    rest = tuple(spec.shape[1:])
    for index, lead in (
        (0, ()),
        (-1, ()),
        (slice(1, 3), (2,)),
        ([0, 2, 2], (3,)),
        (torch.tensor([True, False, True, True]), (3,)),
        (None, (1, 4)),
        (..., (4,)),
        ((None, 0), (1,)),
    ):
        indexed = spec[index]
        assert len(indexed.shape) == len(lead) + len(rest)
        assert tuple(indexed.shape[: len(lead)]) == lead
        assert indexed.is_in(indexed.rand())
    with pytest.raises(IndexError):
        spec[4]
    with pytest.raises(TypeError):
        spec[1.5]


@check
def expand_adds_axes_in_front(spec):
    expanded = spec.expand(2, *spec.shape)

    assert expanded.shape == spec.expand((2, *spec.shape)).shape == (2, *spec.shape)
    assert expanded[0] == spec
    assert expanded.is_in(spec.rand((2,)))
    with pytest.raises(ValueError, match=r"expand|take the shape"):
        spec.expand(3, *spec.shape[1:])


@check
def squeeze_undoes_unsqueeze(spec):
    for dim in (0, 1):
        wider = spec.unsqueeze(dim)
        assert wider.ndim == wider.ndimension() == spec.ndim + 1
        assert wider.shape[dim] == 1
        assert wider.squeeze(dim) == spec
    assert spec.squeeze(0).shape == spec.shape
    with pytest.raises(IndexError):
        spec.unsqueeze(9)


@check
def unflatten_undoes_flatten(spec):
    square = spec.unflatten(0, (2, 2))

    assert square.shape == (2, 2, *spec.shape[1:])
    assert square == spec.reshape(2, 2, *spec.shape[1:]) == spec.view(2, 2, *spec.shape[1:])
    assert square.flatten(0, 1) == spec
    assert square.is_in(square.rand())
    with pytest.raises(ValueError, match=r"product|shape"):
        spec.unflatten(0, (3, 2))


@check
def unbind_and_stack_undo_each_other(spec):
    rows = spec.unbind(0)

    assert [row.shape for row in rows] == [spec[i].shape for i in range(4)]
    assert torch.stack(rows) == spec
    with pytest.raises(RuntimeError):
        torch.stack([spec, Binary(7)])


@check
def stacking_works_at_any_axis(spec):
    for dim in (0, 1):
        pair = torch.stack([spec, spec.clone()], dim)
        assert pair.shape[dim] == 2
        assert pair.unbind(dim)[1] == spec
        assert pair.is_in(pair.rand())


@check
def a_dynamic_axis_makes_data_of_size_one(spec):
    wide = spec.unsqueeze(1).expand(4, 2, *spec.shape[1:])
    dynamic = wide.make_neg_dim(1)

    assert dynamic.shape == (4, -1, *spec.shape[1:])
    assert wide.shape[1] == 2  # a new spec
    assert size_of(dynamic.rand())[:2] == (4, 1)
    assert dynamic.is_in(wide.rand())


# -- copies, device, dtype -------------------------------------------------------------


@check
def copies_are_equal_and_their_own(spec):
    for twin in (
        spec.clone(),
        copy.copy(spec),
        copy.deepcopy(spec),
        pickle.loads(pickle.dumps(spec)),
    ):
        assert twin == spec
        assert twin is not spec
        assert twin.is_in(twin.rand())
    assert spec != 3 and spec != spec[0]


@check
def to_moves_and_casts(spec):
    assert spec.to("meta").device == torch.device("meta")
    assert spec.cpu().device == torch.device("cpu")
    cast = spec.to(torch.float64)
    assert cast == spec.cast(torch.float64)
    assert cast.shape == spec.shape
    if not isinstance(spec, Composite):
        assert cast.dtype == (spec.dtype and torch.float64)
        assert spec.clear_device_() is spec


# -- conversion ------------------------------------------------------------------------


@check
def to_numpy_inverts_encode(spec):
    for value in (spec.rand(), spec.rand()):
        raw = spec.to_numpy(value, safe=True)
        assert str(spec.to_numpy(spec.encode(raw))) == str(raw)


@check
def memoized_encoding_gives_the_same(spec):
    spec = spec.clone()
    raw = spec.to_numpy(spec.rand())
    spec.memoize_encode()
    for _ in range(3):
        assert str(spec.to_numpy(spec.encode(raw))) == str(raw)
    spec.erase_memoize_cache()
    spec.memoize_encode(mode=False)
    assert str(spec.to_numpy(spec.encode(raw))) == str(raw)


@check
def choices_convert_between_the_families(spec):
    if not (spec.is_choice or isinstance(spec, Composite)):
        for call in (spec.to_one_hot_spec, spec.to_categorical_spec):
            with pytest.raises(TypeError, match="no choice"):
                call()
        return
    value = spec.rand()
    hot, numbers = spec.to_one_hot_spec(), spec.to_categorical_spec()

    assert hot.is_in(spec.to_one_hot(value, safe=True))
    assert numbers.is_in(spec.to_categorical(value, safe=True))
    assert hot.to_categorical_spec().shape == numbers.shape
    assert numbers.to_one_hot_spec() == hot


# -- display ---------------------------------------------------------------------------


@check
def repr_names_class_shape_and_dtype(spec):
    text = repr(spec)

    assert text.startswith(type(spec).__name__ + "(")
    assert f"shape={tuple(spec.shape)}" in text
    assert all(len(line) < 200 for line in text.splitlines())


@check
def jupyter_gets_a_table(spec):
    rows = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag == "tr":
                rows.append([])

        def handle_data(self, data):
            rows[-1].append(data)

    Reader().feed(spec._repr_html_())

    assert rows[0] == ["entry", "spec", "shape", "dtype", "device", "values"]
    assert rows[1][0] == type(spec).__name__
    assert str(tuple(spec.shape)) in rows[1]


@pytest.mark.row
@pytest.mark.parametrize("name", CHECKS)
def test_every_kind_of_spec(name):
    for kind, spec in KINDS.items():
        torch.manual_seed(0)
        try:
            CHECKS[name](spec.clone())
        except Exception as error:
            error.add_note(f"with the spec of kind {kind!r}")
            raise


@pytest.mark.parametrize("kind", TENSOR_KINDS)
def test_shape_operations_commute_with_sampling_of_tensors(kind):
    spec = TENSOR_KINDS[kind]
    rest = tuple(spec.shape[1:])
    operations = (
        lambda x: x[1:3],
        lambda x: x[[3, 0]],
        lambda x: x.unsqueeze(0),
        lambda x: x.unsqueeze(1).squeeze(1),
        lambda x: x.reshape(2, 2, *rest),
        lambda x: x.reshape(2, 2, *rest).flatten(0, 1),
        lambda x: x.unflatten(0, (4, 1)),
        lambda x: x.expand(3, 4, *rest),
        lambda x: x.unbind(0)[2],
        lambda x: torch.stack([x, x], 1),
    )
    for operation in operations:
        assert operation(spec).is_in(operation(spec.rand()))


# -- dtypes ----------------------------------------------------------------------------


MAKERS = {
    "cube": lambda dtype: Bounded(0, 1, (4, 2), dtype=dtype),
    "box": lambda dtype: Bounded([0, 1], [1, 1], (4, 2), dtype=dtype),
    "unbounded": lambda dtype: Unbounded((4, 2), dtype=dtype),
    "binary": lambda dtype: Binary(2, (4, 2), dtype=dtype),
    "categorical": lambda dtype: Categorical(2, (4,), dtype=dtype),
    "one-hot": lambda dtype: OneHot(3, (4, 3), dtype=dtype),
    "multi-categorical": lambda dtype: MultiCategorical([2, 2], (4, 2), dtype=dtype),
    "multi-one-hot": lambda dtype: MultiOneHot([2, 3], (4, 5), dtype=dtype),
    "choice": lambda dtype: Choice([Bounded(i, i, (4,), dtype=dtype) for i in (0, 1)]),
    "stack": lambda dtype: Stacked(Bounded(0, 1, (), dtype=dtype), Bounded(1, 1, (), dtype=dtype)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MAKERS)
def test_every_leaf_works_with_every_dtype_it_takes(kind, dtype):
    counts = kind not in ("cube", "box", "unbounded", "choice", "stack")
    if counts and dtype.is_complex:
        with pytest.raises(ValueError, match="dtype"):
            MAKERS[kind](dtype)
        return
    spec = MAKERS[kind](dtype)
    value = spec.rand((3,))

    assert value.dtype == spec.dtype == spec.zero().dtype == dtype
    assert spec.is_in(value)
    assert spec.is_in(spec.project(spec.one()))
    assert spec.is_in(spec.project(spec.zero()))
    assert torch.equal(spec.encode(spec.to_numpy(value[0])), value[0])
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert spec.expand(2, *spec.shape)[1] == spec
    assert str(dtype).removeprefix("torch.") in repr(spec)
