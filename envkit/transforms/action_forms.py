"""Continuous actions that the user gives in another scale, shape or structure than the env takes.

On the way in these transforms turn what the user gives into what the env takes. The forward pass goes
the other way, for recorded data: an env's outputs hold no actions, and pass unchanged.

Conventions
    inner, outer  action as the env takes it, and as the user gives it.
    span          sizes of the axes that are flattened into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit.arrays import elementwise
from envkit.data.arguments import as_bool
from envkit.data.paths import Key, Path, as_path
from envkit.errors import ArgumentError, MissingKeyError, SpecFitError, StatisticsError
from envkit.specs import Bounded, BoundedContinuous, Composite, TensorSpec, Unbounded
from envkit.transforms.core.base import Keys, Transform, as_keys
from envkit.transforms.core.leafwise import box_between, require_negative, reshaped
from envkit.transforms.normalise import Number, as_buffer, make_room

__all__ = ["ActionScaling", "FlattenAction", "MeanActionSelector"]


class _ActionForm(Transform):
    """Base of transforms that give an action another form.

    Args:
        in_keys_inv: actions of the env; ``"action"`` by default.
        out_keys_inv: the user's names of them; the same by default.
        in_keys, out_keys: actions of recorded data that `forward` changes; those of the env by default.
    """

    only_adds_done = True

    def __init__(self, in_keys_inv: Keys, out_keys_inv: Keys, in_keys: Keys, out_keys: Keys):
        inner = ["action"] if in_keys_inv is None else as_keys(in_keys_inv)
        recorded = (inner or ["action"]) if in_keys is None else as_keys(in_keys)
        super().__init__(recorded, out_keys, inner, out_keys_inv)

    @property
    def _declared_keys(self) -> list[Key]:
        return []  # out_keys are those of recorded data

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Turn the actions of recorded data, as the env took them, into those of the user."""
        return self._convert(tensordict, self.in_keys, self.out_keys, self._apply_transform)

    def _leaf_given(self, key: Key, leaf: TensorSpec, batch_dims: int) -> TensorSpec:
        """Say which actions the user gives, for those of ``leaf`` that the env takes."""
        raise NotImplementedError

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        for inner, outer in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            leaf = action_spec.get(inner, None)
            if leaf is None:
                raise MissingKeyError(
                    f"{type(self).__name__} changes the action {inner!r}, but the env has "
                    f"{list(action_spec.keys(True, True))}. Name one of these with in_keys_inv=."
                )
            if inner != outer:
                del action_spec[inner]
            action_spec[outer] = self._leaf_given(inner, leaf, action_spec.ndim)
        return action_spec


# -------------------------------------------------------------------------------------------- scale


def _require_one_shape(**numbers: torch.Tensor) -> None:
    """Check that two tensors of numbers have one shape, unless one of them is a single number."""
    sizes = {name: tuple(value.shape) for name, value in numbers.items()}
    if () not in sizes.values() and len(set(sizes.values())) > 1:
        raise ArgumentError(
            f"ActionScaling was given numbers of the shapes {sizes}. Pass a single number, or tensors of one shape."
        )


class ActionScaling(_ActionForm):
    """Let the user give actions between -1 and 1, which become those of the env.

    The env is given ``action * scale + loc``; forward computes ``(action - loc) / scale``. Without numbers
    they are those of the action's bounds: the middle, and half the width.

    Args:
        in_keys_inv, out_keys_inv: the action of the env, ``"action"`` by default, and the user's name of
            it. An empty list changes recorded data only, and needs numbers.
        in_keys, out_keys: the action of recorded data; see `_ActionForm`.
        loc, scale: numbers, or tensors of one shape that broadcast to the action; both or none.
        standard_normal: False: the user gives actions between 0 and 1.

    Raises:
        ArgumentError: (a ValueError) only one of ``loc`` and ``scale``, tensors of two shapes, a scale of
            zero, more than one action, or no action and no numbers.
        SpecFitError: (a RuntimeError) when specs are read: there are no numbers, and the action is not
            continuous with finite bounds.
        StatisticsError: (a RuntimeError) without numbers, data comes before the specs of an env were read.
    """

    _in_repr = ("loc", "scale", "standard_normal")

    computes_only = True
    loc: torch.Tensor | None
    scale: torch.Tensor | None

    def __init__(
        self,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
        *,
        loc: Number | None = None,
        scale: Number | None = None,
        standard_normal: bool = True,
    ):
        super().__init__(in_keys_inv, out_keys_inv, in_keys, out_keys)
        if len(self.in_keys_inv) > 1 or len(self.in_keys) > 1:
            raise ArgumentError(
                f"ActionScaling was given the actions {self.in_keys_inv or self.in_keys}, but scales one. "
                "Use one ActionScaling for each."
            )
        if (loc is None) != (scale is None):
            raise ArgumentError(
                f"ActionScaling has loc={loc} and scale={scale}. Pass both or none."
            )
        if not self.in_keys_inv and loc is None:
            raise ArgumentError(
                "ActionScaling with in_keys_inv=[] has no action whose bounds say how to scale. Pass loc= "
                "and scale=."
            )
        self.standard_normal = as_bool("standard_normal", standard_normal)
        self._from_bounds = loc is None
        self.register_buffer("loc", None if loc is None else as_buffer(loc))
        self.register_buffer("scale", None if scale is None else as_buffer(scale))
        if self.loc is not None and self.scale is not None:
            _require_one_shape(loc=self.loc, scale=self.scale)
        if self.scale is not None and bool((self.scale == 0).any()):
            raise ArgumentError(
                f"scale is {self.scale}, but must not be zero: what it scales is divided by it."
            )

    @classmethod
    def from_stats(
        cls,
        *,
        mean: torch.Tensor | None = None,
        std: torch.Tensor | None = None,
        low: torch.Tensor | None = None,
        high: torch.Tensor | None = None,
        eps: float = 1e-6,
        **kwargs: Any,
    ) -> ActionScaling:
        """Make one of the statistics of recorded actions.

        Args:
            mean, std: these become ``loc`` and ``scale``; or
            low, high: their middle and half their distance do.
            eps: least scale.
            **kwargs: see the class.

        Raises:
            ArgumentError: (a ValueError) neither pair is given, both are, or half of one; or they have two
                shapes.
        """
        pairs = [pair for pair in ((mean, std), (low, high)) if pair != (None, None)]
        if len(pairs) != 1 or None in pairs[0]:
            raise ArgumentError(
                "from_stats needs mean and std, or low and high, and got "
                f"mean={mean}, std={std}, low={low}, high={high}. Pass one of the two pairs, whole."
            )
        first, second = (torch.as_tensor(number) for number in pairs[0])
        names = ("low", "high") if mean is None else ("mean", "std")
        _require_one_shape(**dict(zip(names, (first, second), strict=True)))
        if mean is None:
            first, second = (second + first) / 2, (second - first) / 2
        return cls(loc=first, scale=second.clamp_min(eps), **kwargs)

    @property
    def initialized(self) -> bool:
        """Whether there are numbers."""
        return self.loc is not None

    def _numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.loc is None or self.scale is None:
            raise StatisticsError(
                "ActionScaling has no loc and scale yet. Pass them, or put it into a TransformedEnv whose "
                "action has bounds."
            )
        return self.loc, self.scale

    def normalize(self, action: torch.Tensor) -> torch.Tensor:
        """Turn an action of the env into one of the user.

        Raises:
            ArgumentError: (a ValueError) ``loc`` or ``scale`` would give it another shape.
        """
        self._require_shape(action)
        value = elementwise.standardised(action, *self._numbers())
        return value if self.standard_normal else (value + 1) / 2

    def denormalize(self, action: torch.Tensor) -> torch.Tensor:
        """Turn an action of the user into one of the env; see `normalize`."""
        self._require_shape(action)
        value = action if self.standard_normal else action * 2 - 1
        return elementwise.scaled(value, *self._numbers())

    def _require_shape(self, action: torch.Tensor) -> None:
        """Refuse numbers that would give the action another shape."""
        for name, numbers in zip(("loc", "scale"), self._numbers(), strict=True):
            if numbers.ndim and not _fits(numbers.shape, action.shape):
                raise ArgumentError(
                    f"ActionScaling has a {name} of shape {tuple(numbers.shape)}, but the action has shape "
                    f"{tuple(action.shape)}. Pass numbers that broadcast to the action's last axes."
                )

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self.normalize(value)

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self.denormalize(value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        make_room(self, ("loc", "scale"), state_dict, prefix)
        if (
            self._from_bounds and self.loc is not None
        ):  # a dict of before the bounds were read has none
            state_dict.setdefault(prefix + "loc", self.loc)
            state_dict.setdefault(prefix + "scale", self.scale)
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]

    def _leaf_given(self, key: Key, leaf: TensorSpec, batch_dims: int) -> TensorSpec:
        box = _finite_box(leaf)
        if not self._from_bounds:
            if box is None:
                return Unbounded(leaf.shape, leaf.device, leaf.dtype)
            return box_between(*(self.normalize(end).to(leaf.dtype) for end in (box.low, box.high)))
        if box is None:
            raise SpecFitError(
                f"ActionScaling scales {key!r} by its bounds, but its spec is {leaf}, which is not continuous "
                "with finite bounds. Pass loc= and scale=."
            )
        self.loc, self.scale = (_of_one_row(number, batch_dims) for number in _middle(box))
        least = -1.0 if self.standard_normal else 0.0
        return Bounded(least, 1.0, leaf.shape, leaf.device, leaf.dtype)


def _fits(shape: torch.Size, action: torch.Size) -> bool:
    """Say whether numbers of a shape broadcast to an action, and leave its shape as it is."""
    pairs = zip(reversed(shape), reversed(action), strict=False)
    return len(shape) <= len(action) and all(size in (1, of_action) for size, of_action in pairs)


def _finite_box(leaf: TensorSpec) -> BoundedContinuous | None:
    """Give a leaf that is a box with finite bounds; None where it is not."""
    if not isinstance(leaf, BoundedContinuous):
        return None
    largest = torch.finfo(leaf.dtype).max
    ends = (leaf.low, leaf.high)
    return leaf if all(bool((end.abs() < largest).all()) for end in ends) else None


def _middle(leaf: BoundedContinuous) -> tuple[torch.Tensor, torch.Tensor]:
    return (leaf.high + leaf.low) / 2, (leaf.high - leaf.low) / 2


def _of_one_row(number: torch.Tensor, batch_dims: int) -> torch.Tensor:
    """Give the numbers of one row where all rows have the same, so that they fit any batch."""
    rows = number.flatten(0, batch_dims - 1) if batch_dims else number[None]
    return rows[0].clone() if bool((rows == rows[:1]).all()) else number


# -------------------------------------------------------------------------------------------- shape


class FlattenAction(_ActionForm):
    """Let the user give an action with the axes from ``first_dim`` to ``last_dim`` in one.

    Args:
        first_dim, last_dim: axes of the action of the env, negative.
        in_keys_inv, out_keys_inv: actions of the env, ``"action"`` by default, and the user's names of them.
        in_keys, out_keys: actions of recorded data; see `_ActionForm`.
        allow_positive_dim: accept axes that count from the first one after the batch.
        action_shape: sizes of the flattened axes, where there is no env that says them.

    Raises:
        ArgumentError: (a ValueError) an axis is not negative and that is not allowed, or ``last_dim``
            stands before ``first_dim``.
        SpecFitError: (a RuntimeError) when specs are read: an action has no such axes, or spells choices.
        StatisticsError: (a RuntimeError) the sizes of the axes are not known.
    """

    _in_repr = ("first_dim", "last_dim")

    computes_only = True

    def __init__(
        self,
        first_dim: int = -2,
        last_dim: int = -1,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
        allow_positive_dim: bool = False,
        *,
        action_shape: Sequence[int] | None = None,
    ):
        super().__init__(in_keys_inv, out_keys_inv, in_keys, out_keys)
        allowed = {"allow_positive": allow_positive_dim}
        self.first_dim = require_negative("first_dim", first_dim, **allowed)
        self.last_dim = require_negative("last_dim", last_dim, **allowed)
        if (first_dim < 0) == (last_dim < 0) and last_dim < first_dim:
            raise ArgumentError(
                f"last_dim, {last_dim}, stands before first_dim, {first_dim}. Swap them."
            )
        self.action_shape = None if action_shape is None else tuple(action_shape)
        self._spans: dict[Path, tuple[int, ...]] = {}

    def _axes(self, batch_dims: int) -> tuple[int, int]:
        first, last = (
            dim if dim < 0 else dim + batch_dims for dim in (self.first_dim, self.last_dim)
        )
        return first, last

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Flatten the actions of recorded data."""
        first, last = self._axes(tensordict.batch_dims)
        return self._convert(
            tensordict,
            self.in_keys,
            self.out_keys,
            lambda value: elementwise.flattened(value, first, last),
        )

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        # counted from the end, the flat axis stands where the last of the span will
        first, last = self._axes(td.batch_dims)
        axis = last if last < 0 else first
        for inner, outer in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            span = self._span(inner)
            self._convert(
                td, [outer], [inner], lambda value, span=span: value.unflatten(axis, span)
            )
        return td

    def _span(self, key: Key) -> tuple[int, ...]:
        span = self._spans.get(as_path(key), self.action_shape)
        if span is None:
            raise StatisticsError(
                f"FlattenAction does not know which shape {key!r} has in the env. Pass action_shape=, or put "
                "it into a TransformedEnv."
            )
        return span

    def _leaf_given(self, key: Key, leaf: TensorSpec, batch_dims: int) -> TensorSpec:
        first, last = self._axes(batch_dims)
        spells = leaf.is_choice and (leaf._encoding_ndim or getattr(leaf, "mask", None) is not None)
        if spells or -leaf.ndim + batch_dims > min(first, last) or max(first, last) >= leaf.ndim:
            raise SpecFitError(
                f"FlattenAction flattens the axes {self.first_dim} to {self.last_dim} of {key!r}, but its "
                f"spec is {leaf}, with {batch_dims} axes of the batch. The axes must be there, and must not "
                "spell or mask choices."
            )
        sizes = tuple(leaf.shape)
        self._spans[as_path(key)] = sizes[first % leaf.ndim : last % leaf.ndim + 1]
        return reshaped(leaf, lambda value: elementwise.flattened(value, first, last))


# ---------------------------------------------------------------------------------------- structure


class MeanActionSelector(Transform):
    """Let a policy over Gaussian beliefs act in an env: observations become beliefs, actions their means.

    ``observation`` is shown as ``("observation", "mean")``, with a covariance of zeros in
    ``("observation", "var")``; of the policy's action the env takes ``("action", "mean")``. The action
    spec stays that of the mean; a plain action is taken as it is.

    Args:
        observation_key: the observation, of shape ``(*batch, n)``; its covariance is ``(*batch, n, n)``.
        action_key: the action of the env.

    Raises:
        SpecFitError: (a RuntimeError) when specs are read: there is no such observation, or it has no axis.
    """

    only_adds_done = True

    def __init__(self, observation_key: str = "observation", action_key: str = "action"):
        super().__init__()
        self.observation_key = observation_key
        self.action_key = action_key

    def _belief(self, key: str) -> tuple[Path, Path]:
        return (*as_path(key), "mean"), (*as_path(key), "var")

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        value = next_td.get(self.observation_key)
        mean, var = self._belief(self.observation_key)
        covariance = value.new_zeros((*value.shape, value.shape[-1]))
        del next_td[self.observation_key]
        return next_td.set(mean, value).set(var, covariance)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return self._call(td_reset)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        given = td.get(self.action_key, None)
        if not isinstance(given, TensorDictBase):
            return td
        return td.set(self.action_key, given.get("mean"))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        leaf = observation_spec.get(self.observation_key, None)
        if not isinstance(leaf, TensorSpec) or leaf.ndim <= observation_spec.ndim:
            raise SpecFitError(
                f"MeanActionSelector makes a belief of {self.observation_key!r}, whose spec is {leaf}. It "
                "must have an axis besides the batch. Pass observation_key=."
            )
        mean, var = self._belief(self.observation_key)
        size = leaf.shape[-1]
        del observation_spec[self.observation_key]
        observation_spec[mean] = leaf
        observation_spec[var] = Unbounded((*leaf.shape, size), leaf.device, leaf.dtype)
        return observation_spec
