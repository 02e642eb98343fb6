"""What every spec can do: be reshaped, moved, sampled, tested and converted.

This module decides the public calls of a spec and everything that does not depend on its domain:
device, dtype, the membership test, encoding; shapes are those of `reshapable`. A kind of spec adds its
domain: `rand` and `_nearest`. It knows no composite and no stack: what torch's functions make of specs
is registered by the package (`on_torch_function`).

A spec is a value: all calls but `update_mask` and the edits of a composite return a new one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor

from envkit.errors import (
    NoChoiceError,
    NotEnumerableError,
    OutOfSpecError,
    SpecTypeError,
)
from envkit.specs import display
from envkit.specs.annotations import Key, Place, Shape, Value
from envkit.specs.reshapable import Reshapable

__all__ = [
    "TensorSpec",
    "checks_values",
    "on_torch_function",
    "require_dtype",
]

_TORCH_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}


def on_torch_function(function: Callable[..., Any], of_specs: Callable[..., Any]) -> None:
    """Have a function of torch, called with specs, do what ``of_specs`` does; both take the same."""
    _TORCH_FUNCTIONS[function] = of_specs


def checks_values() -> bool:
    """Tell whether ``CHECK_SPEC_ENCODE`` asks `encode` and `to_numpy` to check their values."""
    return os.environ.get("CHECK_SPEC_ENCODE", "0").lower() not in ("", "0", "false", "no")


def require_dtype(dtype: object) -> torch.dtype:
    """Give the dtype back.

    Raises:
        SpecTypeError: it is something else.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    raise SpecTypeError(
        f"dtype is {dtype!r} of type {type(dtype).__name__}. Pass a dtype of torch, e.g. torch.float32."
    )


class TensorSpec(Reshapable):
    """Describe a tensor, or a tree of tensors, without holding data.

    Attributes:
        shape: sizes including the env's batch axes; -1 marks an axis of unknown size.
        device: where values are made; a composite may have ``None``.
        dtype: dtype of the values, ``None`` for composites and non-tensor data.
        space: a description of the domain, or ``None``.
        domain: ``"continuous"``, ``"discrete"`` or ``None``.
    """

    domain: ClassVar[str | None] = None

    is_choice: ClassVar[bool] = False  # converts between categorical and one-hot
    _takes_batch_axes: ClassVar[bool] = False  # of the composite that it is put into
    _caches: ClassVar[tuple[str, ...]] = ()  # attributes that are rebuilt on demand

    _device: torch.device | None
    _dtype: torch.dtype | None

    # -- description -------------------------------------------------------------------

    @property
    def device(self) -> torch.device | None:
        return self._device

    @property
    def dtype(self) -> torch.dtype | None:
        return self._dtype

    @property
    def space(self) -> Any:
        return None

    # -- copies ------------------------------------------------------------------------

    def _copy(self) -> Self:
        """Copy the spec, sharing its contents and dropping its caches."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__getstate__())
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in self._caches}

    def clone(self) -> Self:
        """Copy the spec and all it holds. The copy is never locked."""
        raise NotImplementedError

    def to(self, dest: Place | None) -> TensorSpec:
        """Make the same spec on another device, or with another dtype.

        Args:
            dest: a device (or its name), or a dtype; for ``None`` the spec itself is given back.
        """
        raise NotImplementedError

    def cast(self, dtype: torch.dtype) -> TensorSpec:
        """Make the same spec with another dtype.

        Raises:
            SpecError: the domain has no form in that dtype.
        """
        raise NotImplementedError

    def clear_device_(self) -> Self:
        """Drop the constraint on devices of a tree; a leaf keeps its device."""
        return self

    def cpu(self) -> TensorSpec:
        """Make the same spec on the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> TensorSpec:
        """Make the same spec on a CUDA device, the current one by default."""
        return self.to(torch.device("cuda") if device is None else torch.device("cuda", device))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _TORCH_FUNCTIONS:
            return NotImplemented
        return _TORCH_FUNCTIONS[func](*args, **(kwargs or {}))

    # -- values ------------------------------------------------------------------------

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Value:
        """Draw a random value of shape ``(*shape, *self.shape)``; an int is one axis in front.

        From ``generator``, which must be on the spec's device; None takes torch's global one.
        """
        raise NotImplementedError

    def sample(self, shape: Shape = (), generator: Generator | None = None) -> Value:
        """Draw a random value; the same as `rand`."""
        return self.rand(shape, generator)

    def zero(self, shape: Shape = ()) -> Value:
        """Make zeros, in the domain or not, of shape ``(*shape, *self.shape)``."""
        raise NotImplementedError

    def zeros(self, shape: Shape = ()) -> Value:
        """Make a value filled with zeros; the same as `zero`."""
        return self.zero(shape)

    def one(self, shape: Shape = ()) -> Value:
        """Make ones, in the domain or not, of shape ``(*shape, *self.shape)``."""
        raise NotImplementedError

    def ones(self, shape: Shape = ()) -> Value:
        """Make a value filled with ones; the same as `one`."""
        return self.one(shape)

    def enumerate(self, use_mask: bool = False) -> Value:
        """List all values, stacked on a new first axis.

        A choice with batch axes lists the values of one position, each taken by the whole batch.

        Args:
            use_mask: list only what the mask allows.

        Raises:
            NotEnumerableError: the values of this spec cannot be listed.
        """
        raise NotEnumerableError(
            f"{type(self).__name__} has no finite list of values. Enumerate a discrete spec."
        )

    def cardinality(self) -> float | int:
        """Count the values that `enumerate` lists, masks left aside; ``inf`` where there is no end."""
        return float("inf")

    # -- testing and repairing ---------------------------------------------------------

    def is_in(self, value: object) -> bool:
        """Tell whether a value belongs to the spec, extra leading axes allowed; never raise."""
        raise NotImplementedError

    def __contains__(self, value: Any) -> bool:
        return self.is_in(value)

    def contains(self, value: object) -> bool:
        """Tell whether a value belongs to the spec; the same as `is_in`."""
        return self.is_in(value)

    def assert_is_in(self, value: object) -> None:
        """Check that a value belongs to the spec.

        Raises:
            OutOfSpecError: it does not; the message says why.
        """
        if not self.is_in(value):
            raise OutOfSpecError(
                f"{self._complaint(value)}. Expected a value of {self!r}; "
                "`spec.project(value)` gives the nearest one."
            )

    def _complaint(self, value: Any) -> str:
        """Say what keeps a value out of the spec."""
        return f"got {value!r}"

    def type_check(self, value: object, key: Key | None = None) -> None:
        """Check the dtype of a value, and nothing else.

        Args:
            value: what to check.
            key: name of the entry, used in the message only.

        Raises:
            SpecTypeError: the dtype differs.
        """
        dtype = getattr(value, "dtype", None)
        if self._dtype is not None and dtype != self._dtype:
            raise SpecTypeError(
                f"{'value' if key is None else f'entry {key!r}'} has dtype {dtype}, but its spec "
                f"has {self._dtype}. Convert it with `value.to({self._dtype})`."
            )

    def project(self, value: Value) -> Value:
        """Return the value itself if it is in the spec, else the nearest value that is.

        NaN counts as 0 where the spec has bounds or options; `Unbounded` takes it as it is.
        """
        raise NotImplementedError

    # -- conversion --------------------------------------------------------------------

    def encode(self, raw: object, *, ignore_device: bool = False) -> Value:
        """Turn a number, array, list or dict into a value of this spec.

        Args:
            raw: what an env produced. NumPy data is copied, a tensor that already fits is not.
            ignore_device: leave the result where the raw data is (CPU for non-tensors).

        Raises:
            EncodingError: the number of elements does not fit the shape, or an option that is to
                be spelled does not exist.
            OutOfSpecError: the value is outside the domain, and the environment variable
                ``CHECK_SPEC_ENCODE`` asks for the check.
        """
        raise NotImplementedError

    def memoize_encode(self, mode: bool = True) -> None:
        """Record the conversions of the next `encode` and replay them, unchecked, afterwards.

        Valid only while the raw values keep their type and shape.
        """
        raise NotImplementedError

    def erase_memoize_cache(self) -> None:
        """Forget recorded conversions; the next `encode` records them anew if memoizing."""
        raise NotImplementedError

    def to_numpy(self, value: Value, safe: bool | None = None) -> Any:
        """Turn a value of this spec into NumPy data, the inverse of `encode`.

        Args:
            value: a value of this spec, on any device.
            safe: call `assert_is_in` first.
        """
        raise NotImplementedError

    def _check_if_safe(self, value: Any, safe: bool | None) -> None:
        if checks_values() if safe is None else safe:
            self.assert_is_in(value)

    def index(self, index: Value, tensor: Tensor) -> Tensor:
        """Pick from ``tensor`` what a value of this spec, a choice among options, points at."""
        raise self._no_choices()

    def to_one_hot(self, value: Value, safe: bool | None = None) -> Value:
        """Turn a categorical value into its one-hot form."""
        raise self._no_choices()

    def to_one_hot_spec(self) -> TensorSpec:
        """Describe the values that `to_one_hot` gives."""
        raise self._no_choices()

    def to_categorical(self, value: Value, safe: bool | None = None) -> Value:
        """Turn a one-hot value into its categorical form."""
        raise self._no_choices()

    def to_categorical_spec(self) -> TensorSpec:
        """Describe the values that `to_categorical` gives."""
        raise self._no_choices()

    def _no_choices(self) -> NoChoiceError:
        return NoChoiceError(
            f"{type(self).__name__} is no choice among n options. "
            "Only Categorical, OneHot, MultiCategorical and MultiOneHot convert to each other and "
            "index tensors."
        )

    # -- display -----------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        """What the spec says of its values beside shape, device and dtype, for `repr`."""
        return {}

    def _shown(self) -> list[tuple[str, Any]]:
        """The specs that this one is made of, under the labels to show; empty for a leaf."""
        return []

    def __repr__(self) -> str:
        return display.text(self)

    def _repr_html_(self) -> str:
        return display.html(self)
