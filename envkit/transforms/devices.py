"""Data elsewhere than the env has it: on another device, in memory that copies to one quickly, in another batch.

Conventions
    inner  the batch size of the env before a `BatchSizeTransform`; outer: that of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.arrays.elementwise import Array
from envkit.data.arguments import as_batch_size, as_bool, require_callable
from envkit.data.transition import without_device
from envkit.errors import ArgumentError, PlacementError
from envkit.specs import Composite, TensorSpec
from envkit.specs.annotations import Device, as_device, require_memory
from envkit.transforms.core.leafwise import LeafTransform
from envkit.transforms.core.transform import Keys, Transform, editable


class DeviceCastTransform(LeafTransform):
    """Deliver data on another device, and move what the user gives back to that of the env.

    Without keys everything is moved, and the env is on ``device``. With keys, or inverse keys, only those
    entries are; the env and its data then have no device.

    Args:
        device: where the user has the data.
        orig_device: where the env, or the replay buffer, has it; that of the env by default. Where neither
            says, what the user gives stays where it is.
        in_keys, out_keys, in_keys_inv, out_keys_inv: entries that are moved; see `Transform`.

    Example:
        >>> from envkit import DeviceCastTransform, GymEnv
        >>> env = GymEnv("CartPole-v1").append_transform(DeviceCastTransform("cpu"))
        >>> env.rollout(3).device
        device(type='cpu')
        >>> env.close()
    """

    only_adds_done = False  # flags and masks of one step are on two devices

    def __init__(
        self,
        device: Device,
        orig_device: Device | None = None,
        *,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ):
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.device = as_device(device)
        self._origin = None if orig_device is None else as_device(orig_device)
        self._moves_all = in_keys is None and in_keys_inv is None

    @property
    def orig_device(self) -> torch.device | None:
        """Where the env has its data; None where it is not known."""
        if self._origin is not None or self.parent is None:
            return self._origin
        return self.parent.device

    def _apply_transform(self, value: Array) -> Any:
        return value.to(self.device)

    def _inv_apply_transform(self, value: Any) -> Any:
        return value if self.orig_device is None else value.to(self.orig_device)

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        if self._moves_all:
            return next_td.to(self.device)
        return super()._call(without_device(next_td))

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        if not self._moves_all:
            td = super()._inv_call(without_device(td))
        return self._inv_apply_transform(td)

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        return self._inv_apply_transform(td)

    # --------------------------------------------------------------------------------------- specs

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        require_memory(self.device, type(self).__name__)
        if self._moves_all:
            return output_spec.to(self.device)
        return super().transform_output_spec(editable(output_spec).clear_device_())

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        if self._moves_all:
            return input_spec.to(self.device)
        return super().transform_input_spec(editable(input_spec).clear_device_())

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        return leaf.to(self.device)

    _leaf_before = _leaf_after

    def transform_env_device(self, device: torch.device | None) -> torch.device | None:
        return self.device if self._moves_all else None

    def extra_repr(self) -> str:
        return f"device={self.device}, orig_device={self.orig_device}, {super().extra_repr()}"


class PinMemoryTransform(Transform):
    """Put data into pinned memory, from which it is copied to a GPU without waiting.

    Raises:
        RuntimeError: (by torch, when called) there is no accelerator to pin memory for.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import PinMemoryTransform
        >>> data = TensorDict(observation=torch.zeros(4))
        >>> if torch.cuda.is_available():
        ...     data = PinMemoryTransform()(data)
        >>> data["observation"].is_pinned() == torch.cuda.is_available()
        True
    """

    only_adds_done = True

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td.pin_memory()

    _reset = Transform._reset_like_step


class BatchSizeTransform(Transform):
    """Give an env another batch size: one that steps any batch, or any env by other axes of the same rows.

    Args:
        batch_size: that of an env which accepts any; ends with the env's own. Such an env is asked to reset that
            many rows.
        reshape_fn: function that views data, and specs, in other batch axes: ``reshape``, ``flatten``,
            ``unflatten``, ``squeeze`` and ``unsqueeze`` of the rows in their order.
        reset_func: function ``(given, root)`` that makes the root of ``batch_size`` of what a reset of the env
            without rows gives.
        env_kwarg: call it with ``env=`` as well, the env with its transforms.

    Raises:
        ArgumentError: (a ValueError) both ``batch_size`` and ``reshape_fn`` are given, or neither.
        PlacementError: (a RuntimeError and a ValueError) when specs are read, if the env is fixed to its batch
            size. The same if ``batch_size`` does not end with that of the env, or other transforms come before the one
            that reshapes.

    Example:
        >>> from envkit import BatchSizeTransform, GymEnv, SerialEnv
        >>> env = SerialEnv(4, lambda: GymEnv("CartPole-v1"))
        >>> in_rows = BatchSizeTransform(reshape_fn=lambda data: data.reshape(2, 2))
        >>> env.append_transform(in_rows).rollout(3).batch_size
        torch.Size([2, 2, 3])
        >>> env.close()
    """

    _in_repr = ("batch_size", "reshape_fn")

    def __init__(
        self,
        *,
        batch_size: Sequence[int] | None = None,
        reshape_fn: Callable[[Any], Any] | None = None,
        reset_func: Callable[..., TensorDictBase] | None = None,
        env_kwarg: bool = False,
    ):
        super().__init__()
        if (batch_size is None) == (reshape_fn is None):
            raise ArgumentError(
                f"BatchSizeTransform has batch_size={batch_size} and reshape_fn={reshape_fn}. Pass one of them."
            )
        require_callable("reshape_fn", reshape_fn, is_optional=True)
        require_callable("reset_func", reset_func, is_optional=True)
        self.batch_size = None if batch_size is None else as_batch_size(batch_size)
        self.reshape_fn = reshape_fn
        self.reset_func = reset_func
        self.env_kwarg = as_bool("env_kwarg", env_kwarg)

    # ---------------------------------------------------------------------------------------- calls

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td if self.reshape_fn is None else self.reshape_fn(next_td)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        env = self.parent
        if self.reshape_fn is None or env is None:
            return td
        return td.reshape(env.batch_size)

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        if self.reshape_fn is not None:
            return self._inv_call(td)
        if self.reset_func is None or self.parent is None:
            return td
        if td.get(rules.RESET, None) is not None:
            return td
        return TensorDict({}, batch_size=self.parent.batch_size, device=td.device)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        if self.reset_func is not None:
            env = {"env": self.container} if self.env_kwarg else {}
            return self.reset_func(td, td_reset, **env)
        if self.batch_size is not None and td_reset.batch_size != self.batch_size:
            return td_reset.expand(self.batch_size).clone()
        return self._call(td_reset)

    # --------------------------------------------------------------------------------------- specs

    def transform_env_batch_size(self, batch_size: torch.Size) -> torch.Size:
        if self.batch_size is not None:
            return self.batch_size
        assert self.reshape_fn is not None
        return self.reshape_fn(torch.zeros(batch_size)).shape

    def _reshaped(self, specs: Composite) -> Composite:
        self._require_fit()
        if self.batch_size is not None:
            return specs.expand(self.batch_size)
        assert self.reshape_fn is not None
        return self.reshape_fn(specs)

    def _require_fit(self) -> None:
        env, container = self.parent, self.container
        assert env is not None and container is not None
        if self.batch_size is None:
            if not container.steps_first(self):
                raise PlacementError(
                    "BatchSizeTransform(reshape_fn=...) must be the first transform: those before it would be "
                    "shown masks of other axes than their data. Put it first."
                )
            return
        if env.batch_locked:
            raise PlacementError(
                f"{type(env.base_env).__name__} steps batches of size {tuple(env.batch_size)} only, and cannot be given "
                f"batch_size={tuple(self.batch_size)}. Use SerialEnv or ParallelEnv for more rows, or reshape_fn= "
                "for other axes of the same ones."
            )
        ndim = len(env.batch_size)
        if ndim and self.batch_size[-ndim:] != env.batch_size:
            raise PlacementError(
                f"batch_size is {tuple(self.batch_size)}, but must end with that of the env, "
                f"{tuple(env.batch_size)}. Put the new axes in front of these."
            )

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        return self._reshaped(input_spec)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        return self._reshaped(output_spec)
