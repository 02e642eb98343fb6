"""A stateless env with transforms inside its programs.

`fuse` decides which transforms of a list can be compiled into the programs of a `JaxEnv`; `FusedEnv` is
the env that runs them. What it declares, takes and gives is what a `TransformedEnv` of the same
transforms would; the arithmetic is theirs.

Conventions
    memory     entries at the root of the data that transforms read at a step. They go in and out of
               the programs beside the state.
    constants  numbers and tensors of the transforms. They are read anew at every call.
    state      tensors of the transforms that a program changes. What they are after it is written into
               them as soon as it is called, so that whoever shares them reads the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import torch

from bridges.dlpack import to_jit, to_torch
from bridges.jax.env import JaxEnv
from bridges.jax.programs import Constants, Programs
from envkit.data.paths import Path, as_path, leaf_paths
from envkit.rules import DONE_LEAVES
from envkit.specs import Composite
from envkit.transforms.core.base import Transform, books_of
from envkit.transforms.core.fusable import FusableTransform
from envkit.transforms.core.wrapper import Wrapper

__all__ = ["FusedEnv", "fuse"]

_WIDE_FLOATS = (torch.float64, torch.complex128)
_WIDE_INTEGERS = (torch.int64, torch.uint64)


def fuse(env: JaxEnv, transforms: Sequence[Transform]) -> tuple[JaxEnv, int]:
    """Compile the longest leading run of transforms that allow it into the programs of an env.

    A run ends where a transform says that it does not fuse (see `FusableTransform.fuses`), or where
    what it declares cannot be what a program gives: other actions or done flags, a state that is
    changed or taken away, 64-bit floats where JAX has none. One with state of its own (`VecNorm`) needs
    all rows on one device, and gives no gradients.

    Args:
        env: a `JaxEnv`.
        transforms: first to last, each in an env, so that it knows the specs before it.

    Returns:
        The env that runs them, and how many those are; ``env`` itself where it could take none.
    """
    taken: list[FusableTransform] = []
    books = set(env._books)
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
    runs_all = len(taken) == len(transforms)  # of no transforms, too
    if not (runs_all or taken):
        return env, 0
    return FusedEnv(env, taken, inputs, outputs, books), len(taken)


def _runs(env: JaxEnv, transform: FusableTransform) -> bool:
    """Say whether programs of ``env`` can take the state of a transform along, if it has any."""
    return not transform.state() or (env._programs.shards is None and not env.requires_grad)


def _fits(env: JaxEnv, inputs: Composite, outputs: Composite) -> bool:
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


class FusedEnv(Wrapper, JaxEnv):
    """A stateless env whose programs include transforms.

    Keys for new rows come from ``base_env``, so it and envs made of it draw from one sequence.

    Args:
        env: the env without them.
        transforms: first to last; all of them fuse.
        inputs, outputs: specs of ``env`` seen through them.
        books: observations that are bookkeeping, see `Transform.keeps_books`.
    """

    base_env: JaxEnv

    def __init__(
        self,
        env: JaxEnv,
        transforms: Sequence[FusableTransform],
        inputs: Composite,
        outputs: Composite,
        books: Iterable[Path] = (),
    ):
        Wrapper.__init__(self, env)
        self._batch_size, self._device = env.batch_size, env.device
        self._declared.hold(inputs, outputs)
        self._declared.added_flags = env._declared.added_flags
        self._transforms = tuple(transforms)
        self._own_books = frozenset(books)
        self._programs = Programs(
            env._programs.env,
            self._transforms,
            packed=env.state_layout == "packed",
            shards=env._programs.shards,
        )
        memory = [path for transform in transforms for path in transform.memory()]
        observed = leaf_paths(outputs["full_observation_spec"])
        self._memory_paths = tuple(dict.fromkeys(memory))
        self._state_paths = env._state_paths
        self._root_paths = tuple(
            path for path in dict.fromkeys([*observed, *memory]) if path[0] != "state"
        )
        self._wide = {} if _has_64_bits() else dict(_wide_integers(outputs))

    def _after_init(self, spec_locked: bool) -> None:
        self._declared.is_locked = True

    @property
    def _books(self) -> frozenset[Path]:
        return self._own_books

    def _next_key(self) -> jax.Array:
        return self.base_env._next_key()

    def _set_seed(self, seed: int | None) -> None:
        self.base_env._set_seed(seed)

    def _constants(self, shape: torch.Size, mask: torch.Tensor | None = None) -> Constants:
        each = [
            {name: _argument(value) for name, value in transform.constants().items()}
            | {name: _shared_argument(value) for name, value in transform.state().items()}
            for transform in self._transforms
        ]
        if not any(transform.state() for transform in self._transforms):
            return each, None
        if mask is None:
            mask = torch.ones(shape, dtype=torch.bool, device=self.device)
        return each, to_jit(self._mask_in(mask), copy=True)

    def _kept(self, outputs: dict[str, Any]) -> dict[str, Any]:
        shared = to_torch(outputs.pop("shared", ()))
        for transform, after in zip(self._transforms, shared, strict=bool(shared)):
            before = transform.state()
            for name, value in after.items():
                before[name].copy_(value)
        return outputs

    def _fuse(self, transforms: Sequence[Transform]) -> tuple[JaxEnv, int]:
        own = len(self._transforms)
        env, count = fuse(self.base_env, [*self._transforms, *transforms])
        return (env, count - own) if count > own else (self, 0)


def _wide_integers(outputs: Composite) -> Iterable[tuple[tuple[str, ...], torch.dtype]]:
    for kind in ("observation", "reward"):
        for key, leaf in outputs[f"full_{kind}_spec"].items(True, True):
            if leaf.dtype in _WIDE_INTEGERS:
                yield as_path(key), leaf.dtype


def _shared_argument(value: torch.Tensor) -> Any:
    """Give a tensor that a program changes as an argument, in the dtype it has there."""
    return to_jit(value.detach(), copy=True)


def _argument(value: Any) -> Any:
    """Give a constant as an argument of a program; single numbers do not decide about dtypes."""
    if not isinstance(value, torch.Tensor):
        return value
    return to_jit(value.detach(), copy=True) if value.ndim else value.item()
