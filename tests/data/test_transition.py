"""The data of one step: which rows a mask steps, and how leaves of two moments are merged."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from envkit.data.transition import Carrying, carry, choose_leaf, step_mdp, stepped_rows
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


@pytest.mark.parametrize("lazy", [F, T], ids=["plain", "lazy stack"])
def test_fresh_entries_win_over_carried_ones_at_any_depth(lazy):
    def made(value, names):
        return {name: torch.full((2, 1), value) for name in names}

    root = {**made(0.0, ["own", "action", "seen"]), "state": made(0.0, ["a"])}
    following = {**made(1.0, ["seen", "reward", "shown"]), "state": made(1.0, ["a", "b"])}
    data = TensorDict({**root, "next": TensorDict(following, [2])}, [2])
    fresh = TensorDict({**made(2.0, ["seen", "new"]), "state": made(2.0, ["a"])}, [2])
    rule = Carrying(reward_keys={("reward",)}, action_keys={("action",)})
    given = lazy_stack(list(data.unbind(0)), 0) if lazy else data

    found = carry(given, rule, fresh)

    expected = carry(data, rule).update(fresh)
    assert set(found.keys(True)) == set(expected.keys(True))
    assert all(bool((found[key] == expected[key]).all()) for key in expected.keys(True, True))


@pytest.mark.parametrize(
    ("more", "is_whole"),
    [
        ({}, T),
        ({"kept": torch.ones(2, 1)}, F),
        ({"state": {"kept": torch.ones(2)}}, F),
        ({"next": {"shown": torch.ones(2, 1)}}, F),
        ({"next": {"state": {"kept": torch.ones(2)}}}, F),
        ({"seen": NonTensorStack("a", "b")}, F),
        ({"action": {"kept": torch.ones(2)}}, F),
    ],
    ids=["nothing", "root", "node", "next", "node of next", "text", "action node"],
)
def test_a_root_that_replaces_all_is_taken_as_it_is(more, is_whole):
    zeros = torch.zeros(2, 1)
    data = TensorDict({"action": zeros, "seen": zeros, "state": {"a": zeros}}, [2])
    data["next"] = TensorDict({"seen": zeros, "reward": zeros, "state": {"a": zeros}}, [2])
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(data[name], TensorDict):
            data[name].update(value)
        else:
            data[name] = TensorDict(value, [2]) if isinstance(value, dict) else value
    fresh = TensorDict({"seen": zeros + 2, "state": {"a": zeros + 2}}, [2])
    rule = Carrying(reward_keys={("reward",)}, action_keys={("action",)})

    found = carry(data, rule, fresh)

    expected = carry(data, rule).update(fresh)
    assert (found is fresh) == is_whole
    assert set(found.keys(True)) == set(expected.keys(True))
    assert all(bool((found[key] == expected[key]).all()) for key in expected.keys(True, True))


def test_a_step_on_leaves_nothing_that_holds_the_data_it_was_given():
    data = TensorDict({"next": {"a": {"b": torch.zeros(2)}}, "a": {"b": torch.zeros(2)}}, [2])
    seen = weakref.ref(data)
    gc.collect()
    gc.disable()
    try:
        following = step_mdp(data)
        del data

        assert seen() is None and following["a", "b"].shape == (2,)
    finally:
        gc.enable()
