"""The data of one step: which rows a mask steps, and how leaves of two moments are merged."""

from __future__ import annotations

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from envkit.data.merging import choose_leaf, merge_rows
from envkit.data.transition import stepped_rows
from envkit.errors import StepMaskError

T, F = True, False


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        ([T, F, T], [0, 2]),
        ([[T], [F], [T]], [0, 2]),
        ([F, F, F], []),
        ([[F, T], [T, T], [F, F]], [1, 2, 3]),
    ],
    ids=["rows", "singleton", "none", "grid"],
)
def test_a_step_mask_names_its_rows_along_the_flat_batch(mask, rows):
    batch = (3,) if torch.tensor(mask).numel() == 3 else (3, 2)

    assert stepped_rows(TensorDict({"_step": torch.tensor(mask)}, batch)) == rows


def test_without_a_mask_every_row_is_stepped_and_one_that_does_not_fit_is_refused():
    assert stepped_rows(TensorDict({}, [3])) is None
    with pytest.raises(StepMaskError, match=r"shape \(2,\)"):
        stepped_rows(TensorDict(_step=torch.tensor([T, F])))


def words(rows: list) -> NonTensorStack:
    return NonTensorStack(
        *(words(row) if isinstance(row, list) else NonTensorData(row) for row in rows)
    )


def test_text_is_merged_row_by_row_like_numbers():
    mask = torch.tensor([[T, F, F], [F, T, T]])
    fresh, kept = (
        words([["a", "b", "c"], ["d", "e", "f"]]),
        words([["u", "v", "w"], ["x", "y", "z"]]),
    )

    merged = choose_leaf(mask, fresh, kept)

    assert merged.tolist() == [["a", "v", "w"], ["x", "e", "f"]]


def test_what_is_stacked_along_another_axis_is_merged_too():
    mask = torch.tensor([[T, T], [T, F]])
    rows = [TensorDict(x=torch.zeros(2), batch_size=[2]) for _ in range(2)]
    kept = LazyStackedTensorDict(*rows, stack_dim=1)
    fresh = LazyStackedTensorDict(*(row + 1 for row in rows), stack_dim=0)

    merged = merge_rows(kept, fresh, {(): mask})

    assert merged["x"].equal(mask.float())


def test_rows_that_become_stacks_of_unlike_rows_are_merged():
    mask = torch.tensor([[T, F], [F, T]])
    dense = [TensorDict(x=torch.zeros(2, 3), batch_size=[2]) for _ in range(2)]
    unlike = [
        LazyStackedTensorDict(
            TensorDict(x=torch.ones(3)), TensorDict(x=torch.ones(3), y=torch.ones(2)), stack_dim=0
        )
        for _ in range(2)
    ]
    kept, fresh = (LazyStackedTensorDict(*rows, stack_dim=0) for rows in (dense, unlike))

    merged = merge_rows(kept, fresh, {(): mask})

    assert merged["x"].equal(mask[..., None].expand(2, 2, 3).float())
    assert merged[1, 1]["y"].equal(torch.ones(2))
