"""Keywords that a transform does not take are told with the nearest that it does, and nothing else of it changes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from envkit import (
    CatFrames,
    Compose,
    NoopResetEnv,
    StepCounter,
    TensorDictPrimer,
    Transform,
    VecNorm,
)
from envkit.errors import OptionError
from envkit.specs import Unbounded


class Plain(Transform):
    """Takes what every transform takes."""


class Open(Transform):
    """Takes any keyword."""

    def __init__(self, **kwargs):
        super().__init__()
        self.given = kwargs


CALLS = {
    "max_steps": lambda: StepCounter(max_step=3),
    "dim": lambda: CatFrames(2, dims=-1),
    "noops": lambda: NoopResetEnv(noop=3),
    "in_keys": lambda: Plain(in_kys=["a"]),
    "decay": lambda: VecNorm(decays=0.9),
    "eps": lambda: VecNorm(["a"], ep=0.9, new_api=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_misspelt_keyword_of_a_transform_is_told_with_the_nearest(name):
    with pytest.raises(OptionError, match=rf"takes no keyword .*Did you mean '{name}'\?"):
        CALLS[name]()


def test_a_keyword_that_resembles_none_is_told_with_all():
    with pytest.raises(TypeError, match=r"^Compose takes no keyword 'zeal'\. Leave it out\."):
        Compose(StepCounter(), zeal=1)


def test_a_transform_that_takes_any_keyword_is_left_to_itself():
    assert Open(max_step=3).given == {"max_step": 3}
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
