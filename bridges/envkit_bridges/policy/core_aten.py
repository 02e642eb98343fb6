"""The core ATen operators, each written once for every array library.

`RULES` holds them all; `bound` writes them in one library. They are sorted by what they do: element by element, making
tensors, moving elements, going along axes, layers. `Op` keeps torch's dtypes. Where torch raises since an index is out of
range, the library says what happens: NumPy raises too. Integers are 32 bits in JAX without x64: a number that does not
fit is an error here, where it enters.

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
from itertools import accumulate
from math import pi
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from envkit.arrays.elementwise import Array

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
        self, args: Sequence[Any], kwargs: Mapping[str, Any], like: object, source: object = None
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
        """Return what operands are cast to; None: they stay as they are."""
        if not self.casts:
            return None
        return self.library.dtype_of(torch.float32 if like.dtype in HALVES else like.dtype)

    def _cast(self, tree: object, dtype: object) -> Any:
        is_array = self.library.array
        return tree_map(
            lambda leaf: leaf.astype(dtype) if isinstance(leaf, is_array) else leaf, tree
        )

    def _conformed(self, value: object, like: object) -> Any:
        if isinstance(like, torch.Tensor):
            return self.library.xp.asarray(value, self.library.dtype_of(like.dtype))
        if isinstance(like, tuple | list) and isinstance(value, tuple | list):
            return [self._conformed(*pair) for pair in zip(value, like, strict=False)]
        return value


def namespace(library: ModuleType, **more: Callable[..., Any]) -> SimpleNamespace:
    """Return the functions of a library that is written like NumPy, and ``more`` that rules ask for.

    These are spelt differently by libraries, or exist in one only.
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


def _same(names: str) -> dict[str, str]:
    """List operators that the library's functions compute under the same name."""
    return {name: name for name in names.split()}


def bound(table: Mapping[str, Rule], library: Library) -> dict[str, Op]:
    """Write rules in one library."""
    operators = {}
    for name, rule in table.items():
        name_or_function = rule.compute
        compute = (
            getattr(library.xp, name_or_function)
            if isinstance(name_or_function, str)
            else partial(name_or_function, library.xp)
        )
        operators[name] = Op(compute, library, rule.casts)
    return operators


def _add(xp: SimpleNamespace, x: Array, y: Array, *, alpha: Array = 1) -> Array:
    return x + (y if alpha == 1 else alpha * y)


def _sub(xp: SimpleNamespace, x: Array, y: Array, *, alpha: Array = 1) -> Array:
    return x - (y if alpha == 1 else alpha * y)


def _div(xp: SimpleNamespace, x: Array, y: Array, *, rounding_mode: str | None = None) -> Array:
    if rounding_mode == "floor":
        return xp.floor_divide(x, y)
    if rounding_mode == "trunc":
        if xp.issubdtype(x.dtype, xp.integer):
            return xp.sign(x) * xp.sign(y) * (xp.abs(x) // xp.abs(y))
        return xp.trunc(xp.divide(x, y))
    return xp.divide(x, y)


def _pow(xp: SimpleNamespace, x: Array, exponent: Array) -> Array:
    whole = isinstance(exponent, int | float) and float(exponent).is_integer()
    if whole and abs(exponent) <= 16 and not isinstance(x, int | float):
        return x ** int(exponent)
    if isinstance(exponent, float) and abs(exponent) == 0.5:  # a power of -inf and -0 differs
        return xp.sqrt(x) if exponent > 0 else 1 / xp.sqrt(x)
    return xp.power(x, exponent)


def _clamp(xp: SimpleNamespace, x: Array, low: Array = None, high: Array = None) -> Array:
    if low is not None:
        x = xp.maximum(x, low)
    return x if high is None else xp.minimum(x, high)


def _gelu(xp: SimpleNamespace, x: Array, *, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return 0.5 * x * (1 + xp.tanh((2 / pi) ** 0.5 * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + xp.erf(x * 0.5**0.5))


_ARITHMETIC = rules(
    {
        "add.Tensor add.Scalar": _add,
        "sub.Tensor sub.Scalar": _sub,
        "mul.Tensor mul.Scalar": "multiply",
        "div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode": _div,
        "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar": _pow,
        "remainder.Tensor remainder.Scalar": "remainder",
        "fmod.Tensor fmod.Scalar": "fmod",
        **_same(
            "maximum minimum hypot abs reciprocal sqrt rsqrt exp expm1 log log1p log2 log10 sin cos tan sinh cosh "
            "tanh erf erfinv lgamma digamma floor ceil trunc sigmoid"
        ),
        **{f"a{name}": f"arc{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
        "atan2": "arctan2",
        "neg": "negative",
        "addcmul": lambda xp, x, one, two, *, value=1: x + value * one * two,
        "addcdiv": lambda xp, x, one, two, *, value=1: x + value * one / two,
        "clamp clamp.Tensor": _clamp,
        # of NaN it is 0 in torch
        "sign": lambda xp, x: xp.where(x != x, xp.zeros_like(x), xp.sign(x)),
        "round round.decimals": lambda xp, x, *, decimals=0: xp.round(x, decimals),
        "relu": lambda xp, x: xp.maximum(x, 0),
        "elu": lambda xp, x, alpha=1.0, scale=1.0, input_scale=1.0: (
            scale * xp.where(x > 0, x, alpha * xp.expm1(xp.minimum(x, 0) * input_scale))
        ),
        "gelu": _gelu,
        "leaky_relu": lambda xp, x, slope=0.01: xp.where(x > 0, x, slope * x),
        "hardtanh": lambda xp, x, low=-1.0, high=1.0: xp.clip(x, low, high),
        "copy": lambda xp, destination, source: xp.broadcast_to(source, destination.shape),
    },
    casts=True,
)

_TESTS = rules(
    {
        "eq.Tensor eq.Scalar": "equal",
        "ne.Tensor ne.Scalar": "not_equal",
        "lt.Tensor lt.Scalar": "less",
        "le.Tensor le.Scalar": "less_equal",
        "gt.Tensor gt.Scalar": "greater",
        "ge.Tensor ge.Scalar": "greater_equal",
        **_same("isnan isinf logical_and logical_or logical_xor logical_not bitwise_not"),
        **{
            f"{name}.Tensor {name}.Scalar": name
            for name in ("bitwise_and", "bitwise_or", "bitwise_xor")
        },
    }
)

_OTHERS = rules(
    {
        "where.self where.ScalarOther where.ScalarSelf where.Scalar": "where",
        "_to_copy clone alias lift_fresh_copy": lambda xp, x: x,
    }
)

ELEMENTWISE = {**_ARITHMETIC, **_TESTS, **_OTHERS}


def in_width(xp: ModuleType | SimpleNamespace, value: object) -> Any:
    """Return a number as it is.

    Raises:
        OverflowError: an integer that the library cannot hold.
    """
    widest = np.iinfo(xp.zeros((), int).dtype)
    if isinstance(value, int) and not widest.min <= value <= widest.max:
        raise OverflowError(
            f"{value} does not fit into {widest.dtype}, the widest integer there is here"
        )
    return value


MAKING = rules(
    {
        "full": lambda xp, size, value: xp.full(tuple(size), in_width(xp, value)),
        "full_like": lambda xp, x, value: xp.full(x.shape, in_width(xp, value)),
        "scalar_tensor": lambda xp, value: xp.asarray(in_width(xp, value)),
        "arange.start_step": lambda xp, start, end, step=1: xp.arange(
            *(in_width(xp, number) for number in (start, end, step))
        ),
        "empty.memory_format": lambda xp, size: xp.zeros(tuple(size)),
        "empty_permuted": lambda xp, size, layout: xp.zeros(tuple(size)),
    }
)


def in_range(xp: ModuleType | SimpleNamespace, index: Array, size: int) -> Array:
    """Replace a negative index by one beyond the end: where libraries would count from the end, torch raises."""
    return xp.where(index < 0, size, index)


def _expand(
    xp: SimpleNamespace, x: Array, sizes: Sequence[int], *, implicit: bool = False
) -> Array:
    new = len(sizes) - x.ndim
    kept = (1,) * new + x.shape
    return xp.broadcast_to(
        x, [had if size == -1 else size for size, had in zip(sizes, kept, strict=True)]
    )


def _squeeze(xp: SimpleNamespace, x: Array, dims: int | Sequence[int] | None = None) -> Array:
    if dims is None:
        dims = range(x.ndim)
    elif isinstance(dims, int):
        dims = [dims]
    return xp.squeeze(x, tuple(dim for dim in dims if x.ndim and x.shape[dim] == 1))


def _cat(xp: SimpleNamespace, tensors: Sequence[Any], dim: int = 0) -> Array:
    parts = [part for part in tensors if part.shape != (0,)]  # torch ignores these of any rank
    return xp.concatenate(parts or tensors, dim if parts else 0)


def _split(xp: SimpleNamespace, x: Array, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    ends = list(accumulate(sizes))
    pairs = zip(ends, sizes, strict=True)
    return [x[_span(x, dim, end - size, end, 1)] for end, size in pairs]


def _span(
    x: Array, dim: int, start: int | None, end: int | None, step: int
) -> tuple[slice | int, ...]:
    return (slice(None),) * (dim % x.ndim) + (slice(start, end, step),)


def _at(x: Array, dim: int, index: int) -> tuple[slice | int, ...]:
    return (slice(None),) * (dim % x.ndim) + (index,)


def _places(indices: Sequence[Any]) -> tuple[Any, ...]:
    if any(index is not None and index.dtype == bool for index in indices):
        raise NotImplementedError(
            "the mask of an index decides how many elements there are; use torch.where"
        )
    return tuple(slice(None) if index is None else index for index in indices)


def _index_put(
    xp: SimpleNamespace, x: Array, indices: Sequence[Any], values: Array, accumulate: bool = False
) -> Array:
    first = indices[0]
    if first is not None and first.dtype == bool and len(indices) == 1 and not accumulate:
        if values.size != 1:
            raise NotImplementedError(
                "values assigned through a mask must be one number; use torch.where"
            )
        mask = first.reshape(first.shape + (1,) * (x.ndim - first.ndim))
        return xp.where(mask, values.reshape(()), x)
    return xp.put(x, _places(indices), values, "add" if accumulate else "set")


def _gather(
    xp: SimpleNamespace, x: Array, dim: int, index: Array, *, sparse_grad: bool = False
) -> Array:
    if x.ndim == 0:
        return xp.broadcast_to(x, index.shape)
    dim %= x.ndim
    span = tuple(
        slice(None) if axis == dim else slice(size) for axis, size in enumerate(index.shape)
    )
    return xp.gathered(x[span], index, dim)


_REDUCTIONS: dict[str | None, str] = {  # in the words of `put`
    None: "set",
    "add": "add",
    "sum": "add",
    "mean": "add",
    "multiply": "multiply",
    "prod": "multiply",
    "amax": "max",
    "amin": "min",
}


def _scatter(
    xp: SimpleNamespace,
    x: Array,
    dim: int,
    index: Array,
    source: Array,
    *,
    reduce: str | None = None,
) -> Array:
    if x.ndim == 0:
        source = xp.reshape(source, -1)
        return _scatter(xp, x[None], 0, index.reshape(-1), source, reduce=reduce)[0]
    grid = list(xp.indices(index.shape, sparse=True))
    grid[dim % x.ndim] = in_range(xp, index, x.shape[dim])
    if getattr(source, "ndim", 0):
        source = source[tuple(slice(size) for size in index.shape)]
    return xp.put(x, tuple(grid), source, _REDUCTIONS[reduce])


def _scatter_reduce(
    xp: SimpleNamespace,
    x: Array,
    dim: int,
    index: Array,
    source: Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> Array:
    if not include_self:  # what is written to begins as if nothing were there
        x = _scatter(xp, x, dim, index, _neutral(xp, _REDUCTIONS[reduce], x.dtype))
    total = _scatter(xp, x, dim, index, source, reduce=reduce)
    if reduce != "mean":
        return total
    ones = xp.ones(index.shape, total.dtype)
    counts = _scatter(xp, xp.full_like(total, include_self), dim, index, ones, reduce="add")
    whole = xp.issubdtype(total.dtype, xp.integer)
    return (xp.floor_divide if whole else xp.divide)(total, xp.maximum(counts, 1))


def _neutral(xp: SimpleNamespace, reduction: str, dtype: Array) -> Array:
    """Return the number that a reduction leaves all others unchanged with."""
    if reduction in ("add", "multiply"):
        return xp.asarray(reduction == "multiply", dtype)
    if dtype == bool:
        return xp.asarray(reduction == "min")
    if xp.issubdtype(dtype, xp.integer):
        range_ = xp.iinfo(dtype)
        return xp.asarray(range_.min if reduction == "max" else range_.max, dtype)
    return xp.asarray(-xp.inf if reduction == "max" else xp.inf, dtype)


def _pad(xp: SimpleNamespace, x: Array, pad: Sequence[int], value: Array = 0) -> Array:
    """Add what is positive and cut what is negative."""
    pairs = [(pad[at], pad[at + 1]) for at in range(0, len(pad), 2)]  # last axis first
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    cut = tuple(slice(max(-low, 0), -max(-high, 0) or None) for low, high in pairs)
    widths = [(max(low, 0), max(high, 0)) for low, high in pairs]
    return xp.pad(x[cut], widths, constant_values=value)


def _unfold(xp: SimpleNamespace, x: Array, dim: int, size: int, step: int) -> Array:
    dim %= x.ndim
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    windows = xp.take(x, starts[:, None] + np.arange(size), axis=dim)
    return xp.moveaxis(windows, dim + 1, -1)


SHAPING = {
    **rules(
        {
            "view reshape _unsafe_view": lambda xp, x, sizes: xp.reshape(x, tuple(sizes)),
            "permute": lambda xp, x, dims: xp.transpose(x, tuple(dims)),
            "expand": _expand,
            "squeeze squeeze.dim squeeze.dims": _squeeze,
            "unsqueeze": "expand_dims",
            "split_with_sizes": _split,
            "slice.Tensor": lambda xp, x, dim=0, start=None, end=None, step=1: x[
                _span(x, dim, start, end, step)
            ],
            "select.int": lambda xp, x, dim, index: x[_at(x, dim, index)],
            "index.Tensor": lambda xp, x, indices: xp.indexed(x, _places(indices)),
            "index_select": lambda xp, x, dim, index: xp.picked(x, index, dim) if x.ndim else x,
            "gather": _gather,
            "flip": "flip",
            "repeat": lambda xp, x, repeats: xp.tile(x, tuple(repeats)),
            "constant_pad_nd": _pad,
            "unfold": _unfold,
            "index_put": _index_put,
            "scatter.src scatter.value scatter.reduce scatter.value_reduce": _scatter,
            "scatter_add": partial(_scatter, reduce="add"),
            "scatter_reduce.two": _scatter_reduce,
            "diagonal": lambda xp, x, offset=0, dim1=0, dim2=1: xp.diagonal(x, offset, dim1, dim2),
            "slice_scatter": lambda xp, x, source, dim=0, start=None, end=None, step=1: xp.put(
                x, _span(x, dim, start, end, step), source, "set"
            ),
            "select_scatter": lambda xp, x, source, dim, index: xp.put(
                x, _at(x, dim, index), source, "set"
            ),
            "sym_size.int": lambda xp, x, dim: x.shape[dim],
        }
    ),
    **rules({"cat": _cat}, casts=True),
}


Axes = int | Sequence[int] | None


def _axes(dims: Axes) -> int | tuple[int, ...] | None:
    """Read torch's axes: none at all mean all of them."""
    if dims is None or isinstance(dims, int):
        return dims
    return tuple(dims) or None


def _along(reduce: str) -> Callable[..., Any]:
    def over(xp: SimpleNamespace, x: Array, dims: Axes = None, keepdim: bool = False) -> Array:
        return getattr(xp, reduce)(x, axis=_axes(dims), keepdims=keepdim)

    return over


def _extreme(value: str, place: str) -> Callable[..., Any]:
    def over(xp: SimpleNamespace, x: Array, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        best = getattr(xp, value)(x, axis=dim, keepdims=keepdim)
        return best, getattr(xp, place)(x, axis=dim, keepdims=keepdim)

    return over


def _var(
    xp: SimpleNamespace,
    x: Array,
    dims: Axes = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Array:
    ddof = 1 if correction is None else correction
    return xp.var(x, axis=_axes(dims), ddof=ddof, keepdims=keepdim)  # type: ignore[arg-type]


def _var_mean(
    xp: SimpleNamespace, x: Array, dims: Axes = None, *, keepdim: bool = False, **options: Any
) -> tuple[Any, Any]:
    mean = xp.mean(x, axis=_axes(dims), keepdims=keepdim)
    return _var(xp, x, dims, keepdim=keepdim, **options), mean


def _vector_norm(
    xp: SimpleNamespace, x: Array, order: float = 2, dims: Axes = None, keepdim: bool = False
) -> Array:
    if dims is None:
        x, dims = (x.reshape(-1), 0) if not keepdim else (x, tuple(range(x.ndim)))
    axes = _axes(dims)
    size = xp.abs(x)
    if order == float("inf"):
        return size.max(axis=axes, keepdims=keepdim)
    if order == float("-inf"):
        return size.min(axis=axes, keepdims=keepdim)
    if order == 0:
        return (x != 0).sum(axis=axes, keepdims=keepdim)
    if order == 2:
        return xp.sqrt((size * size).sum(axis=axes, keepdims=keepdim))
    return (size**order).sum(axis=axes, keepdims=keepdim) ** (1 / order)


def _sort(
    xp: SimpleNamespace,
    x: Array,
    dim: int = -1,
    descending: bool = False,
    *,
    stable: bool | None = True,
) -> Array:
    order = xp.argsort(x, dim, descending)
    return xp.take_along_axis(x, order, dim), order


def _topk(
    xp: SimpleNamespace, x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Array:
    values, order = _sort(xp, x, dim, largest)
    first = (slice(None),) * (dim % x.ndim) + (slice(k),)
    return values[first], order[first]


def _median(xp: SimpleNamespace, x: Array, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower one of the two in the middle, as torch has it; the first NaN if there is one."""
    value, order = _kth_value(xp, x, (_size(x, dim) + 1) // 2, dim, keepdim)
    if not xp.issubdtype(x.dtype, xp.inexact) or x.ndim == 0:
        return value, order
    missing = xp.isnan(x)
    lost, first = missing.any(dim, keepdims=keepdim), missing.argmax(dim, keepdims=keepdim)
    return xp.where(lost, xp.nan, value), xp.where(lost, first, order)


def _size(x: Array, dim: int) -> int:
    return x.shape[dim] if x.ndim else 1


def _kth_value(
    xp: SimpleNamespace, x: Array, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[Any, Any]:
    if x.ndim == 0:
        return x, xp.zeros((), int)
    place = slice(k - 1, k) if keepdim else k - 1
    value, order = (part[(slice(None),) * (dim % x.ndim) + (place,)] for part in _sort(xp, x, dim))
    return value, order


def _running(extreme: str) -> Callable[..., Any]:
    """Compute a running maximum or minimum along an axis; its index is that of the last of equal ones, as in torch."""

    def over(xp: SimpleNamespace, x: Array, dim: int) -> tuple[Any, Any]:
        if x.ndim == 0:
            return x, xp.zeros((), int)
        dim %= x.ndim
        ordered = x.astype(xp.uint8) if x.dtype == bool else x
        best = getattr(xp, extreme)(ordered, dim)
        size = x.shape[dim]
        places = xp.arange(size).reshape(size, *(1,) * (x.ndim - dim - 1))
        is_best = (ordered == best) | (ordered != ordered)  # NaN stays the best
        return best, xp.cummax(xp.where(is_best, places, -1), dim)

    return over


def _search(
    xp: SimpleNamespace,
    ordered: Array,
    values: Array,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array = None,
) -> Array:
    """Halve the span step by step as torch does, so that they agree on NaN and on what is not sorted."""
    if sorter is not None:
        ordered = xp.take_along_axis(ordered, sorter, -1)
    values = xp.asarray(values)
    size = ordered.shape[-1]
    low = xp.zeros(values.shape, int)
    high = xp.full(values.shape, size)
    for _ in range(size.bit_length()):
        middle = (low + high) // 2
        places = xp.minimum(middle, size - 1)
        found = ordered[places] if ordered.ndim == 1 else xp.take_along_axis(ordered, places, -1)
        stays = found > values if right or side == "right" else found >= values
        goes_on = low < high
        high = xp.where(goes_on & stays, middle, high)
        low = xp.where(goes_on & ~stays, middle + 1, low)
    return low


REDUCING = {
    **rules(
        {
            "sum sum.dim_IntList": _along("sum"),
            "mean mean.dim": _along("mean"),
            "prod prod.dim_int": _along("prod"),
            "cumsum": lambda xp, x, dim: xp.cumsum(x, axis=dim),
            "cumprod": lambda xp, x, dim: xp.cumprod(x, axis=dim),
            "logcumsumexp": lambda xp, x, dim: xp.logcumsumexp(x, dim % x.ndim) if x.ndim else x,
            "var.correction": _var,
            "linalg_vector_norm": _vector_norm,
            "amax max": _along("max"),
            "amin min": _along("min"),
        },
        casts=True,
    ),
    **rules(
        {
            "any any.dim any.dims": _along("any"),
            "all all.dim all.dims": _along("all"),
            "argmax": _along("argmax"),
            "argmin": _along("argmin"),
            "max.dim": _extreme("max", "argmax"),
            "min.dim": _extreme("min", "argmin"),
            "var_mean.correction": _var_mean,
            "sort sort.stable": _sort,
            "topk": _topk,
            "median.dim": _median,
            "median": lambda xp, x: _median(xp, x.reshape(-1), 0)[0],
            "kthvalue": _kth_value,
            "cummax": _running("cummax"),
            "cummin": _running("cummin"),
            "searchsorted.Tensor searchsorted.Scalar": _search,
            "bucketize.Tensor bucketize.Scalar": lambda xp, values, ordered, *, out_int32=False, right=False: (
                _search(xp, ordered, values, right=right)
            ),
        }
    ),
}


def _addmm(
    xp: SimpleNamespace, bias: Array, x: Array, y: Array, *, beta: Array = 1, alpha: Array = 1
) -> Array:
    product = xp.matmul(x, y)
    return (bias if beta == 1 else beta * bias) + (product if alpha == 1 else alpha * product)


def _normalised(
    xp: SimpleNamespace, x: Array, axes: tuple[int, ...], eps: float
) -> tuple[Any, Any, Any]:
    mean = x.mean(axes, keepdims=True)
    scale = xp.rsqrt(x.var(axes, keepdims=True) + eps)
    return (x - mean) * scale, mean, scale


def _in_float32(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Compute halves in float32, as torch's kernels do: a variance of halves leaves their range."""

    def wide(xp: SimpleNamespace, x: Array, *rest: Any) -> Array:
        if x.dtype.itemsize != 2:
            return rule(xp, x, *rest)
        wider = [value.astype(xp.float32) if hasattr(value, "astype") else value for value in rest]
        return rule(xp, x.astype(xp.float32), *wider)

    return wide


def _affine(x: Array, weight: Array, bias: Array, shape: tuple[int, ...]) -> Array:
    if weight is not None:
        x = x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _layer_norm(
    xp: SimpleNamespace, x: Array, shape: Sequence[int], weight: Array, bias: Array, eps: float
) -> Array:
    out, mean, scale = _normalised(xp, x, tuple(range(x.ndim - len(shape), x.ndim)), eps)
    return _affine(out, weight, bias, tuple(shape)), mean, scale


def _group_norm(
    xp: SimpleNamespace,
    x: Array,
    weight: Array,
    bias: Array,
    rows: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> Array:
    grouped = x.reshape(rows, groups, -1)
    out, mean, scale = _normalised(xp, grouped, (2,), eps)
    shape = (channels, *(1,) * (x.ndim - 2))
    return _affine(out.reshape(x.shape), weight, bias, shape), mean[..., 0], scale[..., 0]


def _batch_norm(
    xp: SimpleNamespace,
    x: Array,
    weight: Array,
    bias: Array,
    mean: Array,
    var: Array,
    momentum: float,
    eps: float,
) -> Array:
    shape = (x.shape[1], *(1,) * (x.ndim - 2))
    out = (x - mean.reshape(shape)) * xp.rsqrt(var.reshape(shape) + eps)
    return (_affine(out, weight, bias, shape),)


def _instance_norm(
    xp: SimpleNamespace,
    x: Array,
    weight: Array,
    bias: Array,
    training: bool,
    momentum: float,
    eps: float,
) -> Array:
    """Batch norm without running statistics, which instance norm is made of."""
    out, mean, scale = _normalised(xp, x, (0, *range(2, x.ndim)), eps)
    shape = (x.shape[1], *(1,) * (x.ndim - 2))
    return _affine(out, weight, bias, shape), mean.reshape(-1), scale.reshape(-1)


def _softmax(xp: SimpleNamespace, x: Array, dim: int, half_to_float: bool) -> Array:
    sizes = xp.exp(x - x.max(axis=dim, keepdims=True))
    return sizes / sizes.sum(axis=dim, keepdims=True)


def _log_softmax(xp: SimpleNamespace, x: Array, dim: int, half_to_float: bool) -> Array:
    below = x - x.max(axis=dim, keepdims=True)
    return below - xp.log(xp.exp(below).sum(axis=dim, keepdims=True))


def _trilinear(
    xp: SimpleNamespace,
    x: Array,
    y: Array,
    z: Array,
    expand_x: Sequence[int],
    expand_y: Sequence[int],
    expand_z: Sequence[int],
    summed: Sequence[int],
    unroll_dim: int = 1,
) -> Array:
    """The product of three tensors after each was given new axes; a bilinear layer is one."""
    parts = ((x, expand_x), (y, expand_y), (z, expand_z))
    one, two, three = (xp.expand_dims(part, tuple(axes)) for part, axes in parts)
    return (one * two * three).sum(tuple(summed))


LAYERS = rules(
    {
        "mm bmm": "matmul",
        "addmm baddbmm": _addmm,
        "native_layer_norm": _in_float32(_layer_norm),
        "native_group_norm": _in_float32(_group_norm),
        "_native_batch_norm_legit_no_training": _in_float32(_batch_norm),
        "_native_batch_norm_legit.no_stats": _in_float32(_instance_norm),
        "_softmax": _in_float32(_softmax),
        "_log_softmax": _in_float32(_log_softmax),
        "embedding": lambda xp, weight, indices, *_: xp.picked(weight, indices, 0),
        "_trilinear": _trilinear,
    }
)


RULES: dict[str, Rule] = {**ELEMENTWISE, **SHAPING, **REDUCING, **LAYERS, **MAKING}
