"""NumPy as an array library that operators are computed in.

An index out of range raises, as in torch. What draws is torch's own operator, called on the memory of the
arrays: its generator, its numbers. So is what NumPy has no function for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.fx import Node
from torch.utils._pytree import tree_map

from envkit_bridges.policy.core_aten import RULES, Library, Op, bound, in_range, namespace

__all__ = ["NUMPY", "table_for"]


def _by_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: function(torch.from_numpy(np.asarray(x, order="C"))).numpy()


def _argsort(x: Any, axis: int, descending: bool) -> Any:
    if not descending:
        return np.argsort(x, axis, kind="stable")
    back = np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
    return x.shape[axis] - 1 - back


def _picked(x: Any, index: Any, axis: int) -> Any:
    return np.take(x, in_range(np, index, x.shape[axis]), axis)


def _gathered(x: Any, index: Any, axis: int) -> Any:
    return np.take_along_axis(x, in_range(np, index, x.shape[axis]), axis)


_IN_PLACE = {"add": np.add, "multiply": np.multiply, "max": np.maximum, "min": np.minimum}


def _put(x: Any, places: tuple[Any, ...], values: Any, how: str) -> Any:
    out = np.array(x)
    if how == "set":
        out[places] = values
    else:
        _IN_PLACE[how].at(out, places, values)
    return out


def _dtype_of(dtype: torch.dtype) -> Any:
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError as error:
        raise NotImplementedError(f"NumPy has no {dtype}") from error


NUMPY = Library(
    "NumPy",
    namespace(
        np,
        rsqrt=lambda x: 1 / np.sqrt(x),
        sigmoid=lambda x: 1 / (1 + np.exp(-x)),
        erf=_by_torch(torch.erf),
        erfinv=_by_torch(torch.erfinv),
        lgamma=_by_torch(torch.lgamma),
        digamma=_by_torch(torch.digamma),
        argsort=_argsort,
        cummax=np.maximum.accumulate,
        cummin=np.minimum.accumulate,
        logcumsumexp=np.logaddexp.accumulate,
        picked=_picked,
        gathered=_gathered,
        indexed=lambda x, places: x[places],
        put=_put,
    ),
    (np.ndarray, np.generic),
    _dtype_of,
)

_COVERED = bound(RULES, NUMPY)


def table_for(nodes: Iterable[Node]) -> dict[str, Op]:
    """Give the operators that are covered: those of every library, and what draws among ``nodes``."""
    drawing = {
        str(node.target).removeprefix("aten."): Op(_drawn_by(node.target), NUMPY, draws=True)
        for node in nodes
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    }
    return {**_COVERED, **drawing}


def _drawn_by(operator: Any) -> Callable[..., Any]:
    """Make a function of arrays of an operator that draws from torch's generator."""

    def drawn(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(given, torch.Generator) for given in (*args, *kwargs.values())):
            raise NotImplementedError(
                "a generator of the module's own is not covered; leave it out"
            )
        args, kwargs = tree_map(_as_tensor, (args, kwargs))
        return tree_map(_as_array, operator(*args, **kwargs))

    return drawn


def _as_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    return value


def _as_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else value
