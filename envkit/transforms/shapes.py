"""Entries in another shape, with the same elements: flattened, squeezed, unsqueezed, permuted, repeated.

Axes count from the end, or, where that is allowed, from the first axis after the batch. Data of any
batch size is treated alike.

Conventions
    event  the axes of a value after those of its batch.
    dim    axis of the value; not negative: an axis of the event, counted from its first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right

from envkit.arrays import elementwise
from envkit.arrays.elementwise import Array
from envkit.data.paths import Key, as_path
from envkit.errors import ArgumentError, SpecAxisError
from envkit.rules import RESET
from envkit.specs import Composite, TensorSpec
from envkit.transforms.core.leafwise import (
    OUTPUTS,
    ArrayTransform,
    axis_in,
    require_known,
    require_negative,
    reshaped,
)
from envkit.transforms.core.transform import Keys, Transform, as_keys, editable


class _ShapeTransform(ArrayTransform):
    """Base of transforms that view a value in another shape; the way in is the opposite view."""

    def _view(self, value: Array, batch_dims: int) -> Array:
        """Return ``value``, with ``batch_dims`` batch axes, in the other shape."""
        raise NotImplementedError

    def _view_back(self, value: Array, batch_dims: int) -> Array:
        """Undo `_view`."""
        raise NotImplementedError

    def _changed(self, value: Array, constants: Mapping[str, Any], batch_dims: int) -> Array:
        return self._view(value, batch_dims)

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self._view(value, len(self._batch))

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self._view_back(value, len(self._batch))

    def _convert(
        self, td: TensorDictBase, sources: list[Key], targets: list[Key], change: Callable
    ) -> TensorDictBase:
        self._batch = td.batch_size
        return super()._convert(td, sources, targets, change)

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        if leaf.is_choice and (leaf._encoding_ndim or getattr(leaf, "mask", None) is not None):
            raise SpecAxisError(
                f"{type(self).__name__} cannot change the axes of {leaf}: the last one spells a "
                "choice, or it has a mask. Convert the entry to a plain categorical one first."
            )
        view = partial(self._view, batch_dims=len(self._batch))
        try:
            return view(leaf) if isinstance(leaf, Composite) else reshaped(leaf, view)
        except (IndexError, RuntimeError) as error:
            raise SpecAxisError(
                f"{type(self).__name__}({self.extra_repr()}) does not fit an entry of shape "
                f"{tuple(leaf.shape)}, of which {len(self._batch)} axes are the batch: {error}."
            ) from error

    _leaf_before = _leaf_after


class FlattenObservation(_ShapeTransform):
    """Flatten the axes from ``first_dim`` to ``last_dim`` into one.

    Args:
        first_dim: first axis, negative.
        last_dim: last axis, negative.
        in_keys: entries; ``"pixels"`` by default.
        out_keys: where they go; in place by default.
        allow_positive_dim: accept axes that count from the first one after the batch.

    Raises:
        ArgumentError: (a ValueError) an axis is not negative and that is not allowed.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import FlattenObservation
        >>> data = TensorDict(pixels=torch.zeros(3, 4, 6))
        >>> FlattenObservation(-3, -1)(data)["pixels"].shape
        torch.Size([72])
    """

    _in_repr = ("first_dim", "last_dim")

    def __init__(
        self,
        first_dim: int,
        last_dim: int,
        in_keys: Keys = None,
        out_keys: Keys = None,
        allow_positive_dim: bool = False,
    ):
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)
        allowed = {"allow_positive": allow_positive_dim}
        self.first_dim = require_negative("first_dim", first_dim, **allowed)
        self.last_dim = require_negative("last_dim", last_dim, **allowed)

    def _view(self, value: Array, batch_dims: int) -> Array:
        first, last = (axis_in(dim, batch_dims) for dim in (self.first_dim, self.last_dim))
        return elementwise.flattened(value, first, last)


class UnsqueezeTransform(_ShapeTransform):
    """Insert an axis of size one; on the way in, remove it.

    Of an entry that is a TensorDict, the axes of its batch count.

    Args:
        dim: where it is in the result, negative.
        allow_positive_dim: accept a place that counts from the first axis after the batch.
        in_keys, out_keys: entries of the env.
        in_keys_inv, out_keys_inv: actions and states; what the user gives has one axis more than what
            the env takes.

    Raises:
        ArgumentError: (a ValueError) the axis is not negative and that is not allowed.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import UnsqueezeTransform
        >>> data = TensorDict(observation=torch.zeros(4))
        >>> UnsqueezeTransform(-2, in_keys=["observation"])(data)["observation"].shape
        torch.Size([1, 4])
    """

    _in_repr = ("dim",)

    computes_only = True

    def __init__(
        self,
        dim: int,
        *,
        allow_positive_dim: bool = False,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ):
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.dim = require_negative("dim", dim, allow_positive=allow_positive_dim)

    @property
    def fuses(self) -> bool:
        return super().fuses and not self._reads_nodes()

    def _reads_nodes(self) -> bool:
        """Check whether an entry is a TensorDict; programs know leaves alone."""
        parent = self.parent
        specs = [] if parent is None else [getattr(parent, f"full_{kind}_spec") for kind in OUTPUTS]
        return any(isinstance(spec.get(k, None), Composite) for spec in specs for k in self.in_keys)

    def _view(self, value: Array, batch_dims: int) -> Array:
        axis = axis_in(self.dim, batch_dims)
        is_node = isinstance(value, TensorDictBase | Composite)
        return value.unsqueeze(axis) if is_node else elementwise.unsqueezed(value, axis)

    def _view_back(self, value: Array, batch_dims: int) -> Array:
        axis = axis_in(self.dim, batch_dims)
        is_node = isinstance(value, TensorDictBase | Composite)
        return value.squeeze(axis) if is_node else elementwise.squeezed(value, axis)


class SqueezeTransform(UnsqueezeTransform):
    """Remove an axis of size one; on the way in, insert it. An axis of another size stays.

    Args:
        dim: the axis, negative.
        allow_positive_dim, in_keys, out_keys, in_keys_inv, out_keys_inv: see `UnsqueezeTransform`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import SqueezeTransform
        >>> data = TensorDict(observation=torch.zeros(1, 4))
        >>> SqueezeTransform(-2, in_keys=["observation"])(data)["observation"].shape
        torch.Size([4])
    """

    computes_only = True

    _view = UnsqueezeTransform._view_back
    _view_back = UnsqueezeTransform._view


class PermuteTransform(_ShapeTransform):
    """Reorder the last axes; on the way in, restore their order.

    Args:
        dims: the last ``len(dims)`` axes, negative, in their new order.
        in_keys, out_keys, in_keys_inv, out_keys_inv: see `Transform`.

    Raises:
        ArgumentError: (a ValueError) ``dims`` is no reordering of ``-len(dims), ..., -1``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import PermuteTransform
        >>> data = TensorDict(pixels=torch.zeros(4, 6, 3))
        >>> channels_first = PermuteTransform((-1, -3, -2), in_keys=["pixels"])
        >>> channels_first(data)["pixels"].shape
        torch.Size([3, 4, 6])
    """

    _in_repr = ("dims",)

    computes_only = True

    def __init__(
        self,
        dims: Sequence[int],
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ):
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.dims = tuple(dims) if isinstance(dims, Iterable) else (dims,)
        axes = list(range(-len(self.dims), 0))
        if sorted(self.dims) != axes:
            raise ArgumentError(
                f"dims is {self.dims}, but must be a reordering of {axes}. Pass these in another order."
            )
        self._back = tuple(self.dims.index(dim) - len(axes) for dim in axes)

    def _view(self, value: Array, batch_dims: int) -> Array:
        return elementwise.permuted(value, self.dims)

    def _view_back(self, value: Array, batch_dims: int) -> Array:
        return elementwise.permuted(value, self._back)


class ExpandAs(Transform):
    """Repeat an entry along axes at its right, to the shape of another one.

    Args:
        in_key: the entry; its axes are the first ones of the other.
        ref_key: the other entry. Where a reset does not give it, its spec says the shape.
        out_key: where the outcome goes; in place by default. A flag under another name is an observation.

    Raises:
        MissingKeyError: there is no such entry.
        RuntimeError: (by tensordict) the shapes do not fit.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import ExpandAs
        >>> data = TensorDict(weight=torch.tensor([1.0, 2.0]), features=torch.zeros(2, 3))
        >>> ExpandAs("weight", "features")(data)["weight"]
        tensor([[1., 1., 1.],
                [2., 2., 2.]])
    """

    _in_repr = ("ref_key",)

    def __init__(self, in_key: Key, ref_key: Key, out_key: Key | None = None):
        super().__init__([in_key], [in_key if out_key is None else out_key])
        keys = as_keys(ref_key)
        if len(keys) != 1:
            raise ArgumentError(f"ref_key is {ref_key!r}, but must name one entry. Pass its key.")
        (self.ref_key,) = keys
        self._event: torch.Size | None = None

    @property
    def only_adds_done(self) -> bool:  # type: ignore[override]
        """False where done flags get another shape: the env before would not find its own."""
        return self.parent is None or self.out_keys[0] not in self.parent.done_keys

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        like = next_td.get(self.ref_key, None)
        if like is None:
            raise self._missing(self.ref_key, next_td, "Pass ref_key=.")
        return self._expanded(next_td, like.shape)

    def _expanded(self, td: TensorDictBase, shape: torch.Size) -> TensorDictBase:
        return self._convert(
            td, self.in_keys, self.out_keys, lambda value: _to_the_right(value, shape).clone()
        )

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        if td_reset.get(self.in_keys[0], None) is None or self._event is None:
            return td_reset
        return self._expanded(td_reset, torch.Size((*td_reset.batch_size, *self._event)))

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        if self.only_adds_done or self.parent is None:
            return td
        level = as_path(self.in_keys[0])[:-1]
        mask, flags = td.get((*level, RESET), None), self.parent.full_done_spec[self.in_keys[0]]
        if mask is not None:
            ndim = td.batch_dims + flags.ndim - self.parent.full_done_spec.ndim
            td.set((*level, RESET), mask.flatten(ndim).any(-1) if mask.ndim > ndim else mask)
        return td

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        require_known(
            self, [*self.in_keys, self.ref_key], output_spec, OUTPUTS, "in_key=, ref_key="
        )
        output_spec = editable(output_spec)
        kinds = [output_spec[f"full_{kind}_spec"] for kind in OUTPUTS]
        like = next(
            spec[self.ref_key] for spec in kinds if spec.get(self.ref_key, None) is not None
        )
        self._event = like.shape[output_spec.ndim :]
        copies_flag = self.out_keys[0] != self.in_keys[0]  # which ends no episode
        for kind, spec in zip(OUTPUTS, kinds, strict=True):
            leaf = spec.get(self.in_keys[0], None)
            if leaf is not None:
                is_shown = kind == "done" and copies_flag
                shown = output_spec["full_observation_spec"] if is_shown else spec
                shown[self.out_keys[0]] = reshaped(
                    leaf, lambda value: _to_the_right(value, like.shape)
                )
        return output_spec


def _to_the_right(value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return expand_as_right(value, value.new_empty(()).expand(shape))
