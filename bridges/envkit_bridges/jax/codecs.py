"""What a stateless env declares, and how its actions cross: specs of its arrays and spaces, choices as integers or one-hot.

Conventions
    batch     the env's batch size, in front of every spec.
    integers  int32: shape (*rows,) of a `Discrete`, (*rows, k) of a `MultiDiscrete` of k choices. Programs take these.
    one-hot   the options of a choice on the last axis, those of several one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
import torch

from envkit.errors import SpecTypeError
from envkit.functional import Box, Discrete, MultiDiscrete
from envkit.rules import DONE_LEAVES
from envkit.specs import (
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from envkit_bridges.dlpack import torch_dtype_of

__all__ = [
    "action_composite",
    "array_leaf",
    "done_composite",
    "encoded",
    "integers_in_jax",
    "integers_of",
    "is_choice",
]


def array_leaf(
    shape: tuple[int, ...],
    dtype: np.dtype | type[bool],
    batch: torch.Size,
    device: torch.device | None,
) -> TensorSpec:
    """Declare an array of one row: any number of its dtype, or a flag."""
    if dtype == bool:
        return Categorical(2, shape=(*batch, *shape), dtype=torch.bool, device=device)
    return Unbounded((*batch, *shape), dtype=torch_dtype_of(dtype), device=device)


def done_composite(batch: torch.Size, device: torch.device | None) -> Composite:
    """Declare the three done flags."""
    flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool, device=device)
    return Composite({name: flag.clone() for name in DONE_LEAVES}, shape=batch, device=device)


def action_composite(
    space: object, batch: torch.Size, device: torch.device | None, *, categorical: bool
) -> Composite:
    """Declare the actions of a space, or a dict of spaces, under "action".

    Args:
        categorical: discrete actions as integers instead of one-hot.

    Raises:
        SpecTypeError: a space is none of `Box`, `Discrete` and `MultiDiscrete`.
    """
    composite = Composite(shape=batch, device=device)
    if isinstance(space, Mapping):
        for key, member in space.items():
            composite[("action", key)] = _action_leaf(member, batch, device, categorical)
    else:
        composite["action"] = _action_leaf(space, batch, device, categorical)
    return composite


def _action_leaf(
    space: object, batch: torch.Size, device: torch.device | None, categorical: bool
) -> TensorSpec:
    if isinstance(space, Box):
        dtype = torch_dtype_of(space.dtype)
        low, high = (
            torch.as_tensor(np.array(bound), dtype=dtype, device="cpu")
            for bound in (space.low, space.high)
        )
        spec = Bounded(low, high, low.shape, device, dtype)
        return spec.expand(*batch, *low.shape)
    if isinstance(space, Discrete):
        if categorical:
            return Categorical(space.n, shape=batch, device=device)
        return OneHot(space.n, shape=(*batch, space.n), device=device, dtype=torch.int64)
    if isinstance(space, MultiDiscrete):
        if categorical:
            return MultiCategorical(space.nvec, (*batch, len(space.nvec)), device)
        return MultiOneHot(space.nvec, (*batch, sum(space.nvec)), device, torch.int64)
    raise SpecTypeError(
        f"the action space is {type(space).__name__}, but must be a Box, a Discrete, a MultiDiscrete, or a "
        "dict of them (envkit.Box, envkit.Discrete, envkit.MultiDiscrete)."
    )


def is_choice(space: object) -> bool:
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
