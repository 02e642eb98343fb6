"""When a tree of specs refuses to be edited.

This module decides how locks spread and who may lift them. It knows that a tree has lockable
children, and nothing else of specs.

Conventions
    A child remembers, weakly, the parents that locked it: a parent that is gone holds no lock.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
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

    def lock_(self, recurse: bool = True) -> Self:
        """Refuse edits in place, here and in all nested composites.

        Returns:
            This composite.
        """
        self._locked = True
        if recurse:
            for child in self._lockables():
                child._lock_parents.append(weakref.ref(self))
                child.lock_()
        return self

    def unlock_(self, recurse: bool = True) -> Self:
        """Allow edits in place again; a nested composite with another locked parent stays locked.

        Returns:
            This composite.

        Raises:
            SpecLockedError: the composite belongs to a locked one.
        """
        if self._has_locked_parent():
            raise SpecLockedError(
                "this spec belongs to a locked one and cannot be unlocked on its own. "
                "Unlock the spec at the root of the tree, or edit a `clone()`."
            )
        self._locked = False
        for child in self._lockables():
            child._lock_parents = [ref for ref in child._lock_parents if ref() is not self]
            if recurse and not child._has_locked_parent():
                child.unlock_()
        return self

    def _has_locked_parent(self) -> bool:
        parents = (ref() for ref in self._lock_parents)
        return any(parent is not None and parent._locked for parent in parents)

    def _check_unlocked(self, what: str) -> None:
        if self._locked:
            raise SpecLockedError(
                f"the spec is locked, cannot {what}. Call `unlock_()` on the root of the tree "
                "first; for the specs of an env, `env.set_spec_lock_(False)`."
            )
