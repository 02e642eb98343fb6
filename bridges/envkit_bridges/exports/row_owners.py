"""Whose the rows of an env are: single envs of a pool, or one object that has several.

`RowOwners` addresses the single rows of an env, through transforms and through the members of a `MixedEnv`.

Conventions
    rows   numbers of rows of the whole batch, in any order.
    shared rows that are one object, as of Brax: it is asked once, and what it answers is the same for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from envkit.batched.attributes import (
    attribute_of,
    call_attribute,
    chosen_rows,
    layers_of,
    require_found,
    require_settable,
    set_attribute,
)
from envkit.batched.env import BatchedEnv
from envkit.batched.mixed import MixedEnv
from envkit.env.base import EnvBase
from envkit.errors import UnsupportedError
from envkit_bridges.exports.frames import without_transforms

__all__ = ["RowOwners"]


@dataclass(frozen=True)
class _Owner:
    """An env and the rows it has; ``pool`` is the batched env of single ones inside, if it is one."""

    env: EnvBase
    rows: range
    pool: BatchedEnv | None

    def shared(self, fix: str) -> UnsupportedError:
        kind, first, last = type(self.env).__name__, self.rows[0], self.rows[-1]
        return UnsupportedError(
            f"rows {first} to {last} of this {kind} are one object, so some of them cannot be asked apart. Use a pool of "
            f"single envs, e.g. SerialEnv, or {fix}."
        )


class RowOwners:
    """Address the rows of an env one by one.

    Args:
        env: with one batch axis.
    """

    def __init__(self, env: EnvBase):
        self._count = env.batch_size[0]
        self._owners = list(_owners(env, 0))

    def get_attr(self, name: str, indices: Any = None) -> list[Any]:
        """Give an attribute of each of some rows.

        Raises:
            AttributeError: one of them has none of this name.
        """
        found = {}
        for owner, rows in self._chosen(indices):
            if owner.pool is None:
                found |= _by_row(owner, getattr(owner.env, name), rows)
            else:
                found |= _asked(owner, partial(attribute_of, name), rows)
        return self._in_order(found, indices)

    def set_attr(self, name: str, values: Sequence[Any], indices: Any = None) -> None:
        """Set an attribute of each of some rows, to one value each.

        Raises:
            AttributeError: rows are one object, which has none of this name.
            UnsupportedError: (a NotImplementedError) rows are one object, and not all of them get the same value.
        """
        given = dict(zip(chosen_rows(indices, self._count), values, strict=True))
        chosen = list(self._chosen(indices))
        for owner, rows in chosen:
            first = given[rows[0]]
            if owner.pool is None and (
                set(rows) != set(owner.rows) or any(given[row] is not first for row in rows)
            ):
                raise owner.shared(f"set {name!r} to one value for all of them")
            if owner.pool is None:
                require_settable(name, owner.env)
        for owner, rows in chosen:
            if owner.pool is None:
                set_attribute(name, given[rows[0]], owner.env)
            else:
                for row in rows:
                    _asked(owner, partial(set_attribute, name, given[row]), [row])

    def call(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Call a method of each of some rows; what cannot be called is given as it is.

        Raises:
            AttributeError: one of them has none of this name.
            UnsupportedError: (a NotImplementedError) rows are one object, and some of them are named.
        """
        chosen = list(self._chosen(indices))
        for owner, rows in chosen:
            if owner.pool is None and set(rows) != set(owner.rows):
                raise owner.shared(f"call {name!r} for all of them")
        found = {}
        for owner, rows in chosen:
            if owner.pool is None:
                method = getattr(owner.env, name)
                answer = method(*args, **kwargs) if callable(method) else method
                found |= _by_row(owner, answer, rows)
            else:
                found |= _asked(owner, partial(call_attribute, name, args, kwargs), rows)
        return self._in_order(found, indices)

    def is_wrapped(self, kind: type, indices: Any = None) -> list[bool]:
        """Say for each of some rows whether a wrapper of a class is around its simulator."""
        found = {}
        for owner, rows in self._chosen(indices):
            if owner.pool is None:
                found |= dict.fromkeys(rows, False)
            else:
                found |= _asked(owner, partial(_has_layer, kind), rows)
        return self._in_order(found, indices)

    def _chosen(self, indices: Any) -> Iterator[tuple[_Owner, list[int]]]:
        """Give the owners of some rows, each with its rows among them."""
        rows = list(dict.fromkeys(chosen_rows(indices, self._count)))
        for owner in self._owners:
            if own := [row for row in rows if row in owner.rows]:
                yield owner, own

    def _in_order(self, found: dict[int, Any], indices: Any) -> list[Any]:
        return [found[row] for row in chosen_rows(indices, self._count)]


def _owners(env: EnvBase, first: int) -> Iterator[_Owner]:
    inner = without_transforms(env)
    if isinstance(inner, MixedEnv):
        for member in inner.members:
            yield from _owners(member.env, first + member.rows.start)
    else:
        pool = inner if isinstance(inner, BatchedEnv) else None
        yield _Owner(env, range(first, first + env.batch_size[0]), pool)


def _asked(owner: _Owner, ask: Callable[[Any], Any], rows: list[int]) -> dict[int, Any]:
    assert owner.pool is not None
    found = owner.pool._ask_rows(ask, [row - owner.rows[0] for row in rows])
    require_found(found, type(owner.pool).__name__)
    return dict(zip(rows, found, strict=True))


def _by_row(owner: _Owner, value: Any, rows: list[int]) -> dict[int, Any]:
    """Give each row its own of a list with one value a row; anything else is the same for each."""
    is_list = isinstance(value, list | tuple) and len(value) == len(owner.rows)
    return {row: value[row - owner.rows[0]] if is_list else value for row in rows}


def _has_layer(kind: type, env: EnvBase) -> bool:
    return any(isinstance(layer, kind) for layer in layers_of(env))
