"""The arithmetic of transforms is one in every array library, inside `jax.jit` too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from envkit.arrays import elementwise

pytestmark = pytest.mark.rounding

VALUE = np.array([[-2.0, 0.0, 0.5], [1.0, 3.0, -0.0]], dtype=np.float32)

CASES = {
    "scaled": lambda v: elementwise.scaled(v, 1.0, -2.0),
    "standardised": lambda v: elementwise.standardised(v, 1.0, -2.0),
    "clipped": lambda v: elementwise.clipped(v, -1.0, 1.0),
    "clipped below": lambda v: elementwise.clipped(v, -1.0, None),
    "clipped above": lambda v: elementwise.clipped(v, None, 1.0),
    "sign": elementwise.sign,
    "is_positive": elementwise.is_positive,
    "weighted_sum": lambda v: elementwise.weighted_sum(v, v[0]),
    "tiled": lambda v: elementwise.tiled(v, 3, -1),
    "padded": lambda v: elementwise.padded(v, 2, -2, 7.0),
    "pushed": lambda v: elementwise.pushed(v, v * 2, -1),
    "recent": lambda v: elementwise.recent(v, 1, -2),
    "peak": lambda v: elementwise.peak(elementwise.pushed(v, v * 2, -2), 2, -2),
}


@pytest.mark.parametrize("name", CASES)
def test_every_library_computes_the_same(name):
    compute = CASES[name]

    expected = compute(VALUE)

    for value in (compute(torch.from_numpy(VALUE)), jax.jit(compute)(jnp.asarray(VALUE))):
        np.testing.assert_array_equal(np.asarray(value), expected)
        assert np.asarray(value).dtype == expected.dtype


def test_a_cast_takes_a_dtype_of_the_library():
    assert elementwise.cast(torch.ones(2), torch.int32).dtype == torch.int32
    assert elementwise.cast(np.ones(2), np.int32).dtype == np.int32
    cast = jax.jit(lambda value: elementwise.cast(value, jnp.int32))
    assert cast(jnp.ones(2)).dtype == jnp.int32


def test_a_window_holds_its_newest_frame_at_the_end():
    window = np.zeros((1, 2, 4))

    window = elementwise.pushed(window, np.ones((1, 1, 4)), -2)

    assert window[0, :, 0].tolist() == [0, 0, 1]
    assert elementwise.recent(window, 2, -2)[0, :, 0].tolist() == [0, 1]
