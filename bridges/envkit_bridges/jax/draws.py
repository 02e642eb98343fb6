"""Whether a stateless env draws its random numbers from the key it is given.

A program that draws from a key of its own begins every episode alike, in every row. What it computes is
read from its jaxpr; nothing runs.

Conventions
    keyed  depends on the key that `reset` is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

__all__ = ["unkeyed_draws"]

_DRAWS = frozenset(("random_bits", "threefry2x32", "rng_bit_generator", "random_gamma"))


def unkeyed_draws(env: Any) -> Iterator[str]:
    """Tell when the innermost ``reset`` draws numbers that its key does not decide.

    Args:
        env: a `StatelessEnv`, or one that holds another as ``env``.
    """
    while hasattr(env, "env"):
        env = env.env
    program = jax.make_jaxpr(env.reset)(jax.random.PRNGKey(0)).jaxpr
    keyed = set(program.invars)
    for equation in program.eqns:
        if any(given in keyed for given in equation.invars if not hasattr(given, "val")):
            keyed.update(equation.outvars)
        elif _draws(equation):
            yield (
                f"reset of {type(env).__name__} draws random numbers from another key than it is given, so "
                "all episodes begin alike: draw from that, split where several are needed"
            )
            return


def _draws(equation: Any) -> bool:
    """Say whether an equation, or a program inside it, draws random numbers."""
    if equation.primitive.name in _DRAWS:
        return True
    inside = [getattr(value, "jaxpr", value) for value in equation.params.values()]
    return any(_draws(inner) for part in inside for inner in getattr(part, "eqns", ()))
