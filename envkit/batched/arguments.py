"""What a batched env is given for its sub-envs: create functions, their keywords, and their tasks.

This module decides how one value for all and a list of one value each are told apart, and which
rows are known to hold the same kind of env. It builds no env.

Conventions
    maker  callable that returns an env.
    task   number of a kind of sub-env: rows with the same maker object and equal keywords share
           one, and are taken to look alike.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from envkit.base import EnvBase
from envkit.errors import ArgumentCountError, ArgumentError

__all__ = ["Copies", "as_kwargs", "as_makers", "equal", "tasks_of"]

Make = Callable[..., Any]


def as_makers(count: int, create_env_fn: Any) -> list[Make]:
    """Give one maker for each of ``count`` rows.

    Args:
        count: number of rows.
        create_env_fn: a maker or an env for all rows, or a list of one for each.

    Raises:
        ArgumentCountError: a list of another length.
    """
    if isinstance(create_env_fn, EnvBase):
        return [Copies(create_env_fn)] * count
    if callable(create_env_fn):
        return [create_env_fn] * count
    given = list(create_env_fn)
    if len(given) != count:
        raise ArgumentCountError(
            f"create_env_fn has {len(given)} entries for {count} sub-envs. "
            "Pass one callable for all of them, or one for each."
        )
    copies = {id(env): Copies(env) for env in given if isinstance(env, EnvBase)}
    return [copies[id(one)] if isinstance(one, EnvBase) else one for one in given]


def as_kwargs(count: int, kwargs: Any) -> list[dict[str, Any]]:
    """Give one dict of keywords for each of ``count`` rows; a dict for all is copied deeply.

    Raises:
        ArgumentCountError: a list of another length.
    """
    if kwargs is None:
        kwargs = {}
    if isinstance(kwargs, dict):
        return [copy.deepcopy(kwargs) for _ in range(count)]
    if len(kwargs) != count:
        raise ArgumentCountError(
            f"{len(kwargs)} dicts of keywords were given for {count} sub-envs. "
            "Pass one dict for all of them, or one for each."
        )
    return [dict(own) for own in kwargs]


def tasks_of(makers: Sequence[Make], kwargs: Sequence[dict[str, Any]]) -> list[int]:
    """Number the task of each row, in the order in which they first appear.

    Keywords that cannot be compared count as different: such rows are described one by one.
    """
    firsts: list[tuple[Make, dict[str, Any]]] = []
    tasks = []
    for maker, own in zip(makers, kwargs, strict=True):
        known = (
            task
            for task, (first, other) in enumerate(firsts)
            if maker is first and equal(own, other)
        )
        task = next(known, len(firsts))
        if task == len(firsts):
            firsts.append((maker, own))
        tasks.append(task)
    return tasks


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Say whether keywords are known to be equal."""
    try:
        return bool(left == right)
    except (ValueError, RuntimeError, TypeError):  # arrays have no single truth value
        return False


class Copies:
    """Make copies of an env instance.

    Raises:
        ArgumentError: keywords are given, which an env that was built already cannot take; or it is
            sent to a worker and the env cannot be pickled.
    """

    def __init__(self, env: EnvBase):
        self.env = env

    def __call__(self, **kwargs: Any) -> EnvBase:
        if kwargs:
            raise ArgumentError(
                f"create_env_kwargs {sorted(kwargs)} were given with an env instance, a "
                f"{type(self.env).__name__}, which is built already. Pass its class or a function."
            )
        return copy.deepcopy(self.env)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickled = cloudpickle.dumps(self.env)
        except Exception as error:
            raise ArgumentError(
                f"the env instance, a {type(self.env).__name__}, cannot be pickled ({error}) and so "
                "cannot be sent to workers. Pass a function that builds it, "
                "`lambda: env_cls(...)`, or an `EnvCreator`."
            ) from error
        return _unpickled, (pickled,)


def _unpickled(env: bytes) -> Copies:
    return Copies(pickle.loads(env))
