"""What is added up over an episode, one step at a time: counts, sums, what is left of a target.

Pure functions of leaves in any array namespace (NumPy, torch, JAX, also inside `jax.jit`), so that
transforms and compiled steps can share them. They do not know when an episode begins: `rules` does.

Conventions
    leaf    array of shape (*batch, *event); a function is element-wise unless it says otherwise.
    before  value at the root of a step; the result is the value at its ``next``.
    flags   bool leaf of done flags; what is made from them has their place and batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from array_api_compat import array_namespace

from envkit.arrays.elementwise import Array, dtype_named


def unset(flags: Array) -> Array:
    """Make flags that are not set, in the shape of ``flags``."""
    return array_namespace(flags).zeros_like(flags)


def uncounted(flags: Array) -> Array:
    """Make counts of nothing, int64, in the shape of ``flags``."""
    return array_namespace(flags).zeros_like(flags, dtype=dtype_named(flags, "int64"))


def counted(before: Array) -> Array:
    """Count one more step; same dtype."""
    return before + 1


def begun(
    flags: Array, batch_dims: int, event: Sequence[int], dtype: str, value: Any | None = None
) -> Array:
    """Make the values an episode begins with.

    Args:
        flags: gives the batch, the first ``batch_dims`` axes.
        event: shape of a value after its batch.
        dtype: its name.
        value: what all elements are; None: zero.
    """
    xp = array_namespace(flags)
    batch = flags.shape[:batch_dims]
    blank = xp.zeros_like(flags, dtype=dtype_named(flags, dtype))
    if tuple(flags.shape) != (*batch, *event):
        first = xp.reshape(blank, (*batch, -1))[..., 0]
        first = xp.reshape(first, (*batch, *(1 for _ in event)))
        blank = xp.zeros_like(xp.broadcast_to(first, (*batch, *event)))
    return blank if value is None else filled(blank, value)


def filled(like: Array, value: Array) -> Array:
    """Make a leaf like another one, all elements of which are ``value``."""
    return array_namespace(like).full_like(like, value)


def added(before: Array, reward: Array) -> Array:
    """Add the reward of this step to those before."""
    return before + reward


def compensated(before: Array, excess: Array, reward: Array) -> tuple[Array, Array]:
    """Add the reward of this step to those before; returns the sum, and how much rounding has made it too large.

    Source: W. Kahan, "Further remarks on reducing truncation errors", Communications of the ACM 8, 1965.

    Args:
        excess: how much rounding had made ``before`` too large.
    """
    reward = reward - excess
    total = before + reward
    return total, (total - before) - reward


def discounted(before: Array, reward: Array, gamma: Array) -> Array:
    """Discount the rewards before by one step, and add the reward of this one."""
    return before * gamma + reward


def left(before: Array, reward: Array) -> Array:
    """Take the reward of this step from what is left of a target."""
    return before - reward


def spread(cut: Array, flags: Array) -> Array:
    """Expand the flags of a level to a level below it, whose flags may have more axes."""
    if tuple(cut.shape) == tuple(flags.shape):
        return cut
    xp = array_namespace(cut)
    if cut.shape[-1] == 1:
        cut = cut[..., 0]
    cut = xp.reshape(cut, (*cut.shape, *(1,) * (flags.ndim - cut.ndim)))
    return xp.broadcast_to(cut, flags.shape)
