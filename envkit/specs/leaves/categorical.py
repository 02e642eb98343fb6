"""Leaves that choose among options: categorical and one-hot, single and multiple.

This module decides how each of the four spells a choice and which is the twin of which. How a
choice is drawn, masked, repaired and listed is decided in `choices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from envkit.arrays.integers import as_int
from envkit.errors import ArgumentError, EncodingError, SpecError
from envkit.specs.annotations import Device, Numbers, Shape, Value
from envkit.specs.base import TensorSpec
from envkit.specs.devices import as_device, require_numbers
from envkit.specs.leaves.choices import HotChoice, MultipleChoice, SingleChoice
from envkit.specs.leaves.leaf import LeafSpec
from envkit.specs.leaves.order import clamp
from envkit.specs.leaves.spaces import BoxList, CategoricalBox
from envkit.specs.shapes import as_shape, lead

__all__ = ["Categorical", "MultiCategorical", "MultiOneHot", "OneHot"]


class Categorical(SingleChoice):
    """Describe integers ``0..n-1``, one per entry.

    Args:
        n: number of options.
        shape: sizes of the tensor, ``()`` by default.
        device: where values are made, ``cpu`` by default.
        dtype: int64 by default; ``torch.bool`` with ``n=2`` describes flags.
        mask: allowed options, see `update_mask`.

    Raises:
        SpecError: fewer than one option, or more than two with a bool dtype.
    """

    def __init__(
        self,
        n: int,
        shape: Shape | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = torch.int64,
        mask: Numbers | None = None,
    ):
        self._n = _checked_n(n)
        self._check_flag(dtype)
        super().__init__(() if shape is None else shape, device, dtype)
        self.update_mask(mask)

    def cast(self, dtype: torch.dtype) -> TensorSpec:
        self._check_flag(dtype)
        return super().cast(dtype)

    def _check_flag(self, dtype: torch.dtype | None) -> None:
        if dtype == torch.bool and self._n > 2:
            raise SpecError(
                f"Categorical with n={self._n} cannot have dtype torch.bool, which holds two "
                "values. Use an integer dtype."
            )

    @property
    def _lead(self) -> torch.Size:
        return self._size

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        if self._mask is not None:
            return super().rand(shape, generator)
        return torch.randint(
            self._n,
            (*lead(shape), *self._size),
            generator=generator,
            dtype=self._dtype,
            device=self._device,
        )

    def _nearest(self, value: Tensor) -> Tensor:
        if self._mask is not None:
            return super()._nearest(value)
        if self._dtype == torch.bool:
            return value if self._n == 2 else torch.zeros_like(value)
        return clamp(value, 0, self._n - 1)

    def _from_index(self, index: Tensor) -> Tensor:
        return index.squeeze(-1).to(self._dtype)

    def _to_index(self, value: Tensor) -> Tensor:
        return value.unsqueeze(-1).long()

    def index(self, index: Tensor, tensor: Tensor) -> Tensor:
        return super().index(index, tensor).squeeze(-1)

    def to_one_hot_spec(self) -> OneHot:
        return OneHot(self._n, (*self._shape, self._n), self._device, mask=self._mask)

    def to_categorical(self, value: Value, safe: bool | None = None) -> Tensor:
        self._check_if_safe(value, safe)
        return value

    def to_categorical_spec(self) -> Categorical:
        return self.clone()


class OneHot(SingleChoice, HotChoice):
    """Describe one-hot vectors: exactly one of the ``n`` last entries is active.

    Args:
        n: number of options.
        shape: sizes of the tensor, the last being ``n``; ``(n,)`` by default.
        device: where values are made, ``cpu`` by default.
        dtype: bool by default.
        use_register: let `encode` number raw values of any kind, strings for example, in the order in
            which they first come, and `to_numpy` give them back. Clones share what is registered;
            copies in other processes do not.
        mask: allowed options, see `update_mask`.

    Raises:
        SpecError: fewer than one option, or a shape that does not end in ``n``.
    """

    _register: dict[Any, int] | None

    def __init__(
        self,
        n: int,
        shape: Shape | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = torch.bool,
        use_register: bool = False,
        mask: Numbers | None = None,
    ):
        self._n = _checked_n(n)
        self._register = {} if use_register else None
        super().__init__(_ending_in(self, self._n, shape, "n"), device, dtype)
        self.update_mask(mask)

    @property
    def use_register(self) -> bool:
        """Whether raw values are numbered as they come."""
        return self._register is not None

    def _signature(self) -> tuple[Any, ...]:
        return (*super()._signature(), self.use_register)

    def _to_tensor(self, raw: Any, ignore_device: bool = False) -> Tensor:
        if self._register is None or self._is_shape(np.shape(raw)):
            return super()._to_tensor(raw, ignore_device)
        values = np.array(raw.tolist() if isinstance(raw, Tensor) else raw, dtype=object)
        numbers = [self._number(value) for value in values.flatten().tolist()]
        return super()._to_tensor(torch.tensor(numbers).reshape(values.shape), ignore_device)

    def _number(self, raw: Any) -> int:
        assert self._register is not None
        number = self._register.get(raw, len(self._register))
        if number == self._n:
            raise EncodingError(
                f"{raw!r} is new to a register that holds {self._n} values already: {list(self._register)}. "
                "Pass one of these, or make a spec of more options."
            )
        self._register[raw] = number
        return number

    def to_numpy(self, value: Tensor, safe: bool | None = None) -> np.ndarray:
        numbers = super().to_numpy(value, safe)
        if self._register is None:
            return numbers
        raws = list(self._register)
        if numbers.size and int(numbers.max()) >= len(raws):
            raise EncodingError(
                f"option {int(numbers.max())} stands for no value yet: {len(raws)} are registered. Encode a value "
                "before you ask for it."
            )
        return np.array([raws[number] for number in numbers.flatten()]).reshape(numbers.shape)

    def to_one_hot(self, value: Value, safe: bool | None = None) -> Tensor:
        self._check_if_safe(value, safe)
        return value

    def to_one_hot_spec(self) -> OneHot:
        return self.clone()

    def to_categorical_spec(self) -> Categorical:
        return Categorical(self._n, self._shape[:-1], self._device, mask=self._mask)


class MultiCategorical(MultipleChoice):
    """Describe vectors of integers, entry ``i`` in ``0..nvec[i]-1``.

    Args:
        nvec: options of each entry, shape ``(choices,)``; more axes give rows their own numbers.
        shape: sizes of the tensor; the shape of ``nvec`` must broadcast to it and is the default.
        device: where values are made, ``cpu`` by default.
        dtype: int64 by default.
        mask: allowed options, see `update_mask`; all rows must share their numbers then.

    Raises:
        SpecError: no entry, one below one, or a shape that does not end in the number of entries.
    """

    _encoding_ndim = 1
    _contents = ("_mask", "_nvec")

    _nvec: Tensor

    def __init__(
        self,
        nvec: Numbers,
        shape: Shape | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = torch.int64,
        mask: Numbers | None = None,
    ):
        device = as_device(device)
        require_numbers(device, self, nvec)
        counts = torch.atleast_1d(_counts_in(nvec, device))
        if not counts.numel():
            raise _no_choices_in(self)
        _checked_n(int(counts.min()))
        shape = _ending_in(
            self, counts.shape[-1], counts.shape if shape is None else shape, "len(nvec)"
        )
        super().__init__(shape, device, dtype)
        self._nvec = counts.expand(self._size)
        self.update_mask(mask)

    @property
    def nvec(self) -> Tensor:
        """Number of options of each entry, of the spec's shape."""
        return self._nvec

    @property
    def _sizes(self) -> tuple[int, ...]:
        rows = self._nvec.reshape(-1, self._nvec.shape[-1])
        if not bool((rows == rows[:1]).all()):
            raise SpecError(
                f"the rows of nvec={self._nvec.tolist()} differ, so that the spec has no mask and "
                "no one-hot form. Make one spec for each row."
            )
        return tuple(rows[0].tolist()) if len(rows) else ()

    @property
    def _options(self) -> Tensor:
        return self._nvec

    def _make_space(self) -> BoxList | CategoricalBox:
        return BoxList.from_nvec(self._nvec)

    def _counted(self) -> Tensor:
        rows = self._nvec.reshape(-1, self._nvec.shape[-1])
        return rows[0] if len(rows) and bool((rows == rows[:1]).all()) else self._nvec

    def _facts(self) -> dict[str, Any]:
        masked = {} if self._mask is None else {"masked": True}
        return {"nvec": "unknown" if self._nvec.is_meta else self._nvec.tolist(), **masked}

    def _select(self, axis: int, index: Tensor) -> MultiCategorical:
        if axis < len(self._free_shape):
            return super()._select(axis, index)
        counts = self._nvec.index_select(-1, index)
        mask = self._mask
        if mask is not None:
            blocks = self._blocks(mask)
            mask = torch.cat([blocks[i] for i in index.tolist()], -1)
        return MultiCategorical(counts, counts.shape, self._device, self._dtype, mask)

    def _from_index(self, index: Tensor) -> Tensor:
        return index.to(self._dtype)

    def _to_index(self, value: Tensor) -> Tensor:
        return value.long()

    def to_one_hot_spec(self) -> MultiOneHot:
        sizes = self._sizes
        shape = (*self._shape[:-1], sum(sizes))
        return MultiOneHot(sizes, shape, self._device, mask=self._mask)

    def to_categorical(self, value: Value, safe: bool | None = None) -> Tensor:
        self._check_if_safe(value, safe)
        return value

    def to_categorical_spec(self) -> MultiCategorical:
        return self.clone()


class MultiOneHot(MultipleChoice, HotChoice):
    """Describe several one-hot vectors, one after the other on the last axis.

    Args:
        nvec: number of options of each one-hot vector.
        shape: sizes of the tensor, the last being ``sum(nvec)``; ``(sum(nvec),)`` by default.
        device: where values are made, ``cpu`` by default.
        dtype: bool by default.
        mask: allowed options, see `update_mask`.

    Raises:
        SpecError: no entry, one below one, or a shape that does not end in ``sum(nvec)``.
    """

    def __init__(
        self,
        nvec: Sequence[int] | Tensor,
        shape: Shape | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = torch.bool,
        mask: Numbers | None = None,
    ):
        self._nvec = tuple(map(_checked_n, nvec))
        if not self._nvec:
            raise _no_choices_in(self)
        super().__init__(_ending_in(self, sum(self._nvec), shape, "sum(nvec)"), device, dtype)
        self.update_mask(mask)

    @property
    def nvec(self) -> tuple[int, ...]:
        """Number of options of each one-hot vector."""
        return self._nvec

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self._nvec

    def _signature(self) -> tuple[Any, ...]:
        return (*super()._signature(), self._nvec)

    def to_one_hot(self, value: Value, safe: bool | None = None) -> Tensor:
        self._check_if_safe(value, safe)
        return value

    def to_one_hot_spec(self) -> MultiOneHot:
        return self.clone()

    def to_categorical_spec(self) -> MultiCategorical:
        shape = (*self._shape[:-1], len(self._nvec))
        return MultiCategorical(self._nvec, shape, self._device, mask=self._mask)


def _checked_n(n: Any) -> int:
    plain = n.item() if isinstance(n, Tensor | np.generic) else n
    whole = int(plain) if isinstance(plain, float) and plain.is_integer() else plain
    try:
        return as_int("n", whole, least=1, meaning="the number of options")
    except ArgumentError as error:
        raise SpecError(
            f"a choice has {plain!r} options. Give it a whole number, at least one."
        ) from error


def _counts_in(nvec: Numbers, device: torch.device | None) -> Tensor:
    """Give numbers of options as int64; floats that are whole are numbers of options, others and bools are refused."""
    if not isinstance(nvec, Tensor | np.ndarray):
        listed = np.asarray(nvec, object).flat
    elif str(nvec.dtype).removeprefix("torch.").startswith(("int", "uint")):
        listed = ()  # no need to look at each
    else:
        listed = nvec.flatten().tolist()
    for n in listed:
        _checked_n(n)
    return torch.as_tensor(nvec, dtype=torch.int64, device=device)


def _no_choices_in(spec: LeafSpec) -> SpecError:
    return SpecError(
        f"{type(spec).__name__} got an empty nvec. Give the options of each choice, e.g. [2, 3]."
    )


def _ending_in(spec: LeafSpec, size: int, shape: Any, meaning: str) -> torch.Size:
    """Complete a shape and check its last size."""
    shape = as_shape(size if shape is None else shape)
    if shape[-1:] != (size,):
        raise SpecError(
            f"{type(spec).__name__} got shape {tuple(shape)}, whose last size must equal "
            f"{meaning}={size}. Pass shape {(*shape[:-1], size)}."
        )
    return shape
