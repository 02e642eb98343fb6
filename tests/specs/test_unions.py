"""A choice among specs: each value belongs to one member, each row to one of its own."""

import pytest
import torch
from tensordict import NonTensorData

from envkit.specs import Bounded, Categorical, Choice, Composite, NonTensor, Stacked


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
    assert inner.cardinality() == 2 + 3
    assert inner.enumerate().shape == (5, 2, 3)
    assert inner.is_in(inner.rand((5,)))


def test_unlike_choices_make_a_stack():
    stack = torch.stack([Choice([Bounded(0, i), Bounded(5, 6)]) for i in (1, 2)])

    assert type(stack) is Stacked
    assert stack.is_in(stack.rand((20,)))
