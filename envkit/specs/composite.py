"""A tree of specs under names, the spec of a TensorDict.

This module decides what a tree may hold (shapes, device, locks), in which order it is walked, and
how the calls of its leaves add up to a TensorDict. It knows nothing of any domain.

Conventions
    key     a string, or a tuple of strings for a nested entry.
    None    a child without a spec: the key exists, no data is made for it.
    A composite's shape is the batch size of its data; every child's shape begins with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDict, is_tensor_collection, is_tensorclass
from torch import Generator

from envkit.errors import MissingKeyError, SpecError, SpecTypeError
from envkit.specs import shapes
from envkit.specs.base import Shape, TensorSpec, as_device, digits
from envkit.specs.locks import Lockable
from envkit.specs.shapes import Expand, ShapeOp, as_shape
from envkit.specs.tree import MISSING, TreeItems, TreeKeys, TreeValues, as_key, is_key

__all__ = ["Composite", "entry_of"]


class Composite(Lockable, TensorSpec):
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
        SpecTypeError: a child is no spec.
    """

    _caches: ClassVar[tuple[str, ...]] = ("_lock_parents",)

    def __init__(
        self,
        specs: Mapping[Any, Any] | Composite | None = None,
        *,
        shape: Any = None,
        device: Any = None,
        batch_size: Any = None,
        names: Sequence[str | None] | None = None,
        data_cls: type | None = None,
        **kwargs: Any,
    ):
        if shape is not None and batch_size is not None and as_shape(shape) != as_shape(batch_size):
            raise SpecError(
                f"shape={shape} and batch_size={batch_size} differ. They are two names of one "
                "thing: pass one."
            )
        shape = batch_size if shape is None else shape
        self._shape = as_shape(() if shape is None else shape)
        self._device = None if device is None else as_device(device)
        self._dtype = None
        self._specs: dict[str, TensorSpec | None] = {}
        self._locked = False
        self._lock_parents = []
        self.data_cls = data_cls
        self.names = names
        for key, spec in {**dict((specs or {}).items()), **kwargs}.items():
            self.set(key, spec)

    # -- description -------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @shape.setter
    def shape(self, shape: Any) -> None:
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
        for child in self._lockables():
            if child.shape[: len(shape)] != shape:
                child._assign_shape(shape)

    @property
    def batch_size(self) -> torch.Size:
        """Another name of ``shape``."""
        return self.shape

    @batch_size.setter
    def batch_size(self, shape: Any) -> None:
        self.shape = shape

    @property
    def names(self) -> list[str | None]:
        """Names of the batch axes, ``None`` where there is none."""
        return [None] * self.ndim if self._names is None else list(self._names)

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        if names is not None and len(names) != self.ndim:
            raise SpecError(
                f"names {list(names)} do not fit shape {tuple(self.shape)}. "
                f"Pass {self.ndim} of them."
            )
        self._names = None if names is None or not any(names) else tuple(names)

    def refine_names(self, *names: Any) -> Self:
        """Name batch axes in place; ``None`` keeps a name, ``...`` keeps those in between.

        Returns:
            This composite.

        Raises:
            SpecError: the number of names differs, or an axis has another name already.
        """
        if ... in names:
            dots = names.index(...)
            kept = (None,) * (self.ndim - len(names) + 1)
            names = (*names[:dots], *kept, *names[dots + 1 :])
        refined = [new or old for new, old in zip(names, self.names, strict=False)]
        clash = [
            old for new, old in zip(refined, self.names, strict=False) if old not in (None, new)
        ]
        if clash:
            raise SpecError(
                f"axis {clash[0]!r} has a name already. Assign `spec.names` to rename it."
            )
        self.names = refined if len(names) == self.ndim else list(names)
        return self

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, Composite)
            and self._shape == other._shape
            and self._device == other._device
            and self._specs == other._specs
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        lines = [f"{key}: {spec!r}," for key, spec in self.items()]
        lines.append(f"device={self.device},")
        lines.append(f"shape={tuple(self.shape)})")
        body = "\n".join(lines).replace("\n", "\n    ")
        return f"{type(self).__name__}(\n    {body}"

    # -- children ----------------------------------------------------------------------

    def _children(self) -> Mapping[str, TensorSpec | None]:
        """The children by name; a stack makes them on demand."""
        return self._specs

    def _is_tree(self, name: str) -> bool:
        return isinstance(self._specs[name], Composite)

    def _lockables(self) -> Iterator[Composite]:
        """The nested composites."""
        return (child for child in self._specs.values() if isinstance(child, Composite))

    def _lookup(self, key: tuple[str, ...]) -> Any:
        found: Any = self
        for name in key:
            children = found._children() if isinstance(found, Composite) else {}
            if name not in children:
                return MISSING
            found = children[name]
        return found

    def get(self, key: Any, default: Any = MISSING) -> Any:
        """Return the child at a key, at any depth.

        Raises:
            MissingKeyError: there is no such key, and no default was given.
        """
        found = self._lookup(as_key(key))
        if found is not MISSING:
            return found
        if default is not MISSING:
            return default
        raise self._no_such_key(key)

    def _no_such_key(self, key: Any) -> MissingKeyError:
        return MissingKeyError(
            f"key {key!r} is not in the spec, which has {list(self.keys(True, True))}. "
            "Use one of these, or pass a default."
        )

    def __getitem__(self, index: Any) -> Any:
        """Return the child at a key, or index the batch axes of the whole tree."""
        if isinstance(index, str) or is_key(index):
            return self.get(index)
        return super().__getitem__(index)

    def set(self, key: Any, spec: Any) -> Self:
        """Put a child at a key, making the composites in between with this one's shape.

        A child on another device than the composite's is moved; a dict becomes a composite.

        Returns:
            This composite.

        Raises:
            SpecLockedError: the composite at which the child goes is locked.
            SpecTypeError: neither a spec, a dict nor ``None``.
            SpecError: the child's shape does not begin with the composite's.
        """
        name, *rest = as_key(key)
        if rest:
            child = self._lookup((name,))
            if child is MISSING or child is None:
                self._check_unlocked(f"set {key!r}")
                child = self._nested()
                child.set(tuple(rest), spec)
                self._put(name, child)
            elif isinstance(child, Composite):
                child.set(tuple(rest), spec)
            else:
                raise MissingKeyError(
                    f"key {key!r} leads through {name!r}, which is {child!r} and has no entries. "
                    "Delete it first, or choose another name."
                )
            return self
        self._check_unlocked(f"set {key!r}")
        self._put(name, self._checked(name, spec))
        return self

    def __setitem__(self, key: Any, spec: Any) -> None:
        self.set(key, spec)

    def _put(self, name: str, spec: TensorSpec | None) -> None:
        self._specs[name] = spec

    def _nested(self) -> Composite:
        """Make an empty composite to be put below this one."""
        return Composite(shape=self._shape, device=self._device)

    def _checked(self, name: str, spec: Any) -> TensorSpec | None:
        if spec is None:
            return None
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=self._shape, device=self._device)
        if not isinstance(spec, TensorSpec):
            raise SpecTypeError(
                f"entry {name!r} is {spec!r} of type {type(spec).__name__}. "
                "Pass a spec, a dict of specs or None."
            )
        if spec._free_shape[: self.ndim] != self.shape:
            raise SpecError(
                f"entry {name!r} has shape {tuple(spec.shape)}, which does not begin with the "
                f"shape {tuple(self.shape)} of the composite. Expand it: "
                f"spec.expand({', '.join(map(str, (*self.shape, *spec.shape)))})."
            )
        if self._device is not None and spec.device != self._device:
            return spec.to(self._device)
        return spec

    def __delitem__(self, key: Any) -> None:
        *path, name = as_key(key)
        parent = self._lookup(tuple(path))
        if not isinstance(parent, Composite) or name not in parent._children():
            raise self._no_such_key(key)
        parent._check_unlocked(f"delete {key!r}")
        parent._drop(name)

    def _drop(self, name: str) -> None:
        del self._specs[name]

    def pop(self, key: Any, default: Any = MISSING) -> Any:
        """Remove the child at a key and return it.

        Raises:
            MissingKeyError: there is no such key, and no default was given.
            SpecLockedError: the spec is locked.
        """
        self._check_unlocked(f"pop {key!r}")
        found = self.get(key, default)
        if self._lookup(as_key(key)) is not MISSING:
            del self[key]
        return found

    def update(self, other: Mapping[Any, Any] | Composite) -> Self:
        """Merge another tree into this one; its leaves win.

        Returns:
            This composite.
        """
        self._check_unlocked("update it")
        for key, spec in other.items():
            mine = self._lookup(as_key(key))
            if isinstance(mine, Composite) and isinstance(spec, (Mapping, Composite)):
                mine.update(spec)
            else:
                self.set(key, spec)
        return self

    def separates(self, *keys: Any, default: Any = None) -> Composite:
        """Remove the given keys and return them as a new composite.

        Args:
            *keys: keys at any depth.
            default: taken for a key that is missing; ``None`` leaves such a key out.
        """
        separated = self.empty()
        for key in keys:
            spec = self.pop(key, default)
            if spec is not None:
                separated.set(key, spec)
        return separated

    def empty(self) -> Composite:
        """Make a composite of the same shape, device and names without children."""
        return Composite(
            shape=self.shape, device=self.device, names=self._names, data_cls=self.data_cls
        )

    def is_empty(self, recurse: bool = False) -> bool:
        """Tell whether there are no children, or with ``recurse`` no leaves at any depth."""
        children = self._children().values()
        if not recurse:
            return not children
        return all(isinstance(child, Composite) and child.is_empty(True) for child in children)

    def clear_device_(self) -> Self:
        """Drop the constraint on devices, here and below."""
        self._device = None
        for child in self._lockables():
            child.clear_device_()
        return self

    # -- iteration ---------------------------------------------------------------------

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> KeysView[Any]:
        """View the keys, in insertion order; entries of a nested composite precede its own key.

        Args:
            include_nested: go into nested composites; their keys are tuples.
            leaves_only: leave composites out.
        """
        return TreeKeys(self, include_nested, leaves_only)

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> ItemsView[Any, Any]:
        """View pairs of key and child; see `keys`."""
        return TreeItems(self, include_nested, leaves_only)

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> ValuesView[Any]:
        """View the children; see `keys`."""
        return TreeValues(self, include_nested, leaves_only)

    def __iter__(self) -> Iterator[str]:
        return iter(self._children())

    def __len__(self) -> int:
        return len(self._children())

    def __bool__(self) -> bool:
        return True  # so that `spec or default` keeps an empty spec

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock_parents = []
        if self._locked:
            self.lock_()

    # -- copies, shape, device ---------------------------------------------------------

    def _map(self, change: Callable[[TensorSpec], TensorSpec], **attributes: Any) -> Self:
        """Copy the tree, unlocked, with each child changed."""
        new = self._copy()
        new._locked, new._lock_parents = False, []
        new.__dict__.update(attributes)
        new._specs = {
            name: None if child is None else change(child) for name, child in self._specs.items()
        }
        return new

    def clone(self, recurse: bool = True) -> Self:
        """Copy the tree, unlocked; with ``recurse=False`` the leaves are shared."""
        if recurse:
            return self._map(lambda child: child.clone())
        return self._map(lambda c: c.clone(False) if isinstance(c, Composite) else c)

    def to(self, dest: Any) -> Self:
        if isinstance(dest, torch.dtype):
            return self._map(lambda child: child.to(dest))
        device = as_device(dest)
        return self._map(lambda child: child.to(device), _device=device)

    def _map_shape(self, op: ShapeOp) -> Self:
        shape = shapes.shape_after(op, self._shape)
        names = None
        if isinstance(op, Expand) and self._names is not None:
            names = (None,) * (len(shape) - self.ndim) + self._names
        return self._map(lambda child: child._map_shape(op), _shape=shape, _names=names)

    def _set_dynamic(self, axis: int) -> None:
        self._shape = torch.Size((*self._shape[:axis], -1, *self._shape[axis + 1 :]))
        for child in self._specs.values():
            if child is not None:
                child._set_dynamic(axis)

    # -- values ------------------------------------------------------------------------

    def _pack(self, data: dict[str, Any], shape: Shape) -> Any:
        """Make the TensorDict of a prefix and this batch size from data known to fit."""
        size = torch.Size((*shape, *self._shape))
        if -1 in size:
            size = shapes.known(size)
        names = None if self._names is None else [*(None,) * len(shape), *self._names]
        # The checking constructor would take five times as long as all the rest.
        td = TensorDict._new_unsafe(data, batch_size=size, device=self._device, names=names)
        if self.data_cls is None or self.data_cls is TensorDict:
            return td
        if is_tensorclass(self.data_cls):
            return self.data_cls.from_tensordict(td)  # type: ignore[attr-defined]
        return self.data_cls(td, batch_size=size, device=self._device)

    def rand(self, shape: Shape = (), generator: Generator | None = None) -> Any:
        data = {
            k: spec.rand(shape, generator) for k, spec in self._specs.items() if spec is not None
        }
        return self._pack(data, shape)

    def zero(self, shape: Shape = ()) -> Any:
        data = {k: spec.zero(shape) for k, spec in self._specs.items() if spec is not None}
        return self._pack(data, shape)

    def one(self, shape: Shape = ()) -> Any:
        data = {k: spec.one(shape) for k, spec in self._specs.items() if spec is not None}
        return self._pack(data, shape)

    def enumerate(self, use_mask: bool = False) -> Any:
        specs = {k: spec for k, spec in self._specs.items() if spec is not None}
        lists = {k: spec.enumerate(use_mask) for k, spec in specs.items()}
        pick = digits(torch.tensor([len(values) for values in lists.values()]))
        columns = zip(lists.items(), pick.unbind(1), strict=True)
        data = {k: values[column.to(values.device)] for (k, values), column in columns}
        return self._pack(data, (len(pick),))

    def cardinality(self) -> float | int:
        return math.prod(s.cardinality() for s in self._specs.values() if s is not None)

    # -- testing and repairing ---------------------------------------------------------

    def is_in(self, value: Any) -> bool:
        if not is_tensor_collection(value):
            return False
        for name, spec in self._specs.items():
            if spec is None:
                continue
            found = entry_of(value, name)
            if found is None or not spec.is_in(found):
                return False
        return True

    def _complaint(self, value: Any) -> str:
        if not is_tensor_collection(value):
            return f"got {type(value).__name__}, which is no TensorDict"
        for name, spec in self._children().items():
            found = None if spec is None else entry_of(value, name)
            if spec is not None and found is None:
                return f"entry {name!r} is missing"
            if spec is not None and not spec.is_in(found):
                return f"at entry {name!r}: {spec._complaint(found)}"
        return f"got {value!r}"

    def project(self, value: Any) -> Any:
        """Return the TensorDict itself if it is in the spec, else a new one of nearest entries."""
        if self.is_in(value):
            return value
        return self._replaced(value, lambda spec, found: spec.project(found))

    def type_check(self, value: Any, key: Any = None) -> None:
        """Check the dtypes of all entries that are there.

        Args:
            value: a TensorDict, or one entry if ``key`` is given.
            key: the entry that ``value`` is.

        Raises:
            SpecTypeError: a dtype differs.
        """
        if key is not None:
            self.get(key).type_check(value)
            return
        for name, spec, found in self._present(value):
            if isinstance(spec, Composite):
                spec.type_check(found)
            else:
                spec.type_check(found, name)

    # -- conversion --------------------------------------------------------------------

    def encode(self, raw: Any, *, ignore_device: bool = False) -> Any:
        """Encode a dict (or TensorDict) entry by entry; entries may be absent.

        Raises:
            MissingKeyError: an entry has no spec.
        """
        data = {}
        for name, item in raw.items():
            spec = self._specs.get(name)
            if spec is None:
                raise self._no_such_key(name)
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

    def to_numpy(self, value: Any, safe: bool | None = None) -> dict[str, Any]:
        self._check_if_safe(value, safe)
        return {
            name: spec.to_numpy(found, safe=False) for name, spec, found in self._present(value)
        }

    def to_one_hot(self, value: Any, safe: bool | None = None) -> Any:
        """Turn the categorical entries of a TensorDict into one-hot ones, in a new TensorDict."""
        self._check_if_safe(value, safe)
        return self._replaced(
            value, lambda spec, found: spec.to_one_hot(found) if _has_choices(spec) else found
        )

    def to_one_hot_spec(self) -> Self:
        return self._map(lambda s: s.to_one_hot_spec() if _has_choices(s) else s.clone())

    def to_categorical(self, value: Any, safe: bool | None = None) -> Any:
        """Turn the one-hot entries of a TensorDict into categorical ones, in a new TensorDict."""
        self._check_if_safe(value, safe)
        return self._replaced(
            value, lambda spec, found: spec.to_categorical(found) if _has_choices(spec) else found
        )

    def to_categorical_spec(self) -> Self:
        return self._map(lambda s: s.to_categorical_spec() if _has_choices(s) else s.clone())

    def _present(self, value: Any) -> Iterator[tuple[str, TensorSpec, Any]]:
        """Walk over the entries of a TensorDict that have a spec."""
        for name, spec in self._specs.items():
            found = None if spec is None else entry_of(value, name)
            if spec is not None and found is not None:
                yield name, spec, found

    def _replaced(self, value: Any, change: Callable[[TensorSpec, Any], Any]) -> Any:
        """Copy a TensorDict with every entry that has a spec changed."""
        out = value.copy()
        for name, spec, found in self._present(value):
            out.set(name, change(spec, found))
        return out


def _has_choices(spec: TensorSpec) -> bool:
    return isinstance(spec, Composite) or spec.is_choice


def entry_of(value: Any, name: str) -> Any:
    """Read one entry of a TensorDict, ``None`` where it is missing or ragged."""
    try:
        return value.get(name, None)
    except RuntimeError:  # members of a lazy stack that no tensor can hold
        return None
