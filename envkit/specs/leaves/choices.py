"""Leaves that choose among options: categorical and one-hot, single and multiple.

This module decides how a choice is drawn, masked, repaired and listed, in one *index form* that all four share, and
how each of them spells it and which is the twin of which.

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
from torch import Generator, Tensor
from torch.compiler import is_exporting

from envkit.arrays.elementwise import dtype_name
from envkit.arrays.integers import as_int
from envkit.errors import ArgumentError, EncodingError, SpecError, SpecMaskError
from envkit.specs.annotations import Device, Numbers, Shape, Value, as_device, require_numbers
from envkit.specs.leaves.leaf import BoxList, CategoricalBox, LeafSpec, clamp, coordinates, digits
from envkit.specs.shapes import as_shape, lead
from envkit.specs.tensor_spec import TensorSpec, require_dtype

_UNSCATTERED = frozenset((torch.uint16, torch.uint32, torch.uint64))  # torch cannot scatter these


def as_option_mask(value: Tensor) -> Tensor | None:
    """Read a mask of options: bools, or integers that are all 0 and 1. None: it is no mask."""
    if value.dtype == torch.bool:
        return value
    if value.is_floating_point() or value.is_complex():
        return None
    mask = value == 1
    return mask if bool((mask | (value == 0)).all()) else None


class _Choices(LeafSpec):
    """A choice in each of several sub-choices; subclasses spell it."""

    domain = "discrete"
    _contents = ("_mask",)
    _caches = (*LeafSpec._caches, "_mask_is_checked")

    _mask: Tensor | None = None
    _mask_is_checked: bool = False

    @property
    def is_choice(self) -> bool:
        return True

    def __init__(self, shape: Shape, device: Device | None, dtype: torch.dtype | None):
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if require_dtype(dtype).is_complex:
            raise SpecError(
                f"{type(self).__name__} got dtype {dtype}, but options are counted. Pass an "
                "integer dtype or torch.bool."
            )
        super().__init__(shape, device, dtype)

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
        """Encode an index, with any leading axes, in the spec's dtype."""
        raise NotImplementedError

    def _to_index(self, value: Tensor) -> Tensor:
        """Read a value. An improper value gives some index, in range or not."""
        raise NotImplementedError

    # -- mask --------------------------------------------------------------------------

    @property
    def mask(self) -> Tensor | None:
        """Allowed options, shape ``(*lead, sum of options)``, or ``None`` if all are."""
        return self._mask

    def update_mask(self, mask: Numbers | None) -> None:
        """Allow the options where ``mask`` is set only; ``None`` allows all.

        Args:
            mask: bool, or integers that are 0 and 1, as Gymnasium has them; broadcasts to ``(*lead, n)``. The options of
                several choices may lie on one axis, as MaskablePPO has them. It is copied.

        Raises:
            SpecMaskError: other values, a shape that does not broadcast, or a call while torch exports a
                program, in which the spec stays what it is.

        Example:
            >>> import torch
            >>> from envkit import Categorical
            >>> spec = Categorical(4)
            >>> spec.update_mask(torch.tensor([False, False, True, False]))
            >>> spec.rand(), spec.is_in(torch.tensor(0))
            (tensor(2), False)
        """
        if is_exporting():
            raise SpecMaskError(
                "update_mask was called while torch exports a program (compile_policy does), which cannot "
                "change a spec at every step. Mask scores with torch.where, or step the policy from Python."
            )
        self._mask_is_checked = False
        if mask is None:
            self._mask = None
            return
        tensor = torch.as_tensor(mask, device=self._device)
        mask = as_option_mask(tensor)
        shape = (*self._lead, sum(self._sizes))
        if mask is not None and 0 < mask.ndim < len(shape):
            flat = shape[mask.ndim - 1 :]
            if mask.shape[-1] == math.prod(flat) and mask.shape[:-1] == self._lead[: mask.ndim - 1]:
                mask = mask.unflatten(-1, flat)
        try:
            expanded = None if mask is None else mask.expand(shape)
        except RuntimeError:
            expanded = None
        if expanded is None:
            raise SpecMaskError(
                f"mask has dtype {tensor.dtype} and shape {tuple(tensor.shape)}, but must be "
                f"torch.bool, or integers that are 0 and 1, and broadcast to {shape}. Pass one flag for each option."
            )
        self._mask = expanded.clone()

    def _blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Split the last axis into sub-choices."""
        return tensor.split(self._sizes, -1)

    def _check_mask(self, mask: Tensor) -> None:
        for block in self._blocks(mask):
            if not bool(block.any(-1).all()):
                raise SpecMaskError(
                    f"the mask of {type(self).__name__} of shape {tuple(self.shape)} allows no "
                    "option in some row. Allow at least one there with `update_mask`."
                )
        self._mask_is_checked = True

    def _allowed(self, index: Tensor) -> Tensor:
        """Return for each row of an index that is in range whether the mask allows all of it."""
        if self._mask is None:
            return torch.ones(index.shape[:-1], dtype=torch.bool, device=index.device)
        mask = self._mask.expand(*index.shape[:-1], self._mask.shape[-1])
        return mask.gather(-1, index + self._offsets()).all(-1)

    def _offsets(self) -> Tensor:
        """Where each sub-choice begins on the axis of all options."""
        starts = [sum(self._sizes[:i]) for i in range(len(self._sizes))]
        return torch.tensor(starts, device=self._device)

    # -- values ------------------------------------------------------------------------

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Tensor:
        return self._from_index(self._draw(lead(shape), generator))

    def _draw(self, shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        if self._mask is None:
            size = (*shape, *self._lead, self._options.shape[-1])
            return (
                torch.rand(size, generator=generator, device=self._device) * self._options
            ).long()
        if not self._mask_is_checked:
            self._check_mask(self._mask)
        scores = torch.rand((*shape, *self._mask.shape), generator=generator, device=self._device)
        scores = torch.where(self._mask, scores, -1.0)
        return torch.stack([block.argmax(-1) for block in self._blocks(scores)], -1)

    def enumerate(self, use_mask: bool = False) -> Tensor:
        options = self._counted()
        index = digits(options)
        if options.ndim == 1:  # every position of the batch takes the same value
            index = index[(slice(None), *(None,) * len(self._lead))]
        index = index.expand(len(index), *self._lead, -1)
        if use_mask:
            index = index[self._allowed(index).reshape(len(index), -1).all(1)]
        return self._from_index(index).contiguous()

    def cardinality(self) -> int:
        return math.prod(self._counted().flatten().tolist())

    def _counted(self) -> Tensor:
        """Options of the sub-choices of one position, shape ``(choices,)``."""
        return torch.tensor(self._sizes, device=self._device)

    def _nearest(self, value: Tensor) -> Tensor:
        index = self._in_range(self._to_index(value))
        return self._from_index(index if self._mask is None else self._nearest_allowed(index))

    def _in_range(self, index: Tensor) -> Tensor:
        return torch.minimum(index.clamp(min=0), self._options - 1)

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
            The picked entries, shape ``(*lead, choices)``: a single choice keeps an axis of 1,
            which `Categorical` alone, having no such axis itself, drops.

        Raises:
            ArgumentError: ``index`` is no tensor, or ``tensor`` has another last size.
        """
        total = sum(self._sizes)
        if not (isinstance(index, Tensor) and isinstance(tensor, Tensor)):
            raise ArgumentError(
                f"index got {type(index).__name__} and {type(tensor).__name__}. Pass a value of "
                "the spec and a tensor."
            )
        if tensor.shape[-1:] != (total,):
            raise ArgumentError(
                f"index got a tensor of shape {tuple(tensor.shape)} for {total} options. Pass one "
                f"whose last size is {total}."
            )
        picked = self._to_index(index) + self._offsets()
        lead = torch.broadcast_shapes(picked.shape[:-1], tensor.shape[:-1])
        return tensor.expand(*lead, total).gather(-1, picked.expand(*lead, picked.shape[-1]))

    # -- conversion --------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        return {"n": self.n, **self._masked()}

    def _masked(self) -> dict[str, Any]:
        return {} if self._mask is None else {"masked": True}

    @property
    def n(self) -> int:
        """Number of options, over all sub-choices."""
        return sum(self._sizes)

    def to_one_hot(self, value: Value, safe: bool | None = None) -> Tensor:
        return self._converted(value, self.to_one_hot_spec(), safe)

    def to_categorical(self, value: Value, safe: bool | None = None) -> Tensor:
        return self._converted(value, self.to_categorical_spec(), safe)

    def _converted(self, value: Any, spec: _Choices, safe: bool | None) -> Tensor:
        self._check_if_safe(value, safe)
        return value if type(spec) is type(self) else spec._from_index(self._to_index(value))

    def to_one_hot_spec(self) -> _Choices:
        return self.clone()

    def to_categorical_spec(self) -> _Choices:
        return self.clone()


class _SingleChoice(_Choices):
    """One choice among ``n``."""

    _n: int

    @property
    def n(self) -> int:
        """Number of options."""
        return self._n

    def _make_space(self) -> CategoricalBox:
        return CategoricalBox(self._n)

    def _of_space(self, space: object) -> LeafSpec:
        if not isinstance(space, CategoricalBox):
            return super()._of_space(space)
        kind: Any = type(self)
        mask = self._mask if space.n == self._n else None
        return kind(space.n, self._shape, self._device, self._dtype, mask=mask)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (self._n,)

    def _signature(self) -> tuple[Any, ...]:
        return (*super()._signature(), self._n)

    def _draw(self, shape: tuple[int, ...], generator: Generator | None) -> Tensor:
        if self._mask is None:
            return torch.randint(
                self._n, (*shape, *self._lead, 1), generator=generator, device=self._device
            )
        return super()._draw(shape, generator)


class _MultipleChoice(_Choices):
    """Several choices side by side."""

    def _make_space(self) -> BoxList | CategoricalBox:
        return BoxList.from_nvec(self._sizes)

    def _of_space(self, space: object) -> LeafSpec:
        if not (isinstance(space, BoxList) and all(isinstance(b, CategoricalBox) for b in space)):
            return super()._of_space(space)
        kind: Any = type(self)
        sizes = [box.n for box in space]
        mask = self._mask if sizes == list(self._sizes) else None
        return kind(sizes, self._shape, self._device, self._dtype, mask=mask)

    def _facts(self) -> dict[str, Any]:
        return {"nvec": list(self._sizes), **self._masked()}


class _HotChoice(_Choices):
    """Spell a choice as zeros with one active entry per sub-choice."""

    _encoding_ndim = 1

    def _from_index(self, index: Tensor) -> Tensor:
        made = torch.bool if self._dtype in _UNSCATTERED else self._dtype
        value = torch.zeros((*index.shape[:-1], self._size[-1]), dtype=made, device=index.device)
        value.scatter_(-1, index if len(self._sizes) == 1 else index + self._offsets(), 1)
        return value.to(self._dtype)

    def _to_index(self, value: Tensor) -> Tensor:
        value = coordinates(value)  # torch has no argmax of some dtypes
        if len(self._sizes) == 1:
            return value.argmax(-1, keepdim=True)
        return torch.stack([block.argmax(-1) for block in self._blocks(value)], -1)

    def _in_range(self, index: Tensor) -> Tensor:
        return index  # one read off a value always is

    def _as_own(self, value: Tensor) -> Tensor:
        return value  # the largest entry is the option, also of fractions

    def _to_tensor(self, raw: object, ignore_device: bool = False) -> Tensor:
        if not isinstance(raw, Tensor):
            array = np.array(raw)
            if array.dtype.kind not in "biuf":
                raise EncodingError(
                    f"{raw!r} of type {type(raw).__name__} cannot become an option of "
                    f"{type(self).__name__}. Pass option numbers, or one-hot rows of the spec's shape."
                )
            raw = torch.from_numpy(array)
        return raw if ignore_device else raw.to(self._device)

    def _to_shape(self, value: Tensor) -> Tensor:
        """Encode raw numbers; what has the spec's shape already is taken as encoded."""
        if self._is_shape(value.shape):
            return value.to(self._dtype)
        shape = self._index_shape
        if value.numel() != shape.numel():
            expected = tuple(shape[:-1]) if len(self._sizes) == 1 else tuple(shape)
            raise EncodingError(
                f"a value of shape {tuple(value.shape)} does not fit {type(self).__name__} of "
                f"shape {tuple(self.shape)}. Pass option numbers of shape {expected}, or one-hot "
                "rows of the spec's shape."
            )
        index = value.reshape(shape).long()
        if bool(((index < 0) | (index >= self._options)).any()):
            raise EncodingError(
                f"option {index.flatten().tolist()} does not exist in {type(self).__name__} with "
                f"{list(self._sizes)} options. Pass numbers from 0 to one less than that."
            )
        return self._from_index(index)

    def _recording(
        self, reshaped: bool, shape: torch.Size, ignore_device: bool
    ) -> Callable[[Any], Tensor]:
        if not reshaped:
            return lambda raw: self._to_tensor(raw, ignore_device).to(self._dtype)
        lead = self._index_shape
        return lambda raw: self._from_index(
            self._to_tensor(raw, ignore_device).reshape(lead).long()
        )

    @property
    def _index_shape(self) -> torch.Size:
        """Shape of the option numbers that spell one value."""
        return torch.Size((*self._lead, len(self._sizes)))

    def to_numpy(self, value: Tensor, safe: bool | None = None) -> np.ndarray:
        self._check_if_safe(value, safe)
        return self.to_categorical(value, safe=False).detach().cpu().numpy()


class Categorical(_SingleChoice):
    """Describe integers ``0..n-1``, one per entry.

    Args:
        n: number of options.
        shape: sizes of the tensor, ``()`` by default.
        device: where values are made, ``cpu`` by default.
        dtype: int64 by default; ``torch.bool`` with ``n=2`` describes flags.
        mask: allowed options, see `update_mask`.

    Raises:
        SpecError: fewer than one option, or more than two with a bool dtype.

    Example:
        >>> import torch
        >>> from envkit import Categorical
        >>> spec = Categorical(4)
        >>> spec.is_in(torch.tensor(3)), spec.is_in(torch.tensor(4))
        (True, False)
        >>> spec.to_one_hot(torch.tensor(3))
        tensor([False, False, False,  True])
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


class OneHot(_SingleChoice, _HotChoice):
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

    Example:
        >>> import torch
        >>> from envkit import OneHot
        >>> spec = OneHot(3)
        >>> spec.encode(1)
        tensor([False,  True, False])
        >>> spec.is_in(torch.tensor([1, 1, 0]))
        False
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

    def _number(self, raw: object) -> int:
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

    def to_categorical_spec(self) -> Categorical:
        return Categorical(self._n, self._shape[:-1], self._device, mask=self._mask)


class MultiCategorical(_MultipleChoice):
    """Describe vectors of integers, entry ``i`` in ``0..nvec[i]-1``.

    Args:
        nvec: options of each entry, shape ``(choices,)``; more axes give rows their own numbers.
        shape: sizes of the tensor; the shape of ``nvec`` must broadcast to it and is the default.
        device: where values are made, ``cpu`` by default.
        dtype: int64 by default.
        mask: allowed options, see `update_mask`; all rows must share their numbers then.

    Raises:
        SpecError: no entry, one below one, or a shape that does not end in the number of entries.

    Example:
        >>> import torch
        >>> from envkit import MultiCategorical
        >>> spec = MultiCategorical([3, 2])
        >>> spec.is_in(torch.tensor([2, 1])), spec.is_in(torch.tensor([2, 2]))
        (True, False)
        >>> spec.to_one_hot(torch.tensor([2, 1]))
        tensor([False, False,  True, False,  True])
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
        nvec = "unknown" if self._nvec.is_meta else self._nvec.tolist()
        return {"nvec": nvec, **self._masked()}

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


class MultiOneHot(_MultipleChoice, _HotChoice):
    """Describe several one-hot vectors, one after the other on the last axis.

    Args:
        nvec: number of options of each one-hot vector.
        shape: sizes of the tensor, the last being ``sum(nvec)``; ``(sum(nvec),)`` by default.
        device: where values are made, ``cpu`` by default.
        dtype: bool by default.
        mask: allowed options, see `update_mask`.

    Raises:
        SpecError: no entry, one below one, or a shape that does not end in ``sum(nvec)``.

    Example:
        >>> from envkit import MultiOneHot
        >>> spec = MultiOneHot([3, 2])
        >>> code = spec.encode([2, 1])
        >>> code
        tensor([False, False,  True, False,  True])
        >>> spec.to_categorical(code)
        tensor([2, 1])
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

    def to_categorical_spec(self) -> MultiCategorical:
        shape = (*self._shape[:-1], len(self._nvec))
        return MultiCategorical(self._nvec, shape, self._device, mask=self._mask)


def _checked_n(n: object) -> int:
    plain = n.item() if isinstance(n, Tensor | np.generic) else n
    whole = int(plain) if isinstance(plain, float) and plain.is_integer() else plain
    try:
        return as_int("n", whole, least=1, meaning="the number of options")
    except ArgumentError as error:
        raise SpecError(
            f"a choice has {plain!r} options. Give it a whole number, at least one."
        ) from error


def _counts_in(nvec: Numbers, device: torch.device | None) -> Tensor:
    """Return numbers of options as int64; floats that are whole are numbers of options, others and bools are refused."""
    if not isinstance(nvec, Tensor | np.ndarray):
        listed = np.asarray(nvec, object).flat
    elif dtype_name(nvec.dtype).startswith(("int", "uint")):
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


def _ending_in(spec: LeafSpec, size: int, shape: object, meaning: str) -> torch.Size:
    """Complete a shape and check its last size."""
    shape = as_shape(size if shape is None else shape)
    if shape[-1:] != (size,):
        raise SpecError(
            f"{type(spec).__name__} got shape {tuple(shape)}, whose last size must equal "
            f"{meaning}={size}. Pass shape {(*shape[:-1], size)}."
        )
    return shape
