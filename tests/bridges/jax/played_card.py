"""A card played by tensors without values, so that what holds on one can be shown where there is none.

Tensors are fake ones of torch: they know shape, dtype and device, refuse to be mixed with those of another device,
and have no value to read. Each attempt to read one, or to bring it from or to the host, is noted and answered. Programs
of JAX run on the CPU, on zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from envkit.env import declared, on_row
from envkit.specs.leaves import boxes
from envkit_bridges import dlpack
from envkit_bridges.dlpack import torch_dtype_of
from envkit_bridges.jax import jax_env as env_module

aten = torch.ops.aten


class PlayedCard(FakeTensorMode):
    """Notes what the host reads of tensors that are on a card.

    Attributes:
        reads: names of operators that a host waits in, as often as they were called.
        flags: what flags on the card are read as. True while an env is built, whose bounds are in order; then False,
            so that nothing is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.flags = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func is aten._local_scalar_dense.default:
            return self._answer(first)
        if func is aten.equal.default:
            self.note("equal", first)
            return True
        device = (kwargs or {}).get("device")
        if func is aten._to_copy.default and device is not None and device != first.device:
            self.reads.append(f"to {device.type}")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def note(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            self.reads.append(name)

    def _answer(self, tensor: torch.Tensor) -> Any:
        self.note("item", tensor)
        if tensor.dtype == torch.bool:
            return self.flags or tensor.device.type == "cpu"
        return 1.0 if tensor.is_floating_point() else 1


@contextmanager
def played_card(patch: pytest.MonkeyPatch, device: torch.device) -> Iterator[PlayedCard]:
    """Let a card be played, for torch and for envs of JAX; all that JAX gives is on it."""
    card = PlayedCard()
    _play_torch(patch, card)
    here = jax.devices("cpu")[0]
    for module in (boxes, declared, on_row):  # a played card is no trace
        patch.setattr(module, "is_traced", lambda: False)
    for module in (dlpack, env_module):
        patch.setattr(module, "jax_device_of", lambda device: here)
    patch.setattr(env_module, "warn_if_full", lambda device: None)
    patch.setattr(dlpack, "_wait_for_torch", lambda device: None)
    patch.setattr(dlpack, "_array_of", lambda tensor, copy: jnp.asarray(_zeros(tensor)))
    patch.setattr(dlpack, "_tensor_of", lambda array: _without_value(array, device))
    dlpack._number_on.cache_clear()
    with card:
        yield card
    dlpack._number_on.cache_clear()


def _without_value(array: jax.Array, device: torch.device) -> torch.Tensor:
    return torch.empty(array.shape, dtype=torch_dtype_of(array.dtype), device=device)


def _zeros(tensor: torch.Tensor) -> np.ndarray:
    return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _play_torch(patch: pytest.MonkeyPatch, card: PlayedCard) -> None:
    """Replace what torch does in C++ before it asks a mode, for which it wants CUDA's own library.

    Of fake tensors alone: a class that has had a ``__getitem__`` in Python counts as a sequence for good, and
    ``torch.tensor([value])`` would then refuse each scalar tensor in this process.
    """
    on_cpu_too = {name: getattr(FakeTensor, name) for name in ("__getitem__", "copy_")}
    real_generator = torch.Generator

    def is_played(tensor: FakeTensor) -> bool:
        return tensor.device.type != "cpu"

    def part(self: FakeTensor, index: Any) -> torch.Tensor:
        if not is_played(self):
            return on_cpu_too["__getitem__"](self, index)
        if isinstance(index, torch.Tensor):
            return aten.index.Tensor(self, [index])
        with torch.utils._python_dispatch._disable_current_modes():
            blank = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
            like = blank[index]
            place = like.shape, like.stride(), self.storage_offset() + like.storage_offset()
        return self.as_strided(*place)

    def write(self: FakeTensor, index: Any, value: Any) -> None:
        found = self[index]
        found.copy_(value) if isinstance(value, torch.Tensor) else found.fill_(value)

    def copy_(self: FakeTensor, value: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not is_played(self):
            return on_cpu_too["copy_"](self, value, non_blocking)
        if value.device != self.device:
            card.reads.append(f"to {self.device.type}")
        value.expand(self.shape)
        return self.fill_(0)

    def numpy(self: FakeTensor, *, force: bool = False) -> np.ndarray:
        card.note("numpy", self)
        return _zeros(self)

    replaced = {"__getitem__": part, "__setitem__": write, "copy_": copy_, "numpy": numpy}
    for name, function in replaced.items():
        patch.setattr(FakeTensor, name, function)
    patch.setattr(FakeTensor, "data_ptr", lambda self: 0)
    patch.setattr(FakeTensor, "tolist", lambda self: self.numpy().tolist())
    patch.setattr(FakeTensor, "__invert__", lambda self: torch.bitwise_not(self))
    patch.setattr(torch, "Generator", lambda device="cpu": real_generator("cpu"))
