"""The weights of a policy, by name: what a trainer gives, and how a policy takes them.

Conventions
    weights  parameters and buffers by the names of ``state_dict()``.
    extra    what a module gives as ``get_extra_state()``, by the names of ``state_dict()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from envkit.env.policy import HasParams
from envkit.errors import ArgumentError, ArgumentTypeError

_EXTRA = "_extra_state"
"""The key of torch for it in a ``state_dict()``."""

Weights = Mapping[str, torch.Tensor]


def as_weights(weights: Any, policy: Any = None) -> Weights:
    """Convert what a user passes as weights into one form.

    Args:
        weights: a module, what its ``state_dict()`` gave, or a TensorDict of weights, nested or flat; for a policy that
            `HasParams`, such a policy or params of one.
        policy: that is to have them.

    Raises:
        ArgumentTypeError: it is something else.
    """
    if isinstance(weights, HasParams):
        return weights.named_params()
    if isinstance(policy, HasParams):
        return policy.named_params(weights)
    if isinstance(weights, nn.Module) and not isinstance(weights, TensorDictBase):
        return weights.state_dict()
    if isinstance(weights, TensorDictBase):
        flat = weights.flatten_keys(".")
        return {name: value.detach() for name, value in flat.items()}
    if isinstance(weights, Mapping):
        return {
            name: value
            for name, value in weights.items()
            if isinstance(value, torch.Tensor) or _is_extra(name)
        }
    raise ArgumentTypeError(
        f"the weights are of type {type(weights).__name__}, but must be a module, its state_dict(), or a TensorDict. Pass "
        "them: TensorDict.from_module(policy)."
    )


def load_weights(policy: Any, weights: Weights) -> Any:
    """Write weights into a policy, in place, and give it; one that `HasParams` gives another one, unless it has them.

    Raises:
        ArgumentError: (a ValueError) they are of another architecture.
    """
    if isinstance(policy, HasParams):
        held = policy.named_params()
        require_same_architecture(held, weights)
        has_them = all(torch.equal(value, weights[name]) for name, value in held.items())
        return policy if has_them else policy.with_params(weights)
    if not isinstance(policy, nn.Module):
        raise ArgumentTypeError(
            f"the policy is of type {type(policy).__name__}, which has no weights to load. Pass a torch.nn.Module, or a "
            "JaxPolicy."
        )
    held = tensors_of(policy)
    require_same_architecture(held, only_tensors(weights))
    with torch.no_grad():
        for name, value in held.items():
            value.copy_(weights[name])
    for name, state in extra_of(weights).items():
        policy.get_submodule(name.removesuffix(_EXTRA).rstrip(".")).set_extra_state(state)
    return policy


def only_tensors(weights: Mapping[str, Any]) -> Weights:
    """Return parameters and buffers, and leave out extra state."""
    return {name: value for name, value in weights.items() if not _is_extra(name)}


def extra_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return extra state alone."""
    return {name: value for name, value in weights.items() if _is_extra(name)}


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def require_same_architecture(held: Weights, weights: Weights) -> None:
    """Check that weights are those of a policy.

    Raises:
        ArgumentError: (a ValueError) a name is missing or left over, or a shape or dtype differs.
    """
    missing, unknown = sorted(held.keys() - weights.keys()), sorted(weights.keys() - held.keys())
    unlike = [
        f"{name!r} is {tuple(weights[name].shape)} {weights[name].dtype}, the policy has {tuple(value.shape)} "
        f"{value.dtype}"
        for name, value in held.items()
        if name in weights
        and (weights[name].shape != value.shape or weights[name].dtype != value.dtype)
    ]
    if missing or unknown or unlike:
        problems = [
            *([f"{missing} are missing"] if missing else []),
            *([f"{unknown} are not the policy's"] if unknown else []),
            *unlike,
        ]
        raise ArgumentError(
            f"these weights are of another architecture: {'; '.join(problems)}. Pass those of a module built alike."
        )


def tensors_of(policy: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a policy by name, live where it is a module; none of what has none."""
    if isinstance(policy, HasParams):
        return policy.named_params()
    if not isinstance(policy, nn.Module):
        return {}
    return dict(only_tensors(policy.state_dict(keep_vars=True)))
