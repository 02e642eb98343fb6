"""Which transforms run inside the programs of a stateless env, what it declares then, and what they are given.

A plan, made of specs: no env is built or changed here. The arithmetic is the transforms' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch

from envkit.data.paths import Path, as_path
from envkit.rules import DONE_LEAVES
from envkit.specs import Composite
from envkit.specs.devices import reading_waits
from envkit.transforms.core.base import Transform
from envkit.transforms.core.fusable import FusableTransform
from envkit.transforms.core.spec_hooks import books_of, infos_behind
from envkit_bridges.dlpack import number_to_jit, to_jit
from envkit_bridges.jax.handoff import RowEnv
from envkit_bridges.jax.tensor_cache import Unchanged

__all__ = ["Fusion", "arguments_of", "plan_fusion", "share", "wide_integers"]

_WIDE_FLOATS = (torch.float64, torch.complex128)
_WIDE_INTEGERS = (torch.int64, torch.uint64)


@dataclass(frozen=True)
class Fusion:
    """What runs inside the programs of an env, and what that env declares then.

    Attributes:
        taken: transforms that do, first to last.
        inputs, outputs: specs of the env seen through them.
        books: observations that are bookkeeping, see `Transform.keeps_books`.
        infos: observations that are infos.
    """

    taken: tuple[FusableTransform, ...]
    inputs: Composite
    outputs: Composite
    books: frozenset[Path]
    infos: frozenset[Path]


def plan_fusion(env: RowEnv, transforms: Sequence[Transform]) -> Fusion | None:
    """Choose the longest leading run of transforms that can be compiled into the programs of an env.

    A run ends where a transform says that it does not fuse (see `FusableTransform.fuses`), or where
    what it declares cannot be what a program gives: other actions or done flags, a state that is
    changed or taken away, 64-bit floats where JAX has none. One with state of its own (`VecNorm`) needs
    all rows on one device, and gives no gradients.

    Args:
        env: a stateless env.
        transforms: first to last, each in an env, so that it knows the specs before it.

    Returns:
        None where it could take none of them.
    """
    taken: list[FusableTransform] = []
    books, infos = set(env._books), set(env._infos)
    inputs, outputs = env.input_spec.clone(), env.output_spec.clone()
    for transform in transforms:
        before = inputs.clone(), outputs.clone()
        inputs = transform.transform_input_spec(inputs)
        outputs = transform.transform_output_spec(outputs)
        fusable = isinstance(transform, FusableTransform) and transform.fuses
        if not (fusable and _runs(env, transform) and _fits(env, inputs, outputs)):
            inputs, outputs = before
            break
        taken.append(transform)
        books |= books_of(transform, before[1], outputs)
        infos = infos_behind(infos, before[1], outputs)
    runs_all = len(taken) == len(transforms)  # of no transforms, too
    if not (runs_all or taken):
        return None
    return Fusion(tuple(taken), inputs, outputs, frozenset(books), frozenset(infos))


def _runs(env: RowEnv, transform: FusableTransform) -> bool:
    """Say whether programs of ``env`` can take the state of a transform along, if it has any."""
    return not transform.state() or (env._programs.shards is None and not env.requires_grad)


def _fits(env: RowEnv, inputs: Composite, outputs: Composite) -> bool:
    """Say whether programs of ``env`` can take and give what these specs declare."""
    shown, states = outputs["full_observation_spec"], inputs["full_state_spec"]
    state = [key for key in env.full_state_spec.keys(True, True) if as_path(key)[0] == "state"]
    return (
        inputs["full_action_spec"] == env.full_action_spec
        and set(outputs["full_done_spec"].keys(True, True)) == set(DONE_LEAVES)
        and all(
            spec.get(key, None) == env.full_state_spec[key]
            for key in state
            for spec in (shown, states)
        )
        and all(_crosses(leaf.dtype) for _, leaf in outputs.items(True, True))
    )


def _crosses(dtype: torch.dtype | None) -> bool:
    """Say whether a program can compute in a dtype; wide integers are narrowed, floats are not."""
    return dtype is not None and (dtype not in _WIDE_FLOATS or _has_64_bits())


def _has_64_bits() -> bool:
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def wide_integers(outputs: Composite) -> dict[Path, torch.dtype]:
    """List the outputs that are declared in integers which JAX narrows, with their dtypes."""
    if _has_64_bits():
        return {}
    return {
        as_path(key): leaf.dtype
        for kind in ("observation", "reward")
        for key, leaf in outputs[f"full_{kind}_spec"].items(True, True)
        if leaf.dtype in _WIDE_INTEGERS
    }


def arguments_of(
    transforms: Sequence[FusableTransform], kept: Unchanged, device: torch.device | None
) -> list[dict[str, Any]]:
    """Give what each transform computes with, constants and state, as arguments of a program.

    Args:
        transforms: those that are computed in programs.
        kept: single numbers for which the host would have to wait, and what `share` has put there.
        device: where the programs run.
    """
    return [
        {name: _argument(value, kept, device) for name, value in transform.constants().items()}
        | {name: _shared_argument(value, kept) for name, value in transform.state().items()}
        for transform in transforms
    ]


def share(before: torch.Tensor, after: torch.Tensor, kept: Unchanged) -> None:
    """Write what a program made of a tensor that all rows share into it."""
    before.copy_(after)
    if before.dtype != after.dtype and reading_waits(before):
        kept.keep(before, after)


def _shared_argument(value: torch.Tensor, kept: Unchanged) -> Any:
    """Give a tensor that a program changes as an argument, in the dtype it has there."""
    after = kept.find(value) if reading_waits(value) else None
    return to_jit(value.detach() if after is None else after, copy=True)


def _argument(value: Any, kept: Unchanged, device: torch.device | None) -> Any:
    """Give a constant as an argument of a program; single numbers do not decide about dtypes."""
    if not isinstance(value, torch.Tensor):
        return number_to_jit(value, device) if isinstance(value, bool | int | float) else value
    if value.ndim:
        return to_jit(value.detach(), copy=True)
    if not reading_waits(value):
        return number_to_jit(value.item(), device)
    number = kept.find(value)
    if number is None:
        number = value.item()
        kept.keep(value, number)
    return number_to_jit(number, device)
