"""Operators that draw random numbers: torch's generators replaced by a JAX key.

The distribution is that of torch, the numbers are others. Each operator of a graph gets a key of its
own; how the keys follow each other is decided in `graph`. A generator that a module brings along is
refused: its state would be the same at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from envkit_bridges.jax.policy.ops.table import table
from envkit_bridges.policy.ops.making import in_width
from envkit_bridges.policy.ops.table import Op

__all__ = ["DRAWING"]

Key = jax.Array


def _draws(entries: dict[str, Callable[..., Any]]) -> dict[str, Op]:
    return table({names: _without_generator(draw) for names, draw in entries.items()}, draws=True)


def _without_generator(draw: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(key: Key, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        if generator is not None or any(isinstance(arg, torch.Generator) for arg in args):
            raise NotImplementedError(
                "a generator of the module's own is not covered; leave it out: draws follow the env's seed"
            )
        return draw(key, *args, **kwargs)

    return drawn


def _sized(draw: Callable[..., Any]) -> Callable[..., Any]:
    return lambda key, size: draw(key, tuple(size))


def _alike(draw: Callable[..., Any]) -> Callable[..., Any]:
    return lambda key, x: draw(key, x.shape)


def _normal_in(key: Key, x: Any, mean: float = 0.0, std: float = 1.0) -> Any:
    return mean + std * jax.random.normal(key, x.shape)


def _normal(key: Key, mean: Any, std: Any = 1.0) -> Any:
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    return mean + std * jax.random.normal(key, shape)


def _uniform(key: Key, x: Any, low: float = 0.0, high: float = 1.0) -> Any:
    return jax.random.uniform(key, x.shape, minval=low, maxval=high)


def _exponential(key: Key, x: Any, rate: float = 1.0) -> Any:
    return jax.random.exponential(key, x.shape) / rate


def _multinomial(key: Key, weights: Any, count: int, replacement: bool = False) -> Any:
    """Draw ``count`` indices from each row; without replacement by the Gumbel-top-k trick."""
    logits = jnp.log(weights)
    if replacement or count == 1:
        shape = (count, *weights.shape[:-1])
        return jnp.moveaxis(jax.random.categorical(key, logits, shape=shape), 0, -1)
    noisy = logits + jax.random.gumbel(key, logits.shape)
    return jnp.argsort(-noisy, axis=-1)[..., :count]


def _dropout(key: Key, x: Any, rate: float, training: bool | None = True) -> tuple[Any, Any]:
    if not training:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    scale = 0.0 if rate == 1.0 else 1.0 / (1.0 - rate)
    return jnp.where(kept, x, 0) * scale, kept


def _dirichlet(key: Key, concentration: Any) -> Any:
    return jax.random.dirichlet(key, concentration, concentration.shape[:-1])


def _integers(key: Key, low: int, high: int, shape: Any) -> Any:
    """Draw from ``low`` to one below ``high``."""
    return jax.random.randint(key, tuple(shape), in_width(jnp, low), in_width(jnp, high))


def _from(key: Key, x: Any, low: int, high: int | None = None) -> Any:
    if high is None:
        raise NotImplementedError("random_ without an upper end is not covered; give it one")
    return _integers(key, low, high, x.shape)


def _cauchy(key: Key, x: Any, median: float = 0.0, sigma: float = 1.0) -> Any:
    return median + sigma * jax.random.cauchy(key, x.shape)


def _log_normal(key: Key, x: Any, mean: float = 1.0, std: float = 2.0) -> Any:
    return jnp.exp(_normal_in(key, x, mean, std))


DRAWING = _draws(
    {
        "rand rand.generator": _sized(jax.random.uniform),
        "randn randn.generator": _sized(jax.random.normal),
        "rand_like": _alike(jax.random.uniform),
        "randn_like": _alike(jax.random.normal),
        "randint randint.generator": lambda key, high, size: _integers(key, 0, high, size),
        "randint.low randint.low_generator": _integers,
        "randint_like": lambda key, x, high: _integers(key, 0, high, x.shape),
        "randint_like.low_dtype": lambda key, x, low, high: _integers(key, low, high, x.shape),
        "random.to": lambda key, x, high: _integers(key, 0, high, x.shape),
        "random.from": _from,
        "randperm randperm.generator": lambda key, n: jax.random.permutation(key, n),
        "normal_functional": _normal_in,
        "normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor": _normal,
        "uniform": _uniform,
        "exponential": _exponential,
        "cauchy": _cauchy,
        "log_normal": _log_normal,
        "geometric": lambda key, x, p: jax.random.geometric(key, p, x.shape),
        "poisson": lambda key, rate: jax.random.poisson(key, rate),
        "binomial": lambda key, count, p: jax.random.binomial(key, count, p),
        "bernoulli": lambda key, rate: jax.random.bernoulli(key, rate),
        "bernoulli.p": lambda key, x, rate=0.5: jax.random.bernoulli(key, rate, x.shape),
        "multinomial": _multinomial,
        "native_dropout": _dropout,
        "_standard_gamma": lambda key, alpha: jax.random.gamma(key, alpha),
        "_sample_dirichlet": _dirichlet,
    }
)
