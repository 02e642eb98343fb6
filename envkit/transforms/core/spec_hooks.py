"""Spec hooks written for one leaf, as hooks for the Composite that an env declares; what all hooks must declare, and
which of it are books.

A hook such as `Transform.transform_observation_spec` takes and gives a Composite. Where every entry
is changed alike it is easier to write for a leaf. These decorators decide which leaves that is: those the
transform reads, and where what the hook returns is declared. They carry the names TorchRL
gives them, without its underscore.

Conventions
    hook  method ``(self, leaf) -> leaf`` of a transform; it gets a clone.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import wraps
from typing import Any

from envkit.data.paths import Path, as_path, infos_in
from envkit.errors import MissingKeyError
from envkit.specs import Composite, TensorSpec

_INPUTS = ("full_action_spec", "full_state_spec")


def apply_to_composite(hook: Callable[[Any, Any], TensorSpec]) -> Callable[[Any, Any], Any]:
    """Make a hook for outputs of one that is written for a leaf.

    For ``transform_observation_spec``, ``transform_reward_spec`` and ``transform_done_spec``: the leaf of
    each in_key that is there is given to the hook, and what it returns is declared under the out_key.

    Args:
        hook: method ``(self, leaf)`` that returns the spec of the out_key. ``leaf`` is a copy.

    Returns:
        A method ``(self, spec)`` for a Composite, or for a leaf alone.

    Example:
        >>> import torch
        >>> from envkit import GymEnv, Transform, Unbounded, apply_to_composite
        >>> class Noisy(Transform):
        ...     def _apply_transform(self, value):
        ...         return value + 0.1 * torch.randn_like(value)
        ...     @apply_to_composite
        ...     def transform_observation_spec(self, leaf):
        ...         return Unbounded(leaf.shape)
        >>> env = GymEnv("CartPole-v1").append_transform(Noisy(in_keys=["observation"]))
        >>> type(env.observation_spec["observation"]).__name__
        'UnboundedContinuous'
        >>> env.close()
    """

    @wraps(hook)
    def for_all(self: Any, spec: Any) -> Any:
        if not isinstance(spec, Composite):
            return hook(self, spec)
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            leaf = spec.get(source, None)
            if leaf is not None:
                spec[target] = hook(self, leaf.clone())
        return spec

    return for_all


def apply_to_composite_inv(hook: Callable[[Any, Any], TensorSpec]) -> Callable[[Any, Any], Any]:
    """Make a hook for inputs of one that is written for a leaf.

    For ``transform_input_spec``, ``transform_action_spec`` and ``transform_state_spec``: the leaf of each
    in_key_inv, what the env takes, is given to the hook, and what it returns, what the user gives, is
    declared under the out_key_inv in its place.

    Args:
        hook: method ``(self, leaf)`` that returns the spec of the out_key_inv. ``leaf`` is a copy.

    Returns:
        A method ``(self, spec)`` for a Composite, or for a leaf alone.

    Example:
        >>> from envkit import Bounded, GymEnv, Transform, apply_to_composite_inv
        >>> class Halved(Transform):
        ...     def _inv_apply_transform(self, value):
        ...         return value / 2
        ...     @apply_to_composite_inv
        ...     def transform_input_spec(self, leaf):
        ...         return Bounded(2 * leaf.space.low, 2 * leaf.space.high)
        >>> env = GymEnv("Pendulum-v1").append_transform(Halved(in_keys_inv=["action"]))
        >>> env.action_spec.space.high
        tensor([4.])
        >>> env.close()
    """

    @wraps(hook)
    def for_all(self: Any, spec: Any) -> Any:
        if not isinstance(spec, Composite):
            return hook(self, spec)
        if _INPUTS[0] not in spec.keys():
            return changed(self, spec)
        for name in _INPUTS:
            spec[name] = changed(self, spec[name].clone())
        return spec

    def changed(self: Any, spec: Composite) -> Composite:
        for inner, outer in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            leaf = spec.get(inner, None)
            if leaf is None:
                continue
            if inner != outer:
                del spec[inner]
            spec[outer] = hook(self, leaf.clone())
        return spec

    return for_all


def require_declared(transform: Any, *specs: Composite) -> None:
    """Check that a transform has declared what it writes.

    Args:
        transform: one of an env.
        specs: input and output spec of the env, behind it.

    Raises:
        MissingKeyError: (a KeyError) no spec has an entry that it writes.
    """
    if transform.missing_tolerance:
        return
    declared = {
        as_path(key)[1:] for spec in specs for key in spec.keys(True) if len(as_path(key)) > 1
    }
    for key in transform._declared_keys:
        if as_path(key) not in declared:
            raise MissingKeyError(
                f"{type(transform).__name__} writes {key!r}, but no spec declares it. Add it in "
                "transform_observation_spec (or the hook for rewards, done flags, states or "
                "actions); if it is misspelt, the entries known there are "
                f"{sorted('.'.join(path) for path in declared)}."
            )


def books_of(transform: Any, before: Composite, after: Composite) -> set[Path]:
    """List the observations that a transform adds for its bookkeeping, from output specs.

    These are all that it adds or its private memory, as it says.
    """
    if not (transform.keeps_books or transform.keeps_memory):
        return set()
    shown, known = (set(spec["full_observation_spec"].keys(True, True)) for spec in (after, before))
    added = (as_path(key) for key in shown - known)
    return {path for path in added if transform.keeps_books or path[-1].startswith("_")}


def infos_behind(infos: Set[Path], before: Composite, after: Composite) -> set[Path]:
    """List the infos behind a transform, from output specs: those that it leaves, and what it adds below "info".

    An info that it gives another name is an observation, unless the new name is below "info".

    Args:
        infos: before the transform.
        before, after: output specs of the env on both sides of it.
    """
    earlier, shown = (
        {as_path(key) for key in spec["full_observation_spec"].keys(True, True)}
        for spec in (before, after)
    )
    return {*(infos & shown), *infos_in(shown - earlier)}
