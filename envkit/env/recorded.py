"""The steps of a rollout as one TensorDict: stacked along time, the last one marked as cut short.

Conventions
    result  TensorDict of batch size (*batch, T); time is the last batch axis.
"""

from __future__ import annotations

from collections import Counter
from typing import cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envkit.data.paths import Key, as_key, as_path
from envkit.env.stepping import Stepping
from envkit.errors import DoneError, RolloutError

__all__ = ["require_truncated", "stack_steps", "truncate_last", "unrecorded"]


def unrecorded(env: Stepping, record_state: bool) -> list[Key]:
    """List what is left out of the steps of an env, at root and next: its state, unless that is recorded."""
    hidden = () if record_state else env._unrecorded
    return [*hidden, *(("next", key) for key in hidden)]


def stack_steps(env: Stepping, steps: list[TensorDictBase], *, contiguous: bool) -> TensorDictBase:
    """Stack steps along a last axis of time, densely or lazily.

    Raises:
        RolloutError: they do not stack densely.
    """
    dim = len(steps[0].batch_size)
    if not contiguous:
        return LazyStackedTensorDict(*steps, stack_dim=dim, stack_dim_name="time")
    if strays := _strays(env, steps[0]):
        steps = [td.exclude(*strays, *(("next", *as_path(key)) for key in strays)) for td in steps]
    try:
        return cast(TensorDictBase, torch.stack(cast(list, steps), dim))
    except (RuntimeError, KeyError) as error:
        raise RolloutError(
            f"the steps of this rollout cannot be stacked into one tensor each: {_why(steps, error)}. "
            "Pass return_contiguous=False to get a lazy stack along time."
        ) from error


def _why(steps: list[TensorDictBase], error: Exception) -> str:
    """Name an entry that only some steps have, as a policy writes it, or else what was raised."""
    counts = Counter(key for step in steps for key in step.keys(True, True))
    for key, count in counts.items():
        if count < len(steps):
            return f"{key!r} is in {count} of {len(steps)} steps. Write it in every step"
    return str(error).rstrip(".")


def _strays(env: Stepping, first: TensorDictBase) -> list[Key]:
    """Name the outputs that no spec declares: only some roots hold them, so they are dropped."""
    declared = {
        *(*env.observation_keys, *env.reward_keys, *env.done_keys, *env.state_keys),
        *first.keys(True, True),
    }
    return [key for key in first.get("next").keys(True, True) if key not in declared]


def require_truncated(env: Stepping) -> None:
    """Check that an env can say that an episode was cut short.

    Raises:
        DoneError: it declares no ``truncated``.
    """
    if not any("truncated" in names for names in env.done_levels.values()):
        raise DoneError(
            "set_truncated=True needs a 'truncated' entry in the done spec, but the env declares "
            f"{env.done_keys}. Call env.add_truncated_keys() first."
        )


def truncate_last(env: Stepping, result: TensorDictBase) -> None:
    """Set ``truncated`` and ``done`` in the last step of a result, in place; ``terminated`` stays."""
    following = result.get("next")
    for level, names in env.done_levels.items():
        for name in ("truncated", "done") if "truncated" in names else ():
            key = as_key((*level, name))
            flags = following.get(key).clone()
            flags.select(len(result.batch_size) - 1, -1).fill_(True)
            following.set(key, flags)
