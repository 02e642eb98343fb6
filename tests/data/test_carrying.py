"""How a finished transition becomes the root of the next one."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from envkit.data.transition import Carrying, carry, step_mdp

T, F = True, False


@pytest.mark.parametrize("lazy", [F, T], ids=["plain", "lazy stack"])
def test_fresh_entries_win_over_carried_ones_at_any_depth(lazy):
    def entries(value, names):
        return {name: torch.full((2, 1), value) for name in names}

    root = {**entries(0.0, ["own", "action", "seen"]), "state": entries(0.0, ["a"])}
    following = {**entries(1.0, ["seen", "reward", "shown"]), "state": entries(1.0, ["a", "b"])}
    data = TensorDict({**root, "next": TensorDict(following, [2])}, [2])
    fresh = TensorDict({**entries(2.0, ["seen", "new"]), "state": entries(2.0, ["a"])}, [2])
    rule = Carrying(reward_keys={("reward",)}, action_keys={("action",)})
    step = lazy_stack(list(data.unbind(0)), 0) if lazy else data

    root_after = carry(step, rule, fresh)

    expected = carry(data, rule).update(fresh)
    assert set(root_after.keys(True)) == set(expected.keys(True))
    assert all(bool((root_after[key] == expected[key]).all()) for key in expected.keys(True, True))


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

    root_after = carry(data, rule, fresh)

    expected = carry(data, rule).update(fresh)
    assert (root_after is fresh) == is_whole
    assert set(root_after.keys(True)) == set(expected.keys(True))
    assert all(bool((root_after[key] == expected[key]).all()) for key in expected.keys(True, True))


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
