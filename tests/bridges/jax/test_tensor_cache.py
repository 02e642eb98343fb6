"""What is kept of a tensor, and when it is forgotten."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from envkit_bridges.jax.tensor_cache import Unchanged


def kept_of(tensor):
    kept = Unchanged()
    kept.keep(tensor, "value")
    return kept


def test_what_was_kept_of_a_tensor_is_found_again():
    tensor = torch.zeros(3)

    assert kept_of(tensor).find(tensor) == "value"


@pytest.mark.parametrize(
    "write",
    [lambda t: t.add_(1), lambda t: t[1:].zero_(), lambda t: t.view(3, 1).fill_(2)],
    ids=["itself", "a slice", "a view"],
)
def test_a_write_makes_it_forgotten(write):
    tensor = torch.zeros(3)
    kept = kept_of(tensor)

    write(tensor)

    assert kept.find(tensor) is None


def test_other_memory_makes_it_forgotten_which_no_version_counts():
    tensor = torch.zeros(3)
    kept = kept_of(tensor)

    tensor.data = torch.ones(3)

    assert kept.find(tensor) is None


def test_another_tensor_of_the_same_memory_has_nothing():
    tensor = torch.zeros(3)

    assert kept_of(tensor).find(tensor[:]) is None


def test_nothing_outlives_the_tensor():
    tensor = torch.zeros(3)
    kept = kept_of(tensor)

    del tensor

    assert len(kept) == 0


def test_of_inference_tensors_nothing_is_kept():
    with torch.inference_mode():
        tensor = torch.zeros(3)

    assert kept_of(tensor).find(tensor) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))])
def test_a_copy_is_empty(copied):
    tensor = torch.zeros(3)

    assert copied(kept_of(tensor)).find(tensor) is None
