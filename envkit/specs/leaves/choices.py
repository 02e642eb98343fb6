"""What all specs of a choice among options share.

This module decides how a choice is drawn, masked, repaired and listed. Each kind shares one
*index form* with the others and says only how its values are spelled.

Conventions
    index    int64, shape (*lead, choices): which option each sub-choice takes.
    options  int64, broadcasts to the index: how many options each sub-choice has.
    mask     bool, shape (*lead, sum of options): True where an option is allowed; sub-choices
             lie side by side on the last axis, as in a one-hot value.
    lead     shape of the spec without the axis that spells or lists the sub-choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.compiler import is_exporting

from envkit.errors import ArgumentError, EncodingError, SpecError, SpecMaskError
from envkit.specs.annotations import Device, Numbers, Shape, Value
from envkit.specs.base import require_dtype
from envkit.specs.leaves.leaf import LeafSpec
from envkit.specs.leaves.order import coordinates, digits
from envkit.specs.leaves.spaces import BoxList, CategoricalBox
from envkit.specs.shapes import lead

__all__ = ["Choices", "HotChoice", "MultipleChoice", "SingleChoice", "as_option_mask"]


_UNSCATTERED = frozenset((torch.uint16, torch.uint32, torch.uint64))  # torch cannot scatter these


def as_option_mask(value: Tensor) -> Tensor | None:
    """Read a mask of options: bools, or integers that are all 0 and 1. None: it is no mask."""
    if value.dtype == torch.bool:
        return value
    if value.is_floating_point() or value.is_complex():
        return None
    mask = value == 1
    return mask if bool((mask | (value == 0)).all()) else None


class Choices(LeafSpec):
    """A choice in each of several sub-choices; subclasses spell it."""

    domain = "discrete"
    is_choice = True
    _contents = ("_mask",)
    _caches = (*LeafSpec._caches, "_mask_is_checked")

    _mask: Tensor | None = None
    _mask_is_checked: bool = False

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

    def update_mask(self, mask: Numbers | None) -> None:
        """Allow the options where ``mask`` is set only; ``None`` allows all.

        Args:
            mask: bool, or integers that are 0 and 1, as Gymnasium has them; broadcasts to ``(*lead, n)``. It is
                copied.

        Raises:
            SpecMaskError: other values, a shape that does not broadcast, or a call while torch exports a
                program, in which the spec stays what it is.
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
        given = torch.as_tensor(mask, device=self._device)
        mask = as_option_mask(given)
        shape = (*self._lead, sum(self._sizes))
        try:
            expanded = None if mask is None else mask.expand(shape)
        except RuntimeError:
            expanded = None
        if expanded is None:
            raise SpecMaskError(
                f"mask has dtype {given.dtype} and shape {tuple(given.shape)}, but must be "
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
        masked = {} if self._mask is None else {"masked": True}
        return {"n": self.n, **masked}

    @property
    def n(self) -> int:
        """Number of options, over all sub-choices."""
        return sum(self._sizes)

    def to_one_hot(self, value: Value, safe: bool | None = None) -> Tensor:
        self._check_if_safe(value, safe)
        return self.to_one_hot_spec()._from_index(self._to_index(value))

    def to_categorical(self, value: Value, safe: bool | None = None) -> Tensor:
        self._check_if_safe(value, safe)
        return self.to_categorical_spec()._from_index(self._to_index(value))

    def to_one_hot_spec(self) -> Choices:
        raise NotImplementedError

    def to_categorical_spec(self) -> Choices:
        raise NotImplementedError


class SingleChoice(Choices):
    """One choice among ``n``."""

    _n: int

    @property
    def n(self) -> int:
        """Number of options."""
        return self._n

    def _make_space(self) -> CategoricalBox:
        return CategoricalBox(self._n)

    def _of_space(self, space: Any) -> LeafSpec:
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


class MultipleChoice(Choices):
    """Several choices side by side."""

    def _make_space(self) -> BoxList | CategoricalBox:
        return BoxList.from_nvec(self._sizes)

    def _of_space(self, space: Any) -> LeafSpec:
        if not (isinstance(space, BoxList) and all(isinstance(b, CategoricalBox) for b in space)):
            return super()._of_space(space)
        kind: Any = type(self)
        sizes = [box.n for box in space]
        mask = self._mask if sizes == list(self._sizes) else None
        return kind(sizes, self._shape, self._device, self._dtype, mask=mask)

    def _facts(self) -> dict[str, Any]:
        masked = {} if self._mask is None else {"masked": True}
        return {"nvec": list(self._sizes), **masked}


class HotChoice(Choices):
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

    def _to_tensor(self, raw: Any, ignore_device: bool = False) -> Tensor:
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
        """Spell raw numbers; what has the spec's shape already is taken as spelled."""
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
