"""Dtypes by name in any array library."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from envkit.arrays.elementwise import NARROWER, dtype_named


@pytest.mark.parametrize("name", [*NARROWER, "int8", "float32"])
def test_a_dtype_is_that_of_the_library(name):
    assert dtype_named(torch.zeros(1), name) == getattr(torch, name)
    assert dtype_named(np.zeros(1), name) == np.dtype(name)
    assert dtype_named(jnp.zeros(1), name) == jnp.dtype(NARROWER.get(name, name))
    with jax.enable_x64(True):
        assert dtype_named(jnp.zeros(1), name) == jnp.dtype(name)


def test_an_interrupt_while_a_dtype_is_asked_for_is_raised(monkeypatch):
    """No tensor is made, since a library that catches all errors around it would lose the interrupt."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "empty", interrupted)

    assert dtype_named(torch.zeros(1), "int64") == torch.int64
