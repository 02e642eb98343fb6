"""Transforms that change entries one by one, whatever kind of entry they are.

`LeafTransform` decides where the outcome is declared: beside what it was made of, among observations,
rewards or done flags; on the way in, in the place of the action or state it becomes. A transform says
what happens to a value and what to a spec. `ArrayTransform` is one that says the first for arrays of any
namespace, and so can be fused.

Conventions
    leaf  spec of one entry, batch axes in front.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from envkit.arrays.elementwise import Array
from envkit.arrays.integers import as_int
from envkit.arrays.leaves import Changes, Leaves
from envkit.data.arguments import as_bool
from envkit.data.paths import Key, Path, as_path
from envkit.errors import MissingKeyError, PositiveAxisError, SpecError
from envkit.specs import (
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Composite,
    Stacked,
    TensorSpec,
    Unbounded,
)
from envkit.transforms.core.fusable import MomentTransform
from envkit.transforms.core.transform import Transform

OUTPUTS = ("observation", "reward", "done")
INPUTS = ("action", "state")


class LeafTransform(Transform):
    """Base of transforms that read each in_key, change its value and write it to the out_key.

    Args:
        in_keys, out_keys, in_keys_inv, out_keys_inv: see `Transform`.

    Raises:
        ArgumentError: (a ValueError) there are not as many out_keys as in_keys.
        MissingKeyError: when specs are read: an in_key is neither an observation, nor a reward, nor a
            done flag, or an in_key_inv neither an action nor a state.
    """

    only_adds_done = True
    _pairs_keys = True
    _batch = torch.Size(())
    """Batch axes of what is looked at now."""

    # ---------------------------------------------------------------------- for concrete transforms

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        """Return what `_apply_transform` gives for values of ``leaf``."""
        return leaf.clone()

    def _leaf_before(self, leaf: TensorSpec) -> TensorSpec:
        """Return which values the user gives, that `_inv_apply_transform` turns into one of ``leaf``."""
        return leaf.clone()

    # --------------------------------------------------------------------------------------- specs

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        require_known(self, self.in_keys, output_spec, OUTPUTS, "in_keys=")
        return super().transform_output_spec(output_spec)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        require_known(self, self.in_keys_inv, input_spec, INPUTS, "in_keys_inv=")
        return super().transform_input_spec(input_spec)

    def _spec_after(self, spec: Any) -> Any:
        """Declare the outcomes among outputs; one leaf alone becomes that of its outcome."""
        self._batch = spec.shape if isinstance(spec, Composite) else torch.Size(())
        if not isinstance(spec, Composite):
            return self._leaf_after(spec)
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            leaf = spec.get(source, None)
            if leaf is not None:
                require_regular(self, source, leaf)
                spec[target] = self._leaf_after(leaf)
        return spec

    def _spec_before(self, spec: Any) -> Any:
        """Declare what the user gives among inputs; one leaf alone becomes what the user gives for it."""
        self._batch = spec.shape if isinstance(spec, Composite) else torch.Size(())
        if not isinstance(spec, Composite):
            return self._leaf_before(spec)
        for inner, outer in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            leaf = spec.get(inner, None)
            if leaf is not None:
                require_regular(self, inner, leaf)
                if inner != outer:
                    del spec[inner]
                spec[outer] = self._leaf_before(leaf)
        return spec


class ObservationTransform(Transform):
    """Base of a user's transforms of observations: without in_keys they are ``observation`` and ``pixels``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import ObservationTransform
        >>> class Halved(ObservationTransform):
        ...     def _apply_transform(self, value):
        ...         return value / 2
        >>> data = TensorDict(observation=torch.ones(2))
        >>> Halved(in_keys=["observation"])(data)["observation"]
        tensor([0.5000, 0.5000])
    """

    only_adds_done = True
    _default_in_keys = ("observation",), ("pixels",)


class ArrayTransform(LeafTransform, MomentTransform):
    """Base of leaf transforms whose forward pass is written in the array API, in `_changed`."""

    _twins = (*MomentTransform._twins, ("_apply_transform", "_changed"))

    def _changed(self, value: Array, constants: Mapping[str, Any], batch_dims: int) -> Array:
        """Turn the value of an in_key, an array of any namespace, into that of its out_key."""
        raise NotImplementedError(
            f"{type(self).__name__} does not write _changed. Write it, or write _apply_transform as in "
            "any Transform."
        )

    def _apply_transform(self, value: Array) -> Array:
        return self._changed(value, self.constants(), 0)

    _step, _call, _reset = Transform._step, Transform._call, Transform._reset

    def moment_leaves(self, leaves: Leaves, constants: Mapping[str, Any]) -> Changes:
        changes: dict[Path, Any] = {}
        for source, target in zip(map(as_path, self.in_keys), self.out_keys, strict=True):
            value = changes.get(source, leaves.get(source))
            if value is not None:  # rewards are absent at a reset
                changes[as_path(target)] = self._changed(value, constants, leaves.batch_dims)
        return changes


def require_known(
    transform: Transform, keys: Sequence[Key], specs: Composite, kinds: Sequence[str], argument: str
) -> None:
    """Check that keys a transform was given are entries of some kinds.

    Raises:
        MissingKeyError: one is not, and the transform does not tolerate that.
    """
    composites = {kind: specs[f"full_{kind}_spec"] for kind in kinds}
    missing = [
        key for key in keys if all(spec.get(key, None) is None for spec in composites.values())
    ]
    if missing and not transform.missing_tolerance:
        known = {kind: list(spec.keys(True, True)) for kind, spec in composites.items()}
        raise MissingKeyError(
            f"{type(transform).__name__} reads {missing}, but the env has {known}. Name entries that "
            f"exist with {argument}."
        )


def require_regular(transform: Transform, key: Key, leaf: TensorSpec) -> None:
    """Check that all envs of a batch give an entry in one shape.

    Raises:
        SpecError: they do not.
    """
    if -1 in leaf.shape:
        raise SpecError(
            f"{type(transform).__name__} changes {key!r}, whose shape differs among the envs of the "
            f"batch: {tuple(leaf.shape)}. Put the transform into each of them instead: "
            "SerialEnv(n, [lambda: TransformedEnv(...), ...])."
        )


def reshaped(leaf: TensorSpec, view: Callable[[torch.Tensor], torch.Tensor]) -> TensorSpec:
    """Describe ``view(value)`` for the values of a leaf; a view only moves or repeats elements."""
    return image_of(leaf, view) if isinstance(leaf, Stacked) else leaf._map_shape(view)


def image_of(leaf: TensorSpec, change: Callable[[torch.Tensor], torch.Tensor]) -> TensorSpec:
    """Describe ``change(value)`` for the values of a leaf.

    Args:
        leaf: spec of the values; a box keeps its bounds, anything else becomes unbounded.
        change: made on whole values; monotone in each element it reads, so that the ends of a box go
            to the ends of its image.
    """
    if isinstance(leaf, BoundedContinuous | BoundedDiscrete):
        return box_between(change(leaf.low), change(leaf.high))
    value = change(leaf.zero())
    return Unbounded(value.shape, value.device, value.dtype)


def box_between(end: torch.Tensor, other: torch.Tensor) -> TensorSpec:
    """Describe values between two ends, in any order; unbounded if an end is no number."""
    low, high = torch.minimum(end, other), torch.maximum(end, other)
    if bool((low.isnan() | high.isnan()).any()):
        return Unbounded(low.shape, low.device, low.dtype)
    return Bounded(low, high, low.shape, low.device, low.dtype)


def axis_in(dim: int, batch_dims: int) -> int:
    """Return the axis of a value that an axis of its event is; a negative one is one already."""
    return dim if dim < 0 else dim + batch_dims


def require_negative(name: str, dim: int, *, allow_positive: bool = False) -> int:
    """Check that an axis counts from the end.

    Raises:
        ArgumentTypeError: it is no int, or ``allow_positive`` no bool.
        PositiveAxisError: (a ValueError and a RuntimeError) it does not, and ``allow_positive`` is not set.
    """
    dim = as_int(name, dim, least=None, meaning="an axis: -1 is the last")
    allow_positive = as_bool("allow_positive_dim", allow_positive)
    if dim >= 0 and not allow_positive:
        raise PositiveAxisError(
            f"{name} is {dim}, but must be negative: axes count from the end, so that they mean the "
            "same with and without batch axes. Pass a negative one, or allow_positive_dim=True where "
            "that is an argument."
        )
    return dim


def as_float(value: torch.Tensor) -> torch.Tensor:
    """Cast integers to the default float dtype."""
    return value if value.is_floating_point() else value.to(torch.get_default_dtype())


def float_leaf(leaf: TensorSpec) -> TensorSpec:
    """Declare any floats in the shape of a leaf, of the dtype that `as_float` gives its values."""
    return Unbounded(leaf.shape, leaf.device, as_float(leaf.zero()).dtype)
