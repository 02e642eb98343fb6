"""Keys that are made on the host are those of JAX."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit import functional
from envkit_bridges.jax.keys import key_of, row_keys, split


def key_of_jax(seed):
    key = jax.random.PRNGKey(seed % 2**32)
    return jax.random.fold_in(key, np.uint32(seed >> 32)) if seed >> 32 else key


@settings(max_examples=30)
@given(seed=st.integers(0, 2**64 - 1))
def test_keys_of_seeds_and_those_that_follow_have_the_bits_of_jax(seed):
    key = key_of(seed)

    assert np.array_equal(key, key_of_jax(seed))
    assert np.array_equal(split(key), jax.random.split(key_of_jax(seed)))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**64 - 1), rows=st.integers(0, 3))
def test_keys_of_rows_have_the_bits_of_jax(seed, rows):
    wanted = functional.row_keys(key_of_jax(seed), rows)

    assert np.array_equal(row_keys(key_of(seed), rows), wanted)


def test_where_another_generator_is_set_jax_is_asked():
    before = jax.config.jax_default_prng_impl  # type: ignore[attr-defined]
    jax.config.update("jax_default_prng_impl", "rbg")
    try:
        keys, wanted = split(key_of(2**40 + 3)), jax.random.split(key_of_jax(2**40 + 3))
    finally:
        jax.config.update("jax_default_prng_impl", before)

    assert np.array_equal(keys, wanted)


def test_where_jax_counts_as_it_did_once_it_is_asked():
    key, before = key_of(3), jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    jax.config.update("jax_threefry_partitionable", not before)
    try:
        keys, wanted = split(key), jax.random.split(jax.random.PRNGKey(3))
    finally:
        jax.config.update("jax_threefry_partitionable", before)

    assert np.array_equal(keys, wanted)
    assert not np.array_equal(keys, split(key))
