"""Small public helpers."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

import envkit
from envkit import (
    ExplorationType,
    exploration_type,
    get_available_libraries,
    make_composite_from_td,
    set_exploration_type,
    terminated_or_truncated,
)
from envkit.specs import Categorical, Composite

T, F = True, False


# ------------------------------------------------------------------------------- exploration types


@pytest.mark.parametrize("kind", list(ExplorationType))
def test_a_type_holds_inside_the_block_only(kind):
    before = exploration_type()

    with set_exploration_type(kind):
        assert exploration_type() is kind
        with set_exploration_type(ExplorationType.RANDOM):
            assert exploration_type() is ExplorationType.RANDOM
        assert exploration_type() is kind

    assert exploration_type() is before


def test_a_type_holds_inside_a_decorated_function():
    @set_exploration_type(ExplorationType.MEAN)
    def ask():
        return exploration_type()

    assert ask() is ExplorationType.MEAN
    assert exploration_type() is not ExplorationType.MEAN


def test_a_type_is_restored_after_an_error():
    before = exploration_type()

    with pytest.raises(ZeroDivisionError), set_exploration_type(ExplorationType.MODE):
        _ = 1 / 0

    assert exploration_type() is before


def test_the_types():
    assert {kind.name for kind in ExplorationType} >= {
        *("DETERMINISTIC", "RANDOM", "MODE", "MEAN", "MEDIAN")
    }


# ---------------------------------------------------------------------------------------- libraries


def test_installed_libraries_are_known():
    libraries = get_available_libraries()

    assert libraries["gymnasium"] and libraries["jax"] and libraries["brax"]
    assert all(isinstance(value, bool) for value in libraries.values())


def test_specs_are_made_from_data():
    td = TensorDict({"a": torch.zeros(()), "b": {"c": torch.zeros(3, dtype=torch.int64)}})

    spec = make_composite_from_td(td)

    assert spec["a"].shape == (1,)
    assert spec["b", "c"].dtype == torch.int64
    assert make_composite_from_td(td, unsqueeze_null_shapes=False)["a"].shape == ()


# -------------------------------------------------------------------------- terminated_or_truncated


def flags(**leaves) -> TensorDict:
    return TensorDict({name: torch.tensor(value) for name, value in leaves.items()}, [2])


def test_flags_become_a_mask():
    td = flags(done=[[T], [F]])

    assert terminated_or_truncated(td) is True
    assert td["_reset"].tolist() == [[T], [F]]


def test_nothing_is_written_when_nothing_is_set():
    td = flags(done=[[F], [F]], truncated=[[F], [F]])

    assert terminated_or_truncated(td) is False
    assert set(td.keys()) == {"done", "truncated"}


def test_a_mask_of_falses_can_be_asked_for():
    td = flags(done=[[F], [F]])

    assert terminated_or_truncated(td, write_full_false=True) is False
    assert td["_reset"].tolist() == [[F], [F]]


def test_the_mask_may_have_another_name_or_none():
    td = flags(terminated=[[F], [T]])

    assert terminated_or_truncated(td, key="ended")
    assert td["ended"].tolist() == [[F], [T]]
    assert terminated_or_truncated(td, key=None)
    assert set(td.keys()) == {"terminated", "ended"}


def test_every_level_has_its_own_mask():
    td = flags(done=[[F], [F]])
    td["agents"] = TensorDict(
        {"done": torch.tensor([[[T], [F]], [[F], [F]]]), "other": torch.zeros(2, 2)}, [2, 2]
    )

    assert terminated_or_truncated(td)
    assert td["_reset"].tolist() == [[F], [F]]
    assert td["agents", "_reset"].squeeze(-1).tolist() == [[T, F], [F, F]]


def test_a_spec_says_which_leaves_count():
    leaf = Categorical(2, shape=(2, 1), dtype=torch.bool)
    td = flags(done=[[T], [F]], mine=[[F], [T]])

    assert terminated_or_truncated(td, full_done_spec=Composite(mine=leaf, shape=(2,)))
    assert td["_reset"].tolist() == [[F], [T]]


def test_leaves_that_the_data_lacks_do_not_count():
    leaf = Categorical(2, shape=(2, 1), dtype=torch.bool)
    spec = Composite(
        done=leaf,
        truncated=leaf.clone(),
        agents=Composite(done=leaf.clone(), shape=(2,)),
        shape=(2,),
    )
    td = flags(done=[[F], [T]])

    assert terminated_or_truncated(td, full_done_spec=spec)
    assert set(td.keys(True, True)) == {"done", "_reset"}


def test_lazy_stacks_have_flags_too():
    td = LazyStackedTensorDict(*flags(done=[[T], [F]]).unbind(0), stack_dim=0)

    assert terminated_or_truncated(td)
    assert td["_reset"].tolist() == [[T], [F]]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_a_mask_is_the_or_of_the_flags(rows):
    values = torch.tensor(rows)
    td = TensorDict(
        dict(zip(("done", "terminated", "truncated"), values.unsqueeze(-1).unbind(1), strict=True)),
        [len(rows)],
    )

    found = terminated_or_truncated(td, write_full_false=True)

    assert found == bool(values.any())
    assert td["_reset"].squeeze(-1).tolist() == values.any(1).tolist()


# ---------------------------------------------------------------------------------------- all of it


HELPERS = (
    "check_env_specs",
    "check_no_exclusive_keys",
    "contains_lazy_spec",
    "default_info_dict_reader",
    "exploration_type",
    "get_available_libraries",
    "get_env_transforms_from_module",
    "make_composite_from_td",
    "set_exploration_type",
    "split_trajectories",
    "step_mdp",
    "terminated_or_truncated",
)


@pytest.mark.parametrize("name", [*HELPERS, "ModuleTransform", "ContinuousBox", "ExplorationType"])
def test_helpers_are_exported_flat_and_documented(name):
    helper = getattr(envkit, name)

    assert name in envkit.__all__
    assert inspect.getdoc(helper)
