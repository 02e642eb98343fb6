"""How an action that a policy wrote becomes what a simulator takes, and which are refused.

A simulator may do anything with an index out of range or NaN, and a cast may change what was chosen.
This module alone decides about both; every kind of env asks it, so that one action means the same
everywhere.

Conventions
    form     shape and dtype, as the spec says them.
    lead     batch axes in front of the shape of the spec, flattened for messages into rows.
    array    values in the dtype they came in, shape (rows, *leaf).
    test     function of an array: whether all of it are values of a spec. A test is made once of each spec.

Decided here, by what the spec describes
    choices spelled one-hot   integers and bools are one-hot, and floats are up to rounding. Scores and
                              probabilities are refused: they would be recorded as what was done.
    other integers, bools     integers and bools in the range of the spec change their dtype, and so do
                              floats that are whole numbers.
    floats                    floats are rounded to the dtype, and integers that it holds exactly become
                              floats. Bounds are left to the simulator, as in gymnasium; NaN and infinity
                              are refused.
    All else is refused. Which options a mask allows changes with every step: the env knows.

Values on an accelerator are not looked at, which would make every step wait for it; only where
a cast to or from integers could change them silently, they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import NonTensorData
from torch import Tensor

from envkit.errors import InputError, MissingKeyError
from envkit.specs.composite import Composite
from envkit.specs.leaves.boxes import Binary, Bounded, Unbounded
from envkit.specs.leaves.choices import Categorical, MultiCategorical, MultiOneHot, OneHot
from envkit.specs.leaves.unions import Choice
from envkit.specs.stacks import Stacked
from envkit.specs.tensor_spec import TensorSpec

_END_OF_INTEGERS = 2.0**63
_NOT_IN_NUMPY = (torch.bfloat16, torch.complex32, torch.complex64, torch.complex128)


def action_inputs(actions: Composite) -> dict[Any, ActionInput]:
    """Return the rule of each action by key; those of varying size or without a dtype have none."""
    return {
        key: ActionInput(leaf, key)
        for key, leaf in actions.items(True, True)
        if leaf.dtype is not None and min(leaf.shape, default=0) >= 0
    }


class ActionInput:
    """Bring values of one action into the form of its spec.

    Args:
        spec: a leaf with a dtype and a fixed shape.
        key: name of the action, for messages.

    Attributes:
        spells_choices: its values are one-hot.
        takes_as_is: a value of the spec in its dtype stays as it is, and NumPy tells whether it is one.
    """

    def __init__(self, spec: TensorSpec, key: object):
        assert spec.dtype is not None
        self.key = key
        self.shape, self.dtype = spec.shape, spec.dtype
        self._spec = _without_mask(spec).to("cpu")
        self._numpy_dtype = array_of(torch.empty(0, dtype=spec.dtype, device="cpu")).dtype
        self._sizes = sizes_of(self._spec)
        self._test = test_of(self._spec)
        self.spells_choices = bool(self._sizes)
        spells_in_floats = self.spells_choices and spec.dtype.is_floating_point
        self.takes_as_is = not (spells_in_floats or spec.dtype in _NOT_IN_NUMPY)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._spec, self.key)  # tests of values are functions made here

    def take(
        self,
        value: Tensor | None,
        lead: Sequence[int] = (),
        *,
        rows: Sequence[int] | None = None,
        first: int | None = None,
    ) -> Tensor:
        """Return an action in the form of its spec; ``value`` itself where it has that.

        Args:
            value: shape ``(*lead, *spec.shape)``, on any device, which stays; a gradient flows
                through.
            lead: batch axes.
            rows: the rows that are looked at, None for all; what becomes of others is open.
            first: what the first row is called in messages, 0 by default; without ``lead``, the only
                one.

        Raises:
            MissingKeyError: it is None.
            InputError: it has another form that cannot be converted, or is no value of the spec.
        """
        if type(value) is Tensor and self.values_of(value, (*lead, *self.shape)) is not None:
            return value
        self.require_form(value, lead)
        assert value is not None
        return self.converted(value, lead, rows=rows, first=first)

    def values_of(self, value: object, shape: Sequence[int]) -> np.ndarray | None:
        """Show a tensor or an array of a shape that holds values of the spec, in its dtype, as rows in the same memory.

        None: it is something else, or lies where looking at it costs much. `take` says which, and what becomes of it.
        """
        if not self.takes_as_is or value is None:
            return None
        if type(value) is Tensor:
            try:
                value = (value.detach() if value.requires_grad else value).numpy()
            except (RuntimeError, TypeError):  # on an accelerator, or in a form that NumPy lacks
                return None
        if (
            not isinstance(value, np.ndarray)
            or value.dtype != self._numpy_dtype
            or value.shape != shape
        ):
            return None
        rows = value if len(shape) == len(self.shape) + 1 else value.reshape(-1, *self.shape)
        return rows if self._test(rows) else None

    def converted(
        self,
        value: Tensor,
        lead: Sequence[int] = (),
        *,
        rows: Sequence[int] | None = None,
        first: int | None = None,
    ) -> Tensor:
        """Convert a value whose form was checked, as `take` does."""
        if value.device.type == "cpu" or self._may_change(value):
            array = array_of(value).reshape(-1, *self.shape)
            if rows is not None:
                array = array[list(rows)]
            if not self._holds(array):
                self._refuse(array, lead, rows, first)
        if self._sizes and value.is_floating_point():
            parts = [part.argmax(-1) for part in value.split(self._sizes, -1)]
            spelled = zip(parts, self._sizes, strict=True)
            hot = [torch.nn.functional.one_hot(part, size) for part, size in spelled]
            value = torch.cat(hot, -1)
        return value if value.dtype == self.dtype else value.to(self.dtype)

    def require_form(self, value: Tensor | None, lead: Sequence[int] = ()) -> None:
        """Check all of a value but its numbers; see `take`."""
        shape = (*lead, *self.shape)
        if (
            type(value) is Tensor
            and value.dtype == self.dtype
            and value.shape == shape
            and not value.is_meta
        ):
            return
        if len(self._sizes) == 1 and value is not None and shape != value.shape:
            numbers = {shape[:-1]: "action", (*shape[:-1], 1): "action.squeeze(-1)"}
            if shown := numbers.get(tuple(value.shape)):
                raise InputError(
                    f"{self.key!r} has shape {tuple(value.shape)}, but the env takes {shape}: one-hot rows, and not numbers "
                    f"of options. Spell them, with torch.nn.functional.one_hot({shown}, {shape[-1]}), or build the env "
                    "with categorical_action_encoding=True."
                )
        require_input(self.key, value, shape, None)
        assert value is not None
        if value.dtype != self.dtype and (value.dtype.is_complex or self.dtype.is_complex):
            raise InputError(
                f"{self.key!r} has dtype {value.dtype}, but the env takes {self.dtype}. "
                f"Convert it: value.to({self.dtype})."
            )

    def _may_change(self, value: Tensor) -> bool:
        """Check whether a cast to or from integers could give another number."""
        if value.dtype == self.dtype:
            return False
        return not value.is_floating_point() or not (self.dtype.is_floating_point or self._sizes)

    def _holds(self, rows: np.ndarray) -> bool:
        """Check whether all rows are values of the spec, or become such by a cast that changes none."""
        own_kind = self._in_own_kind(rows)
        return own_kind is not None and self._test(own_kind)

    def _in_own_kind(self, rows: np.ndarray) -> np.ndarray | None:
        """Show integers as floats or floats as integers, as the spec has it; None where one would change."""
        gives_floats = self.dtype.is_floating_point
        if self._sizes or (rows.dtype.kind == "f") == gives_floats:
            return rows
        with np.errstate(invalid="ignore", over="ignore"):
            cast = rows.astype(self._numpy_dtype if gives_floats else np.int64)
            floats = cast if gives_floats else rows
            is_kept = (np.abs(floats) < _END_OF_INTEGERS) & (cast.astype(rows.dtype) == rows)
        return cast if is_kept.all() else None

    def _refuse(
        self, array: np.ndarray, lead: Sequence[int], rows: Sequence[int] | None, first: int | None
    ) -> NoReturn:
        """Return the first row that is no value of the spec."""
        index = next(i for i in range(len(array)) if not self._holds(array[i : i + 1]))
        number = index if rows is None else rows[index]
        error = self._error(array[index], _name_of(number, lead, first))
        if len(lead) == 1 or first is not None:
            error.row = number + (first or 0)
        raise error

    def _error(self, row: np.ndarray, where: str) -> InputError:
        cure = "Bring it there, e.g. with env.action_spec.project(action)."
        demand = demand_of(self._spec)
        if row.dtype.kind == "f" and not np.isfinite(row).all():
            cure = "NaN and infinity come from the policy, or from what it was given."
        elif self._sizes and row.dtype.kind == "f":
            cure = (
                "Scores and probabilities are no action. Sample one, e.g. by a ProbabilisticActor with OneHotCategorical, "
                "or take the largest, torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]), or "
                "ExplorationType.DETERMINISTIC in the place of MEAN."
            )
        elif self._in_own_kind(row) is None:
            demand = f"the env takes {self.dtype}, to which a cast would change it"
            cure = "Round it, or choose among the options, before it is given."
            if self.dtype.is_floating_point:
                cure = f"Pass floats: value.to({self.dtype}) rounds it."
        shown = np.array2string(row, threshold=16, separator=", ").replace("\n", "")
        return InputError(f"{self.key!r}{where} is {shown}, but {demand}. {cure}")


def require_input(key: Any, value: Any, shape: Sequence[int], dtype: torch.dtype | None) -> None:
    """Check the form of an entry that is given to an env; None accepts every dtype.

    Raises:
        MissingKeyError: it is None.
        InputError: it is no tensor, has another shape or dtype, or holds no data.
    """
    if value is None:
        raise MissingKeyError(
            f"the TensorDict has no {key!r}, which the env takes. "
            "Write it, or have the policy write it under this name; env.rand_action(td) draws one."
        )
    if not isinstance(value, Tensor):
        if isinstance(value, NonTensorData):
            value = value.data
        library = type(value).__module__.partition(".")[0]
        fix = "env.rand_action() shows what it takes."
        if hasattr(value, "__dlpack__"):
            fix = "Convert it: torch.from_dlpack(value)."
        raise InputError(
            f"{key!r} is of type {type(value).__name__}, of {library}, but the env takes a tensor of shape "
            f"{tuple(shape)}. {fix}"
        )
    if value.shape != shape:
        raise InputError(
            f"{key!r} has shape {tuple(value.shape)}, but the env takes {tuple(shape)}. "
            "env.rand_action() shows what it takes."
        )
    if dtype is not None and value.dtype != dtype:
        raise InputError(
            f"{key!r} has dtype {value.dtype}, but the env takes {dtype}. "
            f"Convert it: value.to({dtype})."
        )
    if value.is_meta:
        raise InputError(
            f"{key!r} is on the meta device, which holds no data, but the env takes values. "
            "Build it on the CPU or on an accelerator."
        )


def _name_of(row: int, lead: Sequence[int], first: int | None) -> str:
    if not lead and first is None:
        return ""
    if len(lead) <= 1:
        return _row_named((first or 0) + row)
    return f" of row {tuple(map(int, np.unravel_index(row, tuple(lead))))}"


def _row_named(number: int) -> str:
    return f" of row {number}"


def counted_from(first: int, error: InputError) -> InputError:
    """Return an error that speaks of a row as the error of a batch in which row 0 is row ``first``."""
    assert error.row is not None
    told = str(error).replace(_row_named(error.row), _row_named(error.row + first), 1)
    counted = InputError(told)
    counted.row = error.row + first
    return counted


def _without_mask(spec: TensorSpec) -> TensorSpec:
    if isinstance(spec, Stacked):
        return Stacked(*map(_without_mask, spec.members), dim=spec.stack_dim)
    if getattr(spec, "mask", None) is None:
        return spec
    free = spec.clone()
    free.update_mask(None)  # type: ignore[attr-defined]
    return free


Test = Callable[[np.ndarray], bool]

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_MOST_SPELLINGS = 256  # of one one-hot row that are listed


def array_of(value: Tensor) -> np.ndarray:
    """Show a tensor to NumPy; what it has no dtype for, as the float32 of the same value."""
    if not has_array(value):
        value = value.float()
    return value.numpy(force=True)


def has_array(value: Tensor) -> bool:
    """Check whether NumPy has the dtype of a tensor."""
    return not value.is_floating_point() or value.dtype in _FLOATS


_FLOATS = (torch.float16, torch.float32, torch.float64)


def sizes_of(spec: TensorSpec) -> list[int]:
    """Return how many options lie side by side in each part of a one-hot spelling; [] for others."""
    if isinstance(spec, OneHot):
        return [spec.n]
    if isinstance(spec, MultiOneHot):
        return list(spec.nvec)
    members = spec.members if isinstance(spec, Stacked) else getattr(spec, "choices", ())
    sizes = [sizes_of(member) for member in members]
    return sizes[0] if sizes and all(found == sizes[0] for found in sizes) else []


def test_of(spec: TensorSpec) -> Test:
    """Return a function that checks whether a spec holds an array, in the spec's dtype or in one that becomes it."""
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


def _below(count: object) -> Test:
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


def demand_of(spec: TensorSpec) -> str:
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
