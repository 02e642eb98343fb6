"""Which transforms run inside the programs of a stateless env, and what it declares then.

A plan, made of specs: no env is built or changed here. The arithmetic is the transforms' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import torch

from envkit.data.paths import Path, as_path
from envkit.env.base import EnvBase
from envkit.rules import DONE_LEAVES
from envkit.specs import Composite
from envkit.transforms.core.base import Transform
from envkit.transforms.core.fusable import FusableTransform
from envkit.transforms.core.spec_hooks import books_of, infos_behind
from envkit_bridges.jax.engine import ProgramEngine

__all__ = ["Fusion", "plan_fusion", "wide_integers"]

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


def plan_fusion(
    env: EnvBase, engine: ProgramEngine, transforms: Sequence[Transform]
) -> Fusion | None:
    """Choose the longest leading run of transforms that can be compiled into the programs of an env.

    A run ends where a transform says that it does not fuse (see `FusableTransform.fuses`), or where
    what it declares cannot be what a program gives: other actions or done flags, a state that is
    changed or taken away, 64-bit floats where JAX has none. One with state of its own (`VecNorm`) needs
    all rows on one device, and gives no gradients.

    Args:
        env: a stateless env; its specs say what can be given.
        engine: its programs.
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
        if not (fusable and _runs(engine, transform) and _fits(env, inputs, outputs)):
            inputs, outputs = before
            break
        taken.append(transform)
        books |= books_of(transform, before[1], outputs)
        infos = infos_behind(infos, before[1], outputs)
    runs_all = len(taken) == len(transforms)  # of no transforms, too
    if not (runs_all or taken):
        return None
    return Fusion(tuple(taken), inputs, outputs, frozenset(books), frozenset(infos))


def _runs(engine: ProgramEngine, transform: FusableTransform) -> bool:
    """Say whether programs can take the state of a transform along, if it has any."""
    keeps = engine.programs.shards is None and not engine.settings.requires_grad
    return keeps or not transform.state()


def _fits(env: EnvBase, inputs: Composite, outputs: Composite) -> bool:
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
