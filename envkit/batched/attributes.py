"""Attributes and methods of many sub-envs at once.

What a batched env does not have itself is looked up on its sub-envs. This module decides which
names are passed on and what comes back: a sequence of one value per sub-env, which can be called
where the values are methods, and looked into further. It does not know where the sub-envs live.

Conventions
    path  names one after the other: ``env.unwrapped.spec`` has the path ``("unwrapped", "spec")``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from envkit.data.paths import Path
from envkit.env.exclusive import InUse
from envkit.errors import NotStartedError
from envkit.transport import Pool

__all__ = ["AttributeLookup", "LocalAttribute", "WorkerAttribute"]


class AttributeLookup:
    """Mix-in for `BatchedEnv`: pass on public names that it does not have."""

    _pool: Pool | None
    _attribute_type: type[LocalAttribute] | type[WorkerAttribute]

    if not TYPE_CHECKING:  # a misspelt name would pass

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)  # type: ignore[misc]
            except AttributeError:
                if name.startswith("_") or "num_workers" not in self.__dict__:
                    raise
            pool = self.__dict__.get("_pool")
            if pool is None:
                raise NotStartedError(
                    f"{type(self).__name__} has no attribute {name!r} of its own, and its sub-envs are "
                    f"not running to be asked.{_guess(type(self), name)} Start them first, e.g. with reset()."
                )
            calls = _Calls(pool, self._in_use)
            return _looked_up(self._attribute_type, type(self).__name__, calls, (name,))


def _guess(kind: type, name: str) -> str:
    """Name what a class has of its own that a misspelt name may have meant."""
    close = difflib.get_close_matches(name, dir(kind), n=1, cutoff=0.8)
    return f" If you meant {close[0]!r}, that needs no start." if close else ""


class _Calls:
    """The calls of a pool, made by one thread at a time."""

    def __init__(self, pool: Pool, in_use: InUse):
        self._pool, self._in_use = pool, in_use

    def call(self, method: str, *args: Any) -> list[Any]:
        with self._in_use:
            return self._pool.call(method, *args)


def _looked_up(kind: Any, owner: str, pool: _Calls, path: Path) -> Any:
    if not all(pool.call("has_attribute", path)):
        raise AttributeError(
            f"neither {owner} nor its sub-envs have an attribute {'.'.join(path)!r}."
        )
    return kind(owner, pool, path)


def _values(pool: _Calls, path: Path) -> list[Any]:
    return [value for part in pool.call("get_attribute", path) for value in part]


class LocalAttribute(list):
    """An attribute of every sub-env in this process: the list of its values.

    Calling it calls every value; a public name that lists do not have is looked up on the values.
    """

    def __init__(self, owner: str, pool: _Calls, path: Path):
        super().__init__(_values(pool, path))
        self._looked_up = owner, pool, path

    def __getattr__(self, name: str) -> LocalAttribute:
        _refuse_private(name)
        owner, pool, path = self._looked_up
        return _looked_up(LocalAttribute, owner, pool, (*path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [value(*args, **kwargs) for value in self]


class WorkerAttribute:
    """An attribute of every sub-env, fetched when it is looked at and called when it is called.

    Iterating, indexing, ``len`` and ``==`` fetch the values, which must be picklable then. A public
    name is looked up on the values, without fetching them.
    """

    def __init__(self, owner: str, pool: _Calls, path: Path):
        self._looked_up = owner, pool, path

    def _values(self) -> list[Any]:
        _, pool, path = self._looked_up
        return _values(pool, path)

    def __getattr__(self, name: str) -> WorkerAttribute:
        _refuse_private(name)
        owner, pool, path = self._looked_up
        return _looked_up(WorkerAttribute, owner, pool, (*path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        _, pool, path = self._looked_up
        parts = pool.call("call_method", path, args, kwargs)
        return [value for part in parts for value in part]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __getitem__(self, index: Any) -> Any:
        return self._values()[index]

    def __eq__(self, other: object) -> bool:
        other = other._values() if isinstance(other, WorkerAttribute) else other
        return self._values() == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        owner, _, path = self._looked_up
        return f"WorkerAttribute({'.'.join(path)!r} of the sub-envs of {owner})"


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise AttributeError(f"{name!r} is private, and is not looked up on sub-envs.")
