"""Tensors of unsigned integers in messages to and from workers.

torch cannot unpickle tensors of uint16, uint32 and uint64 that it has pickled itself, alone or in a spec or
a TensorDict. In messages they travel as arrays of the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from envkit.transport.by_value import pickle_with

__all__: list[str] = []

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def _reduced(tensor: torch.Tensor) -> Any:
    if tensor.dtype in _UNSIGNED:
        return _tensor_on, (tensor.numpy(force=True), tensor.device)
    return tensor.__reduce_ex__(2)


def _tensor_on(array: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


pickle_with(torch.Tensor, _reduced)
