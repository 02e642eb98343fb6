"""Leaves that choose among options: categorical and one-hot, single and multiple.

This module decides how a choice is drawn, masked, repaired and listed. All four classes share one
*index form*; each says only how its values are spelled.

Conventions
    index    int64, shape (*lead, choices): which option each sub-choice takes.
    options  int64, broadcasts to the index: how many options each sub-choice has.
    mask     bool, shape (*lead, sum of options): True where an option is allowed; sub-choices
             lie side by side on the last axis, as in a one-hot value.
    lead     shape of the spec without the axis that spells or lists the sub-choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envkit.errors import ArgumentError, EncodingError, SpecError
from envkit.specs.base import LeafSpec, Shape, TensorSpec, as_device, digits
from envkit.specs.shapes import as_shape
from envkit.specs.spaces import BoxList, CategoricalBox

__all__ = ["Categorical", "MultiCategorical", "MultiOneHot", "OneHot"]


class _Choices(LeafSpec):
    """A choice in each of several sub-choices; subclasses spell it."""

    domain = "discrete"
    is_choice = True
    _contents = ("_mask",)
    _caches = (*LeafSpec._caches, "_mask_is_checked")

    _mask: Tensor | None = None
    _mask_is_checked: bool = False

    # -- what a spelling defines -------------------------------------------------------

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Options of each sub-choice."""
        raise NotImplementedError

    @property
    def _options(self) -> Tensor:
        return torch.tensor(self._sizes, device=self._device)

    @property
    def _lead(self) -> torch.Size:
        return self._size[:-1]

    def _from_index(self, index: Tensor) -> Tensor:
        """Spell an index, with any leading axes, in the spec's dtype."""
        raise NotImplementedError

    def _to_index(self, value: Tensor) -> Tensor:
        """Read a value. What is no proper value gives some index, in range or not."""
        raise NotImplementedError

    # -- mask --------------------------------------------------------------------------

    @property
    def mask(self) -> Tensor | None:
        """Allowed options, shape ``(*lead, sum of options)``, or ``None`` if all are."""
        return self._mask

    def update_mask(self, mask: Any) -> None:
        """Allow the options where ``mask`` is set only; ``None`` allows all.

        Args:
            mask: bool, broadcasts to ``(*lead, n)``. It is copied.

        Raises:
            SpecError: another dtype, or a shape that does not broadcast.
        """
        self._mask_is_checked = False
        if mask is None:
            self._mask = None
            return
        mask = torch.as_tensor(mask, device=self._device)
        shape = (*self._lead, sum(self._sizes))
        try:
            expanded = mask.expand(shape)
        except RuntimeError:
            expanded = None
        if expanded is None or mask.dtype != torch.bool:
            raise SpecError(
                f"mask has dtype {mask.dtype} and shape {tuple(mask.shape)}, but must be torch.bool "
                f"and broadcast to {shape}. Pass one flag for each option."
            )
        self._mask = expanded.clone()

    def _blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Split the last axis into sub-choices."""
        return tensor.split(self._sizes, -1)

    def _check_mask(self, mask: Tensor) -> None:
        for block in self._blocks(mask):
            if not bool(block.any(-1).all()):
                raise SpecError(
                    f"the mask of {type(self).__name__} of shape {tuple(self.shape)} allows no "
                    "option in some row. Allow at least one there with `update_mask`."
                )
        self._mask_is_checked = True

    def _allowed(self, index: Tensor) -> Tensor:
        """Tell for each row of an index that is in range whether the mask allows all of it."""
        if self._mask is None:
            return torch.ones(index.shape[:-1], dtype=torch.bool, device=index.device)
        mask = self._mask.expand(*index.shape[:-1], self._mask.shape[-1])
        return mask.gather(-1, index + self._offsets()).all(-1)

    def _offsets(self) -> Tensor:
        """Where each sub-choice begins on the axis of all options."""
        starts = [sum(self._sizes[:i]) for i in range(len(self._sizes))]
        return torch.tensor(starts, device=self._device)

    # -- values ------------------------------------------------------------------------

    def rand(self, shape: Shape = ()) -> Tensor:
        return self._from_index(self._draw(tuple(shape)))

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        if self._mask is None:
            size = (*shape, *self._lead, self._options.shape[-1])
            return (torch.rand(size, device=self._device) * self._options).long()
        if not self._mask_is_checked:
            self._check_mask(self._mask)
        scores = torch.rand((*shape, *self._mask.shape), device=self._device)
        scores = torch.where(self._mask, scores, -1.0)
        return torch.stack([block.argmax(-1) for block in self._blocks(scores)], -1)

    def enumerate(self, use_mask: bool = False) -> Tensor:
        index = digits(self._options.expand(*self._lead, self._options.shape[-1]))
        if use_mask:
            index = index[self._allowed(index).flatten(1).all(1)]
        return self._from_index(index)

    def cardinality(self) -> int:
        return math.prod(self._sizes) ** self._lead.numel()

    def _nearest(self, value: Tensor) -> Tensor:
        index = self._to_index(value)
        index = torch.minimum(index.clamp(min=0), self._options - 1)
        return self._from_index(index if self._mask is None else self._nearest_allowed(index))

    def _nearest_allowed(self, index: Tensor) -> Tensor:
        """Replace each option by the allowed one whose number is nearest."""
        assert self._mask is not None
        chosen = []
        for i, block in enumerate(self._blocks(self._mask)):
            numbers = torch.arange(block.shape[-1], device=block.device)
            distance = (numbers - index[..., i, None]).abs()
            chosen.append(torch.where(block, distance, block.shape[-1]).argmin(-1))
        return torch.stack(chosen, -1)

    def index(self, index: Tensor, tensor: Tensor) -> Tensor:
        """Pick from ``tensor`` what a value of this spec points at.

        Args:
            index: a value of this spec.
            tensor: shape ``(*lead, sum of options)``, for example one number per action.

        Returns:
            The picked entries, shape ``(*lead, choices)``; a single choice keeps an axis of 1.

        Raises:
            ArgumentError: ``index`` is no tensor, or ``tensor`` has another last size.
        """
        total = sum(self._sizes)
        if not isinstance(index, Tensor) or tensor.shape[-1:] != (total,):
            raise ArgumentError(
                f"index got {type(index).__name__} and a tensor of shape {tuple(tensor.shape)}. "
                f"Pass a value of the spec and a tensor whose last size is {total}."
            )
        picked = self._to_index(index) + self._offsets()
        lead = torch.broadcast_shapes(picked.shape[:-1], tensor.shape[:-1])
        return tensor.expand(*lead, total).gather(-1, picked.expand(*lead, picked.shape[-1]))

    # -- conversion --------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        masked = {} if self._mask is None else {"masked": True}
        return {"n": self.n, **masked}

    @property
    def n(self) -> int:
        """Number of options, over all sub-choices."""
        return sum(self._sizes)

    def to_one_hot(self, value: Any, safe: bool | None = None) -> Tensor:
        self._check_if_safe(value, safe)
        return self.to_one_hot_spec()._from_index(self._to_index(value))

    def to_categorical(self, value: Any, safe: bool | None = None) -> Tensor:
        self._check_if_safe(value, safe)
        return self.to_categorical_spec()._from_index(self._to_index(value))

    def to_one_hot_spec(self) -> _Choices:
        raise NotImplementedError

    def to_categorical_spec(self) -> _Choices:
        raise NotImplementedError


class _Single(_Choices):
    """One choice among ``n``."""

    _n: int

    @property
    def n(self) -> int:
        """Number of options."""
        return self._n

    @property
    def space(self) -> CategoricalBox:
        return CategoricalBox(self._n)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (self._n,)

    def _signature(self) -> tuple[Any, ...]:
        return (*super()._signature(), self._n)

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        if self._mask is None:
            return torch.randint(self._n, (*shape, *self._lead, 1), device=self._device)
        return super()._draw(shape)


class _Multiple(_Choices):
    """Several choices side by side."""

    @property
    def space(self) -> BoxList:
        return BoxList(tuple(CategoricalBox(n) for n in self._sizes))

    def _facts(self) -> dict[str, Any]:
        masked = {} if self._mask is None else {"masked": True}
        return {"nvec": list(self._sizes), **masked}


class _Hot(_Choices):
    """Spell a choice as zeros with one active entry per sub-choice."""

    _encoding_ndim = 1

    def _from_index(self, index: Tensor) -> Tensor:
        value = torch.zeros(
            (*index.shape[:-1], self._size[-1]), dtype=self._dtype, device=index.device
        )
        return value.scatter_(-1, index if len(self._sizes) == 1 else index + self._offsets(), 1)

    def _to_index(self, value: Tensor) -> Tensor:
        if value.dtype == torch.bool:
            value = value.byte()  # torch has no argmax of bools
        if len(self._sizes) == 1:
            return value.argmax(-1, keepdim=True)
        return torch.stack([block.argmax(-1) for block in self._blocks(value)], -1)

    def _to_tensor(self, raw: Any, ignore_device: bool = False) -> Tensor:
        raw = raw if isinstance(raw, Tensor) else torch.from_numpy(np.array(raw))
        return raw if ignore_device else raw.to(self._device)

    def _to_shape(self, value: Tensor) -> Tensor:
        """Spell raw numbers; what ends in the spec's shape already is taken as spelled."""
        if self._fits(value.shape):
            return value.to(self._dtype)
        shape = torch.Size((*self._lead, len(self._sizes)))
        if value.numel() == shape.numel():
            return self._from_index(value.reshape(shape).long())
        if len(self._sizes) == 1:
            value = value.unsqueeze(-1)
        if value.shape[max(0, value.ndim - len(shape)) :] == shape:
            return self._from_index(value.long())
        raise EncodingError(
            f"a value of shape {tuple(value.shape)} does not fit {type(self).__name__} of shape "
            f"{tuple(self.shape)}. Pass option numbers of shape {tuple(shape)}, or one-hot rows."
        )

    def _recording(
        self, reshaped: bool, shape: torch.Size, ignore_device: bool
    ) -> Callable[[Any], Tensor]:
        return lambda raw: self._to_shape(self._to_tensor(raw, ignore_device))

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        self._check_if_safe(value, safe)
        return self.to_categorical(value, safe=False).detach().cpu().numpy()


class Categorical(_Single):
    """Describe integers ``0..n-1``, one per entry.

    Args:
        n: number of options.
        shape: sizes of the tensor.
        device: where values are made, ``cpu`` by default.
        dtype: int64 by default; ``torch.bool`` with ``n=2`` describes flags.
        mask: allowed options, see `update_mask`.

    Raises:
        SpecError: fewer than one option, or more than two with a bool dtype.
    """

    def __init__(
        self,
        n: int,
        shape: Any = (),
        device: Any = None,
        dtype: torch.dtype = torch.int64,
        mask: Any = None,
    ):
        self._n = _checked_n(n)
        super().__init__(shape, device, dtype)
        self._check_flag(dtype)
        self.update_mask(mask)

    def _cast(self, dtype: torch.dtype) -> TensorSpec:
        self._check_flag(dtype)
        return super()._cast(dtype)

    def _check_flag(self, dtype: torch.dtype) -> None:
        if dtype == torch.bool and self._n > 2:
            raise SpecError(
                f"Categorical with n={self._n} cannot have dtype torch.bool, which holds two "
                "values. Use an integer dtype."
            )

    @property
    def _lead(self) -> torch.Size:
        return self._size

    def rand(self, shape: Shape = ()) -> Tensor:
        if self._mask is not None:
            return super().rand(shape)
        return torch.randint(self._n, (*shape, *self._size), dtype=self._dtype, device=self._device)

    def _nearest(self, value: Tensor) -> Tensor:
        if self._mask is not None:
            return super()._nearest(value)
        if self._dtype == torch.bool:
            return value if self._n == 2 else torch.zeros_like(value)
        return value.clamp(0, self._n - 1)

    def _from_index(self, index: Tensor) -> Tensor:
        return index.squeeze(-1).to(self._dtype)

    def _to_index(self, value: Tensor) -> Tensor:
        return value.unsqueeze(-1).long()

    def to_one_hot_spec(self) -> OneHot:
        return OneHot(self._n, (*self._shape, self._n), self._device, mask=self._mask)

    def to_categorical(self, value: Any, safe: bool | None = None) -> Tensor:
        self._check_if_safe(value, safe)
        return value

    def to_categorical_spec(self) -> Categorical:
        return self.clone()


class OneHot(_Single, _Hot):
    """Describe one-hot vectors: exactly one of the ``n`` last entries is active.

    Args:
        n: number of options.
        shape: sizes of the tensor, the last being ``n``; ``(n,)`` by default.
        device: where values are made, ``cpu`` by default.
        dtype: bool by default.
        mask: allowed options, see `update_mask`.

    Raises:
        SpecError: fewer than one option, or a shape that does not end in ``n``.
    """

    def __init__(
        self,
        n: int,
        shape: Any = None,
        device: Any = None,
        dtype: torch.dtype = torch.bool,
        mask: Any = None,
    ):
        self._n = _checked_n(n)
        super().__init__(_ending_in(self, n, shape, "n"), device, dtype)
        self.update_mask(mask)

    def to_one_hot(self, value: Any, safe: bool | None = None) -> Tensor:
        self._check_if_safe(value, safe)
        return value

    def to_one_hot_spec(self) -> OneHot:
        return self.clone()

    def to_categorical_spec(self) -> Categorical:
        return Categorical(self._n, self._shape[:-1], self._device, mask=self._mask)


class MultiCategorical(_Multiple):
    """Describe vectors of integers, entry ``i`` in ``0..nvec[i]-1``.

    Args:
        nvec: options of each entry, shape ``(choices,)``; more axes give rows their own numbers.
        shape: sizes of the tensor; the shape of ``nvec`` must broadcast to it and is the default.
        device: where values are made, ``cpu`` by default.
        dtype: int64 by default.
        mask: allowed options, see `update_mask`; all rows must share their numbers then.

    Raises:
        SpecError: an entry below one, or a shape that does not end in the number of entries.
    """

    _encoding_ndim = 1
    _contents = ("_mask", "_nvec")

    _nvec: Tensor

    def __init__(
        self,
        nvec: Any,
        shape: Any = None,
        device: Any = None,
        dtype: torch.dtype = torch.int64,
        mask: Any = None,
    ):
        device = as_device(device)
        nvec = torch.atleast_1d(torch.as_tensor(nvec, dtype=torch.int64, device=device))
        _checked_n(int(nvec.min()))
        shape = _ending_in(
            self, nvec.shape[-1], nvec.shape if shape is None else shape, "len(nvec)"
        )
        super().__init__(shape, device, dtype)
        self._nvec = nvec.expand(self._size)
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

    @property
    def space(self) -> BoxList:
        return _boxes(self._nvec.tolist())

    def cardinality(self) -> int:
        return math.prod(self._nvec.flatten().tolist())

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "nvec": self._nvec.tolist()}

    def _from_index(self, index: Tensor) -> Tensor:
        return index.to(self._dtype)

    def _to_index(self, value: Tensor) -> Tensor:
        return value.long()

    def to_one_hot_spec(self) -> MultiOneHot:
        sizes = self._sizes
        shape = (*self._shape[:-1], sum(sizes))
        return MultiOneHot(sizes, shape, self._device, mask=self._mask)

    def to_categorical(self, value: Any, safe: bool | None = None) -> Tensor:
        self._check_if_safe(value, safe)
        return value

    def to_categorical_spec(self) -> MultiCategorical:
        return self.clone()


class MultiOneHot(_Multiple, _Hot):
    """Describe several one-hot vectors, one after the other on the last axis.

    Args:
        nvec: number of options of each one-hot vector.
        shape: sizes of the tensor, the last being ``sum(nvec)``; ``(sum(nvec),)`` by default.
        device: where values are made, ``cpu`` by default.
        dtype: bool by default.
        mask: allowed options, see `update_mask`.

    Raises:
        SpecError: an entry below one, or a shape that does not end in ``sum(nvec)``.
    """

    def __init__(
        self,
        nvec: Sequence[int] | Tensor,
        shape: Any = None,
        device: Any = None,
        dtype: torch.dtype = torch.bool,
        mask: Any = None,
    ):
        self._nvec = tuple(_checked_n(int(n)) for n in nvec)
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

    def to_one_hot(self, value: Any, safe: bool | None = None) -> Tensor:
        self._check_if_safe(value, safe)
        return value

    def to_one_hot_spec(self) -> MultiOneHot:
        return self.clone()

    def to_categorical_spec(self) -> MultiCategorical:
        shape = (*self._shape[:-1], len(self._nvec))
        return MultiCategorical(self._nvec, shape, self._device, mask=self._mask)


def _checked_n(n: int) -> int:
    if n < 1:
        raise SpecError(f"a choice has {n} options. Give it at least one.")
    return n


def _ending_in(spec: LeafSpec, size: int, shape: Any, meaning: str) -> torch.Size:
    """Complete a shape and check its last size."""
    shape = as_shape(size if shape is None else shape)
    if shape[-1:] != (size,):
        raise SpecError(
            f"{type(spec).__name__} got shape {tuple(shape)}, whose last size must equal "
            f"{meaning}={size}. Pass shape {(*shape[:-1], size)}."
        )
    return shape


def _boxes(nvec: Any) -> Any:
    if isinstance(nvec, int):
        return CategoricalBox(nvec)
    return BoxList(tuple(_boxes(item) for item in nvec))
