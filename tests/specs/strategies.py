"""Random specs for property tests."""

import torch
from hypothesis import strategies as st

from envkit.specs import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)

__all__ = ["BOXES", "CHOICES", "leaves", "shapes"]

BOXES = ("cube", "box", "half-open", "amplitudes")
CHOICES = ("categorical", "masked", "one-hot", "numbers", "one-hots")

shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)


@st.composite
def leaves(draw, leading=shapes, kinds=None):
    """Draw a leaf spec, of any kind or of some, whose shape begins with what ``leading`` draws."""
    shape = draw(leading)
    n = draw(st.integers(1, 5))
    nvec = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    low = draw(st.integers(-5, 5))
    high = low + draw(st.integers(0, 5))
    bounds = torch.rand(shape, generator=torch.Generator().manual_seed(n))
    makers = {
        "cube": lambda: Bounded(low, high, shape),
        "box": lambda: Bounded(low - bounds, high + bounds, dtype=torch.float64),
        "half-open": lambda: Bounded(low, float("inf"), shape),
        "integers": lambda: Bounded(low, high, shape, dtype=torch.int32),
        "integer box": lambda: Bounded(
            low - (bounds * 5).long(), high + (bounds * 5).long(), dtype=torch.int64
        ),
        "hashes": lambda: Bounded(high + 5, 2**64 - n, shape, dtype=torch.uint64),
        "amplitudes": lambda: Bounded(low - bounds * 1j, high + 1j, dtype=torch.complex128),
        "free": lambda: Unbounded(shape),
        "bytes": lambda: Unbounded(shape, dtype=torch.uint8),
        "categorical": lambda: Categorical(n, shape),
        "masked": lambda: Categorical(n, shape, mask=torch.arange(n) % 2 == 0),
        "flag": lambda: Categorical(2, shape, dtype=torch.bool),
        "one-hot": lambda: OneHot(n, (*shape, n)),
        "numbers": lambda: MultiCategorical(nvec, (*shape, len(nvec))),
        "one-hots": lambda: MultiOneHot(nvec, (*shape, sum(nvec))),
        "binary": lambda: Binary(n, (*shape, n)),
        "either": lambda: Choice([Bounded(0, 1, (n,)), Bounded(2, 3, (n,))]).expand(*shape, n),
    }
    return makers[draw(st.sampled_from(kinds or sorted(makers)))]()
