"""Every kind of env gives today what it gave when `bench/golden.py` wrote it down."""

from __future__ import annotations

import numpy as np
import pytest

from bench import golden

pytestmark = pytest.mark.rounding
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""Of floats over `golden` runs of eight steps: other CPUs, and other versions of XLA, round otherwise."""


def _marks(kind: str, chain: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if kind in golden.COMPILED and chain in ("values", "learns") else []


UNITS = [pytest.param(*unit, marks=_marks(*unit)) for unit in golden.UNITS]


@pytest.mark.parametrize(("kind", "chain"), UNITS)
def test_rollouts_are_those_that_were_written_down(kind, chain):
    now = golden.played(kind, chain)
    wanted = golden.read(kind, chain)

    assert now.keys() == wanted.keys()
    for run, (exact, floats) in wanted.items():
        now_exact, now_floats = golden.summary(now[run])
        assert now_exact == exact, run
        assert now_floats.keys() == floats.keys(), run
        for leaf, value in floats.items():
            np.testing.assert_allclose(
                now_floats[leaf], value, **TOLERANCE, err_msg=f"{run}: {leaf}"
            )


def test_there_are_about_three_hundred():
    assert len(golden.UNITS) == len(set(golden.UNITS))
    assert sum(len(golden.read(*unit)) for unit in golden.UNITS) >= 300
