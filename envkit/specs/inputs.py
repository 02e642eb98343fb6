"""Whether an input that is about to reach a simulator is what its spec says.

A simulator takes NumPy rows and may do anything with an index out of range or NaN. This module says
so before, in words, and at the cost of a comparison or two for all rows together. What lies in a
spec is decided by its ``is_in``; the comparisons here only spare asking it. One thing is stricter:
NaN is never an input, though an unbounded spec holds it.

Conventions
    rows  array of shape (count, *leaf): values of several envs side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envkit.errors import InputError, MissingKeyError
from envkit.specs.base import TensorSpec
from envkit.specs.boxes import Binary, Bounded, Unbounded
from envkit.specs.categorical import Categorical, MultiCategorical, MultiOneHot, OneHot

__all__ = ["InputCheck", "require_input"]

Test = Callable[[np.ndarray], bool]

_MOST_SPELLINGS = 256  # of one one-hot row that are listed


class InputCheck:
    """Tell values of one entry that are outside its spec.

    Args:
        spec: of one env, a leaf with a dtype.
        key: name of the entry, for messages.
    """

    def __init__(self, spec: TensorSpec, key: Any):
        assert spec.dtype is not None
        self.key = key
        self._spec = spec
        self._shape, self._dtype = tuple(spec.shape), spec.dtype
        self._holds = _test_of(spec)

    def row(self, value: Tensor | None) -> np.ndarray:
        """Give the value of one env as its only row.

        Raises:
            MissingKeyError: it is None.
            InputError: it has another form than the spec says, or lies outside it.
        """
        rows = self._array(value, self._shape)[None]
        if not self._holds(rows):
            raise self._error(rows, None)
        return rows

    def rows(self, values: Tensor) -> np.ndarray:
        """Give the values of several envs, stacked on the first axis; see `row`."""
        rows = self._array(values, (len(values), *self._shape))
        self.require(rows)
        return rows

    def require(self, rows: np.ndarray, numbers: Sequence[int] | None = None) -> None:
        """Check rows of the right form.

        Args:
            rows: values.
            numbers: what the rows are called; by default they are counted from 0.

        Raises:
            InputError: one lies outside the spec.
        """
        if not self._holds(rows):
            raise self._error(rows, range(len(rows)) if numbers is None else numbers)

    def _array(self, value: Tensor | None, shape: tuple[int, ...]) -> np.ndarray:
        require_input(self.key, value, shape, self._dtype)
        assert value is not None
        return value.detach().cpu().numpy()

    def _error(self, rows: np.ndarray, numbers: Sequence[int] | None) -> InputError:
        index = next(i for i in range(len(rows)) if not self._holds(rows[i : i + 1]))
        row = rows[index]
        where = "" if numbers is None else f" of row {numbers[index]}"
        cure = "Bring it there, e.g. with env.action_spec.project(action)."
        if row.dtype.kind == "f" and np.isnan(row).any():
            cure = "NaN comes from the policy, or from what it was given."
        shown = np.array2string(row, threshold=16, separator=", ").replace("\n", "")
        return InputError(f"{self.key!r}{where} is {shown}, but {_demand(self._spec)}. {cure}")


def require_input(key: Any, value: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check the form of an entry that is given to an env.

    Raises:
        MissingKeyError: it is None.
        InputError: it has another shape or dtype, or holds no data.
    """
    if value is None:
        raise MissingKeyError(
            f"the TensorDict has no {key!r}, which the env takes. "
            "Write it first, e.g. with env.rand_action(td)."
        )
    if value.shape != shape:
        raise InputError(
            f"{key!r} has shape {tuple(value.shape)}, but the env takes {tuple(shape)}. "
            "env.rand_action() shows what it takes."
        )
    if value.dtype != dtype:
        raise InputError(
            f"{key!r} has dtype {value.dtype}, but the env takes {dtype}. "
            f"Convert it: value.to({dtype})."
        )
    if value.is_meta:
        raise InputError(
            f"{key!r} is on the meta device, which holds no data, but the env takes values. "
            "Build it on the CPU or on an accelerator."
        )


# ---------------------------------------------------------------------------------- the comparisons


def _test_of(spec: TensorSpec) -> Test:
    if isinstance(spec, Bounded):
        low, high = spec.low.cpu().numpy(), spec.high.cpu().numpy()
        return lambda rows: bool(((rows >= low) & (rows <= high)).all())
    if isinstance(spec, Unbounded):
        if not spec.dtype.is_floating_point:
            return _anything
        return lambda rows: not np.isnan(rows).any()
    if isinstance(spec, Binary):
        return _anything if spec.dtype == torch.bool else _below(2)
    if getattr(spec, "mask", None) is not None:
        return _asking(spec)
    if isinstance(spec, Categorical):
        return _anything if spec.dtype == torch.bool else _below(spec.n)
    if isinstance(spec, MultiCategorical):
        return _below(np.asarray(spec.nvec))
    if isinstance(spec, OneHot):
        return _one_hot(spec)
    if isinstance(spec, MultiOneHot):
        return _many_hot(spec)
    return _asking(spec)


def _anything(rows: np.ndarray) -> bool:
    return True


def _asking(spec: TensorSpec) -> Test:
    return lambda rows: all(spec.is_in(row) for row in torch.from_numpy(rows).unbind(0))


def _below(count: Any) -> Test:
    """Integers from 0 to below ``count``: a negative one is a large one without its sign."""

    def test(rows: np.ndarray) -> bool:
        return bool((rows.view(f"u{rows.itemsize}") < count).all())

    return test


def _one_hot(spec: OneHot) -> Test:
    count = spec.n
    spellings: set[bytes] = set()
    if len(spec.shape) == 1 and count <= _MOST_SPELLINGS:
        eye = np.eye(count, dtype=torch.empty(0, dtype=spec.dtype).numpy().dtype)
        spellings = {row.tobytes() for row in eye}

    def test(rows: np.ndarray) -> bool:
        if len(rows) == 1 and spellings:
            return rows.tobytes() in spellings
        if np.count_nonzero(rows) != rows.size // count:
            return False
        return bool((rows.sum(-1) == 1).all())

    return test


def _many_hot(spec: MultiOneHot) -> Test:
    sizes = list(spec.nvec)
    starts = np.cumsum([0, *sizes[:-1]])

    def test(rows: np.ndarray) -> bool:
        if np.count_nonzero(rows) * sum(sizes) != rows.size * len(sizes):
            return False
        return bool((np.add.reduceat(rows, starts, -1, dtype=np.float64) == 1).all())

    return test


def _demand(spec: TensorSpec) -> str:
    if isinstance(spec, Bounded):
        low, high = (end.flatten().tolist() for end in (spec.low, spec.high))
        if len(set(low)) == len(set(high)) == 1:
            return f"must lie between {low[0]:g} and {high[0]:g}"
        return f"must lie between {low} and {high}"
    if isinstance(spec, Unbounded):
        return "must be a number"
    if isinstance(spec, Binary):
        return "must hold 0 and 1 only"
    if isinstance(spec, Categorical):
        return f"must be an integer from 0 to {spec.n - 1}"
    if isinstance(spec, OneHot):
        return f"must be one-hot: a single 1 among {spec.n} entries, else 0"
    if isinstance(spec, MultiOneHot):
        return f"must be one-hot in each of its parts, of {list(spec.nvec)} entries"
    if isinstance(spec, MultiCategorical):
        return f"must be integers below {np.asarray(spec.nvec).tolist()}"
    return f"must lie in {spec}"
