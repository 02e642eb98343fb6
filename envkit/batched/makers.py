"""The parts that build the sub-envs of a batched env: create functions, their keywords, and their tasks.

This module decides how one value for all and a list of one value each are told apart, which rows are known to hold
the same kind of env, and whether a maker takes its keywords. It builds no env: an unknown keyword that can be seen
without building is reported where it is given; makers that take any keyword leave that to the sub-env.

Conventions
    maker  callable that returns an env: a class, a function, or a partial of one.
    task   number of a kind of sub-env: rows with the same maker object and equal keywords share
           one, and are taken to look alike.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from envkit.data.keywords import refuse_unknown
from envkit.env.base import EnvBase
from envkit.errors import ArgumentCountError, ArgumentError, ArgumentTypeError
from envkit.transport import by_value

Make = Callable[..., Any]


def as_makers(count: int, create_env_fn: Any) -> list[Make]:
    """Return one maker for each of ``count`` rows.

    Args:
        count: number of rows.
        create_env_fn: a maker or an env for all rows, or a list of one for each.

    Raises:
        ArgumentCountError: a list of another length.
        ArgumentTypeError: something that makes no env, alone or in the list.
    """
    if isinstance(create_env_fn, EnvBase):
        return [Copies(create_env_fn)] * count
    if callable(create_env_fn):
        return [create_env_fn] * count
    is_one = isinstance(create_env_fn, str) or not isinstance(create_env_fn, Iterable)
    entries: list[Any] = [create_env_fn] if is_one else list(create_env_fn)
    for one in entries:
        if not callable(one):
            verb = "is" if one is create_env_fn else "holds"
            raise ArgumentTypeError(
                f"create_env_fn {verb} {one!r}, of type {type(one).__name__}, but must make an env. "
                "Pass a callable that returns one, e.g. lambda: GymEnv('CartPole-v1'), an env "
                "instance, or a list of one for each sub-env."
            )
    if len(entries) != count:
        raise ArgumentCountError(
            f"create_env_fn has {len(entries)} entries for {count} sub-envs. "
            "Pass one callable for all of them, or one for each."
        )
    copies = {id(env): Copies(env) for env in entries if isinstance(env, EnvBase)}
    return [copies[id(one)] if isinstance(one, EnvBase) else one for one in entries]


def as_kwargs(count: int, kwargs: Any, name: str) -> list[dict[str, Any]]:
    """Return one dict of keywords for each of ``count`` rows; a dict for all is copied deeply.

    Args:
        count: number of rows.
        kwargs: a dict for all rows, a list of one for each, or None.
        name: of the argument, for messages.

    Raises:
        ArgumentCountError: a list of another length.
        ArgumentTypeError: neither a dict nor a list of dicts.
    """
    if kwargs is None:
        kwargs = {}
    if isinstance(kwargs, Mapping):
        return [copy.deepcopy(dict(kwargs)) for _ in range(count)]
    return as_own_kwargs(count, kwargs, name, cure="Pass one dict for all of them, or")


def as_own_kwargs(
    count: int, kwargs: Any, name: str, *, cure: str = "Pass"
) -> list[dict[str, Any]]:
    """Return the dicts of keywords of ``count`` rows from a list of as many.

    Raises:
        ArgumentCountError: a list of another length.
        ArgumentTypeError: something else than a list of dicts.
    """
    example = f"{cure} a list of one dict for each: {name}=[{{...}}, {{...}}]."
    if isinstance(kwargs, (str, bytes, Mapping)) or not isinstance(kwargs, Sequence):
        raise ArgumentTypeError(
            f"{name} is {kwargs!r}, of type {type(kwargs).__name__}, but must hold keywords of "
            f"{count} sub-envs. {example}"
        )
    if len(kwargs) != count:
        raise ArgumentCountError(
            f"{name} has {len(kwargs)} entries for {count} sub-envs. {cure} one dict for each."
        )
    for keywords in kwargs:
        if not isinstance(keywords, Mapping):
            raise ArgumentTypeError(
                f"{name} holds {keywords!r}, of type {type(keywords).__name__}, but keywords are given as a dict. "
                f"{example}"
            )
    return [dict(keywords) for keywords in kwargs]


def tasks_of(makers: Sequence[Make], kwargs: Sequence[dict[str, Any]]) -> list[int]:
    """Number the task of each row, in the order in which they first appear.

    Keywords that cannot be compared count as different: such rows are described one by one.
    """
    firsts: list[tuple[Make, dict[str, Any]]] = []
    tasks = []
    for maker, keywords in zip(makers, kwargs, strict=True):
        alike = (
            task
            for task, (first, other) in enumerate(firsts)
            if maker is first and equal(keywords, other)
        )
        task = next(alike, len(firsts))
        if task == len(firsts):
            firsts.append((maker, keywords))
        tasks.append(task)
    return tasks


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Check whether keywords are known to be equal."""
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
                f"create_env_kwargs {sorted(kwargs)} were given, but create_env_fn is an env of type "
                f"{type(self.env).__name__}, which is built already. Pass its class or a function."
            )
        return copy.deepcopy(self.env)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickled = by_value.dumps(self.env)
        except Exception as error:
            raise ArgumentError(
                f"the env instance, of type {type(self.env).__name__}, cannot be pickled ({error}) and so "
                "cannot be sent to workers. Pass a function that builds it, "
                "`lambda: env_cls(...)`, or an `EnvCreator`."
            ) from error
        return _unpickled, (pickled,)


def _unpickled(env: bytes) -> Copies:
    return Copies(pickle.loads(env))


def require_known(
    makers: Iterable[Callable[..., Any]], kwargs: Iterable[Mapping[str, Any]]
) -> None:
    """Check the keywords that each maker will be called with; equal ones are looked at once.

    A class whose constructor hands keywords on to a library may say which are known, by a class method
    ``require_keywords(*args, **kwargs)`` beside its ``__init__``, with the arguments of that.

    Raises:
        OptionError: (a TypeError) a keyword is unknown; the message names the nearest that is known.
    """
    seen = set()
    for maker, own in zip(makers, kwargs, strict=True):
        if (which := (id(maker), tuple(own))) not in seen:
            seen.add(which)
            _require_known(maker, own)


def _require_known(maker: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    args: tuple[Any, ...] = ()
    passed = dict(keywords)
    if isinstance(maker, partial):
        maker, args, passed = maker.func, maker.args, {**maker.keywords, **passed}
    if not passed:
        return
    if inspect.isclass(maker) and issubclass(maker, EnvBase):
        owner = next(base for base in maker.__mro__ if "__init__" in vars(base))
        if "require_keywords" in vars(owner):
            maker.require_keywords(*args, **passed)  # type: ignore[attr-defined]
            return
    elif not inspect.isfunction(maker):
        return
    parameters = inspect.signature(maker, follow_wrapped=False).parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        refuse_unknown(maker.__name__, passed, list(parameters))
