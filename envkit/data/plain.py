"""Values of a state dict as tensors, numbers, strings, None, lists and dicts, and back to the bit.

``torch.load(..., weights_only=True)`` reads these and runs no code. Arrays and scalars of NumPy, tuples, slices,
bytes, torch's generators and TensorDicts become dicts that say what they were. This module knows neither envs
nor files.

Conventions
    plain   None, bool, int, float, str, a tensor, and lists and dicts (by str) of plain values.
    kind    what a dict stands for, under the key ``"__kind__"``.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types, and what is given is not known)
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
)

from envkit.errors import ResumeError

_KIND = "__kind__"


def plain(value: object, name: str = "the value") -> Any:
    """Return a value in plain form; tensors and arrays are copied.

    Args:
        value: a plain value; an array or scalar of NumPy, a tuple, a slice, bytes, a torch generator, a
            TensorDict; lists, dicts and tuples of these.
        name: what it is, for messages.

    Raises:
        ResumeError: it is, or holds, something else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        held = value.detach()
        # torch 2.15 does not read nested tensors with weights_only
        is_ragged = held.is_nested and held.layout is torch.strided
        return _ragged(held, name) if is_ragged else held.clone()
    for kind, encode in _ENCODERS:
        if isinstance(value, kind):
            return encode(value, name)
    raise ResumeError(
        f"{name} is {value!r}, of type {type(value).__name__}, which cannot be saved as tensors, numbers "
        "and strings. Save what it is made of, and build it again from that."
    )


def from_plain(value: object) -> Any:
    """Undo `plain`; tensors and arrays are copied, generators are new ones."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list):
        return [from_plain(part) for part in value]
    if not isinstance(value, dict):
        return value
    if _KIND in value:
        return _DECODERS[value[_KIND]](value)
    return {key: from_plain(part) for key, part in value.items()}


def _list(value: Any, name: str) -> list[Any]:
    return [plain(part, f"{name}[{number}]") for number, part in enumerate(value)]


def _ragged(value: torch.Tensor, name: str) -> dict[str, Any]:
    dtype = str(value.dtype).removeprefix("torch.")
    return {_KIND: "nested", "dtype": dtype, "parts": _list(value.unbind(), name)}


def _read_ragged(value: Mapping[str, Any]) -> torch.Tensor:
    return torch.nested.nested_tensor(value["parts"], dtype=getattr(torch, value["dtype"]))


def _dict(value: Mapping[Any, Any], name: str) -> dict[str, Any]:
    if all(type(key) is str for key in value) and _KIND not in value:
        return {key: plain(part, f"{name}[{key!r}]") for key, part in value.items()}
    return {_KIND: "items", "items": [_list(item, name) for item in value.items()]}


def _array(value: np.ndarray, name: str) -> dict[str, Any]:
    form = {"dtype": value.dtype.str, "shape": list(value.shape)}
    if value.dtype.kind in "OUS":
        return {_KIND: "objects", **form, "value": _list(value.ravel().tolist(), name)}
    if value.dtype.kind not in "biufc" or value.dtype.itemsize > 16:
        raise ResumeError(
            f"{name} is an array of dtype {value.dtype}, which no tensor can hold. Save it in another form."
        )
    held = np.frombuffer(value.astype(value.dtype.newbyteorder("=")).tobytes(), np.uint8).copy()
    return {_KIND: "array", **form, "value": torch.from_numpy(held)}


def _read_array(value: Mapping[str, Any]) -> np.ndarray:
    dtype = np.dtype(value["dtype"])
    native = np.frombuffer(value["value"].numpy().tobytes(), dtype.newbyteorder("="))
    return native.astype(dtype).reshape(value["shape"])


def _read_objects(value: Mapping[str, Any]) -> np.ndarray:
    found = np.empty(len(value["value"]), np.dtype(value["dtype"]))
    for index, part in enumerate(value["value"]):
        found[index] = from_plain(part)
    return found.reshape(value["shape"])


def _generator(value: torch.Generator, name: str) -> dict[str, Any]:
    return {_KIND: "generator", "device": str(value.device), "value": value.get_state()}


def _read_generator(value: Mapping[str, Any]) -> torch.Generator:
    generator = torch.Generator(value["device"])
    generator.set_state(value["value"].cpu())
    return generator


# --------------------------------------------------------------------------------------- TensorDicts


def _tensordict(td: TensorDictBase, name: str) -> dict[str, Any]:
    size = list(td.batch_size)
    if is_non_tensor(td):
        if isinstance(td, NonTensorStack):
            return _stack(td, name, "non_tensor_stack")
        return {_KIND: "non_tensor", "batch_size": size, "value": plain(td.data, name)}
    if isinstance(td, LazyStackedTensorDict):
        return _stack(td, name, "lazy_stack")
    return {
        _KIND: "tensordict",
        "batch_size": size,
        "names": list(td.names),
        "device": None if td.device is None else str(td.device),
        "entries": {key: plain(td.get(key), f"{name}[{key!r}]") for key in td.keys()},
    }


def _stack(td: Any, name: str, kind: str) -> dict[str, Any]:
    parts = td.unbind(td.stack_dim)
    return {_KIND: kind, "dim": td.stack_dim, "parts": _list(parts, name), "names": list(td.names)}


def _read_tensordict(value: Mapping[str, Any]) -> TensorDict:
    entries = {key: from_plain(part) for key, part in value["entries"].items()}
    names = value["names"] if any(value["names"]) else None
    return TensorDict(entries, value["batch_size"], names=names, device=value["device"])


def _read_stack(value: Mapping[str, Any]) -> Any:
    cls: Any = NonTensorStack if value[_KIND] == "non_tensor_stack" else LazyStackedTensorDict
    found = cls(*(from_plain(part) for part in value["parts"]), stack_dim=value["dim"])
    if any(value["names"]):
        found.names = value["names"]
    return found


_ENCODERS: list[tuple[Any, Callable[[Any, str], Any]]] = [
    (TensorDictBase, _tensordict),
    (NonTensorData, _tensordict),
    (np.ndarray, _array),
    (np.generic, lambda value, name: {**_array(np.asarray(value), name), _KIND: "scalar"}),
    (tuple, lambda value, name: {_KIND: "tuple", "value": _list(value, name)}),
    (list, _list),
    (bytes, lambda value, name: {_KIND: "bytes", "value": list(value)}),
    (slice, lambda v, name: {_KIND: "slice", "value": _list((v.start, v.stop, v.step), name)}),
    (torch.Generator, _generator),
    (Mapping, _dict),
    (bool, lambda value, name: bool(value)),
    (int, lambda value, name: int(value)),
    (float, lambda value, name: float(value)),
    (str, lambda value, name: str(value)),
]

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "array": _read_array,
    "objects": _read_objects,
    "nested": _read_ragged,
    "scalar": lambda value: _read_array(value)[()],
    "tuple": lambda value: tuple(from_plain(value["value"])),
    "bytes": lambda value: bytes(value["value"]),
    "slice": lambda value: slice(*value["value"]),
    "generator": _read_generator,
    "items": lambda value: {from_plain(key): from_plain(part) for key, part in value["items"]},
    "tensordict": _read_tensordict,
    "lazy_stack": _read_stack,
    "non_tensor_stack": _read_stack,
    "non_tensor": lambda value: NonTensorData(
        from_plain(value["value"]), batch_size=value["batch_size"]
    ),
}
