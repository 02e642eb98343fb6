"""How actions that are choices are spelled: as integers inside programs, one-hot or as integers in the data.

Conventions
    integers  int32: shape (*rows,) of a `Discrete`, (*rows, k) of a `MultiDiscrete` of k choices.
    one-hot   the options of a choice on the last axis, those of several one after the other.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import torch

from envkit.functional import Discrete, MultiDiscrete
from envkit.specs import MultiOneHot, OneHot, TensorSpec

__all__ = ["encoded", "integers_in_jax", "integers_of", "is_choice"]


def is_choice(space: Any) -> bool:
    """Say whether actions of a space are one choice, or several."""
    return isinstance(space, Discrete | MultiDiscrete)


def integers_of(value: torch.Tensor, space: Discrete | MultiDiscrete) -> torch.Tensor:
    """Read one-hot choices as integers."""
    if isinstance(space, Discrete):
        return value.argmax(-1)
    return torch.stack([part.argmax(-1) for part in value.split(space.nvec, -1)], -1)


def integers_in_jax(value: jax.Array, space: Discrete | MultiDiscrete) -> jax.Array:
    """Read one-hot choices as integers, in a program."""
    if isinstance(space, Discrete):
        return value.argmax(-1)
    parts = jnp.split(value, list(accumulate(space.nvec))[:-1], -1)
    return jnp.stack([part.argmax(-1) for part in parts], -1)


def encoded(action: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Spell what a program gave as an action, choices as integers, the way its spec says."""
    one_hot = torch.nn.functional.one_hot
    if isinstance(spec, OneHot):
        action = one_hot(action.long(), spec.shape[-1])
    elif isinstance(spec, MultiOneHot):
        choices = zip(action.long().unbind(-1), spec.nvec, strict=True)
        action = torch.cat([one_hot(choice, n) for choice, n in choices], -1)
    return action.to(spec.dtype)
