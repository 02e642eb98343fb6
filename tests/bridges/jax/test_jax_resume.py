"""Stateless envs go on to the same bits from their state dict and the data carried into the next step."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit import Compose, JaxEnv, RandomTruncationTransform, StepCounter, TransformedEnv, VecNorm
from tests.zoo.jax_drift import Drift
from tests.zoo.resumed import same, twice

drift = partial(JaxEnv, Drift(), batch_size=[2], episode_length=5)

KINDS = {
    "nested": partial(drift, state_layout="nested"),
    "fused": lambda: TransformedEnv(drift(), Compose(StepCounter(4), VecNorm(["observation"]))),
    "around": lambda: TransformedEnv(
        drift(), Compose(StepCounter(), RandomTruncationTransform(2, 4))
    ),
}


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("fused", 3),
        *(pytest.param(kind, None, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_a_stateless_env_goes_on_to_the_same_bits(kind, seed):
    assert same(twice(KINDS[kind], lambda env: env, before=8, after=9, seed=seed))


@settings(max_examples=15)
@given(before=st.integers(0, 12), seed=st.none() | st.integers(0, 2**40))
def test_it_does_not_matter_where_a_run_is_cut(before, seed):
    assert same(twice(drift, lambda env: env, before=before, after=6, seed=seed))
