"""Data on another device than the env's, and in memory that copies to one quickly."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from envkit.specs import Composite, TensorSpec
from envkit.specs.annotations import Place
from envkit.specs.devices import as_device, require_memory
from envkit.transforms.core.base import Keys, Transform, editable
from envkit.transforms.core.leafwise import LeafTransform

__all__ = ["DeviceCastTransform", "PinMemoryTransform"]


class DeviceCastTransform(LeafTransform):
    """Deliver data on another device, and move what the user gives back to that of the env.

    Without keys everything is moved, and the env is on ``device``. With keys, or inverse keys, only those
    entries are; the env and its data then have no device of their own.

    Args:
        device: where the user has the data.
        orig_device: where the env, or the replay buffer, has it; that of the env by default. Where neither
            says, what the user gives stays where it is.
        in_keys, out_keys, in_keys_inv, out_keys_inv: entries that are moved; see `Transform`.
    """

    only_adds_done = False  # flags and masks of one step are on two devices

    def __init__(
        self,
        device: Place,
        orig_device: Place | None = None,
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
        """Where the env has its data; None where nobody says."""
        if self._origin is not None or self.parent is None:
            return self._origin
        return self.parent.device

    def _apply_transform(self, value: Any) -> Any:
        return value.to(self.device)

    def _inv_apply_transform(self, value: Any) -> Any:
        return value if self.orig_device is None else value.to(self.orig_device)

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        if self._moves_all:
            return next_td.to(self.device)
        return super()._call(next_td.clear_device_())

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        origin = self.orig_device
        if self._moves_all:
            return td if origin is None else td.to(origin)
        td = super()._inv_call(td.clear_device_())
        return td if origin is None else td.to(origin)

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        return td if self.orig_device is None else td.to(self.orig_device)

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
    """

    only_adds_done = True

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td.pin_memory()

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return self._call(td_reset)
