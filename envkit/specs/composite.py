"""A tree of specs under names as the spec of a TensorDict.

This module decides how the calls of the leaves add up to a TensorDict, and how far an assignment of batch sizes and
names of batch axes reaches. The allowed contents of a tree, and edits, are decided in `branch`. It knows nothing of any
domain.

Conventions
    A composite's shape is the batch size of its data; every child's shape begins with it.
    An error at an entry says at which one, and keeps its class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, Self, cast

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection, is_tensorclass
from torch import Generator, Tensor

from envkit.errors import SpecError, SpecTypeError
from envkit.specs import shapes
from envkit.specs.annotations import Device, Key, Place, Shape, as_device
from envkit.specs.in_torchrl import register_in_torchrl
from envkit.specs.leaves.leaf import digits
from envkit.specs.shapes import Names, ShapeOp, as_shape, lead
from envkit.specs.tensor_spec import TensorSpec
from envkit.specs.trees import Branch, Child, at_entry


class _Batched(Branch):
    """A tree of specs with names for its batch axes."""

    _names: Names | None

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @shape.setter
    def shape(self, shape: Shape) -> None:
        self._check_unlocked("assign its shape")
        shape = as_shape(shape)
        for key, leaf in self.items(include_nested=True, leaves_only=True):
            if leaf is not None and leaf._free_shape[: len(shape)] != shape:
                raise SpecError(
                    f"shape {tuple(shape)} is not the beginning of the shape {tuple(leaf.shape)} "
                    f"of entry {key!r}. Expand the spec instead, or pass a prefix."
                )
        self._assign_shape(shape)

    def _assign_shape(self, shape: torch.Size) -> None:
        if shape != self._shape:
            self._shape, self._names = shape, None
        for child in self._specs.values():
            if isinstance(child, _Batched) and child.shape[: len(shape)] != shape:
                child._assign_shape(shape)

    @property
    def batch_size(self) -> torch.Size:
        """Another name of ``shape``."""
        return self.shape

    @batch_size.setter
    def batch_size(self, shape: Shape) -> None:
        self.shape = shape

    @property
    def names(self) -> list[str | None]:
        """Names of the batch axes, ``None`` where there is none.

        Assigned, they reach all nested composites, whose further axes keep theirs. A locked spec
        takes names too, which are no entries.
        """
        return [None] * self.ndim if self._names is None else list(self._names)

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        self._names = self._checked_names(names)
        if names is not None:
            for child in self._lockables():
                assert isinstance(child, _Batched)
                child.names = [*names, *child.names[self.ndim :]]

    def _checked_names(self, names: Sequence[str | None] | None) -> Names | None:
        """Complete names to be assigned; ``None`` if no axis has one."""
        if names is not None and len(names) != self.ndim:
            raise SpecError(
                f"names {list(names)} do not fit shape {tuple(self.shape)}. "
                f"Pass {self.ndim} of them."
            )
        return tuple(names) if names is not None and any(names) else None

    def refine_names(self, *names: str | EllipsisType | None) -> Self:
        """Write names of batch axes that have none, in place; ``...`` keeps the names in between.

        Returns:
            This composite.

        Raises:
            SpecError: the number of names differs.
            AxisNameError: an axis has another name already.
        """
        self.names = shapes.refined_names(self.names, names)
        return self

    def _facts(self) -> dict[str, Any]:
        return {} if self._names is None else {"names": self.names}


class Composite(_Batched):
    """Describe a TensorDict: one spec per key, nested composites for nested TensorDicts.

    Args:
        specs: children by key; a dict becomes a nested composite, a tuple key a nested entry.
        shape: batch size, with which every child's shape must begin.
        device: where all children must be; ``None`` sets no constraint.
        batch_size: another name of ``shape``.
        names: names of the batch axes of produced data.
        data_cls: TensorDict-like class of produced data.
        **kwargs: children by keyword.

    Raises:
        SpecError: a child's shape does not begin with ``shape``.
        SpecTypeError: a child is no spec, or ``specs`` is no dict.

    Example:
        >>> from envkit import Bounded, Composite, Unbounded
        >>> spec = Composite(position=Unbounded((3,)), angle=Bounded(-1.0, 1.0, (1,)))
        >>> td = spec.zero()
        >>> sorted(td.keys()), td["position"].shape
        (['angle', 'position'], torch.Size([3]))
    """

    def __init__(
        self,
        specs: Mapping[Any, Any] | Composite | None = None,
        *,
        shape: Shape | None = None,
        device: Device | None = None,
        batch_size: Shape | None = None,
        names: Sequence[str | None] | None = None,
        data_cls: type | None = None,
        **kwargs: Child,
    ):
        if shape is not None and batch_size is not None and as_shape(shape) != as_shape(batch_size):
            raise SpecError(
                f"shape={shape} and batch_size={batch_size} differ. They are two names of one "
                "thing: pass one."
            )
        if not isinstance(specs, Mapping | Branch | None):
            raise SpecTypeError(
                f"a Composite got {specs!r} of type {type(specs).__name__}. Pass a dict of specs, or "
                "specs by keyword; a batch size is passed as shape=."
            )
        register_in_torchrl()
        shape = batch_size if shape is None else shape
        self._shape = as_shape(() if shape is None else shape)
        self._device = None if device is None else as_device(device)
        self._dtype = None
        self._specs = {}
        self._locked = False
        self._lock_parents = []
        self.data_cls = data_cls
        self._names = None
        for key, spec in {**dict((specs or {}).items()), **kwargs}.items():
            self.set(key, spec)
        self.names = names

    def _below(self, specs: Mapping[Any, Any] | None = None) -> Composite:
        return Composite(specs, shape=self._shape, device=self._device)

    def empty(self) -> Composite:
        return Composite(
            shape=self._shape, device=self._device, names=self._names, data_cls=self.data_cls
        )

    # -- shape, device, dtype ----------------------------------------------------------

    def to(self, dest: Place | None) -> Self:
        if dest is None:
            return self
        if isinstance(dest, torch.dtype):
            return self.cast(dest)
        device = as_device(dest)
        return self._map(lambda child: child.to(device), _device=device)

    def cast(self, dtype: torch.dtype) -> Self:
        return self._map(lambda child: child.cast(dtype))

    def _map_shape(self, op: ShapeOp) -> Self:
        shape = shapes.shape_after(op, self._shape)
        names = self._names and shapes.names_after(op, self._names, self._shape)
        return self._map(
            lambda child: child._map_shape(op),
            _shape=shape,
            _names=names if names and any(names) else None,
        )

    def _select(self, axis: int, index: Tensor) -> Self:
        return self._map(
            lambda child: child._select(axis, index),
            _shape=torch.Size((*self._shape[:axis], len(index), *self._shape[axis + 1 :])),
        )

    def _with_dynamic(self, axis: int) -> Self:
        shape = shapes.with_dynamic(self._shape, axis)
        return self._map(lambda child: child._with_dynamic(axis), _shape=shape)

    # -- values ------------------------------------------------------------------------

    def _pack(self, data: dict[str, Any], shape: Sequence[int]) -> Any:
        """Make the TensorDict of a prefix and this batch size from data known to fit."""
        size = torch.Size((*shape, *self._shape))
        if -1 in size:
            size = shapes.data_shape(size)
        names = None if self._names is None else [*(None,) * len(shape), *self._names]
        # The checking constructor would take five times as long as all the rest.
        td = TensorDict._new_unsafe(data, batch_size=size, device=self._device, names=names)
        if self.data_cls is None or self.data_cls is TensorDict:
            return td
        if is_tensorclass(self.data_cls):
            return self.data_cls.from_tensordict(td)  # type: ignore[attr-defined]
        return self.data_cls(td, batch_size=size, device=self._device)

    def _make(self, make: Callable[[TensorSpec], Any]) -> dict[str, Any]:
        """Make a value for every child that has a spec."""
        data = {}
        for name, spec in self._specs.items():
            if spec is not None:
                with at_entry(name):
                    data[name] = make(spec)
        return data

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> TensorDictBase:
        shape = lead(shape)
        return self._pack(self._make(lambda spec: spec.rand(shape, generator)), shape)

    def zero(self, shape: Shape = ()) -> TensorDictBase:
        shape = lead(shape)
        return self._pack(self._make(lambda spec: spec.zero(shape)), shape)

    def one(self, shape: Shape = ()) -> TensorDictBase:
        shape = lead(shape)
        return self._pack(self._make(lambda spec: spec.one(shape)), shape)

    def rand_update(self, value: TensorDictBase) -> TensorDictBase:
        """Put samples of all entries into a TensorDict of this shape; returns it.

        Example:
            >>> from tensordict import TensorDict
            >>> from envkit import Composite, Unbounded
            >>> td = TensorDict(batch_size=[])
            >>> Composite(place=Unbounded((3,))).rand_update(td)["place"].shape
            torch.Size([3])
        """
        return value.update(self.rand())

    def zeros_update(self, value: TensorDictBase) -> TensorDictBase:
        """Put zeros for all entries into a TensorDict of this shape; returns it.

        Example:
            >>> from tensordict import TensorDict
            >>> from envkit import Composite, Unbounded
            >>> td = TensorDict(batch_size=[])
            >>> Composite(place=Unbounded((3,))).zeros_update(td)["place"]
            tensor([0., 0., 0.])
        """
        return value.update(self.zero())

    def ones_update(self, value: TensorDictBase) -> TensorDictBase:
        """Put ones for all entries into a TensorDict of this shape; returns it."""
        return value.update(self.one())

    def enumerate(self, use_mask: bool = False) -> TensorDictBase:
        lists = self._make(lambda spec: spec.enumerate(use_mask))
        pick = digits(torch.tensor([len(values) for values in lists.values()], device="cpu"))
        columns = zip(lists.items(), pick.unbind(1), strict=True)
        data = {k: values[column.to(values.device)] for (k, values), column in columns}
        return self._pack(data, (len(pick),))

    def cardinality(self) -> float | int:
        return math.prod(self._make(lambda spec: spec.cardinality()).values())

    # -- testing and repairing ---------------------------------------------------------

    def is_in(self, value: object) -> bool:
        if not is_tensor_collection(value) or not self._is_kind(value):
            return False
        for name, spec in self._specs.items():
            if spec is None:
                continue
            found = _entry_of(value, name)
            if found is None or not spec.is_in(found):
                return False
        return True

    def _is_kind(self, value: object) -> bool:
        """Check whether data is of the class that the spec makes."""
        kind = self.data_cls
        return kind is None or issubclass(kind, TensorDictBase) or isinstance(value, kind)

    def _complaint(self, value: object) -> str:
        if not is_tensor_collection(value):
            return f"got {type(value).__name__}, which is no TensorDict"
        if not self._is_kind(value):
            return f"got {type(value).__name__} instead of {self.data_cls}"
        for name, spec in self._children().items():
            value_there = None if spec is None else _entry_of(value, name)
            if spec is not None and value_there is None:
                return f"entry {name!r} is missing"
            if spec is not None and not spec.is_in(value_there):
                return f"at entry {name!r}: {spec._complaint(value_there)}"
        return f"got {value!r}"

    def project(self, value: TensorDictBase) -> TensorDictBase:
        """Exchange the entries outside the spec for the nearest ones inside; gives the TensorDict itself."""
        if self.is_in(value):
            return value
        for name, spec, found in self._present(value):
            with at_entry(name):
                nearest = spec.project(found)
            if nearest is not found:
                value.set(name, nearest)
        return value

    def type_check(self, value: object, key: Key | None = None) -> None:
        """Check the dtypes of all entries that are there.

        Args:
            value: a TensorDict, or one entry if ``key`` is given.
            key: the entry that ``value`` is.

        Raises:
            SpecTypeError: a dtype differs, or the value is no TensorDict.
        """
        if key is not None:
            self.get(key).type_check(value, key)
            return
        for name, spec, entry in self._present(value):
            if isinstance(spec, Composite):
                with at_entry(name):
                    spec.type_check(entry)
            else:
                spec.type_check(entry, name)

    # -- conversion --------------------------------------------------------------------

    def encode(self, raw: object, *, ignore_device: bool = False) -> TensorDictBase:
        """Encode a dict (or TensorDict) entry by entry; entries may be absent.

        Raises:
            MissingKeyError: an entry has no spec.
            SpecTypeError: it is no dict.
        """
        if not isinstance(raw, Mapping) and not is_tensor_collection(raw):
            raise SpecTypeError(
                f"got {raw!r} of type {type(raw).__name__} for a Composite. Pass a dict with the "
                f"entries {list(self._specs)}."
            )
        data, entries = {}, cast(Mapping[str, Any], raw)
        for name, item in entries.items():
            spec = self._specs.get(name)
            if spec is None:
                raise self._no_such_key(name)
            with at_entry(name):
                data[name] = spec.encode(item, ignore_device=ignore_device)
        return self._pack(data, ())

    def memoize_encode(self, mode: bool = True) -> None:
        for spec in self._specs.values():
            if spec is not None:
                spec.memoize_encode(mode)

    def erase_memoize_cache(self) -> None:
        for spec in self._specs.values():
            if spec is not None:
                spec.erase_memoize_cache()

    def to_numpy(self, value: TensorDictBase, safe: bool | None = None) -> dict[str, Any]:
        self._check_if_safe(value, safe)
        return {
            name: spec.to_numpy(found, safe=False) for name, spec, found in self._present(value)
        }

    def to_one_hot(self, value: TensorDictBase, safe: bool | None = None) -> TensorDictBase:
        """Turn the categorical entries of a TensorDict into one-hot ones, in a new TensorDict."""
        self._check_if_safe(value, safe)
        return self._replaced(value, lambda spec, entry: spec.to_one_hot(entry))

    def to_one_hot_spec(self) -> Self:
        return self._map(lambda s: s.to_one_hot_spec() if _has_choices(s) else s.clone())

    def to_categorical(self, value: TensorDictBase, safe: bool | None = None) -> TensorDictBase:
        """Turn the one-hot entries of a TensorDict into categorical ones, in a new TensorDict."""
        self._check_if_safe(value, safe)
        return self._replaced(value, lambda spec, entry: spec.to_categorical(entry))

    def to_categorical_spec(self) -> Self:
        return self._map(lambda s: s.to_categorical_spec() if _has_choices(s) else s.clone())

    def _present(self, value: object) -> Iterator[tuple[str, TensorSpec, Any]]:
        """Walk over the entries of a TensorDict that have a spec.

        Raises:
            SpecTypeError: it is no TensorDict.
        """
        if not is_tensor_collection(value):
            raise SpecTypeError(
                f"got {value!r} of type {type(value).__name__}, which is no TensorDict. Pass one "
                f"with the entries {list(self._specs)}; `spec.encode` makes one from a dict."
            )
        for name, spec in self._specs.items():
            found = None if spec is None else _entry_of(value, name)
            if spec is not None and found is not None:
                yield name, spec, found

    def _replaced(self, value: Any, change: Callable[[TensorSpec, Any], Any]) -> Any:
        """Copy a TensorDict with every entry changed whose spec is, or holds, a choice."""
        out = value.copy()
        for name, spec, found in self._present(value):
            if _has_choices(spec):
                with at_entry(name):
                    out.set(name, change(spec, found))
        return out


def _has_choices(spec: TensorSpec) -> bool:
    return isinstance(spec, Composite) or spec.is_choice


def _entry_of(value: Any, name: str) -> Any:
    """Read one entry of a TensorDict, ``None`` where it is missing or ragged."""
    try:
        return value.get(name, None)
    except RuntimeError:  # members of a lazy stack that no tensor can hold
        return None
