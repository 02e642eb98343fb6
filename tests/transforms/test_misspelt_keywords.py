"""Keywords that a transform does not take are told with the nearest that it does, and nothing else of it changes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from envkit import (
    StepCounter,
    TensorDictPrimer,
    Transform,
)
from envkit.specs import Unbounded


class Open(Transform):
    """Takes any keyword."""

    def __init__(self, **kwargs):
        super().__init__()
        self.keywords = kwargs


def test_a_transform_that_takes_any_keyword_is_left_to_itself():
    assert Open(max_step=3).keywords == {"max_step": 3}
    assert list(TensorDictPrimer(max_step=Unbounded((1,))).primers.keys()) == ["max_step"]


def test_signatures_show_what_a_transform_takes_and_what_it_is_called_with():
    assert list(inspect.signature(StepCounter).parameters) == [
        *["max_steps", "truncated_key", "step_count_key", "update_done"]
    ]
    assert "max_steps" not in inspect.signature(StepCounter(3)).parameters


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), StepCounter.clone]
)
def test_copies_are_made_without_keywords(twin):
    assert twin(StepCounter(max_steps=3)).max_steps == 3
