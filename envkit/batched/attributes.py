"""Attributes and methods of many sub-envs at once.

Attributes that a batched env does not have itself are looked up on its sub-envs. This module decides which
names are passed on and what comes back: a sequence of one value per sub-env, which can be called
where the values are methods, and looked into further. `AttributeLookup.get_attr`, `set_attr` and `call` address
single sub-envs. It does not know where the sub-envs live.

Conventions
    path  names one after the other: ``env.unwrapped.spec`` has the path ``("unwrapped", "spec")``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from envkit.data.paths import Path
from envkit.env.thread_lock import InUse
from envkit.env.wrapper_hints import called_here
from envkit.errors import ArgumentError, NotStartedError
from envkit.transport import Pool
from envkit.transport.pool import call_by_row


class AttributeLookup:
    """Mix-in for envs that have sub-envs: pass on public names that it does not have.

    ``num_workers`` counts the sub-envs, and is set once they may be asked.
    """

    _attribute_type: type[LocalAttribute] | type[WorkerAttribute]

    if not TYPE_CHECKING:  # a misspelt name would pass

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)  # type: ignore[misc]
            except AttributeError:
                if name.startswith("_") or "num_workers" not in self.__dict__:
                    raise
            return _attribute_of(*self._attributes_of_all(name), type(self).__name__, (name,))

    def _attributes_of_all(self, name: str) -> tuple[type, _Calls | CallsOfRows]:
        """Return the class of what is looked up by name, and what asks all sub-envs."""
        owner = cast(Any, self)
        if (pool := vars(self).get("_pool")) is None:
            raise NotStartedError(
                f"{type(self).__name__} has no attribute {name!r} of its own{called_here(name)}, and its "
                f"sub-envs are not running to be asked.{_guess(type(self), name)} Start them first, e.g. with reset()."
            )
        return self._attribute_type, _Calls(pool, owner._in_use)

    # ------------------------------------------------------------------------------ single sub-envs

    def get_attr(self, name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        """Return an attribute of sub-envs, of their wrappers or of their simulators.

        Args:
            name: of the attribute.
            indices: numbers of the sub-envs; None: all of them.

        Returns:
            One value for each, in their order. From worker processes values are copies.

        Raises:
            AttributeError: a sub-env has none of this name.

        Example:
            >>> pool = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
            >>> pool.get_attr("gravity")
            [9.8, 9.8]
        """
        return self._ask_rows(partial(attribute_of, name), indices)

    def set_attr(
        self, name: str, value: object, indices: int | Iterable[int] | None = None
    ) -> None:
        """Set an attribute of sub-envs, where it is: in the env, a wrapper, or the simulator.

        A new name is set on the simulator.

        Args:
            name: of the attribute.
            value: what each of them gets.
            indices: numbers of the sub-envs; None: all of them.

        Raises:
            ArgumentError: the name has dots, as in ``"transform.loc"``.

        Example:
            >>> pool.set_attr("gravity", 5.0, indices=[1])
            >>> pool.get_attr("gravity")
            [9.8, 5.0]
        """
        self._ask_rows(partial(set_attribute, name, value), indices)

    def call(
        self,
        name: str,
        *args: object,
        indices: int | Iterable[int] | None = None,
        **kwargs: object,
    ) -> list[Any]:
        """Call a method of sub-envs, of their wrappers or of their simulators.

        Args:
            name: of the method; an attribute that cannot be called is given as it is.
            args, kwargs: of the method.
            indices: numbers of the sub-envs; None: all of them.

        Returns:
            The results of the calls, in order.

        Raises:
            AttributeError: a sub-env has none of this name.
        """
        return self._ask_rows(partial(call_attribute, name, args, kwargs), indices)

    def _ask_rows(
        self,
        ask: Callable[[Any], Any],
        indices: int | Iterable[int] | None,
        *,
        wants_all: bool = True,
    ) -> list[Any]:
        """Call ``ask`` with sub-envs; ``wants_all``: raise where one has no such attribute."""
        owner = cast(Any, self)
        rows = chosen_rows(indices, owner.num_workers)
        pool = owner._started()
        with owner._in_use:
            found = call_by_row(pool, "apply", dict.fromkeys(rows, ask))
        if wants_all:
            require_found(found.values(), type(self).__name__)
        return [found[row] for row in rows]


def require_found(values: Iterable[Any], owner: str) -> None:
    """Check that no env has lacked an attribute.

    Raises:
        AttributeError: one has.
    """
    for missing in values:
        if isinstance(missing, MissingAttribute):
            raise AttributeError(f"the sub-envs of {owner} have no attribute {missing.name!r}.")


def single_envs(env: Any) -> int:
    """Return how many single envs an env has: the sub-envs of a batched one, else one."""
    batched = _batched_in(env)
    return 1 if batched is None else batched.num_workers


def ask_single_envs(env: Any, ask: Callable[[Any], Any], rows: list[int]) -> list[Any]:
    """Call ``ask`` with each of the single envs of an env that are named."""
    batched = _batched_in(env)
    if batched is None:
        return [ask(env) for _ in rows]
    return batched._ask_rows(ask, rows, wants_all=False)


def _batched_in(env: Any) -> Any:
    """Return the batched env that an env is, or is around; None where it is none."""
    return next((layer for layer in layers_of(env) if isinstance(layer, AttributeLookup)), None)


def chosen_rows(indices: Any, count: int) -> list[int]:
    """Return numbers of sub-envs as a list.

    Raises:
        ArgumentError: (a ValueError) there is none of such a number.
    """
    if indices is None:
        return list(range(count))
    rows = [indices] if isinstance(indices, int) else [int(index) for index in indices]
    if wrong := [row for row in rows if not -count <= row < count]:
        raise ArgumentError(
            f"indices has {wrong}, but there are {count} sub-envs. Pass numbers from 0 to {count - 1}."
        )
    return [row % count for row in rows]


@dataclass(frozen=True)
class MissingAttribute:
    """Stands for an attribute that an env does not have, since an error of one would end the others' calls."""

    name: str


def layers_of(env: Any) -> list[Any]:
    """Return an env, what it is around, and the wrappers and the simulator inside, from the outside in."""
    layers = [env]
    while "base_env" in env.__dict__.get("_modules", {}):
        env = env.base_env
        layers.append(env)
    inner = env.__dict__.get("_env")
    while inner is not None and inner not in layers:
        layers.append(inner)
        inner = getattr(inner, "__dict__", {}).get("env")
    return layers


def _owner(name: str, env: Any) -> Any:
    """Return what has an attribute of a name; None if nothing has."""
    for layer in layers_of(env):
        if name in getattr(layer, "__dict__", {}) or hasattr(type(layer), name):
            return layer
    return None


def attribute_of(name: str, env: Any) -> Any:
    """Return an attribute of an env, a wrapper or its simulator; a `MissingAttribute` where there is none."""
    owner = _owner(name, env)
    return getattr(env, name, MissingAttribute(name)) if owner is None else getattr(owner, name)


def set_attribute(name: str, value: Any, env: Any) -> None:
    """Set an attribute where it is, or on the simulator; see `require_settable`.

    Raises:
        ArgumentError: the name is that of an attribute of an attribute, or no name.
    """
    if not name.isidentifier():
        raise ArgumentError(
            f"name is {name!r}; expected the name of one attribute, without dots. To change an object that an env "
            "holds, set the whole object, or call a method of the env that changes it."
        )
    require_settable(name, env)
    owner = _owner(name, env)
    setattr(layers_of(env)[-1] if owner is None else owner, name, value)


def require_settable(name: str, env: Any) -> None:
    """Refuse a new name on one object that has several rows: its simulators would not see it.

    Raises:
        AttributeError: neither the env nor what it is around has the attribute.
    """
    if env.batch_size and _owner(name, env) is None:
        raise AttributeError(
            f"{type(env).__name__} of batch size {tuple(env.batch_size)} has no attribute {name!r}, and one that is set "
            "there would not reach the simulators of its rows. Use a pool of single envs, e.g. SerialEnv, or pass the "
            "value where the env is made."
        )


def call_attribute(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], env: Any) -> Any:
    """Call a method of an env, a wrapper or its simulator; what cannot be called is given as it is."""
    found = attribute_of(name, env)
    return found(*args, **kwargs) if callable(found) else found


def _guess(kind: type, name: str) -> str:
    """List attributes of a class that a misspelt name may have meant."""
    close = difflib.get_close_matches(name, dir(kind), n=1, cutoff=0.8)
    return f" If you meant {close[0]!r}, that needs no start." if close else ""


class _Calls:
    """The calls of a pool, made by one thread at a time."""

    def __init__(self, pool: Pool, in_use: InUse):
        self._pool, self._in_use = pool, in_use

    def call(self, method: str, *args: Any) -> list[Any]:
        with self._in_use:
            return self._pool.call(method, *args)


class CallsOfRows:
    """The same calls to some rows of a batched env."""

    def __init__(self, batched: AttributeLookup, rows: list[int]):
        self._batched, self._rows = batched, rows

    def call(self, method: str, path: Path, *args: Any) -> list[Any]:
        ask = partial(_OF_ONE[method], ".".join(path), *args)
        return self._batched._ask_rows(ask, self._rows, wants_all=False)


def _has(path: str, env: Any) -> bool:
    try:
        attrgetter(path)(env)
    except AttributeError:
        return False
    return True


def _value(path: str, env: Any) -> list[Any]:
    return [attrgetter(path)(env)]


def _called(path: str, args: tuple[Any, ...], kwargs: dict[str, Any], env: Any) -> list[Any]:
    return [attrgetter(path)(env)(*args, **kwargs)]


_OF_ONE = {"has_attribute": _has, "get_attribute": _value, "call_method": _called}
"""The attribute calls of a host, which answers for all of its envs, for one env."""


def _attribute_of(kind: Any, pool: _Calls | CallsOfRows, owner: str, path: Path) -> Any:
    if not all(pool.call("has_attribute", path)):
        raise AttributeError(
            f"neither {owner} nor its sub-envs have an attribute {'.'.join(path)!r}."
        )
    return kind(owner, pool, path)


def _values(pool: _Calls | CallsOfRows, path: Path) -> list[Any]:
    return [value for part in pool.call("get_attribute", path) for value in part]


class LocalAttribute(list):
    """An attribute of every sub-env in this process: the list of its values.

    Calling it calls every value; a public name that lists do not have is looked up on the values, and set there.
    """

    def __init__(self, owner: str, pool: _Calls | CallsOfRows, path: Path):
        super().__init__(_values(pool, path))
        vars(self)["_looked_up"] = owner, pool, path

    def __getattr__(self, name: str) -> LocalAttribute:
        _refuse_private(name)
        owner, pool, path = self._looked_up
        return _attribute_of(LocalAttribute, pool, owner, (*path, name))

    def __setattr__(self, name: str, value: Any) -> None:
        _set_on_values(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [value(*args, **kwargs) for value in self]


class WorkerAttribute:
    """An attribute of every sub-env, fetched when it is looked at and called when it is called.

    Iterating, indexing, ``len`` and ``==`` fetch the values, which must be picklable then. A public
    name is looked up on the values, and set there, without fetching them.
    """

    def __init__(self, owner: str, pool: _Calls | CallsOfRows, path: Path):
        vars(self)["_looked_up"] = owner, pool, path

    def __setattr__(self, name: str, value: Any) -> None:
        _set_on_values(self, name, value)

    def _values(self) -> list[Any]:
        _, pool, path = self._looked_up
        return _values(pool, path)

    def __getattr__(self, name: str) -> WorkerAttribute:
        _refuse_private(name)
        owner, pool, path = self._looked_up
        return _attribute_of(WorkerAttribute, pool, owner, (*path, name))

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


def _set_on_values(attribute: LocalAttribute | WorkerAttribute, name: str, value: Any) -> None:
    """Set an attribute, which is there, of each value, where the value is."""
    getattr(attribute, name)  # or raise that there is none
    _, pool, path = attribute._looked_up
    pool.call("call_method", (*path, "__setattr__"), (name, value), {})


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise AttributeError(f"{name!r} is private, and is not looked up on sub-envs.")
