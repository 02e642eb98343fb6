"""Values in another dtype, range or meaning: cast, clipped, reduced to signs, summed.

Each of these transforms works on the elements of one entry, needs no other row, and remembers nothing;
`elementwise` does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit.arrays import elementwise
from envkit.arrays.elementwise import dtype_named
from envkit.data.paths import Key, as_key
from envkit.data.transition import leaves
from envkit.errors import ArgumentError, ArgumentTypeError, SpecError, UnsupportedError
from envkit.specs import (
    Binary,
    Bounded,
    BoundedContinuous,
    Composite,
    TensorSpec,
    Unbounded,
)
from envkit.transforms.core.base import Keys, Transform
from envkit.transforms.core.fusable import dtype_name
from envkit.transforms.core.leafwise import (
    OUTPUTS,
    ArrayTransform,
    box_between,
    image_of,
    require_known,
)

__all__ = [
    "BinarizeReward",
    "ClipTransform",
    "DTypeCastTransform",
    "DoubleToFloat",
    "LineariseRewards",
    "RewardClipping",
    "SignTransform",
    "SuccessReward",
]


# --------------------------------------------------------------------------------------------- cast


class DTypeCastTransform(ArrayTransform):
    """Cast entries to another dtype, and what the user gives back to that of the env.

    Without any keys, in an env: all observations and rewards of ``dtype_in`` are cast, and all actions
    and states of ``dtype_in`` are asked for in ``dtype_out``. A state that makes the round trip is
    rounded by it: name the keys to leave it alone. Without keys and without an env: all entries of the
    data that have the dtype are cast.

    Args:
        dtype_in: dtype on the side of the env.
        dtype_out: dtype on the side of the user.
        in_keys, out_keys: entries the env gives; these are cast whatever dtype they have.
        in_keys_inv, out_keys_inv: entries the env takes.

    Raises:
        ArgumentError: (a ValueError) out_keys without in_keys.
    """

    _in_repr = ("dtype_in", "dtype_out")

    computes_only = True

    def __init__(
        self,
        dtype_in: torch.dtype,
        dtype_out: torch.dtype,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ):
        self._takes_all = in_keys is None and in_keys_inv is None
        if self._takes_all and (out_keys is not None or out_keys_inv is not None):
            raise ArgumentError(
                f"{type(self).__name__} has out_keys, but no in_keys, and cannot tell which entry goes "
                "where. Pass in_keys too."
            )
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.dtype_in = dtype_in
        self.dtype_out = dtype_out

    def _changed(self, value: Any, constants: Mapping[str, Any], batch_dims: int) -> Any:
        return elementwise.cast(value, dtype_named(value, dtype_name(self.dtype_out)))

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return elementwise.cast(value, self.dtype_in)

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        return leaf.cast(self.dtype_out)

    _leaf_before = _leaf_after

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        if self._takes_all:
            self.in_keys = self.out_keys = self._found(output_spec, "observation", "reward")
        return super().transform_output_spec(output_spec)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        if self._takes_all:
            self.in_keys_inv = self.out_keys_inv = self._found(input_spec, "action", "state")
        return super().transform_input_spec(input_spec)

    def _found(self, specs: Composite, *kinds: str) -> list[Key]:
        return [
            key
            for kind in kinds
            for key, leaf in specs[f"full_{kind}_spec"].items(True, True)
            if leaf.dtype == self.dtype_in
        ]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._takes_all and self.parent is None:
            return _cast_all(tensordict, self.dtype_in, self.dtype_out)
        return super().forward(tensordict)

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._takes_all and self.parent is None:
            return _cast_all(tensordict.copy(), self.dtype_out, self.dtype_in)
        return super().inv(tensordict)


def _cast_all(td: TensorDictBase, old: torch.dtype, new: torch.dtype) -> TensorDictBase:
    for path, value in list(leaves(td)):
        if getattr(value, "dtype", None) == old:
            td.set(as_key(path), elementwise.cast(value, new))
    return td


class DoubleToFloat(DTypeCastTransform):
    """Cast float64 to float32, and what the user gives back; see `DTypeCastTransform`.

    Args:
        in_keys, out_keys: entries the env gives; None: all of float64.
        in_keys_inv, out_keys_inv: entries the env takes.
    """

    computes_only = True

    def __init__(
        self,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ):
        super().__init__(torch.float64, torch.float32, in_keys, out_keys, in_keys_inv, out_keys_inv)


# --------------------------------------------------------------------------------------------- clip


class ClipTransform(ArrayTransform):
    """Clip values to ``[low, high]``, those the env gives and those it takes.

    What the user gives may lie anywhere in the env's own spec; it is clipped on the way in.

    Args:
        in_keys, out_keys: entries the env gives.
        in_keys_inv, out_keys_inv: entries the env takes.
        low, high: the bounds; None sets none.

    Raises:
        ArgumentTypeError: (a TypeError and a ValueError) no bound is given.
        ArgumentError: (a ValueError) ``low`` is not below ``high``.
    """

    _in_repr = ("low", "high")

    computes_only = True

    def __init__(
        self,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        *,
        low: float | None = None,
        high: float | None = None,
    ):
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        if low is None and high is None:
            raise ArgumentTypeError(
                f"{type(self).__name__} has no bound. Pass a low or a high one."
            )
        if low is not None and high is not None and not low < high:
            raise ArgumentError(
                f"{type(self).__name__} has the lower bound {low}, which is not below the higher one, "
                f"{high}. Exchange them."
            )
        self.low = low
        self.high = high

    def constants(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high}

    def _changed(self, value: Any, constants: Mapping[str, Any], batch_dims: int) -> Any:
        return elementwise.clipped(value, constants["low"], constants["high"])

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self._apply_transform(value)

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        return image_of(_as_box(leaf), self._apply_transform)


class RewardClipping(ClipTransform):
    """Clip rewards to ``[clamp_min, clamp_max]``.

    Args:
        clamp_min, clamp_max: the bounds; None sets none.
        in_keys: rewards; ``"reward"`` by default.
        out_keys: where they go; in place by default.

    Raises:
        ArgumentError: (a ValueError) see `ClipTransform`.
    """

    def __init__(
        self,
        clamp_min: float | None = None,
        clamp_max: float | None = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
    ):
        keys = "reward" if in_keys is None else in_keys
        super().__init__(keys, out_keys, low=clamp_min, high=clamp_max)


def _as_box(leaf: TensorSpec) -> TensorSpec:
    """Write an unbounded leaf as a box without ends."""
    if isinstance(leaf, Unbounded) and leaf.dtype != torch.bool:
        return Bounded(-torch.inf, torch.inf, leaf.shape, leaf.device, leaf.dtype)
    return leaf


# -------------------------------------------------------------------------------------------- signs


class SignTransform(ArrayTransform):
    """Replace values by their signs: -1, 0 or 1, in the same dtype.

    Args:
        in_keys, out_keys: entries the env gives.
        in_keys_inv, out_keys_inv: entries the env takes.
    """

    computes_only = True

    def _changed(self, value: Any, constants: Mapping[str, Any], batch_dims: int) -> Any:
        return elementwise.sign(value)

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self._apply_transform(value)

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        return image_of(_as_box(leaf), self._apply_transform)


class BinarizeReward(ArrayTransform):
    """Replace rewards by 1 where they are positive and 0 elsewhere, int8.

    Args:
        in_keys: rewards; ``"reward"`` by default.
        out_keys: where they go; in place by default.
    """

    def __init__(self, in_keys: Keys = None, out_keys: Keys = None):
        super().__init__("reward" if in_keys is None else in_keys, out_keys)

    def _changed(self, value: Any, constants: Mapping[str, Any], batch_dims: int) -> Any:
        return elementwise.cast(elementwise.is_positive(value), dtype_named(value, "int8"))

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        return Binary(shape=leaf.shape, device=leaf.device, dtype=torch.int8)


class LineariseRewards(ArrayTransform):
    """Turn rewards of several objectives into one: a weighted sum over their last axis.

    Args:
        in_keys: rewards of shape ``(*batch, *event, objectives)``.
        out_keys: where the sums go, shape ``(*batch, *event, 1)``; in place by default.
        weights: one number for each objective; None weighs all alike, with 1.

    Raises:
        ArgumentError: (a ValueError) ``weights`` has not one axis.
        UnsupportedError: (a NotImplementedError) when specs are read: a reward is discrete.
        SpecError: when specs are read: a reward has another number of objectives.
    """

    weights: torch.Tensor | None

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys = None,
        *,
        weights: Sequence[float] | torch.Tensor | None = None,
    ):
        super().__init__(in_keys, out_keys)
        given = weights is None or isinstance(weights, torch.Tensor)
        numbers = weights if given else torch.tensor(weights)
        if isinstance(numbers, torch.Tensor) and numbers.ndim != 1:
            raise ArgumentError(
                f"weights has shape {tuple(numbers.shape)}, but must have one axis: a number for each objective."
            )
        self.register_buffer("weights", numbers)

    def constants(self) -> dict[str, Any]:
        return {"weights": 1 if self.weights is None else self.weights}

    def _changed(self, value: Any, constants: Mapping[str, Any], batch_dims: int) -> Any:
        return elementwise.weighted_sum(value, constants["weights"])

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        weights = self.weights
        if leaf.domain == "discrete":
            raise UnsupportedError(
                f"LineariseRewards adds up continuous rewards, but the reward is {leaf}. Put a "
                "DTypeCastTransform to a floating-point dtype before it."
            )
        if weights is not None and tuple(weights.shape) != tuple(leaf.shape[-1:]):
            raise SpecError(
                f"LineariseRewards has weights of shape {tuple(weights.shape)}, but the reward has "
                f"shape {tuple(leaf.shape)}. Pass one weight for each element of its last axis."
            )
        if isinstance(leaf, BoundedContinuous) and weights is not None:
            falls = weights < 0  # there the sum is lowest at the upper bound
            low, high = leaf.low, leaf.high
            return box_between(
                self._apply_transform(torch.where(falls, high, low)),
                self._apply_transform(torch.where(falls, low, high)),
            )
        return image_of(leaf, self._apply_transform)


class SuccessReward(Transform):
    """Give a reward for success, and none else.

    Args:
        success_key: an observation, bool or 0 and 1.
        reward_key: the reward, float32, in the shape of the observation; one that the env gives is replaced.
        scale: the reward of success.

    Raises:
        MissingKeyError: there is no such observation.
    """

    computes_only = True

    only_adds_done = True

    def __init__(
        self, success_key: Key = "success", reward_key: Key = "reward", *, scale: float = 1.0
    ):
        super().__init__([success_key], [reward_key])
        self.scale = scale

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(torch.float32) * self.scale

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return td_reset

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        require_known(self, self.in_keys, output_spec, OUTPUTS, "success_key=")
        leaf = output_spec["full_observation_spec"][self.in_keys[0]]
        ends = min(0.0, self.scale), max(0.0, self.scale)
        reward = Bounded(*ends, leaf.shape, leaf.device, torch.float32)
        output_spec["full_reward_spec"][self.out_keys[0]] = reward
        return output_spec
