"""PRNG keys of JAX: those made on the host, and whether an env draws from the key it is given.

A key of a seed and the next of a sequence are identical to those of ``jax.random``, without a program that would have
to be compiled first. That holds for JAX's own settings of its generator; where others are set, ``jax.random`` is asked.
A program that draws from its own key begins every episode alike: `unkeyed_draws` reads it from its jaxpr.

Conventions
    key    raw PRNG key on the host, uint32, shape (2,): two words of 32 bits.
    keyed  depends on the key that `reset` is given.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), Threefry-2x32 with 20 rounds; how JAX
counts with it: https://docs.jax.dev/en/latest/jep/263-prng.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from envkit import functional
from envkit.functional import BatchedEnv, EnvWrapper
from envkit_bridges.jax.compilation import simulator_name

if TYPE_CHECKING:
    from envkit.functional.core import StatelessEnv

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_WORD = 0xFFFFFFFF


def key_of(seed: int) -> np.ndarray:
    """Make a key of a seed: other seeds, other keys. JAX alone would drop the upper 32 bits."""
    upper, lower = divmod(seed, 2**32)
    if not _is_default():
        key = jax.random.PRNGKey(lower)
        return np.asarray(jax.random.fold_in(key, upper) if upper else key)
    key = np.array([0, lower], np.uint32)
    return _hashed(key, upper) if upper else key


def split(key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two keys for one, as `jax.random.split` does."""
    if not _is_default():
        first, second = np.asarray(jax.random.split(jax.numpy.asarray(key)))
        return first, second
    return _hashed(key, 0), _hashed(key, 1)


def row_keys(key: np.ndarray, num_rows: int) -> np.ndarray:
    """Derive one key a row, as `envkit.functional.BatchedEnv.row_keys` does; shape (num_rows, 2)."""
    if not _is_default():
        return np.asarray(functional.row_keys(jax.numpy.asarray(key), num_rows))
    return _hashed(key, np.arange(num_rows, dtype=np.uint64))


def _is_default() -> bool:
    config = jax.config
    return config.jax_default_prng_impl == "threefry2x32" and config.jax_threefry_partitionable  # type: ignore[attr-defined]


def _hashed(key: np.ndarray, count: int | np.ndarray) -> np.ndarray:
    """Return the block of a counter below 2**32 under a key, or those of several, shape (*count, 2)."""
    first, second = (int(word) for word in key)
    schedule = (first, second, first ^ second ^ _PARITY)
    left, right = first, (count + second) & _WORD
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            left = (left + right) & _WORD
            right = ((right << rotation | right >> (32 - rotation)) & _WORD) ^ left
        left = (left + schedule[(group + 1) % 3]) & _WORD
        right = (right + schedule[(group + 2) % 3] + group + 1) & _WORD
    return np.array([left, right], np.uint32).T


_DRAWS = frozenset(("random_bits", "threefry2x32", "rng_bit_generator", "random_gamma"))


def unkeyed_draws(env: StatelessEnv) -> Iterator[str]:
    """Warn when ``reset`` draws numbers that its key does not decide; envkit's own wrappers are left out.

    Args:
        env: a `StatelessEnv`, or one that holds another as ``env``.
    """
    while isinstance(env, BatchedEnv | EnvWrapper):
        env = env.env
    program = jax.make_jaxpr(env.reset)(jax.random.PRNGKey(0)).jaxpr
    keyed = set(program.invars)
    for equation in program.eqns:
        if any(given in keyed for given in equation.invars if not hasattr(given, "val")):
            keyed.update(equation.outvars)
        elif _draws(equation):
            yield (
                f"reset of {simulator_name(env)} draws random numbers from another key than it is given, so "
                "all episodes begin alike: draw from that, split where several are needed"
            )
            return


def _draws(equation: Any) -> bool:
    """Check whether an equation, or a program inside it, draws random numbers."""
    if equation.primitive.name in _DRAWS:
        return True
    inside = [getattr(value, "jaxpr", value) for value in equation.params.values()]
    return any(_draws(inner) for part in inside for inner in getattr(part, "eqns", ()))
