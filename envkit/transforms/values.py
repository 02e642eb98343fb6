"""Values in another dtype, range or meaning: cast, clipped, shifted and scaled, reduced to signs, summed.

Each of these transforms works on the elements of one entry, needs no other row, and remembers nothing;
`elementwise` does the arithmetic. The numbers of a scale are given, or measured once; `running` keeps measuring.

Conventions
    scaled        ``value * scale + loc``.
    standardised  ``(value - loc) / scale``, asked for by ``standard_normal=True``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import nn

from envkit.arrays import elementwise
from envkit.arrays.elementwise import Array, dtype_name, dtype_named
from envkit.data.arguments import as_bool, as_number
from envkit.data.paths import Key, as_key, as_path
from envkit.data.transition import leaves
from envkit.env.base import EnvBase
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingKeyError,
    NoParentError,
    SpecError,
    StatisticsError,
    UnsupportedError,
)
from envkit.specs import Binary, Bounded, BoundedContinuous, Composite, TensorSpec, Unbounded
from envkit.specs.lasting import lasting
from envkit.transforms.core.leafwise import (
    INPUTS,
    OUTPUTS,
    ArrayTransform,
    box_between,
    image_of,
    require_known,
)
from envkit.transforms.core.transform import Keys, Transform

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

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import DTypeCastTransform
        >>> data = TensorDict(observation=torch.zeros(4, dtype=torch.float16))
        >>> DTypeCastTransform(torch.float16, torch.float32)(data)["observation"].dtype
        torch.float32
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

    def _changed(self, value: Array, constants: Mapping[str, Any], batch_dims: int) -> Array:
        return elementwise.cast(value, dtype_named(value, dtype_name(self.dtype_out)))

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return elementwise.cast(value, self.dtype_in)

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        """Cast the states that a reset may begin from, as far as it is given any."""
        for inner, outer in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            if (value := td.get(outer, None)) is not None:
                td.set(inner, self._inv_apply_transform(value))
        return td

    @property
    def _is_forward(self) -> bool:
        return not self.in_keys_inv  # without an inverse, a reset casts nothing either

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        return leaf.cast(self.dtype_out)

    _leaf_before = _leaf_after

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        if self._takes_all:
            self.in_keys = self.out_keys = self._keys_of_dtype(output_spec, "observation", "reward")
        return super().transform_output_spec(output_spec)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        if self._takes_all:
            self.in_keys_inv = self.out_keys_inv = self._keys_of_dtype(
                input_spec, "action", "state"
            )
        return super().transform_input_spec(input_spec)

    def _keys_of_dtype(self, specs: Composite, *kinds: str) -> list[Key]:
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

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import DoubleToFloat
        >>> data = TensorDict(observation=torch.zeros(4, dtype=torch.float64))
        >>> DoubleToFloat()(data)["observation"].dtype
        torch.float32
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

    An action of the user may be anywhere in the env's own spec; it is clipped on the way in.

    Args:
        in_keys, out_keys: entries the env gives.
        in_keys_inv, out_keys_inv: entries the env takes.
        low, high: the bounds; None sets none.

    Raises:
        ArgumentTypeError: (a TypeError and a ValueError) no bound is given.
        ArgumentError: (a ValueError) ``low`` is not below ``high``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import ClipTransform
        >>> data = TensorDict(observation=torch.tensor([-5.0, 0.5, 2.0]))
        >>> clip = ClipTransform(in_keys=["observation"], low=-1.0, high=1.0)
        >>> clip(data)["observation"]
        tensor([-1.0000,  0.5000,  1.0000])
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
                f"{type(self).__name__} has no bound, but needs one. Pass a lower or an upper one."
            )
        bounds = [
            as_buffer(f"the {which} bound", bound)
            for which, bound in (("lower", low), ("upper", high))
            if bound is not None
        ]
        if len(bounds) == 2 and not bool((bounds[0] < bounds[1]).all()):
            raise ArgumentError(
                f"{type(self).__name__} has the lower bound {low}, but it must be below the upper one, "
                f"{high}. Exchange them."
            )
        self.low = low
        self.high = high

    def constants(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high}

    def _changed(self, value: Array, constants: Mapping[str, Any], batch_dims: int) -> Array:
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

    Example:
        >>> from envkit import GymEnv, RewardClipping
        >>> env = GymEnv("CartPole-v1").append_transform(RewardClipping(0.0, 0.5))
        >>> env.rollout(3)["next", "reward"].flatten()
        tensor([0.5000, 0.5000, 0.5000])
        >>> env.close()
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

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import SignTransform
        >>> data = TensorDict(reward=torch.tensor([-5.0, 0.0, 2.0]))
        >>> SignTransform(in_keys=["reward"])(data)["reward"]
        tensor([-1.,  0.,  1.])
    """

    computes_only = True

    def _changed(self, value: Array, constants: Mapping[str, Any], batch_dims: int) -> Array:
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

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import BinarizeReward
        >>> BinarizeReward()(TensorDict(reward=torch.tensor([-5.0, 0.0, 2.0])))["reward"]
        tensor([0, 0, 1], dtype=torch.int8)
    """

    def __init__(self, in_keys: Keys = None, out_keys: Keys = None):
        super().__init__("reward" if in_keys is None else in_keys, out_keys)

    def _changed(self, value: Array, constants: Mapping[str, Any], batch_dims: int) -> Array:
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

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import LineariseRewards
        >>> data = TensorDict(reward=torch.tensor([3.0, 4.0]))
        >>> LineariseRewards(["reward"], weights=[1.0, 0.5])(data)["reward"]
        tensor([5.])
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
        numbers = None if weights is None else as_buffer("weights", weights)
        if numbers is not None and numbers.ndim != 1:
            raise ArgumentError(
                f"weights has shape {tuple(numbers.shape)}, but must have one axis. Pass a number for each objective."
            )
        self.register_buffer("weights", numbers)

    def constants(self) -> dict[str, Any]:
        return {"weights": 1 if self.weights is None else self.weights}

    def _changed(self, value: Array, constants: Mapping[str, Any], batch_dims: int) -> Array:
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
    """Pay a reward for success, and 0 otherwise.

    Args:
        success_key: an observation, bool or 0 and 1.
        reward_key: the reward, float32, in the shape of the observation; one that the env gives is replaced.
        scale: the reward of success.

    Raises:
        MissingKeyError: there is no such observation.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import SuccessReward
        >>> data = TensorDict(success=torch.tensor([True]), reward=torch.tensor([0.3]))
        >>> SuccessReward(scale=10.0)(data)["reward"]
        tensor([10.])
    """

    computes_only = True

    only_adds_done = True

    def __init__(
        self, success_key: Key = "success", reward_key: Key = "reward", *, scale: float = 1.0
    ):
        super().__init__([success_key], [reward_key])
        as_number("scale", scale, meaning="the reward of success")
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


# -------------------------------------------------------------------------------------------- scale

Number = float | torch.Tensor


class _Affine(ArrayTransform):
    """Base of transforms by a fixed ``loc`` and ``scale``, buffers that broadcast to the values."""

    loc: torch.Tensor | None
    scale: torch.Tensor | None
    standard_normal: bool

    def _numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.loc is not None and self.scale is not None
        return self.loc, self.scale

    def constants(self) -> dict[str, Any]:
        loc, scale = self._numbers()
        return {"loc": loc, "scale": scale}

    def _changed(self, value: Array, constants: Mapping[str, Any], batch_dims: int) -> Array:
        change = elementwise.standardised if self.standard_normal else elementwise.scaled
        return change(value, constants["loc"], constants["scale"])

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        change = elementwise.scaled if self.standard_normal else elementwise.standardised
        return change(value, *self._numbers())

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        return image_of(leaf, self._apply_transform)

    _leaf_before = _leaf_after

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # TorchRL's state dicts hold the flag too.
        flag = state_dict.pop(prefix + "standard_normal", self.standard_normal)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if bool(flag) != self.standard_normal:
            errors: list[str] = args[-1]
            errors.append(
                f"{prefix}standard_normal is {bool(flag)} in the state dict, but {self.standard_normal} in this "
                f"{type(self).__name__}. Make it with standard_normal={bool(flag)}."
            )


def make_room(
    module: nn.Module, names: Sequence[str], state_dict: Mapping[str, Any], prefix: str
) -> None:
    """Bring buffers to the shapes of what is about to be loaded: torch loads into those that are there, of one shape."""
    for name in names:
        loaded, own = state_dict.get(prefix + name), getattr(module, name)
        if loaded is not None and (own is None or own.shape != loaded.shape):
            setattr(module, name, torch.empty_like(loaded))


def as_buffer(name: str, number: Any) -> torch.Tensor:
    """Write numbers as a tensor of the default dtype; a tensor as a copy without gradient.

    Raises:
        ArgumentTypeError: (a TypeError) they are no numbers. ``name`` says what they are, for the message.
    """
    if isinstance(number, torch.Tensor):
        return number.detach().clone()
    try:
        return torch.tensor(number, dtype=torch.get_default_dtype())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(
            f"{name} is {number!r}, but must be a number or a tensor of numbers. Pass 2.0, or torch.tensor([1.0, 2.0])."
        ) from error


class RewardScaling(_Affine):
    """Compute ``reward * scale + loc``, or ``(reward - loc) / scale``.

    Args:
        loc, scale: numbers, or tensors that broadcast to the reward.
        in_keys: rewards; ``"reward"`` by default.
        out_keys: where they go; in place by default.
        standard_normal: compute the second form.

    Example:
        >>> from envkit import GymEnv, RewardScaling
        >>> env = GymEnv("CartPole-v1").append_transform(RewardScaling(loc=0.5, scale=2.0))
        >>> env.rollout(2)["next", "reward"].flatten()
        tensor([2.5000, 2.5000])
        >>> env.close()
    """

    def __init__(
        self,
        loc: Number,
        scale: Number,
        in_keys: Keys = None,
        out_keys: Keys = None,
        standard_normal: bool = False,
    ):
        super().__init__("reward" if in_keys is None else in_keys, out_keys)
        self.register_buffer("loc", as_buffer("loc", loc))
        self.register_buffer("scale", as_buffer("scale", scale))
        self.standard_normal = as_bool("standard_normal", standard_normal)

    def extra_repr(self) -> str:
        return f"loc={self.loc}, scale={self.scale}, standard_normal={self.standard_normal}"


class ObservationNorm(_Affine):
    """Compute ``observation * scale + loc``, or ``(observation - loc) / scale``.

    Without numbers, `init_stats` measures them once, before the env is used.

    Args:
        loc, scale: numbers, or tensors that broadcast to the values; both or none.
        in_keys, out_keys: entries the env gives, all by the same numbers.
        in_keys_inv, out_keys_inv: entries the env takes: the user gives normalised ones.
        standard_normal: compute the second form.
        eps: least scale of the second form; 1e-6 by default.

    Raises:
        ArgumentError: (a ValueError) only one of ``loc`` and ``scale``, or no keys at all.
        StatisticsError: (a RuntimeError) values or specs are asked for before there are numbers.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import ObservationNorm
        >>> norm = ObservationNorm(
        ...     loc=1.0, scale=2.0, in_keys=["observation"], standard_normal=True
        ... )
        >>> norm(TensorDict(observation=torch.tensor([1.0, 5.0])))["observation"]
        tensor([0., 2.])
    """

    _in_repr = ("loc", "scale", "standard_normal")

    computes_only = True

    def __init__(
        self,
        loc: Number | None = None,
        scale: Number | None = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        standard_normal: bool = False,
        eps: float | None = None,
    ):
        if in_keys is None and in_keys_inv is None:
            raise ArgumentError("ObservationNorm has no keys. Name the entries with in_keys=.")
        if (loc is None) != (scale is None):
            raise ArgumentError(
                f"ObservationNorm has loc={loc} and scale={scale}. Pass both, or none and call "
                "init_stats."
            )
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.standard_normal = as_bool("standard_normal", standard_normal)
        self.eps = (
            1e-6 if eps is None else as_number("eps", eps, least=0, meaning="the least scale")
        )
        self.register_buffer("loc", None)
        self.register_buffer("scale", None)
        if loc is not None and scale is not None:
            self._fix(as_buffer("loc", loc), as_buffer("scale", scale))

    @lasting()
    def _fix(self, loc: torch.Tensor, scale: torch.Tensor) -> None:
        self.loc = loc.clone()
        self.scale = scale.clamp_min(self.eps) if self.standard_normal else scale.clone()

    @property
    def initialized(self) -> bool:
        """Whether there are numbers."""
        return self.loc is not None

    def _numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.loc is None or self.scale is None:
            raise StatisticsError(
                f"ObservationNorm of {self.in_keys or self.in_keys_inv} has no loc and scale yet. Pass "
                "them, load a state dict, or call init_stats(num_iter) on the transform."
            )
        return self.loc, self.scale

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        make_room(self, ("loc", "scale"), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.empty_cache()  # bounds depend on the numbers

    # --------------------------------------------------------------------------------- measurement

    def init_stats(
        self,
        num_iter: int,
        reduce_dim: int | Sequence[int] | None = None,
        cat_dim: int | None = None,
        key: Key | None = None,
        keep_dims: Sequence[int] | None = None,
    ) -> None:
        """Measure mean and standard deviation in episodes of random actions, before this transform.

        Args:
            num_iter: least number of steps, over all envs of the batch.
            reduce_dim: axes of the recorded data ``(*batch, T, *event)`` that are averaged, negative ones counted from
                the end; None: all batch axes and time.
            cat_dim: axis along which episodes are joined, one of ``reduce_dim``; that itself if it is one, and time
                by default.
            key: entry that is measured; needed when there are several in_keys.
            keep_dims: averaged axes that stay, of size one.

        Raises:
            NoParentError: the transform is in no env.
            StatisticsError: there are numbers already, several entries and no ``key``, or what was
                measured is not finite: the entry holds NaN, or one step was taken.
            MissingKeyError, ArgumentError: ``key``, ``cat_dim`` or ``num_iter`` is wrong, or
                ``reduce_dim`` leaves out time.

        Example:
            >>> from envkit import GymEnv, ObservationNorm
            >>> norm = ObservationNorm(in_keys=["observation"], standard_normal=True)
            >>> env = GymEnv("CartPole-v1").append_transform(norm)
            >>> norm.init_stats(100)
            >>> norm.loc.shape, norm.scale.shape
            (torch.Size([4]), torch.Size([4]))
            >>> env.close()
        """
        if num_iter < 1:
            raise ArgumentError(
                f"num_iter is {num_iter}, but must be 1 or more steps. Pass how many steps to take."
            )
        axes_named = (reduce_dim,) if isinstance(reduce_dim, int) else reduce_dim
        refusal = ArgumentError(
            f"cat_dim is {cat_dim}, but must be one of reduce_dim={reduce_dim}: episodes are joined along "
            "an axis that is averaged."
        )
        is_outside = axes_named is not None and cat_dim is not None and cat_dim not in axes_named
        if is_outside and min((*(axes_named or ()), cat_dim or 0)) >= 0:  # no env has to be asked
            raise refusal
        source = self._measured(key)
        time, ndim = self._time_axis(source)
        axes = tuple(
            axis % ndim for axis in (range(time + 1) if axes_named is None else axes_named)
        )
        joins = axes[0] if len(axes) == 1 else time
        joins = joins if cat_dim is None else cat_dim % ndim
        if joins not in axes:
            raise refusal
        data = torch.cat(self._episodes(source, num_iter), joins)
        if not data.is_floating_point():
            data = data.to(torch.get_default_dtype())
        if all(data.shape[axis] == 1 for axis in axes):
            raise StatisticsError(
                "init_stats took one step of one row, and a standard deviation takes two numbers; "
                f"num_iter is {num_iter}. Take more steps."
            )
        loc, scale = (
            _squeezed(number, axes, keep_dims, data.ndim)
            for number in (data.mean(axes, keepdim=True), data.std(axes, keepdim=True))
        )
        self._require_fitting(source, loc, scale, reduce_dim)
        scale = scale.clamp_min(self.eps)
        if self.standard_normal:
            self._fix(loc, scale)
        else:
            self._fix(-loc / scale, 1 / scale)
        self.empty_cache()

    def _require_fitting(
        self, key: Key, loc: torch.Tensor, scale: torch.Tensor, reduce_dim: object
    ) -> None:
        if not (loc.isfinite().all() and scale.isfinite().all()):
            raise StatisticsError(
                f"init_stats measured loc={loc} and scale={scale} of {key!r}, but both must be finite. "
                "Correct the env if it gives NaN or infinite numbers, or pass loc and scale."
            )
        shape = tuple(cast(torch.Tensor, self._stood_in().fake_tensordict().get(key)).shape)
        if not _stays(loc.shape, shape):
            raise ArgumentError(
                f"reduce_dim={reduce_dim} leaves numbers of shape {tuple(loc.shape)}, but {key!r} has "
                f"shape {shape}. Average over time, axis {self._time_axis(key)[0]}, too."
            )

    def _measured(self, key: Key | None) -> Key:
        if self.initialized:
            raise StatisticsError(
                f"ObservationNorm has loc={self.loc} and scale={self.scale} already. Build a new one to "
                "measure again."
            )
        keys = self.in_keys or self.in_keys_inv
        if key is None and len(keys) > 1:
            raise StatisticsError(
                f"ObservationNorm normalises {keys}. Say which one is measured with key=."
            )
        source = keys[0] if key is None else as_key(as_path(key))
        if source not in keys:
            raise MissingKeyError(
                f"key is {source!r}, but ObservationNorm normalises {keys}. Pass one of these."
            )
        env = self._stood_in()
        if source in self.in_keys:
            require_known(self, [source], env.output_spec, OUTPUTS, "in_keys=")
        else:
            require_known(self, [source], env.input_spec, INPUTS, "in_keys_inv=")
        return source

    def _stood_in(self) -> EnvBase:
        if self.parent is None:
            raise NoParentError(
                "init_stats plays in the environment, but this ObservationNorm is in none. Put it into "
                "a TransformedEnv first."
            )
        return self.parent

    def _time_axis(self, key: Key) -> tuple[int, int]:
        """Return the axis of time in what a rollout records of an entry, and how many axes that has."""
        env = self._stood_in()
        fake = env.fake_tensordict()
        return fake.batch_dims, cast(torch.Tensor, fake.get(key)).ndim + 1

    def _episodes(self, key: Key, num_iter: int) -> list[torch.Tensor]:
        env = self._stood_in()
        episodes, steps = [], 0
        while steps < num_iter:
            data = env.rollout(max_steps=num_iter)
            episodes.append(data.get(key))
            steps += data.numel()
        return episodes


def _stays(numbers: Sequence[int], shape: tuple[int, ...]) -> bool:
    """Check whether data of ``shape`` keeps it when it is combined with an array of ``numbers``."""
    try:
        return torch.broadcast_shapes(tuple(numbers), shape) == shape
    except RuntimeError:
        return False


def _squeezed(
    value: torch.Tensor, axes: Sequence[int], kept: Sequence[int] | None, ndim: int
) -> torch.Tensor:
    """Drop averaged axes, but for the kept ones."""
    stay = {axis % ndim for axis in kept or ()}
    return value.squeeze(tuple({axis % ndim for axis in axes} - stay))
