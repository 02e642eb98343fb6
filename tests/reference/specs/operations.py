"""What is done to a spec of either library: each operation by name, as a function of the library and the spec."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["OF_ALL", "OF_TREES"]

Operation = Callable[[Any, Any], Any]


def outline(value: Any) -> Any:
    """Tell the shape and dtype of a random value, whose numbers need not agree."""
    if isinstance(value, torch.Tensor):
        return "nested" if value.is_nested else (tuple(value.shape), value.dtype)
    keys = sorted(map(str, value.keys(True))) if hasattr(value, "keys") else ()
    return tuple(value.batch_size), keys


def beyond(spec: Any) -> Any:
    """A value outside of most domains."""
    value = spec.zero()
    if not isinstance(value, torch.Tensor):
        return value.apply(_far)
    return _far(value)


def _far(value: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(value) if value.dtype == torch.bool else value + 50


def edited(spec: Any, edit: Callable[[Any], Any]) -> Any:
    """What an edit returns, and the spec after it."""
    returned = edit(spec)
    return ["itself"] if returned is spec else returned, spec


def put(spec: Any, key: Any, child: Any) -> Any:
    spec[key] = child
    return spec


def drop(spec: Any, key: Any) -> Any:
    del spec[key]
    return spec


def assign(spec: Any, name: str, value: Any) -> Any:
    setattr(spec, name, value)
    return spec


OF_ALL: dict[str, Operation] = {
    "itself": lambda n, s: s,
    "ndim": lambda n, s: (s.ndim, s.ndimension()),
    "zero": lambda n, s: s.zero(),
    "zeros in front": lambda n, s: s.zeros((2,)),
    "zero of no shape": lambda n, s: s.zero(None),
    "one": lambda n, s: s.one(),
    "ones in front": lambda n, s: s.ones((2,)),
    "rand": lambda n, s: outline(s.rand()),
    "rand in front": lambda n, s: outline(s.rand((2, 1))),
    "sample": lambda n, s: outline(s.sample((2,))),
    "a sample is in": lambda n, s: bool(s.is_in(s.rand())),
    "samples are in": lambda n, s: bool(s.is_in(s.rand((2,)))),
    "contains": lambda n, s: bool(s.contains(s.rand())),
    "zero is in": lambda n, s: bool(s.is_in(s.zero())),
    "what lies beyond is in": lambda n, s: bool(s.is_in(beyond(s))),
    "assert_is_in": lambda n, s: s.assert_is_in(s.rand()),
    "project inside": lambda n, s: (lambda v: s.project(v) is v)(s.rand()),
    "project beyond": lambda n, s: bool(s.is_in(s.project(beyond(s)))),
    "type_check": lambda n, s: outline(s.type_check(s.rand()) or s.rand()),
    "expand": lambda n, s: s.expand(2, *s.shape),
    "expand with a tuple": lambda n, s: s.expand((3, *s.shape)),
    "expand to itself": lambda n, s: s.expand(*s.shape),
    "reshape to itself": lambda n, s: s.reshape(s.shape),
    "view": lambda n, s: s.view(1, *s.shape),
    "flatten": lambda n, s: s.expand(2, 3, *s.shape).flatten(0, 1),
    "unflatten": lambda n, s: s.expand(4, *s.shape).unflatten(0, (2, 2)),
    "squeeze": lambda n, s: s.expand(2, 1, *s.shape).squeeze(1),
    "unsqueeze": lambda n, s: s.unsqueeze(0),
    "unbind": lambda n, s: s.expand(2, *s.shape).unbind(0),
    "index": lambda n, s: s.expand(3, *s.shape)[1],
    "negative index": lambda n, s: s.expand(3, *s.shape)[-1],
    "slice": lambda n, s: s.expand(3, *s.shape)[1:],
    "index with a list": lambda n, s: s.expand(3, *s.shape)[[0, 2]],
    "index with a tensor": lambda n, s: s.expand(3, *s.shape)[torch.tensor([2, 0, 0])],
    "new axis": lambda n, s: s[None],
    "index out of range": lambda n, s: s.expand(3, *s.shape)[7],
    "index_select": lambda n, s: torch.index_select(s.expand(3, *s.shape), 0, torch.tensor([2, 0])),
    "index_select out of range": lambda n, s: torch.index_select(
        s.expand(3, *s.shape), 0, torch.tensor([3])
    ),
    "stack": lambda n, s: torch.stack([s, s.clone()]),
    "stack with another class": lambda n, s: torch.stack([s, n.Bounded(-3, 3, s.shape)]),
    "clone": lambda n, s: s.clone(),
    "equals its clone": lambda n, s: (bool(s == s.clone()), bool(s != s.clone())),
    "equals others": lambda n, s: [bool(s == o) for o in (n.Unbounded((7,)), n.Composite(x=None))],
    "equals its deep copy": lambda n, s: bool(copy.deepcopy(s) == s),
    "equals its pickle": lambda n, s: bool(pickle.loads(pickle.dumps(s)) == s),
    "to another dtype": lambda n, s: s.to(torch.float64),
    "to the CPU": lambda n, s: (s.to("cpu"), s.cpu()),
    "to nothing": lambda n, s: s.to(None),
    "to_numpy": lambda n, s: s.to_numpy(s.zero()),
    "encode NumPy data": lambda n, s: s.encode(s.to_numpy(s.rand())) is not None,
    "enumerate": lambda n, s: s.enumerate(),
    "cardinality": lambda n, s: float(s.cardinality()),
    "to_one_hot_spec": lambda n, s: s.to_one_hot_spec(),
    "to_one_hot": lambda n, s: s.to_one_hot(s.project(s.zero())),
    "to_categorical_spec": lambda n, s: s.to_categorical_spec(),
    "to_categorical": lambda n, s: s.to_categorical(s.project(s.zero())),
    "memoized encode": lambda n, s: (s.memoize_encode(), s.encode(s.rand()) is not None)[1],
    "erased memory": lambda n, s: (s.memoize_encode(), s.erase_memoize_cache())[1],
    "clear_device_": lambda n, s: s.clear_device_(),
    "shape assigned": lambda n, s: assign(s, "shape", (2, *s.shape)).zero(),
    "repr": lambda n, s: type(repr(s)),
}

OF_TREES: dict[str, Operation] = {
    "keys": lambda n, s: [list(s.keys(*flags)) for flags in FLAGS],
    "keys that are there": lambda n, s: [k in s.keys(True) for k in ("a", ("a", "b"), "z")],
    "items": lambda n, s: [dict(s.items(*flags)) for flags in FLAGS],
    "values": lambda n, s: [list(s.values(*flags)) for flags in FLAGS],
    "device": lambda n, s: (s.device, s.to("cpu").device, s.clone().clear_device_().device),
    "len": lambda n, s: len(s),
    "iteration": lambda n, s: list(s),
    "get": lambda n, s: [s.get(key, None) for key in ("a", "b", "z")],
    "item": lambda n, s: s["a"],
    "nested item": lambda n, s: s["q", "r"],
    "set": lambda n, s: edited(s, lambda s: s.set("a", n.Unbounded((*s.shape, 3)))),
    "item assigned": lambda n, s: put(s, "a", n.Unbounded((*s.shape, 3))),
    "nested item assigned": lambda n, s: put(s, ("q", "r"), n.Unbounded((*s.shape, 3))),
    "None assigned": lambda n, s: put(s, "z", None),
    "dict assigned": lambda n, s: put(s, "z", {"y": n.Unbounded((*s.shape, 3))}),
    "tree of a prefix assigned": lambda n, s: put(s, "z", n.Composite(y=n.Composite())),
    "wrong shape assigned": lambda n, s: put(s, "z", n.Unbounded((*s.shape[:-1], 9)[:1])),
    "int assigned to": lambda n, s: put(s, 0, n.Unbounded()),
    "attribute as item": lambda n, s: put(s, "shape", n.Unbounded()),
    "deleted": lambda n, s: drop(s, "a"),
    "missing one deleted": lambda n, s: drop(s, "z"),
    "pop": lambda n, s: (s.pop("a"), s),
    "pop a default": lambda n, s: s.pop("z", 3),
    "pop a missing one": lambda n, s: s.pop("z"),
    "empty": lambda n, s: s.empty(),
    "is_empty": lambda n, s: s.is_empty(),
    "update": lambda n, s: s.update({"z": n.Unbounded((*s.shape, 2))}),
    "update with itself": lambda n, s: s.update(s.clone()),
    "lock": lambda n, s: (s.lock_().is_locked, s.locked, s.lock_(recurse=None) is s),
    "unlock": lambda n, s: (s.lock_().unlock_() is s, s.is_locked),
    "assignment while locked": lambda n, s: put(s.lock_(), "z", None),
    "nested assignment while locked": lambda n, s: put(s.lock_(), ("q", "z"), None),
    "clone of a locked one": lambda n, s: s.lock_().clone().is_locked,
    "names": lambda n, s: s.names,
    "names given": lambda n, s: assign(s, "names", list("xyz"[: s.ndim])),
    "names refined": lambda n, s: s.refine_names(*"xyz"[: s.ndim]),
    "batch_size": lambda n, s: tuple(s.batch_size),
    "a sample written": lambda n, s: outline(s.rand_update(s.zero())),
    "zeros written": lambda n, s: s.zeros_update(s.one()),
    "ones written": lambda n, s: s.ones_update(s.zero()),
    "encode a dict": lambda n, s: outline(s.encode(dict(s.rand().items()))),
    "what is beyond is changed in place": lambda n, s: (lambda v: s.project(v) is v)(beyond(s)),
}

FLAGS = ((), (True,), (True, True), (False, True))
