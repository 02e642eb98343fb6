"""A choice among specs: each value belongs to one member, each row to one of its own."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack

from envkit.specs import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    NonTensor,
    OneHot,
    Stacked,
)


def test_each_row_of_a_choice_is_drawn_and_repaired_on_its_own():
    torch.manual_seed(0)
    spec = Choice([Bounded(0, 1), Bounded(2, 3)])

    sample = spec.rand((100,))

    assert 20 < (sample > 1.5).sum() < 80
    assert spec.is_in(sample)
    assert spec.project(torch.tensor([1.4, 1.6, 9.0, 0.5])).tolist() == [1, 2, 3, 0.5]
    pair = Choice([Bounded([0, 0], [1, 1]), Bounded([2, 2], [3, 3])])
    assert not pair.is_in(torch.tensor([0.5, 2.5]))
    assert pair.is_in(torch.tensor([[0.5, 0.5], [2.5, 2.5]]))


def test_a_choice_of_choices_converts_with_the_member_that_has_the_value():
    low = torch.tensor([True, True, False])
    spec = Choice([Categorical(3, mask=low), Categorical(3, mask=~low)])

    assert spec.is_choice and spec.num_choices == 2 and spec.domain == "discrete"
    assert spec.to_one_hot(torch.tensor(2)).tolist() == [False, False, True]
    assert spec.to_one_hot_spec().to_categorical_spec() == spec
    assert [box.n for box in spec.space] == [3, 3]
    assert spec.index(torch.tensor(2), torch.arange(3.0)) == 2


def test_a_choice_of_objects_draws_their_examples():
    torch.manual_seed(0)
    spec = Choice([NonTensor(example_data="a"), NonTensorData("b")])

    assert set(spec.rand((50,)).tolist()) == {"a", "b"}
    assert spec.is_in(spec.rand()) and spec.is_in("c") and not spec.is_in(torch.zeros(()))
    with pytest.raises(NotImplementedError, match="cannot be counted"):
        spec.cardinality()
    with pytest.raises(TypeError, match="inside a Composite"):
        Choice([Composite()])


def test_rows_that_are_added_choose_on_their_own():
    torch.manual_seed(0)
    value = Choice([Bounded(0, 1, (2,)), Bounded(2, 3, (2,))])

    for rows in (value.expand(50, 2), torch.stack([value] * 50), value.unsqueeze(0).expand(50, 2)):
        sample = rows.rand()
        assert rows.is_in(sample)
        assert 10 < (sample[:, 0] > 1.5).sum() < 40
        assert ((sample[:, 0] > 1.5) == (sample[:, 1] > 1.5)).all()
        assert rows.unflatten(0, (5, 10)).is_in(sample.reshape(5, 10, 2))
        assert rows[0] == value
    assert not value.is_in(torch.tensor([0.5, 2.5]))
    assert value[..., 0].is_in(torch.tensor(2.5))
    assert value.flatten() == value


def test_the_values_of_one_row_are_counted_and_listed():
    rows = Choice([Bounded(i, i + 1, (1,), dtype=torch.int64) for i in (0, 5)]).expand(2, 1)

    values = rows.enumerate()

    assert len(values) == rows.cardinality() == 4
    assert values[:, :, 0].tolist() == [[i, i] for i in (0, 1, 5, 6)]
    inner = Choice([Categorical(2, (2,)), Categorical(3, (2,))]).unsqueeze(1).expand(2, 3)
    assert inner.cardinality() == 3
    assert inner.enumerate().shape == (3, 2, 3)
    assert inner.is_in(inner.rand((5,)))


@pytest.mark.parametrize(
    ("choice", "values"),
    [
        (lambda: Choice([Categorical(2), Categorical(4)]), [0, 1, 2, 3]),
        (lambda: Choice([Categorical(4), Categorical(2)]), [0, 1, 2, 3]),
        (
            lambda: Choice([Bounded(i, i + 2, dtype=torch.uint64) for i in (5, 4, 9)]),
            [5, 6, 7, 4, 9, 10, 11],
        ),
        (lambda: Choice([Binary(1), Binary(1)]), [[0], [1]]),
        (lambda: Choice([OneHot(2), OneHot(2)]), [[True, False], [False, True]]),
    ],
)
def test_a_value_of_several_members_is_listed_and_counted_once(choice, values):
    spec = choice()

    assert spec.enumerate().tolist() == values
    assert spec.enumerate().dtype == spec.dtype
    assert spec.cardinality() == len(values)


def test_masked_members_share_the_options_that_are_listed_without_the_mask():
    low = torch.tensor([True, True, False])
    spec = Choice([Categorical(3, mask=low), Categorical(3, mask=low.flip(0))])

    assert spec.enumerate(use_mask=True).tolist() == [0, 1, 2]
    assert spec.cardinality() == len(spec.enumerate()) == 3


def test_a_choice_without_end_has_no_number_and_one_too_long_to_compare_says_so():
    assert Choice([Bounded(0, 1), Bounded(0, 2)]).cardinality() == float("inf")
    long = [Bounded(i, 2**40, dtype=torch.int64) for i in (0, 1)]
    assert Choice(long[:1]).cardinality() == 2**40 + 1
    with pytest.raises(NotImplementedError, match="too many"):
        Choice(long).cardinality()


def test_given_objects_are_told_apart_counted_and_listed():
    torch.manual_seed(0)
    spec = Choice([NonTensorData(word) for word in ("run", "jump", "run")])

    assert set(spec.rand((50,)).tolist()) == {"run", "jump"}
    assert spec.rand().batch_size == ()
    assert spec.cardinality() == 2 and spec.num_choices == 3
    assert spec.enumerate().tolist() == ["run", "jump"]
    assert spec.is_in("jump") and spec.is_in(NonTensorData("run"))
    assert not spec.is_in("fly") and not spec.is_in(torch.zeros(()))
    assert spec.project("jump") == "jump"
    with pytest.raises(TypeError, match=r"'fly' is none of the options.*enumerate"):
        spec.project("fly")


def test_a_choice_of_stacks_draws_one_of_them_for_each_row():
    torch.manual_seed(0)
    spec = Choice([NonTensorStack("a", "b"), NonTensorStack("c", "d")])

    assert spec.shape == (2,) and spec.cardinality() == 2
    assert spec.rand().tolist() in (["a", "b"], ["c", "d"])
    assert spec.zero().tolist() == spec.one().tolist() == ["a", "b"]
    assert spec.enumerate().tolist() == [["a", "b"], ["c", "d"]]
    assert not spec.is_in(NonTensorStack("a", "d")) and not spec.is_in("a")
    rows = spec.expand(30, 2)
    drawn = rows.rand()
    assert drawn.batch_size == (30, 2) and rows.is_in(drawn)
    assert {tuple(row) for row in drawn.tolist()} == {("a", "b"), ("c", "d")}
    assert rows[0] == spec == spec.clone() == spec.to("cpu") == pickle.loads(pickle.dumps(spec))
    assert spec[0].enumerate().tolist() == ["a", "c"]
    assert spec.unsqueeze(1).expand(2, 3).rand().batch_size == (2, 3)
    assert spec.to_numpy(drawn[0]) == drawn[0].tolist()


def test_data_and_a_stack_of_one_shape_are_members_of_one_choice():
    spec = Choice([NonTensorData("a", batch_size=[2]), NonTensorStack("a", "b")])

    assert spec.enumerate().tolist() == [["a", "a"], ["a", "b"]]
    assert spec.is_in(NonTensorData("a", batch_size=[2])) and not spec.is_in("b")


def test_objects_that_are_arrays_are_compared_by_their_values():
    spec = Choice([NonTensorData(np.arange(i)) for i in (2, 3)])

    assert spec.is_in(np.arange(3)) and not spec.is_in(np.arange(4))


def test_an_env_may_declare_a_choice_of_words():
    torch.manual_seed(0)
    tree = Composite(task=Choice([NonTensorData("run"), NonTensorData("jump")])).expand(40)

    drawn = tree.rand()

    assert set(drawn["task"]) == {"run", "jump"} and tree.is_in(drawn)


def test_unlike_choices_make_a_stack():
    stack = torch.stack([Choice([Bounded(0, i), Bounded(5, 6)]) for i in (1, 2)])

    assert type(stack) is Stacked
    assert stack.is_in(stack.rand((20,)))
