"""Values of Gymnasium's spaces that are torch tensors with rows in front, as entries of the data, and back.

The codecs of `codecs` decide which entries there are, how they are called and what their specs are; they convert arrays.
This module does the same for tensors, where they are: the host reads none of their values where it would wait for a device.

Conventions
    leaf   one entry of a space, as in `codecs`.
    rows   of the simulator, the leading axis of all tensors here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from envkit.data.paths import Key, Path, as_key
from envkit.errors import EncodingError, SpecError
from envkit.specs import Categorical, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from envkit.specs.annotations import reading_waits
from envkit_bridges.gym.backend import GymSpace, library_of
from envkit_bridges.gym.codecs import Codec, lacking, outside


class TorchLeaves:
    """The leaves of a space of one row, and the way of their tensors into the data and back.

    Raises:
        SpecError: one has no counterpart in tensors of fixed shape.
    """

    def __init__(self, codec: Codec):
        self.codec = codec
        self.leaves = {
            path: _Leaf(as_key(path), leaf.spec, pick(codec.space))
            for path, (leaf, pick) in codec.leaves.items()
        }

    def shown(
        self,
        values: Any,
        rows: int,
        env: Any,
        method: str,
        *,
        used: torch.Tensor | None = None,
    ) -> dict[Path, torch.Tensor]:
        """Return the entries of an observation, in separate tensors.

        Args:
            values: the observation.
            rows: how many there are.
            env: the simulator, for messages.
            method: what returned it, for messages.
            used: mask of the rows that are used; those of the others may be anything. None: all are.

        Raises:
            EncodingError: one is missing, is no tensor, or does not fit its space and the number of rows.
        """
        entries = {}
        try:
            for path, (_, pick) in self.codec.leaves.items():
                leaf = self.leaves[path]
                entries[path] = leaf.shown(pick(values), rows, env, method, used=used)
        except (KeyError, IndexError, TypeError) as error:
            raise lacking(self.codec.space, values, method) or error from None
        return entries

    def taken(self, values: Mapping[Path, torch.Tensor]) -> Any:
        """Return the value of the space, with rows in front, of entries of the data."""
        parts = {path: [leaf.taken(values[path])] for path, leaf in self.leaves.items()}
        return self.codec.assemble(parts)[0]


class _Leaf:
    """One leaf of a space of one row.

    Args:
        key: its name in the data.
        spec: of one row.
        space: of one row.
    """

    def __init__(self, key: Key, spec: TensorSpec, space: GymSpace):
        spaces = library_of(space).spaces
        numbers = (spaces.Box, spaces.MultiBinary)
        self._is_choice = isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
        if not (self._is_choice or isinstance(space, numbers)):
            raise SpecError(
                f"the space of {key!r} is {space}, which has no counterpart in tensors of a vector env. Use Box, Discrete, "
                "MultiDiscrete, MultiBinary, and Dicts and Tuples of them."
            )
        self.key, self.spec, self._space = key, spec, space
        self._start = torch.as_tensor(getattr(space, "start", 0))
        self._dtype = torch.as_tensor(space.sample()).dtype

    def shown(
        self, value: Any, rows: int, env: Any, method: str, *, used: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the values of all rows in the form of the data."""
        shape = (rows, *self._space.shape)
        scalars = (rows, 1) if len(shape) == 1 else shape
        if not isinstance(value, torch.Tensor) or tuple(value.shape) not in (shape, scalars):
            raise EncodingError(
                f"{method} of {env} returned {self.key!r} as {form_of(value)}; expected a tensor of shape {shape}: {rows} rows of "
                f"{self._space}. Correct the simulator or its single_observation_space."
            )
        if self._is_choice:
            if value.is_floating_point() or value.is_complex():
                raise self._of_dtype(value, self._dtype, env, method)
            index = value.reshape(shape) - self._start.to(value.device)
            if not reading_waits(value) and not self._are_options(index, used):
                raise outside(self.key, value.numpy(), self._space)
            return _spelled(self.spec, index)
        if self._loses(value.dtype):
            raise self._of_dtype(value, self.spec.dtype, env, method)
        return value.reshape(rows, *self.spec.shape).to(self.spec.dtype, copy=True)

    def _of_dtype(
        self, value: torch.Tensor, expected: torch.dtype | None, env: Any, method: str
    ) -> EncodingError:
        """Return the error of a value whose dtype the data cannot hold."""
        return EncodingError(
            f"{method} of {env} returned {self.key!r} of dtype {value.dtype}; expected {expected}, as its space "
            "says. Convert it in the simulator, or correct its single_observation_space."
        )

    def _are_options(self, index: torch.Tensor, used: torch.Tensor | None) -> bool:
        """Check that the numbers of the rows that are used are those of options; the host reads them."""
        space: Any = self._space
        counts = torch.as_tensor(space.nvec if hasattr(space, "nvec") else space.n)
        fits = (index >= 0) & (index < counts)
        return bool((fits if used is None else fits[used]).all())

    def _loses(self, dtype: torch.dtype) -> bool:
        """Check whether a cast from a dtype may change numbers by more than rounding."""
        own = self.spec.dtype
        assert own is not None
        if own.is_floating_point:
            return dtype.is_complex
        return torch.promote_types(dtype, own) != own

    def taken(self, data: torch.Tensor) -> torch.Tensor:
        """Return the values of all rows in the form of the space."""
        if not self._is_choice:
            return data.reshape(len(data), *self._space.shape)
        index = _index_of(self.spec, data).reshape(len(data), *self._space.shape)
        return (index + self._start.to(index.device)).to(self._dtype)


def _spelled(spec: TensorSpec, index: torch.Tensor) -> torch.Tensor:
    """Spell option numbers as a spec does; the host waits for no device."""
    rows = len(index)
    if isinstance(spec, Categorical | MultiCategorical):
        return index.reshape(rows, *spec.shape).to(spec.dtype)
    if isinstance(spec, OneHot):
        hot = index[..., None] == torch.arange(spec.n, device=index.device)
        return hot.reshape(rows, *spec.shape).to(spec.dtype)
    assert isinstance(spec, MultiOneHot)
    columns = zip(index.reshape(rows, -1).unbind(-1), spec.nvec, strict=True)
    parts = [column[:, None] == torch.arange(size, device=index.device) for column, size in columns]
    return torch.cat(parts, -1).to(spec.dtype)


def _index_of(spec: TensorSpec, data: torch.Tensor) -> torch.Tensor:
    """Return the option numbers that are spelled as a spec does."""
    if isinstance(spec, Categorical | MultiCategorical):
        return data
    if isinstance(spec, OneHot):
        return data.argmax(-1)
    assert isinstance(spec, MultiOneHot)
    return torch.stack([part.argmax(-1) for part in data.split(list(spec.nvec), -1)], -1)


def form_of(value: Any) -> str:
    """Describe a value for messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__
