"""Which steps of a graph JAX must compute with 64 bits; its own choice is 32.

torch's integers have 64 bits, and most are indices, counts and choices that 32 hold. This module follows
the least and the greatest number that each integer can be through a graph. A step is computed with 64 bits
where that does not fit into 32, and where a float64 takes part. It computes nothing.

Conventions
    span   the least and the greatest number that the elements of a value can be, both ints.
    wide   a value whose elements need 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch.fx import Node

from envkit_bridges.policy.exporting import Graph, Step, packet_of

Span = tuple[int, int]
Spans = (
    Any  # a span; a list of them for an operator with several results; None for what is no integer
)

INT32: Span = (-(2**31), 2**31 - 1)
_INT64: Span = (-(2**63), 2**63 - 1)
_INDEX: Span = (0, 2**31 - 1)  # places and sizes; no axis in here is longer
_WIDE_FLOATS = (torch.float64, torch.complex128)
_WIDE_INTEGERS = (torch.int64, torch.uint64)


@dataclass(frozen=True)
class Widths:
    """Values that need 64 bits in a graph.

    Attributes:
        steps: names of the steps that are computed with 64 bits.
        values: names of the values that keep 64 bits; of an operator with several results, one of which does.
        outputs: places of the outputs that keep 64 bits, with their span where they are integers.
    """

    steps: frozenset[str]
    values: frozenset[str]
    outputs: Mapping[int, Span | None]


def widths_of(graph: Graph) -> Widths:
    """Find what needs 64 bits, where JAX has 32."""
    spans = spans_of(graph)
    wide = {name for name, tensor in graph.constants.items() if _is_wide(tensor.dtype, spans[name])}
    steps: set[str] = set()
    for step in graph.steps:
        for node in (step.node, *step.node.all_input_nodes):
            if _any_wide(node.meta.get("val"), spans[node.name]):
                wide.add(node.name)
        if step.name in wide or step.reads & wide or _compares_wide(step.node):
            steps.add(step.name)
    outputs = {
        at: spans[value.name]
        for at, value in enumerate(graph.outputs)
        if isinstance(value, Node) and value.name in wide
    }
    return Widths(frozenset(steps), frozenset(wide), outputs)


def spans_of(graph: Graph) -> dict[str, Spans]:
    """Return the spans of the values of a graph, by name.

    Its inputs, parameters and buffers cross to JAX with 32 bits, which is checked there.
    """
    spans: dict[str, Spans] = {
        name: _of_constant(tensor) for name, tensor in graph.constants.items()
    }
    for step in graph.steps:
        for node in step.node.all_input_nodes:
            if node.name not in spans:  # an input or a parameter
                spans[node.name] = _of_input(node)
        spans[step.name] = _of_step(step, spans, step.node.meta.get("val"))
    return spans


# ------------------------------------------------------------------------------------------ what is wide


def _is_wide(dtype: torch.dtype, span: Span | None) -> bool:
    if dtype in _WIDE_FLOATS:
        return True
    return dtype in _WIDE_INTEGERS and (span is None or not _is_within(span, INT32))


def _any_wide(like: object, spans: Spans) -> bool:
    if isinstance(like, tuple | list):
        every = spans if isinstance(spans, list) else [spans] * len(like)
        return any(_any_wide(*pair) for pair in zip(like, every, strict=False))
    return isinstance(like, torch.Tensor) and _is_wide(like.dtype, spans)


def _compares_wide(node: Node) -> bool:
    """Check whether a tensor of 64 bits is compared with a number that 32 cannot hold."""
    numbers = [arg for arg in node.args if type(arg) is int]
    dtypes = [
        value.dtype
        for one in node.all_input_nodes
        if isinstance(value := one.meta.get("val"), torch.Tensor)
    ]
    return packet_of(node) in _COMPARISONS and any(
        not _is_within((number, number), INT32) and dtype in _WIDE_INTEGERS
        for number in numbers
        for dtype in dtypes
    )


_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def _is_within(span: Span, other: Span) -> bool:
    return other[0] <= span[0] and span[1] <= other[1]


# --------------------------------------------------------------------------------------- where spans begin


def _of_dtype(dtype: torch.dtype, *, crossed: bool) -> Span | None:
    """Return the span of a dtype; of one of 64 bits that has crossed to JAX, that of 32."""
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point or dtype.is_complex:
        return None
    if dtype in _WIDE_INTEGERS:
        return INT32 if crossed else _INT64
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _of_input(node: Node) -> Span | None:
    like = node.meta.get("val")
    return _of_dtype(like.dtype, crossed=True) if isinstance(like, torch.Tensor) else _INDEX


def _of_constant(tensor: torch.Tensor) -> Span | None:
    if tensor.is_floating_point() or tensor.is_complex():
        return None
    if not tensor.numel():
        return 0, 0
    return int(tensor.min()), int(tensor.max())


def _of_step(step: Step, spans: Mapping[str, Spans], like: object) -> Spans:
    """Return the spans of what a step gives, as far as its operator tells; else those of its dtypes."""
    packet = packet_of(step.node)
    if packet == "getitem":
        values: Any = step.node.args[0]
        place: Any = step.node.args[1]
        found = spans[values.name]
        return found[place] if isinstance(found, list) else found
    if isinstance(like, tuple | list):
        return [_of_result(step, spans, one, at) for at, one in enumerate(like)]
    return _of_result(step, spans, like, 0)


def _of_result(step: Step, spans: Mapping[str, Spans], like: object, at: int) -> Span | None:
    if not isinstance(like, torch.Tensor):
        return _INDEX  # arithmetic of sizes
    whole = _of_dtype(like.dtype, crossed=False)
    if whole is None or like.dtype not in _WIDE_INTEGERS:
        return whole
    if step.op.draws:
        return INT32  # see `drawing`: a bound that 32 bits cannot hold is refused there
    rule = (_SPANS if at == 0 else _PLACES).get(packet_of(step.node))
    if rule is None:
        return whole
    args = [_read(arg, spans) for arg in step.node.args]
    kwargs = {name: _read(value, spans) for name, value in step.node.kwargs.items()}
    try:
        found = rule(_Use(step.node, like), *args, **kwargs)
    except (TypeError, ValueError):  # an argument has no span, such as a float
        return whole
    return found if found is not None and _is_within(found, _INT64) else whole


def _read(value: object, spans: Mapping[str, Spans]) -> Any:
    """Return the span that stands for an argument; None for what has none."""
    if isinstance(value, Node):
        return spans[value.name]
    if isinstance(value, bool | int):
        return int(value), int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value), int(value)
    if isinstance(value, list | tuple):
        return [_read(item, spans) for item in value]
    return None


# -------------------------------------------------------------------------------------------- the operators


@dataclass(frozen=True)
class _Use:
    """One use of an operator: its node, and what it gave torch."""

    node: Node
    like: torch.Tensor

    def count(self) -> int:
        """Count the elements of the first argument that are reduced to one."""
        shape = self._shape(0)
        dims = self.node.args[1] if len(self.node.args) > 1 else None
        if dims is None or dims == []:
            dims = range(len(shape))
        elif isinstance(dims, int):
            dims = [dims]
        return prod(self._known(shape[dim]) for dim in dims if shape)  # type: ignore[union-attr,index]

    def along(self, argument: int, dim: Any) -> int:
        """Return the length of an axis of an argument."""
        shape = self._shape(argument)
        return self._known(shape[dim]) if shape else 1

    def _shape(self, argument: int) -> torch.Size:
        return self.node.args[argument].meta["val"].shape  # type: ignore[union-attr]

    @staticmethod
    def _known(size: int) -> int:
        """Return a size.

        Raises:
            ValueError: torch left it open.
        """
        if type(size) is not int:
            raise ValueError("an open size")
        return size


def _hull(*spans: Span | None) -> Span | None:
    if any(span is None for span in spans):
        return None
    found: list[Span] = [span for span in spans if span is not None]
    return min(low for low, _ in found), max(high for _, high in found)


def _corners(combine: Callable[[int, int], int], x: Span, y: Span) -> Span:
    found = [combine(a, b) for a, b in product(x, y)]
    return min(found), max(found)


def _times(x: Span, y: Span) -> Span:
    return _corners(lambda a, b: a * b, x, y)


def _most(x: Span) -> int:
    return max(abs(x[0]), abs(x[1]))


def _add(use: _Use, x: Span, y: Span, *, alpha: Span = (1, 1)) -> Span | None:
    scaled = _times(y, alpha)
    total = x[0] + scaled[0], x[1] + scaled[1]
    return total if alpha == (1, 1) else _hull(total, scaled)


def _sub(use: _Use, x: Span, y: Span, *, alpha: Span = (1, 1)) -> Span | None:
    return _add(use, x, (-y[1], -y[0]), alpha=alpha)


def _div(use: _Use, x: Span, y: Span, *, rounding_mode: object = None) -> Span:
    return -_most(x) - 1, _most(x)


def _remainder(use: _Use, x: Span, y: Span) -> Span:
    return min(y[0] + 1, 0), max(y[1] - 1, 0)


def _fmod(use: _Use, x: Span, y: Span) -> Span:
    most = min(_most(x), max(_most(y) - 1, 0))
    return -most if x[0] < 0 else 0, most


def _pow(use: _Use, x: Span, y: Span) -> Span | None:
    if y[0] != y[1] or not 0 <= y[0] <= 64:
        return None
    return _corners(lambda a, b: a**b, x, y) if y[0] % 2 else (0, _most(x) ** y[0])


def _clamp(use: _Use, x: Span, low: Span | None = None, high: Span | None = None) -> Span:
    given = {"low": use.node.args[1:2], "high": use.node.args[2:3]}
    if low is not None or given["low"] not in ((), (None,)):
        x = max(x[0], low[0]), max(x[1], low[1])  # type: ignore[index]
    if high is not None or given["high"] not in ((), (None,)):
        x = min(x[0], high[0]), min(x[1], high[1])  # type: ignore[index]
    return x


def _bits(x: Span, y: Span) -> Span:
    size = max(number.bit_length() for number in (*x, *y))
    return (0 if min(*x, *y) >= 0 else -(2**size)), 2**size - 1


def _and(use: _Use, x: Span, y: Span) -> Span:
    highest = [span[1] for span in (x, y) if span[0] >= 0]
    return (0, min(highest)) if highest else _bits(x, y)


def _sum(use: _Use, x: Span, *_: object, **__: object) -> Span:
    number = use.count()
    return min(0, number * x[0]), max(0, number * x[1])


def _cumsum(use: _Use, x: Span, *_: object, **__: object) -> Span:
    number = use.along(0, use.node.args[1])
    return min(x[0], number * x[0]), max(x[1], number * x[1])


def _prod(use: _Use, x: Span, *_: object, **__: object) -> Span | None:
    number = use.count()
    most = _most(x)
    if most > 1 and number > 64:
        return None
    most = max(most**number if most > 1 else most, 1)
    return (0 if x[0] >= 0 else -most), most


def _scatter_add(use: _Use, x: Span, dim: object, index: object, source: Span) -> Span:
    number = use.along(2, use.node.args[1])
    return x[0] + min(0, number * source[0]), x[1] + max(0, number * source[1])


def _index_put(
    use: _Use, x: Span, indices: object, values: Span, accumulate: Span = (0, 0)
) -> Span | None:
    return _hull(x, values) if accumulate == (0, 0) else None


def _first(use: _Use, x: Spans, *_: object, **__: object) -> Span | None:
    return x


def _to_copy(use: _Use, x: Span | None, **_: object) -> Span | None:
    return x  # None for a float


def _joined(use: _Use, parts: Sequence[Span], *_: object) -> Span | None:
    return _hull(*parts)


def _arange(use: _Use, start: Span, end: Span, step: object = None, **_: object) -> Span | None:
    return _hull(start, end)


def _places(use: _Use, *_: object, **__: object) -> Span:
    return _INDEX


def _each(names: str, rule: Callable[..., Span | None]) -> dict[str, Callable[..., Span | None]]:
    return dict.fromkeys(names.split(), rule)


_SPANS: Mapping[str, Callable[..., Span | None]] = {
    **_each(
        "view reshape _unsafe_view permute expand squeeze unsqueeze slice select index index_select gather flip "
        "repeat unfold alias clone lift_fresh_copy split_with_sizes diagonal embedding max min amax amin sort "
        "topk median kthvalue cummax cummin floor ceil trunc round",
        _first,
    ),
    **_each("argmax argmin searchsorted bucketize empty empty_permuted", _places),
    "_to_copy": _to_copy,
    "add": _add,
    "sub": _sub,
    "mul": lambda use, x, y: _times(x, y),
    "neg": lambda use, x: (-x[1], -x[0]),
    "abs": lambda use, x: (0, _most(x)),
    "sign": lambda use, x: (-1, 1),
    "relu": lambda use, x: (max(x[0], 0), max(x[1], 0)),
    "div": _div,
    "remainder": _remainder,
    "fmod": _fmod,
    "pow": _pow,
    "clamp": _clamp,
    "maximum": lambda use, x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "minimum": lambda use, x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "bitwise_and": _and,
    "bitwise_or": lambda use, x, y: _bits(x, y),
    "bitwise_xor": lambda use, x, y: _bits(x, y),
    "bitwise_not": lambda use, x: (-x[1] - 1, -x[0] - 1),
    "where": lambda use, test, x, y: _hull(x, y),
    "copy": lambda use, x, y: y,
    "sum": _sum,
    "cumsum": _cumsum,
    "prod": _prod,
    "cat": _joined,
    "constant_pad_nd": lambda use, x, pad, value=(0, 0): _hull(x, value),
    "scatter": lambda use, x, dim, index, y, **reduce: None if reduce else _hull(x, y),
    "scatter_add": _scatter_add,
    "index_put": _index_put,
    "slice_scatter": lambda use, x, y, *_: _hull(x, y),
    "select_scatter": lambda use, x, y, *_: _hull(x, y),
    "full": lambda use, size, value, **_: value,
    "full_like": lambda use, x, value, **_: value,
    "scalar_tensor": lambda use, value, **_: value,
    "arange": _arange,
}
"""The span of what an operator gives, of its first result where it has several; None is any of its dtype."""

_PLACES: Mapping[str, Callable[..., Span | None]] = {
    **_each("max min sort topk median kthvalue cummax cummin", _places),
    "split_with_sizes": _first,
}
"""The span of its further results."""
