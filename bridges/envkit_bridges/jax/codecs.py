"""What a stateless env declares, and how its actions cross: specs of its arrays and spaces, choices as integers or one-hot.

Conventions
    batch     the env's batch size, in front of every spec.
    integers  int32: shape (*rows,) of a `Discrete`, (*rows, k) of a `MultiDiscrete` of k choices. Programs take these.
    one-hot   the options of a choice on the last axis, those of several one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from envkit.data.paths import Path, as_key, nest
from envkit.errors import SpecTypeError
from envkit.functional import AgentsDiscrete, Box, Discrete, MultiDiscrete, RewardShape
from envkit.functional.structure import PyTree
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


def done_composite(
    batch: torch.Size, device: torch.device | None, groups: Mapping[str, int] | None = None
) -> Composite:
    """Declare the three done flags, of the whole and of each agent of a group."""
    flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool, device=device)
    declared = Composite({name: flag.clone() for name in DONE_LEAVES}, shape=batch, device=device)
    for name, agents in (groups or {}).items():
        declared[name] = done_composite(torch.Size((*batch, agents)), device)
    return declared


def reward_composite(
    shape: RewardShape,
    batch: torch.Size,
    device: torch.device | None,
    groups: Mapping[str, int] | None = None,
) -> TensorSpec:
    """Declare a reward, or those of several names."""
    if not isinstance(shape, Mapping):
        return Unbounded((*batch, *(shape or (1,))), device=device, dtype=torch.float32)
    declared = grouped_composite(groups or {}, batch, device)
    for name, member in shape.items():
        if not isinstance(member, Mapping):
            declared[name] = reward_composite(member, batch, device)
        for inner, own in member.items() if isinstance(member, Mapping) else ():
            declared[name, inner] = reward_composite(own, batch, device)
    return declared


def action_path(path: Path) -> Path:
    """Return where an action lies that has this path in a tree of spaces or actions: below "action", or below its group."""
    return path if len(path) > 1 else ("action", *path)


def actions_by_path(tree: PyTree) -> dict[Path, Any]:
    """List spaces or actions, one or a dict of them, by where they lie in the data."""
    return {action_path(path): leaf for path, leaf in _flat(tree, ())}


def _flat(tree: PyTree, path: Path) -> Iterator[tuple[Path, Any]]:
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for name, member in tree.items():
        yield from _flat(member, (*path, name))


def action_tree(by_path: Mapping[Path, Any]) -> PyTree:
    """Return actions by where they lie as the env takes them; the inverse of `actions_by_path`."""
    if ("action",) in by_path:
        return by_path["action",]
    return nest({path[1:] if path[0] == "action" else path: leaf for path, leaf in by_path.items()})


def action_composite(
    space: object,
    batch: torch.Size,
    device: torch.device | None,
    *,
    categorical: bool,
    groups: Mapping[str, int] | None = None,
) -> Composite:
    """Declare the actions of a space, or of spaces by name, where `actions_by_path` says.

    Args:
        categorical: discrete actions as integers instead of one-hot.
        groups: agents by the name of their node, whose batch size they are part of.

    Raises:
        SpecTypeError: a space is none of `Box`, `Discrete` and `MultiDiscrete`.
    """
    composite = grouped_composite(groups or {}, batch, device)
    for path, member in actions_by_path(space).items():
        composite[as_key(path)] = _action_leaf(member, batch, device, categorical)
    return composite


def grouped_composite(
    groups: Mapping[str, int], batch: torch.Size, device: torch.device | None
) -> Composite:
    """Declare nothing yet but the nodes of groups of agents."""
    composite = Composite(shape=batch, device=device)
    for name, agents in groups.items():
        composite[name] = Composite(shape=(*batch, agents), device=device)
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
    if isinstance(space, AgentsDiscrete):
        return _action_leaf(
            Discrete(space.n), torch.Size((*batch, *space.shape)), device, categorical
        )
    if isinstance(space, MultiDiscrete):
        if categorical:
            return MultiCategorical(space.nvec, (*batch, len(space.nvec)), device)
        return MultiOneHot(space.nvec, (*batch, sum(space.nvec)), device, torch.int64)
    raise SpecTypeError(
        f"the action space is {type(space).__name__}, but must be a Box, a Discrete, a MultiDiscrete, or a "
        "dict of them. Make one of envkit.Box, envkit.Discrete and envkit.MultiDiscrete."
    )


def is_choice(space: object) -> bool:
    """Check whether actions of a space are one choice, or several."""
    return isinstance(space, Discrete | MultiDiscrete)


def integers_of(value: torch.Tensor, space: Discrete | MultiDiscrete) -> torch.Tensor:
    """Read one-hot choices as integers."""
    if isinstance(space, Discrete | AgentsDiscrete):
        return value.argmax(-1)
    return torch.stack([part.argmax(-1) for part in value.split(space.nvec, -1)], -1)


def integers_in_jax(value: jax.Array, space: Discrete | MultiDiscrete) -> jax.Array:
    """Read one-hot choices as integers, in a program."""
    if isinstance(space, Discrete | AgentsDiscrete):
        return value.argmax(-1)
    parts = jnp.split(value, list(accumulate(space.nvec))[:-1], -1)
    return jnp.stack([part.argmax(-1) for part in parts], -1)


def encoded(action: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Encode what a program gave as an action, choices as integers, the way its spec says."""
    one_hot = torch.nn.functional.one_hot
    if isinstance(spec, OneHot):
        action = one_hot(action.long(), spec.shape[-1])
    elif isinstance(spec, MultiOneHot):
        choices = zip(action.long().unbind(-1), spec.nvec, strict=True)
        action = torch.cat([one_hot(choice, n) for choice, n in choices], -1)
    return action.to(spec.dtype)
