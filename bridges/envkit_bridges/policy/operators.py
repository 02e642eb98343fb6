"""How one torch operator is written for array libraries: the form of an entry, and what it may rely on.

This module keeps torch's dtypes. It knows no operator.

Conventions
    name     ``packet.overload`` of core ATen, e.g. "add.Tensor"; "exp" means "exp.default".
    rule     how an operator is computed in any library: the name of a function of its namespace, or a
             function whose first argument is that namespace.
    compute  takes the operator's own arguments, tensors as arrays, sizes as ints; arguments that say
             where or how a tensor is stored are removed before.
    like     what the operator gave torch: a tensor (with or without values), a number, or a list.
    dtypes   those of torch, as far as the library has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["STORAGE", "Library", "Op", "Rule", "bound", "by_name", "namespace", "rules"]

STORAGE = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"})
"""Arguments of operators that say where or how a tensor is stored."""
HALVES = frozenset({torch.float16, torch.bfloat16})
"""Dtypes that torch stores and does not compute in: sums and products of halves leave their range."""


@dataclass(frozen=True)
class Rule:
    """How an operator is computed in any library.

    Attributes:
        compute: see the module.
        casts: cast operands to the dtype of the result first, as torch promotes them; halves are computed in
            float32, as in torch's kernels.
    """

    compute: str | Callable[..., Any]
    casts: bool = False


@dataclass(frozen=True)
class Library:
    """An array library that operators are computed in.

    Attributes:
        name: for messages.
        xp: its namespace, see `namespace`.
        array: the type of its arrays.
        dtype_of: gives the dtype that stands for one of torch's.
    """

    name: str
    xp: SimpleNamespace
    array: type | tuple[type, ...]
    dtype_of: Callable[[torch.dtype], Any]


@dataclass(frozen=True)
class Op:
    """One operator in one library.

    Attributes:
        compute: the function.
        library: what it computes with.
        casts: see `Rule`.
        draws: takes a source of random numbers before its other arguments.
    """

    compute: Callable[..., Any]
    library: Library
    casts: bool = False
    draws: bool = False

    def apply(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], like: Any, source: Any = None
    ) -> Any:
        """Compute, with the dtypes that torch gives operands and results.

        Args:
            args, kwargs: those of the torch operator, tensors as arrays.
            like: see the module.
            source: for an operator that draws.
        """
        given = (tuple(args), {name: v for name, v in kwargs.items() if name not in STORAGE})
        if (dtype := self.operand_dtype(like)) is not None:
            given = self._cast(given, dtype)
        args, kwargs = given
        value = self.compute(*((source,) if self.draws else ()), *args, **kwargs)
        return self._conformed(value, like)

    def operand_dtype(self, like: Any) -> Any:
        """Say what operands are cast to; None: they stay as they are."""
        if not self.casts:
            return None
        return self.library.dtype_of(torch.float32 if like.dtype in HALVES else like.dtype)

    def _cast(self, tree: Any, dtype: Any) -> Any:
        is_array = self.library.array
        return tree_map(
            lambda leaf: leaf.astype(dtype) if isinstance(leaf, is_array) else leaf, tree
        )

    def _conformed(self, value: Any, like: Any) -> Any:
        if isinstance(like, torch.Tensor):
            return self.library.xp.asarray(value, self.library.dtype_of(like.dtype))
        if isinstance(like, tuple | list) and isinstance(value, tuple | list):
            return [self._conformed(*pair) for pair in zip(value, like, strict=False)]
        return value


def namespace(library: ModuleType, **more: Callable[..., Any]) -> SimpleNamespace:
    """Give the functions of a library that is written like NumPy, and ``more`` that rules ask for.

    These are what libraries spell differently, or have in one only:
        argsort(x, axis, descending): stable; NaN is the greatest.
        rsqrt, sigmoid, erf, erfinv, lgamma, digamma(x), matmul(x, y): in the precision of the operands.
        cummax, cummin, logcumsumexp(x, axis).
        picked(x, index, axis): entries along an axis, as `take`.
        gathered(x, index, axis): as `take_along_axis`.
        indexed(x, places): ``x[places]``.
        put(x, places, values, how): a copy with ``values`` there; how is "set", "add", "multiply",
            "max" or "min".
    Of these last four the places may be out of range, and what happens then is the library's: see where
    it is described.
    """
    return SimpleNamespace(**{**vars(library), **more})


def rules(entries: dict[str, str | Callable[..., Any]], *, casts: bool = False) -> dict[str, Rule]:
    """Make rules of one sort; a key may hold several names, separated by spaces."""
    return {name: Rule(compute, casts) for name, compute in by_name(entries).items()}


def by_name(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Part the keys of a table into full names of operators."""
    return {
        name if "." in name else f"{name}.default": entry
        for names, entry in entries.items()
        for name in names.split()
    }


def bound(table: Mapping[str, Rule], library: Library) -> dict[str, Op]:
    """Write rules in one library."""
    return {
        name: Op(_in(rule.compute, library.xp), library, rule.casts) for name, rule in table.items()
    }


def _in(compute: str | Callable[..., Any], xp: SimpleNamespace) -> Callable[..., Any]:
    return getattr(xp, compute) if isinstance(compute, str) else partial(compute, xp)
