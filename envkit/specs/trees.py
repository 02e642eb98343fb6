"""A tree of specs: its entries and their names, and how it is walked, read, edited and locked.

This module decides what is a key, in which order keys come, and how an error says where in the tree it arose. It also
decides what may be put into a tree (shapes, devices), how locks spread and who may lift them. It knows nothing of the
data a tree describes.

Conventions
    key     a string, or a flat tuple of strings for a nested entry; a key of one part is a plain string.
    order   the entries of a nested tree come before its own key.
    None    a child without a spec: the key exists, no data is made for it.
    lock    a child remembers, weakly, the parents that locked it: a parent that is gone holds none.
    The shape of every child begins with the shape of its parent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, ClassVar, Self, TypeGuard

from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    EnvkitError,
    MissingKeyError,
    ReservedKeyError,
    SpecError,
    SpecLockedError,
    SpecTypeError,
)
from envkit.specs.annotations import AxisIndex, Key
from envkit.specs.tensor_spec import TensorSpec, type_and_fix

MISSING: Any = object()  # neither found nor given
IsLeaf = Callable[[type], bool] | None


def is_key(index: object) -> TypeGuard[Key]:
    """Check whether an index names an entry rather than axes."""
    if isinstance(index, str):
        return True
    return isinstance(index, tuple) and len(index) > 0 and all(is_key(part) for part in index)


def as_path(key: Any) -> tuple[str, ...]:
    """Write a key as a flat tuple of its parts.

    Raises:
        ArgumentTypeError: it is neither a string nor a tuple of strings.
    """
    if isinstance(key, str):
        return (key,)
    if type(key) is tuple and all(type(part) is str for part in key):
        return key
    if not is_key(key):
        raise ArgumentTypeError(
            f"a key is {key!r}, but must be a string or a tuple of strings. Pass 'action', or ('agents', 'action')."
        )
    return tuple(name for part in key for name in as_path(part))


class at_entry:
    """Within this context an envkit error says at which entry of a tree it arose."""

    def __init__(self, name: Any):
        self._name = name

    def _where(self) -> str:
        return f"at entry {self._name!r}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, EnvkitError):
            raise type(error)(f"{self._where()}: {error}") from None


class at_member(at_entry):
    """Within this context an envkit error says in which member of a stack it arose."""

    def _where(self) -> str:
        return f"in member {self._name}"


class _TreeView:
    """A view of a tree that is walked again on each use."""

    def __init__(self, tree: Any, include_nested: bool, leaves_only: bool, is_leaf: IsLeaf = None):
        self._tree, self._nested, self._leaves = tree, include_nested, leaves_only
        self._is_leaf = is_leaf

    def _keys(self) -> Iterator[Any]:
        """Walk without making children: a stack could fail to make one."""
        return _walk_keys(self._tree, self._nested, self._leaves, self._is_leaf)

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        return ((key, self._tree.get(key)) for key in self._keys())

    def __len__(self) -> int:
        return sum(1 for _ in self._keys())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"  # type: ignore[call-overload]


class TreeKeys(_TreeView, KeysView):
    """Keys of a tree."""

    def __iter__(self) -> Iterator[Any]:
        return self._keys()

    def __contains__(self, key: Any) -> bool:
        if not is_key(key):
            return False
        if self._leaves and self._is_leaf is not None:
            return as_path(key) in map(as_path, self._keys())
        *path, name = as_path(key)
        if path and not self._nested:
            return False
        parent = self._tree._lookup(tuple(path))
        children = parent._children() if hasattr(parent, "_children") else ()
        return name in children and not (self._leaves and parent._is_tree(name))


class TreeItems(_TreeView, ItemsView):
    """Pairs of key and spec of a tree."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self._pairs()

    def __contains__(self, pair: Any) -> bool:
        return any(pair == mine for mine in self._pairs())


class TreeValues(_TreeView, ValuesView):
    """Specs of a tree."""

    def __iter__(self) -> Iterator[Any]:
        return (spec for _, spec in self._pairs())

    def __contains__(self, spec: Any) -> bool:
        return any(spec == mine for _, mine in self._pairs())


def _walk_keys(tree: Any, nested: bool, leaves: bool, is_leaf: IsLeaf) -> Iterator[Any]:
    for name in tree._children():
        inner = tree._is_tree(name)
        if inner and nested:
            for key in _walk_keys(tree._children()[name], nested, leaves, is_leaf):
                yield (name, *as_path(key))
        is_kept = not leaves or (not inner if is_leaf is None else is_leaf(type(tree.get(name))))
        if is_kept:
            yield name


class _Lockable:
    """A node of a tree that can be locked against edits in place."""

    _locked: bool
    _lock_parents: list[weakref.ref[Any]]

    def _lockables(self) -> Iterator[Any]:
        """The children that can be locked."""
        raise NotImplementedError

    @property
    def is_locked(self) -> bool:
        return self._locked

    @property
    def locked(self) -> bool:
        """Another name of ``is_locked``."""
        return self._locked

    def lock_(self, recurse: bool | None = None) -> Self:
        """Refuse edits in place, here and, unless ``recurse=False``, in all nested composites.

        Returns:
            This composite.

        Example:
            >>> from envkit import Composite, Unbounded
            >>> spec = Composite(place=Unbounded((3,))).lock_()
            >>> spec.is_locked, spec.unlock_().is_locked
            (True, False)
        """
        self._locked = True
        if recurse is not False:
            for child in self._lockables():
                child._lock_parents.append(weakref.ref(self))
                child.lock_()
        return self

    def unlock_(self, recurse: bool | None = None) -> Self:
        """Allow edits in place again, here and, unless ``recurse=False``, in all nested composites.

        Returns:
            This composite.

        Raises:
            SpecLockedError: the composite belongs to a locked one, or one nested in it belongs to
                another tree that is locked. The tree stays locked then.
        """
        nodes = [self] if recurse is False else list(self._nodes())
        if any(node._has_locked_parent(nodes) for node in nodes):
            raise SpecLockedError(
                "this spec belongs to a locked one, or holds one that does, and cannot be unlocked on "
                "its own. Unlock the spec at the root of the tree, of every tree it is in, or edit a `clone()`."
            )
        for node in nodes:
            node._locked = False
            for child in node._lockables():
                child._lock_parents = [ref for ref in child._lock_parents if ref() is not node]
        return self

    def _nodes(self) -> Iterator[Any]:
        """This node and all below it."""
        yield self
        for child in self._lockables():
            yield from child._nodes()

    def _has_locked_parent(self, among: Sequence[Any]) -> bool:
        """Check whether a locked parent is none of these nodes."""
        parents = (ref() for ref in self._lock_parents)
        known = {id(node) for node in among}
        return any(p is not None and p._locked and id(p) not in known for p in parents)

    def _check_unlocked(self, what: str) -> None:
        if self._locked:
            raise SpecLockedError(
                f"the spec is locked, cannot {what}. Call `unlock_()` on the root of the tree "
                "first; for the specs of an env, `env.set_spec_lock_(False)`."
            )


_RESERVED = frozenset(("shape", "device", "dtype", "space"))

Child = TensorSpec | Mapping[Any, Any] | None
"""What a tree takes under a key: a spec, a dict of specs, or nothing."""


class Branch(_Lockable, TensorSpec):
    """A tree of specs: one per key, nested trees for nested keys."""

    _caches: ClassVar[tuple[str, ...]] = ("_lock_parents",)
    _takes_batch_axes = True

    _specs: dict[str, TensorSpec | None]
    data_cls: type | None

    def _below(self, specs: Mapping[Any, Any] | None = None) -> Branch:
        """Make a tree of this one's shape and device, to be put below it."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, Branch)
            and self._shape == other._shape
            and self._device == other._device
            and self.data_cls is other.data_cls
            and self._specs == other._specs
        )

    __hash__ = None  # type: ignore[assignment]

    def _shown(self) -> list[tuple[str, Any]]:
        return list(self.items())

    # -- reading -----------------------------------------------------------------------

    def _children(self) -> Mapping[str, TensorSpec | None]:
        """The children by name; a stack makes them on demand."""
        return self._specs

    def _is_tree(self, name: str) -> bool:
        return isinstance(self._specs[name], Branch)

    def _lockables(self) -> Iterator[Branch]:
        """The nested composites."""
        return (child for child in self._specs.values() if isinstance(child, Branch))

    def _lookup(self, key: tuple[str, ...]) -> Any:
        spec: Any = self
        for name in key:
            children = spec._children() if isinstance(spec, Branch) else {}
            if name not in children:
                return MISSING
            spec = children[name]
        return spec

    def get(self, key: Key, default: object = MISSING) -> Any:
        """Return the child at a key, at any depth.

        Raises:
            MissingKeyError: there is no such key, and no default was given.

        Example:
            >>> from envkit import Composite, Unbounded
            >>> spec = Composite(place=Unbounded((3,)))
            >>> spec.get("place").shape, spec.get("speed", None)
            (torch.Size([3]), None)
        """
        found = self._lookup(as_path(key))
        if found is not MISSING:
            return found
        if default is not MISSING:
            return default
        raise self._no_such_key(key)

    def _no_such_key(self, key: Key) -> MissingKeyError:
        return MissingKeyError(
            f"key {key!r} is not in the spec, which has {list(self.keys(True, True))}. "
            "Use one of these, or pass a default."
        )

    def __getitem__(self, index: Key | AxisIndex) -> Any:
        """Return the child at a key, or index the batch axes of the whole tree."""
        if isinstance(index, str) or is_key(index):
            return self.get(index)
        return super().__getitem__(index)

    # -- editing -----------------------------------------------------------------------

    def set(self, key: Key, spec: Child) -> Self:
        """Put a child at a key, making the composites in between with this one's shape.

        A child on another device than the composite's is moved; a dict becomes a composite; a composite or
        non-tensor spec whose shape is only the beginning of this one's is copied and given this one's.

        Returns:
            This composite.

        Raises:
            SpecLockedError: the composite at which the child goes is locked.
            MissingKeyError: the key leads through a leaf.
            ArgumentError: it is no key, or has an empty part.
            SpecTypeError: neither a spec, a dict nor ``None``.
            SpecError: the child's shape does not begin with the composite's.

        Example:
            >>> from envkit import Composite, Unbounded
            >>> spec = Composite()
            >>> _ = spec.set(("body", "place"), Unbounded((3,)))
            >>> spec["body", "place"].shape
            torch.Size([3])
        """
        name, *rest = as_path(key)
        if not name:
            raise ArgumentError(f"{key!r} has an empty part. Name every part of a key.")
        if rest:
            child = self._lookup((name,))
            if child is MISSING or child is None:
                self._check_unlocked(f"set {key!r}")
                child = self._below()
                child._set_from(name, rest, spec)
                self._specs[name] = child
            elif isinstance(child, Branch):
                child._set_from(name, rest, spec)
            else:
                raise MissingKeyError(
                    f"key {key!r} leads through {name!r}, which is {child!r} and has no entries. "
                    "Delete it first, or choose another name."
                )
            return self
        self._check_unlocked(f"set {key!r}")
        self._specs[name] = self._checked(name, spec)
        return self

    def __setitem__(self, key: Key, spec: Child) -> None:
        """Put a child at a key; see `set`.

        Raises:
            ReservedKeyError: the key is the name of what every spec has.
        """
        if as_path(key)[-1] in _RESERVED:
            raise ReservedKeyError(
                f"{key!r} names an attribute of the spec, and an entry of that name is most often a slip. "
                "Assign the attribute, choose another key, or call `spec.set(key, child)`."
            )
        self.set(key, spec)

    def _set_from(self, name: str, rest: list[str], spec: Child) -> None:
        """Put a child at the rest of a key whose first part ``name`` led here."""
        with at_entry(name):
            self.set(tuple(rest), spec)

    def _checked(self, name: str, spec: Child) -> TensorSpec | None:
        if spec is None:
            return None
        if isinstance(spec, Mapping):
            spec = self._below(spec)
        if not isinstance(spec, TensorSpec):
            raise SpecTypeError(
                f"entry {name!r} is {spec!r} of type "
                f"{type_and_fix(spec, 'Pass a spec, a dict of specs or None.')}"
            )
        if spec._takes_batch_axes:
            spec = self._spread(name, spec)
        if spec._free_shape[: self.ndim] != self.shape:
            raise SpecError(
                f"entry {name!r} has shape {tuple(spec.shape)}, which does not begin with the "
                f"shape {tuple(self.shape)} of the composite. Expand it: "
                f"spec.expand({', '.join(map(str, (*self.shape, *spec.shape)))})."
            )
        if self._device is not None and spec.device != self._device:
            return spec.to(self._device)
        return spec

    def _spread(self, name: str, spec: TensorSpec) -> TensorSpec:
        """Expand a child whose shape begins that of this tree to all of its axes."""
        if spec.ndim >= self.ndim or spec.shape != self.shape[: spec.ndim]:
            return spec
        copy: Any = spec.clone()
        with at_entry(name):
            copy.shape = self.shape
        return copy

    def __delitem__(self, key: Key) -> None:
        *path, name = as_path(key)
        parent = self._lookup(tuple(path))
        if not isinstance(parent, Branch) or name not in parent._children():
            raise self._no_such_key(key)
        parent._check_unlocked(f"delete {key!r}")
        del parent._specs[name]

    def pop(self, key: Key, default: object = MISSING) -> Any:
        """Remove the child at a key and return it.

        Raises:
            MissingKeyError: there is no such key, and no default was given.
            SpecLockedError: the spec is locked.

        Example:
            >>> from envkit import Composite, Unbounded
            >>> spec = Composite(place=Unbounded((3,)), speed=Unbounded((2,)))
            >>> spec.pop("speed").shape, list(spec.keys())
            (torch.Size([2]), ['place'])
        """
        self._check_unlocked(f"pop {key!r}")
        found = self.get(key, default)
        if self._lookup(as_path(key)) is not MISSING:
            del self[key]
        return found

    def update(self, other: Mapping[Any, Any] | Branch) -> Self:
        """Merge copies of the leaves of another tree into this one; they win.

        Returns:
            This composite.

        Example:
            >>> from envkit import Composite, Unbounded
            >>> spec = Composite(place=Unbounded((3,)))
            >>> _ = spec.update(Composite(speed=Unbounded((2,))))
            >>> list(spec.keys())
            ['place', 'speed']
        """
        self._check_unlocked("update it")
        for key, spec in other.items():
            mine = self._lookup(as_path(key))
            if isinstance(mine, Branch) and isinstance(spec, (Mapping, Branch)):
                mine.update(spec)
            else:
                self.set(key, _copied(spec))
        return self

    def separates(self, *keys: Key, default: Child = None) -> Branch:
        """Remove the given keys and return them as a new composite.

        Args:
            *keys: keys at any depth.
            default: taken for a key that is missing; ``None`` leaves such a key out.

        Raises:
            SpecLockedError: the spec is locked.

        Example:
            >>> from envkit import Composite, Unbounded
            >>> spec = Composite(place=Unbounded((3,)), speed=Unbounded((2,)))
            >>> list(spec.separates("speed").keys()), list(spec.keys())
            (['speed'], ['place'])
        """
        separated = self.empty()
        for key in keys:
            if self._lookup(as_path(key)) is not MISSING:
                separated.set(key, self.pop(key))
            elif default is not None:
                separated.set(key, default)
        return separated

    def empty(self) -> Branch:
        """Make a composite of the same shape, device and names without children."""
        raise NotImplementedError

    def is_empty(self, recurse: bool = False) -> bool:
        """Check whether there are no children, or with ``recurse`` no leaves at any depth."""
        children = self._children().values()
        if not recurse:
            return not children
        return all(isinstance(child, Branch) and child.is_empty(True) for child in children)

    def clear_device_(self) -> Self:
        """Drop the constraint on devices, here and below.

        Raises:
            SpecLockedError: the spec is locked.
        """
        self._check_unlocked("drop its device")
        self._device = None
        for child in self._lockables():
            child.clear_device_()
        return self

    # -- iteration ---------------------------------------------------------------------

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: IsLeaf = None,
        step_mdp_static_only: bool = False,
    ) -> KeysView[Any]:
        """View the keys, in insertion order; entries of a nested composite precede its own key.

        Args:
            include_nested: go into nested composites; their keys are tuples.
            leaves_only: leave composites out.
            is_leaf: says of the class of a spec whether ``leaves_only`` keeps it; all but composites by default.
            step_mdp_static_only: without effect: a TorchRL composite asks the ones it holds for it.

        Example:
            >>> from envkit import Composite, Unbounded
            >>> spec = Composite(body=Composite(place=Unbounded((3,))))
            >>> list(spec.keys()), list(spec.keys(True, True))
            (['body'], [('body', 'place')])
        """
        return TreeKeys(self, include_nested, leaves_only, is_leaf)

    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: IsLeaf = None,
        step_mdp_static_only: bool = False,
    ) -> ItemsView[Any, Any]:
        """View pairs of key and child; see `keys`."""
        return TreeItems(self, include_nested, leaves_only, is_leaf)

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: IsLeaf = None,
        step_mdp_static_only: bool = False,
    ) -> ValuesView[Any]:
        """View the children; see `keys`."""
        return TreeValues(self, include_nested, leaves_only, is_leaf)

    def __iter__(self) -> Iterator[str]:
        return iter(self._children())

    def __contains__(self, value: Any) -> bool:
        """Check whether a key is there, at any depth, or whether a TensorDict is in the spec."""
        return value in self.keys(include_nested=True) if is_key(value) else self.is_in(value)

    def __len__(self) -> int:
        return len(self._children())

    def __bool__(self) -> bool:
        return True  # so that `spec or default` keeps an empty spec

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock_parents = []
        if self._locked:
            self.lock_()

    # -- copies ------------------------------------------------------------------------

    def _map(self, change: Callable[[TensorSpec], TensorSpec], **attributes: Any) -> Self:
        """Copy the tree, unlocked, with each child changed."""
        new = self._copy()
        new._locked, new._lock_parents = False, []
        new.__dict__.update(attributes)
        changed = new._specs = dict.fromkeys(self._specs)
        for name, child in self._specs.items():
            if child is not None:
                with at_entry(name):
                    changed[name] = change(child)
        return new

    def clone(self, recurse: bool = True) -> Self:
        """Copy the tree, unlocked; with ``recurse=False`` the leaves are shared."""
        if recurse:
            return self._map(lambda child: child.clone())
        return self._map(lambda c: c.clone(False) if isinstance(c, Branch) else c)


def _copied(child: Any) -> Any:
    """Copy a child, or all that a mapping holds; None stays."""
    if isinstance(child, Mapping):
        return {key: _copied(value) for key, value in child.items()}
    return child.clone() if isinstance(child, TensorSpec) else child
