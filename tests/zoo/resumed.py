"""Runs that are cut, saved and gone on with by another env, beside the same run in one piece."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch.utils._pytree import tree_flatten

from envkit.env.base import EnvBase

__all__ = ["as_read_again", "equal_states", "played", "same", "twice"]


def played(
    env: EnvBase, root: TensorDictBase, steps: int
) -> tuple[list[TensorDictBase], TensorDictBase]:
    """Take random steps, resetting what ends; give the transitions, and the root that follows."""
    taken = []
    for _ in range(steps):
        data, root = env.step_and_maybe_reset(env.rand_action(root))
        taken.append(data)
    return taken, root


def as_read_again(state: Any) -> Any:
    """Give what ``torch.load`` reads of what ``torch.save`` wrote, running no code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def equal_states(one: Any, other: Any) -> bool:
    """Say whether two state dicts hold the same, to the bit."""
    (held, form), (held_too, form_too) = tree_flatten(dict(one)), tree_flatten(dict(other))
    return form == form_too and all(
        a.equal(b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(held, held_too, strict=True)
    )


def twice(
    make: Callable[[], EnvBase],
    opened: Callable[[Any], Any],
    *,
    before: int,
    after: int,
    seed: int | None = 3,
) -> tuple[list[TensorDictBase], list[TensorDictBase]]:
    """Play to the end in one piece, and again from the cut with another env that was seeded otherwise.

    Args:
        make: builds an env.
        opened: closes it in the end.
        before: steps before the cut; 0 cuts before the first reset.
        after: steps of either run after it, and resets that follow.
        seed: of the first; None leaves it to torch's global generator.

    Returns:
        Of either run the transitions after the cut, the root that follows, and what a reset then gives.
    """
    first, second = opened(make()), opened(make())
    first.record_for_resume()
    if seed is not None:
        first.set_seed(seed)
    second.set_seed(99)
    root = played(first, first.reset(), before)[1] if before else None
    saved, numbers = as_read_again(first.state_dict()), torch.get_rng_state()
    runs = []
    for env in (first, second):
        if env is second:
            env.load_state_dict(saved)
            torch.set_rng_state(numbers)
        start = env.reset() if root is None else root.copy()
        data, last = played(env, start, after)
        runs.append([*data, last.copy(), env.reset()])
    return runs[0], runs[1]


def same(runs: tuple[list[TensorDictBase], list[TensorDictBase]]) -> bool:
    """Say whether two runs are equal to the bit, NaN included, with the same entries."""
    return _all_equal(*runs)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, LazyStackedTensorDict):
        return _all_equal(one.unbind(one.stack_dim), other.unbind(one.stack_dim))
    if isinstance(one, TensorDictBase):
        keys = list(one.keys())
        return set(keys) == set(other.keys()) and _all_equal(
            [one.get(key) for key in keys], [other.get(key) for key in keys]
        )
    if isinstance(one, torch.Tensor) and one.is_nested:
        return _all_equal(one.unbind(), other.unbind())
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
    return one.tolist() == other.tolist()


def _all_equal(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(_equal(one, other) for one, other in zip(ones, others, strict=True))
