"""Whether the input of a step is what an env can take, and what a step that failed lacked.

Conventions
    inputs  leaf keys of actions and states.
    owner   name of the class of the env, for messages.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDictBase

from envkit.data.paths import Key, as_key, has_entry, leaf_paths
from envkit.errors import DataTypeError, EnvkitError, InputError, MissingKeyError, SpecTypeError
from envkit.specs import Composite

_functorch = torch._C._functorch  # type: ignore[attr-defined]
in_functorch = _functorch.peek_interpreter_stack
"""Gives None unless a transform of torch.func runs."""


def require_actions(td: TensorDictBase, actions: Composite) -> None:
    """Compare actions with their specs; one that is missing is reported by the code that needs it.

    Raises:
        SpecTypeError: one has another dtype.
        InputError: one has another shape.
    """
    for path in leaf_paths(actions):
        key = as_key(path)
        spec = actions[key]
        if spec.dtype is None or -1 in spec.shape or (value := td.get(key, None)) is None:
            continue
        dtype = getattr(value, "dtype", None)
        if dtype != spec.dtype:
            raise SpecTypeError(
                f"{key!r} is of type {type(value).__name__} and dtype {dtype}, but its spec says "
                f"{spec.dtype}. Have the policy give that, or declare the dtype it gives."
            )
        shape = (*td.batch_size, *spec.shape[len(actions.shape) :])
        if tuple(value.shape) != shape:
            raise InputError(
                f"{key!r} has shape {tuple(value.shape)}, but the env takes {shape}. Have the "
                "policy give one value for each element of the spec."
            )


def tell_missing(td: TensorDictBase, inputs: Iterable[Key], owner: str, error: Exception) -> None:
    """Explain a step that failed on data without the entries that the specs name as inputs.

    Raises:
        MissingKeyError: (a KeyError) some are not there, and ``error`` does not say so itself.
    """
    if isinstance(error, EnvkitError):
        return
    lacking = [key for key in inputs if not has_entry(td, key)]
    if lacking:
        raise MissingKeyError(
            f"the TensorDict has no {', '.join(map(repr, lacking))}, which {owner} "
            f"takes; it has {sorted(map(str, td.keys(True, True)))}. Write actions first, e.g. "
            "with env.rand_action(td), and start from env.reset(), which gives the states."
        ) from error


def require_values(td: TensorDictBase, inputs: Iterable[Key], owner: str) -> None:
    """Check that a simulator outside torch is given numbers.

    Raises:
        DataTypeError: an entry is what torch.func makes of a tensor: its values are not at hand.
    """
    for key in inputs:
        value = td.get(key, None)
        if isinstance(value, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(value):
            raise DataTypeError(
                f"{key!r} is a tensor under a transform of torch.func (vmap, grad, ...), and "
                f"{owner} steps outside torch, where such a tensor has no values. Call "
                "the env outside of it: many rows are a batch, and gradients of a stateless env come "
                "by requires_grad=True and backward()."
            )
