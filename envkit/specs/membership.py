"""Which numbers are values of a spec, asked of NumPy arrays, and how that is said in words.

Steps ask this of every action, so a test is made once of each spec and takes all rows at once.

Conventions
    array  values in the dtype they came in, shape (rows, *leaf).
    test   function of an array: whether all of it is held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envkit.specs.base import TensorSpec
from envkit.specs.leaves.boxes import Binary, Bounded, Unbounded
from envkit.specs.leaves.choices import Categorical, MultiCategorical, MultiOneHot, OneHot
from envkit.specs.leaves.unions import Choice
from envkit.specs.stacks import Stacked

__all__ = ["array_of", "demand_of", "has_array", "sizes_of", "test_of"]

Test = Callable[[np.ndarray], bool]

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_MOST_SPELLINGS = 256  # of one one-hot row that are listed


def array_of(value: Tensor) -> np.ndarray:
    """Show a tensor to NumPy; what it has no dtype for, as the float32 of the same value."""
    if not has_array(value):
        value = value.float()
    return value.numpy(force=True)


def has_array(value: Tensor) -> bool:
    """Say whether NumPy has the dtype of a tensor."""
    return not value.is_floating_point() or value.dtype in _FLOATS


_FLOATS = (torch.float16, torch.float32, torch.float64)


def sizes_of(spec: TensorSpec) -> list[int]:
    """Give how many options lie side by side in each part of a one-hot spelling; [] for others."""
    if isinstance(spec, OneHot):
        return [spec.n]
    if isinstance(spec, MultiOneHot):
        return list(spec.nvec)
    members = spec.members if isinstance(spec, Stacked) else getattr(spec, "choices", ())
    sizes = [sizes_of(member) for member in members]
    return sizes[0] if sizes and all(found == sizes[0] for found in sizes) else []


def test_of(spec: TensorSpec) -> Test:
    """Make what tells arrays that a spec holds, in the spec's dtype or in one that becomes it."""
    if isinstance(spec, Stacked):
        return _each_member(spec)
    if isinstance(spec, OneHot | MultiOneHot):
        return _one_hot(spec) if isinstance(spec, OneHot) else _many_hot(spec)
    assert spec.dtype is not None
    if spec.dtype.is_floating_point and spec.domain == "continuous":
        return _finite(_numpy_dtype(spec.dtype))
    if spec.dtype.is_floating_point or spec.dtype.is_complex or isinstance(spec, Choice):
        return _asking(spec)
    if isinstance(spec, Binary):
        return _below(2)
    if isinstance(spec, Categorical):
        return _below(spec.n)
    if isinstance(spec, MultiCategorical):
        return _below(np.asarray(spec.nvec))
    if isinstance(spec, Bounded):
        return _between(spec.low.numpy(), spec.high.numpy())
    if isinstance(spec, Unbounded):
        return _fitting(_numpy_dtype(spec.dtype))
    return _asking(spec)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return array_of(torch.empty(0, dtype=dtype, device="cpu")).dtype


def _finite(dtype: np.dtype) -> Test:
    def test(rows: np.ndarray) -> bool:
        if rows.dtype != dtype:
            with np.errstate(over="ignore"):  # what is too large becomes infinite
                rows = rows.astype(dtype)
        return bool(np.logical_and.reduce(np.isfinite(rows), axis=None))

    return test


def _fitting(dtype: np.dtype) -> Test:
    if dtype == bool:
        return _below(2)
    info = np.iinfo(dtype)
    inside = _between(np.asarray(info.min, dtype), np.asarray(info.max, dtype))
    return lambda rows: rows.dtype == dtype or inside(rows)


def _between(low: np.ndarray, high: np.ndarray) -> Test:
    return lambda rows: bool(((rows >= low) & (rows <= high)).all())


def _below(count: Any) -> Test:
    """Integers from 0 to below ``count``: a negative one is a large one without its sign."""

    def test(rows: np.ndarray) -> bool:
        found = rows.view(_UNSIGNED[rows.itemsize])
        if isinstance(count, int) and rows.size:
            return bool(np.maximum.reduce(found, axis=None) < count)
        return bool((found < count).all())

    return test


def _asking(spec: TensorSpec) -> Test:
    def test(rows: np.ndarray) -> bool:
        values = torch.from_numpy(rows)
        cast = values.to(spec.dtype)
        is_kept = rows.dtype.kind == "f" or torch.equal(cast.to(values.dtype), values)
        return is_kept and all(spec.is_in(row) for row in cast.unbind(0))

    return test


def _each_member(spec: Stacked) -> Test:
    tests = [test_of(member) for member in spec.members]
    axis = 1 + spec.stack_dim

    def test(rows: np.ndarray) -> bool:
        parts = [np.take(rows, index, axis) for index in range(len(tests))]
        return all(holds(part) for holds, part in zip(tests, parts, strict=True))

    return test


_ROUNDING = 1e-2
"""How far floats may be from a one-hot: ``hot + p - p`` of a straight-through estimate in bfloat16 is not exact."""


def _almost_hot(spec: OneHot | MultiOneHot) -> Test:
    """Floats spell a choice where each part is one-hot, up to rounding; scores and probabilities are no choice."""
    ends = np.cumsum(sizes_of(spec))[:-1]

    def test(rows: np.ndarray) -> bool:
        return all(
            bool(((np.abs(part) > _ROUNDING).sum(-1) == 1).all())
            and bool((np.abs(part.max(-1) - 1) <= _ROUNDING).all())
            for part in np.split(rows, ends, -1)
        )

    return test


def _one_hot(spec: OneHot) -> Test:
    floats, count = _almost_hot(spec), spec.n
    spellings: set[bytes] = set()
    dtype = _numpy_dtype(spec.dtype)
    if len(spec.shape) == 1 and count <= _MOST_SPELLINGS:
        spellings = {row.tobytes() for row in np.eye(count, dtype=dtype)}

    def test(rows: np.ndarray) -> bool:
        if rows.dtype.kind == "f":
            return floats(rows)
        if len(rows) == 1 and spellings and rows.dtype == dtype:
            return rows.tobytes() in spellings
        if np.count_nonzero(rows) != rows.size // count:
            return False
        return bool((rows.sum(-1) == 1).all())

    return test


def _many_hot(spec: MultiOneHot) -> Test:
    floats, sizes = _almost_hot(spec), list(spec.nvec)
    starts = np.cumsum([0, *sizes[:-1]])

    def test(rows: np.ndarray) -> bool:
        if rows.dtype.kind == "f":
            return floats(rows)
        if np.count_nonzero(rows) * sum(sizes) != rows.size * len(sizes):
            return False
        return bool((np.add.reduceat(rows, starts, -1, dtype=np.float64) == 1).all())

    return test


def demand_of(spec: TensorSpec, row: np.ndarray) -> str:
    sizes = sizes_of(spec)
    if isinstance(spec, OneHot):
        return f"must be one-hot: a single 1 among {spec.n} entries, else 0"
    if isinstance(spec, MultiOneHot):
        return f"must be one-hot in each of its parts, of {sizes} entries"
    assert spec.dtype is not None
    if spec.dtype.is_floating_point and spec.domain == "continuous":
        return f"must hold finite numbers of {spec.dtype}"
    if isinstance(spec, Bounded):
        low, high = (end.flatten().tolist() for end in (spec.low, spec.high))
        if len(set(low)) == len(set(high)) == 1:
            return f"must lie between {low[0]:g} and {high[0]:g}"
        return f"must lie between {low} and {high}"
    if isinstance(spec, Binary):
        return "must hold 0 and 1 only"
    if isinstance(spec, Categorical):
        return f"must be an integer from 0 to {spec.n - 1}"
    if isinstance(spec, MultiCategorical):
        return f"must be integers below {np.asarray(spec.nvec).tolist()}"
    return f"must lie in {spec}"
