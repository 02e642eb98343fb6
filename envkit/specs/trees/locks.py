"""When a tree of specs refuses to be edited.

This module decides how locks spread and who may lift them. It knows that a tree has lockable
children, and nothing else of specs.

Conventions
    A child remembers, weakly, the parents that locked it: a parent that is gone holds no lock.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Self

from envkit.errors import SpecLockedError

__all__ = ["Lockable"]


class Lockable:
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
                another tree that is locked. Nothing is unlocked then.
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
        """Say whether a locked parent is none of these nodes."""
        parents = (ref() for ref in self._lock_parents)
        known = {id(node) for node in among}
        return any(p is not None and p._locked and id(p) not in known for p in parents)

    def _check_unlocked(self, what: str) -> None:
        if self._locked:
            raise SpecLockedError(
                f"the spec is locked, cannot {what}. Call `unlock_()` on the root of the tree "
                "first; for the specs of an env, `env.set_spec_lock_(False)`."
            )
